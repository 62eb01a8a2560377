"""A drafter that knows the answer: it proposes a recorded continuation and spoils it where it is told to.

With it the number of accepted tokens is an input instead of a result, so that the decode loop's own cost shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.drafters.base import Drafter, DrafterState
from distill.target import Target, TargetInfo
from distill.types import Batch, Frontier, StepPrediction, TargetOutput

CERTAIN = 1e4
"""Logit of a token that must come first (or last, negated): far from the zeros of all others."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Tokens to be accepted: row b accepts ``pattern[(b + r) % len(pattern)]`` in round r, uneven across rows."""

    pattern: tuple[int, ...]


@dataclass(kw_only=True)
class ForcedState(DrafterState):
    """Tokens taken in so far per row, and the round."""

    lengths_B: Tensor
    round: int = -1


class Forced(Drafter):
    """Drafts from recorded sequences; costs one scatter per step.

    Args:
        target: the frozen target, for its vocabulary and device.
        pattern: see ``Acceptance``.
        recorded: per row, the prompt and what the target says after it; as long as the decode and one tree more.
    """

    name = "forced"
    Config = Acceptance

    def __init__(self, target: Target, *, pattern: Sequence[int], recorded: Sequence[Sequence[int]]):
        super().__init__(Acceptance(pattern=tuple(pattern)), target)
        longest = max(len(row) for row in recorded)
        rows = [[*row, *[0] * (longest - len(row))] for row in recorded]
        self._recorded_BT = torch.tensor(rows, device=target.device)
        self._pattern_P = torch.tensor(pattern, device=target.device)
        self._row_B = torch.arange(len(rows), device=target.device)

    @classmethod
    def taps(cls, config: Any, info: TargetInfo) -> tuple[int, ...]:
        """Reads no hidden state."""
        return ()

    def training_steps(self, batch: Batch, output: TargetOutput) -> list[StepPrediction]:
        """There is nothing to train."""
        raise NotImplementedError("the forced drafter has no weights")

    def new_state(self, batch_size: int, capacity: int) -> ForcedState:
        """Return a state at the start of the recording."""
        assert batch_size == len(self._recorded_BT), "one recording per row"
        return ForcedState(cache=None, lengths_B=torch.zeros(batch_size, dtype=torch.long, device=self.target.device))

    def extend(
        self, state: ForcedState, ids_BL: Tensor, next_B: Tensor, output: TargetOutput, n_B: Tensor, *, longest: int
    ) -> None:
        """Move on by ``n_B`` tokens."""
        state.lengths_B = state.lengths_B + n_B

    def step(self, state: ForcedState, frontier: Frontier) -> Tensor:
        """Rank the recorded token first; below the last level to be accepted, rank it last."""
        state.round += frontier.depth == 0
        batch, nodes = frontier.tokens_BF.shape
        # The root stands at position ``lengths``; its children one further on.
        at_B = (state.lengths_B + 1 + frontier.depth).clamp(max=self._recorded_BT.shape[1] - 1)
        known_B11 = self._recorded_BT.gather(1, at_B[:, None])[:, :, None]
        accepted_B = self._pattern_P[(self._row_B + state.round) % len(self._pattern_P)]
        score_B11 = torch.where(accepted_B > frontier.depth, CERTAIN, -CERTAIN)[:, None, None]
        logits = torch.zeros(batch, nodes, self.target.info.vocab_size, device=known_B11.device)
        return logits.scatter_(2, known_B11.expand(-1, nodes, 1), score_B11.expand(-1, nodes, 1))

    def rollback(self, state: ForcedState) -> None:
        """Steps write nothing."""
