"""How far writing is, for people."""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far writing is.

    Attributes:
        done: conversations kept.
        total: conversations wanted; None when another limit decides.
        tokens: supervised tokens kept.
        seconds: time spent writing, earlier sessions included.
        tokens_per_s: supervised tokens per second, this session.
        seconds_left: estimate; None while nothing is known.
    """

    done: int
    total: int | None
    tokens: int
    seconds: float
    tokens_per_s: float
    seconds_left: float | None


OnProgress = Callable[[Progress], None]


def stderr_progress(every_s: float = 10.0) -> OnProgress:
    """Return a callback that prints a line to stderr at most every ``every_s`` seconds."""
    last = -math.inf

    def report(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last < every_s:
            return
        last = time.monotonic()
        of = "" if progress.total is None else f"/{progress.total}"
        left = "" if progress.seconds_left is None else f", {_clock(progress.seconds_left)} left"
        say(f"{progress.done}{of} conversations, {progress.tokens} tokens, {progress.tokens_per_s:.0f} tokens/s{left}")

    return report


def say(text: str) -> None:
    """Print a line about the data to stderr."""
    sys.stderr.write(f"data: {text}\n")
    sys.stderr.flush()


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
