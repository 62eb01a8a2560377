"""Exact memory of tensors: which storages live when, whatever the device's allocator does with them."""

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tracker(TorchDispatchMode):
    """Follows every storage an operation returns, from its first appearance to its end.

    What was there before (parameters, the target) is not counted. Scratch space inside one operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}  # address of the storage -> number
        self._events: list[tuple[int, int]] = []  # (number, bytes gained or lost)
        self._sizes: list[int] = []
        self._known: set[int] = set()

    def __enter__(self) -> "Tracker":
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and (address := tensor.untyped_storage()._cdata) not in self._alive:
                self._known.add(address)  # older than the tracker
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._alive or address in self._known or not size:
            return
        number = len(self._sizes)
        self._sizes.append(size)
        self._alive[address] = number
        self._events.append((number, size))
        weakref.finalize(storage, self._end, address, number)

    def _end(self, address: int, number: int) -> None:
        self._events.append((number, -self._sizes[number]))
        self._alive.pop(address, None)

    def peak(self, *, without: Iterable[Tensor] = ()) -> int:
        """Most bytes alive at once, not counting ``without`` (the gradients of the parameters)."""
        left_out = {self._alive.get(tensor.untyped_storage()._cdata) for tensor in without}
        now = most = 0
        for number, change in self._events:
            if number not in left_out:
                now += change
                most = max(most, now)
        return most


def resident_peak() -> int | None:
    """The process's largest resident memory since ``reset_resident_peak``, in bytes; None where Linux is not."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset_resident_peak() -> int | None:
    """Start a new measurement of ``resident_peak``; returns what is resident now."""
    path = Path("/proc/self/clear_refs")
    if not path.exists():
        return None
    path.write_text("5", encoding="utf-8")
    return resident_peak()
