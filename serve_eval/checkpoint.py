"""Loading the pair that decodes together: an exported drafter and the target it was trained for."""

from dataclasses import dataclass, replace
from pathlib import Path

from distill.drafters.base import Drafter
from distill.errors import UserError
from distill.export import load_drafter, resolve_checkpoint
from distill.export.format import read_config
from distill.target import Target, TargetConfig, load_target

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


def load_pair(checkpoint: str | None, target: TargetConfig) -> Pair:
    """Load target and drafter; the drafter decodes in the target's precision, as engines serve it.

    Args:
        checkpoint: a run folder or an export folder; None loads the target alone.
        target: its name may be ``auto``, which takes the name written in the checkpoint.

    Raises:
        UserError: no such checkpoint, a damaged one, one of another target, or nothing that names a target.
    """
    if checkpoint is None:
        if target.name == AUTO:
            raise UserError("checkpoint must be a run folder or an export folder, got none; or name a target=.")
        return Pair(target=load_target(target), drafter=None, folder=None)
    folder = resolve_checkpoint(checkpoint)
    loaded = load_target(resolve_target(folder, target))
    return Pair(target=loaded, drafter=load_drafter(folder, loaded, dtype=loaded.dtype), folder=folder)


def resolve_target(folder: Path, target: TargetConfig) -> TargetConfig:
    """Replace the name ``auto`` by the one in the export's ``config.json``."""
    return replace(target, name=read_config(folder)["target"]["name"]) if target.name == AUTO else target
