"""What the target itself would emit, recomputed without any of the decoding machinery.

No cache, no tree, no drafter: one plain forward of the transformers model over prompt and continuation. Every
position sees exactly the tokens before it, so this equals stepping token by token as long as the earlier tokens are
taken as given: the first wrong token of a continuation shows as a difference, and whatever follows is judged
against what the target says after that prefix.
"""

from dataclasses import dataclass

import torch

from distill.sampling import Sampling, gumbel, warp
from distill.target import Target

TIE_GAP = 1e-4
"""Below this distance between the two best scores, fp32 rounding may pick either: a tie, not a fault."""
TIE_STEPS = 4
"""The same in coarser types: so many rounding steps of the logits' own precision (bf16: 1/8 each from 16 to 32)."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The target's own token at every position of a continuation.

    Attributes:
        ids: the tokens.
        gaps: each one's lead over the runner-up, after temperature, filters and noise.
        tie_gaps: lead below which rounding may pick either, given the model's precision.
    """

    ids: list[int]
    gaps: list[float]
    tie_gaps: list[float]

    def first_difference(self, ids: list[int]) -> int | None:
        """Index of the first id that is not the target's own, or None."""
        return next((i for i, (ours, theirs) in enumerate(zip(self.ids, ids, strict=True)) if ours != theirs), None)


@torch.inference_mode()
def recompute(target: Target, prompt: list[int], ids: list[int], *, sampling: Sampling, request_id: int) -> Choices:
    """Recompute a continuation.

    Args:
        target: its ``model`` is called as transformers would call it.
        prompt: token ids.
        ids: the continuation to judge.
        sampling: temperature, filters, seed.
        request_id: key of the noise.
    """
    if not ids:
        return Choices(ids=[], gaps=[], tie_gaps=[])
    ids_1L = torch.tensor([prompt + ids], device=target.device)
    mask_1L = torch.ones_like(ids_1L)
    # Row j of what is kept speaks about the token after it; the last row speaks about a token not produced yet.
    logits_LV = target.model(
        input_ids=ids_1L, attention_mask=mask_1L, use_cache=False, logits_to_keep=len(ids) + 1
    ).logits[0, :-1]
    # Distance to the next number of the logits' type, at the largest logit.
    step_L = 2.0 ** logits_LV.double().abs().amax(-1).log2().floor() * torch.finfo(logits_LV.dtype).eps
    scores_LV = logits_LV if logits_LV.dtype == torch.float64 else logits_LV.float()
    if not sampling.greedy:
        position_1L = torch.arange(len(prompt), len(prompt) + len(ids), device=target.device)[None]
        request_1 = torch.tensor([request_id], device=target.device)
        vocab = scores_LV.shape[-1]
        noise_1LV = gumbel(seed=sampling.seed, request_B=request_1, position_BP=position_1L, vocab=vocab)
        scores_LV = warp(scores_LV, sampling) + noise_1LV[0]
    top_L2 = scores_LV.topk(2, dim=-1)
    gaps_L = top_L2.values[:, 0] - top_L2.values[:, 1]
    tie_gaps_L = (TIE_STEPS * step_L / (sampling.temperature or 1.0)).clamp(min=TIE_GAP)
    return Choices(ids=top_L2.indices[:, 0].tolist(), gaps=gaps_L.tolist(), tie_gaps=tie_gaps_L.tolist())
