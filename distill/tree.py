"""The draft tree: its geometry, and the plans that shape it (``growing.py`` grows them).

A chain is a tree with one child per node; plain autoregressive decoding proposes the root alone.
"""

from collections import Counter
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from distill import kernels
from distill.calibration import Calibration, best_paths, needed
from distill.config import opt
from distill.errors import UserError, did_you_mean


def geometry(parents_BN: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """Return (ancestors_BNN bool with the diagonal set, depths_BN) of trees whose parents precede their children."""
    batch, n = parents_BN.shape
    if max_depth == 0:
        zeros = torch.zeros_like(parents_BN)
        return zeros.eq(0)[:, :, None].expand(batch, n, n), zeros
    library = kernels.load() if parents_BN.is_cpu else None
    if library is not None:
        parents_BN = parents_BN.contiguous()
        ancestors, depths_BN = torch.empty(batch, n, n, dtype=torch.bool), torch.empty(batch, n, dtype=torch.long)
        library.draftsmith_geometry(parents_BN.data_ptr(), ancestors.data_ptr(), depths_BN.data_ptr(), batch, n)
        return ancestors, depths_BN
    current = torch.arange(n, device=parents_BN.device).expand(batch, n)
    ancestors = torch.zeros(batch, n, n, dtype=torch.bool, device=parents_BN.device)
    for _ in range(max_depth + 1):
        ancestors.scatter_(2, current[:, :, None], True)
        current = parents_BN.gather(1, current)
    return ancestors, ancestors.sum(-1) - 1


_READS = {
    "chain": {"length"},
    "static": {"paths"},
    "calibrated": {"depth", "top_k", "total"},
    "dynamic": {"depth", "top_k", "total"},
}
"""What the plans' names go with."""


def _usual(option: Field[Any]) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()


@dataclass(kw_only=True)
class PlanConfig:
    """Shape of the proposal."""

    name: Literal["chain", "static", "calibrated", "dynamic"] = opt(
        "dynamic", "chain, static, calibrated (static, from measured hit rates) or dynamic (EAGLE-2)"
    )
    length: int = opt(3, "chain: drafted tokens per round")
    depth: int | None = opt(
        None,
        "dynamic: deepest level drafted; calibrated: at most, and no deeper than was measured; null: 4, or what the "
        "drafter reaches",
    )
    top_k: int = opt(4, "dynamic: children kept per node and nodes kept per level; calibrated: most children of a node")
    total: int = opt(12, "dynamic, calibrated: nodes verified per round, the root included")
    paths: list[list[int]] = opt([], "static: ranks from the root, e.g. [[0],[1],[0,0]]; prefixes must be there")

    def __post_init__(self) -> None:
        """Refuse sizes that this kind of plan does not read."""
        for option in fields(PlanConfig) if self.name in _READS else ():  # an unknown name is told elsewhere
            value = getattr(self, option.name)
            if option.name not in {"name", *_READS[self.name]} and value != _usual(option):
                raise UserError(
                    f"tree.{option.name} must be left alone with tree={self.name}, which has no such size, got {value}"
                )


MOST_FED = 4096
"""Nodes a drafter may be asked to continue in one round; more is a slip, and would only exhaust the memory."""


LONGEST = 512
"""Of a chain: its nodes' paths are as long as it is deep."""
USUAL_DEPTH = 4


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
    def lowest(self) -> int:
        """Lowest rank of a child of the root."""
        return min(path[0] for path in self.paths)

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
    if not 1 <= length <= LONGEST:
        raise UserError(f"tree.length must be >= 1 and at most {LONGEST}, got {length}")
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
        if self.total > MOST_FED:
            raise UserError(f"tree.total must be at most {MOST_FED}, got {self.total}")

    @property
    def considered(self) -> int:
        """Candidates drafted per round."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def n_nodes(self) -> int:
        """Nodes verified per round, the root included."""
        return min(self.total, 1 + self.considered)

    @property
    def fed(self) -> int:
        """Nodes the drafter processes per round."""
        return 1 + (self.depth - 1) * self.top_k

    def __str__(self) -> str:
        return f"dynamic(top_k={self.top_k}, depth={self.depth}, total={self.total})"


Plan = Static | Dynamic


def make_plan(
    config: PlanConfig, *, calibration: Calibration | None = None, greedy: bool = True, deepest: int | None = None
) -> Plan:
    """Build the plan a config names.

    Args:
        config: name and sizes.
        calibration: the drafter's, for ``calibrated``.
        greedy: whether the target decodes greedily: other nodes pay then than when it samples.
        deepest: level the drafter can reach, for a depth that is left open; None: any.

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
    depth = config.depth if config.depth is not None else min(USUAL_DEPTH, deepest or USUAL_DEPTH)
    dynamic = Dynamic(top_k=config.top_k, depth=depth, total=config.total)  # refuses impossible sizes for both
    if config.name == "dynamic":
        return dynamic
    rates = needed(calibration).choices(greedy=greedy).rates()
    paths = best_paths(rates, nodes=config.total - 1, depth=depth, children=config.top_k)
    return Static(paths, name="calibrated")
