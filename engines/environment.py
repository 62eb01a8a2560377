"""One virtual environment per engine, in the user's cache: made once, with pinned versions, complete or not there."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distill.errors import UserError
from distill.files import Lock, make_folder, unwritable, write_atomic
from distill.target.cache import cache_dir

VARIABLE = "DRAFTSMITH_ENGINES"
State = Literal["ready", "outdated", "missing"]


def engines_dir() -> Path:
    """Where engines are installed: $DRAFTSMITH_ENGINES, else ``engines/`` in the user's cache."""
    if own := os.environ.get(VARIABLE):
        return Path(own).expanduser()
    return cache_dir() / "engines"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment.

    Attributes:
        name: of the engine; its folder's name too.
        steps: arguments of pip, one call each, in order; ``constraints/NAME.txt`` holds for all of them.
        probe: Python statements that run when everything is installed as it should be.
        size: on the disk, for people ("3.4 GB").
    """

    name: str
    steps: tuple[tuple[str, ...], ...]
    probe: str
    size: str

    @property
    def folder(self) -> Path:
        """Everything that belongs to the engine."""
        return engines_dir() / self.name

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def constraints(self) -> Path:
        """Exact versions of what the steps bring along."""
        return Path(__file__).parent / "constraints" / f"{self.name}.txt"

    @property
    def recipe(self) -> str:
        """Digest of what decides which versions are installed."""
        parts = json.dumps([self.steps, self.probe]), self.constraints.read_text(encoding="utf-8")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def state(self) -> State:
        """Whether it is installed, and by this recipe."""
        try:
            marker = json.loads((self.folder / "installed.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return "missing"
        if not self.python.is_file():
            return "missing"
        return "ready" if marker.get("recipe") == self.recipe else "outdated"

    def require(self) -> None:
        """Refuse to go on without it.

        Raises:
            UserError: missing or outdated.
        """
        if (state := self.state()) != "ready":
            raise UserError(
                f"engine {self.name} must be installed in {self.folder}, got it {state}; "
                f"run python -m engines setup {self.name} ({self.size} on the disk)"
            )

    def setup(self, say: Callable[[str], None]) -> bool:
        """Install it unless it is there; one process at a time. An interrupted call leaves it missing.

        Args:
            say: told what is being done.

        Returns:
            Whether anything had to be done.

        Raises:
            UserError: a package could not be had, or the disk is full.
        """
        with Lock(
            self.folder / ".lock", what=f"the environment {self.folder}", instead=f"set {VARIABLE} to another folder"
        ):
            if self.state() == "ready":
                return False
            try:
                make_folder(self.folder)
                (self.folder / "installed.json").unlink(missing_ok=True)
                for stale in ("venv", "models"):  # another version may convert otherwise
                    shutil.rmtree(self.folder / stale, ignore_errors=True)
                self._install(say)
            except OSError as error:
                raise unwritable(self.folder, error) from error
            marker = {"recipe": self.recipe, "python": sys.version.split()[0], "steps": self.steps}
            write_atomic(self.folder / "installed.json", json.dumps(marker, indent=1) + "\n")
            return True

    def _install(self, say: Callable[[str], None]) -> None:
        say(f"{self.name}: virtual environment in {self.folder}, {self.size}")
        self._call([sys.executable, "-m", "venv", str(self.folder / "venv")], append=False)
        for step in self.steps:
            say(f"{self.name}: pip {' '.join(step)}")
            limits = ["-c", str(self.constraints)] if step[0] == "install" else []
            self._call([str(self.python), "-m", "pip", *step, *limits])
        self._call([str(self.python), "-c", self.probe])

    def _call(self, command: Sequence[str], *, append: bool = True) -> None:
        """Run one step, its output in ``setup.log``."""
        log = self.folder / "setup.log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        with log.open("ab" if append else "wb") as file:
            done = subprocess.run(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=clean, check=False)
        if done.returncode:
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR")] or lines or ["nothing said"]
            raise UserError(
                f"engine {self.name} must be installable with {' '.join(command[1:5])} ..., got: {errors[-1][:300]}; "
                f"see {log}"
            )
