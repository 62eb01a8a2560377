"""How often a drafter's first, second, third ... choice is the target's, per depth: what trees can be shaped by.

Measured along the target's own text (``decode/calibrate.py``), so every figure of depth d is conditional on all earlier
tokens being right. Kept for greedy decoding and for sampled decoding with coupled candidates, whose scores carry the
target's noise.
"""

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distill.errors import UserError

SCHEMA_VERSION = 1
MOST_SCALE = 1000


@dataclass(frozen=True, kw_only=True)
class Choices:
    """One way of decoding.

    Attributes:
        hits_DR: how often the drafter's choice of rank r (0 is its best) was the target's token, per depth.
        count_D: positions looked at, per depth.
        scale_D: factor on the scores under which their softmax is most likely to have produced the target's tokens;
            below 1 the drafter is too sure of itself.
    """

    hits_DR: list[list[int]]
    count_D: list[int]
    scale_D: list[float]

    def rates(self) -> list[list[float]]:
        """P(rank r is the target's token | all before were right), per depth."""
        return [[hit / max(count, 1) for hit in hits] for hits, count in zip(self.hits_DR, self.count_D, strict=True)]

    def scale(self, depth: int) -> float:
        """The factor for children of nodes at ``depth``; beyond what was measured the last one."""
        return self.scale_D[min(depth, len(self.scale_D) - 1)]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured of one drafter with one target.

    Attributes:
        greedy: temperature 0.
        coupled: temperature 1, candidates ranked with the target's noise.
        weights_sha256: the drafter's weights; "" before they are written.
        schema_version: of this record.
    """

    greedy: Choices
    coupled: Choices
    weights_sha256: str = ""
    schema_version: int = field(default=SCHEMA_VERSION)

    def choices(self, *, greedy: bool) -> Choices:
        """The one that fits a way of decoding."""
        return self.greedy if greedy else self.coupled


def best_paths(
    rates_DR: Sequence[Sequence[float]], *, nodes: int, depth: int | None = None, children: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The static tree of ``nodes`` drafted nodes with the longest expected path (Medusa, arXiv:2401.10774, 3.2.2).

    A node is worth the product of the rates on its path; adding the best neighbour of what is there (the next sibling
    or the first child) until the tree is full is optimal, because a node is never worth more than its parent or its
    elder sibling.

    Args:
        rates_DR: hit rates per depth and rank.
        nodes: drafted nodes, the root not counted.
        depth: deepest level; None: as measured.
        children: most children of a node; None: as measured.
    """
    deepest = min(depth or len(rates_DR), len(rates_DR))
    waiting: list[tuple[float, tuple[int, ...]]] = [(-rates_DR[0][0], (0,))]
    chosen: list[tuple[int, ...]] = []
    while waiting and len(chosen) < nodes:
        minus, path = heapq.heappop(waiting)
        chosen.append(path)
        above, level, rank = path[:-1], len(path) - 1, path[-1]
        most = min(children or len(rates_DR[level]), len(rates_DR[level]))
        if rank + 1 < most:
            worth = math.prod(rates_DR[d][r] for d, r in enumerate((*above, rank + 1)))
            # A lower rank that happened to be right more often must not come before its elder sibling.
            heapq.heappush(waiting, (max(minus, -worth), (*above, rank + 1)))
        if level + 1 < deepest:
            heapq.heappush(waiting, (minus * rates_DR[level + 1][0], (*path, 0)))
    return tuple(sorted(chosen, key=lambda p: (len(p), p)))


def expected_length(paths: Sequence[Sequence[int]], rates_DR: Sequence[Sequence[float]]) -> float:
    """Tokens per pass that a static tree of these nodes would give: one, plus the products of the rates."""
    return 1 + sum(math.prod(rates_DR[level][rank] for level, rank in enumerate(path)) for path in paths)


def read(record: Mapping[str, Any], where: str) -> Calibration:
    """Build a calibration from JSON.

    Raises:
        UserError: it is damaged, or of another version.
    """
    version = record.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(f"{where}: schema_version must be {SCHEMA_VERSION}, got {version!r}; calibrate again")
    try:
        greedy, coupled = (Choices(**record[name]) for name in ("greedy", "coupled"))
        _check(greedy)
        _check(coupled)
        return Calibration(greedy=greedy, coupled=coupled, weights_sha256=str(record["weights_sha256"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where} must be a calibration, got a damaged one ({error}); calibrate again") from error


def _check(choices: Choices) -> None:
    """Raise ValueError or TypeError where a table is not what ``task=calibrate`` writes."""
    hits, counts, scales = choices.hits_DR, choices.count_D, choices.scale_D
    if not 0 < len(hits) == len(counts) == len(scales):
        raise ValueError("tables of different depths")
    if len({len(row) for row in hits}) != 1 or not hits[0]:
        raise ValueError("depths of different ranks")
    if not all(isinstance(count, int) and count >= 0 for count in itertools.chain(counts, *hits)):
        raise ValueError("counts that are none")
    if any(sum(row) > count for row, count in zip(hits, counts, strict=True)):
        raise ValueError("more hits than positions")
    if any(later > sooner for sooner, later in itertools.pairwise(counts)) or not counts[-1]:
        raise ValueError("depths without a position")
    if not all(1 / MOST_SCALE <= scale <= MOST_SCALE for scale in scales):
        raise ValueError(f"scales that are not within 1/{MOST_SCALE} and {MOST_SCALE}")


def needed(calibration: Calibration | None) -> Calibration:
    """The calibration, for a plan that cannot do without.

    Raises:
        UserError: there is none.
    """
    if calibration is None:
        raise UserError(
            "tree=calibrated must have a drafter whose choices were measured, got one without calibration.json; run "
            "python -m serve_eval task=calibrate checkpoint=..."
        )
    return calibration
