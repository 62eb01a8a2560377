"""How the bench talks to an arm that runs in a process of its own: one JSON object a line, both ways.

    arm   -> {"ready": ...}                         model and data are built
    bench -> "step"
    arm   -> {"seconds": 1.2, "loss": 3.4, ...}     one optimiser step later
    ...      and so on, until the bench closes the pipe

An arm that waits uses no processor, so arms are measured in turns. Standard library only: the peers' environments
import this file, too.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Link:
    """The arm's end. Whatever else the process prints goes to its standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._base = 0

    def turns(self, about: Mapping[str, Any]) -> Iterator[None]:
        """Say that everything is built (``about``), then yield once for every step that is asked for."""
        self._base = _forget_peak()
        self._send({"ready": dict(about)})
        for line in sys.stdin:
            assert line == "step\n", line
            yield

    def answer(self, **figures: float) -> None:
        """Report one step; adds how far the resident memory rose above what it was when everything was built."""
        self._send({**figures, "grown": _resident("VmHWM") - self._base})

    def _send(self, message: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


class Arm:
    """The bench's end: a process that answers ``step``.

    Args:
        name: for messages.
        command: what to run.
        env: variables on top of this process's.

    Raises:
        RuntimeError: here or from ``step``: the process ended; the last lines it wrote are in the message.
    """

    def __init__(self, name: str, command: Sequence[str], *, cwd: Path, env: Mapping[str, str]):
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the arm
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        try:
            self.about: dict[str, Any] = self._read()["ready"]
        except BaseException:
            self.close()
            raise

    def step(self) -> dict[str, float]:
        """Return what the arm says about one step: ``seconds``, ``loss``, ``grown`` (bytes)."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer that does not come says why
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> "Arm":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            message: dict[str, Any] = json.loads(line)
            return message
        code = self._process.wait()
        self._errors.seek(0)
        last = " | ".join(self._errors.read().strip().splitlines()[-3:])
        raise RuntimeError(f"{self.name} must answer, got exit code {code}: {last or 'no message'}")


def _resident(name: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process in bytes; 0 where the system has no such file."""
    if not STATUS.exists():
        return 0
    found = [line.split() for line in STATUS.read_text().splitlines() if line.startswith(name + ":")]
    return 1024 * int(found[0][1])


def _forget_peak() -> int:
    """Let the high-water mark start anew; returns what is resident now, in bytes."""
    with contextlib.suppress(OSError):
        CLEAR.write_text("5")
    return _resident("VmRSS")
