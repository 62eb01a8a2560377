import math
from types import SimpleNamespace

"""``match`` against a walk in Python, and the pairs it refuses."""

import pytest
import torch

from distill.decode.verify import RULES, match, resolve, typical
from distill.errors import UserError
from distill.sampling import Sampling
from distill.tree import Chain, Dynamic, Static, geometry
from distill.types import DraftTree


def walk(tokens, parents, chosen):
    """Root first; go to the child that carries the target's token while there is one."""
    path = [0]
    while True:
        children = [i for i in range(1, len(tokens)) if parents[i] == path[-1] and tokens[i] == chosen[path[-1]]]
        if not children:
            return path, chosen[path[-1]]
        (child,) = children
        path.append(child)


def random_tree(generator, n: int, vocab: int):
    """Distinct tokens among siblings, a few unused nodes (with children of their own)."""
    parents, tokens = [0], [int(torch.randint(vocab, (1,), generator=generator))]
    for i in range(1, n):
        while True:
            parent = int(torch.randint(0, i, (1,), generator=generator))
            token = int(torch.randint(-1, vocab, (1,), generator=generator))
            if token == -1 or all(
                not (p == parent and t == token) for p, t in zip(parents[1:], tokens[1:], strict=True)
            ):
                break
        parents.append(parent)
        tokens.append(token)
    return tokens, parents


@pytest.mark.parametrize("seed", range(20))
def test_match_equals_a_walk(seed):
    generator = torch.Generator().manual_seed(seed)
    batch, n, vocab = 16, 14, 4
    trees = [random_tree(generator, n, vocab) for _ in range(batch)]
    tokens = torch.tensor([t for t, _ in trees])
    parents = torch.tensor([p for _, p in trees])
    chosen = torch.randint(0, vocab, (batch, n), generator=generator)
    # Half of the nodes choose the token of one of their children, so that paths reach deep.
    for b in range(batch):
        for child in range(n - 1, 0, -1):
            if tokens[b, child] >= 0 and torch.rand((), generator=generator) < 0.5:
                chosen[b, parents[b, child]] = tokens[b, child]
    max_depth = int(geometry(parents, n)[1].max())
    before = tokens.clone(), parents.clone(), chosen.clone()
    got = match(DraftTree(tokens_BN=tokens, parents_BN=parents, max_depth=max_depth, candidates="topk"), chosen)
    assert all(torch.equal(a, b) for a, b in zip(before, (tokens, parents, chosen), strict=True))
    assert got.path_BN.shape == (batch, max_depth + 1)
    longest = 0
    for b in range(batch):
        path, following = walk(tokens[b].tolist(), parents[b].tolist(), chosen[b].tolist())
        n_kept = int(got.n_B[b])
        assert got.path_BN[b, :n_kept].tolist() == path
        assert (got.path_BN[b, n_kept:] == -1).all()
        assert int(got.next_B[b]) == following
        longest = max(longest, n_kept)
    assert longest >= 3, "the case must reach below the first level"


def test_a_child_of_a_rejected_node_is_never_reached():
    """Node 2 agrees with the target's choice at its own (rejected) parent."""
    tree = DraftTree(
        tokens_BN=torch.tensor([[9, 3, 4]]), parents_BN=torch.tensor([[0, 0, 1]]), max_depth=2, candidates="topk"
    )
    got = match(tree, torch.tensor([[5, 4, 7]]))
    assert (got.n_B.tolist(), got.next_B.tolist(), got.path_BN.tolist()) == ([1], [5], [[0, -1, -1]])


def test_root_alone():
    tree = DraftTree(tokens_BN=torch.tensor([[9]]), parents_BN=torch.tensor([[0]]), max_depth=0, candidates="topk")
    got = match(tree, torch.tensor([[5]]))
    assert (got.n_B.tolist(), got.next_B.tolist(), got.path_BN.tolist()) == ([1], [5], [[0]])


def test_the_root_token_itself_is_never_compared():
    """The root was committed already; that the target would not repeat it says nothing."""
    tree = DraftTree(
        tokens_BN=torch.tensor([[5, 5]]), parents_BN=torch.tensor([[0, 0]]), max_depth=1, candidates="topk"
    )
    assert match(tree, torch.tensor([[5, 1]])).n_B.tolist() == [2]
    assert match(tree, torch.tensor([[6, 5]])).n_B.tolist() == [1]


