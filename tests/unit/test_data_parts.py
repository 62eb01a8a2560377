"""Parts of the data, merged, are what one process would have written, to the byte."""

import json
import shutil

import data_tools as tools
import pytest

from distill.data import DataConfig, prepare, write_part
from distill.data.merge import HOLE
from distill.data.store import MANIFEST, read_manifest, read_outcomes
from distill.errors import UserError


def settings(**options):
    return DataConfig(**{"n_conversations": 30, "shard_size": 4, "slots": 5, "min_answer_tokens": 12, **options})


def narrow(request, sampling):
    """User turns from a small set, so that many are duplicates, within a part and across parts."""
    words = tools.tiny_tokenizer_cached()
    n = tools.keyed((request.request_id, sampling.seed))
    text = f"ask {n % 40}" if sampling.seed % 2 == 0 else tools.WORDS[n % 16] + " so" * (n % 5) + " and on"
    return [*words.encode(text, add_special_tokens=False), words.eos_token_id]


def one(folder, config, answer=narrow, **more):
    make = tools.decoders_of(answer)
    return prepare(config, tools.target(), folder, lambda _: None, make_decoder=make, **more)


def part(folder, config, share, *, answer=narrow, seed=0, fingerprint="w0"):
    options = {**vars(config), "part": share}
    make = tools.decoders_of(answer, seed)
    return write_part(
        DataConfig(**options), tools.target(fingerprint=fingerprint), folder, lambda _: None, make_decoder=make
    )


def shards(folder):
    return {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}


def never(request, sampling):
    raise AssertionError("nothing is left to write")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    data = one(folder, settings())
    assert data.stats["left_out"]["duplicate"] > 5, "for these tests to mean anything"
    assert data.stats["left_out"]["too_short"] > 2
    return folder, data


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_the_union_of_the_parts_is_what_one_process_writes(tmp_path, whole, n):
    for number in reversed(range(1, n + 1)):
        part(tmp_path, settings(slots=number), f"{number}/{n}", seed=number)
    merged = one(tmp_path, settings())
    assert shards(tmp_path) == shards(whole[0])
    assert merged.data_hash == whole[1].data_hash
    ours, theirs = read_manifest(tmp_path), read_manifest(whole[0])
    assert (ours.left_out, ours.greedy, ours.next_index) == (theirs.left_out, theirs.greedy, theirs.next_index)
    assert ours.part is None


def test_a_part_takes_its_own_numbers_and_its_share(tmp_path):
    places = [part(tmp_path, settings(n_conversations=8), f"{number}/3") for number in (1, 2, 3)]
    assert [place.name for place in places] == ["part-1-of-3", "part-2-of-3", "part-3-of-3"]
    manifests = [read_manifest(place) for place in places]
    assert [manifest.conversations for manifest in manifests] == [3, 3, 2]
    assert all(manifest.stopped == "n_conversations" for manifest in manifests)
    for number, (place, manifest) in enumerate(zip(places, manifests, strict=True)):
        indices = [outcome.index for outcome in read_outcomes(place, manifest)]
        assert indices == list(range(number, number + 3 * len(indices), 3))


def test_what_the_parts_lack_of_the_total_is_written_when_they_are_merged(tmp_path, whole):
    for number in (1, 2, 3):
        part(tmp_path, settings(n_conversations=15), f"{number}/3")
    assert one(tmp_path, settings()).data_hash == whole[1].data_hash
    fewer = one(tmp_path, settings(n_conversations=9), answer=never)
    assert fewer.ids.tolist() == whole[1].ids[: len(fewer.ids)].tolist()


def test_nothing_is_written_where_the_parts_have_it_all(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"why {i % 17}"}) + "\n" for i in range(25)))
    config = settings(source="prompts", path=str(path), n_conversations=None, min_answer_tokens=1)
    reference = one(tmp_path / "whole", config)
    for number in (1, 2, 3, 4):
        part(tmp_path / "data", config, f"{number}/4")
    merged = one(tmp_path / "data", config, answer=never)
    assert merged.data_hash == reference.data_hash
    assert merged.stats["left_out"] == reference.stats["left_out"] == {"duplicate": 8}
    assert read_manifest(tmp_path / "data").stopped == "source_exhausted"


def test_more_parts_than_records_leave_some_empty(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "why"}\n{"prompt": "and why"}\n')
    config = settings(source="prompts", path=str(path), n_conversations=None, min_answer_tokens=1)
    for number in (1, 2, 3):
        part(tmp_path / "data", config, f"{number}/3")
    assert len(one(tmp_path / "data", config, answer=never)) == 2


def test_parts_that_lie_elsewhere_are_named(tmp_path, whole):
    places = [part(tmp_path / f"machine{number}", settings(), f"{number}/2") for number in (1, 2)]
    merged = one(tmp_path / "data", settings(), parts=places)
    assert merged.data_hash == whole[1].data_hash


def test_a_part_resumes_and_a_merge_resumes(tmp_path, whole):
    def failing(limit):
        def answer(request, sampling):
            if request.request_id > limit:
                raise UserError("gone")
            return narrow(request, sampling)

        return answer

    for limit in (38, 46):
        with pytest.raises(UserError, match="gone"):
            part(tmp_path, settings(), "1/2", answer=failing(limit))
    kept = read_manifest(tmp_path / "part-1-of-2")
    assert kept.conversations > 0
    assert kept.stopped is None
    part(tmp_path, settings(), "1/2")
    part(tmp_path, settings(), "2/2")
    one(tmp_path, settings(n_conversations=11))
    assert one(tmp_path, settings()).data_hash == whole[1].data_hash


