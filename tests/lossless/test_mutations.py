"""The equality tests must be able to fail: each deliberate fault changes the output or the records.

Every fault below is one that existed in some public implementation. It is put in with monkeypatch, and the
comparison with the uncached loop has to notice it; the control runs the same comparison without a fault.
"""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from oracles import Scripted, mixed, perfect, random_prompts, stepped

from distill.attention import AttentionMask
from distill.attention import tree_mask as true_mask
from distill.decode import Decoder, coupling, loop
from distill.decode.verify import match as true_match
from distill.kv_cache import KVCache
from distill.sampling import Sampling
from distill.sampling import gumbel as true_gumbel
from distill.target.tiny import tiny_target
from distill.tree import Chain, Dynamic, Static, geometry

V, N_NEW = 40, 14
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0, seed=6)
BUSHY = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1)))


@lru_cache
def target():
    return tiny_target("llama", seed=2, vocab_size=V, hidden=16, layers=2, dtype=torch.float64)


@lru_cache
def prompts():
    return random_prompts(16, V, seed=4)


@lru_cache
def want(sampling):
    return stepped(target(), prompts(), N_NEW + 8, sampling, stop=())


def second(_row, _position):
    """Always the second of the ranks: paths that lie behind rejected nodes in the tree."""
    return 0.995


def differing(plan, sampling=GREEDY, skill=mixed) -> int:
    """Prompts whose output is not the oracle's."""
    truth = [p + g for p, g in zip(prompts(), want(sampling), strict=True)]
    drafter = Scripted(V, truth, skill, check=False)  # the output alone has to notice
    decoder = Decoder(target(), drafter, plan=plan, sampling=sampling, prefill_chunk=5)
    got = decoder.generate(prompts(), max_new_tokens=N_NEW, ignore_eos=True)
    return sum(g.ids != w[:N_NEW] for g, w in zip(got, want(sampling), strict=True))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("skill", [mixed, second, perfect])
@pytest.mark.parametrize("plan", [Chain(4), BUSHY, Dynamic(top_k=3, depth=3, total=9)], ids=str)
def test_control(plan, skill, sampling):
    assert differing(plan, sampling, skill) == 0


# -- the verifier


def accepts_one_more(tree, chosen_BN, *_):
    """Keeps the first child of the last matching node as well."""
    good = true_match(tree, chosen_BN)
    path, n, last = good.path_BN.clone(), good.n_B.clone(), good.next_B.clone()
    for b in range(len(n)):
        node = int(path[b, n[b] - 1])
        children = [i for i in range(1, tree.parents_BN.shape[1]) if int(tree.parents_BN[b, i]) == node]
        if children:
            path[b, n[b]] = children[0]
            n[b] += 1
            last[b] = chosen_BN[b, children[0]]
    return replace(good, path_BN=path, n_B=n, next_B=last)


def accepts_a_sibling(tree, chosen_BN, *_):
    """Ends on another child of the same parent than the one that matched."""
    good = true_match(tree, chosen_BN)
    path, last = good.path_BN.clone(), good.next_B.clone()
    for b, n in enumerate(good.n_B.tolist()):
        if n > 1:
            node = int(path[b, n - 1])
            parent = int(tree.parents_BN[b, node])
            others = [
                i for i in range(1, tree.parents_BN.shape[1]) if int(tree.parents_BN[b, i]) == parent and i != node
            ]
            if others:
                path[b, n - 1] = others[0]
                last[b] = chosen_BN[b, others[0]]
    return replace(good, path_BN=path, next_B=last)


def compares_with_the_grandparent(tree, chosen_BN, *_):
    """Every node is held against the choice made one level too high."""
    shifted = chosen_BN.gather(1, tree.parents_BN)
    return true_match(tree, shifted)


def forgets_that_the_parent_must_match(tree, chosen_BN, *_):
    """The deepest node that agrees with its own parent wins, whether or not the way there was accepted."""
    ok = tree.tokens_BN == chosen_BN.gather(1, tree.parents_BN)
    ok[:, 0] = True
    _, depth_BN = geometry(tree.parents_BN, tree.max_depth)
    best = ((depth_BN + 1) * ok).argmax(-1)
    good = true_match(tree, chosen_BN)
    path, n, last = good.path_BN.clone(), good.n_B.clone(), good.next_B.clone()
    for b, node in enumerate(best.tolist()):
        n[b], last[b] = depth_BN[b, node] + 1, chosen_BN[b, node]
        while True:
            path[b, depth_BN[b, node]] = node
            if node == 0:
                break
            node = int(tree.parents_BN[b, node])
    return replace(good, path_BN=path, n_B=n, next_B=last)