SAMPLED, GREEDY = Sampling(temperature=1.0), Sampling()
DRAFTER = SimpleNamespace(name="some", max_depth=3, soft=True)
LOOKUP = SimpleNamespace(name="lookup", max_depth=None, soft=False)


def test_what_goes_with_what():
    assert resolve("match", "auto", sampling=SAMPLED) == ("match", "coupled")
    assert resolve("match", "topk", sampling=SAMPLED) == ("match", "topk")
    assert resolve("rejection", "auto", sampling=SAMPLED, drafter=DRAFTER, plan=Chain(3)) == ("rejection", "sampled")
    assert resolve("typical", "auto", sampling=SAMPLED) == ("typical", "topk")


@pytest.mark.parametrize("verifier", RULES)
def test_at_temperature_zero_all_rules_are_the_same_comparison(verifier):
    assert resolve(verifier, "auto", sampling=GREEDY) == ("match", "topk")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"verifier": "macth"}, f"one of {', '.join(RULES)}, got 'macth'.*Did you mean 'match'"),
        ({"candidates": "topkk"}, "candidates must be one of auto.*Did you mean 'topk'"),
        ({"candidates": "sampled"}, "needs coupled or topk candidates, got 'sampled'"),
        ({"verifier": "rejection", "candidates": "coupled"}, "needs sampled candidates, got 'coupled'"),
        ({"verifier": "typical", "candidates": "coupled"}, "needs topk candidates, got 'coupled'"),
        ({"verifier": "rejection", "plan": Dynamic(top_k=2, depth=2, total=4)}, "chain or a static tree, got dynamic"),
        ({"verifier": "rejection", "drafter": LOOKUP}, "gives a distribution, got 'lookup', which is deterministic"),
        ({"verifier": "rejection", "plan": Static(((0,), (2,)))}, "ranks 0, 1, 2, ... without gaps"),
        ({"plan": Chain(4)}, "at most 3 for drafter 'some', got 4"),
    ],
)
def test_refusals(arguments, sentence):
    given = {"verifier": "match", "candidates": "auto", "drafter": DRAFTER, "plan": Chain(2), **arguments}
    with pytest.raises(UserError, match=sentence):
        resolve(given.pop("verifier"), given.pop("candidates"), sampling=SAMPLED, **given)


def typical_by_hand(tokens, parents, logits, temperature, epsilon, delta):
    """Every path, longest first, the most likely of those; in plain Python."""
    p = [[math.exp(x / temperature) for x in row] for row in logits]
    p = [[x / sum(row) for x in row] for row in p]
    entropy = [-sum(x * math.log(x) for x in row) for row in p]
    best, best_key = [0], (0, 0.0)
    for node in range(1, len(tokens)):
        path, at = [node], node
        while at:
            at = parents[at]
            path.insert(0, at)
        chances = [p[a][tokens[b]] for a, b in zip(path, path[1:], strict=False)]
        least = [min(epsilon, delta * math.exp(-entropy[a])) for a in path[:-1]]
        if all(c > t for c, t in zip(chances, least, strict=True)):
            key = (len(chances), sum(math.log(c) for c in chances))
            if key > best_key and (len(chances) > best_key[0] or key[1] > best_key[1]):
                best, best_key = path, key
    return best, max(range(len(logits[0])), key=lambda v: logits[best[-1]][v])


@pytest.mark.parametrize("seed", range(30))
def test_typical_acceptance(seed):
    generator = torch.Generator().manual_seed(seed)
    n, vocab = 10, 6
    parents = [0] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, n)]
    tokens = torch.randint(0, vocab, (1, n), generator=generator)
    logits = 2 * torch.randn(1, n, vocab, generator=generator, dtype=torch.float64)
    tree = DraftTree(
        tokens_BN=tokens,
        parents_BN=torch.tensor([parents]),
        max_depth=int(geometry(torch.tensor([parents]), n)[1].max()),
        candidates="topk",
    )
    got = typical(tree, logits, Sampling(temperature=0.8), epsilon=0.2, delta=0.5)
    path, following = typical_by_hand(tokens[0].tolist(), parents, logits[0].tolist(), 0.8, 0.2, 0.5)
    assert got.path_BN[0, : int(got.n_B[0])].tolist() == path
    assert int(got.next_B[0]) == following
