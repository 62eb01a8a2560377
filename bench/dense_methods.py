"""Medusa's and EAGLE-1's losses the straightforward way: all logits of all positions at once, gradients by autograd.

The same weights, batch and masks as the library's, and the same number; what a first version would look like.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.drafters.eagle1 import Eagle1
from distill.drafters.medusa import Medusa
from distill.types import Batch


def _shifted(x_BL: Tensor, by: int) -> Tensor:
    return torch.cat([x_BL[:, by:], torch.zeros_like(x_BL[:, :by])], 1)


def _counts(batch: Batch, last: int) -> Tensor:
    """Positions whose next ``last`` tokens were all written by the target, in one document."""
    mask = batch.doc_BL >= 0
    for by in range(1, last + 1):
        mask = mask & _shifted(batch.loss_mask_BL, by) & (_shifted(batch.doc_BL, by) == batch.doc_BL)
    return mask


def _documents(batch: Batch) -> Tensor:
    """[B, 1, L, L], True where a token sees another: its own document, up to itself."""
    length = batch.ids_BL.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return ((batch.doc_BL[:, :, None] == batch.doc_BL[:, None]) & causal)[:, None]


def _cross_entropy(p_BLV: Tensor, logits_BLV: Tensor, mask_BL: Tensor) -> Tensor:
    return -((p_BLV * logits_BLV.log_softmax(-1)).sum(-1) * mask_BL).sum()


def medusa_loss(drafter: Medusa, batch: Batch) -> Tensor:
    """All heads over the target's own output layer."""
    target = drafter.target
    last = target.forward(batch.ids_BL, positions_BL=batch.positions_BL, doc_BL=batch.doc_BL).last_BLD
    with torch.no_grad():
        p_BLV = target.logits(last).softmax(-1)
    total, weights = torch.zeros(()), 0.0
    for i, head in enumerate(drafter.heads):
        x = last
        for block in head.children():
            x = x + F.silu(F.linear(x, block.linear.weight, block.linear.bias))  # type: ignore[union-attr, arg-type]
        weight = drafter.config.decay**i
        total = total + weight * _cross_entropy(_later(p_BLV, 1 + i), target.logits(x), _counts(batch, 2 + i))
        weights += weight
    return total / (weights * batch.denominator)


def _later(p_BLV: Tensor, by: int) -> Tensor:
    return torch.cat([p_BLV[:, by:], torch.zeros_like(p_BLV[:, :by])], 1)


def eagle1_loss(drafter: Eagle1, batch: Batch) -> Tensor:
    """One step: regression on the next feature, and cross entropy through the target's output layer."""
    target, config, layer = drafter.target, drafter.config, drafter.layers[0]
    last = target.forward(batch.ids_BL, positions_BL=batch.positions_BL, doc_BL=batch.doc_BL).last_BLD
    with torch.no_grad():
        p_BLV = target.logits(last).softmax(-1)
    mask_B1LL = _documents(batch)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1LL)

    x = drafter.fc(torch.cat([target.embed(_shifted(batch.ids_BL, 1)), last], -1))
    out = layer(x, drafter.rotary(batch.positions_BL, x.dtype), attend)
    counts = _counts(batch, 2)
    feature = F.smooth_l1_loss(out, _later(last, 1), reduction="none").mean(-1)
    tokens = _cross_entropy(_later(p_BLV, 1), target.logits(out), counts)
    total = config.feature_weight * (feature * counts).sum() + config.token_weight * tokens
    return total / ((config.feature_weight + config.token_weight) * batch.denominator)
