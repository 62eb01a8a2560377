"""EAGLE-1 (arXiv:2401.15077): the next feature from the present one and the next token, read by the target's own head.

At position i and step k, with f the target's last hidden state (after the final norm),

    x   = fc([ e(t_{i+1+k}) ; g ])              2D -> D, embedding first; g = f_i at step 0
    out = decoder layers(x)                     the first has no input norm; no final norm
    q   = target head(out),   next g = out      out should equal f_{i+1+k} and speaks about t_{i+2+k}

and the loss of a position is ``feature_weight`` smooth-L1(out, f_{i+1+k}), meaned over D, plus ``token_weight`` times
the loss between p and q. The published method has one step; more (HASS, arXiv:2408.15766) train on the drafter's own
features, the gradient cut between them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distill import alignment
from distill.config import opt
from distill.drafters.base import check_sizes
from distill.drafters.blocks import MLP, Attend, Attention, BlockShape, RMSNorm, kept, recomputed
from distill.drafters.fused_step import Angles, FusedLayer, FusedStep, packed, packed_norm
from distill.drafters.recurrent import Recurrent, block_shape
from distill.errors import UserError
from distill.products import project
from distill.target import Target, TargetInfo
from distill.types import Batch, StepPrediction, TargetOutput
from distill.vocab import DraftVocab

NOISE_LENGTH = 512
"""Tokens of a text at which the published noise has the half-width ``noise``; longer texts get less."""


@dataclass(kw_only=True)
class Eagle1Config:
    """Every flag is written into checkpoints; null sizes follow the target."""

    name: str = opt("eagle1", "drafter name")
    num_layers: int = opt(1, "decoder layers; engines expect one")
    steps: int = opt(1, "1: as published; more: HASS, trained on its own features")
    step_decay: float = opt(1.0, "weight of step k is step_decay ** k")
    feature_weight: float = opt(1.0, "weight of the feature regression")
    token_weight: float = opt(0.1, "weight of the loss on tokens")
    noise: float = opt(0.1, "half-width of the uniform noise on features in training, for 512 tokens; 0: none")
    fc_bias: bool = opt(False, "bias of fc; engines drop it")
    intermediate_size: int | None = opt(None, "MLP width; null: the target's")
    rope: dict[str, Any] | None = opt(
        None, "rotary parameters of a drafter that was trained with others than the target's"
    )

    def __post_init__(self) -> None:
        for name in ("num_layers", "steps"):
            if getattr(self, name) < 1:
                raise UserError(f"drafter.{name} must be >= 1, got {getattr(self, name)}")
        check_sizes(self, "num_layers", "steps", "intermediate_size")
        for name in ("feature_weight", "token_weight", "noise"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"drafter.{name} must be a finite number >= 0, got {getattr(self, name)}")
        if self.feature_weight == self.token_weight == 0:
            raise UserError("drafter.feature_weight or drafter.token_weight must be above 0, got 0 for both")
        if not 0 < self.step_decay <= 1:
            raise UserError(f"drafter.step_decay must be in (0, 1], got {self.step_decay}")
        if self.steps == 1 and self.step_decay != 1:
            raise UserError(
                f"drafter.step_decay must be 1 with drafter.steps=1, where it changes nothing, got {self.step_decay}"
            )
        if self.intermediate_size is not None and self.intermediate_size < 1:
            raise UserError(
                f"drafter.intermediate_size must be >= 1, got {self.intermediate_size}; null takes the target's"
            )


class Layer(nn.Module):
    """A Llama decoder layer, the first one without its input norm."""

    def __init__(self, shape: BlockShape, *, first: bool):
        super().__init__()
        if not first:
            self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape, input_size=shape.hidden)
        self.mlp = MLP(shape)
        self.first = first
        self.recompute = False

    def forward(self, x_BLD: Tensor, rotary: tuple[Tensor, Tensor], attend_: Attend) -> Tensor:
        """Return the layer's output."""
        run = recomputed if self.recompute and torch.is_grad_enabled() else kept
        q, k, v = run(self._before, x_BLD, rotary)
        h = x_BLD + self.self_attn.join(attend_(q, k, v))
        return run(self._after, h)

    def _before(self, x_BLD: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(x_BLD if self.first else self.input_layernorm(x_BLD), rotary)

    def _after(self, h_BLD: Tensor) -> Tensor:
        return h_BLD + self.mlp(self.post_attention_layernorm(h_BLD))


class Eagle1(Recurrent):
    """The EAGLE-1 drafter: its own weights are fc and the decoder layers; embedding and head are the target's."""

    name = "eagle1"
    recomputes = True
    Config = Eagle1Config
    config: Eagle1Config
    detach = True

    def __init__(self, config: Eagle1Config, target: Target, vocab: DraftVocab | None = None):
        assert vocab is None, "EAGLE-1 speaks through the target's head"
        shape = block_shape(target.info, config.intermediate_size)
        super().__init__(config, target, None, shape)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList(Layer(shape, first=index == 0) for index in range(config.num_layers))

    @classmethod
    def taps(cls, config: Eagle1Config, info: TargetInfo) -> tuple[int, ...]:
        """None: it reads what the head reads."""
        return ()

    # -- the step shared by training and drafting

    def features(self, output: TargetOutput) -> Tensor:
        """The target's last hidden state."""
        return output.last_BLD.to(self.fc.weight.dtype)

    def run(self, ids_BL: Tensor, g_BLD: Tensor, positions_BL: Tensor, attends: Sequence[Attend]) -> Tensor:
        """The predicted features."""
        x_BLD = project(self.fc, torch.cat([self.embedded(ids_BL, g_BLD.dtype), g_BLD], dim=-1))
        rotary = self.rotary(positions_BL, x_BLD.dtype)  # under autocast not the features' precision
        for layer, attend_ in zip(self.layers, attends, strict=True):
            x_BLD = layer(x_BLD, rotary, attend_)
        return x_BLD

    def draft_logits(self, out_BFD: Tensor) -> Tensor:
        """The target's own head."""
        return self.target_logits(out_BFD)

    def fuse(self, angles: Angles) -> FusedStep:
        """The layers for fast decoding."""
        fc = packed(self.fc)
        layers: list[Any] = list(self.layers)

        def enter(embeds_BND: Tensor, g_BND: Tensor) -> tuple[Tensor, Tensor]:
            x = fc(torch.cat([embeds_BND, g_BND], dim=-1))
            return x, x

        return FusedStep(
            self.shape,
            angles,
            enter,
            [FusedLayer(layer.self_attn, layer.post_attention_layernorm, layer.mlp) for layer in layers],
            [packed_norm(layer.input_layernorm) for layer in layers[1:]],
        )

    # -- training

    def recompute_activations(self, on: bool) -> None:
        """Keep what attention and the loss read, and compute the rest of the layers again in the backward pass."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.recompute = on

    @property
    def steps(self) -> int:
        """Steps trained on."""
        return self.config.steps

    def kept_floats(self, share: float) -> float:
        """What a position keeps for attention and loss at every step, and, where it counts, for the rest."""
        wide, narrow = self.shape.n_heads * self.shape.head_dim, self.shape.n_kv_heads * self.shape.head_dim
        hidden, layers = self.shape.hidden, len(self.layers)
        attention = hidden + 2 * wide + 2 * narrow
        inside = 0.0 if self.layers[0].recompute else 3 * hidden + 4 * self.shape.intermediate
        chosen = 1 + (self.steps - 1) * share
        # The feature loss keeps its two operands and their difference in full precision.
        return self.steps * (layers * attention + 3 * hidden) + chosen * (
            3 * hidden + layers * (wide + hidden + inside)
        )

    def backward_floats(self) -> float:
        """The inside of a layer, computed again, or its gradients alone."""
        gradients = 2 * self.shape.intermediate
        return gradients + (3 * self.shape.hidden + 4 * self.shape.intermediate) * bool(self.layers[0].recompute)

    def noisy(self, features_BLD: Tensor, batch: Batch) -> Tensor:
        """Add the published noise to every feature, in training only: uniform, independent for every number.

        For a document of L tokens it is (U(0, 1) - 0.5) * 2 * ``noise`` * 512 / L, so of half-width ``noise`` at 512,
        and never wider: the formula was made for texts near 2048 tokens, and would drown a few words.
        """
        if not self.training or self.config.noise == 0:
            return features_BLD
        doc_BL = batch.doc_BL.clamp(min=0)  # padding takes the first document's width; nobody reads it
        counted_BL = (batch.doc_BL >= 0).to(features_BLD.dtype)
        length_BL = torch.zeros_like(counted_BL).scatter_add_(1, doc_BL, counted_BL).gather(1, doc_BL)
        width_BL = self.config.noise * (NOISE_LENGTH / length_BL).clamp(max=1)
        return features_BLD + (2 * torch.rand_like(features_BLD) - 1) * width_BL[..., None]

    def training_steps(self, batch: Batch, output: TargetOutput) -> list[StepPrediction]:
        """Two predictions per step: the feature f_{i+1+k} and the token t_{i+2+k}."""
        config = self.config
        outs, rows, masks = self.rollout_steps(batch, self.noisy(self.features(output), batch), steps=config.steps)
        found = []
        for k, (out, mask) in enumerate(zip(outs, masks, strict=True)):
            hidden, weight = out if k == 0 else rows.put(out), config.step_decay**k
            follows = alignment.shift_left(output.last_BLD, 1 + k)
            if config.feature_weight:
                found.append(
                    StepPrediction(
                        hidden_BLD=hidden,
                        head=self.target.draft_head,
                        shift=1 + k,
                        mask_BL=mask,
                        weight=weight * config.feature_weight,
                        kind="feature",
                        feature_target_BLD=follows,
                    )
                )
            # Without weight it still tells how well the drafter drafts.
            found.append(
                StepPrediction(
                    hidden_BLD=hidden,
                    head=self.target.draft_head,
                    shift=2 + k,
                    mask_BL=mask,
                    weight=weight * config.token_weight,
                )
            )
        return found
