"""Replaying decode steps from CUDA graphs: one launch instead of hundreds.

A graph replays the same operations on the same addresses, so everything it reads lives in buffers of its own that are
filled before each replay, shapes repeat (``KVCache.bucket``), and the keys and values stay where they are
(``Storage``). A shape is recorded when it has come up a few times, so that prompts of all lengths are not.
"""

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from distill.kv_cache import KVCache, write_slots

BUCKET = 128
"""Cache slots by which attention's width grows: few shapes, and at most this many masked slots too many."""
_KEPT = 64  # graphs per step function; the oldest goes
_WARM_UP = 3

Step = Callable[..., Any]
Capture = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Records a step that takes no arguments; returns (replay, the step's output, overwritten by every replay)."""


def cuda_capture(step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Record ``step`` in a CUDA graph."""
    # Warm-up on a side stream, as capturing wants it: lazy initialisation must not be recorded.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    return graph.replay, output


class Graphs:
    """Recorded versions of one step function.

    Args:
        capture: how a step is recorded.
        patience: how often a shape runs as it is before it is recorded.
    """

    def __init__(self, capture: Capture = cuda_capture, *, patience: int = 3):
        self._capture, self._patience = capture, patience
        self._seen: Counter[Hashable] = Counter()
        self._recorded: OrderedDict[Hashable, tuple[list[Tensor], Callable[[], None], Any]] = OrderedDict()
        self.recordings = 0

    def run(self, step: Step, inputs: Sequence[Tensor], *, key: Hashable) -> Any:
        """Return ``step(*inputs)``.

        Args:
            step: a function of tensors that reads nothing back to the host; everything else it uses must be the same
                whenever ``key`` is.
            inputs: copied into the recording's own buffers.
            key: tells recordings apart, beside the inputs' shapes.

        Returns:
            The step's output; valid until the next call with the same key and shapes.
        """
        key = (key, *((tuple(x.shape), x.dtype) for x in inputs))
        found = self._recorded.get(key)
        if found is None:
            self._seen[key] += 1
            if self._seen[key] <= self._patience:
                return step(*inputs)
            del self._seen[key]
            buffers = [x.clone() for x in inputs]
            replay, output = self._capture(lambda: step(*buffers))
            found = self._recorded[key] = (buffers, replay, output)
            self.recordings += 1
            if len(self._recorded) > _KEPT:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(key)
        buffers, replay, output = found
        for buffer, x in zip(buffers, inputs, strict=True):
            buffer.copy_(x)
        replay()
        return output


class Storage:
    """Hands the memory of finished caches to new ones of the same shape, so that graphs find it where it was."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, weakref.ref]] = []

    def adopt(self, cache: KVCache) -> KVCache:
        """Let an empty ``cache`` live in memory that no other cache uses any more, where there is some."""
        for index, (kv, owner) in enumerate(self._kept):
            if owner() is None and kv.shape == cache.kv.shape and kv.dtype == cache.kv.dtype:
                cache.kv = kv
                self._kept[index] = (kv, weakref.ref(cache))
                return cache
        self._kept = self._kept[-7:]
        self._kept.append((cache.kv, weakref.ref(cache)))
        return cache


def rounded(capacity: int) -> int:
    """Slots to allocate for ``capacity``: whole buckets, so that shapes repeat."""
    return -(-capacity // BUCKET) * BUCKET


class FixedCache:
    """The view of a ``KVCache`` that a recorded step writes through: same memory, slots from a buffer."""

    def __init__(self, kv: Tensor, slots_BN: Tensor, view: int):
        self.kv, self.slots_BN, self.view = kv, slots_BN, view
        self._rows_B1 = torch.arange(kv.shape[2], device=kv.device)[:, None]

    def write(self, layer_idx: int, k_BNHK: Tensor, v_BNHK: Tensor) -> tuple[Tensor, Tensor]:
        """As ``KVCache.write``."""
        layer = self.kv[layer_idx]
        write_slots(layer, self._rows_B1, self.slots_BN, k_BNHK, v_BNHK)
        return layer[0, :, :, : self.view], layer[1, :, :, : self.view]
