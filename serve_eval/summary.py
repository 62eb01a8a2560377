"""The terminal's view of a benchmark: one table, one line on costs, where the files are."""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from serve_eval.cost import CostReport
from serve_eval.rows import REPORT, RESULTS, Row


def print_summary(
    rows: Sequence[Row], costs: CostReport | None, *, where: Path, console: Console | None = None
) -> None:
    """Print the headline rows (whole prompt sets), the cost decomposition and the paths of the files."""
    console = console or Console()
    whole = [row for row in rows if row.category == "all"]
    for name in dict.fromkeys(row.prompts for row in whole):
        console.print(_table([row for row in whole if row.prompts == name]))
    if any(row.tie_rate for row in whole):
        dtype = whole[0].settings["dtype"]
        console.print(f"equal: same tokens as ar; +: first differs where two {dtype} scores tie\n", style="dim")
    if costs is not None:
        console.print(_cost_table(costs))
    for name in (RESULTS, REPORT):
        if (where / name).is_file():
            console.print(f"{where / name}", highlight=False)


def best_of(rows: Sequence[Row]) -> Row | None:
    """The main drafter's fastest arm; a baseline, and what changes the target's text, only where there is no other."""

    def rank(row: Row) -> tuple[bool, bool, float]:
        return row.lossless, row.drafter == row.settings.get("drafter"), row.speedup_total or 0

    return max((row for row in rows if row.kind == "spec"), key=rank, default=None)


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    mode = "greedy" if first.temperature == 0 else f"T = {first.temperature:g}"
    dtype, device = first.settings["dtype"], first.settings["device"]
    count = f"{first.n_prompts} prompt{'s' if first.n_prompts != 1 else ''} of {first.prompts}"
    title = f"{first.target} on {count}, {mode}, {dtype} on {device}, batch 1"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("arm", no_wrap=True)
    for name in ("tau", "tok/s", "speedup [95 %]", "median", "vs hf", "equal", "first"):
        table.add_column(name, justify="right", no_wrap=True)
    best = best_of(rows)
    for row in rows:
        plain = row.arm == "ar"
        interval = f" [{row.speedup_ci[0]:.2f}, {row.speedup_ci[1]:.2f}]" if row.speedup_ci and not plain else ""
        table.add_row(
            row.arm + ("" if row.lossless else " (not lossless)"),
            "-" if row.kind == "hf" else f"{row.tau:.2f}",
            _fixed(row.tokens_per_s, ".1f"),
            "1" if plain else _fixed(row.speedup_total, ".2f") + interval,
            "1" if plain else _fixed(row.speedup_median, ".2f"),
            _fixed(row.speedup_vs_hf, ".2f"),
            "" if plain else _fixed(row.match_rate, ".0%") + (f" +{row.tie_rate:.0%}" if row.tie_rate else ""),
            f"{row.ttft_s * 1000:.0f} ms",
            style="bold" if row is best else None,
        )
    return table


def _cost_table(costs: CostReport) -> Table:
    title = "speedup = tau / (v + draft + host), in plain decoding steps"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("arm", "tau", "v", "draft", "host", "predicted", "measured"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for p in costs.predictions:
        figures = (p.tau, p.v, p.draft, p.host, p.speedup)
        table.add_row(p.arm, *(f"{figure:.2f}" for figure in figures), _fixed(p.measured, ".2f"))
    return table


def _fixed(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
