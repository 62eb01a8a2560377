"""A folder of shards survives whatever happens to the process that writes it."""

import errno
import json
import os
import signal
import time
import warnings
from pathlib import Path

import data_tools as tools
import pytest
from safetensors.numpy import load_file

from distill.data import DataConfig, load_prepared, prepare
from distill.data.store import MANIFEST, Store, read_manifest
from distill.errors import UserError


class PowerCut(BaseException):
    """Nothing handles it: what is on the disk now is all there is."""


def settings(**options):
    return DataConfig(**{"n_conversations": 20, "shard_size": 4, "slots": 5, "min_answer_tokens": 12, **options})


def written(folder, config=None, answer=None, fingerprint="w0", seed=0):
    """Prepare with a pretended decoder that writes both user turns and answers."""
    target = tools.target(fingerprint=fingerprint)
    return prepare(
        config or settings(),
        target,
        folder,
        lambda _: None,
        make_decoder=tools.decoders_of(answer or tools.babble, seed),
    )


def same(a, b):
    return a.data_hash == b.data_hash and a.ids.tolist() == b.ids.tolist() and a.keys.tolist() == b.keys.tolist()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    return written(folder), folder


def files(folder):
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.suffix == ".safetensors"}


def test_the_manifest_says_what_is_there(whole):
    data, folder = whole
    manifest = json.loads((folder / MANIFEST).read_text())
    shards = [load_file(folder / entry["file"]) for entry in manifest["shards"]]
    assert manifest["conversations"] == sum(len(s["lengths"]) for s in shards) == len(data) == 20
    assert manifest["tokens"] == sum(len(s["ids"]) for s in shards) == len(data.ids)
    assert manifest["supervised_tokens"] == sum(int(s["loss_mask"].sum()) for s in shards)
    assert manifest["next_index"] == 20 + sum(manifest["left_out"].values())
    assert 0 < manifest["greedy"] < 20
    assert manifest["stopped"] == "n_conversations"
    assert manifest["target"] == {"weights": "w0"}
    assert manifest["settings"] == settings().writing_settings()
    assert manifest["data_hash"] == data.data_hash
    assert manifest["coverage"] == data.stats["coverage"]
    assert [len(s["lengths"]) for s in shards] == [4] * 5


def test_a_second_run_writes_nothing(whole):
    data, folder = whole

    def never(request, sampling):
        raise AssertionError("nothing is left to write")

    assert same(written(folder, answer=never), data)


CALLS = ("open", "write", "fsync", "replace")


def cut_at(monkeypatch, moment):
    """The power goes at the ``moment``-th system call that writing makes; a write is then half done."""
    count = 0
    for name in CALLS:
        real = getattr(os, name)

        def call(*args, name=name, real=real, **kwargs):
            nonlocal count
            if name == "open" and not str(args[0]).endswith(".tmp"):
                return real(*args, **kwargs)
            count += 1
            if count == moment:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                raise PowerCut
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("moment", range(1, 49))
def test_a_power_cut_at_any_call_loses_and_doubles_nothing(monkeypatch, tmp_path, whole, moment):
    with monkeypatch.context() as patched:
        cut_at(patched, moment)
        with pytest.raises(PowerCut):
            written(tmp_path)
    before = read_manifest(tmp_path)
    kept = 0 if before is None else before.conversations
    assert kept % 4 == 0
    if kept:
        half = load_prepared(tmp_path, settings(), vocab_size=whole[0].vocab_size)
        assert half.ids.tolist() == whole[0].ids[: len(half.ids)].tolist()
    assert same(written(tmp_path, seed=moment), whole[0])
    assert files(tmp_path) == files(whole[1])
    assert list(tmp_path.glob("*.tmp")) == []


def test_two_cuts_in_a_row(monkeypatch, tmp_path, whole):
    for moment in (13, 11, 7):
        with monkeypatch.context() as patched:
            cut_at(patched, moment)
            with pytest.raises(PowerCut):
                written(tmp_path)
    assert same(written(tmp_path), whole[0])


def narrow(request, sampling):
    """Few different user turns, and every other one gets an answer too short to keep."""
    words = tools.tiny_tokenizer_cached()
    if sampling.seed % 2 == 0:  # a user turn
        text = f"ask {tools.keyed(request.request_id) % 14}"
    else:
        text = "the cat sat on a mat" if tools.keyed(tuple(request.prompt)) % 2 else "no"
    return [*words.encode(text, add_special_tokens=False), words.eos_token_id]


def test_duplicates_of_dropped_prompts_stay_duplicates_after_a_cut(monkeypatch, tmp_path):
    config = settings(n_conversations=6, shard_size=2)
    reference = written(tmp_path / "whole", config, narrow)
    counts = reference.stats["left_out"]
    assert min(counts["duplicate"], counts["too_short"]) > 2, "for this test to mean anything"
    for moment in (6, 14, 22):
        folder = tmp_path / str(moment)
        with monkeypatch.context() as patched:
            cut_at(patched, moment)
            with pytest.raises(PowerCut):
                written(folder, config, narrow)
        resumed = written(folder, config, narrow)
        assert same(resumed, reference)
        assert resumed.stats["left_out"] == counts


