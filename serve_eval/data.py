"""task=data: write the training data beforehand, whole, in parts on many machines, or merged from parts."""

from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from distill.config import opt
from distill.data import DataConfig, prepare, write_part
from distill.errors import UserError
from distill.target import TargetConfig, load_target


@dataclass(kw_only=True)
class Config:
    """Options of task=data."""

    target: TargetConfig = field(default_factory=TargetConfig, metadata={"help": "target that writes and tokenises"})
    data: DataConfig = field(default_factory=DataConfig, metadata={"help": "the data set, as in training"})
    parts: list[str] = opt([], "folders of parts to merge, beside those in data.folder")
    partial: bool = opt(False, "merge what there is, even where parts are missing or unfinished")


def run(config: Config, *, console: Console | None = None) -> None:
    """Write ``data.part`` of the data, or merge the parts and write what is missing.

    Raises:
        UserError: no folder given, or whatever makes the data unusable for training.
    """
    console = console or Console(soft_wrap=True)
    if config.data.folder is None:
        raise UserError("data.folder must be given, got nothing; training takes the data from there")
    if config.data.part is not None and (config.parts or config.partial):
        raise UserError("parts and partial are for merging, got data.part, which writes a part; leave one of them out")
    target = load_target(config.target)
    if config.data.part is not None:
        place = write_part(config.data, target, config.data.folder)
        console.print(f"part {config.data.part} written to {place}", highlight=False)
        return
    parts = [Path(part) for part in config.parts]
    data = prepare(config.data, target, config.data.folder, parts=parts, partial=config.partial)
    console.print(
        f"{len(data)} conversations with {data.stats['supervised_tokens']} supervised tokens in {config.data.folder}",
        highlight=False,
    )
    left_out = {name: count for name, count in data.stats["left_out"].items() if count}
    if left_out:
        console.print("left out: " + ", ".join(f"{count} {name}" for name, count in left_out.items()), highlight=False)
