"""``rejection`` equals, token for token, a decode written out from the rule that uses the same keys.

The oracle knows no tree, no batch and no cache: token by token it asks the plain model for p and the draft for q, draws
the children of the one node it stands on, and tosses the coins. Targets are tiny and fp64: no tolerance.
"""

from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from oracles import PlainEagle3, random_prompts, stepped
from plain_rejection import written_out

from distill.decode import Decoder, coupling, loop, rejection
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.graphs import Graphs
from distill.sampling import Sampling
from distill.target.tiny import tiny_target
from distill.tree import Chain, Static
from distill.vocab import choose_vocab

V, W, N_NEW = 40, 25, 10
SETTINGS = {
    "greedy": {},
    "T0.7": {"temperature": 0.7},
    "T1": {"temperature": 1.0},
    "T1-k5": {"temperature": 1.0, "top_k": 5},
    "T0.7-p0.8": {"temperature": 0.7, "top_p": 0.8},
    "T1-k10-p0.9": {"temperature": 1.0, "top_k": 10, "top_p": 0.9},
}
PLANS = {
    "chain1": Chain(1),
    "chain4": Chain(4),
    "wide": Static(tuple((r,) for r in range(7))),
    "bushy": Static(((0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (0, 0, 0), (1, 0, 0))),
}


# -- drafters


class Markov:
    """Logits are a table over the last token: q is near p for some tokens, far for others."""

    name, max_depth, vocab, config, soft = "markov", None, None, None, True

    def __init__(self, table_VV):
        self.table_VV = table_VV
        self.target = SimpleNamespace(info=SimpleNamespace(vocab_size=len(table_VV)))

    def taps(self, _config, _info):
        return ()

    def to_target_ids(self, ids):
        return ids

    def new_state(self, _batch_size, _capacity):
        return None

    def extend(self, *_, **__):
        """Nothing to remember."""

    def step(self, _state, frontier):
        return self.table_VV[frontier.tokens_BF]

    def rollback(self, _state):
        """Nothing was written."""


@lru_cache
def target_of(seed: int = 0):
    return tiny_target("llama", seed=seed, vocab_size=V, hidden=16, layers=2, dtype=torch.float64)


@lru_cache
def table():
    """The target's own logits after each token alone, disturbed."""
    logits = target_of().model(input_ids=torch.arange(V)[:, None], use_cache=False).logits[:, -1].detach()
    return logits + torch.randn(V, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def prompts():
    return random_prompts(6, V, seed=5)


@lru_cache
def wanted(plan: str, setting: str):
    """(ids of every prompt, tokens accepted by the oracle)."""
    sampling = Sampling(seed=3, **SETTINGS[setting])
    if sampling.greedy:
        return stepped(target_of(), prompts(), N_NEW, sampling, stop=()), 1
    with torch.no_grad():
        found = [
            written_out(target_of(), lambda ids, path: table()[[*ids, *path][-1]], PLANS[plan], p, r, sampling, N_NEW)
            for r, p in enumerate(prompts())
        ]
    return [ids for ids, _ in found], sum(n for _, n in found)


def decoded(plan: str, setting: str, **kwargs):
    decoder = Decoder(
        target_of(),
        Markov(table()),
        plan=PLANS[plan],
        sampling=Sampling(seed=3, **SETTINGS[setting]),
        verifier="rejection",
        prefill_chunk=5,
        **kwargs,
    )
    return decoder.generate(prompts(), max_new_tokens=N_NEW, ignore_eos=True)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("plan", PLANS)
def test_equals_the_rule_written_out(plan, setting):
    ids, accepted = wanted(plan, setting)
    got = decoded(plan, setting)
    assert [g.ids for g in got] == ids
    assert accepted > 0


def untrained(target):
    torch.manual_seed(1)
    vocab, _ = choose_vocab(torch.rand(V), W)
    return Eagle3(Eagle3Config(draft_vocab_size=W), target, vocab).double().requires_grad_(False)


@pytest.mark.parametrize("plan", ["chain4", "bushy"])
@pytest.mark.parametrize("setting", ["T1", "T0.7-p0.8"])
def test_eagle3_with_a_pruned_vocabulary(plan, setting):
    """q lives on 25 of 40 tokens; the oracle drafts with the equations, position by position."""
    target, sampling = target_of(), Sampling(seed=8, **SETTINGS[setting])
    drafter = untrained(target)
    plain, taps = PlainEagle3(drafter, target), drafter.taps(drafter.config, target.info)

    def draft(ids, path):
        states = target.model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
        return plain.draft(ids, [states[k][0] for k in taps], path)[-1]

    few = prompts()[1:4]
    with torch.no_grad():
        want = [
            written_out(target, draft, PLANS[plan], p, r, sampling, N_NEW, columns=drafter.vocab.target_ids)[0]
            for r, p in enumerate(few)
        ]
    decoder = Decoder(target, drafter, plan=PLANS[plan], sampling=sampling, verifier="rejection")
    assert [g.ids for g in decoder.generate(few, max_new_tokens=N_NEW, ignore_eos=True)] == want


class Shared(Markov):
    """All nodes of a depth have the same logits, which are given once (Medusa's heads): they know the root alone."""

    def step(self, state, frontier):
        if frontier.depth == 0:
            self.root_B1 = frontier.tokens_BF
        return self.table_VV[(self.root_B1 + frontier.depth) % V]


@pytest.mark.parametrize("plan", ["chain4", "bushy"])
def test_logits_shared_by_the_nodes_of_a_depth(plan):
    sampling = Sampling(temperature=0.7, seed=4)
    with torch.no_grad():
        want = [
            written_out(
                target_of(), lambda ids, path: table()[(ids[-1] + len(path)) % V], PLANS[plan], p, r, sampling, N_NEW
            )[0]
            for r, p in enumerate(prompts())
        ]
    decoder = Decoder(target_of(), Shared(table()), plan=PLANS[plan], sampling=sampling, verifier="rejection")
    assert [g.ids for g in decoder.generate(prompts(), max_new_tokens=N_NEW, ignore_eos=True)] == want


@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_batch_equals_alone(engine):
    """Keys belong to requests and positions: neighbours, chunks and the engine change nothing."""
    target = target_of()
    decoder = Decoder(
        target,
        untrained(target),
        plan=PLANS["bushy"],
        sampling=Sampling(temperature=1.0, seed=2),
        verifier="rejection",
        engine=engine,
    )
    together = decoder.generate(prompts(), max_new_tokens=N_NEW)
    for i, prompt in enumerate(prompts()):
        (alone,) = decoder.generate([prompt], max_new_tokens=N_NEW, request_ids=[i])
        assert (alone.ids, alone.steps) == (together[i].ids, together[i].steps)
    again = decoder.generate([prompts()[0]] * 8, max_new_tokens=N_NEW)
    assert len({tuple(g.ids) for g in again}) > 4, "equal prompts with different requests are different samples"


def test_recorded_drawing_equals_drawing():
    """A recording gets its noise as an input, so that every round draws anew."""
    target, sampling = target_of(), Sampling(temperature=1.0, seed=2)
    found = []
    for recorded in (False, True):
        decoder = Decoder(
            target, untrained(target), plan=PLANS["bushy"], sampling=sampling, verifier="rejection", engine="fast"
        )
        if recorded:
            decoder.drafting.graphs = Graphs(replayed, patience=1)
        found.append([g.ids for g in decoder.generate(prompts(), max_new_tokens=30, ignore_eos=True)])
    assert found[0] == found[1]
    assert decoder.drafting.graphs.recordings >= 1


def replayed(step):
    """Stands in for a CUDA graph: the same step on the same buffers, its output written over the last one."""
    output = step()
    output.tokens_BN.set_(output.tokens_BN.clone())
    output.q_BFW.set_(output.q_BFW.clone())

    def replay():
        new = step()
        output.tokens_BN.copy_(new.tokens_BN)
        output.q_BFW.copy_(new.q_BFW)

    return replay, output


def test_a_perfect_draft_is_always_accepted():
    """q = p: every coin lies below 1, so every round gives depth + 1 tokens."""
    plain = target_of()

    class Itself(Markov):
        """The target, recomputed on the whole prefix."""

        def new_state(self, batch_size, _capacity):
            return [[] for _ in range(batch_size)]

        def extend(self, state, ids_BL, _next, _output, n_B, **_):
            for row, ids, n in zip(state, ids_BL.tolist(), n_B.tolist(), strict=True):
                row += ids[:n]

        def step(self, state, frontier):
            if frontier.depth == 0:
                self.drafted = [[] for _ in state]
            for drafted, (token,) in zip(self.drafted, frontier.tokens_BF.tolist(), strict=True):
                drafted.append(token)
            rows = [
                plain.model(input_ids=torch.tensor([row + new]), use_cache=False).logits[:, -1:]
                for row, new in zip(state, self.drafted, strict=True)
            ]
            return torch.cat(rows)

    for setting in ("T1", "T0.7-p0.8"):
        decoder = Decoder(
            plain,
            Itself(torch.empty(plain.info.vocab_size, 0)),
            plan=Chain(3),
            sampling=Sampling(**SETTINGS[setting]),
            verifier="rejection",
        )
        got = decoder.generate(prompts(), max_new_tokens=9, ignore_eos=True)
        assert {(s.accepted, len(s.tokens)) for g in got for s in g.steps} == {(3, 4)}


def test_a_filter_that_leaves_fewer_tokens_than_children():
    """Children beyond the filter's survivors are unused nodes; the text is that of the oracle all the same."""
    seen = []
    true = loop.rejection

    def watching(tree, *args, **kwargs):
        seen.append(tree)
        return true(tree, *args, **kwargs)

    setting = {"temperature": 1.0, "top_k": 3}
    sampling = Sampling(seed=3, **setting)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(loop, "rejection", watching)
        decoder = Decoder(target_of(), Markov(table()), plan=PLANS["wide"], sampling=sampling, verifier="rejection")
        got = decoder.generate(prompts(), max_new_tokens=N_NEW, ignore_eos=True)
        want = [
            written_out(
                target_of(), lambda ids, path: table()[[*ids, *path][-1]], PLANS["wide"], p, r, sampling, N_NEW
            )[0]
            for r, p in enumerate(prompts())
        ]
    assert [g.ids for g in got] == want
    for tree in seen:
        assert (tree.tokens_BN[:, 1:4] >= 0).all()
        assert (tree.tokens_BN[:, 4:] == -1).all()
    assert {len(s.rejected) + s.accepted for g in got for s in g.steps} == {3}


# -- faults that the comparison must notice


def shifted_coins(monkeypatch):
    true = coupling.RoundNoise.coins
    monkeypatch.setattr(coupling.RoundNoise, "coins", lambda self, count: true(self, count + 1)[:, :, 1:])


def coins_without_position(monkeypatch):
    true = coupling.RoundNoise.coins
    monkeypatch.setattr(coupling.RoundNoise, "coins", lambda self, count: true(self, count)[:, :1].expand(-1, 9, -1))


def last_draw_at_the_root(monkeypatch):
    true = coupling.RoundNoise.of_stream

    def stay(self, name, *, vocab, place_B=None):
        return true(self, name, vocab=vocab, place_B=None if place_B is None else torch.zeros_like(place_B))

    monkeypatch.setattr(coupling.RoundNoise, "of_stream", stay)


def unwarped_target(monkeypatch):
    monkeypatch.setattr(rejection, "warp", lambda logits, _: logits)


def target_of_the_parent(monkeypatch):
    """The law below an accepted child is still its parent's."""
    true = rejection.walk

    def stuck(tree, target_at, coins, **kwargs):
        return true(tree, lambda node_B: target_at(tree.parents_BN.gather(1, node_B[:, None])[:, 0]), coins, **kwargs)

    monkeypatch.setattr(rejection, "walk", stuck)


def draft_of_the_root(monkeypatch):
    """Every node is scored with the root's q."""
    true = rejection.walk

    def stuck(tree, *args, **kwargs):
        tree.q_BFW.copy_(tree.q_BFW[:, :1].expand_as(tree.q_BFW))
        return true(tree, *args, **kwargs)

    monkeypatch.setattr(rejection, "walk", stuck)


def children_in_the_wrong_order(monkeypatch):
    true = rejection.walk

    def swapped(tree, *args, **kwargs):
        tree.tokens_BN[:, [1, 2]] = tree.tokens_BN[:, [2, 1]]
        return true(tree, *args, **kwargs)

    monkeypatch.setattr(rejection, "walk", swapped)


def no_residual(monkeypatch):
    monkeypatch.setattr(rejection, "residual", lambda r_BV, q_BV: r_BV)


def no_renormalising(monkeypatch):
    monkeypatch.setattr(rejection, "without", lambda q_BV, x_B1: q_BV.scatter(1, x_B1, 0.0))


FAULTS = [
    shifted_coins,
    coins_without_position,
    last_draw_at_the_root,
    unwarped_target,
    target_of_the_parent,
    draft_of_the_root,
    children_in_the_wrong_order,
    no_residual,
    no_renormalising,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_the_text(fault, monkeypatch):
    ids, _ = wanted("bushy", "T0.7")
    fault(monkeypatch)
    assert sum(g.ids != w for g, w in zip(decoded("bushy", "T0.7"), ids, strict=True)) >= 2
