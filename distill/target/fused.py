"""The target's decode step with as few operations as it takes: joined, packed projections and no module calls.

Written once for the Llama family of blocks (Llama, Mistral, Qwen2, Qwen3):

    h = x + o(attention(rotate(norm_q(q)), rotate(norm_k(k)), v)),   q, k, v = qkv(norm(x))
    x = h + down(silu(gate) * up),                                  gate, up = gate_up(norm(h))

It reads the transformers model's own weights (the projections become views of the joined ones), works for decoding
only, and is compared with the model's own forward before it is used. Everything in ``run`` is a pure function of
tensors, so that it can be compiled or captured in a CUDA graph.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distill.packed import PackedLinear, PackedNorm, joined
from distill.target.step_ops import Heads, choose_ops

FAMILIES = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


@dataclass(frozen=True, kw_only=True)
class _Layer:
    kind: str
    norm_in: PackedNorm
    qkv: PackedLinear
    norm_q: PackedNorm | None
    norm_k: PackedNorm | None
    o: PackedLinear
    norm_mid: PackedNorm
    gate_up: PackedLinear
    down: PackedLinear


def why_not(layers: Sequence[nn.Module]) -> str | None:
    """Say why these decoder layers cannot be fused; None when they can."""
    for layer in layers:
        block: Any = layer
        if type(layer).__name__ not in FAMILIES:
            return f"decoder layers of type {type(layer).__name__}"
        if type(block.mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
            return f"activation {type(block.mlp.act_fn).__name__}"
        projections = [block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj, block.self_attn.o_proj]
        for linear in [*projections, block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj]:
            if type(linear) is not nn.Linear:
                return f"projections of type {type(linear).__name__}"
        if len({linear.bias is None for linear in projections[:3]}) > 1:
            return "biases on some of the query, key and value projections"
    return None


class FusedLayers:
    """All decoder layers and the final norm.

    Args:
        layers: the transformers decoder layers, of a family ``why_not`` accepts.
        norm: the final norm.
        kinds: kind of attention of every layer (full or sliding).
        n_heads, n_kv_heads, head_dim: sizes.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        *,
        kinds: Sequence[str],
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
    ):
        assert why_not(layers) is None
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.norm = _norm(norm)
        self.layers = [_fuse(layer, kind) for layer, kind in zip(layers, kinds, strict=True)]

    def first(self, n: int) -> "FusedLayers":
        """Only the first ``n`` layers, followed by the same norm; the weights are shared."""
        fewer = copy.copy(self)
        fewer.layers = self.layers[:n]
        return fewer

    def run(
        self,
        x_BND: Tensor,
        rotary: tuple[Tensor, Tensor],
        masks: dict[str, Tensor | None],
        cache: Any,
        taps: Sequence[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run all layers.

        Args:
            x_BND: embeddings of the new tokens.
            rotary: (cos, sin), each [B, N, K], of their positions.
            masks: per kind, True where a query may attend, [B, 1, N, T]; None: everything in the cache's view.
            cache: a ``KVCache`` that has announced the write.
            taps: hidden states to keep.

        Returns:
            (last hidden state after the final norm, tap -> hidden state).
        """
        heads = Heads(self.n_heads, self.n_kv_heads, self.head_dim)
        ops = choose_ops(x_BND, heads)(heads, rotary, masks, cache)
        caught: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in taps:
                caught[index] = x_BND
            qkv_BNHK = layer.qkv(layer.norm_in(x_BND)).view(*x_BND.shape[:2], -1, self.head_dim)
            if layer.norm_q is not None and layer.norm_k is not None:
                q, k, v = qkv_BNHK.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], 2)
                qkv_BNHK = torch.cat([layer.norm_q(q.contiguous()), layer.norm_k(k.contiguous()), v], 2)
            x_BND = layer.o(ops.attention(qkv_BNHK, index, layer.kind), add=x_BND)
            x_BND = layer.down(ops.silu_mul(layer.gate_up(layer.norm_mid(x_BND))), add=x_BND)
        if len(self.layers) in taps:
            caught[len(self.layers)] = x_BND
        return self.norm(x_BND), caught


def _norm(module: Any) -> PackedNorm:
    return PackedNorm(module.weight, module.variance_epsilon)


def _fuse(layer: Any, kind: str) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norm_q = getattr(attention, "q_norm", None)
    norm_k = getattr(attention, "k_norm", None)
    return _Layer(
        kind=kind,
        norm_in=_norm(layer.input_layernorm),
        qkv=joined([attention.q_proj, attention.k_proj, attention.v_proj]),
        norm_q=None if norm_q is None else _norm(norm_q),
        norm_k=None if norm_k is None else _norm(norm_k),
        o=PackedLinear(attention.o_proj.weight, attention.o_proj.bias),
        norm_mid=_norm(layer.post_attention_layernorm),
        gate_up=joined([mlp.gate_proj, mlp.up_proj]),
        down=PackedLinear(mlp.down_proj.weight, mlp.down_proj.bias),
    )
