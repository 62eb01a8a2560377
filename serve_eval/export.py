"""task=export: check a run's drafter and copy it where you want it."""

from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from distill.config import opt
from distill.errors import UserError
from distill.export import copy_export


@dataclass(kw_only=True)
class Config:
    """Options of task=export."""

    checkpoint: str | None = opt(None, "run folder or export folder")
    format: Literal["native"] = opt("native", "layout to write")
    out: str | None = opt(None, "new folder for the drafter")
    overwrite: bool = opt(False, "replace an export that is already in out")


def run(config: Config, *, console: Console | None = None) -> None:
    """Write the export.

    Raises:
        UserError: nothing given, no such checkpoint, a damaged one, or a folder that is taken.
    """
    if not config.checkpoint or not config.out:
        raise UserError("checkpoint and out must both be given; add checkpoint=RUN out=DIR")
    where = copy_export(config.checkpoint, config.out, overwrite=config.overwrite)
    (console or Console(soft_wrap=True)).print(f"{config.format} export written to {where}", highlight=False)
