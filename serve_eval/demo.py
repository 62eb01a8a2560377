"""task=demo: the whole path in one go, from a frozen target to a measured speedup.

Stages: the target is fetched, writes its own training conversations, a drafter is trained and exported, both decode
held-out prompts, a report is written. A stage whose output is there is skipped; an interrupted one goes on where it
stopped. Every stage has a time budget, so the whole has one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from distill.config import opt, to_dict
from distill.data import prepare, stderr_progress
from distill.data.store import read_manifest
from distill.entry import compose_values
from distill.errors import UserError
from distill.export import update_card
from distill.target import load_target
from distill.train.main import train_config
from distill.train.run import TrainConfig
from distill.train.run import run as train
from distill.tree import PlanConfig
from serve_eval import bench as benchmark
from serve_eval import report
from serve_eval.bench import Config as BenchConfig
from serve_eval.cost import read_costs
from serve_eval.lineup import ArmConfig
from serve_eval.progress import clock
from serve_eval.rows import COSTS, REPORT, RESULTS, Row, read_rows
from serve_eval.summary import print_summary

TARGET_S, REPORT_S, COSTS_S, UNKNOWN_S = 60.0, 5.0, 30.0, 120.0
"""Rough times of what has no budget, for the time left."""


PLANS = (
    PlanConfig(name="chain", length=2),
    PlanConfig(name="calibrated", depth=3, top_k=3, total=6),
    PlanConfig(name="dynamic", top_k=4, depth=3, total=8),
)
"""Measured where ``bench.trees`` names none: small proposals, since a pass over many tokens is dear on a CPU."""


def default_bench() -> BenchConfig:
    """Held-out MT-bench, one prompt per category and more while time lasts."""
    return BenchConfig(limit=24, max_new_tokens=64, repeats=1, warmup=1)


@dataclass(kw_only=True)
class Config:
    """Options of task=demo."""

    run_dir: str = opt("runs/demo", "folder of everything; a demo that is there is resumed")
    experiment: str = opt("demo", "training settings: a file in configs/experiment/")
    overrides: list[str] = opt([], "further training options, e.g. [target=tiny]")
    data_minutes: float | None = opt(2.0, "time to write training conversations; null: the experiment's own limits")
    train_minutes: float | None = opt(6.5, "time for training; null: the experiment's own limits")
    eval_minutes: float | None = opt(3.0, "time to decode prompts for the comparison; null: bench's own limits")
    bench: BenchConfig = field(default_factory=default_bench, metadata={"help": "options of the comparison"})

    def __post_init__(self) -> None:
        for name in ("data_minutes", "train_minutes", "eval_minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{name} must be above 0, got {value}; null leaves it to the settings of that stage")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of the demo: what it does, how long it should take, whether its output is there."""

    name: str
    what: str
    planned_s: float
    done: Callable[[], bool]
    run: Callable[[], object]


def run(config: Config, *, console: Console | None = None) -> list[Row]:
    """Run what is left of the demo, print the result, return its rows.

    Raises:
        UserError: what any stage raises.
    """
    console = console or Console(soft_wrap=True)
    folder = Path(config.run_dir)
    stages = build_stages(config, folder)
    begin = time.monotonic()
    left = sum(stage.planned_s for stage in stages if not stage.done())
    console.print(f"[bold]demo[/bold] in {folder}: about {clock(left)} min for what is left to do", highlight=False)
    for number, stage in enumerate(stages, start=1):
        head = f"[bold]\\[{number}/{len(stages)}] {stage.name}:[/bold]"
        if stage.done():
            console.print(f"{head} already there", highlight=False)
            continue
        left = sum(s.planned_s for s in stages[number - 1 :] if not s.done())
        console.print(f"{head} {stage.what} [dim](about {clock(left)} min left in all)[/dim]", highlight=False)
        start = time.monotonic()
        stage.run()
        console.print(f"    done in {clock(time.monotonic() - start)} min", style="dim", highlight=False)
    rows = read_rows(folder / RESULTS)
    _closing(rows, folder, time.monotonic() - begin, console)
    return rows


