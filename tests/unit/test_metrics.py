"""Every metric by hand, and the simulated acceptance length against a chain walked in Python."""

import math
from dataclasses import dataclass

import pytest
import torch

from distill.metrics import accept_by_depth, runs_of_hits, simulated_sums, simulated_tau, tau


@dataclass(frozen=True)
class Pass:
    tokens: tuple[int, ...]
    accepted: int
    offered: int


def passes(*accepted_of_offered):
    return [Pass(tokens=(0,) * (a + 1), accepted=a, offered=o) for a, o in accepted_of_offered]


def test_tau_by_hand():
    assert tau(passes((0, 3), (3, 3), (1, 3))) == (1 + 4 + 2) / 3
    assert tau(passes((0, 0), (0, 0))) == 1.0, "plain decoding"
    assert math.isnan(tau([]))
    cut = [Pass(tokens=(5, 6), accepted=2, offered=2)]
    assert tau(cut) == 2, "a pass cut at the end counts what it emitted"


def test_conditional_acceptance_by_hand():
    steps = passes((0, 3), (1, 3), (1, 3), (2, 3), (3, 3))
    assert accept_by_depth(steps) == [4 / 5, 2 / 4, 1 / 2]
    # A pass cut to depth 1 says nothing about depth 2.
    assert accept_by_depth([*steps, Pass((7,), 1, 1)]) == [5 / 6, 2 / 4, 1 / 2]
    assert accept_by_depth([]) == []
    never = accept_by_depth(passes((0, 2)))
    assert never[0] == 0
    assert math.isnan(never[1])
    assert accept_by_depth(passes((0, 0))) == []


def test_tau_is_one_plus_the_products():
    """tau = 1 + sum of S_d, S_d the product of the conditional rates, when every pass offers the full depth."""
    generator = torch.Generator().manual_seed(0)
    steps = passes(*((int(a), 4) for a in torch.randint(0, 5, (200,), generator=generator)))
    rates, survival, value = accept_by_depth(steps), 1.0, 1.0
    for rate in rates:
        survival *= rate
        value += survival
    assert tau(steps) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_simulated_tau_equals_a_walked_chain(seed):
    generator = torch.Generator().manual_seed(seed)
    hits = torch.rand(4, 3, 20, generator=generator) < 0.6
    valid = torch.rand(4, 3, 20, generator=generator) < 0.8
    lengths = []
    for b in range(3):
        for i in range(20):
            if not valid[0, b, i]:
                continue
            length = 1
            for k in range(4):
                if not (hits[k, b, i] and valid[k, b, i]):
                    break
                length += 1
            lengths.append(length)
    assert float(simulated_tau(hits, valid)) == pytest.approx(sum(lengths) / len(lengths))
    accepted, starts = simulated_sums(hits, valid)
    assert (int(accepted), int(starts)) == (sum(lengths) - len(lengths), len(lengths))


def test_simulated_tau_is_the_joint_prefix_not_a_sum_of_rates():
    """Two starts: one hits only step 0, the other only step 1; the second never gets there."""
    hits = torch.tensor([[[True, False]], [[False, True]]])
    valid = torch.ones(2, 1, 2, dtype=torch.bool)
    assert float(simulated_tau(hits, valid)) == 1.5


@pytest.mark.parametrize("depth", [1, 3, 30])
def test_a_repeated_step_is_walked_position_by_position_inside_its_document(depth):
    generator = torch.Generator().manual_seed(depth)
    hits, valid = (torch.rand(1, 3, 20, generator=generator) < share for share in (0.7, 0.9))
    docs = torch.tensor([[0] * 20, [0] * 7 + [1] * 13, [0] * 5 + [1] * 10 + [-1] * 5])
    valid &= docs >= 0
    lengths = []
    for b in range(3):
        for i in range(20):
            if not valid[0, b, i]:
                continue
            length = 0
            while (
                length < depth
                and (at := i + length) < 20
                and docs[b, at] == docs[b, i]
                and hits[0, b, at]
                and valid[0, b, at]
            ):
                length += 1
            lengths.append(1 + length)
    run = runs_of_hits(hits, valid, docs, depth)
    assert float(simulated_tau(*run)) == pytest.approx(sum(lengths) / len(lengths))


def test_simulated_sums_add_up_over_batches():
    hits, valid = torch.rand(3, 4, 10) < 0.5, torch.rand(3, 4, 10) < 0.9
    whole = simulated_sums(hits, valid)
    parts = [simulated_sums(hits[:, r], valid[:, r]) for r in (slice(0, 1), slice(1, 4))]
    assert [int(x) for x in whole] == [int(a + b) for a, b in zip(*parts, strict=True)]


def test_simulated_tau_without_starts():
    nothing = torch.zeros(3, 2, 5, dtype=torch.bool)
    assert float(simulated_tau(nothing, nothing)) == 1.0


def test_many_accepted_drafts_do_not_wrap():
    """Sums are not kept in the narrow type the prefix is computed in."""
    ones = torch.ones(4, 10, 100, dtype=torch.bool)
    assert float(simulated_tau(ones, ones)) == 5.0
