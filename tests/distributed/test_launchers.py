"""The ways processes are started: torchrun for real, SLURM by its variables, and Lightning's own children."""

import json
import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).resolve().parents[2]

SMALL = [
    *(
        "experiment=tiny-eagle3",
        "data.n_conversations=12",
        "data.validation=0.2",
        "data.slots=8",
        "trainer.max_steps=4",
    ),
    *("trainer.log_every=1", "trainer.timeout_s=60", "eval.n=1", "eval.max_new_tokens=4"),
]

KEYS = ("train/loss", "train/supervised_tokens", "optim/grad_norm", "val/tau")


def command_line(rank, world, arguments):
    from distill.train.main import main

    assert main(arguments) == 0


def launch(*command, folder):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False
    )


def assert_same_figures(one, two):
    rows = [processes.metrics(path) for path in (one, two)]
    assert len(rows[0]) == len(rows[1]) == 4
    for a, b in zip(*rows, strict=True):
        for key in KEYS:
            assert (a[key] == "") == (b[key] == "")
            if a[key]:
                assert float(b[key]) == pytest.approx(float(a[key]), rel=1e-4), key


@pytest.mark.slow
def test_torchrun(tmp_path):
    """Two processes from the command line, in a folder named by run_dir; then the same command is answered at once."""
    arguments = [*SMALL, "trainer.batch_size=1", "run_dir=two"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(ROOT / "train.py")]
    done = launch(*torchrun, *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    provenance = json.loads((tmp_path / "two" / "export" / "provenance.json").read_text())
    assert provenance["config"]["trainer"]["devices"] == 2
    one = str(tmp_path / "one")
    processes.together(
        command_line, [*SMALL, "trainer.batch_size=2", f"run_dir={one}"], world=1, folder=tmp_path / "log"
    )
    assert_same_figures(tmp_path / "one", tmp_path / "two")


def as_slurm(rank):
    os.environ.update(SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2", SLURM_NNODES="1", SLURM_JOB_ID="17")
    os.environ.update(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_NODEID="0", SLURM_STEP_ID="0")
    os.environ["SLURM_JOB_NAME"] = "train"
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
        del os.environ[name]


def slurm_train(rank, world, run_dir, options):
    as_slurm(rank)
    processes.train(rank, 1, run_dir, options)  # nothing in the options speaks of two processes


@pytest.mark.slow
def test_slurm_by_its_variables(tmp_path):
    options = {"max_steps": 4, "timeout_s": 60}
    run = str(tmp_path / "one")
    processes.together(processes.train, run, {**options, "batch_size": 2}, world=1, folder=tmp_path / "1")
    run = str(tmp_path / "two")
    processes.together(slurm_train, run, {**options, "batch_size": 1}, world=2, folder=tmp_path / "2")
    assert json.loads((tmp_path / "two" / "provenance.json").read_text())["config"]["trainer"]["devices"] == 2
    assert_same_figures(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_the_first_process_starts_the_second_once_per_job_of_a_sweep(tmp_path):
    arguments = [*SMALL, "trainer.devices=2", "trainer.batch_size=1", "trainer.max_steps=2", "run_dir=sweep"]
    done = launch(str(ROOT / "train.py"), "-m", *arguments, "seed=0,1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = sorted((tmp_path / "sweep").glob("*/export/config.json"))
    assert len(runs) == 2, done.stderr
