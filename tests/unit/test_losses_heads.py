"""Losses: heads, precision of the teacher, feature regression, memory, single positions by hand."""

import dataclasses
import math

import pytest
import torch
from loss_tools import NAMES, B, D, Head, K, L, V, W, gradients, reference, run, setting
from oracles import pack
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from distill.alignment import recurrent_mask
from distill.divergence import Rows, argmax, pointwise
from distill.losses import LossConfig, total
from distill.target.tiny import tiny_target
from distill.types import StepPrediction, TargetOutput

# -- heads


class TwoLayers(nn.Module):
    """A head with a bias, a hidden layer and a frozen weight."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(D, 6).double()
        self.second = nn.Linear(6, width).double()
        self.second.weight.requires_grad_(False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def linear(width, *, bias=False, frozen=False):
    return nn.Linear(D, width, bias=bias).double().requires_grad_(not frozen)


def capped(width):
    """A plain function, as ``logits`` of a target that caps them."""
    weight = torch.randn(width, D, dtype=torch.float64)
    return lambda hidden: 3 * torch.tanh(hidden @ weight.T / 3)


def one_for_all(head):
    return [head] * K


HEADS = {
    "shared": lambda width: one_for_all(linear(width)),
    "own": lambda width: [linear(width) for _ in range(K)],
    "frozen": lambda width: one_for_all(linear(width, frozen=True)),
    "some frozen": lambda width: [linear(width), linear(width, frozen=True), linear(width, bias=True)],
    "function": lambda width: one_for_all(capped(width)),
    "several weights": lambda width: one_for_all(TwoLayers(width)),
}


@pytest.mark.parametrize("pruned", [True, False], ids=["pruned", "full"])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name, hard", [*((name, 0.0) for name in NAMES), ("kl", 0.4)])
def test_every_kind_of_head(name, hard, kind, pruned):
    """Values and all gradients against full logits; frozen weights get none."""
    s = setting(pruned=pruned)
    heads = HEADS[kind](W if pruned else V)
    s.predictions = [dataclasses.replace(p, head=head) for p, head in zip(s.predictions, heads, strict=True)]
    modules = {id(head): head for head in heads if isinstance(head, nn.Module)}.values()
    weights = [w for module in modules for w in module.parameters()]
    learned = [*s.hiddens, *(w for w in weights if w.requires_grad)]
    want, got = reference(s, name, hard=hard), run(s, name, hard=hard)
    torch.testing.assert_close(got.loss, want[0].detach(), rtol=1e-9, atol=0)
    assert torch.equal(got.hits_KBL, want[3])
    pairs = zip(torch.autograd.grad(got.loss, learned), torch.autograd.grad(want[0], learned), strict=True)
    for ours, theirs in pairs:
        assert float(theirs.norm()) > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)
    run(s, name).loss.backward()
    assert all((w.grad is not None) == w.requires_grad for w in weights)


def test_predictions_through_the_same_head_go_together():
    """Equal heads are one head, also where they are bound methods, which are made anew at every look."""
    s = setting(pruned=False)
    calls = []

    class Counting(Head):
        def logits(self, hidden):
            calls.append(len(hidden))
            return super().logits(hidden)

    target = Counting()
    s.predictions = [dataclasses.replace(p, head=target.logits) for p in s.predictions]
    run(s, chunk=1000)
    assert calls == [int(sum(p.mask_BL.sum() for p in s.predictions))]


@pytest.mark.parametrize("family, bare", [("llama", True), ("gemma2", False)])
def test_the_targets_own_head(family, bare):
    """Two products where the target's logits are nothing but its output layer, autograd where they are capped."""
    s = setting(pruned=False)
    target = tiny_target(family, vocab_size=V, hidden=D, layers=2, dtype=torch.float64)
    assert isinstance(target.draft_head, nn.Linear) == bare
    s.target = target
    s.predictions = [dataclasses.replace(p, head=target.draft_head) for p in s.predictions]
    want, got = reference(s, "kl")[0], run(s, "kl").loss
    torch.testing.assert_close(got, want.detach(), rtol=1e-9, atol=0)
    for ours, theirs in zip(torch.autograd.grad(got, s.hiddens), torch.autograd.grad(want, s.hiddens), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


# -- gradients that are there and that are not


def test_head_over_frozen_features():
    """Hidden states that need no gradient (a bare head on the target's features): the head must still learn."""
    s = setting()
    for hidden in s.hiddens:
        hidden.requires_grad_(False)
    want, got = reference(s, "ce")[0], run(s).loss
    ours, theirs = torch.autograd.grad(got, s.head.weight)[0], torch.autograd.grad(want, s.head.weight)[0]
    assert float(theirs.norm()) > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def test_under_autocast():
    """fp32 weights, bf16 matrix products: gradients come out in fp32, near the exact ones."""
    s = setting(dtype=torch.float32, seed=2)
    exact = gradients(s, run(s).loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = run(s).loss
    for ours, theirs in zip(gradients(s, loss), exact, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - theirs).norm()) <= 0.05 * float(theirs.norm())


def test_the_teacher_keeps_its_precision_under_autocast():
    """What the target would choose must not depend on the precision the drafter trains in.

    Rounded to bf16, close logits tie or swap, so hits, misses and positions without loss would differ from decoding.
    """
    s = setting(dtype=torch.float32, seed=2)
    s.target.weight, s.output.last_BLD.data = s.target.weight.float(), s.output.last_BLD.float()
    seen = []

    def logits(hidden):
        out = hidden @ s.target.weight.T
        seen.append(out.dtype)
        return out

    s.target.logits = logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(s)
    assert set(seen) == {torch.float32}


# -- feature regression


def test_feature_regression():
    """Smooth L1 with beta 1, mean over D, sum over counting positions, weighted and normalised like the rest."""
    s = setting()
    wanted = torch.randn(B, L, D, dtype=torch.float64)
    mask = recurrent_mask(s.batch, 0)
    feature = StepPrediction(
        hidden_BLD=s.hiddens[0],
        head=s.head,
        shift=2,
        mask_BL=mask,
        weight=2.0,
        kind="feature",
        feature_target_BLD=wanted,
    )
    logits = StepPrediction(hidden_BLD=s.hiddens[0], head=s.head, shift=2, mask_BL=mask, weight=0.5)

    def smooth(error):
        a = error.abs()
        return torch.where(a < 1, 0.5 * a * a, a - 0.5)

    rows = mask.nonzero().tolist()
    regression = sum(smooth(s.hiddens[0][b, i] - wanted[b, i]).mean() for b, i in rows)
    s.predictions = [feature]
    got = run(s).loss
    want = 2.0 * regression / (2.0 * s.batch.denominator)
    torch.testing.assert_close(got, want.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients(s, got)[0], gradients(s, want)[0], rtol=1e-5, atol=1e-9)
    s.predictions = [logits]
    ce = reference(s, "ce")[0] * 0.5 * s.batch.denominator
    s.predictions = [feature, logits]
    result = run(s)
    both = result.loss
    assert float(result.terms["feature_0"][0]) == pytest.approx(float(regression.detach()), rel=1e-6)
    assert int(result.terms["feature_0"][1]) == int(result.count_K[0]) == len(rows)
    assert result.valid_KBL.shape == (1, B, L)
    regression = sum(smooth(s.hiddens[0][b, i] - wanted[b, i]).mean() for b, i in rows)
    want = (2.0 * regression + ce) / (2.5 * s.batch.denominator)
    torch.testing.assert_close(both, want.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients(s, both)[0], gradients(s, want)[0], rtol=1e-5, atol=1e-9)


def test_feature_regression_keeps_double_precision():
    s = setting()
    wanted = s.hiddens[0].detach() + 1e-9
    s.predictions = [
        StepPrediction(
            hidden_BLD=s.hiddens[0],
            head=s.head,
            shift=2,
            mask_BL=recurrent_mask(s.batch, 0),
            weight=1.0,
            kind="feature",
            feature_target_BLD=wanted,
        )
    ]
    share = float(s.predictions[0].mask_BL.sum()) / s.batch.denominator
    assert float(run(s).loss.detach()) == pytest.approx(0.5e-18 * share, rel=1e-4, abs=0)


# -- memory


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned, forward or backward."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_never_held_whole(name):
    length, vocab, chunk = 300, 2000, 4
    batch = pack([[(torch.randint(0, 9, (length,)).tolist(), [1] * length)]], length)
    head, target = nn.Linear(D, vocab, bias=False), Head(vocab, dtype=torch.float32)
    hidden = torch.randn(1, length, D, requires_grad=True)
    predictions = [
        StepPrediction(hidden_BLD=hidden, head=head, shift=2 + k, mask_BL=recurrent_mask(batch, k), weight=1.0)
        for k in range(K)
    ]
    output = TargetOutput(last_BLD=torch.randn(1, length, D), taps={})
    with Largest() as largest:
        total(
            predictions, batch, output, target=target, vocab=None, config=LossConfig(name=name, chunk=chunk)
        ).loss.backward()
    assert largest.numel == max(vocab * D, K * chunk * vocab), "a chunk of all steps is the largest thing there is"
    assert largest.numel * 20 < length * vocab
    with Largest() as control:
        head(hidden)
    assert control.numel == length * vocab


# -- one position by hand


@pytest.mark.parametrize("width", [1, 30, 64, 256, 1000, 8192])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_argmax_is_the_first_of_equals(width, dtype):
    """Few distinct values, so that nearly every row has ties, inside a block of 64 and across blocks."""
    x = torch.randint(-3, 3, (50, width), generator=torch.Generator().manual_seed(width)).to(dtype)
    want = [row.index(max(row)) for row in x.tolist()]
    assert argmax(x).tolist() == want
    assert argmax(x[:, : width // 2 + 1]).tolist() == [row.index(max(row)) for row in x[:, : width // 2 + 1].tolist()]
    assert argmax(x[:0]).tolist() == []


def test_pieces_change_nothing(monkeypatch):
    """On a CPU the logits are worked on a few rows at a time."""
    for pruned in (True, False):
        s = setting(pruned=pruned)
        whole = run(s, "jsd", hard=0.2)
        monkeypatch.setattr("distill.losses.piece_rows", lambda *_: 2)
        pieces = run(s, "jsd", hard=0.2)
        monkeypatch.undo()
        torch.testing.assert_close(pieces.loss, whole.loss, rtol=1e-12, atol=0)
        assert torch.equal(pieces.hits_KBL, whole.hits_KBL)
        for one, two in zip(gradients(s, pieces.loss), gradients(s, whole.loss), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-15)


def test_heads_without_a_position_in_a_chunk():
    """Steps through heads of their own count in different places: some chunks have nothing for some heads."""
    s = setting(pruned=False)
    masks = torch.zeros(K, B, L, dtype=torch.bool)
    masks[0, 0, 2] = masks[1, 1, 5] = True
    heads = [linear(V) for _ in range(K)]
    s.predictions = [
        dataclasses.replace(p, head=head, mask_BL=mask)
        for p, head, mask in zip(s.predictions, heads, masks, strict=True)
    ]
    want, got = reference(s, "ce"), run(s, "ce", chunk=1)
    torch.testing.assert_close(got.loss, want[0].detach(), rtol=1e-12, atol=0)
    assert got.count_K.tolist() == [1, 1, 0]
    got.loss.backward()
    assert [float(h.weight.grad.abs().sum()) > 0 for h in heads] == [True, True, False]


def test_pointwise_by_hand():
    """Three tokens, of which the draft knows the first two: p = (1/2, 1/4, 1/4), q = (1/4, 3/4)."""
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    logits_p, logits_q = p.log()[None], torch.tensor([[0.25, 0.75]], dtype=torch.float64).log()
    kept = (2 / 3, 1 / 3)
    want = {
        "ce": -(kept[0] * math.log(0.25) + kept[1] * math.log(0.75)),
        "kl": kept[0] * math.log(kept[0] / 0.25) + kept[1] * math.log(kept[1] / 0.75),
        "reverse_kl": 0.25 * math.log(0.25 / kept[0]) + 0.75 * math.log(0.75 / kept[1]),
        "tv": 1 - (0.25 + 0.25),  # the target's mass outside the draft's vocabulary can never be accepted
        "lk": -math.log(0.5),
        "hard": -math.log(0.75),  # the second token was written
    }
    middle = [0.5 * (p + q) for p, q in zip(kept, (0.25, 0.75), strict=True)]
    want["jsd"] = 0.5 * sum(
        x * math.log(x / m) for both in (kept, (0.25, 0.75)) for x, m in zip(both, middle, strict=True)
    )
    assert set(want) == set(NAMES)
    for name, value in want.items():
        rows = Rows.make(
            name,
            logits_p[:, :2],
            logits_p.logsumexp(-1),
            choice_C=torch.tensor([0]),
            written_C=torch.tensor([1]),
        )
        learned = pointwise(name, rows, logits_q)
        assert float(learned.loss_C) == pytest.approx(value, rel=1e-12)
        assert float(learned.alpha_C) == pytest.approx(0.5, rel=1e-12)


def test_a_draft_equal_to_the_target():
    """KL and TV are 0, alpha is 1, and there is no gradient."""
    s = setting(pruned=False, steps=1)
    s.output.last_BLD.copy_(s.hiddens[0].detach().roll(1, 1))
    s.target.logits = lambda hidden: hidden @ s.head.weight.detach().T
    for name in ("kl", "reverse_kl", "jsd", "tv", "lk"):
        got = run(s, name)
        assert float(got.loss.detach()) == pytest.approx(0, abs=1e-12)
        assert got.alpha_K.tolist() == pytest.approx(got.count_K.tolist())
        assert torch.equal(got.hits_KBL, got.valid_KBL)
        if name in ("kl", "reverse_kl", "jsd"):
            assert all(float(g.abs().max()) < 1e-12 for g in gradients(s, got.loss))
