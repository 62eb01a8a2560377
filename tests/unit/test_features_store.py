"""A feature store is refused when it does not fit, confirmed when it is large, and goes on where it was."""

import errno
import json
import os
import time
from collections import namedtuple

import feature_tools as features
import numpy as np
import pytest
import torch
import train_tools as tools

from distill import files
from distill.data import Conversation, PreparedData
from distill.data import features as module
from distill.data.features import prepare_features
from distill.errors import UserError
from distill.target.model import Target

Disk = namedtuple("Disk", "total used free")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "features"
    features.stored(folder)
    return folder


def manifest(folder):
    """Without the times of the files."""
    fields = json.loads((folder / "manifest.json").read_text())
    for entry in fields["shards"]:
        entry.pop("mtime_ns")
    return fields


def same(a, b):
    return features.shards(a) == features.shards(b) and manifest(a) == manifest(b)


def test_the_manifest_says_what_is_there(whole):
    fields, data = manifest(whole), tools.data()
    assert fields["schema_version"] == 1
    assert fields["target"] == tools.target().fingerprint
    assert (fields["taps"], fields["dtype"], fields["hidden_size"]) == ([0, 1, 2], "float32", 16)
    assert fields["data_hash"] == data.data_hash
    assert fields["conversations"] == sum(entry["conversations"] for entry in fields["shards"]) == len(data)
    assert fields["tokens"] == sum(entry["tokens"] for entry in fields["shards"]) == len(data.ids)
    assert [entry["size"] for entry in fields["shards"]] == [len(b) for b in features.shards(whole).values()]
    assert len(fields["shards"]) > 5
    assert sorted(p.name for p in whole.iterdir() if p.suffix != ".safetensors") == ["manifest.json"]


def test_a_complete_store_is_only_read(whole, monkeypatch):
    monkeypatch.setattr(Target, "forward", lambda *_, **__: pytest.fail("the target ran"))
    monkeypatch.setattr(module, "Lock", lambda *_, **__: pytest.fail("nothing is written"))
    monkeypatch.setattr(module.hashlib, "file_digest", lambda *_: pytest.fail("unchanged files are not read again"))
    said = []
    features.stored(whole, say=said.append)
    features.opened(whole, taps=(2,))
    assert said == []


# ------------------------------------------------------------------------------------------------ what may change
def test_more_conversations_are_appended_and_fewer_are_the_first_ones(tmp_path, monkeypatch):
    features.stored(tmp_path, data=features.first(17))
    before = features.shards(tmp_path)
    store = features.stored(tmp_path)
    after = features.shards(tmp_path)
    assert {name: after[name] for name in before} == before
    assert store.manifest.conversations == 40
    monkeypatch.setattr(Target, "forward", lambda *_, **__: pytest.fail("the target ran"))
    fewer = features.stored(tmp_path, data=features.first(9))
    a, b = (s.rows([[8, 2]], pack_len=32, max_len=16) for s in (store, fewer))
    assert torch.equal(a.last_BLD, b.last_BLD)


def test_longer_conversations_may_follow_a_longer_cut(tmp_path):
    """What is there was never cut; what is appended must be cut at the new length, not at the first one."""
    longer = [tools.data()[i] for i in range(40)]
    ids = np.arange(4, 34, dtype=np.int32)
    longer.append(Conversation(ids=ids, loss_mask=np.ones(30, dtype=bool), key=99))
    data = PreparedData.from_conversations(longer, vocab_size=tools.V, validation=0)
    features.stored(tmp_path, features.config(max_len=20))
    store = features.stored(tmp_path, features.config(max_len=25), data=data)
    assert store.manifest.max_len == 25
    row_LD = store.rows([[40]], pack_len=32, max_len=25).taps[0][0]
    assert torch.equal(row_LD[:25], tools.target().embed(torch.from_numpy(ids[:25])))
    with pytest.raises(UserError, match=r"conversation 40 is the first that differs, max_len was 25, is now 20"):
        features.opened(tmp_path, features.config(max_len=20), data=data)


def test_fewer_taps_read_what_is_there_and_extend_all_of_it(tmp_path):
    features.stored(tmp_path, data=features.first(17))
    store = features.stored(tmp_path, taps=(1,))
    assert store.manifest.taps == [0, 1, 2]
    assert store.manifest.conversations == 40
    assert list(store.rows([[39]], pack_len=16, max_len=16).taps) == [1]


def test_a_copied_store_is_checked_and_used(tmp_path, whole):
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in whole.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
        os.utime(folder / path.name, (1, 1))
    features.opened(folder)


