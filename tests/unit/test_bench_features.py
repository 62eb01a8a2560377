"""The bench's feature part runs in seconds on a tiny target and reports what it says it does."""

import math

import numpy as np
import pytest

from bench import features
from bench.record import Options


@pytest.fixture(scope="module")
def measured():
    return {m.name: m for m in features.run(Options(target="tiny", quick=True, threads=1))}


def test_every_figure_is_there(measured):
    assert set(measured) == {
        "training tokens/s with the store over online",
        "training with the store",
        "writing the store",
        "store size over the estimate",
        "waiting for the loader, online",
        "waiting for the loader, store",
        "tokens that are not padding in packed rows",
    }
    assert all(math.isfinite(m.value) and m.value > 0 and m.part == "features" for m in measured.values())


def test_the_limit_of_a_step_is_a_step_without_the_forward(measured):
    row = measured["training tokens/s with the store over online"]
    steps, forward = sorted(row.detail["seconds"]["online"]), sorted(row.detail["forward_s"])
    assert len(steps) == len(forward) == 2
    step, forward = sum(steps) / 2, sum(forward) / 2
    assert row.limit == pytest.approx(step / (step - forward))


def test_the_store_takes_what_was_estimated(measured):
    row = measured["store size over the estimate"]
    assert 1 < row.value < 1.05, "lengths, hashes and headers come on top"
    assert row.note.startswith(f"{row.value * 256:.0f} bytes a token (bfloat16, ")


def test_conversations_fill_the_rows_asked_for():
    data = features.conversations(100, rows=10, pack_len=64, seed=0)
    assert 640 <= len(data.ids) < 704
    assert data.lengths.max() <= 64
    assert data.n_val == 0
    assert np.isclose(data.loss_mask.mean(), 0.75, atol=0.05)