def build_stages(config: Config, folder: Path) -> list[Stage]:
    """Return the stages in order; nothing is loaded yet."""
    settings = training_config(config, folder)
    data = Path(settings.data.folder or folder / "data")
    usual = [plan for plan in PLANS if plan.name != "calibrated" or settings.eval.calibrate]
    tree, *trees = [config.bench.tree, *config.bench.trees] if config.bench.trees else usual
    measured = replace(
        config.bench,
        tree=tree,
        trees=[ArmConfig(**to_dict(plan)) for plan in trees],
        checkpoint=str(folder),
        target=replace(settings.target),
        out=str(folder),
        max_minutes=config.eval_minutes or config.bench.max_minutes,
        report=False,
    )

    def written() -> bool:
        manifest = read_manifest(data)
        return manifest is not None and manifest.stopped is not None

    def evaluate() -> None:
        result = benchmark.run(measured, quiet=True)
        update_card(folder / "export", measured_figures(result.rows))

    exported = folder / "export" / "config.json"
    return [
        Stage(
            name="target",
            what=f"fetch {settings.target.name} and check it",
            planned_s=TARGET_S,
            done=lambda: written() or exported.is_file(),
            run=lambda: load_target(settings.target),
        ),
        Stage(
            name="data",
            what="the target writes its own training conversations",
            planned_s=_seconds(config.data_minutes),
            done=lambda: written() or exported.is_file(),
            run=lambda: prepare(settings.data, load_target(settings.target), data, stderr_progress()),
        ),
        Stage(
            name="train",
            what=f"{settings.drafter['name']} learns to draft for the frozen target; the best checkpoint is exported",
            planned_s=_seconds(config.train_minutes),
            done=exported.is_file,
            run=lambda: train(settings),
        ),
        Stage(
            name="evaluate",
            what="decode held-out prompts with and without the drafter",
            planned_s=_seconds(measured.max_minutes) + COSTS_S,
            done=(folder / RESULTS).is_file,
            run=evaluate,
        ),
        Stage(
            name="report",
            what="write the report",
            planned_s=REPORT_S,
            done=(folder / REPORT).is_file,
            run=lambda: report.run(report.Config(results=str(folder), run=str(folder))),
        ),
    ]


def training_config(config: Config, folder: Path) -> TrainConfig:
    """The experiment's training settings with this demo's folder and time budgets."""
    values = compose_values("train", [f"experiment={config.experiment}", *config.overrides])
    values["run_dir"] = str(folder)
    if config.data_minutes is not None:
        values["data"]["max_minutes"] = config.data_minutes
    if config.train_minutes is not None:
        values["trainer"]["max_time"] = config.train_minutes
    return train_config(values)


def _seconds(minutes: float | None) -> float:
    return UNKNOWN_S if minutes is None else 60 * minutes


def measured_figures(rows: list[Row]) -> dict[str, float]:
    """Figures for the model card: acceptance length and speedup of every plan on every set."""
    figures: dict[str, float] = {}
    for row in rows:
        if row.kind == "spec" and row.category == "all":
            figures[f"{row.prompts}, {row.arm}: tau"] = row.tau
            if row.speedup_total is not None:
                figures[f"{row.prompts}, {row.arm}: speedup"] = row.speedup_total
    return figures


def _closing(rows: list[Row], folder: Path, seconds: float, console: Console) -> None:
    """The result in words, and what to do next."""
    print_summary(rows, read_costs(folder / COSTS), where=folder, console=console)
    spec = [row for row in rows if row.kind == "spec" and row.category == "all"]
    best = max(spec, key=lambda row: row.tau)
    fast = max(spec, key=lambda row: row.speedup_total or 0)
    console.print(
        f"\nThe drafter's best plan, {best.arm}, makes each target pass yield {best.tau:.2f} tokens; the fastest, "
        f"{fast.arm}, decodes {fast.speedup_total or 0:.2f} times as fast as the target alone "
        f"(this session took {clock(seconds)} min).\n\n"
        f"  look   {folder / REPORT}\n"
        f"  try    python -m serve_eval task=generate checkpoint={folder} \"prompt='Why is the sky blue?'\"\n"
        f"  prove  python -m serve_eval task=verify checkpoint={folder}\n"
        f"  take   {folder / 'export'}",
        highlight=False,
        markup=False,
    )
