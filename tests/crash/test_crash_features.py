"""The feature store survives kill -9, a full disk and a power cut at every single file-system call."""

import json

import feature_tools as features
import pytest
import torch
import train_tools as tools
from crash_tools import check_order, crash_everywhere, fill_everywhere, names, watch

from distill.data.feature_store import read_feature_manifest

SHARD = 30_000


def written(folder):
    return features.stored(folder / "features", shard_bytes=SHARD)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return written(folder), folder


def described(folder):
    """The manifest without the times of the files."""
    fields = json.loads((folder / "features" / "manifest.json").read_text())
    return fields | {"shards": [{k: v for k, v in e.items() if k != "mtime_ns"} for e in fields["shards"]]}


def resumes_exactly(folder, whole):
    """Usable as it is, shard by shard; going on gives the whole, to the byte and without leftovers."""
    store, reference = whole
    manifest = read_feature_manifest(folder / "features")
    held = 0 if manifest is None else manifest.conversations
    if held:
        half = features.stored(folder / "features", data=features.first(held), shard_bytes=SHARD)
        rows = [[i] for i in range(held)]
        a, b = (s.rows(rows, pack_len=16, max_len=16) for s in (half, store))
        assert torch.equal(a.last_BLD, b.last_BLD)
    written(folder)
    assert features.shards(folder / "features") == features.shards(reference / "features")
    assert described(folder) == described(reference)
    # Killed behind its last manifest, the lock's empty shell stays: it blocks nobody, and nothing is left to write.
    assert names(folder) - {"features/.lock"} == names(reference)
    return held


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "tear"])
def test_killed_anywhere_it_goes_on_exactly(tmp_path, whole, how):
    reached = set()
    count = crash_everywhere(
        tmp_path, written, lambda folder: reached.add(resumes_exactly(folder, whole)), how=how, at_most=24
    )
    assert count >= (20 if how == "kill" else 4)
    assert reached - {len(tools.data())} == {0, 8, 17, 26, 35}, "what was complete stays, shard by shard"


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_harms_nothing(disk, whole):
    def check(folder, said):
        assert not [name for name in names(folder) if name.endswith(".tmp")]
        resumes_exactly(folder, whole)

    assert fill_everywhere(disk, written, check, at_most=6) >= 4


def test_nothing_counts_before_it_is_on_the_disk(tmp_path):
    check_order(watch(tmp_path, written).calls, tmp_path / "now")
