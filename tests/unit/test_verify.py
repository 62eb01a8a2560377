"""``match`` against a walk in Python, and the pairs it refuses."""

import pytest
import torch

from distill.decode.verify import ALLOWED, check_pair, match
from distill.errors import UserError
from distill.tree import geometry
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


def test_pairs():
    check_pair("match", "topk")
    check_pair("match", "coupled")
    with pytest.raises(UserError, match="needs .* candidates, got 'sampled'"):
        check_pair("match", "sampled")
    with pytest.raises(UserError, match=f"one of {', '.join(ALLOWED)}.*Did you mean 'match'"):
        check_pair("macth", "topk")
