"""Plans against brute-force Python: the geometry of fixed trees and EAGLE-2's rules for dynamic ones."""

from dataclasses import dataclass

import pytest
import torch

from distill import kernels
from distill.growing import grow, root_only
from distill.tree import Chain, Dynamic, Static, geometry

BUSHY = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 3), (0, 0, 0), (1, 0, 2), (2, 3, 1))


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def implementation(request, monkeypatch):
    """Everything here holds with our CPU kernels and without."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "load", lambda: None)
    elif kernels.load() is None:
        pytest.skip(f"kernels not available: {kernels.why_not()}")


class Table:
    """A drafter whose log-probabilities are a pure function of the path: logits[path] = a seeded draw.

    It also checks what the frontier says about each node against the path it follows.
    """

    def __init__(self, vocab: int, *, seed: int = 0, levels: int | None = None, offset: int = 0):
        self.vocab, self.seed, self.levels, self.offset = vocab, seed, levels, offset
        self.fed = 0

    def logits(self, row: int, path: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, row, path)) % 2**40)
        if self.levels:  # few distinct values: many ties
            return torch.randint(0, self.levels, (self.vocab,), generator=generator).double()
        return 2 * torch.randn(self.vocab, generator=generator, dtype=torch.float64)

    def to_target_ids(self, ids):
        return ids + self.offset

    def step(self, state, frontier):
        batch, width = frontier.tokens_BF.shape
        if frontier.depth == 0:
            state["paths"] = [[()] for _ in range(batch)]
            state["seen"] = [[()] for _ in range(batch)]
            assert frontier.tokens_BF.tolist() == state["root"]
            assert frontier.ancestors_BFM.all()
            assert frontier.ancestors_BFM.shape == (batch, 1, 1)
        else:
            above = state["paths"]
            state["paths"] = [
                [
                    above[b][int(frontier.parent_BF[b, f])] + (int(frontier.tokens_BF[b, f]) - self.offset,)
                    for f in range(width)
                ]
                for b in range(batch)
            ]
            for b in range(batch):
                state["seen"][b] += state["paths"][b]
        for b in range(batch):
            seen, paths = state["seen"][b], state["paths"][b]
            assert all(len(p) == frontier.depth for p in paths)
            assert frontier.ancestors_BFM.shape[2] == len(seen), "columns are the nodes fed so far"
            for f, path in enumerate(paths):
                own = len(seen) - width + f
                want = [m == own or (len(q) < len(path) and path[: len(q)] == q) for m, q in enumerate(seen)]
                assert frontier.ancestors_BFM[b, f].tolist() == want
        self.fed += width
        return torch.stack([torch.stack([self.logits(b, p) for p in rows]) for b, rows in enumerate(state["paths"])])


@dataclass
class Plain:
    """The ranker of greedy decoding."""

    candidates: str = "topk"

    def best(self, logits_BFW, depth, k, *, chances=False, out=None):
        scores = logits_BFW.log_softmax(-1) if chances else logits_BFW
        return scores.topk(min(k, scores.shape[-1]))

    def distribution(self, logits_BFW):
        return None


def paths_of(tokens: list[int], parents: list[int], offset: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        assert parents[node] < node, "a parent must precede its children"
        paths.append((*paths[parents[node]], tokens[node] - offset))
    return paths


def grown(plan, table, batch: int = 3):
    root = torch.arange(5, 5 + batch)
    tree = grow(table, {"root": root[:, None].tolist()}, plan, root, Plain())
    assert tree.tokens_BN[:, 0].tolist() == root.tolist()
    assert tree.parents_BN[:, 0].tolist() == [0] * batch
    assert tree.max_depth == plan.depth
    assert tree.candidates == "topk"
    return tree


# -- geometry


@pytest.mark.parametrize("seed", range(10))
def test_geometry_equals_brute_force(seed):
    generator = torch.Generator().manual_seed(seed)
    n = 12
    parents = torch.stack(
        [
            torch.tensor([0, *(int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, n))])
            for _ in range(4)
        ]
    )
    ancestors, depths = geometry(parents, n - 1)
    for b in range(4):
        for node in range(n):
            chain, at = {node}, node
            while at:
                at = int(parents[b, at])
                chain.add(at)
            assert set(ancestors[b, node].nonzero()[:, 0].tolist()) == chain
            assert int(depths[b, node]) == len(chain) - 1
    deepest = int(depths.max())
    exact = geometry(parents, deepest)
    assert torch.equal(exact[0], ancestors)
    assert torch.equal(exact[1], depths)


def test_root_only():
    tree = root_only(torch.tensor([4, 9]))
    assert tree.tokens_BN.tolist() == [[4], [9]]
    assert tree.parents_BN.tolist() == [[0], [0]]
    assert tree.max_depth == 0


# -- fixed trees


@pytest.mark.parametrize("offset", [0, 7])
@pytest.mark.parametrize(
    "plan",
    [
        Chain(1),
        Chain(5),
        Static(BUSHY),
        Static(tuple(reversed(BUSHY))),
        Static(((4,), (4, 4), (4, 4, 4))),
        Static(tuple((r,) for r in range(6))),
    ],
    ids=str,
)
def test_static_equals_brute_force(plan, offset):
    """Node (r1, r2, ...) carries the r1-th best token, below it the r2-th best, and so on."""
    table = Table(8, offset=offset)
    tree = grown(plan, table)
    n = plan.n_nodes
    assert tree.tokens_BN.shape == tree.parents_BN.shape == (3, n)
    for b in range(3):
        want = []
        for ranks in plan.paths:
            path: tuple[int, ...] = ()
            for rank in ranks:
                order = table.logits(b, path).argsort(descending=True).tolist()
                path = (*path, order[rank])
            want.append(path)
        got = paths_of(tree.tokens_BN[b].tolist(), tree.parents_BN[b].tolist(), offset)
        assert sorted(got[1:]) == sorted(want)
    assert table.fed == plan.fed
    assert plan.depth == max(map(len, plan.paths))
    assert geometry(tree.parents_BN, plan.depth)[1].max() == plan.depth


def test_static_node_order_is_by_depth_then_rank():
    plan = Static(((1,), (0, 0), (0,), (1, 0)))
    tree = grown(plan, Table(8))
    assert tree.parents_BN[0].tolist() == [0, 0, 0, 1, 2]


def test_static_ranks_beyond_the_vocabulary_are_unused_nodes():
    plan = Static(((0,), (3,), (5,), (5, 0), (0, 3), (0, 2)))
    table = Table(3)
    tree = grown(plan, table)
    # Order: (0) (3) (5) | (0,2) (0,3) (5,0). The child of an unused node can never be reached.
    unused = tree.tokens_BN == -1
    assert unused[:, [2, 3, 5]].all()
    assert not unused[:, [0, 1, 4]].any()
    assert tree.parents_BN[0].tolist() == [0, 0, 0, 0, 1, 1, 3]


def test_chain_is_a_chain():
    tree = grown(Chain(4), Table(8))
    assert tree.parents_BN[0].tolist() == [0, 0, 1, 2, 3]
    assert (Chain(4).n_nodes, Chain(4).fed, Chain(4).depth, str(Chain(4))) == (5, 4, 4, "chain(4)")


# -- what children are drawn from


class Drawing(Plain):
    """Children in the order of the logits, said to be drawn from their softmax without the worst ``filtered``."""

    candidates = "sampled"

    def __init__(self, filtered: int = 0):
        self.filtered = filtered

    def _scores(self, logits_BFW):
        worst = (-logits_BFW).topk(self.filtered).indices
        return logits_BFW.scatter(-1, worst, float("-inf"))

    def best(self, logits_BFW, depth, k, *, chances=False, out=None):
        assert not chances
        scores = self._scores(logits_BFW)
        return scores.topk(min(k, scores.shape[-1]))

    def distribution(self, logits_BFW):
        return self._scores(logits_BFW).softmax(-1)


@pytest.mark.parametrize("plan", [Chain(3), Static(BUSHY), Static(tuple((r,) for r in range(6)))], ids=str)
def test_every_node_knows_what_its_children_were_drawn_from(plan):
    table, root, ranker = Table(8), torch.tensor([5, 6]), Drawing()
    tree = grow(table, {"root": root[:, None].tolist()}, plan, root, ranker)
    assert tree.candidates == "sampled"
    parents = set(tree.parents_BN[0, 1:].tolist())
    for b in range(2):
        paths = paths_of(tree.tokens_BN[b].tolist(), tree.parents_BN[b].tolist(), 0)
        for node, path in enumerate(paths):
            row = int(tree.q_row_N[node])
            assert (row >= 0) == (node in parents)
            if row >= 0:
                assert torch.equal(tree.q_BFW[b, row], ranker.distribution(table.logits(b, path)))
    assert tree.q_BFW.shape == (2, plan.fed, 8)


def test_children_that_could_not_be_drawn_are_unused_nodes():
    """The filters left two tokens of five; the third child, and what would hang on it, is none."""
    plan, table, root = Static(((0,), (1,), (2,), (2, 0), (0, 0))), Table(5), torch.tensor([5])
    tree = grow(table, {"root": [[5]]}, plan, root, Drawing(filtered=3))
    assert (tree.tokens_BN[0] == -1).tolist() == [False, False, False, True, False, False]
    assert torch.equal((tree.q_BFW > 0).sum(-1), torch.full((1, 3), 2))


class Depths:
    """A drafter whose logits depend on the depth alone (Medusa), once for all nodes or written out for each."""

    def __init__(self, shared: bool):
        self.shared = shared

    def step(self, state, frontier):
        generator = torch.Generator().manual_seed(frontier.depth)
        logits_B1W = torch.randn(2, 1, 8, generator=generator)
        return logits_B1W if self.shared else logits_B1W.expand(-1, frontier.tokens_BF.shape[1], -1)

    def to_target_ids(self, ids):
        return ids + 2


@pytest.mark.parametrize("ranker", [Plain(), Drawing(), Drawing(filtered=6)], ids=["plain", "drawn", "filtered"])
@pytest.mark.parametrize("plan", [Chain(3), Static(BUSHY), Dynamic(top_k=3, depth=3, total=9)], ids=str)
def test_logits_shared_by_all_nodes_are_those_of_each(plan, ranker):
    if isinstance(plan, Dynamic) and ranker.candidates == "sampled":
        with pytest.raises(AssertionError, match="would bias"):
            grow(Depths(True), None, plan, torch.tensor([5, 6]), ranker)
        return
    one, each = (grow(Depths(shared), None, plan, torch.tensor([5, 6]), ranker) for shared in (True, False))
    assert torch.equal(one.tokens_BN, each.tokens_BN)
    assert torch.equal(one.parents_BN, each.parents_BN)
    if ranker.candidates == "sampled":
        assert torch.equal(one.q_BFW, each.q_BFW)
        assert torch.equal(one.q_row_N, each.q_row_N)


# -- dynamic trees


def eagle2(table, row: int, *, top_k: int, depth: int, total: int):
    """The published rules in plain Python, for one row: {kept paths} and every candidate's value.

    Level 1: the k best tokens. At every later level the k best nodes of the level before get k children each, all
    recorded as candidates. The total - 1 candidates of the highest value are verified.
    """
    candidates: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    values: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        level = []
        for path in frontier:
            logp = table.logits(row, path).log_softmax(-1)
            for token in sorted(range(table.vocab), key=lambda t: -float(logp[t]))[:top_k]:
                child = (*path, token)
                values[child] = values[path] + float(logp[token])
                level.append(child)
        candidates.update({p: values[p] for p in level})
        frontier = sorted(level, key=lambda p: -values[p])[:top_k]
    kept = sorted(candidates, key=lambda p: -candidates[p])[: total - 1]
    return set(kept), candidates


PLANS = [
    Dynamic(top_k=1, depth=4, total=5),
    Dynamic(top_k=4, depth=1, total=3),
    Dynamic(top_k=2, depth=5, total=8),
    Dynamic(top_k=4, depth=4, total=12),
    Dynamic(top_k=3, depth=3, total=2),
    Dynamic(top_k=3, depth=3, total=200),
    Dynamic(top_k=10, depth=3, total=30),
    Dynamic(top_k=50, depth=3, total=25),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_dynamic_equals_brute_force(plan, seed):
    table = Table(16, seed=seed, offset=3)
    tree = grown(plan, table)
    for b in range(3):
        kept, candidates = eagle2(table, b, top_k=plan.top_k, depth=plan.depth, total=plan.total)
        got = paths_of(tree.tokens_BN[b].tolist(), tree.parents_BN[b].tolist(), table.offset)[1:]
        assert len(set(got)) == len(got)
        assert set(got) == kept
        assert len(got) == min(plan.total - 1, len(candidates))
        assert all(p[:-1] in {(), *kept} for p in kept), "closed under ancestors"
    assert tree.tokens_BN.shape[1] <= plan.n_nodes
    assert table.fed <= plan.fed
    if plan.top_k <= 16:
        assert tree.tokens_BN.shape[1] == plan.n_nodes
        assert table.fed == plan.fed


@pytest.mark.parametrize("seed", range(6))
def test_dynamic_with_ties(seed):
    """With ties the set is not unique; its values, its closure and its size are."""
    plan = Dynamic(top_k=3, depth=4, total=11)
    table = Table(6, seed=seed, levels=2)
    tree = grown(plan, table)
    for b in range(3):
        got = paths_of(tree.tokens_BN[b].tolist(), tree.parents_BN[b].tolist(), 0)[1:]
        assert len(set(got)) == len(got) == 10
        assert all(p[:-1] in {(), *got} for p in got)

        def value(path, b=b):
            return sum(float(table.logits(b, path[:d]).log_softmax(-1)[path[d]]) for d in range(len(path)))

        # Nothing left out at level 1 may beat what was kept there, and so on down the kept frontier.
        level1 = sorted((value((t,)) for t in range(6)), reverse=True)[:3]
        assert sorted((value(p) for p in got if len(p) == 1), reverse=True) == pytest.approx(
            level1[: len([p for p in got if len(p) == 1])], abs=1e-5
        )


class Certain(Table):
    """Confidence is exactly 1 along one path: a child's value equals its parent's."""

    def logits(self, row, path):
        out = torch.full((self.vocab,), -1e9, dtype=torch.float64)
        out[len(path) % self.vocab] = 1e9
        return out


@pytest.mark.parametrize("total", [2, 3, 4, 6, 9])
def test_confidence_of_exactly_one_keeps_the_tree_closed(total):
    tree = grown(Dynamic(top_k=2, depth=5, total=total), Certain(6))
    for b in range(3):
        got = paths_of(tree.tokens_BN[b].tolist(), tree.parents_BN[b].tolist(), 0)[1:]
        assert all(p[:-1] in {(), *got} for p in got)
        sure = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4)]
        assert set(sure[: total - 1]) <= set(got)


def test_dynamic_rows_are_independent():
    plan = Dynamic(top_k=3, depth=3, total=9)
    table = Table(16)
    together = grown(plan, table)
    assert len({tuple(r) for r in together.parents_BN.tolist()}) > 1, "rows must have grown different trees"
