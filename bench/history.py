"""Results on disk: one JSON file per run, complete or not, and one line per run in ``history.jsonl``."""

import json
import math
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.record import Measurement, Options
from distill.errors import UserError
from distill.export import collect
from serve_eval.rows import write_text

SCHEMA_VERSION = 1
HISTORY = "history.jsonl"
RESULTS = Path(__file__).parent / "results"


@dataclass(kw_only=True)
class PartResult:
    """One part of a run: what it measured, or why it failed (``error``); ``load`` is the load average before it."""

    name: str
    seconds: float
    load: list[float]
    measurements: list[Measurement] = field(default_factory=list)
    error: str | None = None


@dataclass(kw_only=True)
class Run:
    """One call of the bench.

    Attributes:
        wanted: names of the parts asked for; the run is complete when all are there.
        provenance: date, commit, versions, hardware, options.
        parts: those that have ended.
    """

    options: Options
    wanted: list[str]
    provenance: dict[str, Any]
    parts: list[PartResult] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every part has ended."""
        return [part.name for part in self.parts] == self.wanted

    @property
    def file_name(self) -> str:
        """``<date>-<commit>.json``, the time of day included; names sort by date."""
        date = datetime.fromisoformat(self.provenance["date"])
        return f"{date:%Y-%m-%d_%H-%M-%S}-{commit_label(self.provenance['git'])}.json"


def begin(options: Options, parts: Sequence[str]) -> Run:
    """Start a record of a run over ``parts``."""
    provenance = collect(argv=["bench", *parts], config=asdict(options))
    if provenance["git"]["dirty"]:
        provenance["git"]["dirty"] = _changed_beside_results()
    return Run(options=options, wanted=list(parts), provenance=provenance)


def _changed_beside_results() -> bool:
    """Whether code differs from the commit; results of earlier runs that wait for theirs do not count."""
    root = RESULTS.parents[1]
    command = ["git", "-C", str(root), "status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(root)}"]
    return bool(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip())


def commit_label(git: dict[str, Any]) -> str:
    """Seven digits of the commit, ``+`` behind it where files differed from it."""
    if git["commit"] is None:
        return "nocommit"
    return git["commit"][:7] + ("+" if git["dirty"] else "")


def save(run: Run, folder: Path) -> Path:
    """Write the run's file, and its line of the history once it is complete; both appear whole or not at all."""
    path = folder / run.file_name
    item = {"schema_version": SCHEMA_VERSION, "complete": run.complete} | asdict(run)
    write_text(path, json.dumps(_plain(item), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    if run.complete:
        lines = [line for line in read_history(folder) if line["file"] != path.name]
        lines.append(_line(run))
        write_text(folder / HISTORY, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return path


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the history, oldest first.

    Raises:
        UserError: a damaged line.
    """
    path = folder / HISTORY
    found = []
    for number, text in enumerate(path.read_bytes().splitlines() if path.is_file() else [], start=1):
        try:
            line = json.loads(text.decode("utf-8"))
            _ = [line["setting"][name] for name in ("target", "cpu", "threads", "engine")]
            _ = [(figure["unit"], figure["value"]) for figure in line["figures"].values()]
            found.append(line | {"figures": {key: dict(figure) for key, figure in line["figures"].items()}})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} must hold one run a line, got a damaged line {number}; delete that line"
            ) from error
    return found


def unfinished(folder: Path, options: Options, parts: Sequence[str]) -> Run | None:
    """Return the newest interrupted run over the same parts, options and commit; None where there is none."""
    now = begin(options, parts)
    for path in sorted(folder.glob("*.json"), reverse=True):
        try:
            item = json.loads(path.read_text(encoding="utf-8"))
            run = _restore(item)
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
        same = (run.options, run.wanted, run.provenance["git"]) == (now.options, now.wanted, now.provenance["git"])
        if same and not run.complete:
            return run
    return None


def _restore(item: dict[str, Any]) -> Run:
    parts = [
        PartResult(
            **part | {"measurements": [Measurement(**m | {"value": _number(m["value"])}) for m in part["measurements"]]}
        )
        for part in item["parts"]
    ]
    return Run(options=Options(**item["options"]), wanted=item["wanted"], provenance=item["provenance"], parts=parts)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _line(run: Run) -> dict[str, Any]:
    figures = {
        f"{m.part}/{m.name}": _plain({"value": m.value, "unit": m.unit, "met": m.met})
        for part in run.parts
        for m in part.measurements
    }
    return {
        "file": run.file_name,
        "date": run.provenance["date"],
        "commit": commit_label(run.provenance["git"]),
        "setting": setting(run),
        "failed": [part.name for part in run.parts if part.error is not None],
        "figures": figures,
    }


def setting(run: Run) -> dict[str, Any]:
    """What figures must share to be compared."""
    return {
        "target": run.options.target,
        "engine": run.options.engine,
        "threads": run.options.threads,
        "quick": run.options.quick,
        "cpu": run.provenance["hardware"]["cpu"],
    }


def _plain(value: Any) -> Any:
    """What JSON has words for: NaN and infinity become null, array scalars numbers, other objects their text."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
