"""Candidates coupled to the target's noise: the drafter ranks by ``warp(q) + G`` with the G the target will use.

The emitted tokens do not depend on what was drafted (see ``verify.match``), so sharing the noise is safe
there, and it makes draft and target agree far more often than independent draws would.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from distill.sampling import Sampling, gumbel, warp
from distill.types import Candidates


@dataclass(frozen=True, kw_only=True)
class RoundNoise:
    """Noise for the tokens one round may produce; index p is the token at position ``length + 1 + p``."""

    noise_BPV: Tensor | None

    @classmethod
    def draw(cls, sampling: Sampling, request_B: Tensor, first_B: Tensor, *, count: int, vocab: int) -> "RoundNoise":
        """Draw ``count`` positions from ``first_B`` on; nothing when greedy."""
        if sampling.greedy:
            return cls(noise_BPV=None)
        position_BP = first_B[:, None] + torch.arange(count, device=first_B.device)
        return cls(noise_BPV=gumbel(seed=sampling.seed, request_B=request_B, position_BP=position_BP, vocab=vocab))

    def at_depths(self, depths_BN: Tensor) -> Tensor | None:
        """Noise for the token that follows each node: the same for all nodes of one depth."""
        if self.noise_BPV is None:
            return None
        return self.noise_BPV.gather(1, depths_BN[:, :, None].expand(-1, -1, self.noise_BPV.shape[2]))


class CoupledRanker:
    """Scores for candidates at one depth: draft logits as they are when greedy, perturbed otherwise."""

    def __init__(self, sampling: Sampling, noise: RoundNoise, draft_to_target: Tensor | None):
        self.sampling = sampling
        self.noise = noise
        self.draft_to_target = draft_to_target
        self.candidates: Candidates = "topk" if sampling.greedy else "coupled"

    def __call__(self, logits_BFW: Tensor, depth: int) -> Tensor:
        """Return scores_BFW in fp32 (fp64 stays)."""
        logits = logits_BFW if logits_BFW.dtype == torch.float64 else logits_BFW.float()
        if self.noise.noise_BPV is None:
            return logits
        noise_BV = self.noise.noise_BPV[:, depth]
        noise_BW = noise_BV if self.draft_to_target is None else noise_BV[:, self.draft_to_target]
        warped = warp(logits, self.sampling)
        # What the filters drop ranks last, in its own order: better than arbitrary ids when k exceeds them.
        scores = torch.where(torch.isinf(warped), logits - 1e4, warped)
        return scores + noise_BW[:, None]