# ----------------------------------------------------------------------------------------------------- refusals
def other_data():
    """One token of the sixth conversation is another."""
    conversations = [tools.data()[i] for i in range(40)]
    ids = conversations[5].ids.copy()
    ids[3] = 4 if ids[3] != 4 else 5
    conversations[5] = Conversation(ids=ids, loss_mask=conversations[5].loss_mask, key=conversations[5].key)
    return PreparedData.from_conversations(conversations, vocab_size=tools.V, validation=0.2)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"target": features.other_target}, "target weights was '[0-9a-f]{16}', is now '[0-9a-f]{16}'"),
        ({"target": lambda: tools.target(torch.float64)}, "target dtype was 'float32', is now 'float64'; dtype was"),
        ({"taps": lambda: (0, 3)}, r"taps was \[0, 1, 2\], is now \[0, 3\]"),
        ({"data": other_data}, r"data hash was \w{16}, is now \w{16} \(conversation 5 is the first that differs\)"),
        ({"options": lambda: features.config(features_dtype="bf16")}, "dtype was 'float32', is now 'bfloat16'"),
        ({"options": lambda: features.config(max_len=9)}, "that differs, max_len was 16, is now 9"),
    ],
)
@pytest.mark.parametrize("use", [features.stored, features.opened])
def test_what_differs_is_named(whole, changes, sentence, use):
    before = features.shards(whole)
    with pytest.raises(UserError, match=f"feature store .* must have been written by the same .*{sentence}.*; use ano"):
        use(whole, **{name: make() for name, make in changes.items()})
    assert features.shards(whole) == before


def test_all_that_differs_is_listed(whole):
    with pytest.raises(UserError, match=r"target weights was .*taps was .*data hash was "):
        features.stored(whole, target=features.other_target(), taps=(3,), data=other_data())


@pytest.mark.parametrize(
    "text, sentence",
    [
        ('{"schema_version": 99}', "schema version 1, got 99; delete the folder or use another data.features_folder"),
        ('{"schema_version": 1}', "must be the manifest of a feature store, got another or a damaged file"),
        ("{", "must be the manifest of a feature store"),
        ("[]", "must be the manifest of a feature store"),
        ('{"schema_version": 1, "origin": "self"}', "must be the manifest of a feature store"),
    ],
)
def test_another_manifest_is_refused(tmp_path, text, sentence):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=sentence):
        features.stored(tmp_path)


@pytest.mark.parametrize("how", ["cut", "cut quietly", "empty", "bit", "gone"])
def test_a_damaged_shard_is_named(tmp_path, how):
    features.stored(tmp_path)
    shard = tmp_path / "shard-00002.safetensors"
    blob, noted = shard.read_bytes(), shard.stat().st_mtime_ns
    damaged = {"empty": b"", "bit": bytes([*blob[:-1], blob[-1] ^ 1])}.get(how, blob[:-9])
    shard.write_bytes(damaged)
    os.utime(shard, ns=(noted, noted if how == "cut quietly" else noted + 1))
    if how == "gone":
        shard.unlink()
    with pytest.raises(UserError, match=r"shard-00002.safetensors must be .*delete the folder to write the features"):
        features.stored(tmp_path)


def test_a_shard_that_goes_away_during_training_is_named(tmp_path):
    store = features.stored(tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    with pytest.raises(UserError, match=r"shard-00001.safetensors must be a readable shard of features"):
        store.rows([[i] for i in range(40)], pack_len=16, max_len=16)


def test_another_process_waits_for_a_complete_store(tmp_path):
    for held in (0, 17):
        if held:
            features.stored(tmp_path, data=features.first(held))
        with pytest.raises(UserError, match=f"must hold all 40 conversations, got {held}; let one process"):
            features.opened(tmp_path)


def test_a_second_writer_is_refused(tmp_path):
    with (
        files.Lock(tmp_path / ".lock", what="x", instead="y"),
        pytest.raises(UserError, match="feature store .* must be used by one process at a time.*data.features_folder"),
    ):
        features.stored(tmp_path)
    features.stored(tmp_path)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="must be writable"):
        features.stored(tmp_path / "file" / "features")


def test_options_without_effect_are_refused():
    for name, value in (("features_folder", "x"), ("features_dtype", "fp32")):
        with pytest.raises(UserError, match="data.features must be store"):
            features.config(**{"features_dtype": "bf16", name: value, "features": "online"})


