"""Drafters that may train an adapter on the target beside themselves: Medusa-2 (arXiv:2401.10774, 2.2.2 and 2.3).

With rank r > 0 the target runs a second time on every training batch, adapter on, with gradients. The draft heads read
that last hidden state g, and the total is

    base_weight * D(p || p')  +  heads_weight * ramp * sum_i decay^i * D(p || q_i)

with p the target's own distribution (adapter off), p' the adapted one's next token, q_i what head i says, D the
configured loss (``ce`` and ``kl`` have the gradient of KL(p || p')): the first term keeps the target's distribution.
ramp = sin(pi/2 * (step + 1) / steps), so the heads' large early losses do not push the target about.

What decodes is another model: the target with the adapter merged. Lossless means relative to that one.
"""

import copy
import math
from dataclasses import fields
from typing import Any

from torch import Tensor

from distill.alignment import generated_run
from distill.drafters.base import Drafter, ParamGroup
from distill.errors import UserError
from distill.target import Target
from distill.target.adapter import Adapter, linear_layers
from distill.types import Batch, StepPrediction, TargetOutput
from distill.vocab import DraftVocab


def check(config: Any) -> None:
    """Refuse options of an adapter that train nothing.

    Raises:
        UserError: one is out of its range, or given without an adapter.
    """
    checks = {
        "lora_rank must lie between 0 and 4096": 0 <= config.lora_rank <= 4096,
        "lora_alpha must be above 0": config.lora_alpha > 0,
        "adapter_lr must be above 0 and finite": 0 < config.adapter_lr < math.inf,
        "adapter_warmup must lie in [0, 1]": 0 <= config.adapter_warmup <= 1,
        "base_weight must be above 0 and finite": 0 < config.base_weight < math.inf,
        "heads_weight must be above 0 and finite": 0 < config.heads_weight < math.inf,
    }
    for sentence, fine in checks.items():
        if not fine:
            raise UserError(f"drafter.{sentence}, got {getattr(config, sentence.split()[0])}")
    usual = {field.name: field.default for field in fields(config)}
    for name in ("lora_alpha", "adapter_lr", "adapter_warmup", "base_weight", "heads_weight"):
        if not config.lora_rank and getattr(config, name) != usual[name]:
            raise UserError(
                f"drafter.{name} must be {usual[name]} without an adapter, where it changes nothing, got "
                f"{getattr(config, name)}; give drafter.lora_rank"
            )


class Adapting(Drafter):
    """Base of drafters whose heads read the target's last hidden state, which an adapter may change."""

    adapter: Adapter | None

    def __init__(self, config: Any, target: Target, vocab: DraftVocab | None = None):
        super().__init__(config, target, vocab)
        self.adapter = None
        if config.lora_rank:
            self.adapter = Adapter(target, rank=config.lora_rank, alpha=config.lora_alpha)
        self._ramp = 1.0

    @classmethod
    def check_target(cls, config: Any, target: Target) -> None:
        """An adapter needs layers it can change."""
        if config.lora_rank:
            linear_layers(target)

    @property
    def learns_adapter(self) -> bool:
        """Whether the target is still the original one, beside which the adapter is trained."""
        return self.adapter is not None and self.target.base is None

    def read(self, batch: Batch, output: TargetOutput) -> tuple[Tensor, list[StepPrediction]]:
        """What the heads read on a packed batch [B, L, D], and the term that keeps the target's distribution."""
        if self.adapter is None or not self.learns_adapter:
            return output.last_BLD, []
        last_BLD = self.adapter(batch)
        own = StepPrediction(
            hidden_BLD=last_BLD,
            head=self.target.draft_head,
            shift=1,
            mask_BL=generated_run(batch, 1, 1),
            weight=self.config.base_weight,
            drafted=False,
        )
        return last_BLD, [own]

    def head_weight(self, i: int) -> float:
        """Weight of head i in the total."""
        weight = self.config.decay**i
        return self.config.heads_weight * self._ramp * weight if self.learns_adapter else weight

    def on_step(self, step: int, max_steps: int) -> None:
        """Let the heads' weight rise."""
        self._ramp = math.sin(math.pi / 2 * min(1.0, (step + 1) / max_steps))

    def param_groups(self) -> list[ParamGroup]:
        """The heads, and the adapter at a lower rate that rises later."""
        if self.adapter is None:
            return super().param_groups()
        adapters = {id(p) for p in self.adapter.parameters()}
        return [
            ParamGroup(parameters=[p for p in self.parameters() if id(p) not in adapters]),
            ParamGroup(
                parameters=list(self.adapter.parameters()),
                lr=self.config.adapter_lr,
                warmup=self.config.adapter_warmup,
            ),
        ]

    def adapter_floats(self) -> float:
        """Numbers per token that autograd keeps of the adapted target's forward, for the memory estimate."""
        if not self.learns_adapter:
            return 0.0
        info = self.target.info
        width, heads = info.hidden_size, (info.n_heads, info.n_kv_heads)
        query, key = (n * info.head_dim for n in heads)
        return info.n_layers * (5 * width + 3 * query + 2 * key + 4 * info.intermediate_size) + width

    def decoding(self) -> Drafter:
        """A drafter with the same weights and the adapted target."""
        if self.adapter is None or not self.learns_adapter:
            return self
        copied = copy.copy(self)
        copied._target = [self.target.adapted(self.adapter.deltas(), self.adapter.digest())]
        copied._modules = {**self._modules, "adapter": self.adapter.alone()}
        return copied
