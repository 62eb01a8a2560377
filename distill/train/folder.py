"""The folder of a run: what is in it, and whether a run there is new, to be resumed, or finished.

config.yaml       every option, written first
provenance.json   commit, versions, command line, config, data hash
data/             prepared conversations (unless data.folder says otherwise)
vocab.json        how much of the text the draft vocabulary covers
plan.json         the frozen number of steps
checkpoints/      step-*.ckpt and index.json (last and best)
logs/             metrics.csv, samples.jsonl, wandb
export/           the drafter to take away; it appears when the run is finished
"""

import contextlib
import datetime
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from distill.config import flatten, to_dict
from distill.errors import UserError
from distill.export import collect
from distill.export.files import read_json, to_json, unwritable, write_atomic
from distill.train.config import TrainConfig

SHARED = "DRAFTSMITH_RUN_DIR"
"""Environment variable by which the first process tells the others the run's folder."""

FREE = ("run_dir", "tracking.", "eval.", "trainer.log_every", "trainer.keep", "target.device", "target.verify")
"""Options a resumed run may change: none of them reaches the weights."""

OURS = {"config.yaml", "provenance.json", "data", "vocab.json", "plan.json", "checkpoints", "logs", "export"}


class RunFolder:
    """Paths of a run and its state.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config, self.provenance = path / "config.yaml", path / "provenance.json"
        self.plan, self.vocab = path / "plan.json", path / "vocab.json"
        self.checkpoints, self.logs, self.export = path / "checkpoints", path / "logs", path / "export"

    @classmethod
    def choose(cls, config: TrainConfig) -> "RunFolder":
        """Return the folder ``config`` names, or a new one under ``runs/``.

        Processes that Lightning starts for further devices find the first one's choice in the environment.
        """
        named = (os.environ.get(SHARED) if local_rank() else None) or config.run_dir
        if named is None:
            target = Path(config.target.name).name
            stem = f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}-{config.drafter['name']}-{target}"
            names = (stem if i == 1 else f"{stem}-{i}" for i in range(1, 1000))
            named = str(next(Path("runs") / name for name in names if not (Path("runs") / name).exists()))
        return cls(Path(named))

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Tell processes started meanwhile (one per further device) which folder the run is in."""
        os.environ[SHARED] = str(self.path)
        try:
            yield
        finally:
            os.environ.pop(SHARED, None)

    @property
    def finished(self) -> bool:
        """The export is written last, and at once."""
        return (self.export / "config.json").is_file()

    @staticmethod
    def rank(config: TrainConfig) -> int:
        """Number of this process among all of the run, known before the Trainer exists."""
        if "RANK" in os.environ:
            return int(os.environ["RANK"])
        return int(os.environ.get("NODE_RANK", "0")) * config.trainer.devices + local_rank()

    def wait(self) -> None:
        """Wait until the first process has prepared the data and fixed the plan; no collective needs to."""
        while not (self.plan.is_file() or self.finished):
            time.sleep(0.5)

    @contextmanager
    def opened(self, config: TrainConfig) -> Iterator[None]:
        """Hold the folder: ``open`` it, and undo that if the inputs are refused before any work is in it.

        Raises:
            UserError: what ``open`` raises, or another process has the folder.
        """
        new = self.open(config)
        lock = os.open(self.path, os.O_RDONLY)  # the folder itself is locked: no file to leave behind
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(
                    f"run_dir {self.path} must be used by one process at a time, got a second one; wait for the other "
                    "or choose another run_dir"
                ) from error
            try:
                self._sweep()
                yield
            except UserError:
                if new:
                    self._discard()
                raise
        finally:
            os.close(lock)

    def _sweep(self) -> None:
        """Remove what a killed process left half-written."""
        for where in (self.path, self.checkpoints, self.logs):
            for stray in where.glob(".*.tmp"):
                shutil.rmtree(stray) if stray.is_dir() else stray.unlink()

    def _discard(self) -> None:
        """Take an unused folder away again, so that the corrected command finds it free; data and checkpoints stay."""
        if any(self.checkpoints.glob("step-*")) or (self.path / "data" / "manifest.json").is_file():
            return
        for path in (self.config, self.provenance, self.vocab, self.plan):
            path.unlink(missing_ok=True)
        for lock in (self.path / "data").glob(".lock"):
            lock.unlink()
        for folder in (self.path / "data", self.checkpoints, self.logs, self.path):
            with contextlib.suppress(OSError):  # not empty, or not there
                folder.rmdir()

    def open(self, config: TrainConfig) -> bool:
        """Create the folder and write config and provenance, or check that ``config`` fits the run that is there.

        Returns:
            True when the run is new.

        Raises:
            UserError: the folder holds something else, or a run with other options; it lists them.
        """
        if self.config.is_file():
            self._check_same(config)
            return False
        there = self.path.glob("*") if self.path.is_dir() else []
        strangers = sorted(p.name for p in there if p.name not in OURS and not p.name.startswith("."))
        if strangers or (self.path.exists() and not self.path.is_dir()):
            got = f"{self.path} with {', '.join(strangers[:3])}" if strangers else f"the file {self.path}"
            raise UserError(f"run_dir must be a new folder or one of an earlier run, got {got}")
        try:
            for folder in (self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.path, error) from error
        values = to_dict(config)
        write_atomic(self.provenance, to_json(collect(config=values)))
        write_atomic(self.config, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        return True

    def note_data(self, data_hash: str) -> None:
        """Write the hash of the training data into the provenance.

        Raises:
            UserError: the run was begun with other data.
        """
        record = read_json(self.provenance)
        if record["data_hash"] not in (None, data_hash):
            raise UserError(
                f"the data of {self.path} must be the ones it was begun with (hash {record['data_hash'][:16]}), got "
                f"{data_hash[:16]}; restore them or start a new run"
            )
        record["data_hash"] = data_hash
        write_atomic(self.provenance, to_json(record))

    def read_config(self) -> dict[str, Any]:
        """Read ``config.yaml``.

        Raises:
            UserError: missing or damaged.
        """
        try:
            return dict(yaml.safe_load(self.config.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
            raise UserError(f"{self.config} must be a run's config, got {error}; choose another run_dir") from error

    def _check_same(self, config: TrainConfig) -> None:
        old, new = flatten(self.read_config()), flatten(to_dict(config))
        changed = [
            f"{name} was {old.get(name)!r}, is now {new.get(name)!r}"
            for name in {**old, **new}
            if old.get(name) != new.get(name) and not name.startswith(FREE)
        ]
        if changed:
            raise UserError(
                f"run_dir {self.path} holds a run with other options ({'; '.join(changed)}); repeat its options to "
                "resume it, or choose another run_dir"
            )


def local_rank() -> int:
    """Which process of this machine this is (0 unless a launcher says otherwise)."""
    return int(os.environ.get("LOCAL_RANK", "0"))
