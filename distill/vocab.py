"""The draft vocabulary: the target's most frequent tokens, and the maps between the two.

``d2t`` holds offsets (target id = draft id + d2t[draft id]), as every engine reads it; ``t2d`` marks the kept
target ids. Both travel in the checkpoint as buffers.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distill.errors import UserError


class DraftVocab(nn.Module):
    """Maps between a pruned draft vocabulary of W tokens and the target's V.

    Args:
        target_ids: the kept target ids, ascending and distinct.
        target_size: V.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, target_ids: Tensor, target_size: int):
        super().__init__()
        target_ids = target_ids.long()
        assert bool((target_ids[1:] > target_ids[:-1]).all()), "target ids must be ascending and distinct"
        self.register_buffer("d2t", target_ids - torch.arange(len(target_ids), device=target_ids.device))
        kept = torch.zeros(target_size, dtype=torch.bool, device=target_ids.device)
        self.register_buffer("t2d", kept.index_fill(0, target_ids, True))

    @property
    def size(self) -> int:
        """W."""
        return len(self.d2t)

    @property
    def target_ids(self) -> Tensor:
        """Target id of every draft id, [W]."""
        return self.d2t + torch.arange(self.size, device=self.d2t.device)

    def to_target(self, ids: Tensor) -> Tensor:
        """Draft ids -> target ids."""
        return ids + self.d2t[ids]

    def from_target(self, ids: Tensor) -> Tensor:
        """Target ids -> draft ids, -1 for ids outside the draft vocabulary."""
        kept = self.target_ids
        place = torch.searchsorted(kept, ids).clamp(max=self.size - 1)
        return torch.where(kept[place] == ids, place, -1)


@dataclass(frozen=True, kw_only=True)
class VocabReport:
    """How much of the supervised text a draft vocabulary covers.

    Attributes:
        size: W.
        distinct: distinct tokens that occur in the supervised text.
        coverage: share of supervised tokens that are in the draft vocabulary.
        padded: kept ids that never occur (there were fewer distinct tokens than W).
    """

    size: int
    distinct: int
    coverage: float
    padded: int


def choose_vocab(counts_V: Tensor, size: int, *, always: Iterable[int] = ()) -> tuple[DraftVocab, VocabReport]:
    """Keep the ``size`` most frequent tokens, ``always`` among them; unused ids fill up if there are too few.

    Args:
        counts_V: occurrences among supervised tokens.
        size: W, at most V.
        always: ids that must be kept (end of text, turn end, ...).

    Raises:
        UserError: size out of range.
    """
    vocab = len(counts_V)
    forced = sorted({int(i) for i in always})
    assert all(0 <= i < vocab for i in forced), "always must hold ids of the target's vocabulary"
    if not max(1, len(forced)) <= size <= vocab:
        raise UserError(
            f"drafter.draft_vocab_size must be between {max(1, len(forced))} and the target's {vocab}, got {size}"
        )
    priority = counts_V.double()
    if forced:
        priority = priority.index_fill(0, torch.tensor(forced, device=counts_V.device), float("inf"))
    # Stable, so ties go to the smaller id on every machine.
    kept = priority.sort(descending=True, stable=True).indices[:size].sort().values
    total = int(counts_V.sum())
    report = VocabReport(
        size=size,
        distinct=int((counts_V > 0).sum()),
        coverage=float(counts_V[kept].sum()) / total if total else 0.0,
        padded=int((counts_V[kept] == 0).sum()),
    )
    return DraftVocab(kept, vocab), report
