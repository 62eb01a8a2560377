"""The kernels that choose candidates, and the books they keep, against the same in PyTorch."""

import threading
from types import SimpleNamespace

import pytest
import torch

from distill import kernels
from distill.candidates import best
from distill.decode.coupling import CoupledRanker, PlainRanker
from distill.growing import grow
from distill.sampling import Sampling
from distill.tree import Chain, Dynamic, Static, geometry

needs_kernels = pytest.mark.skipif(kernels.load() is None, reason=f"kernels not available: {kernels.why_not()}")
BUSHY = ((0,), (1,), (3,), (0, 0), (0, 1), (1, 0), (3, 2), (0, 0, 0), (1, 0, 2), (3, 2, 1))
PLANS = [
    Chain(4),
    Static(BUSHY),
    Static(tuple((r,) for r in range(6))),
    Dynamic(top_k=1, depth=3, total=4),
    Dynamic(top_k=4, depth=4, total=12),
    Dynamic(top_k=3, depth=3, total=2),
    Dynamic(top_k=40, depth=2, total=500),
]


@pytest.fixture
def plain(monkeypatch):
    """Run something without the kernels."""

    def call(function, *arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "load", lambda: None)
            return function(*arguments, **options)

    return call


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", [1, 15, 16, 100, 256, 257, 5000])
@pytest.mark.parametrize(
    "options", [{}, {"scale": 1.0}, {"temperature": 0.7}, {"scale": 0.6}, {"noise": True}], ids=str
)
def test_best(width, dtype, options, plain):
    generator = torch.Generator().manual_seed(width)
    logits = (4 * torch.randn(3, 2, width, generator=generator)).to(dtype)
    options = dict(options)
    if options.pop("noise", False):
        noise_BPW = torch.randn(3, 4, width, generator=generator)
        options |= {"noise_BPW": noise_BPW, "depth": 2, "temperature": 1.3, "scale": 0.8}
        scores = logits.float() / 1.3 + noise_BPW[:, 2, None]
    else:
        scores = logits.float() / options.get("temperature", 1.0)
    values, ids = best(logits, 5, **options)
    theirs, _ = plain(best, logits, 5, **options)
    assert values.shape == ids.shape == (3, 2, min(5, width))
    assert len({tuple(row) for row in ids.flatten(0, 1).tolist()}) > (width > 1), "rows must differ"
    if "scale" in options:
        wide = (options["scale"] * scores).double().log_softmax(-1)
        torch.testing.assert_close(values.double(), wide.gather(2, ids), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values, theirs, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(values, theirs), "scores are the same to the last bit"
    # Of equal scores (bf16 has many) the lower index comes first.
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(ids, order[..., : ids.shape[-1]])


@needs_kernels
def test_what_is_left_of_filtered_scores():
    """-inf is no candidate: it comes last, with a chance of 0."""
    scores = torch.full((1, 1, 40), float("-inf"))
    scores[0, 0, [7, 30]] = torch.tensor([1.0, 2.0])
    values, ids = best(scores, 4, scale=1.0)
    assert ids[0, 0, :2].tolist() == [30, 7]
    torch.testing.assert_close(values[0, 0, :2], torch.tensor([2.0, 1.0]).log_softmax(0))
    assert values[0, 0, 2:].tolist() == [float("-inf")] * 2
    assert best(torch.full((1, 1, 40), float("-inf")), 2, scale=1.0)[0].tolist() == [[[float("-inf")] * 2]]


@needs_kernels
def test_certainty_is_a_log_chance_of_exactly_zero():
    """A child must never be worth more than its parent."""
    for seed in range(50):
        scores = torch.randn(1, 1, 300, generator=torch.Generator().manual_seed(seed))
        scores[0, 0, seed] = 200.0
        values, ids = best(scores, 1, scale=1.7)
        assert (values.item(), ids.item()) == (0.0, seed)


class Drafter:
    """Logits that depend on the depth, the row, the token and its parent's place; ids shifted by 3."""

    def __init__(self, vocab: int, *, shared: bool = False, soft: bool = True):
        self.vocab, self.shared, self.soft = vocab, shared, soft

    def step(self, state, frontier):
        nodes = torch.zeros_like(frontier.tokens_BF[:, :1]) if self.shared else frontier.tokens_BF + frontier.parent_BF
        rows = torch.arange(len(nodes))[:, None, None]
        seen = 0 if self.shared else frontier.ancestors_BFM.sum(-1)[:, :, None]
        x = (nodes[:, :, None] + 2 * seen + 5 * frontier.depth + 11 * rows + 1) * (torch.arange(self.vocab) + 3)
        logits = 3 * torch.sin(x.double() * 1.7).float()
        return logits if self.soft else logits.masked_fill(logits < 1, float("-inf"))

    def to_target_ids(self, ids):
        return ids + 3


NOISE_BPW = torch.randn(2, 5, 30, generator=torch.Generator().manual_seed(9))


def grown(plan, drafter, ranker=None, root=(4, 9)):
    tree = grow(drafter, SimpleNamespace(), plan, torch.tensor(root), ranker or PlainRanker(Sampling()))
    return tree.tokens_BN, tree.parents_BN, *geometry(tree.parents_BN, tree.max_depth)


KINDS = {"plain": {}, "shared": {"shared": True}, "small": {"vocab": 3}, "lookup": {"soft": False}}
CASES = [(plan, kind) for plan in PLANS for kind in KINDS if kind != "lookup" or isinstance(plan, Static)]


@needs_kernels
@pytest.mark.parametrize("plan, kind", CASES, ids=str)
def test_trees(plan, kind, plain):
    drafter = Drafter(**{"vocab": 30, **KINDS[kind]})
    for ours, theirs in zip(grown(plan, drafter), plain(grown, plan, drafter), strict=True):
        assert torch.equal(ours, theirs)


@needs_kernels
@pytest.mark.parametrize("top_k", [0, 6])
@pytest.mark.parametrize("plan", PLANS[:-1], ids=str)  # the last asks for more than 6, and what is filtered is tied
def test_trees_of_coupled_candidates(plan, top_k, plain):
    ranker = CoupledRanker(Sampling(temperature=0.8, top_k=top_k), NOISE_BPW)
    for ours, theirs in zip(grown(plan, Drafter(30), ranker), plain(grown, plan, Drafter(30), ranker), strict=True):
        assert torch.equal(ours, theirs)


@needs_kernels
@pytest.mark.parametrize("plan", [Static(BUSHY), Dynamic(top_k=4, depth=4, total=12)], ids=str)
def test_books_are_used_again_and_trees_stay(plan):
    """A second tree must not write into the first, nor another thread's into ours."""
    first = grown(plan, Drafter(30))
    kept = [x.clone() for x in first]
    second = grown(plan, Drafter(30), root=(17, 21))
    assert not torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    found, barrier = {}, threading.Barrier(2)

    class Meeting(Drafter):
        def step(self, state, frontier):
            barrier.wait()
            return super().step(state, frontier)

    def work(root):
        found[root] = grown(plan, Meeting(30), root=root)

    threads = [threading.Thread(target=work, args=(root,)) for root in ((4, 9), (17, 21))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for root, want in (((4, 9), first), ((17, 21), second)):
        assert all(torch.equal(a, b) for a, b in zip(found[root], want, strict=True))
