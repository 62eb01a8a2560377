"""Losslessness for every supported architecture, on texts several times longer than the sliding windows."""

from functools import lru_cache

import pytest
import torch
from oracles import Scripted, mixed, random_prompts, stepped

from distill.decode import Decoder
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.sampling import Sampling
from distill.target.tiny import FAMILIES, tiny_target
from distill.tree import Dynamic, Static
from distill.vocab import choose_vocab

V, N_NEW = 40, 16
BUSHY = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (1, 0, 0), (0, 0, 0, 0)))
SETTINGS = (Sampling(), Sampling(temperature=0.8, top_k=20, top_p=0.95, seed=4))


@lru_cache
def target_of(family: str):
    return tiny_target(family, seed=3, vocab_size=V, hidden=16, layers=4, dtype=torch.float64)


def prompts_of():
    return random_prompts(10, V, seed=7, longest=30)


@lru_cache
def expected(family: str, sampling: Sampling, n_new: int = N_NEW):
    return stepped(target_of(family), prompts_of(), n_new, sampling, stop=())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_family_is_what_it_should_be(family):
    """The window is shorter than the text, and cutting it changes what is written; soft-capping is on."""
    target = target_of(family)
    config = target.config_hf
    if family in ("mistral", "gemma2", "gemma3", "phi3", "qwen2"):
        assert target.info.sliding_window == 8
        before = expected(family, SETTINGS[0])
        wide = {"sliding_window": 1000}
        other = tiny_target(family, seed=3, vocab_size=V, hidden=16, layers=4, dtype=torch.float64, **wide)
        assert stepped(other, prompts_of(), N_NEW, SETTINGS[0], stop=()) != before
    if family == "gemma2":
        assert config.final_logit_softcapping
        assert config.attn_logit_softcapping


@pytest.mark.parametrize("sampling", SETTINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equality(family, sampling):
    target, prompts = target_of(family), prompts_of()
    want = expected(family, sampling)
    longer = expected(family, sampling, N_NEW + 6)
    truth = [p + g for p, g in zip(prompts, longer, strict=True)]
    vocab, _ = choose_vocab(torch.rand(V), 25)
    eagle = Eagle3(Eagle3Config(draft_vocab_size=25), target, vocab).double()
    for drafter, plan in (
        (None, None),
        (Scripted(V, truth, mixed), BUSHY),
        (Scripted(V, truth, mixed), Dynamic(top_k=3, depth=4, total=10)),
        (eagle, BUSHY),
    ):
        decoder = Decoder(target, drafter, plan=plan, sampling=sampling, prefill_chunk=7)
        got = decoder.generate(prompts, max_new_tokens=N_NEW, ignore_eos=True)
        assert [g.ids for g in got] == want
        if isinstance(drafter, Scripted):
            assert max(s.accepted for g in got for s in g.steps) >= 3


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate(family):
    target = target_of(family)
    prompts = [p for p in prompts_of() if len(p) > 10][:3]
    vocab, _ = choose_vocab(torch.rand(V), 25)
    drafter = Eagle3(Eagle3Config(draft_vocab_size=25), target, vocab).double()
    got = Decoder(target, drafter, plan=BUSHY).generate(prompts, max_new_tokens=N_NEW)
    for prompt, generation in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt])
        reference = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=N_NEW,
            eos_token_id=list(target.info.eos_ids),
            pad_token_id=0,
        )
        assert generation.ids == reference[0, len(prompt) :].tolist()
