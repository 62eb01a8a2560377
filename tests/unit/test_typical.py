"""Typical acceptance against the rule written out in Python, and what its name promises: nothing at T > 0."""

import math

import pytest
import torch
from oracles import random_prompts, stepped

from distill.decode import Decoder, Typical, lossless
from distill.decode.verify import typical
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.errors import UserError
from distill.sampling import Sampling
from distill.target.tiny import tiny_target
from distill.tree import Chain, Dynamic, geometry
from distill.types import DraftTree
from distill.vocab import choose_vocab

V = 6


def probabilities(logits, temperature):
    weights = [math.exp(x / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


def walked(tokens, parents, logits, temperature, thresholds):
    """Every root-to-node path whose tokens are all typical; longest, then most likely, then first in the tree."""
    best = (1, 0.0, [0])
    for node in range(len(tokens)):
        path = [node]
        while path[0] != 0:
            path.insert(0, parents[path[0]])
        total, ok = 0.0, True
        for parent, child in zip(path, path[1:], strict=False):
            p = probabilities(logits[parent], temperature)
            entropy = -sum(x * math.log(x) for x in p)
            chance = p[tokens[child]] if tokens[child] >= 0 else 0.0
            ok = ok and chance > min(thresholds.epsilon, thresholds.delta * math.exp(-entropy))
            total += math.log(chance) if chance else -math.inf
        if ok and (len(path), total) > best[:2]:
            best = (len(path), total, path)
    path = best[2]
    return path, max(range(V), key=lambda x: logits[path[-1]][x])


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("thresholds", [Typical(), Typical(epsilon=0.3, delta=0.6), Typical(epsilon=1.0, delta=1.0)])
def test_typical_equals_the_rule(thresholds, temperature):
    generator = torch.Generator().manual_seed(int(10 * thresholds.epsilon))
    batch, n = 60, 12
    tokens = torch.randint(-1, V, (batch, n), generator=generator)
    tokens[:, 0] = 1
    parents = torch.tensor([[0, *(int(torch.randint(i, (1,), generator=generator)) for i in range(1, n))]] * batch)
    depth = int(geometry(parents, n)[1].max())
    logits = 1.5 * torch.randn(batch, n, V, generator=generator, dtype=torch.float64)
    tree = DraftTree(tokens_BN=tokens, parents_BN=parents, max_depth=depth, candidates="topk")
    got = typical(tree, logits, Sampling(temperature=temperature), thresholds)
    kept = []
    for b in range(batch):
        path, following = walked(tokens[b].tolist(), parents[b].tolist(), logits[b].tolist(), temperature, thresholds)
        assert got.path_BN[b, : len(path)].tolist() == path
        assert (got.path_BN[b, len(path) :] == -1).all()
        assert (int(got.n_B[b]), int(got.next_B[b])) == (len(path), following)
        kept.append(len(path))
    assert min(kept) == 1
    assert max(kept) >= 3


def test_entropy_lowers_the_threshold():
    """0.085 beside 0.915 is not typical; 0.05 is where every token has 0.05."""
    tree = DraftTree(
        tokens_BN=torch.tensor([[0, 1]]), parents_BN=torch.tensor([[0, 0]]), max_depth=1, candidates="topk"
    )
    decided = torch.tensor([0.915, 0.085]).log()
    flat = torch.full((20,), 0.05).log()
    for law, kept in ((decided, 1), (flat, 2)):
        logits = law.expand(1, 2, -1)
        assert int(typical(tree, logits, Sampling(temperature=1.0), Typical()).n_B) == kept


def test_filtered_tokens_are_never_typical():
    logits = torch.tensor([2.0, 1.9, 1.8]).expand(1, 2, -1)
    tree = DraftTree(
        tokens_BN=torch.tensor([[0, 2]]), parents_BN=torch.tensor([[0, 0]]), max_depth=1, candidates="topk"
    )
    assert int(typical(tree, logits, Sampling(temperature=1.0), Typical()).n_B) == 2
    assert int(typical(tree, logits, Sampling(temperature=1.0, top_k=2), Typical()).n_B) == 1


@pytest.mark.parametrize("plan", [Chain(3), Dynamic(top_k=3, depth=3, total=8)], ids=str)
def test_greedy_is_exact_and_sampled_is_not(plan):
    target = tiny_target("llama", seed=2, vocab_size=40, hidden=16, layers=2, dtype=torch.float64)
    vocab, _ = choose_vocab(torch.rand(40), 25)
    drafter = Eagle3(Eagle3Config(draft_vocab_size=25), target, vocab).double()
    prompts = random_prompts(8, 40, seed=1)
    for sampling, exact in ((Sampling(), True), (Sampling(temperature=1.0), False)):
        decoder = Decoder(target, drafter, plan=plan, sampling=sampling, verifier="typical")
        got = [g.ids for g in decoder.generate(prompts, max_new_tokens=12, ignore_eos=True)]
        assert (got == stepped(target, prompts, 12, sampling, stop=())) is exact
        assert lossless("typical", temperature=sampling.temperature) is exact
        assert lossless("match", temperature=sampling.temperature)
        assert lossless("rejection", temperature=sampling.temperature)


@pytest.mark.parametrize("bad", [{"epsilon": 0.0}, {"epsilon": 1.5}, {"delta": -1.0}, {"delta": math.nan}])
def test_impossible_thresholds(bad):
    with pytest.raises(UserError, match=f"typical_{next(iter(bad))} must be above 0"):
        Typical(**bad)
