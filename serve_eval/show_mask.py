"""task=show-mask: colour which tokens of a conversation are trained on.

Self-written data are written for the occasion, a few conversations only; nothing is kept.
"""

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.rule import Rule

from distill.config import opt
from distill.data import DataConfig, load_prepared, prepare, render_mask
from distill.errors import UserError
from distill.target import TargetConfig, load_target


@dataclass(kw_only=True)
class Config:
    """Options of task=show-mask."""

    target: TargetConfig = field(default_factory=TargetConfig, metadata={"help": "target whose template is used"})
    data: DataConfig = field(default_factory=DataConfig, metadata={"help": "the data set, as in training"})
    limit: int = opt(3, "conversations to show")

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise UserError(f"limit must be at least 1, got {self.limit}")


def run(config: Config, *, console: Console | None = None) -> None:
    """Print the first conversations; data.folder=DIR shows prepared data as they are.

    Raises:
        UserError: whatever makes the data unusable for training.
    """
    target = load_target(config.target)
    few = replace(config.data, n_conversations=config.limit, slots=config.limit)
    if config.data.folder is not None:
        data = load_prepared(config.data.folder, few, vocab_size=target.info.vocab_size)
    else:
        with tempfile.TemporaryDirectory() as folder:
            data = prepare(few, target, Path(folder) / "data")
    console = console or Console(soft_wrap=True)
    for index in range(min(config.limit, len(data))):
        console.print(Rule(f"conversation {index + 1}"))
        console.print(render_mask(data[index], target))
    left_out = {name: count for name, count in data.stats.get("left_out", {}).items() if count}
    if left_out:
        console.print(Rule())
        console.print("left out: " + ", ".join(f"{count} {name}" for name, count in left_out.items()), highlight=False)
