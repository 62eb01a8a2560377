"""The terminal's view: one table a run, one table over the history."""

import math
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.history import PartResult, Run, commit_label
from bench.record import Measurement

WIDE = 110
"""Columns from which notes fit beside the figures."""
BUSY = 0.5
"""Load average above which somebody else was computing, too."""


def number(value: float | None) -> str:
    """Three significant digits, more before the point where there are more; no exponent."""
    if value is None or math.isnan(value):
        return "-"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def print_run(run: Run, console: Console) -> None:
    """Print every part's table, what failed, and how many bars are met."""
    git, hardware = run.provenance["git"], run.provenance["hardware"]
    options = run.options
    console.print(
        f"{options.target} on {hardware['cpu']}, {options.threads} threads, commit {commit_label(git)}",
        style="bold",
        highlight=False,
    )
    if options.quick:
        console.print("quick: tiny shapes, the figures mean nothing", style="yellow")
    for part in run.parts:
        console.print(part_table(part, width=console.width))
        if part.error is not None:
            console.print(Text(f"{part.name} failed: {part.error}", style="red"))
    busy = [part.load[0] for part in run.parts if part.load]
    if busy and busy[0] > BUSY:
        console.print(f"load average {busy[0]:.1f} at the start: other work ran, too", style="yellow", highlight=False)
    judged = [m for part in run.parts for m in part.measurements if m.met is not None]
    missed = [m for m in judged if not m.met]
    console.print(f"{len(judged) - len(missed)} of {len(judged)} bars met", style="bold", highlight=False)


def part_table(part: PartResult, *, width: int) -> Table:
    """One part: figure, bar, physical limit; what sets the limit and notes beside them where there is room."""
    title = f"{part.name}, {part.seconds:.0f} s"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("figure")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("bar", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("limit", justify="right", no_wrap=True)
    if width >= WIDE:
        table.add_column("set by")
        table.add_column("note", style="dim")
    for m in part.measurements:
        cells = [m.name, number(m.value), m.unit, _bar(m), _verdict(m), "" if m.limit is None else number(m.limit)]
        table.add_row(*map(_cell, cells), *map(_cell, [m.limit_name, m.note] if width >= WIDE else []))
    return table


def _cell(text: object) -> Text:
    return text if isinstance(text, Text) else Text(str(text))  # brackets in a name are no markup


def _bar(m: Measurement) -> str:
    return "" if m.bar is None else f"{'>=' if m.at_least else '<='} {m.bar:g}"


def _verdict(m: Measurement) -> Text:
    words = {None: Text(""), True: Text("met", style="green"), False: Text("missed", style="red")}
    return words[m.met]


def history_table(lines: Sequence[dict[str, Any]], *, columns: int = 5) -> Table:
    """How each figure moved over the last ``columns`` runs with the newest run's setting.

    Args:
        lines: the history, oldest first, not empty.
        columns: runs to show.
    """
    newest = lines[-1]
    alike = [line for line in lines if line["setting"] == newest["setting"]]
    shown = alike[-columns:]
    names = {key: figure["unit"] for line in reversed(shown) for key, figure in line["figures"].items()}
    s = newest["setting"]
    title = f"{s['target']} on {s['cpu']}, {s['threads']} threads, engine {s['engine']}"
    if others := len(lines) - len(alike):
        title += f" ({others} run{'s' if others != 1 else ''} with other settings left out)"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("figure")
    for line in shown:
        table.add_column(f"{line['date'][5:10]}\n{line['commit']}", justify="right", no_wrap=True)
    table.add_column("last/first", justify="right", no_wrap=True)
    for name, unit in names.items():
        figures = [line["figures"].get(name) for line in shown]
        known = [figure["value"] for figure in figures if figure and figure["value"] is not None]
        moved = f"{known[-1] / known[0]:.2f}" if len(known) > 1 and known[0] else ""
        cells = ["" if figure is None else number(figure["value"]) for figure in figures]
        table.add_row(Text(f"{name} [{unit}]"), *cells, moved)
    return table
