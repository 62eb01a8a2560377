"""task=calibrate: measure how often a drafter's choices are the target's, for ``tree=calibrated`` and dynamic trees."""

from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from distill.calibration import Calibration, best_paths, expected_length
from distill.config import opt
from distill.decode import Engine
from distill.decode.calibrate import calibrate
from distill.errors import UserError
from distill.export import save_calibration
from distill.target import TargetConfig
from serve_eval.checkpoint import auto_target, load_pair
from serve_eval.measure import encode, opening
from serve_eval.prompts import load_prompts

SHOWN = 5  # ranks in the table


@dataclass(kw_only=True)
class Config:
    """Options of task=calibrate."""

    checkpoint: str | None = opt(None, "run folder or export folder of the drafter")
    target: TargetConfig = field(
        default_factory=auto_target, metadata={"help": "target model; name auto takes the checkpoint's own"}
    )
    prompts: list[str] = opt(["mtbench"], "prompt sets: mtbench, humaneval, or JSON-lines files")
    limit: int | None = opt(16, "prompts per set, spread evenly over its categories; null takes all")
    depth: int = opt(5, "depths to measure, at most what the drafter can propose")
    max_new_tokens: int = opt(64, "tokens of the target's own text per prompt")
    seed: int = opt(0, "keys the noise of the sampled text")
    engine: Engine = opt("fast", "fast, or eager: the target's own forward")
    chat: bool = opt(True, "put prompts through the chat template; false feeds plain text (base models)")

    def __post_init__(self) -> None:
        for name, least in (("depth", 1), ("max_new_tokens", 2)):
            if getattr(self, name) < least:
                raise UserError(f"{name} must be at least {least}, got {getattr(self, name)}")


def run(config: Config, *, console: Console | None = None) -> Calibration:
    """Measure, write ``calibration.json`` into the export, show the rates.

    Raises:
        UserError: no such checkpoint, or bad options.
    """
    if config.checkpoint is None:
        raise UserError("checkpoint must be a run folder or an export folder, got none; pass checkpoint=DIR")
    prompts = load_prompts(config.prompts, limit=config.limit)
    pair = load_pair(config.checkpoint, config.target, calibrated=False)
    assert pair.drafter is not None
    ids = [encode(pair.target, opening(prompt), chat=config.chat) for prompt in prompts]
    found = calibrate(
        pair.drafter,
        ids,
        depth=config.depth,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        engine=config.engine,
    )
    if not found.greedy.count_D or not found.coupled.count_D:
        raise UserError(
            "the target must answer with at least two tokens somewhere, got shorter answers only; raise "
            "max_new_tokens or choose other prompts"
        )
    where = save_calibration(config.checkpoint, found)
    console = console or Console(soft_wrap=True)
    for name, choices in (("greedy", found.greedy), ("temperature 1, coupled", found.coupled)):
        table = Table("depth", *(f"rank {r}" for r in range(SHOWN)), "scale", "positions", box=SIMPLE_HEAD, title=name)
        for depth, rates in enumerate(choices.rates()):
            cells = [f"{rate:.3f}" for rate in rates[:SHOWN]]
            table.add_row(str(depth + 1), *cells, f"{choices.scale_D[depth]:.2f}", str(choices.count_D[depth]))
        console.print(table)
        sizes = (4, 8, 16)
        lengths = [expected_length(best_paths(choices.rates(), nodes=n - 1), choices.rates()) for n in sizes]
        told = ", ".join(f"{n} nodes {length:.2f}" for n, length in zip(sizes, lengths, strict=True))
        console.print(f"expected tokens per pass of the best static tree: {told}", highlight=False)
    console.print(f"written to {where}", highlight=False)
    return found
