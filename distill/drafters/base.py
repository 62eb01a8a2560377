"""The drafter protocol, and how to add one.

A drafter is an ``nn.Module`` that holds only its own weights; the frozen target is reached through
``self.target`` (not a submodule: it never enters a checkpoint). Training predictions and drafting run the same
step code, which the tests check: the teacher-forced prediction at step k equals what is drafted at depth k.

To add one: a file here with a ``Config`` dataclass and a class that implements the methods below, a file in
``configs/drafter/``, a line in ``distill/registry.py``, its name in the parametrised tests.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from distill.calibration import Calibration
from distill.errors import UserError
from distill.kv_cache import KVCache
from distill.packed import Packing
from distill.target import Target, TargetInfo
from distill.types import Batch, Frontier, StepPrediction, TargetOutput
from distill.vocab import DraftVocab

MOST_LAYERS, WIDEST = 1000, 2**18
"""Bounds on what a drafter may be asked to be: past them it is a slip, and building it would take the machine."""


def check_sizes(config: Any, *names: str) -> None:
    """Refuse counts and widths that cannot be meant.

    Raises:
        UserError: one is too large.
    """
    for name in names:
        value, most = getattr(config, name), WIDEST if name.endswith("_size") else MOST_LAYERS
        if value is not None and value > most:
            raise UserError(f"drafter.{name} must be at most {most}, got {value}")


@dataclass(kw_only=True)
class DrafterState:
    """What a drafter remembers between rounds of one decode; drafters add fields in subclasses.

    ``cache`` holds stable entries (made from true target features) up to ``cache.lengths_B``; drafted entries
    are written behind them and vanish with ``rollback``. ``behind`` counts cache slots the next proposal needs beside
    those of the nodes it feeds.
    """

    cache: KVCache | None
    drafted: int = 0
    behind: int = 0


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Parameters that share a learning rate.

    Attributes:
        parameters: of the drafter.
        lr: factor on the run's learning rate.
        warmup: their rate also rises linearly over this part of the run, from its beginning.
    """

    parameters: list[nn.Parameter]
    lr: float = 1.0
    warmup: float = 0.0


class Drafter(nn.Module, ABC):
    """Base class: owns the reference to the target and the draft vocabulary."""

    name: ClassVar[str]
    Config: ClassVar[type]
    max_depth: int | None = None
    """Deepest node this drafter can propose; None = any (recurrent drafters)."""
    soft: ClassVar[bool] = True
    """Whether ``step`` gives a distribution (False: scores that only rank, e.g. prompt lookup)."""
    recomputes: ClassVar[bool] = False
    """Whether ``recompute_activations`` has an effect."""
    trainable: ClassVar[bool] = True
    """False for baselines without weights, which need no checkpoint."""

    def __init__(self, config: Any, target: Target, vocab: DraftVocab | None = None):
        super().__init__()
        self.config = config
        # A plain list hides the target from nn.Module, so it never lands in a state dict or an optimiser.
        self._target = [target]
        self._quick = False
        self.calibration: Calibration | None = None
        self.vocab = vocab

    @property
    def target(self) -> Target:
        """The frozen target this drafter drafts for."""
        return self._target[0]

    @classmethod
    @abstractmethod
    def taps(cls, config: Any, info: TargetInfo) -> tuple[int, ...]:
        """Tap indices this drafter reads, ascending and distinct (``TargetOutput`` convention)."""

    @classmethod
    def check_target(cls, config: Any, target: Target) -> None:
        """Refuse options that do not fit the target, where ``taps`` cannot tell; called before data are written."""

    def rollout(self, batch: Batch) -> Batch:
        """Change a batch before the target reads it (on-policy distillation writes its own answers into it)."""
        return batch

    @abstractmethod
    def training_steps(self, batch: Batch, output: TargetOutput) -> list[StepPrediction]:
        """Return every prediction this method trains on for one packed batch."""

    def on_step(self, step: int, max_steps: int) -> None:
        """Told before every micro step of a run which optimiser step it belongs to, from 0; for weights that change."""

    def param_groups(self) -> list[ParamGroup]:
        """What is trained, and how fast; the first group's rate is the one that is logged."""
        return [ParamGroup(parameters=[p for p in self.parameters() if p.requires_grad])]

    def decoding(self) -> "Drafter":
        """What decodes: this drafter, or one with the same weights and another target (Medusa-2's adapted one)."""
        return self

    def recompute_activations(self, on: bool) -> None:
        """Trade time for memory in ``training_steps``: same values, same gradients. Drafters that can override it."""
        assert not on or self.recomputes, "refused by TrainConfig.check_target"

    @property
    def steps(self) -> int:
        """How many predictions ``training_steps`` returns."""
        return 1

    @property
    def steps_per_head(self) -> int:
        """How many of them go through the same head; the loss has the logits of these at once."""
        return self.steps

    def kept_floats(self, share: float) -> float:
        """Numbers autograd keeps per token of a batch, over all steps, for the memory estimate; 0: not known.

        Args:
            share: part of the positions that count, for drafters that leave out the others.
        """
        return 0.0

    def backward_floats(self) -> float:
        """Numbers per token the backward pass of one step adds to what is kept, for the memory estimate."""
        return 0.0

    def accelerate(self) -> None:
        """Prepare the weights for fast decoding; called by the fast engine. Values stay as they are."""
        Packing(self)
        self._quick = True

    def target_logits(self, hidden: Tensor) -> Tensor:
        """The target's own head while drafting, through the fast engine where that decodes."""
        return (self.target.fast if self._quick else self.target).logits(hidden)

    @abstractmethod
    def new_state(self, batch_size: int, capacity: int) -> DrafterState:
        """Return an empty decoding state for ``capacity`` committed tokens plus any drafted ones."""

    @abstractmethod
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
        """Take in tokens the target has processed: prefill chunks and committed paths alike.

        Args:
            state: changed in place.
            ids_BL: the tokens at the processed positions; row b has ``n_B[b]`` valid entries, left-aligned.
            next_B: the token that follows each row's last valid one.
            output: the target's own features at these positions (same layout).
            n_B: valid entries per row; 0 leaves a row as it is.
            longest: positions the fullest row has taken in afterwards, known on the host.
        """

    @abstractmethod
    def step(self, state: Any, frontier: Frontier) -> Tensor:
        """Return logits_BFW over the draft vocabulary for the children of each frontier node.

        A drafter whose logits at a depth are the same for all nodes (Medusa) may return logits_B1W.
        """

    @abstractmethod
    def rollback(self, state: Any) -> None:
        """Drop everything ``step`` wrote since the last ``extend``."""

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """Map draft-vocabulary ids to target-vocabulary ids."""
        return ids if self.vocab is None else self.vocab.to_target(ids)
