"""Everything a training run can be told; ``--help`` is made from these classes."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from distill.config import build, opt, to_dict
from distill.data import DataConfig
from distill.errors import UserError
from distill.losses import LossConfig
from distill.registry import drafter_class
from distill.target import Target, TargetConfig
from distill.target.adapter import require_peft
from distill.train.schedule import OptimConfig


@dataclass(kw_only=True)
class TrainerConfig:
    """Length of the run, size of a step, and what happens between steps."""

    max_steps: int | None = opt(None, "optimiser steps; null: as many as max_time allows, else epochs")
    epochs: float = opt(4.0, "passes over the data, where neither max_steps nor max_time is given")
    max_time: float | str | None = opt(
        None, 'time for training in minutes or as "HH:MM:SS", turned into a fixed number of steps at the start'
    )
    precision: Literal["auto", "bf16", "fp32"] = opt("auto", "of the drafter; auto: bf16 on a GPU, else fp32")
    batch_size: int = opt(2, "packed rows per device and micro step")
    accumulate: int = opt(1, "micro steps per optimiser step")
    activation_checkpointing: bool = opt(
        False, "compute parts of the drafter twice instead of keeping them: less memory, same gradients"
    )
    val_every: int | None = opt(None, "optimiser steps between validations; null: ten validations")
    val_batches: int = opt(16, "held-out batches per validation at most")
    checkpoint_every: int | None = opt(None, "optimiser steps between checkpoints; null: with each validation")
    decode_every: int | None = opt(None, "optimiser steps between decodes of held-out prompts; null: four times")
    keep: int = opt(2, "newest checkpoints kept, beside the best one")
    log_every: int = opt(10, "optimiser steps between log entries")
    devices: int | None = opt(
        None, "processes per machine, one per device; null: what torchrun or srun started, else 1"
    )
    num_nodes: int | None = opt(None, "machines; null: what torchrun or srun started, else 1")
    strategy: Literal["auto", "ddp", "fsdp"] = opt(
        "auto", "ddp: whole weights in every process; fsdp: in pieces (FSDP2); auto: ddp when there are several"
    )
    timeout_s: float = opt(600.0, "seconds after which a process that waits for another one in vain ends the run")

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        for name in ("batch_size", "accumulate", "val_batches", "keep", "log_every"):
            _at_least_one(name, getattr(self, name))
        for name in ("max_steps", "val_every", "checkpoint_every", "decode_every", "devices", "num_nodes"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        if self.epochs <= 0:
            raise UserError(f"trainer.epochs must be above 0, got {self.epochs}")
        if not 0 < self.timeout_s < math.inf:
            raise UserError(f"trainer.timeout_s must be above 0, got {self.timeout_s}")
        parse_minutes(self.max_time)

    @property
    def world(self) -> int:
        """Number of processes, as far as the options tell (``parallel.World`` knows what was started)."""
        return (self.devices or 1) * (self.num_nodes or 1)


@dataclass(kw_only=True)
class TrackingConfig:
    """Where metrics, sample decodes and the export are reported."""

    name: Literal["none", "csv", "wandb"] = opt("csv", "none, csv (logs/ in the run folder), or wandb (csv as well)")
    project: str = opt("draftsmith", "wandb: project")
    entity: str | None = opt(None, "wandb: team or user; null takes your default")
    run_name: str | None = opt(None, "wandb: name of the run; null takes the run folder's")
    offline: bool = opt(False, "wandb: keep everything local (also happens by itself when no API key is set)")


@dataclass(kw_only=True)
class EvalConfig:
    """Real decoding of a few held-out prompts during training."""

    n: int = opt(4, "held-out prompts decoded; 0: none")
    max_new_tokens: int = opt(48, "tokens per answer")
    depth: int = opt(5, "drafted tokens per target pass (a chain)")
    calibrate: int = opt(8, "held-out prompts on which the export's hit rates are measured (tree=calibrated); 0: none")

    def __post_init__(self) -> None:
        """Refuse what cannot be decoded."""
        for name in ("n", "calibrate"):
            if getattr(self, name) < 0:
                raise UserError(f"eval.{name} must not be negative, got {getattr(self, name)}")
        for name in ("max_new_tokens", "depth"):
            if getattr(self, name) < 1:
                raise UserError(f"eval.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(kw_only=True)
class TrainConfig:
    """One training run."""

    run_dir: str | None = opt(None, "folder of the run; null: a new one under runs/; an existing run is resumed")
    seed: int = opt(0, "of the drafter's first weights and of every random draw in training")
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: dict[str, Any] = opt({"name": "eagle3"}, "which drafter, and its own options")
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        """Write every option of the drafter into ``drafter``, defaults included."""
        self.drafter = to_dict(self.drafter_config())
        if self.drafter.get("lora_rank") and self.target.shard != "none":
            raise UserError(
                "target.shard must be none with drafter.lora_rank, since the adapted target runs beside the frozen one "
                f"in every process, got {self.target.shard}"
            )
        if self.data.features == "store" and self.drafter.get("on_policy"):
            raise UserError(
                "data.features must be online with drafter.on_policy, since stored features are those of the text the "
                f"draft replaces, got {self.data.features}"
            )

    def drafter_config(self) -> Any:
        """The chosen drafter's own config.

        Raises:
            UserError: unknown drafter, unknown or unfitting option.
        """
        if "name" not in self.drafter:
            raise UserError("drafter.name must be given, got a drafter without one")
        cls: Any = drafter_class(self.drafter["name"])
        return build(cls.Config, self.drafter, path="drafter")

    def trained_class(self) -> Any:
        """The chosen drafter's class.

        Raises:
            UserError: a baseline that has nothing to train, or a package that training it needs is missing.
        """
        cls: Any = drafter_class(self.drafter["name"])
        if not cls.trainable:
            raise UserError(
                f"drafter must be one that is trained, got {cls.name}, which has no weights; measure it with "
                f"python -m serve_eval task=bench drafter={cls.name}"
            )
        if self.drafter.get("lora_rank"):
            require_peft()
        return cls

    def check_target(self, target: Target) -> None:
        """Refuse a drafter that does not fit the target.

        Raises:
            UserError: layers, width or vocabulary are others than its options say.
        """
        cls, options = self.trained_class(), self.drafter_config()
        if self.trainer.activation_checkpointing and not cls.recomputes:
            raise UserError(
                f"trainer.activation_checkpointing must be false for drafter {cls.name}, which has no layers "
                "to compute again, got true"
            )
        cls.taps(options, target.info)
        cls.check_target(options, target)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"trainer.{name} must be at least 1, got {value}")


def parse_minutes(value: float | str | None) -> float | None:
    """Return seconds for ``trainer.max_time``: minutes as a number, or "HH:MM:SS" / "DD:HH:MM:SS"."""
    if value is None:
        return None
    text = str(value)
    parts = text.split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 3, 4) or min(numbers) < 0 or not math.isfinite(sum(numbers)) or not sum(numbers):
        raise UserError(f'trainer.max_time must be minutes or "HH:MM:SS", above 0, got {value!r}')
    if len(numbers) == 1:
        return numbers[0] * 60
    return sum(number * unit for number, unit in zip(reversed(numbers), (1, 60, 3600, 86400), strict=False))
