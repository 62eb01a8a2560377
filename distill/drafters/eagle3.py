"""EAGLE-3 (arXiv:2503.01840): one decoder layer over fused target features, trained on its own drafts.

At position i and step k the layer reads the embedding of t_{i+1+k} and a feature g: the fused taps of the
target at step 0, its own previous output afterwards (training-time test). It speaks about t_{i+2+k}.

    a   = [ input_layernorm(e(t_{i+1+k})) ; hidden_norm(g) ]        2D, embedding first
    h   = g + attention(a)                                          residual un-normed unless norm_before_residual
    out = h + mlp(post_attention_layernorm(h))
    q   = lm_head(norm(out)),   next g = out  (norm(out) with EAGLE-3.1's norm_output)

What is shared with EAGLE-1, attention over steps included, is in ``recurrent.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distill.config import opt
from distill.drafters.base import check_sizes
from distill.drafters.blocks import MLP, Attend, Attention, BlockShape, RMSNorm, kept, recomputed
from distill.drafters.fused_step import Angles, FusedLayer, FusedStep, packed_norm
from distill.drafters.recurrent import Recurrent, block_shape
from distill.errors import UserError
from distill.products import project
from distill.target import Target, TargetInfo
from distill.types import Batch, StepPrediction, TargetOutput
from distill.vocab import DraftVocab


@dataclass(kw_only=True)
class Eagle3Config:
    """Every flag is written into checkpoints; null sizes follow the target."""

    name: str = opt("eagle3", "drafter name")
    ttt_steps: int = opt(7, "training-time-test steps K; also how deep a draft was trained for")
    step_decay: float = opt(0.8, "weight of step k is step_decay ** k")
    draft_vocab_size: int = opt(32000, "kept target tokens, at most the target's vocabulary")
    taps: list[int] | None = opt(None, "hidden states entering these layers are fused; null: 2, n/2, n-3")
    intermediate_size: int | None = opt(None, "MLP width; null: the target's")
    rope: dict[str, Any] | None = opt(
        None, "rotary parameters of a drafter that was trained with others than the target's"
    )
    norm_before_residual: bool = opt(False, "residual carries hidden_norm(g) instead of g")
    fc_norm: bool = opt(False, "EAGLE-3.1: a norm for each tap before they are fused")
    norm_output: bool = opt(False, "EAGLE-3.1: feed back norm(out) instead of out")
    head_init: str = opt("target", "start of the draft head: target (rows of the target's head) or random")

    def __post_init__(self) -> None:
        if self.ttt_steps < 1:
            raise UserError(f"drafter.ttt_steps must be >= 1, got {self.ttt_steps}")
        if self.draft_vocab_size < 2:
            raise UserError(f"drafter.draft_vocab_size must be >= 2, got {self.draft_vocab_size}")
        if self.intermediate_size is not None and self.intermediate_size < 1:
            raise UserError(
                f"drafter.intermediate_size must be >= 1, got {self.intermediate_size}; null takes the target's"
            )
        check_sizes(self, "ttt_steps", "intermediate_size")
        if not 0 < self.step_decay <= 1:
            raise UserError(f"drafter.step_decay must be in (0, 1], got {self.step_decay}")
        if self.head_init not in ("target", "random"):
            raise UserError(f"drafter.head_init must be target or random, got {self.head_init!r}")


class Layer(nn.Module):
    """The drafter's decoder layer; its attention reads twice the width."""

    def __init__(self, shape: BlockShape, norm_before_residual: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape, input_size=2 * shape.hidden)
        self.mlp = MLP(shape)
        self.norm_before_residual = norm_before_residual
        self.recompute = False

    def forward(self, embeds_BLD: Tensor, g_BLD: Tensor, rotary: tuple[Tensor, Tensor], attend_: Attend) -> Tensor:
        """Return out_BLD, before the final norm."""
        run = recomputed if self.recompute and torch.is_grad_enabled() else kept
        residual, q, k, v = run(self._before, embeds_BLD, g_BLD, rotary)
        h = residual + self.self_attn.join(attend_(q, k, v))
        return run(self._after, h)

    def _before(self, embeds_BLD: Tensor, g_BLD: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        normed = self.hidden_norm(g_BLD)
        residual = normed if self.norm_before_residual else g_BLD
        x = torch.cat([self.input_layernorm(embeds_BLD), normed], dim=-1)
        return residual, *self.self_attn.project(x, rotary)

    def _after(self, h_BLD: Tensor) -> Tensor:
        return h_BLD + self.mlp(self.post_attention_layernorm(h_BLD))


class Eagle3(Recurrent):
    """The EAGLE-3 drafter."""

    name = "eagle3"
    recomputes = True
    Config = Eagle3Config
    config: Eagle3Config
    vocab: DraftVocab

    def __init__(self, config: Eagle3Config, target: Target, vocab: DraftVocab):
        info = target.info
        shape = block_shape(info, config.intermediate_size)
        super().__init__(config, target, vocab, shape)
        self._taps = self.taps(config, info)
        self.fc = nn.Linear(len(self._taps) * shape.hidden, shape.hidden, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(shape.hidden, shape.eps) for _ in self._taps)
        self.layers = nn.ModuleList([Layer(shape, config.norm_before_residual)])
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, vocab.size, bias=False)
        if config.head_init == "target":
            rows = target.head_rows(vocab.target_ids.to(target.device))
            self.lm_head.weight.data.copy_(rows)

    @classmethod
    def taps(cls, config: Eagle3Config, info: TargetInfo) -> tuple[int, ...]:
        """Low, middle and high features; on shallow targets the last three distinct hidden states."""
        n = info.n_layers
        if config.taps is not None:
            chosen = tuple(config.taps)
            if sorted(set(chosen)) != list(chosen) or not all(0 <= k <= n for k in chosen) or not chosen:
                raise UserError(
                    f"drafter.taps must be ascending, distinct and between 0 and {n} for this target, "
                    f"got {list(chosen)}"
                )
            return chosen
        default = (2, n // 2, n - 3)
        return default if default[0] < default[1] < default[2] else tuple(range(max(0, n - 3), n))

    # -- the step shared by training and drafting

    def features(self, output: TargetOutput) -> Tensor:
        """Fused taps, low to high."""
        taps = [output.taps[k].to(self.fc.weight.dtype) for k in self._taps]
        if self.config.fc_norm:
            taps = [norm(x) for norm, x in zip(self.fc_norm, taps, strict=True)]
        return project(self.fc, torch.cat(taps, dim=-1))

    @property
    def _decoder_layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def run(self, ids_BL: Tensor, g_BLD: Tensor, positions_BL: Tensor, attends: Sequence[Attend]) -> Tensor:
        """The layer's output, before the final norm."""
        rotary = self.rotary(positions_BL, g_BLD.dtype)
        return self.layers[0](self.embedded(ids_BL, g_BLD.dtype), g_BLD, rotary, attends[0])

    def feedback(self, out_BLD: Tensor) -> Tensor:
        """The output, normed with EAGLE-3.1's ``norm_output``."""
        return self.norm(out_BLD) if self.config.norm_output else out_BLD

    def draft_logits(self, out_BFD: Tensor) -> Tensor:
        """The draft head over the final norm."""
        return self.lm_head(self.norm(out_BFD))

    def fuse(self, angles: Angles) -> FusedStep:
        """The layer for fast decoding."""
        layer = self._decoder_layer
        norm_e, norm_g = packed_norm(layer.input_layernorm), packed_norm(layer.hidden_norm)

        def enter(embeds_BND: Tensor, g_BND: Tensor) -> tuple[Tensor, Tensor]:
            normed = norm_g(g_BND)
            x = torch.cat([norm_e(embeds_BND), normed], dim=-1)
            return x, normed if layer.norm_before_residual else g_BND

        return FusedStep(
            self.shape, angles, enter, [FusedLayer(layer.self_attn, layer.post_attention_layernorm, layer.mlp)]
        )

    # -- training

    def recompute_activations(self, on: bool) -> None:
        """Keep what attention and the loss read, and compute the rest of the layer again in the backward pass."""
        self._decoder_layer.recompute = on

    @property
    def steps(self) -> int:
        """K."""
        return self.config.ttt_steps

    def kept_floats(self, share: float) -> float:
        """What a position keeps for attention and loss at every step, and, where it counts, for the rest."""
        wide, narrow = self.shape.n_heads * self.shape.head_dim, self.shape.n_kv_heads * self.shape.head_dim
        hidden, steps = self.shape.hidden, self.steps
        attention = hidden + 2 * wide + 2 * narrow
        joined = 5 * hidden + wide
        layer = 4 * hidden + 4 * self.shape.intermediate
        chosen = 1 + (steps - 1) * share
        inside = 0.0 if self._decoder_layer.recompute else layer
        return len(self._taps) * hidden + steps * attention + chosen * (joined + inside)

    def backward_floats(self) -> float:
        """The inside of the layer, computed again, or its gradients alone."""
        gradients = 2 * self.shape.intermediate
        return gradients + (4 * self.shape.hidden + 4 * self.shape.intermediate) * self._decoder_layer.recompute

    def training_steps(self, batch: Batch, output: TargetOutput) -> list[StepPrediction]:
        """One prediction per training-time-test step; step k speaks about token t_{i+2+k}.

        Hidden states are 0 where a later step does not count.
        """
        outs, rows, masks = self.rollout_steps(batch, self.features(output), steps=self.config.ttt_steps)
        hiddens = [self.norm(out) if k == 0 else rows.put(self.norm(out)) for k, out in enumerate(outs)]
        return [
            StepPrediction(
                hidden_BLD=hidden, head=self.lm_head, shift=2 + k, mask_BL=mask, weight=self.config.step_decay**k
            )
            for k, (hidden, mask) in enumerate(zip(hiddens, masks, strict=True))
        ]
