"""How many CPU threads a decode step should use, measured once before anything is timed."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

_ROUNDS = 7
_WORTH = 0.97  # more threads must save at least 3 %, or fewer are taken: they are easier on a busy machine


def choose_threads(step: Callable[[], object], *, candidates: Sequence[int] | None = None) -> int:
    """Return the number of threads with the shortest median step; the setting itself is left as it was.

    Args:
        step: runs one step.
        candidates: numbers to try, ascending; powers of two up to the present setting by default, and that itself.
    """
    most = torch.get_num_threads()
    if candidates is None:
        candidates = sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)})
    seconds: dict[int, list[float]] = {count: [] for count in candidates}
    try:
        for turn in range(_ROUNDS + 1):
            for count in candidates:
                torch.set_num_threads(count)
                start = time.perf_counter()
                step()
                if turn:  # the first one wakes the threads
                    seconds[count].append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(most)
    best = candidates[0]
    for count in candidates[1:]:
        if median(seconds[count]) < _WORTH * median(seconds[best]):
            best = count
    return best
