"""An export appears whole, and one that is there is never lost: kill -9, full disk, power cut at every call."""

import json
from pathlib import Path

import pytest
import torch
from crash_tools import check_order, contents, crash_everywhere, fill_everywhere, names, watch

from distill import files
from distill.calibration import Calibration, Choices
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.errors import UserError
from distill.export import copy_export, load_drafter, save_calibration, save_drafter, update_card
from distill.target.tiny import tiny_target
from distill.vocab import DraftVocab

V, W = 64, 16
TARGET = tiny_target(vocab_size=V, hidden=16, layers=3, tokenizer=False)


def drafter(seed):
    torch.manual_seed(seed)
    config = Eagle3Config(ttt_steps=2, draft_vocab_size=W, intermediate_size=8)
    return Eagle3(config, TARGET, DraftVocab(torch.arange(W), V))


OLD, NEW = drafter(1), drafter(2)


def exported(folder):
    """Which of the two a whole export holds; None without one. Anything torn is refused by the loader."""
    if not (folder / "out").exists():
        return None
    loaded = load_drafter(folder / "out", TARGET).state_dict()
    (which,) = [d for d in (OLD, NEW) if all(torch.equal(loaded[k], v) for k, v in d.state_dict().items())]
    assert json.loads((folder / "out" / "provenance.json").read_text())["data_hash"] == which.fc.weight.sum().item()
    return which


def save(which):
    record = {"data_hash": which.fc.weight.sum().item()}
    return lambda folder: save_drafter(which, folder / "out", provenance=record, card={"tau": 1.5}, overwrite=True)


def copy(folder):
    copy_export(folder / "source", folder / "out", overwrite=True)


def only_new(folder):
    if (folder / "source").exists():
        copy(folder)
    else:
        save(NEW)(folder)
    assert exported(folder) is NEW
    assert {name for name in names(folder) if "/" not in name} <= {"out", "source"}


def both(folder):
    save(NEW)(folder)
    (folder / "out").rename(folder / "source")
    save(OLD)(folder)


CASES = {
    "new": (save(NEW), lambda folder: None, None),
    "overwritten": (save(NEW), save(OLD), OLD),
    "copied": (copy, both, OLD),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "tear"])
@pytest.mark.parametrize("case", CASES)
def test_killed_anywhere_there_is_a_whole_export(tmp_path, case, how):
    action, before, there = CASES[case]
    found = set()

    def check(folder):
        found.add(exported(folder))
        only_new(folder)

    count = crash_everywhere(tmp_path, action, check, before=before, how=how, at_most=24)
    assert count >= (20 if how == "kill" else 4)
    assert found == ({there} if how == "tear" else {there, NEW})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_full_disk_is_one_sentence_and_harms_nothing(disk, case):
    action, before, there = CASES[case]

    def check(folder, said):
        assert exported(folder) is (there if said else NEW)
        assert not [name for name in names(folder) if Path(name).parts[0] not in ("out", "source")]
        only_new(folder)

    assert fill_everywhere(disk, action, check, before=before) >= 4


@pytest.mark.parametrize("case", CASES)
def test_nothing_counts_before_it_is_on_the_disk(tmp_path, case):
    action, before, _ = CASES[case]
    check_order(watch(tmp_path, action, before).calls, tmp_path / "now")


@pytest.mark.slow
def test_where_names_cannot_be_exchanged_the_old_one_is_put_back(tmp_path, monkeypatch):
    """Network file systems: between two renames there is a moment without an export, which the next writer ends."""
    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    found = set()

    def check(folder):
        found.add(exported(folder))
        (folder / "taken").mkdir()
        with pytest.raises(UserError, match="must not exist yet"):
            save_drafter(NEW, folder / "out", provenance={})  # refused, for the old one is back
        assert exported(folder) in (OLD, NEW)
        (folder / "taken").rmdir()
        only_new(folder)

    assert crash_everywhere(tmp_path, save(NEW), check, before=save(OLD)) >= 20
    assert found == {OLD, None, NEW}


def test_a_card_is_old_or_new(tmp_path):
    def update(folder):
        update_card(folder / "out", {"tau": 1.75})

    def check(folder):
        assert exported(folder) is OLD
        update(folder)
        assert "1.75" in (folder / "out" / "README.md").read_text()
        assert len(contents(folder)) == 4

    crash_everywhere(tmp_path, update, check, before=save(OLD))
    check_order(watch(tmp_path, update, save(OLD)).calls, tmp_path / "now")


def test_a_calibration_is_old_or_new(tmp_path):
    def measured(hits):
        choices = Choices(hits_DR=[[hits]], count_D=[9], scale_D=[1.0])
        return Calibration(greedy=choices, coupled=choices)

    def before(folder):
        save(OLD)(folder)
        save_calibration(folder / "out", measured(3))

    def measure(folder):
        save_calibration(folder / "out", measured(7))

    found = set()

    def hits(folder):
        return load_drafter(folder / "out", TARGET).calibration.greedy.hits_DR[0][0]

    def check(folder):
        found.add(hits(folder))
        measure(folder)
        assert hits(folder) == 7
        assert len(contents(folder)) == 5

    crash_everywhere(tmp_path, measure, check, before=before)
    assert found == {3, 7}
    check_order(watch(tmp_path, measure, before).calls, tmp_path / "now")
