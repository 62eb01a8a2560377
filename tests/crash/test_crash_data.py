"""Data writing survives kill -9, a full disk and a power cut at every single file-system call."""

import dataclasses

import data_tools as tools
import pytest
from crash_tools import check_order, contents, crash_everywhere, fill_everywhere, names, watch

from distill.data import DataConfig, load_prepared, prepare, write_part
from distill.data.store import read_manifest

CONFIG = DataConfig(n_conversations=9, shard_size=3, slots=4, min_answer_tokens=12)
V = 200


def written(folder):
    """Prepare with a pretended decoder; what it writes depends on the candidate only."""
    make = tools.decoders_of(tools.babble)
    return prepare(CONFIG, tools.target(), folder / "data", lambda _: None, make_decoder=make, clock=lambda: 0.0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, written(folder)


def resumes_exactly(folder, whole):
    """Readable as it is, a beginning of the whole; going on gives the whole, to the byte and without leftovers."""
    reference, data = whole
    manifest = read_manifest(folder / "data")
    if manifest is not None and manifest.conversations:
        half = load_prepared(folder / "data", CONFIG, vocab_size=data.vocab_size)
        assert len(half) == manifest.conversations
        assert half.ids.tolist() == data.ids[: len(half.ids)].tolist()
    written(folder)
    assert contents(folder) == contents(reference)
    assert dataclasses.asdict(read_manifest(folder / "data")) == dataclasses.asdict(read_manifest(reference / "data"))
    return 0 if manifest is None else manifest.conversations


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "tear"])
def test_killed_anywhere_it_goes_on_exactly(tmp_path, whole, how):
    reached = set()
    count = crash_everywhere(
        tmp_path, written, lambda folder: reached.add(resumes_exactly(folder, whole)), how=how, at_most=30
    )
    assert count >= (20 if how == "kill" else 4)
    assert reached == {0, 3, 6, 9}, "what was complete stays, shard by shard"


@pytest.mark.slow
def test_more_data_never_harm_what_is_there(tmp_path, whole):
    def first(folder):
        prepare(
            dataclasses.replace(CONFIG, n_conversations=3),
            tools.target(),
            folder / "data",
            lambda _: None,
            make_decoder=tools.decoders_of(tools.babble),
            clock=lambda: 0.0,
        )

    def check(folder):
        assert resumes_exactly(folder, whole) >= 3

    assert crash_everywhere(tmp_path, written, check, before=first, at_most=20) >= 20


@pytest.mark.slow
def test_merging_parts_killed_anywhere_takes_every_candidate_once(tmp_path, whole):
    def parts(folder):
        for share in ("1/2", "2/2"):
            part = dataclasses.replace(CONFIG, part=share)
            make = tools.decoders_of(tools.babble)
            write_part(part, tools.target(), folder / "data", lambda _: None, make_decoder=make)

    def check(folder):
        manifest = read_manifest(folder / "data")
        assert (0 if manifest is None else manifest.conversations) in (0, 3, 6, 9)
        merged = written(folder)
        assert merged.data_hash == whole[1].data_hash
        after, reference = contents(folder), contents(whole[0])
        assert all(after[name] == reference[name] for name in reference if name.endswith(".safetensors"))
        assert len(list((folder / "data").glob("part-*/*.safetensors"))) == 4, "parts are left as they were"

    assert crash_everywhere(tmp_path, written, check, before=parts, at_most=20) == 20


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_harms_nothing(disk, whole):
    def check(folder, said):
        assert not [name for name in names(folder) if name.endswith(".tmp")]
        resumes_exactly(folder, whole)

    assert fill_everywhere(disk, written, check) >= 4


def test_nothing_counts_before_it_is_on_the_disk(tmp_path):
    check_order(watch(tmp_path, written).calls, tmp_path / "now")