def killed(folder, shard):
    """Write in another process and kill it with -9 as soon as a shard is there."""

    def slow(request, sampling):
        time.sleep(0.002)
        return tools.babble(request, sampling)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside idle threads
        child = os.fork()
    if child == 0:
        try:
            written(folder, answer=slow)
        finally:
            os._exit(0)
    deadline = time.monotonic() + 60
    while not (folder / f"shard-{shard:05d}.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.slow
def test_kill_9_loses_and_doubles_nothing(tmp_path, whole):
    reached = []
    for last in range(5):
        folder = tmp_path / str(last)
        for shard in range(0, last + 1, 2):
            killed(folder, shard)
        manifest = read_manifest(folder)
        reached.append(0 if manifest is None else manifest.conversations)
        assert same(written(folder), whole[0])
        assert files(folder) == files(whole[1])
    assert any(0 < n < 20 for n in reached), "some must be killed midway for this test to mean anything"


def test_a_second_process_is_refused(tmp_path):
    with (
        Store(tmp_path, target={}, settings={}, origin="self"),
        pytest.raises(UserError, match="one process at a time"),
    ):
        Store(tmp_path, target={}, settings={}, origin="self")
    with Store(tmp_path, target={}, settings={}, origin="self"):
        pass


# ------------------------------------------------------------------------------------- what may change
def test_more_conversations_extend_the_folder(tmp_path, whole):
    written(tmp_path, settings(n_conversations=9))
    assert same(written(tmp_path, settings(n_conversations=20, slots=2, shard_size=3)), whole[0])


def test_fewer_conversations_take_the_first_ones(whole):
    data, folder = whole
    fewer = written(folder, settings(n_conversations=7))
    assert len(fewer) == 7
    assert fewer.ids.tolist() == data.ids[: len(fewer.ids)].tolist()
    assert fewer.data_hash != data.data_hash


def test_other_limits_extend_too(tmp_path):
    first = written(tmp_path, settings(n_conversations=None, max_tokens=200))
    assert read_manifest(tmp_path).stopped == "max_tokens"
    more = written(tmp_path, settings(n_conversations=None, max_tokens=900))
    assert more.ids[: len(first.ids)].tolist() == first.ids.tolist()
    assert len(more) > len(first)


def test_a_run_whose_time_is_up_goes_on_only_with_more_time(tmp_path):
    now = 0.0

    def clock():
        nonlocal now
        now += 1.0
        return now

    def run(minutes):
        config = settings(n_conversations=None, max_minutes=minutes)
        target = tools.target()
        make = tools.decoders_of(tools.babble)
        return prepare(config, target, tmp_path, lambda _: None, make_decoder=make, clock=clock)

    first = run(2)
    assert read_manifest(tmp_path).stopped == "max_minutes"
    assert 60 < read_manifest(tmp_path).seconds < 150
    assert same(run(2), first)
    assert len(run(4)) > len(first)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"temperature": 0.9}, "temperature was 0.8, is now 0.9"),
        ({"seed": 1, "max_answer_tokens": 99}, "max_answer_tokens was 256, is now 99; .*seed was 0, is now 1"),
        ({"system": "Be odd."}, "system was None, is now 'Be odd.'"),
    ],
)
def test_other_settings_are_refused_by_name(whole, options, named):
    with pytest.raises(UserError, match=named):
        written(whole[1], settings(**options))


def test_another_target_is_refused_with_both_fingerprints(whole):
    with pytest.raises(UserError, match="target weights was 'w0', is now 'w1'"):
        written(whole[1], fingerprint="w1")


def test_a_changed_prompt_file_is_refused(tmp_path):
    path = tmp_path / "p.jsonl"
    config = settings(source="prompts", path=str(path), n_conversations=None)
    path.write_text('{"prompt": "why"}\n{"prompt": "and why"}\n{"prompt": "but why"}\n')
    written(tmp_path / "data", config)
    path.write_text('{"prompt": "why not"}\n')
    with pytest.raises(UserError, match="source files was"):
        written(tmp_path / "data", config)


# --------------------------------------------------------------------------------------------- damage
def damage(path, how):
    data = path.read_bytes()
    path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "bit": bytes([*data[:-1], data[-1] ^ 1])}[how])


@pytest.mark.parametrize("how", ["cut", "empty", "bit"])
def test_a_damaged_shard_is_named(tmp_path, how):
    written(tmp_path)
    damage(tmp_path / "shard-00002.safetensors", how)
    with pytest.raises(UserError, match=r"shard-00002.safetensors must be the shard the manifest describes"):
        written(tmp_path)
    with pytest.raises(UserError, match=r"shard-00002.safetensors"):
        load_prepared(tmp_path, settings(), vocab_size=200)


def test_a_missing_shard_is_named(tmp_path):
    written(tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    with pytest.raises(UserError, match="shard-00001.safetensors must be a readable shard"):
        written(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 1}', '{"schema_version": 1, "x": 2}'])
def test_a_damaged_manifest_is_named(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(UserError, match="manifest.json must be an intact manifest"):
        written(tmp_path)


def test_a_manifest_of_another_version_is_refused(tmp_path):
    (tmp_path / MANIFEST).write_text('{"schema_version": 99}')
    with pytest.raises(UserError, match="must have schema version 1, got 99"):
        written(tmp_path)


def test_no_data_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="must hold prepared data"):
        load_prepared(tmp_path, settings(), vocab_size=10)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(monkeypatch, tmp_path, whole, number):
    real, count = os.write, 0

    def full(handle, data):
        nonlocal count
        count += 1
        if count == number:
            real(handle, data[:3])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(UserError, match="disk must have room for .* free some"):
            written(tmp_path)
    assert list(tmp_path.glob("*.tmp")) == []
    assert same(written(tmp_path), whole[0])


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="must be writable"):
        written(tmp_path / "file" / "data")


def test_a_context_longer_than_the_models_is_refused(tmp_path):
    with pytest.raises(UserError, match="at most the target's 100 positions, got 1024"):
        prepare(settings(), tools.target(max_positions=100), tmp_path)
    assert list(tmp_path.iterdir()) == []
