"""Prompt lookup finds what a plain search finds, and changes nothing of the target's text."""

import pytest
import torch
from oracles import stepped

from distill.decode import Decoder
from distill.drafters.prompt_lookup import RANKS, PromptLookup, PromptLookupConfig, Text
from distill.errors import UserError
from distill.sampling import Sampling
from distill.target import Target
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
    size, alphabet = int(torch.randint(1, 60, (1,), generator=generator)), 3 if seed % 2 else 12
    ids = torch.randint(0, alphabet, (size,), generator=generator).tolist()
    for longest, shortest in ((4, 2), (3, 1), (1, 1)):
        text = Text(PromptLookupConfig(max_ngram=longest, min_ngram=shortest))
        for begin in range(0, size, 3):
            # Part of it committed, the rest a path in the tree.
            for end in range(begin, min(begin + 6, size) + 1):
                assert text.continuations(ids[begin:end]) == search(ids[:end], longest, shortest)
            text.append(ids[begin : begin + 3])


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


def circling() -> Target:
    """A target that counts: after token t it says t + 1, after the last one it begins anew."""
    target = tiny_target(vocab_size=V, hidden=64, layers=2, dtype=torch.float64)
    for name, weight in target.model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()  # nothing is added to the embedding
    embedding = torch.eye(64, dtype=torch.float64)[:V]
    target.model.get_input_embeddings().weight.copy_(embedding)
    target.model.get_output_embeddings().weight.copy_(embedding.roll(1, 0))
    return target


def test_repetition_is_drafted_and_novelty_costs_no_wider_pass():
    """While the text is new it is decoded one token a pass; once it has gone round, every draft is right."""
    with torch.no_grad():
        target = circling()
    decoder = Decoder(target, PromptLookup(PromptLookupConfig(min_ngram=2), target), plan=Chain(4))
    (found,) = decoder.generate([[5, 6]], max_new_tokens=120, ignore_eos=True)
    assert found.ids == [(7 + i) % V for i in range(120)]
    # The first pass comes after 5, 6, 7; the text repeats two tokens for the first time when it ends in 5, 6 again.
    new = V + 2 - 3
    assert [s.offered for s in found.steps[:new]] == [0] * new
    assert {(s.offered, s.accepted) for s in found.steps[new:-1]} == {(4, 4)}


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
