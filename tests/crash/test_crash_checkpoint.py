"""Checkpoints and whole training runs survive kill -9, a full disk and a power cut."""

import csv
import warnings
from pathlib import Path

import pytest
import torch
import train_tools as tools
from crash_tools import Disk, check_order, contents, crash_everywhere, fill_everywhere, names, untimed, watch

from distill.export import load_drafter
from distill.train.checkpoint import AtomicCheckpointIO, Checkpoints, find_best, find_last, settle
from distill.train.run import run
from distill.train.schedule import Plan
from distill.train.tracking import CsvTracker

STEPS = 4
TAU = {2: 2.0, 3: 1.9}
"""Validated steps; the best one is not among the newest at the end."""


class Trainer:
    """As much of a Trainer as a checkpoint needs: the state is a function of the step."""

    is_global_zero = True

    def __init__(self, callback):
        self.callback, self.step = callback, 0

    def save_checkpoint(self, path):
        state = {"weights": torch.full((300,), self.step), "callbacks": {"ours": self.callback.state_dict()}}
        AtomicCheckpointIO().save_checkpoint(state, path)


class Module:
    def __init__(self):
        self.validated, self.metrics = {}, {}


def checkpoints(folder):
    """Train as far as the files are concerned: from the newest checkpoint on, as ``run`` does."""
    folder = folder / "checkpoints"
    plan = Plan(max_steps=STEPS, val_every=1, checkpoint_every=1, decode_every=99, seconds={})
    callback, module, last = Checkpoints(folder, plan, keep=1), Module(), find_last(folder, say=lambda _: None)
    if last is not None:
        settle(folder, best=last.best, keep=1)
        callback.load_state_dict(AtomicCheckpointIO().load_checkpoint(last.path)["callbacks"]["ours"])
    trainer = Trainer(callback)
    for trainer.step in range(1 + (last.step if last else 0), STEPS + 1):
        if trainer.step in TAU:
            module.validated[trainer.step] = module.metrics["val/tau"] = TAU[trainer.step]
        callback.after_step(trainer, module, trainer.step)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    checkpoints(folder)
    assert names(folder / "checkpoints") == {"index.json", "step-00000002.ckpt", "step-00000004.ckpt"}
    return folder


def readable(folder):
    """The newest step there is; the files of the newest and of the best are whole."""
    last = find_last(folder / "checkpoints", say=pytest.fail)  # it speaks when a damaged file was set aside
    if last is None:
        return 0
    state = AtomicCheckpointIO().load_checkpoint(last.path)
    assert torch.equal(state["weights"], torch.full((300,), last.step))
    best = find_best(folder / "checkpoints")
    reached = [step for step in TAU if step <= last.step]
    assert best.step == (max(reached, key=TAU.get) if reached else last.step)
    assert torch.equal(AtomicCheckpointIO().load_checkpoint(best.path)["weights"], torch.full((300,), best.step))
    return last.step


def goes_on(folder, whole):
    checkpoints(folder)
    assert contents(folder) == contents(whole)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "tear"])
def test_killed_anywhere_the_last_good_one_is_there(tmp_path, whole, how):
    reached = []

    def check(folder):
        reached.append(readable(folder))
        goes_on(folder, whole)

    count = crash_everywhere(tmp_path, checkpoints, check, how=how)
    assert count >= (20 if how == "kill" else 4)
    assert reached == sorted(reached), "a later kill never finds less"
    assert set(reached) == set(range(STEPS + 1))


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_keeps_the_last_good_one(disk, whole):
    def check(folder, said):
        assert not [name for name in names(folder) if name.endswith(".tmp")]
        readable(folder)
        goes_on(folder, whole)

    assert fill_everywhere(disk, checkpoints, check) >= 4


def test_nothing_is_deleted_before_the_next_one_is_on_the_disk(tmp_path):
    check_order(watch(tmp_path, checkpoints).calls, tmp_path / "now")


def test_a_torn_row_of_the_log_is_not_taken_for_another(tmp_path):
    def log(steps, from_step):
        tracker = CsvTracker(tmp_path, from_step=from_step)
        for step in steps:
            tracker.log_metrics({"loss": step / 8, "tau": 1.5}, step)

    log(range(1, 13), 0)
    whole = (tmp_path / "metrics.csv").read_bytes()
    last = whole.rindex(b"\n12,") + 1
    for length in range(last, len(whole)):
        (tmp_path / "metrics.csv").write_bytes(whole[:length])
        log([12], 11)
        assert (tmp_path / "metrics.csv").read_bytes() == whole, f"torn after {length - last} bytes of the row"


# --------------------------------------------------------------------------------------------- whole runs
def train(folder):
    run(tools.config(folder / "run", max_steps=3, val_every=2, checkpoint_every=1, decode_every=2, keep=1))


def logged(folder):
    with (folder / "run" / "logs" / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if not k.startswith("speed/")} for row in csv.DictReader(file)]


def outcome(folder):
    """Everything a run leaves that must not depend on interruptions."""
    where = folder / "run"
    state = AtomicCheckpointIO().load_checkpoint(find_last(where / "checkpoints", say=pytest.fail).path)
    index = untimed(where / "checkpoints" / "index.json")
    return {
        "names": names(where),
        "weights": (where / "export" / "model.safetensors").read_bytes(),
        "flags": (where / "export" / "config.json").read_bytes(),
        "measured": untimed(where / "export" / "provenance.json")["measured"],
        "optimiser": repr([state[part] for part in ("optimizer_states", "lr_schedulers", "global_step")]),
        "index": index,
        "metrics": logged(folder),
        "samples": (where / "logs" / "samples.jsonl").read_text(),
        "plan": (where / "plan.json").read_bytes(),
        "vocab": (where / "vocab.json").read_bytes(),
    }


@pytest.fixture
def _in_memory(monkeypatch):
    tools.in_memory(monkeypatch)


@pytest.fixture
def whole_run(tmp_path_factory, _in_memory):
    folder = tmp_path_factory.mktemp("whole-run")
    train(folder)
    return outcome(folder)


def run_is_sound(folder, whole_run):
    """As after any kill: an export is whole or absent, going on gives what an undisturbed run gives."""
    if (folder / "run" / "export").exists():
        load_drafter(folder / "run", tools.target())
    train(folder)
    after = outcome(folder)
    for part, value in whole_run.items():
        assert after[part] == value, part


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "tear"])
def test_a_run_killed_anywhere_ends_as_if_it_had_not_been(tmp_path, whole_run, how):
    count = 20 if how == "kill" else 4
    assert count == crash_everywhere(
        tmp_path, train, lambda folder: run_is_sound(folder, whole_run), how=how, at_most=count
    )


@pytest.mark.slow
def test_a_run_on_a_full_disk_ends_with_a_sentence_and_goes_on_later(tmp_path, whole_run):
    def check(folder, said):
        assert not [name for name in names(folder) if Path(name).name.endswith((".tmp", ".lock", ".old"))]
        run_is_sound(folder, whole_run)

    def forgiving(folder):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="tracking with csv stopped")  # it says so and training goes on
            train(folder)

    fill_everywhere(Disk(tmp_path), forgiving, check, at_most=4)


@pytest.mark.slow
@pytest.mark.usefixtures("_in_memory")
def test_a_run_puts_things_on_the_disk_in_order(tmp_path):
    check_order(watch(tmp_path, train).calls, tmp_path / "now")
