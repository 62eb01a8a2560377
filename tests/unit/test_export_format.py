"""The checkpoint comes back bit for bit, and every single fault is refused with a sentence that names it."""

import errno
import json
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.errors import UserError
from distill.export import collect, load_drafter, resolve_checkpoint, save_drafter, update_card
from distill.export.files import sha256
from distill.export.format import flags_sha256
from distill.files import write_atomic
from distill.target.tiny import tiny_target
from distill.vocab import DraftVocab

V, W = 64, 10
KEPT = torch.tensor([0, 2, 3, 7, 11, 20, 21, 40, 55, 63])
TARGET = tiny_target(vocab_size=V, hidden=16, layers=3, tokenizer=False)


def make(target=TARGET, **flags):
    torch.manual_seed(1)
    config = Eagle3Config(**{"ttt_steps": 2, "draft_vocab_size": W, "intermediate_size": 8, **flags})
    return Eagle3(config, target, DraftVocab(KEPT, V))


@pytest.fixture
def folder(tmp_path):
    return save_drafter(
        make(), tmp_path / "export", provenance=collect(["train.py"], {"lr": 1}, "abc"), card={"tau": 1.75}
    )


def edit_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    # The digest is kept right: the checks behind it must hold by themselves.
    config["flags_sha256"] = flags_sha256(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, change):
    """Change tensors and keep the checksum right: the checks behind it must hold by themselves."""
    tensors = load_file(folder / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, lambda c: c.update(weights_sha256=sha256(folder / "model.safetensors")))


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True, "norm_before_residual": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_identical(tmp_path, flags, dtype):
    drafter = make(**flags).to(dtype)
    save_drafter(drafter, tmp_path / "export", provenance={})
    loaded = load_drafter(tmp_path / "export", TARGET)
    assert loaded.config == drafter.config
    before, after = drafter.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype
        assert torch.equal(value, after[name]), name
    assert torch.equal(loaded.vocab.target_ids, KEPT)
    assert not loaded.training
    assert load_drafter(tmp_path / "export", TARGET, dtype=torch.float64).fc.weight.dtype == torch.float64


def test_what_is_written(folder):
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "provenance.json",
    ]
    assert [p.name for p in folder.parent.iterdir()] == ["export"]
    config = json.loads((folder / "config.json").read_text())
    assert config["schema_version"] == 1
    assert (config["tap_convention"], config["taps"]) == ("entering", [0, 1, 2])
    assert config["target"]["fingerprint"] == TARGET.fingerprint
    assert config["target"]["hidden_size"] == 16
    flags = {"norm_before_residual", "fc_norm", "norm_output", "ttt_steps", "taps", "head_init"}
    assert flags <= set(config["config"])
    tensors = load_file(folder / "model.safetensors")
    assert {"d2t", "t2d", "lm_head.weight"} <= set(tensors)
    assert not [name for name in tensors if "embed" in name]
    offsets = [int(target) - draft for draft, target in enumerate(KEPT)]
    assert tensors["d2t"].tolist() == offsets
    assert tensors["t2d"].nonzero().flatten().tolist() == KEPT.tolist()
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nbase_model: tiny-llama\n")
    for part in ("| tau | 1.75 |", TARGET.fingerprint["weights"], "layers 0, 1, 2", "10 of the target's 64 tokens"):
        assert part in card
    provenance = json.loads((folder / "provenance.json").read_text())
    assert (provenance["data_hash"], provenance["config"], provenance["argv"]) == ("abc", {"lr": 1}, ["train.py"])


def test_the_card_takes_later_figures(folder):
    update_card(folder, {"speedup": 1.31, "tau": 1.8})
    card = (folder / "README.md").read_text()
    assert "| speedup | 1.31 |" in card
    assert "| tau | 1.8 |" in card
    assert "1.75" not in card
    load_drafter(folder, TARGET)


def test_an_export_is_replaced_only_on_request(folder):
    with pytest.raises(UserError, match="export folder must not exist yet"):
        save_drafter(make(), folder, provenance={})
    other = make(ttt_steps=5)
    save_drafter(other, folder, provenance={}, overwrite=True)
    assert load_drafter(folder, TARGET).config.ttt_steps == 5
    assert [p.name for p in folder.parent.iterdir()] == ["export"]


