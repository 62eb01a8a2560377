"""The draft tree: its geometry, the plans that shape it, and ``grow``, written once for every drafter.

A chain is a tree with one child per node; plain autoregressive decoding proposes the root alone.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from distill.calibration import Calibration, best_paths, needed
from distill.config import opt
from distill.errors import UserError, did_you_mean
from distill.types import DraftTree, Frontier


def geometry(parents_BN: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """Return (ancestors_BNN bool with the diagonal set, depths_BN) by following parents ``max_depth`` times."""
    batch, n = parents_BN.shape
    if max_depth == 0:
        zeros = torch.zeros_like(parents_BN)
        return zeros.eq(0)[:, :, None].expand(batch, n, n), zeros
    current = torch.arange(n, device=parents_BN.device).expand(batch, n)
    ancestors = torch.zeros(batch, n, n, dtype=torch.bool, device=parents_BN.device)
    for _ in range(max_depth + 1):
        ancestors.scatter_(2, current[:, :, None], True)
        current = parents_BN.gather(1, current)
    return ancestors, ancestors.sum(-1) - 1


@dataclass(kw_only=True)
class PlanConfig:
    """Shape of the proposal."""

    name: Literal["chain", "static", "calibrated", "dynamic"] = opt(
        "dynamic", "chain, static, calibrated (static, from measured hit rates) or dynamic (EAGLE-2)"
    )
    length: int = opt(3, "chain: drafted tokens per round")
    depth: int = opt(4, "dynamic: deepest level drafted; calibrated: at most, and no deeper than was measured")
    top_k: int = opt(4, "dynamic: children kept per node and nodes kept per level; calibrated: most children of a node")
    total: int = opt(12, "dynamic, calibrated: nodes verified per round, the root included")
    paths: list[list[int]] = opt([], "static: ranks from the root, e.g. [[0],[1],[0,0]]; prefixes must be there")


MOST_FED = 4096
"""Nodes a drafter may be asked to continue in one round; more is a slip, and would only exhaust the memory."""


def _check_size(fed: int) -> None:
    if fed > MOST_FED:
        raise UserError(f"the tree must have the drafter continue at most {MOST_FED} nodes a round, got {fed}")


@dataclass(frozen=True)
class Static:
    """A fixed tree: every node is the path of child ranks that leads to it (Medusa's "choices").

    Raises:
        UserError: a node without its parent, a duplicate, or no node at all.
    """

    paths: tuple[tuple[int, ...], ...]
    name: str = "static"
    levels: tuple["_Level", ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        nodes = sorted((tuple(p) for p in self.paths), key=lambda p: (len(p), p))
        known = {(): 0, **{p: i + 1 for i, p in enumerate(nodes)}}
        if not nodes or len(known) != len(nodes) + 1 or () in nodes:
            raise UserError(f"tree.paths must be distinct non-empty paths of child ranks, got {list(self.paths)}")
        for path in nodes:
            if min(path) < 0:
                raise UserError(f"tree.paths must hold ranks >= 0 (0 is the best child), got {list(path)}")
            if path[:-1] not in known:
                raise UserError(f"tree.paths must hold every node's parent, got {list(path)} without {list(path[:-1])}")
        object.__setattr__(self, "levels", tuple(_levels(nodes, known)))
        _check_size(self.fed)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return len(self.levels)

    @property
    def n_nodes(self) -> int:
        """Nodes verified per round, the root included."""
        return len(self.paths) + 1

    @property
    def fed(self) -> int:
        """Nodes the drafter processes per round."""
        return 1 + sum(len(level.grown) for level in self.levels)

    @cached_property
    def prefixes(self) -> bool:
        """Whether every node's children have the ranks 0, 1, 2, ... without gaps."""
        known = {tuple(path) for path in self.paths}
        return all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in known for path in known)

    @cached_property
    def children(self) -> tuple[int, ...]:
        """Children of the node that has most, for every depth of the parent."""
        counted = Counter(tuple(path[:-1]) for path in self.paths)
        return tuple(max(n for path, n in counted.items() if len(path) == depth) for depth in range(self.depth))

    @cached_property
    def fed_row(self) -> tuple[int, ...]:
        """For every node the place in the order of feeding, -1 for leaves."""
        rows, fed = [0], 1
        for level in self.levels:
            place = {node: fed + i for i, node in enumerate(level.grown)}
            rows += [place.get(i, -1) for i in range(len(level.rank))]
            fed += len(level.grown)
        return tuple(rows)

    def __str__(self) -> str:
        nodes = f"(nodes={self.n_nodes}, depth={self.depth})"
        return f"chain({self.depth})" if self.name == "chain" else self.name + nodes


