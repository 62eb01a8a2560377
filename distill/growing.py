"""Growing trees: ``grow``, written once for every drafter and plan.

The rules are here in PyTorch, for every device; ``growing_cpu.py`` keeps the same books with our kernels, at a few
microseconds a level.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from distill import kernels
from distill.candidates import Best
from distill.growing_cpu import DynamicBooks, StaticBooks, books
from distill.tree import Dynamic, Plan, Static
from distill.types import DraftTree, Frontier


class _Steps(Protocol):
    """What ``grow`` needs of a drafter."""

    def step(self, state: Any, frontier: Frontier) -> Tensor: ...
    def to_target_ids(self, ids: Tensor) -> Tensor: ...


class Ranker(Protocol):
    """Ranks the draft's logits (see ``decode/coupling.py``)."""

    candidates: Literal["topk", "coupled", "sampled"]

    def best(
        self, logits_BFW: Tensor, depth: int, k: int, *, chances: bool = False, out: Best | None = None
    ) -> tuple[Tensor, Tensor]:
        """The k best children of nodes at ``depth`` (fewer in a smaller vocabulary), best first, [B, F, k] both.

        Args:
            logits_BFW: the draft's.
            depth: of the nodes.
            k: children.
            chances: return the log of each one's chance to be what the target says instead of its score.
            out: memory that may be used for the result.

        Returns:
            Their scores or chances, and their ids.
        """

    def distribution(self, logits_BFW: Tensor) -> Tensor | None:
        """What the children are drawn from, where they are drawn."""


def grow(drafter: _Steps, state: Any, plan: Plan, root_B: Tensor, ranker: Ranker) -> DraftTree:
    """Draft one tree under every root.

    Args:
        drafter: its ``step`` continues the nodes of one depth.
        state: the drafter's decoding state, extended up to the root.
        plan: the shape.
        root_B: last committed token of each row.
        ranker: picks the children; its ``candidates`` labels the tree.
    """
    quick = root_B.is_cpu and kernels.load() is not None
    if isinstance(plan, Dynamic):
        assert ranker.candidates != "sampled", "reranking by sampled scores would bias what was drawn"
        tokens_BN, parents_BN = (_dynamic_cpu if quick else _dynamic)(drafter, state, plan, root_B, ranker)
        drawn: list[Tensor] = []
    else:
        fixed = _fixed(plan, len(root_B), root_B.device)
        tokens_BN, drawn = (_static_cpu if quick else _static)(drafter, state, plan, root_B, ranker, fixed.levels)
        parents_BN = fixed.parents_BN
    return DraftTree(
        tokens_BN=tokens_BN,
        parents_BN=parents_BN,
        max_depth=plan.depth,
        candidates=ranker.candidates,
        q_BFW=torch.cat(drawn, 1) if drawn else None,
        q_row_N=fixed.q_row_N if drawn else None,
    )


def root_only(root_B: Tensor) -> DraftTree:
    """The empty proposal: plain autoregressive decoding."""
    return DraftTree(
        tokens_BN=root_B[:, None], parents_BN=torch.zeros_like(root_B)[:, None], max_depth=0, candidates="topk"
    )


