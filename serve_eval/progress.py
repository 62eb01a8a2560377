"""How far a task is: a bar with the time left on a terminal, a line now and then elsewhere."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

EVERY_S = 15.0


@contextmanager
def meter(
    total: int, what: str, *, unit: str, limit_s: float = math.inf, console: Console | None = None
) -> Iterator[Callable[[], None]]:
    """Show progress on stderr; yields the function to call after each unit.

    Args:
        total: units of work.
        what: first word of the line.
        unit: what is counted.
        limit_s: the work ends after this time if it is not done earlier.
        console: where to print.
    """
    console = console or Console(stderr=True)
    start, shown, done = time.monotonic(), time.monotonic(), 0
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(f"{unit}{{task.fields[left]}}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, left="")

        def advance() -> None:
            nonlocal done, shown
            done += 1
            now = time.monotonic()
            left = min((now - start) / done * (total - done), max(limit_s - (now - start), 0))
            bar.update(task, completed=done, left=f", {clock(left)} left")
            if not console.is_terminal and (now - shown >= EVERY_S or done == total):
                shown = now
                console.print(f"{what}: {done}/{total} {unit}, {clock(left)} left", highlight=False)

        yield advance


def clock(seconds: float) -> str:
    """Return minutes and seconds: 2:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