@dataclass(frozen=True)
class _Level:
    """Constants for the nodes of one depth: which frontier node each hangs on, its rank, who is grown on."""

    parent_local: tuple[int, ...]
    parent_global: tuple[int, ...]
    rank: tuple[int, ...]
    grown: tuple[int, ...]


def _levels(nodes: list[tuple[int, ...]], known: dict[tuple[int, ...], int]):
    inner = {path[:-1] for path in nodes}
    frontier: list[tuple[int, ...]] = [()]
    for depth in range(1, len(nodes[-1]) + 1):
        level = [p for p in nodes if len(p) == depth]
        local = {path: i for i, path in enumerate(frontier)}
        grown = [i for i, p in enumerate(level) if p in inner]
        yield _Level(
            parent_local=tuple(local[p[:-1]] for p in level),
            parent_global=tuple(known[p[:-1]] for p in level),
            rank=tuple(p[-1] for p in level),
            grown=tuple(grown),
        )
        frontier = [level[i] for i in grown]


def Chain(length: int) -> Static:  # noqa: N802 - a plan, named like the other two
    """A chain of ``length`` drafted tokens."""
    if length < 1:
        raise UserError(f"tree.length must be >= 1, got {length}")
    return Static(tuple((0,) * d for d in range(1, length + 1)), name="chain")


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's tree (arXiv:2406.16858): expand the best nodes, then keep the best ``total - 1`` of all.

    A node's value is the product of the draft's confidences on its path. Level 1 has ``top_k`` nodes; at each
    later level the ``top_k`` best nodes get ``top_k`` children each. (``depth`` here is the depth of the
    tree; the reference code's ``depth`` D gives D + 1 levels.)
    """

    top_k: int
    depth: int
    total: int
    name: str = "dynamic"

    def __post_init__(self) -> None:
        for key, least in (("top_k", 1), ("depth", 1), ("total", 2)):
            if getattr(self, key) < least:
                raise UserError(f"tree.{key} must be >= {least}, got {getattr(self, key)}")
        _check_size(max(self.fed, self.top_k))

    @property
    def n_nodes(self) -> int:
        """Nodes verified per round, the root included."""
        return min(self.total, 1 + self.top_k + (self.depth - 1) * self.top_k**2)

    @property
    def fed(self) -> int:
        """Nodes the drafter processes per round."""
        return 1 + (self.depth - 1) * self.top_k

    def __str__(self) -> str:
        return f"dynamic(top_k={self.top_k}, depth={self.depth}, total={self.total})"


Plan = Static | Dynamic


def make_plan(config: PlanConfig, *, calibration: Calibration | None = None, greedy: bool = True) -> Plan:
    """Build the plan a config names.

    Args:
        config: name and sizes.
        calibration: the drafter's, for ``calibrated``.
        greedy: whether the target decodes greedily: other nodes pay then than when it samples.

    Raises:
        UserError: unknown name (choices listed), impossible sizes, or no calibration where one is needed.
    """
    names = ("chain", "static", "calibrated", "dynamic")
    if config.name not in names:
        raise UserError(
            f"tree must be one of {', '.join(names)}, got {config.name!r}.{did_you_mean(config.name, names)}"
        )
    if config.name == "chain":
        return Chain(config.length)
    if config.name == "static":
        return Static(tuple(tuple(p) for p in config.paths))
    dynamic = Dynamic(top_k=config.top_k, depth=config.depth, total=config.total)  # refuses impossible sizes for both
    if config.name == "dynamic":
        return dynamic
    rates = needed(calibration).choices(greedy=greedy).rates()
    paths = best_paths(rates, nodes=config.total - 1, depth=config.depth, children=config.top_k)
    return Static(paths, name="calibrated")


class _Steps(Protocol):
    """What ``grow`` needs of a drafter."""

    def step(self, state: Any, frontier: Frontier) -> Tensor: ...
    def to_target_ids(self, ids: Tensor) -> Tensor: ...


class Ranker(Protocol):
    """Turns draft logits into the scores candidates are ranked by (see ``decode/coupling.py``)."""

    candidates: Literal["topk", "coupled", "sampled"]

    def __call__(self, logits_BFW: Tensor, depth: int) -> Tensor:
        """Return scores_BFW for the children of nodes at ``depth``."""

    def log_chance(self, scores_BFW: Tensor, top_BFk: Tensor, depth: int) -> Tensor:
        """Log of the chance that each child is what the target says, from its score ``top_BFk`` among all."""

    def distribution(self, logits_BFW: Tensor) -> Tensor | None:
        """What the children are drawn from, where they are drawn."""


def grow(drafter: _Steps, state: Any, plan: Plan, root_B: Tensor, ranker: Ranker) -> DraftTree:
    """Draft one tree under every root.

    Args:
        drafter: its ``step`` continues the nodes of one depth.
        state: the drafter's decoding state, extended up to the root.
        plan: the shape.
        root_B: last committed token of each row.
        ranker: maps logits at a depth to scores; its ``candidates`` labels the tree.
    """
    if isinstance(plan, Dynamic):
        assert ranker.candidates != "sampled", "reranking by sampled scores would bias what was drawn"
        return _grow_dynamic(drafter, state, plan, root_B, ranker)
    return _grow_static(drafter, state, plan, root_B, ranker)


def root_only(root_B: Tensor) -> DraftTree:
    """The empty proposal: plain autoregressive decoding."""
    return DraftTree(
        tokens_BN=root_B[:, None], parents_BN=torch.zeros_like(root_B)[:, None], max_depth=0, candidates="topk"
    )


def _first(root_B: Tensor) -> Frontier:
    zeros = torch.zeros_like(root_B)[:, None]
    return Frontier(
        tokens_BF=root_B[:, None],
        depth=0,
        parent_BF=zeros,
        ancestors_BFM=torch.ones(*zeros.shape, 1, dtype=torch.bool, device=root_B.device),
    )


def _next(before: Frontier, tokens_BF: Tensor, parent_BF: Tensor) -> Frontier:
    """The frontier one level down: each node sees what its parent saw, and itself."""
    inherited = before.ancestors_BFM.gather(1, parent_BF[:, :, None].expand(-1, -1, before.ancestors_BFM.shape[2]))
    itself = torch.eye(tokens_BF.shape[1], dtype=torch.bool, device=tokens_BF.device).expand(len(tokens_BF), -1, -1)
    return Frontier(
        tokens_BF=tokens_BF,
        depth=before.depth + 1,
        parent_BF=parent_BF,
        ancestors_BFM=torch.cat([inherited, itself], dim=2),
    )


@lru_cache(maxsize=1024)
def _constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """A tensor of a plan's constants, on the device once: a copy per round could not be recorded in a graph."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)


def _grow_static(drafter, state, plan: Static, root_B: Tensor, ranker: Ranker) -> DraftTree:
    batch, device = len(root_B), root_B.device
    tokens, parents, drawn = [root_B[:, None]], [0], []
    frontier = _first(root_B)
    for level in plan.levels:
        logits_BFW = drafter.step(state, frontier)
        scores_BFW = ranker(logits_BFW, frontier.depth)
        q_BFW = ranker.distribution(logits_BFW)
        if q_BFW is not None:
            drawn.append(q_BFW.expand(-1, frontier.tokens_BF.shape[1], -1))
        width = min(max(level.rank) + 1, scores_BFW.shape[-1])
        top = scores_BFW.topk(width, dim=-1)
        ranked_BFR = top.indices.expand(-1, frontier.tokens_BF.shape[1], -1)
        parent = _constant(level.parent_local, device)
        rank = _constant(level.rank, device)
        ids_BC = drafter.to_target_ids(ranked_BFR[:, parent, rank.clamp(max=width - 1)])
        ids_BC = ids_BC.masked_fill(rank >= width, -1)  # a vocabulary smaller than the rank: unused node
        # Filters may leave fewer tokens than children, and a lookup may find fewer: the others are no drafts.
        if q_BFW is not None or not getattr(drafter, "soft", True):
            drawn_BFR = top.values.isfinite().expand(-1, frontier.tokens_BF.shape[1], -1)
            ids_BC = ids_BC.where(drawn_BFR[:, parent, rank.clamp(max=width - 1)], -1)
        tokens.append(ids_BC)
        parents.extend(level.parent_global)
        if level.grown:
            grown = _constant(level.grown, device)
            frontier = _next(frontier, ids_BC[:, grown].clamp(min=0), parent[grown].expand(batch, -1))
    return DraftTree(
        tokens_BN=torch.cat(tokens, 1),
        parents_BN=_constant(tuple(parents), device).expand(batch, -1),
        max_depth=plan.depth,
        candidates=ranker.candidates,
        q_BFW=torch.cat(drawn, 1) if drawn else None,
        q_row_N=_constant(plan.fed_row, device) if drawn else None,
    )


def _grow_dynamic(drafter, state, plan: Dynamic, root_B: Tensor, ranker: Ranker) -> DraftTree:
    batch = len(root_B)
    frontier = _first(root_B)
    value_BF = torch.zeros(batch, 1, device=root_B.device)
    above_BF = torch.full((batch, 1), -1, dtype=torch.long, device=root_B.device)  # candidate index; -1 = root
    tokens, values, above, recorded = [], [], [], 0
    for depth in range(plan.depth):
        scores = ranker(drafter.step(state, frontier), depth)
        k = min(plan.top_k, scores.shape[-1])
        top = scores.topk(k, dim=-1)
        chance_BFk = ranker.log_chance(scores, top.values, depth).to(value_BF.dtype)
        value_BC = (value_BF[:, :, None] + chance_BFk).flatten(1)
        ids_BFk = drafter.to_target_ids(top.indices)
        ids_BC = ids_BFk.expand(-1, value_BF.shape[1], -1).flatten(1)
        tokens.append(ids_BC)
        values.append(value_BC)
        above.append(above_BF[:, :, None].expand(-1, -1, k).flatten(1))
        if depth + 1 < plan.depth:
            best = value_BC.topk(min(plan.top_k, value_BC.shape[1]), dim=-1)
            frontier = _next(frontier, ids_BC.gather(1, best.indices), best.indices // k)
            value_BF, above_BF = best.values, recorded + best.indices
        recorded += ids_BC.shape[1]
    value_BM, token_BM, above_BM = torch.cat(values, 1), torch.cat(tokens, 1), torch.cat(above, 1)
    # A stable sort keeps a parent before a child of equal value (confidence exactly 1), so the set is closed.
    order = value_BM.sort(dim=-1, descending=True, stable=True).indices
    kept = order[:, : plan.total - 1].sort(-1).values
    parent_above = above_BM.gather(1, kept)
    parents = torch.where(parent_above < 0, 0, torch.searchsorted(kept, parent_above.clamp(min=0)) + 1)
    zeros = torch.zeros_like(root_B)[:, None]
    return DraftTree(
        tokens_BN=torch.cat([root_B[:, None], token_BM.gather(1, kept)], 1),
        parents_BN=torch.cat([zeros, parents], 1),
        max_depth=plan.depth,
        candidates=ranker.candidates,
    )