@lru_cache(maxsize=64)
def _nothing_above(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        zeros_B1 = torch.zeros(batch, 1, dtype=torch.long, device=device)
        return zeros_B1, zeros_B1[:, :, None] == 0


def _first(root_B: Tensor) -> Frontier:
    parent_B1, seen_B11 = _nothing_above(len(root_B), root_B.device)
    return Frontier(tokens_BF=root_B.unsqueeze(1), depth=0, parent_BF=parent_B1, ancestors_BFM=seen_B11)


# ------------------------------------------------------------------------------------------------------ static trees
@dataclass(frozen=True)
class FixedLevel:
    """A level of a static tree on a device: the candidates it takes, and what the drafter is told about its nodes.

    Attributes:
        width: candidates that are needed of every node above.
        parent_C: the node above that each child hangs on.
        rank_C: its rank among that node's candidates.
        grown_F: children that are grown on.
        above_BF: what each of these hangs on.
        seen_BFM: which of the nodes fed so far it sees.
    """

    width: int
    parent_C: Tensor
    rank_C: Tensor
    grown_F: Tensor
    above_BF: Tensor
    seen_BFM: Tensor


@dataclass(frozen=True)
class _Fixed:
    """What is known of a static tree beforehand, on a device once: copies could not be recorded in a graph either."""

    levels: list[FixedLevel]
    parents_BN: Tensor
    q_row_N: Tensor


@lru_cache(maxsize=256)
def _fixed(plan: Static, batch: int, device: torch.device) -> _Fixed:
    levels, parents = [], [0]
    seen_FM = torch.ones(1, 1, dtype=torch.bool)
    with torch.inference_mode(False):
        for level in plan.levels:
            parent_C, grown_F = torch.tensor(level.parent_local), torch.tensor(level.grown, dtype=torch.long)
            above_F = parent_C[grown_F]
            seen_FM = torch.cat([seen_FM[above_F], torch.eye(len(grown_F), dtype=torch.bool)], 1)
            fixed = FixedLevel(
                width=max(level.rank) + 1,
                parent_C=parent_C.to(device),
                rank_C=torch.tensor(level.rank, device=device),
                grown_F=grown_F.to(device),
                above_BF=above_F.expand(batch, -1).to(device),
                seen_BFM=seen_FM.expand(batch, -1, -1).to(device),
            )
            levels.append(fixed)
            parents.extend(level.parent_global)
        return _Fixed(
            levels=levels,
            parents_BN=torch.tensor(parents, device=device).expand(batch, -1).contiguous(),
            q_row_N=torch.tensor(plan.fed_row, device=device),
        )


def _drawn(ranker: Ranker, logits_BFW: Tensor, nodes: int, drawn: list[Tensor]) -> bool:
    """Keep what the children are drawn from; False where they are not drawn."""
    q_BFW = ranker.distribution(logits_BFW)
    if q_BFW is None:
        return False
    drawn.append(q_BFW.expand(-1, nodes, -1))
    return True


def _static(drafter: _Steps, state: Any, plan: Static, root_B: Tensor, ranker: Ranker, levels: list[FixedLevel]):
    """Tokens_BN, and what the children of every node that was grown on were drawn from, if they were."""
    tokens, drawn = [root_B[:, None]], list[Tensor]()
    frontier = _first(root_B)
    for level in levels:
        logits_BFW, fed = drafter.step(state, frontier), frontier.tokens_BF.shape[1]
        # Filters may leave fewer tokens than children, and a lookup may find fewer: the others are no drafts.
        partial = _drawn(ranker, logits_BFW, fed, drawn) or not getattr(drafter, "soft", True)
        values_BFk, ranked_BFk = ranker.best(logits_BFW, frontier.depth, level.width)
        k = ranked_BFk.shape[-1]
        rank_C = level.rank_C.clamp(max=k - 1)
        ids_BC = drafter.to_target_ids(ranked_BFk.expand(-1, fed, -1)[:, level.parent_C, rank_C])
        if k < level.width:  # a vocabulary smaller than the rank
            ids_BC = ids_BC.masked_fill(level.rank_C >= k, -1)
        if partial:
            ids_BC = ids_BC.where(values_BFk.expand(-1, fed, -1)[:, level.parent_C, rank_C].isfinite(), -1)
        tokens.append(ids_BC)
        frontier = Frontier(
            tokens_BF=ids_BC[:, level.grown_F].clamp(min=0),
            depth=frontier.depth + 1,
            parent_BF=level.above_BF,
            ancestors_BFM=level.seen_BFM,
        )
    return torch.cat(tokens, 1), drawn


def _static_cpu(drafter: _Steps, state: Any, plan: Static, root_B: Tensor, ranker: Ranker, levels: list[FixedLevel]):
    mine: StaticBooks = books(StaticBooks, plan, len(root_B), levels)
    tree, drawn = mine.tree(root_B), list[Tensor]()
    frontier = _first(root_B)
    for depth, level in enumerate(levels):
        logits_BFW = drafter.step(state, frontier)
        partial = _drawn(ranker, logits_BFW, frontier.tokens_BF.shape[1], drawn) or not getattr(drafter, "soft", True)
        out = mine.memory(depth, logits_BFW, level.width)
        values_BFk, ranked_BFk = ranker.best(logits_BFW, depth, level.width, out=out)
        ids_BFk = drafter.to_target_ids(ranked_BFk)
        frontier = mine.take(depth, ids_BFk, values_BFk if partial else None, tree)
    return tree[0], drawn


# ----------------------------------------------------------------------------------------------------- dynamic trees
def _dynamic(drafter: _Steps, state: Any, plan: Dynamic, root_B: Tensor, ranker: Ranker) -> tuple[Tensor, Tensor]:
    """Tokens_BN, parents_BN."""
    batch, device = len(root_B), root_B.device
    frontier = _first(root_B)
    value_BF = torch.zeros(batch, 1, device=device)
    above_BF = torch.full((batch, 1), -1, dtype=torch.long, device=device)  # candidate index; -1 = root
    tokens, values, above, recorded = [], [], [], 0
    for depth in range(plan.depth):
        chance_BFk, ids_BFk = ranker.best(drafter.step(state, frontier), depth, plan.top_k, chances=True)
        (nodes, k), ids_BFk = (value_BF.shape[1], ids_BFk.shape[-1]), drafter.to_target_ids(ids_BFk)
        value_BC = (value_BF[:, :, None] + chance_BFk.to(value_BF.dtype)).flatten(1)
        ids_BC = ids_BFk.expand(-1, nodes, -1).flatten(1)
        tokens.append(ids_BC)
        values.append(value_BC)
        above.append(above_BF[:, :, None].expand(-1, -1, k).flatten(1))
        if depth + 1 < plan.depth:
            top = value_BC.topk(min(plan.top_k, nodes * k), dim=-1)
            frontier = _next(frontier, ids_BC.gather(1, top.indices), top.indices // k)
            value_BF, above_BF = top.values, recorded + top.indices
        recorded += nodes * k
    value_BM, token_BM, above_BM = torch.cat(values, 1), torch.cat(tokens, 1), torch.cat(above, 1)
    # A stable sort keeps a parent before a child of equal value (confidence exactly 1), so the set is closed.
    order = value_BM.sort(dim=-1, descending=True, stable=True).indices
    kept = order[:, : plan.total - 1].sort(-1).values
    parent_above = above_BM.gather(1, kept)
    parents = torch.where(parent_above < 0, 0, torch.searchsorted(kept, parent_above.clamp(min=0)) + 1)
    tokens_BN = torch.cat([root_B[:, None], token_BM.gather(1, kept)], 1)
    return tokens_BN, torch.cat([torch.zeros_like(root_B)[:, None], parents], 1)


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


def _dynamic_cpu(drafter: _Steps, state: Any, plan: Dynamic, root_B: Tensor, ranker: Ranker) -> tuple[Tensor, Tensor]:
    frontier = _first(root_B)
    mine: DynamicBooks | None = None
    for depth in range(plan.depth):
        logits_BFW = drafter.step(state, frontier)
        if mine is None:
            mine = books(DynamicBooks, plan, len(root_B), min(plan.top_k, logits_BFW.shape[-1]))
        out = mine.memory(depth, logits_BFW, plan.top_k)
        chance_BFk, ids_BFk = ranker.best(logits_BFW, depth, plan.top_k, chances=True, out=out)
        frontier = mine.record(depth, chance_BFk, drafter.to_target_ids(ids_BFk), frontier)
    assert mine is not None
    return mine.tree(root_B)
