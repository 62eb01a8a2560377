"""Two processes on one folder: the second is refused by name or waits, wherever the first stands; nothing doubles."""

import os
import signal
import time
from pathlib import Path

import data_tools
import feature_tools as features
import pytest
import torch
import train_tools as tools
from crash_tools import contents, meet_everywhere, names, refusal
from tracer import forked

from distill.data import DataConfig, prepare
from distill.errors import UserError
from distill.export import load_drafter, save_drafter
from distill.files import Lock, write_atomic
from distill.train.run import run

CONFIG = DataConfig(n_conversations=4, shard_size=2, slots=4, min_answer_tokens=12)
DRAFTER = tools.drafter()


def write_data(folder):
    make = data_tools.decoders_of(data_tools.babble)
    prepare(CONFIG, data_tools.target(), folder / "data", lambda _: None, make_decoder=make, clock=lambda: 0.0)


def write_features(folder):
    features.stored(folder / "features", shard_bytes=60_000)


def write_export(folder):
    save_drafter(DRAFTER, folder / "out", provenance={}, overwrite=True)


def whole(tmp_path, action):
    folder = tmp_path / "whole"
    folder.mkdir()
    action(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("action", [write_data, write_features, write_export])
def test_a_second_process_at_any_moment_is_refused_by_name(tmp_path, action):
    """The first stands still at each of its file-system calls in turn while the second tries the same."""
    reference = contents(whole(tmp_path, action))

    def check(folder):
        after = contents(folder)
        assert after.keys() == reference.keys()
        assert all(after[name] == reference[name] for name in after if name.endswith(".safetensors"))

    said = meet_everywhere(tmp_path, action, check, at_most=16)
    refused = [bool(text) for text in said]
    assert sum(refused) >= 10
    first, last = refused.index(True), len(refused) - refused[::-1].index(True)
    assert all(refused[first:last]), "refused from the moment the first has it to the moment it lets go"


@pytest.mark.slow
def test_a_run_is_trained_by_one_process(tmp_path, monkeypatch):
    tools.in_memory(monkeypatch)

    def train(folder):
        run(tools.config(folder / "run", max_steps=2, val_every=2))

    reference = whole(tmp_path, train)

    def check(folder):
        assert names(folder) == names(reference)
        weights = Path("run", "export", "model.safetensors")
        assert (folder / weights).read_bytes() == (reference / weights).read_bytes()

    said = meet_everywhere(tmp_path, train, check, at_most=8)
    assert sum(map(bool, said)) >= 5


def test_the_lock_of_a_dead_process_blocks_nobody(tmp_path):
    def hold():
        Lock(tmp_path / ".lock", what="folder", instead="another")
        time.sleep(60)

    child = forked(hold)
    while not (tmp_path / ".lock").exists() or not (tmp_path / ".lock").read_text():
        time.sleep(0.001)

    def take():
        Lock(tmp_path / ".lock", what="folder", instead="another").release()

    assert f"process {child} on " in refusal(take, child)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / ".lock").exists()
    take()
    assert not list(tmp_path.iterdir())


def test_two_writers_of_one_file_take_turns(tmp_path):
    path, texts = tmp_path / "a.txt", [str(i) * (20_000 + 7 * i) for i in range(3)]
    children = [forked(lambda text=text: [write_atomic(path, text) for _ in range(40)]) for text in texts]
    seen = set()
    while children:
        if path.exists():
            seen.add(path.read_text())
        children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
    assert path.read_text() in texts
    assert seen <= set(texts), "half of one, or of both"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_an_export_keeps_being_readable_while_it_is_replaced(tmp_path):
    folder = save_drafter(DRAFTER, tmp_path / "out", provenance={})
    child = forked(lambda: [save_drafter(DRAFTER, folder, provenance={}, overwrite=True) for _ in range(10)])
    found = 0
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert folder.is_dir(), "there is always one"
        found += 1
    assert found > 10
    assert torch.equal(load_drafter(folder, tools.target()).fc.weight, DRAFTER.fc.weight)


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("distill.files.fcntl.flock", refused)
    with pytest.warns(UserWarning, match="a file system without locks .*one process at a time"):
        Lock(tmp_path / ".lock", what="folder", instead="another").release()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.* must be writable, got Not a directory"):
        Lock(tmp_path / "file" / "data" / ".lock", what="folder", instead="another")
