import shutil

import pytest
import torch

from distill.errors import UserError
from distill.target import TargetConfig, fingerprint, load_target
from distill.target.fingerprint import difference, folder_weights, state_weights
from distill.target.model import Target
from distill.target.tiny import tiny_target, tiny_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    target = tiny_target(layers=2)
    target.model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_one_changed_weight_changes_the_fingerprint():
    model = tiny_target().model
    before = Target(model, name="a").fingerprint
    assert Target(model, name="b").fingerprint == before
    with torch.no_grad():
        model.lm_head.weight[3, 4] += 1e-3
    after = Target(model, name="a").fingerprint
    assert after["weights"] != before["weights"]
    assert after["tokenizer"] == before["tokenizer"] == "none"


def test_names_shapes_and_dtypes_count():
    tensor = torch.arange(6.0)
    digests = {
        state_weights(state)
        for state in (
            {"a": tensor},
            {"b": tensor},
            {"a": tensor.reshape(2, 3)},
            {"a": tensor.view(torch.int32)},
            {"a": tensor[:3], "b": tensor[3:]},
        )
    }
    assert len(digests) == 5


def test_template_and_tokenizer_are_told_apart():
    target = tiny_target(tokenizer=True)
    before = Target(target.model, name="a", tokenizer=tiny_tokenizer()).fingerprint

    other = tiny_tokenizer()
    other.chat_template += " "
    changed = Target(target.model, name="a", tokenizer=other).fingerprint
    assert [part for part in before if before[part] != changed[part]] == ["chat_template"]

    other = tiny_tokenizer()
    other.add_tokens(["<|tool|>"])
    changed = Target(target.model, name="a", tokenizer=other).fingerprint
    assert [part for part in before if before[part] != changed[part]] == ["tokenizer"]


def test_using_a_tokenizer_does_not_change_its_fingerprint():
    tokenizer = tiny_tokenizer()
    before = fingerprint.tokenizer_digest(tokenizer)
    tokenizer(["one", "three"], padding=True, truncation=True, max_length=4)
    assert fingerprint.tokenizer_digest(tokenizer) == before


def test_difference_names_the_parts():
    ours = {"weights": "aa", "tokenizer": "bb", "chat_template": "cc"}
    assert difference(ours, dict(ours)) == ""
    assert difference(ours, {**ours, "chat_template": "dd"}) == "chat template cc here, dd there"
    assert difference(ours, {"weights": "ab"}).startswith("weights aa here, ab there; tokenizer bb here, unknown")


def test_the_digest_of_a_folder_ignores_sharding_and_load_dtype(folder, tmp_path):
    digest = folder_weights(folder)
    tiny_target(layers=2).model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert folder_weights(tmp_path / "shards") == digest
    for dtype in ("bfloat16", "float64"):
        config = TargetConfig(name=str(folder), dtype=dtype, device="cpu", verify=False)
        assert load_target(config).fingerprint["weights"] == digest


def test_big_folders_are_hashed_once_until_they_change(folder, cache, monkeypatch):
    monkeypatch.setattr(fingerprint, "_REMEMBER_FROM", 0)
    digest = folder_weights(folder)
    hash_files = fingerprint._hash_files
    monkeypatch.setattr(fingerprint, "_hash_files", lambda files: pytest.fail("hashed again"))
    assert folder_weights(folder) == digest
    monkeypatch.setattr(fingerprint, "_hash_files", hash_files)
    file = folder / "model.safetensors"
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(changed)
    assert folder_weights(folder) != digest
    # A damaged sidecar is not believed, and a cache that cannot be written is no reason to fail.
    for sidecar in (cache / "fingerprints").iterdir():
        sidecar.write_text("short")
    known = folder_weights(folder)
    shutil.rmtree(cache)
    cache.write_text("")
    assert folder_weights(folder) == known


@pytest.mark.parametrize("damage", [lambda data: data[:5], lambda data: b"\xff" * 100, lambda data: data[:40]])
def test_a_damaged_file_is_said(folder, damage):
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match="truncated or corrupted"):
        folder_weights(folder)