# ------------------------------------------------------------------------------------------- disk and confirmation
@pytest.mark.parametrize("dtype, per_token", [("target", 256), ("bf16", 128)])
def test_the_estimate_is_what_it_takes(tmp_path, dtype, per_token):
    said = []
    options = features.config(features_dtype=dtype)
    prepare_features(
        options, tools.data(), tools.target(), tmp_path, taps=features.TAPS, say=said.append, shard_bytes=1 << 20
    )
    tokens = len(tools.data().ids)
    assert f"({tokens} tokens of {per_token} bytes)" in said[0]
    figure, unit = said[0].split(" takes ")[1].split()[:2]
    written = sum(map(len, features.shards(tmp_path).values()))
    assert unit == "kB"
    assert float(figure) * 1000 == pytest.approx(written, rel=0.01)


def limits(monkeypatch, *, free=10**9, above=10**9, share=0.1):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: Disk(2 * free, free, free))
    monkeypatch.setattr(module, "ASK_ABOVE_BYTES", above)
    monkeypatch.setattr(module, "ASK_ABOVE_SHARE", share)


@pytest.mark.parametrize("large", [{"above": 100_000}, {"free": 1_000_000}])
def test_a_large_store_needs_a_yes(tmp_path, monkeypatch, large):
    limits(monkeypatch, **large)
    asked = []
    for ask in (None, lambda question: asked.append(question)):
        with pytest.raises(
            UserError, match=r"a feature store of 13\d\.\d kB .* must be confirmed, got no yes; .*=true"
        ):
            features.stored(tmp_path / "f", ask=ask)
        assert not (tmp_path / "f").exists(), "nothing is left behind"
    assert asked == [f"Write 132.0 kB of features to {tmp_path / 'f'}?"]
    features.stored(tmp_path / "yes", ask=lambda _: True)
    features.stored(tmp_path / "f", features.config(features_confirm=True), ask=lambda _: pytest.fail("asked"))
    assert same(tmp_path / "f", tmp_path / "yes")


def test_only_what_is_missing_counts(tmp_path, monkeypatch):
    features.stored(tmp_path, data=features.first(35))
    limits(monkeypatch, above=30_000)
    features.stored(tmp_path, ask=lambda _: pytest.fail("asked"))


def test_a_small_store_is_not_asked_about(tmp_path, monkeypatch):
    limits(monkeypatch)
    features.stored(tmp_path, ask=lambda _: pytest.fail("asked"))


def test_a_disk_without_room_is_refused_whatever_was_confirmed(tmp_path, monkeypatch):
    limits(monkeypatch, free=100_000)
    with pytest.raises(UserError, match=r"must have room for 132.0 kB .*, got 100.0 kB; use another"):
        features.stored(tmp_path / "f", features.config(features_confirm=True))
    assert not (tmp_path / "f").exists()


class Terminal:
    """Stands for stdin or stderr."""

    def __init__(self, answer="", terminal=True):
        self.answer, self.terminal, self.shown = answer, terminal, ""

    def isatty(self):
        return self.terminal

    def readline(self):
        return self.answer

    def write(self, text):
        self.shown += text

    def flush(self):
        pass


@pytest.mark.parametrize("answer, yes", [("y\n", True), (" YES\n", True), ("\n", False), ("", False), ("n\n", False)])
def test_the_terminal_is_asked(monkeypatch, answer, yes):
    stdin, stderr = Terminal(answer), Terminal()
    monkeypatch.setattr(module.sys, "stdin", stdin)
    monkeypatch.setattr(module.sys, "stderr", stderr)
    assert module._terminal()("Really?") is yes
    assert stderr.shown == "Really? [y/N] "
    stdin.terminal = False
    assert module._terminal() is None


# ------------------------------------------------------------------------------------------------------ going on
def test_a_full_disk_is_one_sentence_and_costs_one_shard(tmp_path, monkeypatch, whole):
    real, count = os.write, 0

    def full(handle, data):
        nonlocal count
        count += len(data) > 1000
        if count == 3:
            real(handle, data[:3])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data)

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "write", full)
        with pytest.raises(UserError, match="shard-00002.safetensors must be writable, got No space left .* free some"):
            features.stored(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("manifest.json", "shard-00000.safetensors", "shard-00001.safetensors")
    ]
    features.stored(tmp_path)
    assert same(tmp_path, whole)


def test_progress_is_told_now_and_then():
    said = []
    report = module._reporter(said.append, 100, 4, every_s=0.01)
    report(1, 25)
    time.sleep(0.02)
    report(2, 25)
    report(4, 50)
    assert len(said) == 2
    assert said[0].startswith("features: 2/4 conversations, ")
    assert said[0].endswith("min left")
    assert said[1].startswith("features: 4/4 conversations, ")
