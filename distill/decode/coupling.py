"""Candidates coupled to the target's noise: the drafter ranks by ``warp(q) + G`` with the G the target will use.

The emitted tokens do not depend on what was drafted (see ``verify.match``), so sharing the noise is safe
there, and it makes draft and target agree far more often than independent draws would.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from distill import kernels
from distill.sampling import Sampling, choose, choose_among_top, gumbel, warp
from distill.types import Candidates


@dataclass(frozen=True, kw_only=True)
class RoundNoise:
    """Keys of the noise for the tokens one round may produce; index p is the token at position ``first + p``."""

    sampling: Sampling
    request_B: Tensor
    position_BP: Tensor
    vocab: int

    @classmethod
    def starting(
        cls, sampling: Sampling, request_B: Tensor, first_B: Tensor, *, count: int, vocab: int
    ) -> "RoundNoise":
        """Keys for ``count`` positions from ``first_B`` on."""
        position_BP = first_B[:, None] + torch.arange(count, device=first_B.device)
        return cls(sampling=sampling, request_B=request_B, position_BP=position_BP, vocab=vocab)

    @cached_property
    def full(self) -> Tensor | None:
        """Noise for the whole vocabulary, [B, P, V], made when first asked for; None when greedy."""
        if self.sampling.greedy:
            return None
        return gumbel(seed=self.sampling.seed, request_B=self.request_B, position_BP=self.position_BP, vocab=self.vocab)

    def choose(self, logits_BNV: Tensor, depths_BN: Tensor) -> Tensor:
        """The target's own token after nodes of these depths; all nodes of one depth share their noise."""
        # On a CPU with top-k the survivors' noise is enough; elsewhere looking for ties would cost a read.
        if self.sampling.top_k > 0 and not self.sampling.greedy and logits_BNV.device.type == "cpu":
            position_BN = self.position_BP.gather(1, depths_BN)
            # With few positions hashing everything by the kernel beats the many small operations that pick.
            few = self.position_BP.numel() <= 4 and kernels.load() is not None
            whole = self.full if few or "full" in self.__dict__ else None

            def noise_at(ids_BNk: Tensor) -> Tensor:
                if whole is not None:
                    return self._at(whole, depths_BN).gather(2, ids_BNk)
                return gumbel(
                    seed=self.sampling.seed,
                    request_B=self.request_B,
                    position_BP=position_BN,
                    vocab=self.vocab,
                    ids_BPk=ids_BNk,
                )

            chosen_BN = choose_among_top(logits_BNV, self.sampling, noise_at)
            if chosen_BN is not None:
                return chosen_BN
        noise_BPV = self.full
        if noise_BPV is None:
            return choose(logits_BNV, self.sampling)
        return choose(logits_BNV, self.sampling, self._at(noise_BPV, depths_BN))

    def _at(self, noise_BPV: Tensor, depths_BN: Tensor) -> Tensor:
        """Noise of each node's position, [B, N, V]; whole rows are copied, which a gather over V would not do."""
        if noise_BPV.shape[1] == 1:
            return noise_BPV.expand(-1, depths_BN.shape[1], -1)
        rows_B1 = torch.arange(len(noise_BPV), device=noise_BPV.device)[:, None]
        return noise_BPV[rows_B1, depths_BN]


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
        noise_BPV = self.noise.full
        if noise_BPV is None:
            return logits
        noise_BV = noise_BPV[:, depth]
        noise_BW = noise_BV if self.draft_to_target is None else noise_BV[:, self.draft_to_target]
        warped = warp(logits, self.sampling)
        # What the filters drop ranks last, in its own order: better than arbitrary ids when k exceeds them.
        scores = torch.where(torch.isinf(warped), logits - 1e4, warped)
        return scores + noise_BW[:, None]

    def log_chance(self, scores_BFW: Tensor, top_BFk: Tensor, depth: int) -> Tensor:
        """Softmax of the scores, [B, F, k]."""
        return top_BFk - scores_BFW.logsumexp(-1, keepdim=True)

    def distribution(self, logits_BFW: Tensor) -> None:
        """Nothing is drawn."""
        return
