"""The decode step of a recurrent drafter with as few operations as it takes; the target's is ``target/fused.py``.

A draft step reads a few megabytes of weights for one to a handful of rows, so on a CPU it is made of overhead: module
calls, rotary angles, masks that hide nothing. Here projections are joined and packed, angles come from a table, and
attention is the target's own kernel. Values are those of the drafter's modules up to rounding.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distill.drafters.blocks import BlockShape, RMSNorm, Rotary
from distill.kv_cache import KVCache
from distill.packed import PackedLinear, PackedNorm, joined
from distill.target.info import FULL
from distill.target.step_ops import Heads, choose_ops

TABLE = 1024  # positions of the smallest table of angles


class Angles:
    """Rotary (cos, sin) by position, made once: [B, N] -> two of [B, N, K]."""

    def __init__(self, rotary: Rotary, dtype: torch.dtype, device: torch.device):
        self._rotary, self._dtype, self._device = rotary, dtype, device
        # Each twice as long as the one before, which stays: recorded CUDA graphs go on reading it.
        self._tables: list[tuple[Tensor, Tensor]] = []

    def __call__(self, positions_BN: Tensor, *, longest: int) -> tuple[Tensor, Tensor]:
        """Look up; ``longest`` is more than any of the positions, known on the host."""
        rows = len(self._tables[-1][0]) if self._tables else 0
        if rows < longest:
            rows = max(rows, TABLE)
            while rows < longest:
                rows *= 2
            cos, sin = self._rotary(torch.arange(rows, device=self._device)[None], self._dtype)
            self._tables.append((cos[0, 0], sin[0, 0]))
        cos, sin = self._tables[-1]
        return cos[positions_BN], sin[positions_BN]


class FusedLayer:
    """Attention and MLP of one decoder layer.

    Args:
        attention: an ``Attention`` block.
        norm_mid: the norm before the MLP.
        mlp: an ``MLP`` block.
    """

    def __init__(self, attention: Any, norm_mid: RMSNorm, mlp: Any):
        self.qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o = PackedLinear(attention.o_proj.weight)
        self.norm_mid = packed_norm(norm_mid)
        self.gate_up = joined([mlp.gate_proj, mlp.up_proj])
        self.down = PackedLinear(mlp.down_proj.weight)

    def __call__(self, x_BNE: Tensor, residual_BND: Tensor, ops: Any, layer: int, head_dim: int) -> Tensor:
        """``x`` is what attention reads, ``residual`` what it is added to."""
        qkv_BNHK = self.qkv(x_BNE).view(*x_BNE.shape[:2], -1, head_dim)
        h_BND = self.o(ops.attention(qkv_BNHK, layer, FULL), add=residual_BND)
        return self.down(ops.silu_mul(self.gate_up(self.norm_mid(h_BND))), add=h_BND)


class FusedStep:
    """Runs new (token embedding, feature) pairs through all layers of a drafter.

    Args:
        shape: sizes of the layers.
        angles: rotary table.
        enter: (embeddings, features) -> what the first layer's attention reads, and its residual.
        layers: the layers.
        between: norm before the attention of layers after the first.
    """

    def __init__(
        self,
        shape: BlockShape,
        angles: Angles,
        enter: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        layers: Sequence[FusedLayer],
        between: Sequence[Callable[[Tensor], Tensor]] = (),
    ):
        self.heads = Heads(shape.n_heads, shape.n_kv_heads, shape.head_dim)
        self.angles, self.enter, self.layers, self.between = angles, enter, layers, between

    def __call__(
        self, embeds_BND: Tensor, g_BND: Tensor, positions_BN: Tensor, mask_B1NT: Tensor | None, cache: KVCache
    ) -> Tensor:
        """Return out_BND; the cache has announced the write, mask None: its whole view may be attended."""
        rotary = self.angles(positions_BN, longest=cache.view)
        ops = choose_ops(g_BND, self.heads)(self.heads, rotary, {FULL: mask_B1NT}, cache)
        x, residual = self.enter(embeds_BND, g_BND)
        for index, layer in enumerate(self.layers):
            if index:
                x = self.between[index - 1](residual)
            residual = layer(x, residual, ops, index, self.heads.dim)
        return residual


def packed_norm(norm: RMSNorm) -> Callable[[Tensor], Tensor]:
    """The norm for decoding."""
    # In double precision drafters stay exact, where transformers (and its packed norm) rounds to single.
    return norm if norm.weight.dtype == torch.float64 else PackedNorm(norm.weight, norm.eps)


def packed(linear: nn.Linear) -> PackedLinear:
    """The layer for decoding."""
    return PackedLinear(linear.weight, linear.bias)
