"""The law of what ``rejection`` emits: exactly, over every draw and every coin, and by counting over real decodes.

The enumeration runs the walk itself. Children are every ordered choice without replacement, with its probability; a
coin is forced to 0 (accept whatever has a chance) or 1 (refuse) and weighted by the chance the walk reports. What is
compared is the law of whole continuations, so a fault at any depth, or in the draw after the path, shows.
"""

from functools import lru_cache
from itertools import permutations, product

import pytest
import torch
from oracles import SECOND, hash_bits
from transformers import TopKLogitsWarper, TopPLogitsWarper

from distill.decode import Decoder, coupling, rejection
from distill.decode.rejection import walk
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.sampling import STREAMS, Sampling, gumbel, stream_seed, uniform
from distill.target.tiny import tiny_target
from distill.tree import Chain, Static
from distill.types import DraftTree
from distill.vocab import choose_vocab

EXACT = 1e-12  # sums of some ten thousand products in fp64
WRONG = 1e-3  # total variation that a fault must show

CHAINS = {f"chain{n}": tuple((0,) * d for d in range(1, n + 1)) for n in (1, 2, 3)}
TREES = {
    "two": ((0,), (1,)),
    "three": ((0,), (1,), (2,)),
    "three-deep": ((0,), (1,), (2,), (1, 0)),
    "two-deep": ((0,), (1,), (0, 0), (0, 1), (1, 0)),
}
SHAPES = CHAINS | TREES


class Laws:
    """Random target and draft distributions after every prefix; ``columns`` are the draft vocabulary's target ids."""

    def __init__(self, kind: str, seed: int, vocab: int = 4):
        self.kind, self.seed, self.vocab = kind, seed, vocab
        self.columns = [0, 2, 3] if kind == "pruned" else list(range(vocab))

    def _random(self, prefix, which: int, n: int):
        key = hash((self.seed, which, *prefix)) & 0x7FFFFFFF
        generator = torch.Generator().manual_seed(key)
        weights = torch.rand(n, generator=generator, dtype=torch.float64) ** 3 + 1e-3
        return weights / weights.sum()

    def p(self, prefix):
        law = self._random(prefix, 0, self.vocab)
        if self.kind == "disjoint":
            law[::2] = 0
        if self.kind == "filtered":
            law[law < law.max() / 4] = 0
        return law / law.sum()

    def q(self, prefix):
        if self.kind == "equal":
            return self.p(prefix)
        law = self._random(prefix, 1, len(self.columns))
        if self.kind == "disjoint":
            law[1::2] = 0
        if self.kind == "filtered":
            law[law < law.max() / 3] = 0
        return law / law.sum()


def draws(q, count: int):
    """Every ordered draw of ``count`` without replacement, with its probability; -1 once nothing is left."""
    support = [i for i, mass in enumerate(q.tolist()) if mass > 0]
    for order in permutations(support, min(count, len(support))):
        chance, left = 1.0, 1.0
        for token in order:
            chance *= float(q[token]) / left
            left -= float(q[token])
        yield chance, (*order, *[-1] * (count - len(order)))


def proposals(paths, laws: Laws, drawn):
    """Every tree of this shape: (probability, token of each node, q of each inner node)."""
    nodes = sorted(paths, key=lambda path: (len(path), path))
    inner = sorted({path[:-1] for path in nodes}, key=lambda path: (len(path), path))
    count = {path: sum(n[:-1] == path for n in nodes) for path in inner}

    def extend(done, chance, tokens, known):
        if len(done) == len(inner):
            yield chance, [tokens[path] for path in nodes], [known[path] for path in inner]
            return
        path = inner[len(done)]
        prefix = [tokens[path[:d]] for d in range(1, len(path) + 1)]
        q = laws.q(tuple(prefix)) if -1 not in prefix else laws.q(())
        for own, children in drawn(q, count[path]):
            told = {(*path, rank): laws.columns[x] if x >= 0 else -1 for rank, x in enumerate(children)}
            yield from extend([*done, path], chance * own, tokens | told, known | {path: q})

    yield from extend([], 1.0, {}, {})


