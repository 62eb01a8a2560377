"""A drafter that knows the answer and errs on purpose: a thorough exercise for the decode loop, without training.

It proposes a given continuation, hiding the right token among its first candidates or leaving it out at positions a
hash picks. So long accepted runs, branches that win over the first candidate, and rejections all happen often, which
an untrained drafter (nothing accepted) or a perfect one (everything accepted) does not give.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.drafters.base import Drafter, DrafterState
from distill.target import Target, TargetInfo
from distill.types import Batch, Frontier, StepPrediction, TargetOutput

RANKS = (0, 0, 0, 0, 0, 0, 1, 1, 2, None)
"""Rank of the right token among the candidates, by hash of its position; None leaves it out."""
BEST = 30.0
"""Score of the first candidate; the next have one less each, every other token 0."""


@dataclass(kw_only=True)
class ReplayState(DrafterState):
    """Committed tokens so far, per row."""

    lengths_B: Tensor


class ReplayDrafter(Drafter):
    """Proposes ``script``, which must be set to prompt and continuation before each decode (batch 1)."""

    name = "replay"

    def __init__(self, target: Target):
        super().__init__(None, target)
        self.script: list[int] = []

    @classmethod
    def taps(cls, config: None, info: TargetInfo) -> tuple[int, ...]:
        """No features are read."""
        return ()

    def training_steps(self, batch: Batch, output: TargetOutput) -> list[StepPrediction]:
        """Nothing to train."""
        return []

    def new_state(self, batch_size: int, capacity: int) -> ReplayState:
        """Nothing committed yet."""
        assert batch_size == 1, "one script, one row"
        return ReplayState(cache=None, lengths_B=torch.zeros(1, dtype=torch.long, device=self.target.device))

    def extend(
        self,
        state: ReplayState,
        ids_BL: Tensor,
        next_B: Tensor,
        output: TargetOutput,
        n_B: Tensor,
        *,
        longest: int,
    ) -> None:
        """Count committed tokens; see ``Drafter.extend``."""
        state.lengths_B = state.lengths_B + n_B

    def step(self, state: ReplayState, frontier: Frontier) -> Tensor:
        """Scores for the token after each frontier node: the same for all nodes of one depth."""
        # The root sits at position `length`, so the children of depth d stand at length + d + 1.
        position = int(state.lengths_B[0]) + frontier.depth + 1
        scores_BFV = torch.zeros(*frontier.tokens_BF.shape, self.target.info.vocab_size, device=self.target.device)
        for rank, token in enumerate(self._candidates(position)):
            scores_BFV[..., token] = BEST - rank
        return scores_BFV

    def rollback(self, state: ReplayState) -> None:
        """Nothing was written."""

    def _candidates(self, position: int) -> list[int]:
        """Three wrong tokens, the right one put in at the rank this position is given."""
        right = self.script[position] if position < len(self.script) else 0
        digest = hashlib.blake2b(position.to_bytes(8, "little"), digest_size=8).digest()
        rank = RANKS[digest[0] % len(RANKS)]
        wrong = [(right + 1 + digest[i] + 256 * i) % self.target.info.vocab_size for i in (1, 2, 3)]
        wrong = [token for token in dict.fromkeys(wrong) if token != right]
        return wrong if rank is None else [*wrong[:rank], right, *wrong[rank:]]
