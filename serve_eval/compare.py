"""task=compare: join several benchmarks of one target into one table, a line per drafter with its best plan.

Speedups are ratios within one benchmark; only benchmarks of the same target, prompts and settings are joined.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from distill.config import opt
from distill.errors import UserError
from distill.files import write_atomic
from serve_eval.cost import read_costs
from serve_eval.rows import COSTS, RESULTS, Row, read_rows

SAME = ("max_new_tokens", "limit", "ignore_eos", "chat", "engine", "dtype", "device", "threads")
"""Settings that must agree."""


@dataclass(kw_only=True)
class Config:
    """Options of task=compare."""

    results: list[str] = opt([], "result folders of task=bench")
    out: str = opt("runs/compare", "folder for comparison.md and comparison.json")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One drafter (or baseline) on one prompt set at one temperature.

    Attributes:
        method: drafter, or what decodes without one.
        arm: its best arm by speedup over plain decoding.
        tau, by_depth, speedup, interval, over_hf: as in ``Row``.
        lossless: whether the output follows the target's law.
        draft: cost of a proposal in plain steps, None where it was not measured.
        parameters: of the drafter.
        tokens, minutes: read and spent in training.
    """

    prompts: str
    temperature: float
    method: str
    arm: str
    tau: float | None
    by_depth: list[float]
    speedup: float | None
    interval: list[float] | None
    over_hf: float | None
    lossless: bool
    draft: float | None
    parameters: int
    tokens: float | None
    minutes: float | None


def run(config: Config, *, console: Console | None = None) -> list[Line]:
    """Join, write, print.

    Raises:
        UserError: no results, or some that cannot be compared.
    """
    if not config.results:
        raise UserError("results must be result folders of task=bench, got none; pass results=[DIR,DIR]")
    lines: list[Line] = []
    first: Row | None = None
    for folder in map(Path, config.results):
        rows = [row for row in read_rows(folder / RESULTS) if row.category == "all"]
        first = first or rows[0]
        _check_same(first, rows[0], folder)
        lines += _lines(rows, folder)
    lines = _unique(lines)
    out = Path(config.out)
    text = markdown(lines)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "comparison.json", json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    write_atomic(out / "comparison.md", text)
    (console or Console(soft_wrap=True)).print(text, highlight=False, markup=False)
    return lines


def _check_same(first: Row, other: Row, folder: Path) -> None:
    differing = [key for key in SAME if first.settings.get(key) != other.settings.get(key)]
    if first.settings["target_fingerprint"] != other.settings["target_fingerprint"]:
        differing.append("target")
    if differing:
        then = ", ".join(f"{key} {first.settings.get(key, first.target)}" for key in differing)
        now = ", ".join(f"{key} {other.settings.get(key, other.target)}" for key in differing)
        raise UserError(f"results must be of one target under the same settings ({then}), got {folder} with {now}")


def _lines(rows: Sequence[Row], folder: Path) -> list[Line]:
    draft = {}
    if (folder / COSTS).is_file():
        costs = read_costs(folder / COSTS)
        draft = {} if costs is None else {prediction.arm: prediction.draft for prediction in costs.predictions}
    found = []
    for prompts in dict.fromkeys(row.prompts for row in rows):
        of_set = [row for row in rows if row.prompts == prompts]
        methods = dict.fromkeys(_method(row) for row in of_set)
        for method in methods:
            own = [row for row in of_set if _method(row) == method]
            best = max(own, key=lambda row: row.speedup_total or 0.0)
            training = best.settings.get("training", {}) if best.drafter == best.settings["drafter"] else {}
            found.append(
                Line(
                    prompts=prompts,
                    temperature=best.temperature,
                    method=method,
                    arm=best.arm,
                    tau=None if best.kind == "hf" else best.tau,
                    by_depth=best.accept_by_depth if best.kind == "spec" else [],
                    speedup=best.speedup_total,
                    interval=best.speedup_ci,
                    over_hf=best.speedup_vs_hf,
                    lossless=best.lossless,
                    draft=draft.get(best.arm),
                    parameters=best.drafter_parameters,
                    tokens=training.get("tokens"),
                    minutes=training.get("minutes"),
                )
            )
    return found


def _method(row: Row) -> str:
    """A line's name: the drafter and, where it is not the default, the rule."""
    if row.kind == "spec":
        return f"{row.drafter}" + (f", {row.verifier}" if row.verifier != "match" else "")
    names = {"ar": "plain decoding", "hf": "transformers generate"}
    return names.get(row.kind, f"transformers {row.arm.removeprefix('hf-').split('-')[0]}")


def _unique(lines: Sequence[Line]) -> list[Line]:
    """Plain decoding, ``generate`` and baselines are in every benchmark: the first one stays."""
    kept: dict[tuple[str, float, str], Line] = {}
    for line in lines:
        key = (line.prompts, line.temperature, line.method)
        if key not in kept or (line.tokens is not None and (line.speedup or 0) > (kept[key].speedup or 0)):
            kept[key] = line
    return sorted(kept.values(), key=lambda line: (line.prompts, line.temperature))


def markdown(lines: Sequence[Line]) -> str:
    """One table per prompt set and temperature."""
    parts = []
    for prompts, temperature in dict.fromkeys((line.prompts, line.temperature) for line in lines):
        parts.append(f"**{prompts}, {'greedy' if temperature == 0 else f'temperature {temperature:g}'}**\n")
        parts.append(
            "| method | plan | tau | by depth | speedup [95 %] | over transformers | draft cost | weights | training |"
        )
        parts.append("|---|---|---|---|---|---|---|---|---|")
        of_table = [line for line in lines if (line.prompts, line.temperature) == (prompts, temperature)]
        for line in sorted(of_table, key=lambda line: -(line.speedup or 0)):
            cells = [
                line.method + ("" if line.lossless else " (not lossless)"),
                line.arm if line.by_depth or line.tau not in (None, 1.0) else "",
                _figure(line.tau),
                " ".join(f"{rate:.2f}".lstrip("0") for rate in line.by_depth),
                _figure(line.speedup)
                + (f" [{line.interval[0]:.2f}, {line.interval[1]:.2f}]" if line.interval and line.by_depth else ""),
                _figure(line.over_hf),
                _figure(line.draft),
                f"{line.parameters / 1e6:.1f} M" if line.parameters else "",
                f"{line.tokens / 1e3:.0f}k tokens, {line.minutes:.1f} min" if line.tokens and line.minutes else "",
            ]
            parts.append("| " + " | ".join(cells) + " |")
        parts.append("")
    return "\n".join(parts)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
