"""Every registered drafter with every plan and verifier that go together emits what the uncached oracle emits.

Which combinations there are is asked of the one table (``decode/verify.py``); what it refuses must be refused here.
"""

from functools import cache

import pytest
from drafter_tools import V, make, target_of
from oracles import random_prompts, stepped

from distill.calibration import Calibration, Choices
from distill.decode import RULES, Decoder
from distill.errors import UserError
from distill.registry import DRAFTERS
from distill.sampling import Sampling
from distill.tree import Chain, Dynamic, PlanConfig, Static, make_plan

NEW = 10
CHOICES = Choices(hits_DR=[[5, 3, 1], [4, 2, 1], [3, 1, 1]], count_D=[10, 8, 8], scale_D=[0.5, 2.0, 1.0])
CALIBRATION = Calibration(greedy=CHOICES, coupled=CHOICES)
PLANS = {
    "chain": Chain(3),
    "static": Static(((0,), (1,), (0, 0), (1, 0), (0, 1), (0, 0, 0))),
    "calibrated": make_plan(PlanConfig(name="calibrated", depth=3, top_k=3, total=7), calibration=CALIBRATION),
    "dynamic": Dynamic(top_k=3, depth=3, total=8),
}
SETTINGS = {"greedy": {}, "sampled": {"temperature": 1.0}, "filtered": {"temperature": 0.8, "top_k": 10, "top_p": 0.9}}


def prompts():
    return random_prompts(10, V, seed=11)


@cache
def expected(setting: str):
    return stepped(target_of(), prompts(), NEW, Sampling(seed=3, **SETTINGS[setting]))


def allowed(drafter, plan, verifier: str) -> bool:
    """By hand: lookups have no confidences and no distribution, and drawing goes with plans that do not rerank."""
    dynamic = isinstance(plan, Dynamic)
    return not (dynamic and (verifier == "rejection" or not drafter.soft)) and (verifier != "rejection" or drafter.soft)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_combination(name, plan):
    target, drafter, shape = target_of(), make(name, target=target_of()), PLANS[plan]
    drafter.calibration = CALIBRATION if drafter.soft else None
    for verifier, rule in RULES.items():
        for candidates in rule.candidates:
            if not drafter.soft and candidates == "coupled":
                candidates = "auto"
            for setting, options in SETTINGS.items():
                arguments = {"plan": shape, "verifier": verifier, "candidates": candidates}
                arguments["sampling"] = Sampling(seed=3, **options)
                if not allowed(drafter, shape, verifier):
                    with pytest.raises(UserError):
                        Decoder(target, drafter, **arguments)
                    continue
                got = [g.ids for g in Decoder(target, drafter, **arguments).generate(prompts(), max_new_tokens=NEW)]
                # At T = 0 all verifiers compare with the argmax; above, only match emits plain decoding's very tokens.
                if setting == "greedy" or rule.lossless == "tokens":
                    assert got == expected(setting), (verifier, candidates, setting)
                else:
                    assert got != expected(setting), "its own draws, or not lossless: equal text would be a wonder"