def law_of_output(paths, laws: Laws, drawn=draws):
    """(law of the continuation as emitted, law under p), both over all sequences of depth + 1 tokens."""
    nodes = sorted(paths, key=lambda path: (len(path), path))
    inner = sorted({path[:-1] for path in nodes}, key=lambda path: (len(path), path))
    place = {(): 0, **{path: i + 1 for i, path in enumerate(nodes)}}
    depth, most = len(nodes[-1]), max(path[-1] for path in nodes) + 1
    children = [max(path[-1] + 1 for path in nodes if len(path) == d + 1) for d in range(depth)]
    trees = list(proposals(paths, laws, drawn))
    coins = torch.tensor(list(product([0.0, 1.0], repeat=depth * most)), dtype=torch.float64).view(-1, depth, most)
    each = len(coins)
    tokens = torch.tensor([[0, *t] for _, t, _ in trees]).repeat_interleave(each, 0)
    tree = DraftTree(
        tokens_BN=tokens,
        parents_BN=torch.tensor([0] + [place[path[:-1]] for path in nodes]).expand(len(tokens), -1),
        max_depth=depth,
        candidates="sampled",
        q_BFW=torch.stack([torch.stack(q) for _, _, q in trees]).repeat_interleave(each, 0),
        q_row_N=torch.tensor([inner.index(path) if path in inner else -1 for path in [(), *nodes]]),
    )
    prefixes = [[tuple(t[place[path[:d]] - 1] for d in range(1, len(path) + 1)) for path in nodes] for _, t, _ in trees]
    target = torch.stack([torch.stack([laws.p(()), *[laws.p(x) for x in row]]) for row in prefixes])
    target_BNV = target.repeat_interleave(each, 0)
    rows = torch.arange(len(tokens))
    columns = None if laws.kind != "pruned" else torch.tensor(laws.columns)
    coins_BPC = coins.repeat(len(trees), 1, 1)
    got = walk(tree, lambda node_B: target_BNV[rows, node_B], coins_BPC, children=children, draft_to_target=columns)
    weight = torch.tensor([chance for chance, _, _ in trees], dtype=torch.float64).repeat_interleave(each)
    asked = torch.zeros(len(tokens), dtype=torch.long)
    for path, node in place.items():
        if path:
            chance, coin = got.chance_BN[:, node], coins_BPC[:, len(path) - 1, path[-1]]
            told = torch.where(coin == 0, chance, 1 - chance)
            weight = weight * torch.where(chance.isnan(), 1.0, told)
            asked += ~chance.isnan()
    weight = weight * 0.5 ** (depth * most - asked)  # coins nobody asked for may lie either way
    assert torch.allclose(weight.sum(), torch.ones((), dtype=torch.float64), atol=EXACT)
    assert torch.isfinite(got.law_BV).all()
    emitted = torch.zeros([laws.vocab] * (depth + 1), dtype=torch.float64)
    wanted = torch.zeros_like(emitted)

    @lru_cache
    def rest(prefix):
        """Law of the tokens after ``prefix`` under p."""
        if len(prefix) == depth + 1:
            return torch.ones((), dtype=torch.float64)
        p = laws.p(prefix)
        return torch.stack([p[x] * rest((*prefix, x)) for x in range(laws.vocab)])

    wanted += rest(())
    for b in range(len(tokens)):
        if float(weight[b]) == 0:
            continue
        prefix = tuple(int(tokens[b, node]) for node in got.path_BP[b].tolist()[1:] if node >= 0)
        assert -1 not in prefix
        for x, mass in enumerate(got.law_BV[b].tolist()):
            if mass:
                emitted[(*prefix, x)] += float(weight[b]) * mass * rest((*prefix, x))
    return emitted, wanted


def distance(paths, laws, drawn=draws) -> float:
    emitted, wanted = law_of_output(paths, laws, drawn)
    return float((emitted - wanted).abs().sum() / 2)


@pytest.mark.parametrize("kind", ["any", "equal", "disjoint", "pruned", "filtered"])
@pytest.mark.parametrize("shape", SHAPES)
def test_exact_law(shape, kind):
    for seed in range(2):
        assert distance(SHAPES[shape], Laws(kind, seed)) <= EXACT


# -- what must not pass


def argmax_drafts(q, count):
    yield 1.0, tuple(q.argsort(descending=True)[:count].tolist())


def best_first(q, count):
    """Drawn, then sorted by their own scores: what reranking does."""
    for chance, order in draws(q, count):
        yield chance, tuple(sorted(order, key=lambda x: -float(q[x])))


