"""Losses: the written token and mixtures with it, ranks of the target's choice, predictions that are no drafts."""

import dataclasses

import pytest
import torch
from loss_tools import SOFT, B, D, K, L, gradients, reference, run, setting, top_reference

from distill.alignment import generated_run
from distill.errors import UserError
from distill.losses import LossConfig
from distill.train.module import Sums
from distill.types import StepPrediction

MIXTURES = [(name, {"hard": share}) for name in SOFT for share in (0.3, 1.0)] + [
    ("jsd", {"beta": 0.1}),
    ("jsd", {"beta": 0.9, "hard": 0.5}),
]


@pytest.mark.parametrize("pruned", [True, False], ids=["pruned", "full"])
@pytest.mark.parametrize("name, options", MIXTURES, ids=str)
def test_mixtures(name, options, pruned):
    """(1 - h) soft + h hard, where each of the two has something to teach."""
    s = setting(pruned=pruned)
    want, loss_K, alpha_K, *_ = reference(s, name, **options)
    got = run(s, name, **options)
    if pruned:
        assert_all_four_cases(s)
    torch.testing.assert_close(got.loss, want.detach(), rtol=1e-12, atol=0)
    assert got.loss_K.tolist() == pytest.approx(loss_K, rel=1e-12)
    assert got.alpha_K.tolist() == pytest.approx(alpha_K, rel=1e-12)
    for ours, theirs in zip(gradients(s, got.loss), gradients(s, want), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def assert_all_four_cases(s):
    """The target's choice is inside the draft vocabulary or not, and so is the token that was written."""
    ids = s.vocab.target_ids.tolist()
    best = s.target.logits(s.output.last_BLD).argmax(-1)
    cases = {
        (int(best[b, i + p.shift - 1]) in ids, int(s.batch.ids_BL[b, i + p.shift]) in ids)
        for p in s.predictions
        for b, i in p.mask_BL.nonzero().tolist()
    }
    assert len(cases) == 4


@pytest.mark.parametrize("name, options", [("hard", {}), ("jsd", {"beta": 0.2}), ("kl", {"hard": 0.4})], ids=str)
def test_mixtures_in_single_precision(name, options):
    s, wide = setting(dtype=torch.float32, seed=2), setting(seed=2)
    wide.head.weight.data.copy_(s.head.weight.data)
    for exact, rounded in zip(wide.hiddens, s.hiddens, strict=True):
        exact.data.copy_(rounded.data)
    want, got = reference(wide, name, **options)[0], run(s, name, **options).loss
    torch.testing.assert_close(got.double(), want.detach(), rtol=1e-5, atol=0)
    for ours, theirs in zip(gradients(s, got), gradients(wide, want), strict=True):
        assert float((ours.double() - theirs).norm()) < 1e-5 * float(theirs.norm())


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"beta": 1.0}, {"hard": -0.1}, {"hard": 1.1}], ids=str)
def test_shares_out_of_range_are_refused(options):
    ((field, value),) = options.items()
    with pytest.raises(UserError, match=rf"^loss\.{field} must be between 0 and 1.*, got {value}$"):
        LossConfig(**options)


@pytest.mark.parametrize("pruned", [True, False], ids=["pruned", "full"])
def test_top_hits_by_sorting(pruned):
    """Counted without gradients only; a choice outside the draft vocabulary is nobody's."""
    s = setting(pruned=pruned, length=80)
    for k, hidden in enumerate(s.hiddens):  # a draft worth its name: hits at every rank
        hidden.data.copy_(s.output.last_BLD.roll(-1 - k, 1) + 0.7 * hidden.data)
    s.head.weight.data.copy_(s.target.weight if s.vocab is None else s.target.weight[s.vocab.target_ids])
    assert run(s).top_KJ is None
    with torch.no_grad():
        got = run(s)
    assert got.top_KJ.tolist() == top_reference(s)
    assert got.top_KJ[:, 0].tolist() == got.hits_K.tolist()
    assert bool((got.top_KJ.diff(dim=1) > 0).any(0).all()), "no choice of some rank"
    assert not pruned or int(got.top_KJ[:, -1].sum()) < int(got.count_K.sum())


def test_a_term_that_is_not_drafted():
    """It is in the loss, with its weight in the sum of weights; accuracies and the simulated tau do without it."""
    s = setting(pruned=False)
    hidden = torch.randn(B, L, D, dtype=torch.float64, requires_grad=True)
    mask = generated_run(s.batch, 1, 1)
    base = StepPrediction(hidden_BLD=hidden, head=s.head, shift=1, mask_BL=mask, weight=1.5, drafted=False)
    drafted = list(s.predictions)
    alone = run(s, "kl")
    s.predictions, s.hiddens = [drafted[0], base, *drafted[1:]], [*s.hiddens, hidden]
    want, loss_K, *_ = reference(s, "kl")
    with torch.no_grad():
        top = run(s, "kl").top_KJ
    got = run(s, "kl")
    torch.testing.assert_close(got.loss, want.detach(), rtol=1e-9, atol=0)
    for ours, theirs in zip(gradients(s, got.loss), gradients(s, want), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)
    for name in ("loss_K", "hits_K", "alpha_K", "count_K", "hits_KBL", "valid_KBL"):
        torch.testing.assert_close(getattr(got, name), getattr(alone, name), rtol=1e-12, atol=0)
    assert top.shape == (K, 5)
    total_, count = got.terms["other_0"]
    assert set(got.terms) == {"other_0"}
    assert float(total_) == pytest.approx(loss_K[1], rel=1e-9)
    assert int(count) == int(mask.sum())


def test_means_of_every_kind_of_term():
    """``Sums`` over two micro batches: each mean is over its own positions."""
    results = []
    for seed in (0, 1):
        s = setting(seed=seed)
        first = s.predictions[0]
        wanted = torch.randn(B, L, D, dtype=torch.float64)
        feature = dataclasses.replace(first, kind="feature", feature_target_BLD=wanted, weight=3.0)
        other = dataclasses.replace(s.predictions[1], drafted=False)
        s.predictions = [feature, first, other, s.predictions[2]]
        with torch.no_grad():
            results.append(run(s))
    sums = Sums()
    for result in results:
        sums.add(result, doc_BL=s.batch.doc_BL, tokens=10.0, denominator=10.0)
    means = sums.means("val")
    names = {"loss", "tau", "supervised_tokens", "feature_0", "other_0"}
    names |= {f"{kind}_{k}" for kind in ("acc", "alpha", "top2", "top3", "top4", "top5") for k in range(2)}
    assert set(means) == {f"val/{name}" for name in names}
    for term in ("feature_0", "other_0"):
        value = sum(float(r.terms[term][0]) for r in results) / sum(int(r.terms[term][1]) for r in results)
        assert means[f"val/{term}"] == pytest.approx(value)
    counts = sum(r.count_K for r in results)
    for k in range(2):
        assert means[f"val/top3_{k}"] == pytest.approx(float(sum(r.top_KJ[k, 2] for r in results) / counts[k]))
        assert means[f"val/acc_{k}"] <= means[f"val/top2_{k}"] <= means[f"val/top5_{k}"]
