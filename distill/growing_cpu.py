"""The books of growing trees on a CPU, kept by our kernels (``kernels/tree.cpp``).

Growing a tree for a small model must not cost more than the model, so what a plan needs round after round (memory,
addresses, the frontiers handed to the drafter) is made once per thread and used again.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distill import kernels
from distill.candidates import Best, job
from distill.tree import Dynamic, Static
from distill.types import Frontier

_KEPT = 32


class _Shelf(threading.local):
    """Books of this thread, the latest used last."""

    def __init__(self) -> None:
        self.books: OrderedDict[Any, Any] = OrderedDict()


_shelf = _Shelf()


def books(kind: Callable[..., Any], plan: Static | Dynamic, batch: int, extra: Any) -> Any:
    """The books of a plan for a batch; they serve one tree at a time."""
    key = (plan, batch, extra if isinstance(extra, int) else None)
    found = _shelf.books.get(key)
    if found is None:
        found = _shelf.books[key] = kind(plan, batch, extra)
        if len(_shelf.books) > _KEPT:
            _shelf.books.popitem(last=False)
    return found


class _Memory:
    """Memory for the candidates of every level, by the shape of the logits."""

    def __init__(self, depth: int):
        self._memory: list[Best | None] = [None] * depth

    def memory(self, depth: int, logits_BFW: Tensor, k: int) -> Best:
        """Where the ``k`` best of these logits may be written."""
        found = self._memory[depth]
        if found is None or found.shape != logits_BFW.shape:
            found = self._memory[depth] = Best(logits_BFW.shape, k)
        return found


class StaticBooks(_Memory):
    """Books of a static tree.

    Args:
        plan: the tree.
        batch: rows.
        levels: as ``growing.py`` lays them out.
    """

    def __init__(self, plan: Static, batch: int, levels: Sequence[Any]):
        super().__init__(plan.depth)
        self._library: Any = kernels.load()
        self._size, self._frontiers, self._jobs, at = (batch, plan.n_nodes), [], [], 1
        for depth, level in enumerate(levels):
            with torch.inference_mode(False):
                fed_BF = torch.zeros(level.above_BF.shape, dtype=torch.long)
            frontier = Frontier(
                tokens_BF=fed_BF, depth=depth + 1, parent_BF=level.above_BF, ancestors_BFM=level.seen_BFM
            )
            self._frontiers.append(frontier)
            fixed = (level.parent_C, level.rank_C, level.grown_F)
            sizes = (batch, plan.n_nodes, at, len(level.rank_C), len(level.grown_F))
            array, where = job(fed_BF.data_ptr(), *(x.data_ptr() for x in fixed), *sizes)
            self._jobs.append((where, int(level.parent_C.max()) + 1, (array, fixed)))
            at += len(level.rank_C)

    def tree(self, root_B: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for tokens_BN, and the root that ``take`` puts there."""
        return torch.empty(*self._size, dtype=torch.long), root_B.contiguous()

    def take(self, depth: int, ids_BFk: Tensor, values_BFk: Tensor | None, tree: tuple[Tensor, Tensor]) -> Frontier:
        """Write the nodes below those of ``depth`` into the tree, and return those that are grown on.

        Args:
            depth: of their parents.
            ids_BFk: target ids of the candidates, best first; F may be 1 for candidates all share.
            values_BFk: their scores, if those that are not finite are none.
            tree: tokens_BN and root_B.
        """
        ids_BFk, (tokens_BN, root_B) = ids_BFk.contiguous(), tree
        batch, shown, k = ids_BFk.shape
        job_at, parents, _ = self._jobs[depth]
        assert batch == self._size[0], "the candidates of another batch"
        assert shown == 1 or shown >= parents, "candidates of every node, or the same for all"
        values_BFk = None if values_BFk is None else values_BFk.float().contiguous()
        at = None if values_BFk is None else values_BFk.data_ptr()
        where = root_B.data_ptr(), tokens_BN.data_ptr(), job_at
        self._library.draftsmith_take(ids_BFk.data_ptr(), at, shown, k, *where)
        return self._frontiers[depth]


class DynamicBooks(_Memory):
    """Books of a dynamic tree: its candidates so far, and the nodes that are grown on.

    Args:
        plan: the tree.
        batch: rows.
        k: children per node.
    """

    def __init__(self, plan: Dynamic, batch: int, k: int):
        super().__init__(plan.depth)
        self._library: Any = kernels.load()
        most, per_level = plan.considered, plan.top_k
        with torch.inference_mode(False):
            # Values (half of it used), tokens and parents of the candidates, and which of them are grown on.
            self._books = torch.zeros(batch * (3 * most + per_level), dtype=torch.long)
        where = [self._books.data_ptr() + 8 * batch * most * i for i in range(4)]
        self._batch, self._k, self._frontiers, self._jobs = batch, k, [], []
        nodes, fed, recorded = 1, 1, 0
        for depth in range(plan.depth):
            keep = min(per_level, nodes * k) if depth + 1 < plan.depth else 0
            with torch.inference_mode(False):
                frontier = Frontier(
                    tokens_BF=torch.zeros(batch, keep, dtype=torch.long),
                    depth=depth + 1,
                    parent_BF=torch.zeros(batch, keep, dtype=torch.long),
                    ancestors_BFM=torch.zeros(batch, keep, fed + keep, dtype=torch.bool),
                )
            parts = (frontier.tokens_BF, frontier.parent_BF, frontier.ancestors_BFM)
            sizes = (batch, nodes, most, per_level, recorded, keep, fed)
            array, at = job(*where, *(x.data_ptr() for x in parts), *sizes)
            self._frontiers.append(frontier)
            self._jobs.append((at, ((batch, nodes, k), (batch, 1, k)), array))
            recorded, nodes, fed = recorded + nodes * k, keep, fed + keep
        self._kept = min(plan.total - 1, recorded)
        self._array, self._rerank = job(*where[:3], batch, most, recorded, self._kept)

    def record(self, depth: int, chance_BFk: Tensor, ids_BFk: Tensor, frontier: Frontier) -> Frontier:
        """Take in the children of ``frontier``, and return those that are grown on: the best, best first.

        Args:
            depth: of their parents.
            chance_BFk: log of the chance of each child, given its parent; F may be 1 for children all share.
            ids_BFk: their target ids.
            frontier: their parents.
        """
        at, shapes, _ = self._jobs[depth]
        chance_BFk, ids_BFk, seen_BFM = chance_BFk.float().contiguous(), ids_BFk.contiguous(), frontier.ancestors_BFM
        shape = ids_BFk.shape
        assert shape == chance_BFk.shape, "chances and ids of the same children"
        assert shape in shapes, "as many children as planned, of every node or the same for all"
        where = chance_BFk.data_ptr(), ids_BFk.data_ptr()
        self._library.draftsmith_level(*where, shape[1], self._k, seen_BFM.data_ptr(), at)
        return self._frontiers[depth]

    def tree(self, root_B: Tensor) -> tuple[Tensor, Tensor]:
        """The root and the best candidates: tokens_BN, parents_BN."""
        root_B = root_B.contiguous()
        tokens_BN = torch.empty(self._batch, self._kept + 1, dtype=torch.long)
        parents_BN = torch.empty(self._batch, self._kept + 1, dtype=torch.long)
        self._library.draftsmith_rerank(root_B.data_ptr(), tokens_BN.data_ptr(), parents_BN.data_ptr(), self._rerank)
        return tokens_BN, parents_BN
