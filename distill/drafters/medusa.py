# FOUNDER TO D: written while you seemed gone; review, test, add Medusa-2; yours now. Delete this line.
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
from distill.drafters.base import Drafter, DrafterState
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

    def __post_init__(self) -> None:
        for name in ("heads", "blocks"):
            if getattr(self, name) < 1:
                raise UserError(f"drafter.{name} must be >= 1, got {getattr(self, name)}")
        if self.head not in HEADS:
            raise UserError(
                f"drafter.head must be one of {', '.join(HEADS)}, got {self.head!r}.{did_you_mean(self.head, HEADS)}"
            )
        if (self.head == "pruned") != (self.draft_vocab_size is not None):
            raise UserError(
                "drafter.draft_vocab_size must be given with drafter.head=pruned and only then, got head "
                f"{self.head} and draft_vocab_size {self.draft_vocab_size}"
            )
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise UserError(f"drafter.draft_vocab_size must be >= 1, got {self.draft_vocab_size}")
        if not 0 < self.decay <= 1:
            raise UserError(f"drafter.decay must be in (0, 1], got {self.decay}")


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


@dataclass(kw_only=True)
class MedusaState(DrafterState):
    """Decoding state.

    Attributes:
        last_B1D: the target's hidden state before the root, which all heads read.
        logits_KB1W: what every head says, once a proposal has begun.
    """

    last_B1D: Tensor
    logits_KB1W: Tensor | None = None


class Medusa(Drafter):
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
            rows_WD = target.head_rows(ids.to(target.device)).float()
            outputs = 1 if config.head == "pruned" else config.heads
            self.lm_heads = nn.ModuleList(nn.Linear(size, len(ids), bias=False) for _ in range(outputs))
            for head in self.lm_heads:
                assert isinstance(head, nn.Linear)
                head.weight.data = rows_WD.clone()

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
        """K."""
        return self.config.heads

    @property
    def steps_per_head(self) -> int:
        """All of them, or one each."""
        return 1 if self.config.head == "own" else self.steps

    def kept_floats(self, share: float) -> float:
        """Input and output of every block, before and after its activation."""
        return self.config.heads * (3 * self.config.blocks + 1) * self.target.info.hidden_size

    def training_steps(self, batch: Batch, output: TargetOutput) -> list[StepPrediction]:
        """One prediction per head; head i speaks about t_{t+2+i}."""
        features_BLD = output.last_BLD.to(next(self.parameters()).dtype)
        return [
            StepPrediction(
                hidden_BLD=head(features_BLD),
                head=self.output_head(i),
                shift=2 + i,
                mask_BL=generated_run(batch, 1, 2 + i),
                weight=self.config.decay**i,
            )
            for i, head in enumerate(self.heads)
        ]

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
