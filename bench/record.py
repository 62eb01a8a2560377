"""What a part of the bench is given, and what it hands back."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every part is given.

    Attributes:
        target: name of the frozen target, as in ``TargetConfig.name``.
        threads: CPU threads, set before the first part.
        quick: tiny shapes and few repeats: shows in seconds that a part runs; its figures mean nothing.
        engine: what both decoding arms run on: ``fast`` or ``eager``.
        seed: of random ids and weights.
    """

    target: str = "smollm2"
    threads: int = 2
    quick: bool = False
    engine: Literal["fast", "eager"] = "fast"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One figure.

    Attributes:
        part: the module that measured it, e.g. ``training``.
        name: what it is, e.g. ``tokens/s over the dense implementation``; unique within the part and the same from
            commit to commit, since the history goes by (part, name).
        value: the figure; NaN where it could not be measured (``note`` says why).
        unit: e.g. ``x``, ``tokens/s``, ``MiB``, ``%`` (with value 95.0 for 95 %).
        bar: what it must reach; None where it only informs.
        at_least: True where ``value >= bar`` meets the bar, False where ``value <= bar`` does, None without a bar.
        limit: the physical limit in the same unit, measured on the spot; None where there is none to speak of.
        limit_name: what sets it, e.g. ``memory bandwidth``.
        note: one short sentence for the table.
        detail: plain values (shapes, medians, spreads) that only the JSON shows.
    """

    part: str
    name: str
    value: float
    unit: str
    bar: float | None = None
    at_least: bool | None = None
    limit: float | None = None
    limit_name: str = ""
    note: str = ""
    detail: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (self.bar is None) == (self.at_least is None), "a bar needs a direction and a direction a bar"

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None without one. A value that could not be measured meets none."""
        if self.bar is None:
            return None
        if math.isnan(self.value):
            return False
        return self.value >= self.bar if self.at_least else self.value <= self.bar
