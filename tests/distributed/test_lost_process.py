"""A process that dies or hangs: the others end within the stated time. One that prepares is waited for, by file."""

import os
import signal
import time
from functools import partial

import processes
import pytest

TIMEOUT = 6.0
SLACK = 6.0
"""For a busy machine: noticing, unwinding, exiting."""


def halt(rank, *, how, mark):
    """In the third step, process 1 stops for good, noting when."""
    from distill.train.module import DraftModule

    plain = DraftModule.configure_gradient_clipping

    def clip(self, *args, **kwargs):
        if self.trainer.global_step == 2:
            mark.write_text("now")
            os.kill(os.getpid(), how)
        plain(self, *args, **kwargs)

    if rank == 1:
        DraftModule.configure_gradient_clipping = clip


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, within", [(signal.SIGKILL, SLACK), (signal.SIGSTOP, TIMEOUT + SLACK)], ids=["killed", "hangs"]
)
def test_the_other_ends_within_the_stated_time(tmp_path, how, within):
    options = {"batch_size": 1, "timeout_s": TIMEOUT}
    mark = tmp_path / "mark"
    group = processes.Group(
        processes.train, str(tmp_path / "run"), options, partial(halt, how=how, mark=mark), world=2, folder=tmp_path
    )
    survivor, lost = group.processes
    survivor.join(120)
    waited = time.time() - mark.stat().st_mtime
    lost.kill()  # also what is stopped
    lost.join()
    assert survivor.exitcode == processes.USER_ERROR, group.said
    assert waited < within
    assert "process 0 must reach the other 1, got: " in group.said[0]
    assert f"trainer.timeout_s={TIMEOUT:g} s" in group.said[0]
    assert not (tmp_path / "run" / ".first.json").exists()


@pytest.mark.slow
def test_sigterm_ends_at_once_and_is_resumed(tmp_path):
    """Both processes get it, as from torchrun, srun or a scheduler; no collective is in the way of the end."""
    options = {"batch_size": 1, "timeout_s": 60, "checkpoint_every": 1}
    group = processes.Group(
        processes.train, str(tmp_path / "run"), options, partial(asked, at=3), world=2, folder=tmp_path / "1"
    )
    assert group.join(60) == [128 + signal.SIGTERM] * 2, group.said
    assert "ended by SIGTERM; the same command with the same run_dir resumes" in group.said[0]
    processes.together(processes.train, str(tmp_path / "run"), options, world=2, folder=tmp_path / "2")
    assert [row["step"] for row in processes.metrics(tmp_path / "run")] == ["1", "2", "3", "4", "5", "6"]


def asked(rank, *, at):
    """Every process is sent SIGTERM in step ``at``."""
    from distill.train.module import DraftModule

    plain = DraftModule.configure_gradient_clipping

    def clip(self, *args, **kwargs):
        if self.trainer.global_step == at - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        plain(self, *args, **kwargs)

    DraftModule.configure_gradient_clipping = clip


def slow_data(rank, *, seconds):
    from distill.train import run

    plain = run.prepare_together

    def prepare(*args, **options):
        time.sleep(seconds)
        return plain(*args, **options)

    run.prepare_together = prepare


@pytest.mark.slow
def test_preparing_may_take_longer_than_the_timeout(tmp_path):
    options = {"batch_size": 1, "timeout_s": TIMEOUT, "max_steps": 2}
    prepare = partial(slow_data, seconds=TIMEOUT + 3)
    processes.together(processes.train, str(tmp_path / "run"), options, prepare, world=2, folder=tmp_path)


def no_data(rank):
    from distill.errors import UserError
    from distill.train import run

    def prepare(*args, **options):
        time.sleep(8)  # until the other one watches, on a busy machine
        raise UserError("there are no data")

    run.prepare_together = prepare


@pytest.mark.slow
def test_a_refusal_of_the_first_reaches_the_others(tmp_path):
    options = {"batch_size": 1, "timeout_s": 60}
    group = processes.Group(processes.train, str(tmp_path / "run"), options, no_data, world=2, folder=tmp_path / "log")
    begin = time.monotonic()
    assert group.join() == [processes.USER_ERROR] * 2, group.said
    assert time.monotonic() - begin < 40
    assert "there are no data" in group.said[0]
    assert "must get to 'training', got its end" in group.said[1]
    assert not (tmp_path / "run").exists()
