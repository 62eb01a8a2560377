"""Prompt lookup finds what a plain search finds, and changes nothing of the target's text."""

import pytest
import torch
from oracles import stepped

from distill.decode import Decoder
from distill.drafters.prompt_lookup import RANKS, PromptLookup, PromptLookupConfig
from distill.errors import UserError
from distill.sampling import Sampling
from distill.target.tiny import tiny_target
from distill.tree import Chain, Dynamic, Static

V, NEW = 40, 14
TARGET = tiny_target(vocab_size=V, hidden=16, layers=2, dtype=torch.float64)


def search(text: list[int], longest: int, shortest: int) -> list[int]:
    """All earlier occurrences of every suffix, longest suffix first, the latest first."""
    found = []
    for n in range(longest, shortest - 1, -1):
        places = (
            [at for at in range(len(text) - n) if text[at : at + n] == text[len(text) - n :]] if n < len(text) else []
        )
        found += [text[at + n] for at in reversed(places)]
    return list(dict.fromkeys(found))[:RANKS]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found(seed):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, 3, (int(torch.randint(1, 30, (1,), generator=generator)),), generator=generator).tolist()
    lookup = PromptLookup(PromptLookupConfig(max_ngram=4, min_ngram=2), TARGET)
    assert lookup.continuations(text) == search(text, 4, 2)


def repeating(n: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    pieces = torch.randint(3, V, (n, 4), generator=generator).tolist()
    return [piece * 3 + piece[: i % 4] + [7] * (i % 2) for i, piece in enumerate(pieces)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("plan", [Chain(1), Chain(4), Static(((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))], ids=str)
def test_the_text_is_the_targets(plan, temperature):
    sampling, prompts = Sampling(temperature=temperature, seed=2), repeating(24)
    decoder = Decoder(TARGET, PromptLookup(PromptLookupConfig(), TARGET), plan=plan, sampling=sampling)
    got = decoder.generate(prompts, max_new_tokens=NEW)
    assert [g.ids for g in got] == stepped(TARGET, prompts, NEW, sampling)


def test_repetition_is_drafted_and_novelty_costs_no_wider_pass():
    """A text that goes round in a circle is accepted whole; one without repetition is decoded one token a pass."""
    lookup = PromptLookup(PromptLookupConfig(min_ngram=2), TARGET)
    decoder = Decoder(TARGET, lookup, plan=Chain(4))
    circle = decoder.generate([[5, 6, 7] * 4], max_new_tokens=200, ignore_eos=True)[0]
    rounds = circle.ids[-60:]
    if any(rounds[i:] == rounds[: 60 - i] for i in range(1, 20)):  # greedy decoding of a tiny target ends in a circle
        assert circle.steps[-2].accepted == 4
    fresh = decoder.generate([list(range(3, 20))], max_new_tokens=2, ignore_eos=True)[0]
    assert [s.offered for s in fresh.steps] == [0]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"plan": Dynamic(top_k=2, depth=2, total=4)}, "needs a chain or a static tree"),
        ({"plan": Chain(2), "verifier": "rejection"}, "deterministic"),
    ],
)
def test_refusals(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        Decoder(TARGET, PromptLookup(PromptLookupConfig(), TARGET), sampling=Sampling(temperature=1.0), **arguments)
    with pytest.raises(UserError, match="1 <= min <= max"):
        PromptLookupConfig(max_ngram=1, min_ngram=2)
