"""EAGLE-3 training as a plain research implementation does it: the named reference of ``bench/training.py``.

The published training loop (arXiv:2503.01840), on the weights of one of our drafters, with everything held whole:

* the target's forward keeps every hidden state and the logits of every position, L x V;
* soft targets over the draft vocabulary, L x W, and a shifted copy of them for every training-time-test step;
* attention scores L x (L + k) in fp32, heads repeated, under an additive L x L mask;
* draft logits and log-probabilities L x W for every step and every position, supervised or not;
* plain autograd, which keeps all of it until the backward pass.

It is not slow on purpose: soft targets are made once, every operation is one fused call over the whole batch, and
nothing is computed twice.
"""

from typing import Any

import torch
from torch import Tensor

from distill import alignment
from distill.attention import packed_mask
from distill.divergence import wide
from distill.drafters.blocks import rotate
from distill.drafters.eagle3 import Eagle3
from distill.types import Batch


def dense_loss(drafter: Eagle3, batch: Batch) -> Tensor:
    """The soft cross-entropy that ``step_loss`` gives with ``LossConfig(name="ce")``."""
    target, vocab = drafter.target, drafter.vocab
    mask_B1LL = packed_mask(batch.doc_BL, batch.positions_BL).full_B1QT
    with torch.no_grad(), torch.autocast(target.device.type, enabled=False):
        seen = target.model(
            input_ids=batch.ids_BL,
            attention_mask=mask_B1LL,
            position_ids=batch.positions_BL,
            output_hidden_states=True,
            use_cache=False,
        )
        logits_BLV = wide(seen.logits)
        kept_BL = vocab.t2d[logits_BLV.argmax(-1)]
        soft_BLW = logits_BLV[..., vocab.target_ids].softmax(-1)
        bias = torch.zeros(mask_B1LL.shape).masked_fill_(~mask_B1LL, torch.finfo(torch.float32).min)
    weight = drafter.fc.weight
    taps = drafter.taps(drafter.config, target.info)
    g_BLD = drafter.fc(torch.cat([seen.hidden_states[k].to(weight.dtype) for k in taps], -1))
    layer: Any = drafter.layers[0]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    total = torch.zeros((), dtype=logits_BLV.dtype)
    steps = drafter.config.ttt_steps
    for k in range(steps):
        embeds = target.embed(alignment.input_ids(batch, k)).to(g_BLD.dtype)
        normed = layer.hidden_norm(g_BLD)
        x = torch.cat([layer.input_layernorm(embeds), normed], -1)
        h = g_BLD + _attention(drafter, x, batch.positions_BL + k, keys, values, bias)
        out = h + layer.mlp(layer.post_attention_layernorm(h))
        log_q = wide(drafter.lm_head(drafter.norm(out))).log_softmax(-1)
        p = alignment.shift_left(soft_BLW, 1 + k)
        mask_BL = alignment.recurrent_mask(batch, k) & alignment.shift_left(kept_BL, 1 + k)
        total = total - drafter.config.step_decay**k * ((p * log_q).sum(-1) * mask_BL).sum()
        g_BLD = out
    weights = sum(drafter.config.step_decay**k for k in range(steps))
    return total / (weights * batch.denominator)


def _attention(drafter: Eagle3, x: Tensor, positions: Tensor, keys: list, values: list, bias: Tensor) -> Tensor:
    """One softmax over the causal L x L scores of step 0 and a diagonal for every later step."""
    layer: Any = drafter.layers[0]
    attention, shape = layer.self_attn, drafter.shape
    rotary = drafter.rotary(positions, x.dtype)

    def split(y: Tensor) -> Tensor:
        return y.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)

    repeat = shape.n_heads // shape.n_kv_heads
    q = rotate(split(attention.q_proj(x)), rotary)
    keys.append(rotate(split(attention.k_proj(x)), rotary).repeat_interleave(repeat, 1))
    values.append(split(attention.v_proj(x)).repeat_interleave(repeat, 1))
    scale = shape.head_dim**-0.5
    scores = [q @ keys[0].transpose(-1, -2) * scale + bias]
    scores += [((q * key).sum(-1) * scale)[..., None] for key in keys[1:]]
    weights = wide(torch.cat(scores, -1)).softmax(-1).to(q.dtype)
    length = x.shape[1]
    out = weights[..., :length] @ values[0]
    for i, value in enumerate(values[1:]):
        out = out + weights[..., length + i, None] * value
    return attention.o_proj(out.transpose(1, 2).flatten(2))
