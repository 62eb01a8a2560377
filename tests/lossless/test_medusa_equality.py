"""Medusa heads decode what the uncached loop emits, with every kind of head and plan, and learn to be right."""

from functools import lru_cache

import pytest
import torch
from drafter_tools import W, make
from oracles import random_prompts, stepped

from distill.decode import Decoder
from distill.sampling import Sampling
from distill.target.tiny import tiny_target
from distill.tree import Chain, Dynamic, Static

V, N_NEW = 40, 14
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.9, top_k=20, top_p=0.95, seed=4)
BUSHY = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (1, 0, 0), (0, 0, 0, 0)))
PLANS = {"chain": Chain(4), "static": BUSHY, "dynamic": Dynamic(top_k=3, depth=4, total=11)}
HEADS = {
    "shared": {},
    "own": {"head": "own", "blocks": 2},
    "pruned": {"head": "pruned", "draft_vocab_size": W},
}


@lru_cache
def target_of(family: str):
    return tiny_target(family, seed=3, vocab_size=V, hidden=16, layers=3, dtype=torch.float64)


def prompts_of():
    return random_prompts(6, V, seed=7, longest=30)


@lru_cache
def expected(family: str, sampling: Sampling):
    return stepped(target_of(family), prompts_of(), N_NEW, sampling, stop=())


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("head", HEADS)
def test_equality(head, plan, sampling):
    accepted = 0
    for family, engine in (("llama", "fast"), ("gemma2", "eager")):
        target = target_of(family)
        drafter = make("medusa", target=target, **HEADS[head])
        decoder = Decoder(target, drafter, plan=PLANS[plan], sampling=sampling, engine=engine, prefill_chunk=7)
        found = decoder.generate(prompts_of(), max_new_tokens=N_NEW, ignore_eos=True)
        assert [g.ids for g in found] == expected(family, sampling)
        accepted += sum(s.accepted for g in found for s in g.steps)
    assert accepted > 0, "nothing was ever accepted: choose other prompts"


@pytest.mark.parametrize("head", HEADS)
def test_rows_that_take_in_different_numbers_of_tokens(head):
    """Proposals of a batch equal those of each row alone, when rows accept differently and end at different times."""
    target = target_of("llama")
    drafter = make("medusa", target=target, **HEADS[head])
    decoder = Decoder(target, drafter, plan=PLANS["dynamic"], sampling=SAMPLED, prefill_chunk=5)
    together = decoder.generate(prompts_of(), max_new_tokens=N_NEW)
    for i, prompt in enumerate(prompts_of()):
        (alone,) = decoder.generate([prompt], max_new_tokens=N_NEW, request_ids=[i])
        assert alone.ids == together[i].ids
        assert alone.steps == together[i].steps
    assert len({len(g.steps) for g in together}) > 1
