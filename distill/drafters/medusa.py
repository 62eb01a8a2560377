"""MEDUSA (arXiv:2401.10774): heads that read one hidden state of the target and speak about tokens further on.

With f_t the target's last hidden state (after the final norm), head i = 0..K-1 is

    x = f_t,   x <- x + SiLU(W x + b)  for each of its blocks,   q = output head(x)

and speaks about t_{t+2+i}: the target's own head already says t_{t+1}. Weights and biases start at zero, so every head
starts as the target's own next-token head. All nodes of one depth share their logits: a head does not know what was
drafted before it (Hydra heads do).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.alignment import generated_run
from distill.config import opt
from distill.drafters.adapting import Adapting, check
from distill.drafters.base import DrafterState, check_sizes
from distill.errors import UserError, did_you_mean
from distill.products import project
from distill.target import Target, TargetInfo
from distill.types import Batch, Frontier, StepPrediction, TargetOutput
from distill.vocab import DraftVocab

HEADS = ("shared", "own", "pruned")


@dataclass(kw_only=True)
class MedusaConfig:
    """Every flag is written into checkpoints."""

    name: str = opt("medusa", "drafter name")
    heads: int = opt(4, "heads K; also how deep a tree can be")
    blocks: int = opt(1, "residual blocks of a head")
    head: str = opt(
        "shared", "output: shared (the target's), own (one for each head) or pruned (one for all, fewer tokens)"
    )
    draft_vocab_size: int | None = opt(None, "pruned: kept target tokens, at most the target's vocabulary")
    decay: float = opt(0.8, "weight of head i is decay ** i")
    lora_rank: int = opt(0, "Medusa-2: rank of an adapter on the target (needs the extra lora); 0: the target stays")
    lora_alpha: int = opt(16, "lora: what the adapter says is scaled by lora_alpha / lora_rank")
    adapter_lr: float = opt(0.25, "lora: factor on optim.lr for the adapter")
    adapter_warmup: float = opt(0.1, "lora: part of the run over which the adapter's rate also rises")
    base_weight: float = opt(1.0, "lora: weight of the term that keeps the target's distribution")
    heads_weight: float = opt(0.2, "lora: weight of the heads beside it at the end of the run, to which it rises")

    def __post_init__(self) -> None:
        for name in ("heads", "blocks"):
            if getattr(self, name) < 1:
                raise UserError(f"drafter.{name} must be >= 1, got {getattr(self, name)}")
        check_sizes(self, "heads", "blocks")
        if self.head not in HEADS:
            raise UserError(
                f"drafter.head must be one of {', '.join(HEADS)}, got {self.head!r}.{did_you_mean(self.head, HEADS)}"
            )
        if (self.head == "pruned") != (self.draft_vocab_size is not None):
            raise UserError(
                "drafter.draft_vocab_size must be given with drafter.head=pruned and only then, got head "
                f"{self.head} and draft_vocab_size {self.draft_vocab_size}"
            )
        if self.draft_vocab_size is not None and self.draft_vocab_size < 2:
            raise UserError(f"drafter.draft_vocab_size must be >= 2, got {self.draft_vocab_size}")
        if not 0 < self.decay <= 1:
            raise UserError(f"drafter.decay must be in (0, 1], got {self.decay}")
        check(self)
        if self.lora_rank and self.head == "pruned":
            raise UserError(
                "drafter.head must be shared or own with drafter.lora_rank, since what keeps the target's distribution "
                "needs its whole vocabulary, got pruned"
            )


class ResBlock(nn.Module):
    """x + SiLU(W x + b), the identity at the start."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        return x + F.silu(project(self.linear, x))


class Scaled(nn.Sequential):
    """A linear layer, then what the target does to its own logits: scale, soft-capping."""

    def __init__(self, linear: nn.Linear, target: Target):
        super().__init__(linear)
        self._scale = target.scale_logits

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., W]."""
        return self._scale(super().forward(x))


def own_head(target: Target, ids: Tensor) -> nn.Module:
    """A trained output head that starts as the target's own for ``ids`` [W]."""
    bias = target.head_bias(ids)
    linear = nn.Linear(target.info.hidden_size, len(ids), bias=bias is not None)
    linear.weight.data = target.head_rows(ids).to(linear.weight)
    if bias is not None:
        linear.bias.data = bias.to(linear.bias)
    # A bare layer where it says the same: losses and kernels know it.
    return linear if isinstance(target.draft_head, nn.Module) else Scaled(linear, target)


