"""Two processes (gloo) train what one process trains: same gradient, same data, same metrics, one run folder."""

import csv
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_tools as tools

from distill.train.checkpoint import AtomicCheckpointIO
from distill.train.run import run

SCRIPT = """
import sys
import pytest
import train_tools as tools
from distill.train.run import run

tools.in_memory(pytest.MonkeyPatch())
run(tools.config(sys.argv[1], devices=2, batch_size=1, strategy="ddp", optim={"clip": 0.0}))
"""


def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path, monkeypatch):
    tools.in_memory(monkeypatch)
    run(tools.config(tmp_path / "one", batch_size=2, optim={"clip": 0.0}))

    here = Path(__file__).parent
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port()), "WORLD_SIZE": "2"}
    shared["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "two")],
            env={**shared, "LOCAL_RANK": str(rank), "RANK": str(rank), "NODE_RANK": "0"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    except subprocess.TimeoutExpired:
        errors = ["one process waited for the other"]
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], errors

    states, logs = [], []
    for name in ("one", "two"):
        index = json.loads((tmp_path / name / "checkpoints" / "index.json").read_text())
        states.append(
            AtomicCheckpointIO().load_checkpoint(tmp_path / name / "checkpoints" / index["last"])["state_dict"]
        )
        with (tmp_path / name / "logs" / "metrics.csv").open() as file:
            logs.append(list(csv.DictReader(file)))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-5)
    assert len(logs[0]) == len(logs[1]) == 6
    for one, two in zip(*logs, strict=True):
        for key in ("train/loss", "train/supervised_tokens", "optim/grad_norm", "train/acc_0", "val/loss", "val/tau"):
            assert (one[key] == "") == (two[key] == "")
            if one[key]:
                assert float(two[key]) == pytest.approx(float(one[key]), rel=1e-3, abs=1e-6), key