def next_token_of_the_root(tree, chosen_BN, *_):
    """The bonus token is read at the root instead of at the last kept node."""
    good = true_match(tree, chosen_BN)
    return replace(good, next_B=torch.where(good.n_B > 1, chosen_BN[:, 0], good.next_B))


@pytest.mark.parametrize(
    "fault",
    [
        accepts_one_more,
        accepts_a_sibling,
        compares_with_the_grandparent,
        forgets_that_the_parent_must_match,
        next_token_of_the_root,
    ],
)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_broken_verifier(fault, sampling, monkeypatch):
    monkeypatch.setattr(loop, "match", fault)
    assert differing(BUSHY, sampling) > 8


# -- the mask


def test_mask_that_leaks_a_sibling(monkeypatch):
    def leaky(*, lengths_B, ancestors_BNM, **rest):
        seen = ancestors_BNM.clone()
        if seen.shape[1] == BUSHY.n_nodes:
            seen[:, 2, 1] = True  # the root's second child sees the first
            seen[:, 6, 5] = True
        return true_mask(lengths_B=lengths_B, ancestors_BNM=seen, **rest)

    monkeypatch.setattr(loop, "tree_mask", leaky)
    assert differing(BUSHY, skill=second) > 2
    assert differing(BUSHY, SAMPLED, skill=second) > 2


def test_mask_that_hides_an_ancestor(monkeypatch):
    def blind(*, lengths_B, ancestors_BNM, **rest):
        seen = ancestors_BNM.clone()
        if seen.shape[1] == 5:
            seen[:, 3, 1] = False
        return true_mask(lengths_B=lengths_B, ancestors_BNM=seen, **rest)

    monkeypatch.setattr(loop, "tree_mask", blind)
    assert differing(Chain(4), skill=perfect) > 4


def test_mask_off_by_one_in_the_prefix(monkeypatch):
    def short(**kwargs):
        mask = true_mask(**kwargs).full_B1QT.clone()
        for b, n in enumerate(kwargs["lengths_B"].tolist()):
            if n > 1:
                mask[b, :, :, n - 1] = False
        return AttentionMask(full_B1QT=mask)

    monkeypatch.setattr(loop, "tree_mask", short)
    assert differing(Chain(2)) > 8


def test_mask_that_shows_scratch(monkeypatch):
    """Entries of the other nodes count as committed."""

    def open_scratch(**kwargs):
        mask = true_mask(**kwargs).full_B1QT
        if kwargs["ancestors_BNM"].shape[1] == BUSHY.n_nodes:
            mask = torch.ones_like(mask)
        return AttentionMask(full_B1QT=mask)

    monkeypatch.setattr(loop, "tree_mask", open_scratch)
    assert differing(BUSHY) > 8


def test_positions_counted_in_slots(monkeypatch):
    """Tree nodes get the position of their slot instead of their depth."""
    true_forward = loop.Decoder._forward

    def by_slot(self, cache, ids_BN, depths_BN, ancestors_BNN):
        slots = torch.arange(ids_BN.shape[1]).expand_as(depths_BN)
        return true_forward(self, cache, ids_BN, slots, ancestors_BNN)

    monkeypatch.setattr(loop.Decoder, "_forward", by_slot)
    assert differing(BUSHY, skill=second) > 8
    assert differing(Chain(4)) == 0, "in a chain the two agree"


# -- the cache


def test_cache_that_keeps_a_rejected_node(monkeypatch):
    """The pointer moves, but the accepted path is not gathered: right for a chain, wrong for a tree."""

    def no_gather(self, path_BP, n_B, *, longest):
        self.advance(n_B, longest=longest)

    monkeypatch.setattr(KVCache, "commit", no_gather)
    assert differing(BUSHY, skill=second) > 8
    assert differing(BUSHY, SAMPLED, skill=second) > 8
    assert differing(Chain(4)) == 0, "in a chain nothing has to move"


def test_cache_that_counts_one_too_many(monkeypatch):
    true_commit = KVCache.commit

    def greedy_commit(self, path_BP, n_B, *, longest):
        true_commit(self, path_BP, n_B, longest=longest)
        self.lengths_B = self.lengths_B + (n_B > 0)
        self.longest += 1

    monkeypatch.setattr(KVCache, "commit", greedy_commit)
    monkeypatch.setattr(KVCache, "capacity", property(lambda self: 10**6))
    true_init = KVCache.__init__
    monkeypatch.setattr(
        KVCache, "__init__", lambda self, *, capacity, **kw: true_init(self, capacity=capacity + 40, **kw)
    )
    assert differing(BUSHY) > 8


