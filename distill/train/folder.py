"""The folder of a run: what is in it, and whether a run there is new, to be resumed, or finished.

config.yaml       every option, written first
provenance.json   commit, versions, command line, config, data hash
data/             prepared conversations (unless data.folder says otherwise)
features/         the target's features of them (data.features=store, unless data.features_folder says otherwise)
vocab.json        how much of the text the draft vocabulary covers
plan.json         the frozen number of steps
checkpoints/      step-*.ckpt and index.json (last and best)
logs/             metrics.csv, samples.jsonl, wandb
export/           the drafter to take away; it appears when the run is finished
"""

import contextlib
import datetime
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from distill.config import flatten, to_dict
from distill.errors import UserError
from distill.export import collect
from distill.export.files import read_json, to_json
from distill.files import Lock, make_folder, unwritable, write_atomic
from distill.train.config import TrainConfig
from distill.train.parallel import World

SHARED = "DRAFTSMITH_RUN_DIR"
"""Environment variable by which the first process tells the others the run's folder."""

FREE = (
    *("run_dir", "tracking.", "eval.", "trainer.log_every", "trainer.keep", "trainer.timeout_s"),
    *("target.device", "target.verify", "data.features_folder", "data.features_confirm"),
    "data.endpoint.",
)
"""Options a resumed run may change: none of them reaches the weights."""

SPLIT = ("trainer.devices", "trainer.num_nodes", "trainer.batch_size", "trainer.accumulate")
"""How the rows of a step are divided; may change while their product stays."""

ROUNDING = (
    *SPLIT,
    *("trainer.strategy", "trainer.activation_checkpointing", "target.shard", "loss.chunk"),
)
"""Options a resumed run may change that add the same numbers in another order: equal to rounding, not bit for bit."""

LOCK = ".lock"
OURS = {
    *("config.yaml", "provenance.json", "data", "features", "vocab.json", "plan.json", "checkpoints", "logs", "export")
}


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
    def choose(cls, config: TrainConfig, world: World | None = None) -> "RunFolder":
        """Return the folder ``config`` names, or a new one under ``runs/``.

        Processes that Lightning starts for further devices find the first one's choice in the environment.

        Raises:
            UserError: several processes, started elsewhere, could not agree on a name.
        """
        world = world or World()
        named = (os.environ.get(SHARED) if world.local_rank else None) or config.run_dir
        if named is None:
            check_named(config, world)
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

    @contextmanager
    def opened(self, config: TrainConfig, *, say: Callable[[str], None] = lambda _: None) -> Iterator[None]:
        """Hold the folder: ``open`` it, and undo that if the inputs are refused before any work is in it.

        Args:
            config: resolved (``World.resolve``).
            say: is told what a resumed run does otherwise than before.

        Raises:
            UserError: what ``open`` raises, or another process has the folder.
        """
        self._check_free()
        with Lock(self.path / LOCK, what=f"run_dir {self.path}", instead="choose another run_dir"):
            new = self.open(config, say=say)
            try:
                self._sweep()
                yield
            except UserError:
                if new:
                    self._discard()
                raise

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
        for folder in (self.path / "data", self.checkpoints, self.logs):
            with contextlib.suppress(OSError):  # not empty, or not there
                folder.rmdir()
        if {path.name for path in self.path.iterdir()} == {LOCK}:
            shutil.rmtree(self.path, ignore_errors=True)

    def open(self, config: TrainConfig, *, say: Callable[[str], None] = lambda _: None) -> bool:
        """Create the folder and write config and provenance, or check that ``config`` fits the run that is there.

        Returns:
            True when the run is new.

        Raises:
            UserError: the folder holds something else, or a run with other options; it lists them.
        """
        if self.config.is_file():
            if changed := self._check_same(config):
                self._note_change(changed)
                say(f"resuming with {'; '.join(changed)}: equal to rounding from here on, not bit for bit")
            return False
        self._check_free()
        try:
            for folder in (self.checkpoints, self.logs):
                make_folder(folder)
        except OSError as error:
            raise unwritable(self.path, error) from error
        values = to_dict(config)
        write_atomic(self.provenance, to_json(collect(config=values)))
        write_atomic(self.config, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        return True

    def _check_free(self) -> None:
        """Refuse a folder of something else."""
        if self.config.is_file():
            return
        there = self.path.glob("*") if self.path.is_dir() else []
        strangers = sorted(p.name for p in there if p.name not in OURS and not p.name.startswith("."))
        if strangers or (self.path.exists() and not self.path.is_dir()):
            got = f"{self.path} with {', '.join(strangers[:3])}" if strangers else f"the file {self.path}"
            raise UserError(f"run_dir must be a new folder or one of an earlier run, got {got}")

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

    def _check_same(self, config: TrainConfig) -> list[str]:
        """Return what differs by no more than rounding.

        Raises:
            UserError: something differs by more; lists all of it.
        """
        old, new = flatten(self.read_config()), flatten(to_dict(config))
        # A run of an earlier version lacks the options that came later.
        before = {**flatten(to_dict(TrainConfig())), **old}
        names = [n for n in {**old, **new} if before.get(n) != new.get(n) and not n.startswith(FREE)]
        told = {name: f"{name} was {before.get(name)!r}, is now {new.get(name)!r}" for name in names}
        rows = [math.prod(values.get(name) or 1 for name in SPLIT) for values in (before, new)]
        refused = [text for name, text in told.items() if not name.startswith(ROUNDING)]
        if rows[0] != rows[1]:
            refused += [text for name, text in told.items() if name in SPLIT]
            refused += [f"rows per step (devices x num_nodes x batch_size x accumulate) were {rows[0]}, are {rows[1]}"]
        if refused:
            raise UserError(
                f"run_dir {self.path} holds a run with other options ({'; '.join(refused)}); repeat its options to "
                "resume it, or choose another run_dir"
            )
        return list(told.values())

    def _note_change(self, changed: list[str]) -> None:
        record = read_json(self.provenance)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        record["resumed_with"] = [*record.get("resumed_with", []), {"date": now, "options": changed}]
        write_atomic(self.provenance, to_json(record))


def check_named(config: TrainConfig, world: World) -> None:
    """Refuse a run without a name where each process would invent its own.

    Raises:
        UserError: no ``run_dir``, several processes, and no way to ask the first one.
    """
    if config.run_dir is None and world.must_agree:
        raise UserError(
            f"run_dir must be given when {world.launcher} starts {world.size} processes, got none; name a folder that "
            "all of them reach: run_dir=runs/mine"
        )
