"""The first process prepares, the others watch a file: no collective waits for data, a plan or an export.

``.first.json`` is rewritten every second for as long as the first process lives. A watcher believes it only once it has
seen it change, so what a killed run left behind means nothing. Machines have to share the run folder's file system;
their clocks need not agree.
"""

import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from distill.errors import UserError

NAME = ".first.json"


class Beacon:
    """Held by the first process: tells the others that it lives and how far it is.

    Args:
        folder: the run's.
        on: False writes nothing (nobody watches).
        every: seconds between two signs of life.
    """

    def __init__(self, folder: Path, *, on: bool, every: float = 1.0):
        self.path, self.on, self.every = folder / NAME, on, every
        self._state: dict[str, Any] = {"process": uuid.uuid4().hex, "stage": "starting"}
        self._beat, self._lock, self._end = 0, threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def tell(self, stage: str, **facts: Any) -> None:
        """Announce a stage and what belongs to it, at once."""
        with self._lock:
            self._state |= {"stage": stage, **facts}
        self._write()

    def __enter__(self) -> "Beacon":
        if self.on:
            self._write()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self.on:
            self._thread.join()
        self.path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._end.wait(self.every):
            self._write()

    def _write(self) -> None:
        if not self.on or self._end.is_set():
            return
        with self._lock, suppress(OSError):  # a full disk is for the work itself to report
            self._beat += 1
            temporary = self.path.with_name(f"{NAME}.tmp")
            temporary.write_text(json.dumps(self._state | {"beat": self._beat}), encoding="utf-8")
            os.replace(temporary, self.path)  # noqa: PTH105


class Watcher:
    """Held by every other process.

    Args:
        folder: the run's.
        timeout_s: without a sign of life for this long, waiting ends.
        say: where it is told, once a minute, what is waited for.
    """

    def __init__(
        self, folder: Path, *, timeout_s: float, say: Callable[[str], None], poll: float = 0.3, say_every: float = 60.0
    ):
        self.path, self.timeout_s, self.say, self.poll, self.say_every = folder / NAME, timeout_s, say, poll, say_every
        self._seen: dict[str, Any] | None = self._read()
        self._alive = False

    def wait(self, stage: str, *, done: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Return what was announced with ``stage``, or {} once ``done`` says that there is nothing to wait for.

        Raises:
            UserError: the first process has ended, or gives no sign of life.
        """
        heard = said = time.monotonic()
        while not done():
            state, now = self._read(), time.monotonic()
            if state is not None and state != self._seen:
                self._seen, self._alive, heard = state, True, now
            if self._alive and state is None and not done():
                raise UserError(
                    f"the first process must get to {stage!r}, got its end while it was {self._stage!r}; its own "
                    "message says why"
                )
            if self._alive and state is not None and state["stage"] == stage:
                return state
            if now - heard > self.timeout_s:
                raise UserError(
                    f"the first process must give a sign of life in {self.path} within trainer.timeout_s="
                    f"{self.timeout_s:g} s, got none; see whether it runs, and that all machines share that folder"
                )
            if now - said > self.say_every:
                said = now
                self.say(f"waiting for the first process ({self._stage})")
            time.sleep(self.poll)
        return {}

    @property
    def _stage(self) -> str:
        return self._seen["stage"] if self._alive and self._seen else "not heard of yet"

    def _read(self) -> dict[str, Any] | None:
        try:
            return json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