def test_cache_that_commits_to_wrong_slots(monkeypatch):
    true_commit = KVCache.commit

    def off_by_one(self, path_BP, n_B, *, longest):
        true_commit(self, (path_BP + 1).clamp(max=BUSHY.n_nodes - 1), n_B, longest=longest)

    monkeypatch.setattr(KVCache, "commit", off_by_one)
    assert differing(BUSHY) > 8


def test_cache_that_commits_rows_to_their_neighbours(monkeypatch):
    true_commit = KVCache.commit

    def rolled(self, path_BP, n_B, *, longest):
        true_commit(self, path_BP.roll(1, 0), n_B, longest=longest)

    monkeypatch.setattr(KVCache, "commit", rolled)
    assert differing(BUSHY, skill=mixed) > 4


# -- the noise


def test_noise_at_the_wrong_position(monkeypatch):
    def late(*, position_BP, **kwargs):
        return true_gumbel(position_BP=position_BP + 1, **kwargs)

    monkeypatch.setattr(coupling, "gumbel", late)
    assert differing(Chain(2), SAMPLED) > 12


def test_noise_that_differs_between_prefill_and_rounds(monkeypatch):
    true_draw = coupling.RoundNoise.starting.__func__

    def shifted(cls, sampling, request_B, first_B, *, count, vocab):
        late = first_B if count == 1 else first_B + 1
        return true_draw(cls, sampling, request_B, late, count=count, vocab=vocab)

    monkeypatch.setattr(coupling.RoundNoise, "starting", classmethod(shifted))
    assert differing(Chain(2), SAMPLED) > 12


def test_noise_that_is_not_shared_by_a_depth(monkeypatch):
    """Noise by node index instead of depth."""

    true_choose = coupling.RoundNoise.choose

    def by_node(self, logits_BNV, depths_BN):
        index = torch.arange(depths_BN.shape[1]).clamp(max=self.position_BP.shape[1] - 1).expand_as(depths_BN)
        return true_choose(self, logits_BNV, index)

    monkeypatch.setattr(coupling.RoundNoise, "choose", by_node)
    assert differing(BUSHY, SAMPLED, skill=second) > 8
    assert differing(Chain(4), SAMPLED) == 0, "in a chain a node's index is its depth"


def test_noise_that_ignores_the_request(monkeypatch):
    def same_for_all(*, request_B, **kwargs):
        return true_gumbel(request_B=torch.zeros_like(request_B), **kwargs)

    monkeypatch.setattr(coupling, "gumbel", same_for_all)
    assert differing(Chain(2), SAMPLED) > 12


def test_noise_that_is_drawn_anew_for_every_round(monkeypatch):
    """Ordinary random numbers: lossless in law at best, never token for token."""

    def fresh(*, position_BP, vocab, ids_BPk=None, **_):
        shape = (*position_BP.shape, vocab) if ids_BPk is None else ids_BPk.shape
        return -torch.log(-torch.log(torch.rand(shape)))

    monkeypatch.setattr(coupling, "gumbel", fresh)
    assert differing(Chain(2), SAMPLED) > 12


def test_filters_that_are_left_out(monkeypatch):
    sampling = Sampling(temperature=1.0, top_k=4, seed=6)
    assert differing(Chain(2), sampling) == 0
    monkeypatch.setattr("distill.sampling.warp", lambda logits, s: logits / s.temperature)
    assert differing(Chain(2), sampling) > 8


def test_emission_past_the_end_of_text(monkeypatch):
    """A loop that forgets to cut accepted blocks overshoots; the length check notices."""
    truth = [p + g for p, g in zip(prompts(), want(GREEDY), strict=True)]

    def uncut(self, rows, b, new, *, ignore_eos):
        rows.results[b].ids.extend(new)
        if len(rows.results[b].ids) >= rows.requests[b].max_new_tokens:
            rows.active[b] = False
            rows.active_B[b] = False
        return new

    monkeypatch.setattr(loop.Decoder, "_emit", uncut)
    got = Decoder(target(), Scripted(V, truth, perfect), plan=Chain(5)).generate(prompts(), max_new_tokens=10)
    assert all(len(g.ids) > 10 for g in got)