def last_first(q, count):
    for chance, order in draws(q, count):
        yield chance, order[::-1]


@pytest.mark.parametrize("drawn", [argmax_drafts, best_first, last_first])
def test_drafts_that_were_not_drawn_like_that(drawn):
    shape = "chain2" if drawn is argmax_drafts else "two"
    assert max(distance(SHAPES[shape], Laws("any", seed), drawn) for seed in range(3)) > WRONG


FAULTS = {
    "q not renormalised": ("without", lambda q_BV, x_B1: q_BV.scatter(1, x_B1, 0.0), "two"),
    "q as if with replacement": ("without", lambda q_BV, x_B1: q_BV, "two"),
    "draws from p again": ("residual", lambda r_BV, q_BV: r_BV, "chain1"),
    "only x taken out of p": (
        "residual",
        lambda r_BV, q_BV: torch.where(q_BV > r_BV, 0.0, r_BV) / torch.where(q_BV > r_BV, 0.0, r_BV).sum(1, True),
        "chain1",
    ),
    "absolute difference": (
        "residual",
        lambda r_BV, q_BV: (r_BV - q_BV).abs() / (r_BV - q_BV).abs().sum(1, True),
        "chain2",
    ),
    "wrong columns": ("scattered", lambda q, columns, v: q.new_zeros(len(q), v).index_copy(1, columns - 1, q), "two"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_rule(fault, monkeypatch):
    name, broken, shape = FAULTS[fault]
    laws = [Laws("pruned" if name == "scattered" else "any", seed) for seed in range(3)]
    if name == "scattered":
        for each in laws:
            each.columns = [1, 2, 3]
    assert max(distance(SHAPES[shape], each) for each in laws) <= EXACT
    monkeypatch.setattr(rejection, name, broken)
    assert max(distance(SHAPES[shape], each) for each in laws) > WRONG


def test_nothing_left_falls_back():
    """Where rounding leaves no residual the law stays what it was; q that ran out refuses nothing."""
    r = torch.tensor([[0.25, 0.75]])
    assert torch.equal(rejection.residual(r, r), r)
    assert torch.equal(rejection.without(torch.tensor([[0.0, 1.0]]), torch.tensor([[1]])), torch.zeros(1, 2))


# -- the draws themselves


@pytest.mark.parametrize("setting", [{}, {"top_k": 4}, {"top_p": 0.8}], ids=str)
def test_ranked_by_noise_is_drawn_without_replacement(setting):
    """Frequencies of the first two children over 20,000 requests, against the exact law."""
    n, width = 20_000, 6
    sampling = Sampling(temperature=0.8, seed=3, **setting)
    logits_W = torch.tensor([0.1, 1.3, -0.5, 0.6, -1.2, 0.9], dtype=torch.float64)
    noise = coupling.RoundNoise.starting(sampling, torch.arange(n), torch.full((n,), 5), count=2, vocab=width)
    ranker = coupling.ranker("sampled", sampling, noise.for_drafts("sampled", None))
    logits_BFW = logits_W.expand(n, 1, -1)
    first, second = ranker(logits_BFW, 1)[:, 0].topk(2).indices.T
    q = ranker.distribution(logits_BFW)[0, 0]
    warped = logits_W[None] / 0.8
    warped = TopKLogitsWarper(4)(None, warped) if "top_k" in setting else warped
    warped = TopPLogitsWarper(0.8)(None, warped) if "top_p" in setting else warped
    torch.testing.assert_close(q, warped[0].softmax(-1))
    wanted = torch.zeros(width, width, dtype=torch.float64)
    for chance, (a, b) in draws(q, 2):
        wanted[a, b] += chance
    counted = torch.zeros_like(wanted).index_put((first, second), torch.ones(n, dtype=torch.float64), accumulate=True)
    assert tail(counted, wanted) > 1e-3
    assert tail(counted, wanted.T.contiguous()) < 1e-9, "the order matters, and the count can tell"


def tail(counted, wanted) -> float:
    """Chi-square: chance of a deviation at least this large; cells expected below five are taken together."""
    n = counted.sum()
    expected = (wanted * n).flatten()
    small = expected < 5
    observed = counted.flatten()
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    observed = torch.cat([observed[~small], observed[small].sum()[None]])
    if expected[-1] < 1e-6 * n:
        if observed[-1] > 0 and expected[-1] == 0:
            return 0.0
        expected, observed = expected[:-1], observed[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


def test_streams_are_apart():
    """Another stream is another seed; the coins are the published hash over it."""
    seeds = {stream_seed(seed, stream) for seed in range(50) for stream in STREAMS} | set(range(50))
    assert len(seeds) == 50 * (len(STREAMS) + 1)
    request, position = torch.tensor([4]), torch.tensor([[7]])
    u = uniform(seed=9, request_B=request, position_BP=position, ids_BPk=torch.arange(5))
    wanted = [((hash_bits(9, 4, 7, i, second=SECOND) & 0x7FFFFFFF) + 0.5) / 2**31 for i in range(5)]
    torch.testing.assert_close(u[0, 0].double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=0)
    g = gumbel(seed=9, request_B=request, position_BP=position, vocab=5)
    torch.testing.assert_close(g, -torch.log(-torch.log1p(-u)))


# -- real decodes

V, REQUESTS, NEW = 8, 4000, 3
SAMPLING = Sampling(temperature=0.7, seed=1)
PLANS = {"chain": Chain(2), "tree": Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1)))}