def test_parts_extend_what_is_there(tmp_path, whole):
    one(tmp_path, settings(n_conversations=10))
    for number in (1, 2):
        part(tmp_path, settings(), f"{number}/2")
    assert read_manifest(tmp_path / "part-1-of-2").part["base"] == read_manifest(tmp_path).next_index > 10
    assert one(tmp_path, settings()).data_hash == whole[1].data_hash


def test_partial_keeps_everything_and_says_what_is_missing(tmp_path):
    for number in (1, 3):
        part(tmp_path, settings(), f"{number}/3")
    merged = one(tmp_path, settings(n_conversations=15), answer=never, partial=True)
    expected = {
        tuple(outcome.conversation.ids.tolist())
        for number in (1, 3)
        for place in [tmp_path / f"part-{number}-of-3"]
        for outcome in read_outcomes(place, read_manifest(place))
        if outcome.conversation is not None
    }
    assert {tuple(merged[i].ids.tolist()) for i in range(len(merged))} <= expected
    assert len(merged) > 12
    manifest = read_manifest(tmp_path)
    assert manifest.left_out[HOLE] == len(range(1, manifest.next_index, 3)) > 4


# ------------------------------------------------------------------------------------------------- refused
@pytest.fixture
def halves(tmp_path):
    for number in (1, 2):
        part(tmp_path, settings(), f"{number}/2")
    return tmp_path


def test_a_missing_part_is_named_with_how_to_write_it(halves):
    shutil.rmtree(halves / "part-2-of-2")
    with pytest.raises(UserError, match=r"all 2 parts must be there, got none with number 2; .* data.part=2/2"):
        one(halves, settings())


def test_a_part_that_is_there_twice_is_named(halves, tmp_path):
    shutil.copytree(halves / "part-2-of-2", tmp_path / "copy")
    with pytest.raises(UserError, match=r"part 2 of 2 must be there once, got .*part-2-of-2 and .*copy"):
        one(halves, settings(), parts=[tmp_path / "copy"])


def test_parts_of_another_division_are_refused(halves):
    part(halves, settings(), "3/3")
    with pytest.raises(UserError, match="one division of the data, got .*2 parts.*3 parts"):
        one(halves, settings())


@pytest.mark.parametrize(
    "options, fingerprint, named",
    [
        ({"seed": 1}, "w0", "seed was 1, is now 0"),
        ({"temperature": 0.9}, "w0", "temperature was 0.9, is now 0.8"),
        ({}, "w1", "target weights was 'w1', is now 'w0'"),
    ],
)
def test_a_part_of_other_data_is_refused_by_name(tmp_path, options, fingerprint, named):
    part(tmp_path, settings(), "1/2")
    part(tmp_path, settings(**options), "2/2", fingerprint=fingerprint)
    with pytest.raises(UserError, match=f"part-2-of-2 must have been written by the same target .*{named}"):
        one(tmp_path, settings())
    assert not (tmp_path / MANIFEST).exists()


def test_an_unfinished_part_is_refused(halves):
    path = halves / "part-1-of-2" / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "stopped": None}))
    with pytest.raises(UserError, match="part-1-of-2 must be finished .* data.part=1/2"):
        one(halves, settings())


def test_a_folder_that_is_no_part_is_refused(halves, tmp_path, whole):
    for folder in (whole[0], tmp_path / "nothing"):
        with pytest.raises(UserError, match="must be a part of the data"):
            one(halves, settings(), parts=[folder])


def test_a_part_is_not_continued_as_another(halves):
    (halves / "part-1-of-2").rename(halves / "part-1-of-3")
    with pytest.raises(UserError, match="part was .*'of': 2.* is now .*'of': 3"):
        part(halves, settings(), "1/3")


def test_a_part_of_finished_data_is_refused(halves):
    one(halves, settings())
    with pytest.raises(UserError, match="got all that was asked for"):
        part(halves, settings(), "1/2")


def test_training_data_are_all_parts(tmp_path):
    with pytest.raises(UserError, match=r"data.part=1/2 must go to .* task=data"):
        one(tmp_path, settings(part="1/2"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["2", "0/3", "4/3", "a/b", "1/2/3", "-1/2", "1/0"])
def test_the_form_of_a_part(text):
    with pytest.raises(UserError, match="data.part must be like 2/8"):
        DataConfig(part=text)


def test_a_damaged_part_is_refused_before_anything_is_merged(tmp_path, whole):
    """Merged as far as it went, the folder would count the candidates of the parts behind as gone for good."""
    folder, parts = tmp_path / "merged", tmp_path / "parts"
    for number in (1, 2, 3):
        part(parts, settings(), f"{number}/3", seed=number)
    last = sorted(parts.glob("part-3-*"))[0]
    torn = sorted(last.glob("*.safetensors"))[-1]
    good = torn.read_bytes()
    torn.write_bytes(good[:100])
    everything = sorted(path for path in parts.iterdir() if path.is_dir())
    for partial, some in ((False, everything), (True, [last])):
        with pytest.raises(UserError, match="must be the shard the manifest describes"):
            one(folder, settings(), parts=some, partial=partial)
        assert not shards(folder)
        manifest = read_manifest(folder)
        assert manifest is None or manifest.next_index == 0
    torn.write_bytes(good)
    one(folder, settings(), parts=everything)
    assert shards(folder) == shards(whole[0])
