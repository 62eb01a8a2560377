"""Speculative output equals, token for token, an uncached loop that recomputes everything.

The oracle (``oracles.stepped``) runs the plain transformers model on the whole sequence for every token, filters
with transformers' logits processors and adds noise it hashes itself. Targets are tiny and fp64: no tolerance.
"""

from functools import lru_cache

import pytest
import torch
from oracles import Scripted, mixed, perfect, random_prompts, stepped, wrong

from distill.decode import Decoder
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.sampling import Sampling
from distill.target.tiny import tiny_target
from distill.tree import Chain, Dynamic, Static
from distill.vocab import choose_vocab

V, N_PROMPTS, N_NEW = 40, 52, 12
SEEDS = (0, 1, 2)

BUSHY = ((0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0))
PLANS = {
    **{f"chain{n}": Chain(n) for n in range(1, 6)},
    "wide": Static(tuple((r,) for r in range(7))),
    "bushy": Static(BUSHY),
    "gaps": Static(((3,), (1,), (3, 2), (1, 0), (1, 5), (3, 2, 1), (3, 2, 0), (3, 2, 1, 4))),
    "beyond": Static(((0,), (V + 3,), (0, 0), (V + 3, 0), (0, V), (V + 3, 0, 1))),
    "dynamic1": Dynamic(top_k=1, depth=3, total=4),
    "dynamic4": Dynamic(top_k=4, depth=4, total=12),
    "dynamic-all": Dynamic(top_k=2, depth=3, total=60),
    "dynamic-few": Dynamic(top_k=3, depth=5, total=3),
    "dynamic-vocab": Dynamic(top_k=V + 10, depth=2, total=20),
}
SETTINGS = {
    "greedy": {},
    "T0.7": {"temperature": 0.7},
    "T1": {"temperature": 1.0},
    "T1-k5": {"temperature": 1.0, "top_k": 5},
    "T0.7-p0.8": {"temperature": 0.7, "top_p": 0.8},
    "T1-k10-p0.9": {"temperature": 1.0, "top_k": 10, "top_p": 0.9},
}


@lru_cache
def target_of(seed: int, family: str = "llama"):
    return tiny_target(family, seed=seed, vocab_size=V, hidden=16, layers=2, dtype=torch.float64)


@lru_cache
def untrained(seed: int, family: str = "llama"):
    target = target_of(seed, family)
    torch.manual_seed(seed)
    vocab, _ = choose_vocab(torch.rand(target.info.vocab_size), 25)
    return Eagle3(Eagle3Config(draft_vocab_size=25), target, vocab).double().requires_grad_(False)


def prompts_of(seed: int):
    return random_prompts(N_PROMPTS, V, seed=100 + seed)


@lru_cache
def expected(seed: int, setting: str):
    sampling = Sampling(seed=seed, **SETTINGS[setting])
    return stepped(target_of(seed), prompts_of(seed), N_NEW, sampling)


@lru_cache
def truth(seed: int, setting: str):
    """Prompt and continuation, far enough past the end for a deep tree."""
    sampling = Sampling(seed=seed, **SETTINGS[setting])
    more = stepped(target_of(seed), prompts_of(seed), N_NEW + 8, sampling, stop=())
    return [p + g for p, g in zip(prompts_of(seed), more, strict=True)]


def decode(seed: int, setting: str, drafter, plan, **kwargs):
    decoder = Decoder(
        target_of(seed), drafter, plan=plan, sampling=Sampling(seed=seed, **SETTINGS[setting]), prefill_chunk=5
    )
    return decoder.generate(prompts_of(seed), max_new_tokens=N_NEW, **kwargs)


def pooled_tau(generations) -> float:
    steps = [s for g in generations for s in g.steps]
    return sum(len(s.tokens) for s in steps) / len(steps)


@pytest.mark.parametrize("setting", SETTINGS)
def test_oracle_alone_equals_oracle_together(setting):
    """The batched oracle is checked against one prompt at a time, without any padding."""
    sampling = Sampling(seed=0, **SETTINGS[setting])
    few = stepped(target_of(0), prompts_of(0)[:6], N_NEW, sampling, together=False)
    assert few == expected(0, setting)[:6]


