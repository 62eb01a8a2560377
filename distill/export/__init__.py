"""Writing and reading drafter checkpoints, and recording where they came from."""

from distill.export.format import (
    copy_export,
    load_drafter,
    resolve_checkpoint,
    save_calibration,
    save_drafter,
    update_card,
)
from distill.export.hub import push
from distill.export.provenance import collect

__all__ = [
    "collect",
    "copy_export",
    "load_drafter",
    "push",
    "resolve_checkpoint",
    "save_calibration",
    "save_drafter",
    "update_card",
]
