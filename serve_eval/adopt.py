"""task=adopt: read a public drafter in another program's layout, for evaluation here and for continued training."""

from dataclasses import dataclass, field

from rich.console import Console

from distill.config import opt
from distill.errors import UserError
from distill.export import collect, save_drafter
from distill.export.adopt import LayerIds, adopt
from distill.target import TargetConfig, load_target


@dataclass(kw_only=True)
class Config:
    """Options of task=adopt."""

    folder: str | None = opt(None, "the drafter's folder")
    target: TargetConfig = field(default_factory=TargetConfig, metadata={"help": "what it was trained for"})
    out: str | None = opt(None, "new folder for the native export")
    layer_ids: LayerIds = opt("auto", "how the folder counts layers: entering (vLLM), output (SGLang) or auto")
    overwrite: bool = opt(False, "replace an export that is already in out")


def run(config: Config, *, console: Console | None = None) -> None:
    """Write a native export.

    Raises:
        UserError: nothing given, a folder that does not fit, or an ``out`` that is taken.
    """
    if not config.folder or not config.out:
        raise UserError("folder and out must both be given; add folder=DIR out=DIR")
    console = console or Console(soft_wrap=True)
    target = load_target(config.target)
    drafter, notes = adopt(config.folder, target, layer_ids=config.layer_ids)
    where = save_drafter(
        drafter, config.out, provenance={**collect(), "adopted": config.folder}, overwrite=config.overwrite
    )
    for note in notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    console.print(f"{drafter.name} adopted into {where}; measure it with checkpoint={where}", highlight=False)