def test_a_folder_that_is_no_export_is_never_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="export folder must not exist yet"):
        save_drafter(make(), tmp_path, provenance={}, overwrite=True)
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize("name", ["config.json", "README.md", "provenance.json"])
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, name):
    write = Path.write_text

    def full(self, *args, **kwargs):
        if self.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"must be writable, got .*No space left"):
        save_drafter(make(), tmp_path / "export", provenance={})
    assert not list(tmp_path.iterdir())


def test_a_failed_overwrite_keeps_the_old_export(folder, monkeypatch):
    monkeypatch.setattr("distill.export.format.swap_folder", lambda *_: (_ for _ in ()).throw(OSError("gone")))
    with pytest.raises(UserError, match="must be writable"):
        save_drafter(make(ttt_steps=5), folder, provenance={}, overwrite=True)
    assert load_drafter(folder, TARGET).config.ttt_steps == 2
    assert [p.name for p in folder.parent.iterdir()] == ["export"]


# ------------------------------------------------------------------------------------------ one fault at a time
CONFIG_FAULTS = {
    "flag missing": (lambda c: c["config"].pop("norm_output"), r"flags of Eagle3Config .*without norm_output"),
    "flag unknown": (lambda c: c["config"].update(norm_outputs=True), r"norm_outputs.*Did you mean"),
    "flag of another type": (lambda c: c["config"].update(fc_norm="maybe"), r"config.fc_norm must be true or false"),
    "schema of the future": (lambda c: c.update(schema_version=2), r"schema_version must be 1, got 2"),
    "schema missing": (lambda c: c.pop("schema_version"), r"schema_version must be 1, got None"),
    "key missing": (lambda c: c.pop("taps"), r"keys .*without taps"),
    "key unknown": (lambda c: c.update(extra=1), r"keys .*with extra"),
    "unknown drafter": (lambda c: c.update(drafter="eagle33"), r"drafter must be one of .*Did you mean 'eagle3'"),
    "other taps": (lambda c: c.update(taps=[1, 2, 3]), r"taps must be \[0, 1, 2\] \(entering\), got \[1, 2, 3\]"),
    "other convention": (lambda c: c.update(tap_convention="leaving"), r"got \[0, 1, 2\] \(leaving\)"),
    "other vocabulary size": (lambda c: c.update(draft_vocab_size=9), r"int64\[9\].*got torch.int64\[10\]"),
    "other dtype": (lambda c: c.update(dtype="bfloat16"), r"must be bfloat16, got torch.float32"),
    "architecture flag": (lambda c: c["config"].update(fc_norm=True), r"tensors .*without fc_norm.0.weight"),
    "width": (lambda c: c["config"].update(intermediate_size=9), r"mlp.*must have shape \[(9, 16|16, 9)\], got"),
    "checksum": (lambda c: c.update(weights_sha256="0" * 64), r"sha256 .* instead of 0000000000000000"),
    "fingerprint": (
        lambda c: c["target"]["fingerprint"].update(weights="feedfeedfeedfeed"),
        rf"weights feedfeedfeedfeed\), got tiny-llama \(weights {TARGET.fingerprint['weights']}\)",
    ),
    "tokenizer": (
        lambda c: c["target"]["fingerprint"].update(tokenizer="1234"),
        r"trained for tiny-llama \(tokenizer 1234\), got tiny-llama \(tokenizer none\)",
    ),
    "chat template": (lambda c: c["target"]["fingerprint"].update(chat_template="1234"), r"\(chat_template 1234\)"),
    "target's shape": (lambda c: c["target"].update(hidden_size=32), r"\(hidden_size 32\), got .*\(hidden_size 16\)"),
    "target's fields": (lambda c: c["target"].pop("fingerprint"), r"target.* without fingerprint"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_config_faults(folder, fault):
    change, sentence = CONFIG_FAULTS[fault]
    edit_config(folder, change)
    with pytest.raises(UserError, match=sentence):
        load_drafter(folder, TARGET)


def _drop(name):
    return lambda t: {k: v for k, v in t.items() if k != name}


def _set(name, make_value):
    return lambda t: {**t, name: make_value(t)}


def _shift_t2d(t):
    return t["t2d"].roll(1)


TENSOR_FAULTS = {
    "absolute ids": (_set("d2t", lambda t: t["d2t"] + torch.arange(W)), r"d2t must hold offsets .*got the target ids"),
    "all zero": (_set("d2t", lambda t: torch.zeros_like(t["d2t"])), r"d2t and t2d must name the same tokens"),
    "stale t2d": (_set("t2d", _shift_t2d), r"d2t and t2d must name the same tokens"),
    "stale d2t": (_set("d2t", lambda t: torch.cat([t["d2t"][:-1], t["d2t"][-2:-1]])), r"must name the same tokens"),
    "beyond the vocabulary": (_set("d2t", lambda t: t["d2t"] + 1000), r"must name the same tokens"),
    "d2t missing": (_drop("d2t"), r"vocabulary maps .*without d2t"),
    "t2d missing": (_drop("t2d"), r"vocabulary maps .*without t2d"),
    "d2t of another type": (_set("d2t", lambda t: t["d2t"].int()), r"must be int64\[10\] .*got torch.int32"),
    "t2d too short": (_set("t2d", lambda t: t["t2d"][:-1].clone()), r"bool\[64\], got .*bool\[63\]"),
    "tensor missing": (_drop("norm.weight"), r"tensors .*without norm.weight"),
    "tensor too many": (_set("norm.bias", lambda t: torch.zeros(16)), r"tensors .*with norm.bias"),
    "shape": (
        _set("fc.weight", lambda t: t["fc.weight"][:, :-1].clone()),
        r"fc.weight must have shape \[16, 48\], got",
    ),
    "one tensor in half": (_set("norm.weight", lambda t: t["norm.weight"].half()), r"norm.weight must be float32"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensor_faults(folder, fault):
    change, sentence = TENSOR_FAULTS[fault]
    edit_tensors(folder, change)
    with pytest.raises(UserError, match=sentence):
        load_drafter(folder, TARGET)


def test_truncated_at_any_length(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in [0, 4, 8, 100, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"must be (a whole safetensors file|the file that was exported)"):
            load_drafter(folder, TARGET)


def test_a_single_flipped_bit(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="must be the file that was exported"):
        load_drafter(folder, TARGET)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"format": "other"}'])
def test_a_config_that_is_none(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError):
        load_drafter(folder, TARGET)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file(folder, name):
    (folder / name).unlink()
    with pytest.raises(UserError, match=name):
        load_drafter(folder, TARGET)


class Bomb:
    exploded = False

    def __reduce__(self):
        return (setattr, (Bomb, "exploded", True))


def test_a_pickle_is_never_read(folder):
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError):
        load_drafter(folder, TARGET)
    assert not Bomb.exploded


def test_another_target_can_be_forced_but_not_another_shape(folder):
    same_shape = tiny_target(vocab_size=V, hidden=16, layers=3, seed=5)
    with pytest.raises(UserError, match="trained for tiny-llama"):
        load_drafter(folder, same_shape)
    with pytest.warns(UserWarning, match="expect low acceptance"):
        load_drafter(folder, same_shape, allow_target_mismatch=True)
    other_shape = tiny_target(vocab_size=V, hidden=16, layers=4)
    with pytest.raises(UserError, match=r"\(n_layers 3\), got .*\(n_layers 4\)"):
        load_drafter(folder, other_shape, allow_target_mismatch=True)


# ---------------------------------------------------------------------------------------------------- finding it
def test_a_run_folder_stands_for_its_export(folder, tmp_path):
    assert resolve_checkpoint(folder) == folder
    assert resolve_checkpoint(tmp_path) == folder
    assert resolve_checkpoint(folder / "model.safetensors") == folder
    load_drafter(tmp_path, TARGET)


def test_what_holds_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match="which does not exist"):
        resolve_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no config.json of ours"):
        resolve_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="has no config.json of ours"):
        resolve_checkpoint(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="which has no export yet; run the same training command"):
        resolve_checkpoint(tmp_path / "run")


def test_atomic_text_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_atomic(path, "old")
    monkeypatch.setattr("distill.files.os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk gone")))
    with pytest.raises(UserError, match=r"a.txt must be writable, got disk gone"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_loading_warns_about_nothing(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_drafter(folder, TARGET)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["config"].update(norm_before_residual=True),
        lambda c: c.update(drafter="medusa"),
        lambda c: c["target"].update(name=5),
        lambda c: c.update(flags_sha256=""),
    ],
)
def test_a_flag_that_was_changed_by_hand_is_refused(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="must be the file that was exported, got a changed one"):
        load_drafter(folder, TARGET)
