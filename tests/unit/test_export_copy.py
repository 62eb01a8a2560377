"""draftsmith export: a checked copy, complete or not at all."""

import pytest
import torch

from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.errors import UserError
from distill.export import copy_export, load_drafter, save_drafter
from distill.target.tiny import tiny_target
from distill.vocab import choose_vocab
from serve_eval import cli, export


@pytest.fixture
def saved(tmp_path):
    target = tiny_target("llama", tokenizer=False)
    vocab, _ = choose_vocab(torch.arange(target.info.vocab_size), 16)
    drafter = Eagle3(Eagle3Config(draft_vocab_size=16), target, vocab)
    return target, drafter, save_drafter(drafter, tmp_path / "run" / "export", provenance={"commit": "x"})


def test_the_copy_loads_and_is_bit_identical(saved, tmp_path):
    target, drafter, folder = saved
    assert cli.main(["export", f"checkpoint={folder.parent}", f"out={tmp_path / 'mine'}"]) == 0
    copied = load_drafter(tmp_path / "mine", target)
    for name, value in drafter.state_dict().items():
        assert torch.equal(copied.state_dict()[name], value)
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == sorted(p.name for p in folder.iterdir())


def test_a_taken_folder_is_left_alone(saved, tmp_path):
    _, _, folder = saved
    out = tmp_path / "taken"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="must not exist yet"):
            copy_export(folder, out, overwrite=overwrite)
    assert (out / "thesis.txt").read_text() == "mine"


def test_overwrite_replaces_an_export(saved, tmp_path):
    _, _, folder = saved
    out = copy_export(folder, tmp_path / "out")
    (out / "README.md").write_text("old")
    copy_export(folder, out, overwrite=True)
    assert (out / "README.md").read_text() == (folder / "README.md").read_text()


def test_a_damaged_export_is_not_copied(saved, tmp_path):
    _, _, folder = saved
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match="damaged"):
        copy_export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_named(capsys):
    assert cli.main(["export"]) == 2
    assert "checkpoint and out must both be given" in capsys.readouterr().err
    with pytest.raises(UserError, match="both be given"):
        export.run(export.Config(checkpoint="x"))
