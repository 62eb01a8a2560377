"""Processes for the tests: forked from one server that has everything imported, joined by gloo, killed for real."""

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["processes", "train_tools", "distill.train.run"])

USER_ERROR = 2
"""Exit code of a refusal, as on the command line."""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _enter(function, rank, world, port, log, args):
    """In the new process: the environment of a rank, output to a file, refusals as exit code 2."""
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world))
        os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), NODE_RANK="0")
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)

    import torch

    from distill.errors import UserError

    torch.set_num_threads(1)
    code = 0
    try:
        function(rank, world, *args)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        code = USER_ERROR
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001 - told and turned into an exit code
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # destructors of a broken process group may wait for the dead


class Group:
    """``world`` processes that call ``function(rank, world, *args)``; what they print is in ``said[rank]``."""

    def __init__(self, function, *args, world, folder):
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.logs = [folder / f"rank-{rank}.log" for rank in range(world)]
        self.processes = [
            FORKS.Process(target=_enter, args=(function, rank, world, port, str(log), args), daemon=True)
            for rank, log in enumerate(self.logs)
        ]
        for process in self.processes:
            process.start()

    def join(self, timeout=120.0):
        """Return the exit codes (negative: the signal); nobody is left behind."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [process for process in self.processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        assert not late, f"still running after {timeout} s: {self.said}"
        return [process.exitcode for process in self.processes]

    @property
    def said(self):
        return [log.read_text() if log.is_file() else "" for log in self.logs]


def together(function, *args, world, folder, timeout=120.0):
    """Run to the end; every process has to succeed."""
    group = Group(function, *args, world=world, folder=folder)
    assert group.join(timeout) == [0] * world, "\n".join(group.said)
    return group


def die():
    """As ``kill -9``: no handler, no clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)


def train(rank, world, run_dir, options, prepare=None):
    """A run of the tiny configuration, as one of ``world`` processes; ``prepare()`` changes things beforehand."""
    import logging

    import pytest
    import train_tools as tools

    from distill.train.run import run

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    tools.in_memory(pytest.MonkeyPatch())
    if prepare is not None:
        prepare(rank)
    devices = {"devices": world} if world > 1 else {}
    run(tools.config(run_dir, **devices, **options))


def checkpoint(folder):
    from distill.train.checkpoint import AtomicCheckpointIO

    return AtomicCheckpointIO().load_checkpoint(max((Path(folder) / "checkpoints").glob("step-*.ckpt")))


def metrics(folder):
    """Rows of ``metrics.csv`` without what a clock decides."""
    import csv

    with (Path(folder) / "logs" / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if not k.startswith("speed/")} for row in csv.DictReader(file)]
