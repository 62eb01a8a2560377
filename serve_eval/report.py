"""task=report: one self-contained HTML page from a benchmark's result files. No network, no script."""

import csv
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from distill.config import opt
from distill.errors import UserError
from serve_eval import report_plots as plots
from serve_eval.command import typed
from serve_eval.cost import CostReport, read_costs
from serve_eval.report_plots import Interval, Series
from serve_eval.rows import COSTS, RECORDS, REPORT, RESULTS, Record, Row, read_records, read_rows, write_text
from serve_eval.summary import best_of


@dataclass(kw_only=True)
class Config:
    """Options of task=report."""

    results: str | None = opt(None, "folder a benchmark wrote (results.jsonl, records.jsonl, cost.json)")
    run: str | None = opt(None, "run folder of the drafter, for its training curves; null leaves them out")
    out: str | None = opt(None, "HTML file to write; null writes report.html into the results folder")


def run(config: Config) -> Path:
    """Write the page and return its path.

    Raises:
        UserError: no results there, or results of another schema version.
    """
    if config.results is None:
        raise UserError("results must be a folder that a benchmark wrote, got none; pass results=DIR")
    folder = Path(config.results)
    rows, records = read_rows(folder / RESULTS), read_records(folder / RECORDS)
    if not rows:
        raise UserError(f"{folder / RESULTS} must hold at least one row, got none; run task=bench again")
    page = render(rows, records, read_costs(folder / COSTS), training=_training(config.run))
    out = Path(config.out) if config.out else folder / REPORT
    write_text(out, page)
    return out


