"""How long a run is and what its learning rate does: both are fixed before the first step.

``trainer.max_time`` becomes a number of steps once, by measuring; the number is kept in the run folder. Schedule
and resume are exact because nothing reads a clock afterwards.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn, optim

from distill.config import opt
from distill.drafters.base import Drafter, ParamGroup
from distill.errors import UserError
from distill.files import write_atomic

VALIDATIONS, DECODES = 10, 4
"""How often a run validates and decodes at most when the config leaves it open."""

SHARE = 0.1
"""Part of ``max_time`` that validations, and as much again that decodes, may take when the config leaves it open."""


@dataclass(kw_only=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = opt(3e-4, "peak learning rate")
    betas: tuple[float, float] = opt((0.9, 0.95), "AdamW's two betas")
    weight_decay: float = opt(0.0, "decay of the matrices (norms and biases never decay)")
    warmup: float = opt(0.03, "linear warm-up: a share of all steps when below 1, else a number of steps")
    schedule: Literal["cosine", "linear", "constant"] = opt("cosine", "shape after the warm-up")
    min_lr: float = opt(0.1, "learning rate at the last step, as a share of the peak")
    clip: float = opt(0.5, "largest gradient norm; 0 clips nothing")

    def __post_init__(self) -> None:
        """Refuse values that train nothing."""
        checks = {
            "optim.lr must be above 0": (self.lr, self.lr > 0),
            "optim.betas must lie in [0, 1)": (self.betas, all(0 <= beta < 1 for beta in self.betas)),
            "optim.weight_decay must not be negative": (self.weight_decay, self.weight_decay >= 0),
            "optim.warmup must not be negative": (self.warmup, self.warmup >= 0),
            "optim.min_lr must lie in [0, 1]": (self.min_lr, 0 <= self.min_lr <= 1),
            "optim.clip must not be negative": (self.clip, self.clip >= 0),
        }
        for sentence, (value, fine) in checks.items():
            if not fine:
                raise UserError(f"{sentence}, got {value}")


def lr_scale(step: int, *, max_steps: int, config: OptimConfig) -> float:
    """Return the share of the peak learning rate that optimiser step ``step`` (from 0) uses.

    Linear from 1/w to 1 over the w warm-up steps, then down to ``min_lr``, which the last step uses exactly.
    """
    warmup = round(config.warmup * max_steps) if config.warmup < 1 else int(config.warmup)
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    done = min((step - warmup + 1) / max(max_steps - warmup, 1), 1.0)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (1 - config.min_lr) * left


def group_scale(step: int, *, max_steps: int, config: OptimConfig, group: ParamGroup) -> float:
    """As ``lr_scale``, for one group of parameters with a factor and a warm-up of its own."""
    risen = min(1.0, (step + 1) / max(group.warmup * max_steps, 1.0))
    return group.lr * risen * lr_scale(step, max_steps=max_steps, config=config)


def build_optimizer(
    module: nn.Module, config: OptimConfig, *, max_steps: int
) -> tuple[optim.AdamW, optim.lr_scheduler.LambdaLR]:
    """Return AdamW over the trainable parameters of ``module`` and its schedule, to be stepped once per step."""
    whole = ParamGroup(parameters=[p for p in module.parameters() if p.requires_grad])
    groups: list[dict[str, Any]] = []
    scales: list[Callable[[int], float]] = []
    for group in module.param_groups() if isinstance(module, Drafter) else [whole]:

        def scale(step: int, group: ParamGroup = group) -> float:
            return group_scale(step, max_steps=max_steps, config=config, group=group)

        matrices = [p for p in group.parameters if p.ndim >= 2]
        others = [p for p in group.parameters if p.ndim < 2]
        for parameters, decay in ((matrices, config.weight_decay), (others, 0.0)):
            if parameters:
                groups.append({"params": parameters, "weight_decay": decay})
                scales.append(scale)
    adamw = optim.AdamW(groups, lr=config.lr, betas=config.betas)
    return adamw, optim.lr_scheduler.LambdaLR(adamw, scales)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The frozen length of a run and the steps at which something besides training happens.

    Attributes:
        max_steps: optimiser steps.
        val_every, checkpoint_every, decode_every: in optimiser steps; each also happens after the last step.
        seconds: what was measured (``step``, ``val``, ``checkpoint``, ``decode``); empty without ``max_time``.
    """

    max_steps: int
    val_every: int
    checkpoint_every: int
    decode_every: int
    seconds: Mapping[str, float]

    def due(self, every: int, step: int) -> bool:
        """Whether something that happens every ``every`` steps happens after step number ``step`` (from 1)."""
        return step % every == 0 or step == self.max_steps

    def save(self, path: Path) -> None:
        """Write the plan; a resumed run reads it instead of measuring again."""
        write_atomic(path, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Plan | None":
        """Read the plan of an interrupted run, None if there is none."""
        if not path.is_file():
            return None
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path} must be the plan of a run, got {error}; remove the run folder") from error


def make_plan(
    *,
    max_steps: int | None,
    max_seconds: float | None,
    every: Mapping[str, int | None],
    seconds: Mapping[str, float],
) -> Plan:
    """Fix the number of steps and the intervals.

    Args:
        max_steps: upper limit, None without one.
        max_seconds: time for training, validation, checkpoints and decoding together; None without a limit.
        every: steps between two of ``val``, ``checkpoint`` and ``decode``; None spreads a fixed number over the run
            (checkpoints go with validations), fewer where they would take more than ``SHARE`` of the time.
        seconds: measured cost of one ``step``, ``val``, ``checkpoint`` and ``decode``.

    Raises:
        UserError: not even one step fits.
    """
    every = {**every, "checkpoint": every["checkpoint"] or every["val"]}
    times = {"val": VALIDATIONS, "checkpoint": VALIDATIONS, "decode": DECODES}
    if max_seconds is not None:
        checks = {"val": seconds["val"] + seconds["checkpoint"], "decode": seconds["decode"]}
        checks["checkpoint"] = checks["val"]
        for name, cost in checks.items():
            times[name] = max(1, min(times[name], int(SHARE * max_seconds / max(cost, 1e-9))))
        # Open intervals happen that often, the last time at the end; given ones cost per step, and once at the end.
        per_step, fixed = seconds["step"], 0.0
        for name, interval in every.items():
            per_step += seconds[name] / interval if interval else 0.0
            fixed += seconds[name] * (1 if interval else times[name])
        steps = int((max_seconds - fixed) / per_step)
        if steps < 1:
            raise UserError(
                f"trainer.max_time must leave room for one step ({fixed + per_step:.1f} s with its checks), got "
                f"{max_seconds:.1f} s; allow more time, or fewer eval.n and trainer.val_batches"
            )
        max_steps = steps if max_steps is None else min(steps, max_steps)
    assert max_steps is not None, "a limit of steps or of time"
    val_every = every["val"] or math.ceil(max_steps / times["val"])
    return Plan(
        max_steps=max_steps,
        val_every=val_every,
        checkpoint_every=every["checkpoint"] or val_every,
        decode_every=every["decode"] or math.ceil(max_steps / times["decode"]),
        seconds=dict(seconds),
    )
