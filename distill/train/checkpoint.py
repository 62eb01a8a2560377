"""Checkpoints that survive anything: written whole or not at all, the last good one never lost.

Every checkpoint carries the name of the best one so far; ``checkpoints/index.json`` repeats it for readers. An old file
goes only after the new one is complete. They are this program's own files, yet loaded as plain tensors and numbers only
(``weights_only``): a checkpoint from elsewhere cannot run code.
"""

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO

from distill.config import first_line
from distill.errors import UserError
from distill.files import make_folder, sync, write_atomic
from distill.train.callbacks import SPENT, AfterStep
from distill.train.schedule import Plan

INDEX = "index.json"


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's file access: temporary name, sync, replace; loads no objects, only tensors and numbers."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``.

        Raises:
            UserError: the disk is full or read-only; what was there stays.
        """
        path = Path(path)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            make_folder(path.parent)
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync(path.parent)
        except (OSError, RuntimeError) as error:
            # torch's zip writer hides a full disk behind a RuntimeError about file positions.
            reason = error if isinstance(error, OSError) else "a write that failed (is the disk full?)"
            raise UserError(f"checkpoint {path} must be writable, got {reason}; free some space and resume") from error
        finally:
            temporary.unlink(missing_ok=True)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            UserError: missing, damaged, or holding anything but tensors and plain values.
        """
        try:
            if not zipfile.is_zipfile(path):
                raise ValueError("a file of another kind, or a torn one")
            return torch.load(path, map_location=map_location, weights_only=True)
        except (OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(f"{path} must be a whole checkpoint of this program, got {first_line(error)}") from error

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint."""
        Path(path).unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint on disk.

    Attributes:
        path, step: which.
        metrics: of the best one, the figures at that step.
        best: of the newest one, what it says about the best one (file, step, tau, metrics).
    """

    path: Path
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None


def find_last(folder: Path, *, say: Callable[[str], None]) -> Found | None:
    """Return the newest checkpoint that loads; damaged ones are set aside. None when there is none."""
    for path in sorted(folder.glob("step-*.ckpt"), reverse=True):
        try:
            states = AtomicCheckpointIO().load_checkpoint(path).get("callbacks", {}).values()
        except UserError as error:
            with suppress(FileNotFoundError):  # the run goes on meanwhile, and has deleted it
                path.replace(path.with_suffix(".damaged"))
                say(f"{error}; set aside, trying the one before")
            continue
        best = next((state["best"] for state in states if isinstance(state, dict) and "best" in state), None)
        return Found(path=path, step=int(path.stem.removeprefix("step-")), best=best)
    return None


def find_best(folder: Path) -> Found:
    """Return the checkpoint with the highest simulated acceptance length.

    The newest checkpoint knows it: the index may be older, when a run was killed between the two.

    Raises:
        UserError: no checkpoint yet.
    """
    last = find_last(folder, say=lambda _: None)
    if last is None:
        raise UserError(f"{folder} must hold checkpoints, got none; resume the training")
    best = last.best
    if best is None or not (folder / best["file"]).is_file():
        return last
    return Found(path=folder / best["file"], step=best["step"], metrics=best["metrics"])


def settle(folder: Path, *, best: dict[str, Any] | None, keep: int) -> None:
    """Do what comes after a new checkpoint: point the index at it, then delete what is not needed any more.

    Args:
        folder: with at least one checkpoint, the newest of them whole.
        best: file, step, tau and metrics of the best one.
        keep: newest checkpoints to keep, at least 1; the best one is kept beside them.
    """
    files = sorted(path.name for path in folder.glob("step-*.ckpt"))
    write_atomic(folder / INDEX, json.dumps({"last": files[-1], "best": best}, indent=2) + "\n")
    for file in files[:-keep]:
        if best is None or file != best["file"]:
            (folder / file).unlink()


class Checkpoints(AfterStep):
    """Writes a checkpoint when the plan says so and after a best validation; keeps the last ones and the best one.

    It comes after validation in the list of callbacks, so a checkpoint holds a step with everything that belongs
    to it done.

    Args:
        folder: the run's ``checkpoints/``.
        plan: when.
        keep: newest checkpoints to keep, at least 1; the best one is kept beside them.
    """

    def __init__(self, folder: Path, plan: Plan, *, keep: int):
        self.folder, self.plan, self.keep = folder, plan, keep
        self.best: dict[str, Any] | None = None

    def after_step(self, trainer: pl.Trainer, module: Any, step: int) -> None:
        """Write, then point the index at the new file, then delete what is not needed any more."""
        file = f"step-{step:08d}.ckpt"
        tau = module.validated.get(step)
        # Without validation data there is nothing to compare, and the newest one counts as the best.
        better = self.best is None or self.best["tau"] is None or (tau is not None and tau >= self.best["tau"])
        if not self.plan.due(self.plan.checkpoint_every, step) and not (better and tau is not None):
            return
        if better or self.best is None:
            metrics = {k: v for k, v in module.metrics.items() if k.startswith("val/") or k in SPENT}
            self.best = {"file": file, "step": step, "tau": tau, "metrics": metrics}
        trainer.save_checkpoint(self.folder / file)
        if trainer.is_global_zero:
            settle(self.folder, best=self.best, keep=self.keep)

    def state_dict(self) -> dict[str, Any]:
        """The best checkpoint so far travels with every checkpoint."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the best checkpoint so far."""
        self.best = state_dict["best"]
