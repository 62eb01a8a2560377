"""What happens between the projections of a decode step: rotate, write to the cache, attend, gate.

Twice, with one interface: by PyTorch for every device and dtype, and by our CPU kernels for a few bf16 rows.
"""

import ctypes
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from distill import kernels
from distill.packed import SKINNY_ROWS


class Heads(NamedTuple):
    """Query heads H, key/value heads G and their width K."""

    n: int
    n_kv: int
    dim: int


WIDTH = 32


def why_not(head_dim: int) -> str | None:
    """Why our kernels cannot attend; None where they can."""
    return None if head_dim % WIDTH == 0 else f"not for attention: head width {head_dim} is no multiple of {WIDTH}"


def choose_ops(x_BND: Tensor, heads: Heads) -> "type[TorchOps] | type[KernelOps]":
    """The kernels where they can be used for this input."""
    few = x_BND.shape[0] * x_BND.shape[1] <= SKINNY_ROWS
    fits = few and x_BND.dtype == torch.bfloat16 and x_BND.device.type == "cpu" and why_not(heads.dim) is None
    return KernelOps if fits and kernels.load() is not None else TorchOps


class TorchOps:
    """By PyTorch.

    Args:
        heads: sizes.
        rotary: (cos, sin), each [B, N, K].
        masks: per kind of layer, [B, 1, N, T], True where a new token may attend; None: all of the view.
        cache: a ``KVCache`` that has announced the write.
    """

    def __init__(self, heads: Heads, rotary: tuple[Tensor, Tensor], masks: dict[str, Tensor | None], cache: Any):
        self.heads, self.cache = heads, cache
        self.groups = heads.n // heads.n_kv
        cos, sin = (part[:, :, None] for part in rotary)
        half = heads.dim // 2
        # rotate_half(x) * sin = roll(x) * (sin with its first half negated): one operation less per layer.
        self.cos, self.sin = cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)
        # The query heads of one key/value head are laid side by side along the query axis and share its mask.
        self.masks = {
            kind: None if mask is None else mask.expand(len(cos), 1, cos.shape[1], -1).repeat_interleave(self.groups, 2)
            for kind, mask in masks.items()
        }

    def attention(self, qkv_BNHK: Tensor, layer: int, kind: str) -> Tensor:
        """Attention of the new tokens, [B, N, H * K]; ``qkv_BNHK`` holds query, key and value heads in this order."""
        (n_heads, n_kv, dim), (batch, n) = self.heads, qkv_BNHK.shape[:2]
        rotated, v = qkv_BNHK.split([n_heads + n_kv, n_kv], 2)
        rotated = torch.addcmul(rotated * self.cos, rotated.roll(dim // 2, -1), self.sin)
        k_BGTK, v_BGTK = self.cache.write(layer, rotated[:, :, n_heads:], v)
        q_BGQK = rotated[:, :, :n_heads].reshape(batch, n, n_kv, self.groups, dim)
        q_BGQK = q_BGQK.permute(0, 2, 1, 3, 4).reshape(batch, n_kv, n * self.groups, dim)
        out = F.scaled_dot_product_attention(q_BGQK, k_BGTK, v_BGTK, attn_mask=self.masks.get(kind))
        return out.view(batch, n_kv, n, self.groups, dim).permute(0, 2, 1, 3, 4).reshape(batch, n, -1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, the two halves of the last axis."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up


class KernelOps:
    """By our kernels, which round where PyTorch rounds; a row's result does not depend on the rows beside it."""

    def __init__(self, heads: Heads, rotary: tuple[Tensor, Tensor], masks: dict[str, Tensor | None], cache: Any):
        library = kernels.load()
        assert library is not None
        self.library, self.heads, self.cache = library, heads, cache
        self.cos, self.sin = (part.contiguous() for part in rotary)
        batch, n, _ = self.cos.shape
        self.rows = batch * n
        kv = cache.kv
        self.stride = (kv.stride(2), kv.stride(3))
        self.slots_BN = cache.slots_BN.contiguous()
        self.masks = {kind: None if mask is None else mask[:, 0].contiguous() for kind, mask in masks.items()}
        self.write_sizes = (ctypes.c_int64 * 7)(self.rows, n, *heads, *self.stride)
        token = (heads.n + 2 * heads.n_kv) * heads.dim
        self.attend_sizes = (ctypes.c_int64 * 9)(batch, n, *heads, cache.view, token, *self.stride)
        self.scale = heads.dim**-0.5

    def attention(self, qkv_BNHK: Tensor, layer: int, kind: str) -> Tensor:
        """As ``TorchOps.attention``; ``qkv_BNHK`` is used up."""
        k, v = self.cache.kv[layer, 0].data_ptr(), self.cache.kv[layer, 1].data_ptr()
        qkv = qkv_BNHK.data_ptr()
        self.library.draftsmith_rotate_write(
            qkv, self.cos.data_ptr(), self.sin.data_ptr(), k, v, self.slots_BN.data_ptr(), self.write_sizes
        )
        mask = self.masks.get(kind)
        out = qkv_BNHK.new_empty(*qkv_BNHK.shape[:2], self.heads.n * self.heads.dim)
        seen = None if mask is None else mask.data_ptr()
        self.library.draftsmith_attend(qkv, k, v, seen, out.data_ptr(), self.attend_sizes, self.scale)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """As ``TorchOps.silu_mul``."""
        size = gate_up.shape[-1] // 2
        if size % 16:
            return TorchOps.silu_mul(self, gate_up)  # type: ignore[arg-type]
        y = gate_up.new_empty(*gate_up.shape[:-1], size)
        self.library.draftsmith_silu_mul(gate_up.data_ptr(), y.data_ptr(), self.rows, size)
        return y
