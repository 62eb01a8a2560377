"""``match`` against a walk in Python, and the table of what goes with what."""

from types import SimpleNamespace

import pytest
import torch

from distill.decode.verify import RULES, Typical, check_thresholds, match, resolve
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


# -- what goes with what

CHAIN, GAPS = Chain(3), Static(((1,), (0,), (0, 1)))
DYNAMIC = Dynamic(top_k=2, depth=2, total=4)
TREE = Static(((0,), (1,), (0, 0)))
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0)


def drafter(*, soft=True, max_depth=None, width=None):
    target = SimpleNamespace(info=SimpleNamespace(vocab_size=50))
    vocab = None if width is None else SimpleNamespace(size=width)
    return SimpleNamespace(name="some", soft=soft, max_depth=max_depth, target=target, vocab=vocab)


ALLOWED = {
    ("match", True): {"auto": "coupled", "coupled": "coupled", "topk": "topk"},
    ("match", False): {"auto": "topk", "topk": "topk"},
    ("rejection", True): {"auto": "sampled", "sampled": "sampled"},
    ("rejection", False): {},
    ("typical", True): {"auto": "topk", "topk": "topk"},
    ("typical", False): {"auto": "topk", "topk": "topk"},
}
PLANS = {"chain": CHAIN, "static": TREE, "gaps": GAPS, "dynamic": DYNAMIC}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("candidates", ["auto", "topk", "coupled", "sampled"])
@pytest.mark.parametrize("verifier,soft", ALLOWED)
def test_every_combination(verifier, soft, candidates, plan):
    """The whole table, once more by hand: rejection takes no dynamic tree and no gaps, a lookup no dynamic tree."""
    want = ALLOWED[verifier, soft].get(candidates)
    if (verifier == "rejection" and plan in ("gaps", "dynamic")) or (plan == "dynamic" and not soft):
        want = None
    given = {"drafter": drafter(soft=soft), "plan": PLANS[plan]}
    if want is None:
        for sampling in (GREEDY, SAMPLED):
            with pytest.raises(UserError):
                resolve(verifier, candidates, sampling=sampling, **given)
        return
    assert resolve(verifier, candidates, sampling=SAMPLED, **given) == (verifier, want)
    assert resolve(verifier, candidates, sampling=GREEDY, **given) == ("match", "topk"), "at T = 0 all are the same"


@pytest.mark.parametrize("verifier", RULES)
def test_without_a_drafter_the_target_samples_for_itself(verifier):
    assert resolve(verifier, sampling=SAMPLED) == ("match", "topk")


@pytest.mark.parametrize(
    "verifier,candidates,given,says",
    [
        ("macth", "auto", {}, "verifier must be one of match, rejection, typical, got 'macth'.* Did you mean 'match'"),
        ("match", "topkk", {}, "candidates must be one of auto, topk, .*, got 'topkk'.* Did you mean 'topk'"),
        ("rejection", "coupled", {}, "needs sampled candidates, got 'coupled'; .* only match allows"),
        ("typical", "sampled", {}, "needs topk candidates, got 'sampled'; .* coins of rejection"),
        ("rejection", "auto", {"plan": DYNAMIC}, "needs a chain or a static tree, got dynamic.* would make q wrong"),
        ("rejection", "auto", {"plan": GAPS}, "ranks 0, 1, 2, ... without gaps"),
        ("rejection", "auto", {"drafter": drafter(soft=False)}, "gives a distribution, got 'some', .* deterministic"),
        ("match", "coupled", {"drafter": drafter(soft=False)}, "must be auto or topk for drafter 'some'"),
        ("match", "auto", {"drafter": drafter(max_depth=2)}, "tree depth must be at most 2 for drafter 'some', got 3"),
        ("match", "auto", {"plan": Static(((60,), (50,)))}, "below the 50 tokens that drafter 'some' .*, got 50"),
        ("match", "auto", {"plan": Static(((9,),)), "drafter": drafter(width=9)}, "below the 9 tokens .*, got 9"),
    ],
)
def test_refusals_say_why(verifier, candidates, given, says):
    with pytest.raises(UserError, match=says):
        resolve(verifier, candidates, **{"drafter": drafter(), "plan": CHAIN, "sampling": SAMPLED, **given})


def test_thresholds_that_nothing_reads_are_refused():
    check_thresholds(Typical(), ["match", None])
    check_thresholds(Typical(epsilon=0.2), ["match", "typical"])
    with pytest.raises(UserError, match="left alone without verify=typical, got 0.2 and 0.3"):
        check_thresholds(Typical(epsilon=0.2), ["match", None])
