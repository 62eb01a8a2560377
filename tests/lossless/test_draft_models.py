"""Draft models and early exits: equality with the uncached loop, and that the loop gives them what they need.

Losslessness holds whatever is drafted, so the second half lets a draft be the target itself: then every drafted token
must be accepted, at every temperature, however rows are batched and prompts are cut.
"""

from functools import lru_cache

import pytest
import torch
from oracles import random_prompts, stepped

from distill.decode import Decoder
from distill.drafters.draft_model import DraftModel, DraftModelConfig
from distill.drafters.early_exit import EarlyExit, EarlyExitConfig
from distill.sampling import Sampling
from distill.target.tiny import FAMILIES, tiny_target
from distill.tree import Chain, Dynamic, Static

V, N_NEW = 40, 14
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.9, top_k=20, top_p=0.95, seed=4)
SETTINGS = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
BUSHY = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (1, 0, 0), (0, 0, 0, 0)))
PLANS = {"chain": Chain(4), "static": BUSHY, "dynamic": Dynamic(top_k=3, depth=3, total=9)}


@lru_cache
def target_of(family: str):
    return tiny_target(family, seed=3, vocab_size=V, hidden=16, layers=4, dtype=torch.float64)


def prompts_of():
    return random_prompts(6, V, seed=7, longest=30)


@lru_cache
def expected(family: str, sampling: Sampling):
    return stepped(target_of(family), prompts_of(), N_NEW, sampling, stop=())


def drafters(target):
    torch.manual_seed(1)
    yield DraftModel(DraftModelConfig(n_layers=2, hidden_size=8, intermediate_size=20), target).eval()
    yield DraftModel(DraftModelConfig(layers=[0, 1, 3]), target).eval()
    yield EarlyExit(EarlyExitConfig(layers=3), target)


@SETTINGS
@pytest.mark.parametrize("family", FAMILIES)
def test_equality(family, sampling):
    target = target_of(family)
    accepted = 0
    for drafter in drafters(target):
        for plan, engine in zip(PLANS.values(), ("fast", "eager", "fast"), strict=True):
            decoder = Decoder(target, drafter, plan=plan, sampling=sampling, engine=engine, prefill_chunk=7)
            found = decoder.generate(prompts_of(), max_new_tokens=N_NEW, ignore_eos=True)
            assert [g.ids for g in found] == expected(family, sampling)
            accepted += sum(s.accepted for g in found for s in g.steps)
    assert accepted > 60, "nothing was ever accepted: choose other drafts"


def whole(target, kind: str):
    """The target itself as its own drafter."""
    n = target.info.n_layers
    if kind == "early_exit":
        return EarlyExit(EarlyExitConfig(layers=n), target)
    return DraftModel(DraftModelConfig(layers=list(range(n))), target).eval()


@pytest.mark.parametrize("kind, chunk", [("draft_model", 3), ("draft_model", 100), ("early_exit", 17)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_of_the_target_is_always_right(family, kind, chunk):
    """A wrong slot, position, mask or window in the draft's own cache would show here, and only here."""
    target, plan = target_of(family), Chain(4)
    n_new = 1 + 3 * (plan.depth + 1)
    for sampling, engine in ((GREEDY, "eager"), (SAMPLED, "fast")):
        decoder = Decoder(target, whole(target, kind), plan=plan, sampling=sampling, engine=engine, prefill_chunk=chunk)
        together = decoder.generate(prompts_of(), max_new_tokens=n_new, ignore_eos=True)
        (alone,) = decoder.generate([prompts_of()[1]], max_new_tokens=n_new, ignore_eos=True, request_ids=[1])
        assert {s.accepted for g in [*together, alone] for s in g.steps} == {plan.depth}


@pytest.mark.parametrize("plan", [Static(((1,), (0,), (1, 0), (1, 0, 0))), PLANS["dynamic"]], ids=["static", "dynamic"])
def test_rows_that_take_in_different_numbers_of_tokens(plan):
    """Proposals of a batch equal those of each row alone, when rows accept differently and end at different times."""
    target = target_of("gemma3")
    drafter = DraftModel(DraftModelConfig(n_layers=3), target).eval()
    decoder = Decoder(target, drafter, plan=plan, sampling=SAMPLED, prefill_chunk=5)
    together = decoder.generate(prompts_of(), max_new_tokens=N_NEW)
    for i, prompt in enumerate(prompts_of()):
        (alone,) = decoder.generate([prompt], max_new_tokens=N_NEW, request_ids=[i])
        assert alone.ids == together[i].ids
        assert alone.steps == together[i].steps
    assert len({len(g.steps) for g in together}) > 1
