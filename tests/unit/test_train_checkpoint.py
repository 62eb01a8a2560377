"""Checkpoints are whole or absent, hold no code, and the last good one is found whatever happens."""

import errno
import json
import logging
from pathlib import Path

import pytest
import torch
import train_tools as tools

from distill.errors import UserError
from distill.train.checkpoint import AtomicCheckpointIO, Checkpoints, find_best, find_last
from distill.train.run import export_checkpoint, run
from distill.train.schedule import Plan


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    tools.in_memory(monkeypatch)


class FullDisk:
    """A file that takes a few bytes and then has no room."""

    def __init__(self, file):
        self.file = file

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *args):
        return self.file.__exit__(*args)

    def write(self, data):
        if self.file.tell() + len(data) > 64:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)


def fill_disk(monkeypatch, suffix):
    opened = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda self, mode="r", *a, **k: (
            FullDisk(opened(self, mode, *a, **k))
            if "w" in mode and suffix in self.name
            else opened(self, mode, *a, **k)
        ),
    )


def test_round_trip_and_no_leftovers(tmp_path):
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"x": torch.arange(3), "n": {"k": [1, 2.5, None, "s"]}}, path)
    read = AtomicCheckpointIO().load_checkpoint(path)
    assert torch.equal(read["x"], torch.arange(3))
    assert read["n"] == {"k": [1, 2.5, None, "s"]}
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


def test_full_disk_keeps_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"x": 1}, path)
    before = path.read_bytes()
    fill_disk(monkeypatch, ".tmp")
    with pytest.raises(UserError, match=r"checkpoint .*a.ckpt must be writable, got .*(No space left|disk full)"):
        AtomicCheckpointIO().save_checkpoint({"x": torch.zeros(1000)}, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


class Bomb:
    exploded = False

    def __reduce__(self):
        return (setattr, (Bomb, "exploded", True))


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_foreign_and_damaged_files_are_refused(tmp_path, content):
    path = tmp_path / "a.ckpt"
    if content is None:
        torch.save({"x": Bomb()}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(UserError, match="must be a whole checkpoint of this program"):
        AtomicCheckpointIO().load_checkpoint(path)
    assert not Bomb.exploded


def test_truncated_at_any_length_is_refused_or_whole(tmp_path):
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"x": torch.arange(100)}, path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError):
            AtomicCheckpointIO().load_checkpoint(path)


def test_the_newest_one_that_loads_is_found_and_damage_set_aside(tmp_path):
    for step in (5, 10, 15):
        AtomicCheckpointIO().save_checkpoint({"step": step}, tmp_path / f"step-{step:08d}.ckpt")
    (tmp_path / "step-00000015.ckpt").write_bytes(b"torn")
    said = []
    found = find_last(tmp_path, say=said.append)
    assert found.step == 10
    assert "step-00000015.ckpt" in said[0]
    assert "trying the one before" in said[0]
    assert not (tmp_path / "step-00000015.ckpt").exists()  # or it would be counted among the newest to keep
    assert find_last(tmp_path / "nowhere", say=said.append) is None


class Trainer:
    is_global_zero = True

    def __init__(self, callback):
        self.callback = callback

    def save_checkpoint(self, path):
        AtomicCheckpointIO().save_checkpoint({"callbacks": {"ours": self.callback.state_dict()}}, path)


class Module:
    def __init__(self):
        self.validated, self.metrics = {}, {}


def test_best_and_last_are_kept(tmp_path):
    plan = Plan(max_steps=10, val_every=2, checkpoint_every=1, decode_every=99, seconds={})
    callback, module = Checkpoints(tmp_path, plan, keep=2), Module()
    for step, tau in [(1, None), (2, 1.5), (3, None), (4, 2.0), (5, None), (6, 1.9), (7, None), (8, 1.8)]:
        if tau:
            module.validated[step] = module.metrics["val/tau"] = tau
        callback.after_step(Trainer(callback), module, step)
        index = json.loads((tmp_path / "index.json").read_text())
        assert (tmp_path / index["best"]["file"]).is_file()
        assert (tmp_path / index["last"]).is_file()
    assert sorted(int(p.stem[5:]) for p in tmp_path.glob("*.ckpt")) == [4, 7, 8]
    assert (find_best(tmp_path).step, find_best(tmp_path).metrics) == (4, {"val/tau": 2.0})
    again = Checkpoints(tmp_path, plan, keep=2)
    again.load_state_dict(callback.state_dict())
    again.after_step(Trainer(again), module, 9)
    assert find_best(tmp_path).step == 4


def test_a_new_best_is_kept_between_two_checkpoints(tmp_path):
    plan = Plan(max_steps=100, val_every=2, checkpoint_every=50, decode_every=99, seconds={})
    callback, module = Checkpoints(tmp_path, plan, keep=1), Module()
    for step, tau in [(2, 1.5), (4, 1.2), (6, 1.8)]:
        module.validated[step] = tau
        callback.after_step(Trainer(callback), module, step)
    assert [int(p.stem[5:]) for p in tmp_path.glob("*.ckpt")] == [6]


def test_without_validation_the_newest_is_the_best(tmp_path):
    plan = Plan(max_steps=10, val_every=99, checkpoint_every=1, decode_every=99, seconds={})
    callback = Checkpoints(tmp_path, plan, keep=1)
    for step in (1, 2, 3):
        callback.after_step(Trainer(callback), Module(), step)
    assert find_best(tmp_path).step == 3


@pytest.mark.parametrize("index", [None, "{", '{"last": "step-00000002.ckpt", "best": null}'])
def test_the_best_is_known_without_the_index(tmp_path, index):
    """A kill between the checkpoint and the index leaves an old index or none."""
    plan = Plan(max_steps=10, val_every=2, checkpoint_every=1, decode_every=99, seconds={})
    callback, module = Checkpoints(tmp_path, plan, keep=1), Module()
    for step, tau in [(2, 1.5), (4, 2.0), (6, 1.9)]:
        module.validated[step] = module.metrics["val/tau"] = tau
        callback.after_step(Trainer(callback), module, step)
    (tmp_path / "index.json").unlink()
    if index is not None:
        (tmp_path / "index.json").write_text(index)
    assert (find_best(tmp_path).step, find_best(tmp_path).metrics) == (4, {"val/tau": 2.0})


def test_no_checkpoint_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="must hold checkpoints, got none"):
        find_best(tmp_path)


def test_an_unfinished_run_can_be_exported(tmp_path, monkeypatch):
    class StopError(Exception):
        pass

    def stop(*_):
        raise StopError

    monkeypatch.setattr("distill.train.run.export_best", stop)
    with pytest.raises(StopError):
        run(tools.config(tmp_path / "run"))
    out = export_checkpoint(tmp_path / "run", tmp_path / "out")
    from distill.export import load_drafter

    best = find_best(tmp_path / "run" / "checkpoints")
    weights = AtomicCheckpointIO().load_checkpoint(best.path)["state_dict"]
    for name, value in load_drafter(out, tools.target()).state_dict().items():
        assert torch.equal(value, weights[f"drafter.{name}"])
