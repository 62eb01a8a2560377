"""EAGLE-1, HASS and EAGLE-2 in the loop: token for token the uncached oracle, and right where a drafter can be right.

An untrained drafter of random weights is accepted by luck alone, so plans are wide.
"""

from functools import lru_cache

import pytest
import torch
from drafter_tools import make
from oracles import random_prompts, stepped

from distill.config import build
from distill.decode import Decoder
from distill.entry import compose_values
from distill.sampling import Sampling
from distill.target.tiny import FAMILIES, tiny_target
from distill.tree import Chain, Dynamic, PlanConfig, Static, make_plan

V, N_NEW = 40, 14
SETTINGS = {
    "greedy": Sampling(),
    "T1": Sampling(temperature=1.0, seed=2),
    "filtered": Sampling(temperature=0.7, top_k=10, top_p=0.9, seed=5),
}


def shipped(name: str):
    """A tree from ``configs/tree``."""
    return make_plan(build(PlanConfig, compose_values("eval", ["task=bench", f"tree={name}"])["tree"]))


PLANS = {
    "chain": lambda: Chain(5),
    "static": lambda: Static(((1,), (0,), (3,), (1, 0), (0, 2), (1, 0, 0), (1, 0, 4), (1, 0, 0, 0))),
    "eagle1": lambda: shipped("eagle1"),
    "dynamic": lambda: Dynamic(top_k=3, depth=3, total=9),
    "eagle2": lambda: shipped("eagle2"),
}
OPTIONS = [{}, {"num_layers": 2, "fc_bias": True}]


@lru_cache
def target_of(family: str):
    return tiny_target(family, seed=3, vocab_size=V, hidden=16, layers=3, dtype=torch.float64)


def prompts_of():
    return random_prompts(8, V, seed=7, longest=20)


@lru_cache
def expected(family: str, setting: str):
    return stepped(target_of(family), prompts_of(), N_NEW, SETTINGS[setting])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("plan", PLANS)
def test_equality(plan, setting):
    accepted = 0
    for options, engine in zip(OPTIONS, ("eager", "fast"), strict=True):
        drafter = make("eagle1", target=target_of("llama"), **options)
        decoder = Decoder(
            drafter.target, drafter, plan=PLANS[plan](), sampling=SETTINGS[setting], engine=engine, prefill_chunk=7
        )
        found = decoder.generate(prompts_of(), max_new_tokens=N_NEW)
        assert [g.ids for g in found] == expected("llama", setting)
        accepted += sum(s.accepted for g in found for s in g.steps)
    assert accepted > (0 if plan in ("chain", "static") else 20), "nothing was accepted: choose another seed"


@pytest.mark.parametrize("setting", ["greedy", "T1"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_equality_for_other_families(family, setting):
    """Scaled embeddings, capped logits, tied heads: everything of the target's that this drafter borrows."""
    drafter = make("eagle1", target=target_of(family), num_layers=2)
    decoder = Decoder(drafter.target, drafter, plan=PLANS["eagle2"](), sampling=SETTINGS[setting], prefill_chunk=7)
    found = decoder.generate(prompts_of(), max_new_tokens=N_NEW)
    assert [g.ids for g in found] == expected(family, setting)


@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_rows_of_a_batch_draft_as_they_do_alone(engine):
    """Rows accept differently and end at different times; what a row proposes and keeps stays its own."""
    drafter = make("eagle1", target=target_of("llama"))
    decoder = Decoder(
        drafter.target, drafter, plan=shipped("eagle1"), sampling=SETTINGS["T1"], engine=engine, prefill_chunk=5
    )
    together = decoder.generate(prompts_of(), max_new_tokens=N_NEW)
    for i, prompt in enumerate(prompts_of()):
        (alone,) = decoder.generate([prompt], max_new_tokens=N_NEW, request_ids=[i])
        assert alone.ids == together[i].ids
        assert alone.steps == together[i].steps
    assert len({len(g.steps) for g in together}) > 1
