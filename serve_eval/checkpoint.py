"""Loading the pair that decodes together: an exported drafter and the target it was trained for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distill.config import build
from distill.drafters.base import Drafter
from distill.errors import UserError
from distill.export import load_drafter, resolve_checkpoint
from distill.export.files import read_json
from distill.export.format import PROVENANCE, read_config
from distill.registry import DRAFTERS, drafter_class
from distill.sampling import Sampling
from distill.target import Target, TargetConfig, load_target
from distill.tree import Plan, PlanConfig, make_plan

AUTO = "auto"
"""Target name that stands for "the one the checkpoint names"."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target, the drafter trained for it (None without a checkpoint) and the export folder it came from."""

    target: Target
    drafter: Drafter | None
    folder: Path | None


def auto_target() -> TargetConfig:
    """Default of every ``target`` option here: take the checkpoint's own target."""
    return TargetConfig(name=AUTO)


def load_pair(
    checkpoint: str | None,
    target: TargetConfig,
    *,
    drafter: Mapping[str, Any] | None = None,
    calibrated: bool = True,
) -> Pair:
    """Load target and drafter; the drafter decodes in the target's precision, as engines serve it.

    Args:
        checkpoint: a run folder or an export folder; None loads the target alone.
        target: its name may be ``auto``, which takes the name written in the checkpoint.
        drafter: instead of a checkpoint, name and options of a drafter without weights.
        calibrated: as in ``load_drafter``.

    Raises:
        UserError: no such checkpoint, a damaged one, one of another target, nothing that names a target, checkpoint
            and drafter at once, or a drafter that has to be trained.
    """
    if drafter and checkpoint is not None:
        raise UserError(
            f"drafter must be left out beside checkpoint={checkpoint}, which has its own, got {dict(drafter)}; "
            "bench measures further ones with baselines=[NAME]"
        )
    if checkpoint is None and drafter and target.name == AUTO:
        raise UserError(f"target must be named for drafter {drafter.get('name')}, got none; pass e.g. target=smollm2")
    if checkpoint is None:
        if target.name == AUTO:
            raise UserError("checkpoint must be a run folder or an export folder, got none; or name a target=.")
        alone = load_target(target)
        return Pair(target=alone, drafter=without_weights(drafter, alone) if drafter else None, folder=None)
    folder = resolve_checkpoint(checkpoint)
    loaded = load_target(resolve_target(folder, target))
    trained = load_drafter(folder, loaded, dtype=loaded.dtype, calibrated=calibrated)
    return Pair(target=trained.target, drafter=trained, folder=folder)


def resolve_target(folder: Path, target: TargetConfig) -> TargetConfig:
    """Replace the name ``auto`` by the one in the export's ``config.json``."""
    return replace(target, name=read_config(folder)["target"]["name"]) if target.name == AUTO else target


def without_weights(options: Mapping[str, Any], target: Target) -> Drafter:
    """Make a drafter that needs no checkpoint.

    Raises:
        UserError: unknown name or option, or a drafter that has to be trained.
    """
    if "name" not in options:
        raise UserError(f"drafter must have a name, got {dict(options)}; e.g. {{name: prompt_lookup}}")
    cls: Any = drafter_class(options["name"])
    if cls.trainable:
        free = ", ".join(name for name in sorted(DRAFTERS) if not getattr(drafter_class(name), "trainable", True))
        raise UserError(
            f"a drafter without checkpoint must be one without weights ({free}), got {cls.name}; train it with "
            f"train.py drafter={cls.name} and pass checkpoint=DIR"
        )
    return cls(build(cls.Config, options, path="drafter"), target).to(target.device).eval()


def plan_for(drafter: Drafter, tree: PlanConfig, sampling: Sampling) -> Plan:
    """The plan a config describes, for this drafter's measured hit rates and as deep as it goes."""
    return make_plan(tree, calibration=drafter.calibration, greedy=sampling.greedy, deepest=drafter.max_depth)


def training_figures(folder: Path) -> dict[str, Any]:
    """What an export says about its own training: supervised tokens seen, and minutes."""
    measured = read_json(folder / PROVENANCE).get("measured", {}) if (folder / PROVENANCE).is_file() else {}
    return {name.removeprefix("train/"): value for name, value in measured.items() if name.startswith("train/")}