def render(
    rows: Sequence[Row],
    records: Sequence[Record],
    costs: CostReport | None,
    *,
    training: Sequence[dict[str, float]] = (),
) -> str:
    """Return the page.

    Args:
        rows: of one benchmark.
        records: of the same benchmark.
        costs: None leaves out the cost section.
        training: logged figures of the training run, one mapping per logged step.
    """
    environment = Environment(
        loader=PackageLoader("serve_eval"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"x": _times, "f2": lambda v: _plain(v, ".2f"), "f1": lambda v: _plain(v, ".1f")}
    environment.filters |= {"pct": _percent, "ms": _ms, "mb": _mb, "short": _short}
    whole = [row for row in rows if row.category == "all"]
    arms = list(dict.fromkeys(row.arm for row in rows))
    colours = {arm: i % plots.N_COLOURS for i, arm in enumerate(a for a in arms if a not in ("ar", "hf"))}
    best = best_of(whole) or whole[0]
    lossy = {row.arm for row in rows if not row.lossless}
    environment.filters["labelled"] = lambda arm: f"{arm} (not lossless)" if arm in lossy else arm
    return environment.get_template("report.html.j2").render(
        whole=whole,
        best=best,
        ar=next(row for row in whole if row.arm == "ar" and row.prompts == best.prompts),
        colours=colours,
        sets=list(dict.fromkeys(row.prompts for row in rows)),
        differences=_differences(records),
        figures=_figures(rows, records, costs, colours),
        training=_training_figures(training),
        costs=costs,
        decodes=_decodes(records),
        settings=best.settings,
        provenance=best.provenance,
        argv=typed(best.provenance.get("argv", [])),
    )


# ------------------------------------------------------------------------------------------------------- figures
def _figures(
    rows: Sequence[Row], records: Sequence[Record], costs: CostReport | None, colours: dict[str, int]
) -> dict[str, Markup]:
    spec = [row for row in rows if row.kind == "spec"]
    whole = [row for row in spec if row.category == "all"]
    first = whole[0].prompts if whole else ""
    drawn: dict[str, str] = {}
    several = len({row.prompts for row in whole}) > 1
    items = [
        Interval(
            label=_group_label(row, several),
            value=row.speedup_total,
            low=row.speedup_ci[0] if row.speedup_ci else None,
            high=row.speedup_ci[1] if row.speedup_ci else None,
            colour=colours[row.arm],
        )
        for row in spec
        if row.speedup_total is not None
    ]
    if items:
        drawn["speedup"] = plots.intervals(
            items, x_label="decode speed relative to plain decoding", description="Speedup per prompt group"
        )
    depths = [
        Series(
            name=row.arm,
            x=range(1, len(row.accept_by_depth) + 1),
            y=row.accept_by_depth,
            colour=colours[row.arm],
        )
        for row in whole
        if row.prompts == first and row.accept_by_depth
    ]
    if depths:
        drawn["depth"] = plots.bars(
            depths,
            x_label="depth of the drafted token",
            description="Conditional acceptance by depth",
        )
    lengths = _lengths(records, colours)
    if lengths:
        drawn["lengths"] = plots.bars(
            lengths,
            x_label="tokens emitted by one pass of the target",
            description="Distribution of accepted lengths",
        )
    if costs is not None:
        drawn |= _cost_figures(costs, colours)
    return {name: Markup(svg) for name, svg in drawn.items()}  # noqa: S704 - our own markup, texts escaped


def _group_label(row: Row, several: bool) -> str:
    if row.category == "all":
        return f"{row.prompts}, all" if several else "all prompts"
    return f"{row.prompts}, {row.category}" if several else row.category


def _lengths(records: Sequence[Record], colours: dict[str, int]) -> list[Series]:
    series = []
    for arm, colour in colours.items():
        counts = Counter(n for r in records if r.arm == arm for n in r.emitted)
        total = sum(counts.values())
        if total:
            x = range(1, max(counts) + 1)
            series.append(Series(name=arm, x=x, y=[counts[n] / total for n in x], colour=colour))
    return series


def _cost_figures(costs: CostReport, colours: dict[str, int]) -> dict[str, str]:
    curve = costs.curve
    nodes = {cost.arm: cost.nodes for cost in costs.rounds}
    points = [Series(name=p.arm, x=[nodes[p.arm]], y=[p.tau], colour=colours.get(p.arm, 0)) for p in costs.predictions]
    parts = [
        (
            cost.arm,
            [("target", cost.target_s), ("draft", cost.draft_s), ("extend", cost.extend_s), ("host", cost.host_s)],
        )
        for cost in costs.rounds
    ]
    return {
        "verify": plots.lines(
            [Series(name="v(T)", x=curve.widths, y=curve.ratio, colour=5)],
            points=points,
            x_label="tokens per pass, T",
            y_label="cost v(T); tokens gained",
            description="Verify-cost curve",
            log_x=True,
            y_from_zero=True,
            reference=1.0,
        ),
        "round": plots.stacks(
            parts, x_label="milliseconds per round", description="Where the time of a round goes", unit=1000
        ),
    }


def _training(run: str | None) -> list[dict[str, float]]:
    """Read ``logs/metrics.csv`` of a run folder (or of the run around an export folder); empty without one."""
    if run is None:
        return []
    folders = [Path(run), Path(run).parent]
    path = next((f / "logs" / "metrics.csv" for f in folders if (f / "logs" / "metrics.csv").is_file()), None)
    if path is None:
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {name: value for name, text in row.items() if (value := _number(text)) is not None}
            for row in csv.DictReader(file)
        ]


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _training_figures(rows: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """Loss and acceptance length against the step, training and held-out together."""
    found = []
    for title, y_label, names in (
        ("Loss while training", "loss", ("train/loss", "val/loss")),
        ("Acceptance length while training", "tokens per pass", ("train/tau", "val/tau", "decode/tau")),
    ):
        series = [
            Series(
                name=name,
                x=[row["step"] for row in rows if name in row and "step" in row],
                y=[row[name] for row in rows if name in row and "step" in row],
                colour=colour,
            )
            for colour, name in enumerate(names)
        ]
        series = [s for s in series if len(s.x) > 1]
        if series:
            svg = plots.lines(series, x_label="optimiser step", y_label=y_label, description=title)
            found.append({"title": title, "svg": Markup(svg), "legend": [(s.name, s.colour) for s in series]})  # noqa: S704
    return found


# --------------------------------------------------------------------------------------------------------- texts
def _differences(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.matches is False]


def _decodes(records: Sequence[Record]) -> list[dict[str, Any]]:
    """First turns kept for the viewer: every token with the pass that produced it and who proposed it."""
    decodes = []
    for record in records:
        if record.pieces is None or record.turn > 0:
            continue
        tokens = [{"text": record.pieces[0], "drafted": False, "note": "first token, from the prefill"}]
        start = 1
        passes = zip(record.emitted, record.accepted, record.offered, strict=True)
        for number, (emitted, accepted, offered) in enumerate(passes, start=1):
            note = f"pass {number}: {accepted} accepted of depth {offered}"
            tokens += [
                {"text": record.pieces[start + i], "drafted": i < accepted, "note": note} for i in range(emitted)
            ]
            start += emitted
        drafted = sum(record.accepted)
        decodes.append({"record": record, "tokens": tokens, "drafted": drafted / max(len(record.ids), 1)})
    return decodes


def _plain(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)


def _percent(value: float | None) -> str:
    """Whole numbers where nothing is lost: 100 %, but 97.9 %."""
    if value is None:
        return "–"
    return f"{100 * value:.0f} %" if value in (0, 1) else f"{100 * value:.1f} %"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.{0 if value >= 0.01 else 1}f} ms"


def _short(name: str) -> str:
    """The last part of a local path; other names as they are."""
    return Path(name).name if name.startswith((".", "/", "~")) else name


def _mb(value: int | None) -> str:
    return "–" if value is None else f"{value / 2**20:.0f} MiB"
