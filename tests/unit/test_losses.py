"""Losses, gradients and counts against full-logit references written from their definitions.

The references loop over positions, hold every logit and leave gradients to autograd.
"""

import math

import pytest
import torch
from loss_tools import NAMES, B, D, Head, K, L, V, gradients, reference, run, setting
from oracles import pack
from torch import nn

from distill.alignment import recurrent_mask
from distill.losses import CHUNK_LOGITS, LossConfig, chunk_rows, total
from distill.types import Batch, StepPrediction, TargetOutput


@pytest.mark.parametrize("pruned", [True, False], ids=["pruned", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_values_gradients_and_counts(name, pruned):
    s = setting(pruned=pruned)
    want, loss_K, alpha_K, hits, count = reference(s, name)
    got = run(s, name)
    assert min(count) >= 3
    torch.testing.assert_close(got.loss, want.detach(), rtol=1e-12, atol=0)
    assert got.loss_K.tolist() == pytest.approx(loss_K, rel=1e-12)
    assert got.alpha_K.tolist() == pytest.approx(alpha_K, rel=1e-12)
    assert got.count_K.tolist() == count
    assert torch.equal(got.hits_KBL, hits)
    assert torch.equal(got.valid_KBL, torch.stack([p.mask_BL for p in s.predictions]))
    assert got.hits_K.tolist() == [int(h.sum()) for h in hits]
    if pruned:
        ids = s.vocab.target_ids.tolist()
        best = s.target.logits(s.output.last_BLD).argmax(-1)
        assert any(int(best[b, i]) not in ids for b in range(B) for i in range(L)), "no target choice outside"
    for ours, theirs in zip(gradients(s, got.loss), gradients(s, want), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_by_finite_differences(name):
    """Independent of autograd: nudge a few weights of the head and of a hidden state."""
    s = setting()
    grads = gradients(s, run(s, name).loss)
    i = int(s.predictions[0].mask_BL[0].nonzero()[0])
    for tensor, grad, at in ((s.head.weight, grads[-1], (3, 2)), (s.hiddens[0], grads[0], (0, i, 4))):
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                tensor[at] += sign * 1e-6
                values.append(float(run(s, name).loss.detach()))
                tensor[at] -= sign * 1e-6
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(float(grad[at]), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_chunk_size_changes_nothing(name):
    s = setting()
    first = run(s, name, chunk=1)
    first_grads = gradients(s, first.loss)
    for chunk in (2, 3, 5, 11, B * L - 1, B * L, 1000):
        other = run(s, name, chunk=chunk)
        torch.testing.assert_close(other.loss, first.loss, rtol=1e-12, atol=0)
        assert torch.equal(other.hits_KBL, first.hits_KBL)
        for one, two in zip(first_grads, gradients(s, other.loss), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-15)


def test_chunk_size_changes_nothing_in_half_precision():
    """Many small additions to a bf16 sum lose what is below 1/256 of it; gradients must be summed wider.

    Against fp64 on the same rounded inputs. One rounding of a bf16 gradient costs at most 2**-9 of it, the logits'
    and the softmax's a little more: 2 per cent of the norm is generous.
    """
    torch.manual_seed(0)
    length = 1024
    batch = pack([[(torch.randint(0, V, (length,)).tolist(), [1] * length)]], length)
    target, output = Head(), TargetOutput(last_BLD=torch.randn(1, length, D, dtype=torch.float64), taps={})
    weight = torch.randn(V, D).bfloat16()
    hidden = torch.randn(1, length, D).bfloat16()
    found = {}
    for dtype, chunk in ((torch.float64, length), (torch.bfloat16, length), (torch.bfloat16, 1)):
        head = nn.Linear(D, V, bias=False).to(dtype)
        head.weight.data.copy_(weight)
        prediction = StepPrediction(
            hidden_BLD=hidden.to(dtype), head=head, shift=2, mask_BL=recurrent_mask(batch, 0), weight=1.0
        )
        prediction.hidden_BLD.requires_grad_()
        config = LossConfig(chunk=chunk)
        total([prediction], batch, output, target=target, vocab=None, config=config).loss.backward()
        found[dtype, chunk] = head.weight.grad.double()
    exact = found[torch.float64, length]
    for (dtype, chunk), grad in found.items():
        assert float((grad - exact).norm() / exact.norm()) < 0.02, (dtype, chunk)


def test_half_precision_hidden_states():
    """bf16 features and head, losses in fp32: within the rounding of bf16 logits of the exact value.

    Logits up to about 5 carry an error of up to 5 * 2**-9 = 0.01; a log-probability twice that.
    """
    for name in NAMES:
        s = setting(dtype=torch.bfloat16, seed=3)
        got = run(s, name)
        assert got.loss.dtype == torch.float32
        grads = gradients(s, got.loss)
        wide = setting(dtype=torch.float64, seed=3)
        wide.head.weight.data.copy_(s.head.weight.data)
        for exact, rounded in zip(wide.hiddens, s.hiddens, strict=True):
            exact.data.copy_(rounded.data)
        want = reference(wide, name)[0]
        assert float(got.loss.detach()) == pytest.approx(float(want.detach()), abs=0.02)
        for ours, theirs in zip(grads, gradients(wide, want), strict=True):
            assert ours.dtype == torch.bfloat16
            assert float((ours.double() - theirs).norm()) < 0.05 * float(theirs.norm())


REGIMES = {
    "packed": {},
    "full vocabulary": {"pruned": False},
    "one step": {"steps": 1},
    "another packing": {"seed": 4},
    "long": {"length": 70, "seed": 1},
}


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", NAMES)
def test_single_precision(name, regime, chunk):
    """fp32 against the fp64 reference on the same numbers: 1e-5 of the value and of the norm of every gradient."""
    s = setting(dtype=torch.float32, **{"seed": 2, **REGIMES[regime]})
    got = run(s, name, chunk=chunk)
    grads = gradients(s, got.loss)
    wide = setting(dtype=torch.float64, **{"seed": 2, **REGIMES[regime]})
    wide.head.weight.data.copy_(s.head.weight.data)
    for exact, rounded in zip(wide.hiddens, s.hiddens, strict=True):
        exact.data.copy_(rounded.data)
    want = reference(wide, name)[0]
    torch.testing.assert_close(got.loss.double(), want.detach().double(), rtol=1e-5, atol=0)
    for ours, theirs in zip(grads, gradients(wide, want), strict=True):
        assert float((ours.double() - theirs).norm()) < 1e-5 * float(theirs.norm())


@pytest.mark.parametrize("name", NAMES)
def test_extreme_logits_stay_finite(name):
    """A certain target and a certain draft that disagree: large losses, never NaN."""
    s = setting()
    s.target.logits = lambda hidden: 1000 * hidden @ s.target.weight.T
    s.head.weight.data.mul_(1000)
    got = run(s, name)
    assert math.isfinite(float(got.loss.detach()))
    assert all(bool(g.isfinite().all()) for g in gradients(s, got.loss))


def test_validation_makes_no_gradients(monkeypatch):
    """Under ``no_grad`` the same figures, and no weight's gradient is ever made."""
    s = setting()
    want = run(s)
    monkeypatch.setattr("distill.heads._Linear.backward", None)
    with torch.no_grad():
        got = run(s)
    assert not got.loss.requires_grad
    torch.testing.assert_close(got.loss, want.loss.detach(), rtol=1e-12, atol=0)
    assert torch.equal(got.hits_KBL, want.hits_KBL)


def test_autocast_does_not_round_the_sum():
    s = setting(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(s)
    assert got.loss.dtype == torch.float32
    weights = [p.weight for p in s.predictions]
    want = sum(w * x for w, x in zip(weights, got.loss_K.tolist(), strict=True)) / (sum(weights) * s.batch.denominator)
    torch.testing.assert_close(float(got.loss.detach()), want, rtol=1e-6, atol=0)


def test_chunks_shrink_as_vocabularies_grow():
    """Each kind of logits stays within its budget and fills it, and chunks of the draft's fit into the teacher's."""
    cpu = torch.device("cpu")
    for teacher, draft, steps in (
        (49152, 49152, 7),
        (49152, 8192, 7),
        (8192, 8192, 1),
        (262144, 262144, 7),
        (64, 16, 2),
    ):
        many, few = chunk_rows(LossConfig(), teacher_size=teacher, draft_size=draft, steps=steps, device=cpu)
        for_teacher, for_draft = CHUNK_LOGITS["cpu"]
        assert many % few == 0
        assert many * teacher <= for_teacher < (many + few) * teacher
        assert few * steps * draft <= for_draft
        assert for_draft < (few + 1) * steps * draft or few == many
    assert chunk_rows(LossConfig(chunk=9), teacher_size=64, draft_size=64, steps=2, device=cpu) == (9, 9)
    assert chunk_rows(LossConfig(), teacher_size=2**30, draft_size=8, steps=2, device=cpu) == (1, 1)


# -- what counts


@pytest.mark.parametrize("name", NAMES)
def test_one_supervised_token(name):
    s = setting(steps=1)
    only = torch.zeros(B, L, dtype=torch.bool)
    only[1, 0] = True
    s.predictions = [StepPrediction(hidden_BLD=s.hiddens[0], head=s.head, shift=2, mask_BL=only, weight=1.0)]
    # The teacher's row 1 must have its choice inside, or nothing is learnt there.
    s.output.last_BLD[1, 1] = 0.5 * s.target.weight[s.vocab.target_ids[4]]
    assert int(s.target.logits(s.output.last_BLD[1, 1]).argmax()) in s.vocab.target_ids.tolist()
    want = reference(s, name)[0]
    got = run(s, name)
    assert float(got.loss.detach()) > 0
    torch.testing.assert_close(got.loss, want.detach(), rtol=1e-12, atol=0)
    grad = gradients(s, got.loss)[0].abs().sum(-1) > 0
    assert grad.nonzero().tolist() == [[1, 0]]


@pytest.mark.parametrize("name", NAMES)
def test_no_supervised_token_in_a_micro_batch(name):
    """Another micro batch of the step has some: this one adds exactly nothing."""
    s = setting()
    nothing = torch.zeros(B, L, dtype=torch.bool)
    s.predictions = [
        StepPrediction(hidden_BLD=h, head=s.head, shift=2 + k, mask_BL=nothing, weight=1.0)
        for k, h in enumerate(s.hiddens)
    ]
    got = run(s, name)
    assert float(got.loss.detach()) == 0
    assert got.loss.requires_grad, "backward must be possible"
    assert all(bool((g == 0).all()) for g in gradients(s, got.loss))
    assert got.count_K.tolist() == got.hits_K.tolist() == [0] * K


def test_no_supervised_token_in_the_whole_step():
    """The denominator is 0 then: the loss is 0 and teaches nothing, rather than NaN everywhere."""
    s = setting()
    batch = Batch(
        ids_BL=s.batch.ids_BL,
        loss_mask_BL=torch.zeros_like(s.batch.loss_mask_BL),
        positions_BL=s.batch.positions_BL,
        doc_BL=s.batch.doc_BL,
        denominator=0.0,
    )
    s.batch = batch
    s.predictions = [
        StepPrediction(hidden_BLD=h, head=s.head, shift=2 + k, mask_BL=recurrent_mask(batch, k), weight=1.0)
        for k, h in enumerate(s.hiddens)
    ]
    got = run(s)
    assert float(got.loss.detach()) == 0
    assert all(bool((g == 0).all()) for g in gradients(s, got.loss))


@pytest.mark.parametrize("name", ["ce", "hard"])
def test_choices_outside_the_vocabulary_are_misses_without_loss(name):
    """For ``hard`` the token that was written decides, and for the metrics still the target's choice."""
    s = setting(steps=1, seed=5)
    inside = s.vocab.target_ids.tolist()
    got = run(s, name)
    best = s.target.logits(s.output.last_BLD).argmax(-1)
    mask = s.predictions[0].mask_BL
    decides = s.batch.ids_BL.roll(-1, 1) if name == "hard" else best  # of the row that speaks about it
    outside = [(b, i) for b, i in mask.nonzero().tolist() if int(decides[b, i + 1]) not in inside]
    assert 0 < len(outside) < int(mask.sum())
    grad = gradients(s, got.loss)[0].abs().sum(-1)
    for b, i in mask.nonzero().tolist():
        assert (float(grad[b, i]) == 0) == ((b, i) in outside)
        if int(best[b, i + 1]) not in inside:
            assert not got.hits_KBL[0, b, i]
            assert got.valid_KBL[0, b, i]
    assert int(got.count_K[0]) == int(mask.sum())


def test_prediction_at_the_very_end_of_the_last_row():
    """The highest teacher row that exists; nothing may wrap round to the first row."""
    s = setting(steps=1)
    mask = torch.zeros(B, L, dtype=torch.bool)
    mask[1, L - 2] = mask[0, L - 2] = True
    s.predictions = [StepPrediction(hidden_BLD=s.hiddens[0], head=s.head, shift=2, mask_BL=mask, weight=1.0)]
    want = reference(s, "kl")
    got = run(s, "kl")
    torch.testing.assert_close(got.loss, want[0].detach(), rtol=1e-12, atol=0)
    assert got.alpha_K.tolist() == pytest.approx(want[2])


@pytest.mark.parametrize("shift", [1, 2, 5])
def test_any_shift(shift):
    """Shift 1: the draft model, whose teacher row is its own position."""
    s = setting(steps=1)
    mask = torch.zeros(B, L, dtype=torch.bool)
    mask[:, : L - shift + 1] = torch.rand(B, L - shift + 1) < 0.7
    s.predictions = [StepPrediction(hidden_BLD=s.hiddens[0], head=s.head, shift=shift, mask_BL=mask, weight=1.0)]
    want = reference(s, "ce")
    got = run(s, "ce", chunk=4)
    torch.testing.assert_close(got.loss, want[0].detach(), rtol=1e-12, atol=0)
    for ours, theirs in zip(gradients(s, got.loss), gradients(s, want[0]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


# -- normalisation


def test_accumulation_leaves_the_gradient_the_same():
    """Two micro batches with the step's denominator add up to the one big batch."""
    s = setting()
    whole = gradients(s, run(s).loss)
    parts = [torch.zeros_like(g) for g in whole]
    for b in range(B):
        rows = slice(b, b + 1)
        batch = Batch(
            ids_BL=s.batch.ids_BL[rows],
            loss_mask_BL=s.batch.loss_mask_BL[rows],
            positions_BL=s.batch.positions_BL[rows],
            doc_BL=s.batch.doc_BL[rows],
            denominator=s.batch.denominator,
        )
        predictions = [
            StepPrediction(
                hidden_BLD=p.hidden_BLD[rows], head=p.head, shift=p.shift, mask_BL=p.mask_BL[rows], weight=p.weight
            )
            for p in s.predictions
        ]
        output = TargetOutput(last_BLD=s.output.last_BLD[rows], taps={})
        loss = total(predictions, batch, output, target=s.target, vocab=s.vocab, config=LossConfig()).loss
        for part, grad in zip(parts, gradients(s, loss), strict=True):
            part += grad
    for part, grad in zip(parts, whole, strict=True):
        torch.testing.assert_close(part, grad, rtol=1e-11, atol=1e-15)


def test_twice_the_data_gives_the_same_gradient():
    """The same rows twice, twice the denominator: mask density and batch size do not change the step size."""
    s = setting()
    once = gradients(s, run(s).loss)[-1]
    batch = Batch(
        ids_BL=s.batch.ids_BL.repeat(2, 1),
        loss_mask_BL=s.batch.loss_mask_BL.repeat(2, 1),
        positions_BL=s.batch.positions_BL.repeat(2, 1),
        doc_BL=s.batch.doc_BL.repeat(2, 1),
        denominator=2 * s.batch.denominator,
    )
    predictions = [
        StepPrediction(
            hidden_BLD=p.hidden_BLD.repeat(2, 1, 1),
            head=p.head,
            shift=p.shift,
            mask_BL=p.mask_BL.repeat(2, 1),
            weight=p.weight,
        )
        for p in s.predictions
    ]
    output = TargetOutput(last_BLD=s.output.last_BLD.repeat(2, 1, 1), taps={})
    loss = total(predictions, batch, output, target=s.target, vocab=s.vocab, config=LossConfig()).loss
    torch.testing.assert_close(gradients(s, loss)[-1], once, rtol=1e-11, atol=1e-15)


def test_weights_are_normalised_over_steps():
    """The same prediction five times, or with ten times the weight, is the same loss."""
    s = setting(steps=1)
    one = s.predictions[0]
    base = run(s).loss
    s.predictions = [one] * 5
    torch.testing.assert_close(run(s).loss, base, rtol=1e-12, atol=0)
    s.predictions = [
        StepPrediction(hidden_BLD=one.hidden_BLD, head=one.head, shift=2, mask_BL=one.mask_BL, weight=10.0)
    ]
    torch.testing.assert_close(run(s).loss, base, rtol=1e-12, atol=0)


def test_incoming_gradient_scales():
    s = setting()
    once = gradients(s, run(s).loss)
    thrice = gradients(s, 3 * run(s).loss + 5)
    for a, b in zip(once, thrice, strict=True):
        torch.testing.assert_close(3 * a, b, rtol=1e-12, atol=0)
