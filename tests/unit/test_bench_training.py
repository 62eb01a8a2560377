"""The training part of the bench: its dense reference, its way of measuring memory, and the memory estimate."""

import dataclasses

import pytest
import torch
from oracles import pack, random_documents

from bench import training
from bench.dense_eagle3 import dense_loss
from bench.peak import Tracker
from bench.record import Options
from distill.losses import LossConfig
from distill.target.tiny import tiny_target
from distill.train.memory import estimate
from distill.train.module import step_loss


@pytest.mark.parametrize("seed", [0, 1])
def test_the_dense_implementation_computes_the_same(seed):
    """Value and every gradient, in double precision."""
    target = tiny_target(seed=3, vocab_size=40, hidden=16, layers=6, dtype=torch.float64)
    drafter = training.make_drafter(target, 27, 4, seed=seed).double()
    batch = pack(random_documents(2, 30, 40, seed=seed, share=0.8), 30)
    ours, dense = step_loss(drafter, batch, LossConfig()).loss, dense_loss(drafter, batch)
    torch.testing.assert_close(ours, dense, rtol=1e-9, atol=0)
    parameters = list(drafter.parameters())
    pairs = zip(torch.autograd.grad(ours, parameters), torch.autograd.grad(dense, parameters), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_the_tracker_counts_what_lives():
    old = torch.zeros(1000)
    with Tracker() as tracker:
        old.add_(1)
        view = old[10:]
        a = torch.zeros(100)
        b = a + 1
        c = b.view(10, 10)[1:]
        del b
        d = torch.cat([view[:50], c.flatten()[:50]])
        del c
        e = d * 2
        del e
    assert tracker.peak() == 3 * 400
    assert tracker.peak(without=[a]) == 2 * 400
    assert tracker.peak(without=[a, d]) == 400
    del view, d


def test_the_tracker_follows_a_backward_pass():
    """x W with 3 x 4 and 4 x 5: autograd keeps no copy, the output and two gradients are new."""
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    with Tracker() as tracker:
        (x @ w).sum().backward()
    assert tracker.peak(without=[x.grad, w.grad]) < 4 * (15 + 15 + 3)
    assert tracker.peak() >= 4 * (12 + 20)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "change",
    [{}, {"steps": 2}, {"draft_vocab": 2000}, {"draft_vocab": 64}, {"hidden": 128}, {"rows": 3}],
    ids=str,
)
def test_the_estimate_is_near_the_measured_peak(change, recompute):
    """Within a quarter, over lengths, rows, steps, vocabularies and widths."""
    sizes = {"length": 256, "steps": 5, "draft_vocab": 500, "hidden": 64, "rows": 1, **change}
    target = tiny_target(vocab_size=2048, hidden=sizes["hidden"], layers=4)
    drafter = training.make_drafter(target, sizes["draft_vocab"], sizes["steps"], seed=0)
    drafter.recompute_activations(recompute)
    batch = training.make_batch(2048, sizes["length"], seed=0)
    repeat = {name: getattr(batch, name).repeat(sizes["rows"], 1) for name in TENSORS}
    batch = dataclasses.replace(batch, **repeat)
    peak, _ = training.activation_peak(drafter, lambda: training.our_loss(drafter, batch))
    count = estimate(drafter, rows=sizes["rows"], length=sizes["length"], loss=LossConfig(), share=0.75).activations
    assert 0.75 < count / peak < 1.25


TENSORS = ("ids_BL", "loss_mask_BL", "positions_BL", "doc_BL")


def test_quick_form():
    """Every figure is there; tiny shapes meet no bar on purpose, but memory grows with the length alone."""
    found = {m.name: m for m in training.run(Options(target="tiny", threads=1, quick=True))}
    assert len(found) == 6
    assert all(m.part == "training" and m.value > 0 for m in found.values())
    assert found["activation peak per token, longest over shortest row"].met
    assert found["activation peak of the dense implementation over ours"].value > 1
