"""task=compare: join several benchmarks of one target into one table, a line per drafter with its best plan.

Speedups are ratios within one benchmark; only benchmarks of the same target, prompts and settings are joined.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from distill.config import opt
from distill.errors import UserError
from serve_eval.cost import read_costs
from serve_eval.rows import COSTS, RECORDS, RESULTS, Row, read_records, read_rows, write_text

SAME = ("max_new_tokens", "limit", "ignore_eos", "chat", "engine", "dtype", "device", "threads")
"""Settings that must agree."""
Turns = set[tuple[str, int, int]]
"""Questions of one prompt set: prompt, turn, and the tokens of first turns."""


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
        checkpoint: where the drafter was read from, None without weights.
        arm: its best arm by speedup over plain decoding.
        tau, by_depth, speedup, interval, over_hf: as in ``Row``.
        lossless: whether the output follows the target's law.
        draft: cost of a proposal in plain steps, None where it was not measured.
        parameters: of the drafter.
        tokens, minutes: supervised tokens trained on, passes counted, and time spent in training steps.
    """

    prompts: str
    temperature: float
    method: str
    checkpoint: str | None
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
    filters: dict[float, Row] = {}
    asked: dict[str, Turns] = {}
    for folder in map(Path, config.results):
        rows = [row for row in read_rows(folder / RESULTS) if row.category == "all"]
        if not rows:
            raise UserError(f"{folder / RESULTS} must hold the rows of a benchmark, got none; run task=bench again")
        first = first or rows[0]
        _check_same(first, rows[0], folder)
        _check_filters(filters.setdefault(rows[0].temperature, rows[0]), rows[0], folder)
        _check_prompts(asked, folder)
        lines += _lines(rows, folder)
    lines = _unique(lines)
    out = Path(config.out)
    text = markdown(lines)
    write_text(out / "comparison.json", json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    write_text(out / "comparison.md", text)
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


def _check_filters(first: Row, other: Row, folder: Path) -> None:
    """Refuse two that sample at one temperature from differently filtered distributions: they would share a table."""
    then, now = ((row.top_k, row.top_p) for row in (first, other))
    if first.temperature > 0 and then != now:
        raise UserError(
            f"results at temperature {first.temperature:g} must have the same filters (top_k {then[0]}, top_p "
            f"{then[1]:g}), got {folder} with top_k {now[0]}, top_p {now[1]:g}; compare them apart"
        )


def _check_prompts(asked: dict[str, Turns], folder: Path) -> None:
    """Refuse other prompts under the same name, or fewer of them; ``asked`` holds those seen so far, by set."""
    found: dict[str, Turns] = {}
    for r in read_records(folder / RECORDS):
        # Later turns hold the target's own answer, which a tie may have changed.
        found.setdefault(r.prompts, set()).add((r.id, r.turn, 0 if r.turn else r.prompt_tokens))
    for name, turns in found.items():
        then = asked.setdefault(name, turns)
        if then != turns:
            raise UserError(
                f"results must be of the same prompts ({len(then)} turns of {name}), got {folder} with {len(turns)}, "
                f"{len(turns & then)} of them the same; measure again with the same limit and without max_minutes"
            )


def _lines(rows: Sequence[Row], folder: Path) -> list[Line]:
    draft = {}
    if (folder / COSTS).is_file():
        costs = read_costs(folder / COSTS)
        draft = {} if costs is None else {prediction.arm: prediction.draft for prediction in costs.predictions}
    found = []
    for prompts in dict.fromkeys(row.prompts for row in rows):
        of_set = [row for row in rows if row.prompts == prompts]
        coupled = {row.drafter for row in of_set if row.candidates == "coupled"}
        by_method: dict[str, list[Row]] = {}
        for row in of_set:
            by_method.setdefault(_method(row, coupled), []).append(row)
        for method, own in by_method.items():
            best = max(own, key=lambda row: row.speedup_total or 0.0)
            main = best.kind == "spec" and best.drafter == best.settings["drafter"]
            training = best.settings.get("training", {}) if main else {}
            found.append(
                Line(
                    prompts=prompts,
                    temperature=best.temperature,
                    method=method,
                    checkpoint=best.settings["checkpoint"] if main else None,
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


def _method(row: Row, coupled: set[str | None]) -> str:
    """A line's name: the drafter and, where they are not the default, the rule and how candidates were picked.

    Args:
        row: one arm.
        coupled: drafters that also drew their candidates with the target's noise.
    """
    if row.kind == "spec":
        rule = [row.verifier] if row.verifier != "match" else []
        rule += ["uncoupled"] if row.verifier == "match" and row.candidates == "topk" and row.drafter in coupled else []
        return ", ".join([str(row.drafter), *map(str, rule)])
    names = {"ar": "plain decoding", "hf": "transformers generate"}
    return names.get(row.kind, f"transformers {row.arm.removeprefix('hf-').split('-')[0]}")


def _unique(lines: Sequence[Line]) -> list[Line]:
    """One line per method and checkpoint.

    Plain decoding, ``generate`` and baselines may be in every benchmark: their first one stays. Of a checkpoint that
    was measured several times, with other plans, the fastest stays.
    """
    kept: dict[tuple[str, float, str, str | None], Line] = {}
    for line in lines:
        key = (line.prompts, line.temperature, line.method, line.checkpoint)
        if key not in kept or (line.checkpoint is not None and (line.speedup or 0) > (kept[key].speedup or 0)):
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
        several = Counter(line.method for line in of_table)
        for line in sorted(of_table, key=lambda line: -(line.speedup or 0)):
            which = f" ({line.checkpoint})" if several[line.method] > 1 else ""
            cells = [
                line.method + which + ("" if line.lossless else " (not lossless)"),
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
