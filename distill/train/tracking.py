"""Where metrics go: nowhere, a CSV file, or Weights & Biases. The only file that imports wandb.

Every tracker has the same methods, so nothing else asks which one is in use. A tracker that fails (disk full, no
network) says so once and falls silent; training goes on.
"""

import csv
import io
import json
import os
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from distill.errors import UserError
from distill.files import write_atomic
from distill.train.config import TrackingConfig


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One decoded held-out prompt: its text, the answer, the tokens emitted per target pass."""

    prompt: str
    answer: str
    tau: float


class Tracker(Logger):
    """The tracker that keeps nothing; the others override what they support."""

    @property
    def name(self) -> str:
        """Kind of tracker."""
        return "none"

    @property
    def version(self) -> str:
        """Lightning asks for one; a run folder holds a single run."""
        return ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record figures of one optimiser step."""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Record the resolved config."""

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Record decoded texts."""

    def log_export(self, folder: Path) -> None:
        """Record the finished checkpoint."""

    def close(self) -> None:
        """End reporting; Lightning's ``finalize`` comes too early, before the export."""


def _forgiving(method: Callable[..., None]) -> Callable[..., None]:
    """Let a tracker's method fail at most once: it warns, and the tracker stays silent from then on."""

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.broken:
            return
        try:
            method(self, *args, **kwargs)
        except self.failures as error:
            self.broken = True
            warnings.warn(f"tracking with {self.name} stopped, training goes on: {error}", stacklevel=2)

    return guarded


class CsvTracker(Tracker):
    """``metrics.csv`` (one row per logged step) and ``samples.jsonl`` in ``folder``.

    Args:
        folder: the run's ``logs/``.
        from_step: rows of later steps are dropped: a resumed run writes them again.
    """

    failures: tuple[type[Exception], ...] = (OSError, UserError)

    def __init__(self, folder: Path, *, from_step: int = 0):
        super().__init__()
        self.broken = False
        self.metrics, self.samples = folder / "metrics.csv", folder / "samples.jsonl"
        self.rows: list[dict[str, Any]] = []
        self.columns = ["step"]
        self._open(folder, from_step)

    @property
    def name(self) -> str:
        """Kind of tracker."""
        return "csv"

    @_forgiving
    def _open(self, folder: Path, from_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self.metrics.is_file():
            text = self.metrics.read_bytes().decode("utf-8", errors="replace")
            whole = text[: text.rfind("\n") + 1]  # the torn row of step 12 must not be taken for one of step 1
            reader = csv.DictReader(io.StringIO(whole, newline=""))
            kept = [row for row in reader if (row["step"] or "").isdigit() and int(row["step"]) <= from_step]
            self.rows = [{k: v for k, v in row.items() if k and v} | {"step": int(row["step"])} for row in kept]
            self.columns = list(dict.fromkeys(["step", *(key for row in self.rows for key in row)]))
            self._rewrite()
        if self.samples.is_file():
            kept_lines = [
                line for line in self.samples.read_text(encoding="utf-8").split("\n")[:-1] if _step(line) <= from_step
            ]
            write_atomic(self.samples, "".join(f"{line}\n" for line in kept_lines))

    @_forgiving
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a row, or complete the last one if it is of the same step; a new figure adds a column."""
        same = bool(self.rows) and self.rows[-1]["step"] == step
        row = {**(self.rows.pop() if same else {"step": step}), **metrics}
        self.rows.append(row)
        new = [key for key in row if key not in self.columns]
        if new or same or not self.metrics.is_file():
            self.columns += new
            self._rewrite()
        else:
            with self.metrics.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self.columns).writerow(row)

    @_forgiving
    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Add one line per sample."""
        with self.samples.open("a", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps({"step": step, **vars(sample)}, ensure_ascii=False) + "\n")

    def _rewrite(self) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns)
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomic(self.metrics, text.getvalue())


class WandbTracker(Tracker):
    """A Weights & Biases run, named like the run folder; offline when asked to, without a key or without network.

    Args:
        config: project, entity, name.
        run_dir: the run folder; the run's id is kept there, so that a resumed run continues the same one.
        say: where the note about offline logging goes.
    """

    def __init__(self, config: TrackingConfig, run_dir: Path, *, say: Callable[[str], None]):
        super().__init__()
        import wandb
        from wandb.errors import Error

        self.wandb = wandb
        self.failures: tuple[type[Exception], ...] = (OSError, RuntimeError, TypeError, ValueError, Error)
        self.broken = False
        self._open(config, run_dir, say)

    @property
    def name(self) -> str:
        """Kind of tracker."""
        return "wandb"

    @_forgiving
    def _open(self, config: TrackingConfig, run_dir: Path, say: Callable[[str], None]) -> None:
        mode: Any = os.environ.get("WANDB_MODE")
        if mode is None:
            online = not config.offline and self.wandb.login(prompt=False, verify=False)
            mode = "online" if online else "offline"
        logs = run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        id_file = logs / "wandb_id"
        if not id_file.is_file():
            write_atomic(id_file, uuid.uuid4().hex[:12])
        options: dict[str, Any] = {
            "project": config.project,
            "entity": config.entity,
            "name": config.run_name or run_dir.name,
            "id": id_file.read_text().strip(),
            "dir": str(logs),
            "settings": self.wandb.Settings(console="off", silent=True, init_timeout=30),
        }
        if mode == "online":
            try:
                self.run = self.wandb.init(mode="online", resume="allow", **options)
                return
            except self.failures as error:
                say(f"wandb cannot be reached ({error})")
                mode = "offline"
        self.run = self.wandb.init(mode=mode, **options)
        if mode == "offline":
            where = self.run.dir.removesuffix("/files")
            say(f"wandb logs offline to {logs}; upload later with: wandb sync {where}")

    @_forgiving
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record figures of one optimiser step."""
        self.run.log(dict(metrics), step=step)

    @_forgiving
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Record the resolved config."""
        self.run.config.update(params, allow_val_change=True)

    @_forgiving
    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Record decoded texts as a table."""
        rows = [[sample.prompt, sample.answer, sample.tau] for sample in samples]
        self.run.log({"samples": self.wandb.Table(columns=["prompt", "answer", "tau"], data=rows)}, step=step)

    @_forgiving
    def log_export(self, folder: Path) -> None:
        """Upload the finished checkpoint as an artifact."""
        artifact = self.wandb.Artifact(f"drafter-{self.run.id}", type="model")
        artifact.add_dir(str(folder))
        self.run.log_artifact(artifact)

    @_forgiving
    def close(self) -> None:
        """End the run."""
        self.run.finish()


def make_trackers(
    config: TrackingConfig, run_dir: Path, *, from_step: int, say: Callable[[str], None]
) -> list[Tracker]:
    """Return the trackers ``config`` asks for."""
    if config.name == "none":
        return [Tracker()]
    csv_tracker = CsvTracker(run_dir / "logs", from_step=from_step)
    return [csv_tracker] if config.name == "csv" else [csv_tracker, WandbTracker(config, run_dir, say=say)]


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