@dataclass(kw_only=True)
class MedusaState(DrafterState):
    """Decoding state.

    Attributes:
        last_B1D: the target's hidden state before the root, which all heads read.
        logits_KB1W: what every head says, once a proposal has begun.
    """

    last_B1D: Tensor
    logits_KB1W: Tensor | None = None


class Medusa(Adapting):
    """K heads on the target's last hidden state."""

    name = "medusa"
    Config = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig, target: Target, vocab: DraftVocab | None = None):
        assert (vocab is not None) == (config.head == "pruned"), "pruned heads come with their vocabulary"
        super().__init__(config, target, vocab)
        size = target.info.hidden_size
        self.max_depth = config.heads
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(size) for _ in range(config.blocks))) for _ in range(config.heads)
        )
        if config.head != "shared":
            ids = torch.arange(target.info.vocab_size) if vocab is None else vocab.target_ids
            outputs = 1 if config.head == "pruned" else config.heads
            self.lm_heads = nn.ModuleList(own_head(target, ids) for _ in range(outputs))

    @classmethod
    def taps(cls, config: MedusaConfig, info: TargetInfo) -> tuple[int, ...]:
        """None: the heads read what the target's own head reads."""
        return ()

    def output_head(self, i: int) -> Callable[[Tensor], Tensor]:
        """What turns head i's hidden states into logits."""
        if self.config.head == "shared":
            return self.target.draft_head
        return self.lm_heads[0 if self.config.head == "pruned" else i]

    # -- training

    @property
    def steps(self) -> int:
        """One per head, and the adapted target's own next token."""
        return self.config.heads + self.learns_adapter

    @property
    def steps_per_head(self) -> int:
        """All of them, or one each."""
        return 1 if self.config.head == "own" else self.steps

    def kept_floats(self, share: float) -> float:
        """Input and output of every block, before and after its activation; what an adapter needs."""
        heads = self.config.heads * (3 * self.config.blocks + 1) * self.target.info.hidden_size
        return heads + self.adapter_floats()

    def training_steps(self, batch: Batch, output: TargetOutput) -> list[StepPrediction]:
        """One prediction per head; head i speaks about t_{t+2+i}. With an adapter, its own next token comes last."""
        last_BLD, own = self.read(batch, output)
        features_BLD = last_BLD.to(next(self.parameters()).dtype)
        drafted = [
            StepPrediction(
                hidden_BLD=head(features_BLD),
                head=self.output_head(i),
                shift=2 + i,
                mask_BL=generated_run(batch, 1, 2 + i),
                weight=self.head_weight(i),
            )
            for i, head in enumerate(self.heads)
        ]
        return drafted + own

    # -- drafting

    def new_state(self, batch_size: int, capacity: int) -> MedusaState:
        """Empty state."""
        weight = next(self.parameters())
        size = self.target.info.hidden_size
        return MedusaState(
            cache=None, last_B1D=torch.zeros(batch_size, 1, size, dtype=weight.dtype, device=weight.device)
        )

    def extend(
        self,
        state: Any,
        ids_BL: Tensor,
        next_B: Tensor,
        output: TargetOutput,
        n_B: Tensor,
        *,
        longest: int,
    ) -> None:
        """Keep the hidden state of the last valid position."""
        last_B11 = (n_B - 1).clamp(min=0)[:, None, None]
        picked_B1D = output.last_BLD.gather(1, last_B11.expand(-1, -1, output.last_BLD.shape[2]))
        state.last_B1D = torch.where((n_B > 0)[:, None, None], picked_B1D.to(state.last_B1D.dtype), state.last_B1D)

    def step(self, state: Any, frontier: Frontier) -> Tensor:
        """Logits_B1W of head ``frontier.depth``, the same for all nodes."""
        if frontier.depth == 0:
            # All heads at once: the output heads' weights are read once where they are shared.
            hidden_KB1D = torch.stack([head(state.last_B1D) for head in self.heads])
            if self.config.head == "shared":
                state.logits_KB1W = self.target_logits(hidden_KB1D)
            elif self.config.head == "pruned":
                state.logits_KB1W = self.lm_heads[0](hidden_KB1D)
            else:
                state.logits_KB1W = torch.stack(
                    [head(hidden) for head, hidden in zip(self.lm_heads, hidden_KB1D, strict=True)]
                )
        return state.logits_KB1W[frontier.depth]

    def rollback(self, state: Any) -> None:
        """Forget what the heads said."""
        state.logits_KB1W = None