@lru_cache
def pair():
    target = tiny_target("llama", seed=4, vocab_size=V, hidden=16, layers=2, dtype=torch.float64)
    torch.manual_seed(2)
    vocab, _ = choose_vocab(torch.ones(V), V)
    return target, Eagle3(Eagle3Config(draft_vocab_size=V), target, vocab).double().requires_grad_(False)


PROMPT = [3, 5, 1, 6]


@lru_cache
def law() -> torch.Tensor:
    """Joint law of the next three tokens, from the plain model on every prefix."""
    target, _ = pair()
    joint = torch.ones(1, dtype=torch.float64)
    for depth in range(NEW):
        prefixes = torch.tensor([[*PROMPT, *rest] for rest in product(range(V), repeat=depth)])
        logits = target.model(input_ids=prefixes, use_cache=False).logits[:, -1]
        joint = (joint[:, None] * (logits / SAMPLING.temperature).softmax(-1)).flatten()
    return joint.view(V, V, V)


def counts(plan, **kwargs) -> torch.Tensor:
    target, drafter = pair()
    decoder = Decoder(target, drafter, plan=plan, sampling=SAMPLING, **{"verifier": "rejection", **kwargs})
    counted = torch.zeros(V, V, V, dtype=torch.float64)
    accepted = 0
    got = decoder.generate([PROMPT] * REQUESTS, max_new_tokens=NEW, ignore_eos=True)
    for generation in got:
        counted[tuple(generation.ids)] += 1
        accepted += sum(s.accepted for s in generation.steps)
    assert 0.2 * REQUESTS < accepted < 1.8 * REQUESTS, "drafts must be accepted and refused"
    return counted


@pytest.mark.parametrize("plan", PLANS)
def test_real_decodes_follow_the_target(plan):
    assert tail(counts(PLANS[plan]), law()) > 1e-3


def test_the_count_notices_another_temperature():
    """Control of the test itself."""
    other = law() ** 1.15
    assert tail(counts(PLANS["chain"]), other / other.sum()) < 1e-6


def unrenormalised(monkeypatch):
    monkeypatch.setattr(rejection, "without", lambda q_BV, x_B1: q_BV.scatter(1, x_B1, 0.0))


def argmax_scored_softly(monkeypatch):
    monkeypatch.setattr(coupling.SampledRanker, "__call__", lambda self, logits, _: self._warp(logits))


def coins_of_the_draft(monkeypatch):
    def shared(self, count):
        return uniform(
            seed=stream_seed(self.sampling.seed, "draft"),
            request_B=self.request_B,
            position_BP=self.position_BP,
            ids_BPk=torch.arange(count),
        )

    monkeypatch.setattr(coupling.RoundNoise, "coins", shared)


@pytest.mark.parametrize(
    "fault,plan",
    [
        (unrenormalised, "tree"),
        (argmax_scored_softly, "chain"),
        (coins_of_the_draft, "chain"),
    ],
)
def test_the_count_notices_a_fault(fault, plan, monkeypatch):
    fault(monkeypatch)
    assert tail(counts(PLANS[plan]), law()) < 1e-5