@pytest.mark.parametrize("setting", SETTINGS)
def test_oracle_is_worth_comparing_with(setting):
    """Prompts must lead to many different, varied continuations, or equality would say little."""
    found = [tuple(g) for seed in SEEDS for g in expected(seed, setting)]
    assert len(set(found)) > 140
    assert len({token for g in found for token in g}) > 30


@pytest.mark.parametrize("setting", SETTINGS)
def test_autoregressive(setting):
    for seed in SEEDS:
        assert [g.ids for g in decode(seed, setting, None, None)] == expected(seed, setting)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("plan", PLANS)
def test_half_right_drafter(plan, setting):
    """Right tokens at every rank, wrong ones in between: paths of every length through every part of the tree."""
    for seed in SEEDS:
        drafter = Scripted(V, truth(seed, setting), mixed, seed=seed)
        got = decode(seed, setting, drafter, PLANS[plan])
        assert [g.ids for g in got] == expected(seed, setting)
        assert pooled_tau(got) > 1.05, "the drafter was meant to be right at times"


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("plan", PLANS)
def test_untrained_eagle3(plan, setting):
    seed = list(PLANS).index(plan) % len(SEEDS)
    got = decode(seed, setting, untrained(seed), PLANS[plan])
    assert [g.ids for g in got] == expected(seed, setting)


@pytest.mark.parametrize("setting", ["greedy", "T1", "T1-k10-p0.9"])
@pytest.mark.parametrize("plan", [p for p in PLANS if p not in ("dynamic-vocab", "beyond")])
def test_always_wrong_drafter(plan, setting):
    got = decode(0, setting, Scripted(V, truth(0, setting), wrong), PLANS[plan])
    assert [g.ids for g in got] == expected(0, setting)
    assert all(len(s.tokens) == 1 and s.accepted == 0 for g in got for s in g.steps)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("plan", [p for p in PLANS if p != "gaps"])
def test_perfect_drafter(plan, setting):
    """Every draft is accepted: tau is the depth plus one, in every pass."""
    depth = 2 if plan == "dynamic-few" else PLANS[plan].depth  # three nodes: the root and the two best, a chain
    if plan == "beyond":
        depth = 2
    full = [t[: len(p) + N_NEW + 7] for t, p in zip(truth(0, setting), prompts_of(0), strict=True)]
    rounds = 2
    decoder = Decoder(
        target_of(0),
        Scripted(V, full, perfect),
        plan=PLANS[plan],
        sampling=Sampling(seed=0, **SETTINGS[setting]),
    )
    n_new = 1 + rounds * (depth + 1)
    got = decoder.generate(prompts_of(0), max_new_tokens=n_new, ignore_eos=True)
    assert [g.ids for g in got] == [t[len(p) :][:n_new] for t, p in zip(full, prompts_of(0), strict=True)]
    assert {len(g.steps) for g in got} == {rounds}
    assert {(s.accepted, len(s.tokens)) for g in got for s in g.steps} == {(depth, depth + 1)}
    assert pooled_tau(got) == depth + 1


@pytest.mark.parametrize("setting", ["greedy", "T0.7", "T1-k5"])
def test_drafter_of_noise(setting):
    """No knowledge at all: an empty script."""
    for name in ("bushy", "dynamic4"):
        got = decode(1, setting, Scripted(V, [[] for _ in range(N_PROMPTS)], wrong, seed=5), PLANS[name])
        assert [g.ids for g in got] == expected(1, setting)


def test_greedy_tables_do_not_hold_for_sampling():
    """Negative control: the comparison notices the wrong seed, temperature or filter."""
    base = expected(0, "T1")
    for other in ("greedy", "T0.7", "T1-k5", "T1-k10-p0.9"):
        assert sum(a != b for a, b in zip(base, expected(0, other), strict=True)) > 40
    shifted = stepped(target_of(0), prompts_of(0), N_NEW, Sampling(seed=1, temperature=1.0))
    assert sum(a != b for a, b in zip(base, shifted, strict=True)) > 45
