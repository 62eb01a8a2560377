"""The pieces drafters are built from: a Llama-style decoder layer whose attention is passed in.

Training passes an ``attend`` that remembers keys of earlier training-time-test steps; drafting passes one
that reads a cache. The layer does not know which, so both run the same weights through the same code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from distill.products import project
from distill.target import TargetInfo

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q_BHLK, k_BGLK, v_BGLK), rotated -> out_BHLK."""


def kept(part: Callable[..., Any], *args: Any) -> Any:
    """Call ``part``; autograd keeps what its backward pass reads."""
    return part(*args)


def recomputed(part: Callable[..., Any], *args: Any) -> Any:
    """Call ``part``, which is computed again in the backward pass; it must not draw random numbers."""
    return checkpoint(part, *args, use_reentrant=False, preserve_rng_state=False)


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Sizes of a decoder layer."""

    hidden: int
    intermediate: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float


class RMSNorm(nn.Module):
    """Root-mean-square norm with a scale."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis in fp32 (fp64 stays)."""
        wide = x if x.dtype == torch.float64 else x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * self.weight.to(x.dtype)


class Rotary:
    """Rotary position embedding with the target's parameters (scaling types included), or others."""

    def __init__(self, info: TargetInfo, head_dim: int, parameters: Mapping[str, Any] | None = None):
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=info.max_positions,
            rope_parameters=dict(parameters or info.rope_parameters),
        )
        self._embedding = LlamaRotaryEmbedding(config)

    def __call__(self, positions_BL: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each [B, 1, L, K]."""
        self._embedding = self._embedding.to(positions_BL.device)
        like = torch.empty(0, dtype=dtype, device=positions_BL.device)
        cos, sin = self._embedding(like, positions_BL)
        return cos[:, None], sin[:, None]


def rotate(x_BHLK: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Apply (cos, sin) in the half-split layout Llama checkpoints use."""
    cos, sin = rotary
    first, second = x_BHLK.chunk(2, -1)
    return x_BHLK * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    """Projections around a passed-in attention."""

    def __init__(self, shape: BlockShape, input_size: int):
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(input_size, shape.n_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, shape.n_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, shape.n_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.n_heads * shape.head_dim, shape.hidden, bias=False)

    def project(self, x_BLD: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (q_BHLK, k_BGLK, v_BGLK), the first two rotated."""

        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

        q, k, v = (split(project(proj, x_BLD)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return rotate(q, rotary), rotate(k, rotary), v

    def join(self, out_BHLK: Tensor) -> Tensor:
        """Put the heads side by side and project back to [B, L, D]."""
        return project(self.o_proj, out_BHLK.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: BlockShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x))."""
        return project(self.down_proj, F.silu(project(self.gate_proj, x)) * project(self.up_proj, x))
