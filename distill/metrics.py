"""What is measured, with formulas. Acceptance length always includes the target's own token (the "+1").

* tau = new tokens per target pass = sum over passes of emitted tokens / passes; autoregressive = 1.
* S_d = share of passes whose first d drafted tokens were all accepted; tau = 1 + sum_d S_d.
* conditional acceptance at depth d = S_d / S_{d-1}, over passes that offered depth d.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Step(Protocol):
    """One target pass (``decode.StepRecord``)."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Ids emitted."""

    @property
    def accepted(self) -> int:
        """Drafted ones among them."""

    @property
    def offered(self) -> int:
        """How deep the proposal could have reached."""


def tau(steps: Sequence[Step]) -> float:
    """Acceptance length pooled over passes; NaN without any pass."""
    return sum(len(s.tokens) for s in steps) / len(steps) if steps else float("nan")


def accept_by_depth(steps: Sequence[Step]) -> list[float]:
    """Conditional acceptance per depth: P(depth d accepted | d-1 accepted and d offered)."""
    deepest = max((s.offered for s in steps), default=0)
    rates = []
    for depth in range(1, deepest + 1):
        tried = sum(s.offered >= depth and s.accepted >= depth - 1 for s in steps)
        kept = sum(s.accepted >= depth for s in steps)
        rates.append(kept / tried if tried else float("nan"))
    return rates


def simulated_tau(hits_KBL: Tensor, valid_KBL: Tensor) -> Tensor:
    """Acceptance length a greedy chain of K drafts would reach: 1 + sum_k P(steps 0..k all hit).

    Args:
        hits_KBL: step k's argmax equals the target's argmax, at draft start i.
        valid_KBL: the step counts there.

    The mean runs over every start where step 0 counts; a later step that does not count (the text ends
    before it) is a miss, as it is at decoding time.
    """
    accepted, starts = simulated_sums(hits_KBL, valid_KBL)
    return 1 + accepted / starts.clamp(min=1)


def runs_of_hits(hits_1BL: Tensor, valid_1BL: Tensor, doc_BL: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """(hits_KBL, valid_KBL) of ``depth`` steps, for a drafter that trains on one step and repeats it when it drafts.

    A chain from start i stands at position i + k when k drafts were right, so step k hits where position i + k does.

    Args:
        hits_1BL: the one step's hits.
        valid_1BL: where it counts.
        doc_BL: a chain does not reach into the next document.
        depth: steps of the chain.
    """
    length = doc_BL.shape[1]
    hits_KBL, valid_KBL = (x.new_zeros(depth, *doc_BL.shape) for x in (hits_1BL, valid_1BL))
    for k in range(min(depth, length)):
        same_doc = doc_BL[:, k:] == doc_BL[:, : length - k]
        hits_KBL[k, :, : length - k] = hits_1BL[0, :, k:]
        valid_KBL[k, :, : length - k] = valid_1BL[0, :, k:] & same_doc
    return hits_KBL, valid_KBL


def simulated_sums(hits_KBL: Tensor, valid_KBL: Tensor) -> tuple[Tensor, Tensor]:
    """(accepted drafts, starts), to be added up over batches; simulated tau = 1 + accepted / starts."""
    prefix_KBL = (hits_KBL & valid_KBL).to(torch.uint8).cummin(0).values
    return prefix_KBL.sum(), valid_KBL[0].sum()
