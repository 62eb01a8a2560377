"""Batches made by a thread while the step before computes."""

import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


def prefetched(items: Iterable[T], *, depth: int = 2) -> Generator[T, None, None]:
    """Yield ``items`` unchanged and in order; a thread makes up to ``depth`` of them ahead.

    The thread ends with the generator: exhausted, closed, or left by an exception (Ctrl-C included). What ``items``
    raises is raised here, once everything made before it is used up.

    Args:
        items: iterated by the thread alone.
        depth: items that exist, or are being made, beyond the one in use.
    """
    shelf: _Shelf[T] = _Shelf(depth)
    thread = threading.Thread(target=_fill, args=(iter(items), shelf), name="prefetch", daemon=True)
    thread.start()
    try:
        while not shelf.empty():
            yield shelf.take()
    finally:
        shelf.close()
        thread.join()
    if shelf.error is not None:
        raise shelf.error


class _Shelf(Generic[T]):
    """What lies between the two threads; every wait ends when ``close`` is called or the items end."""

    def __init__(self, depth: int):
        assert depth > 0, "nothing can be made ahead"
        self._depth = depth
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = self._ended = False
        self.error: BaseException | None = None

    def room(self) -> bool:
        """Wait for room; False when nothing more is wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            return not self._closed

    def put(self, item: T) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more comes."""
        with self._changed:
            self._ended, self.error = True, error
            self._changed.notify_all()

    def empty(self) -> bool:
        """Wait for an item; True when there is none and none will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended)
            return not self._items

    def take(self) -> T:
        with self._changed:
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Nothing more is wanted."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


def _fill(items: Iterator[T], shelf: _Shelf[T]) -> None:
    try:
        while shelf.room():
            try:
                item = next(items)
            except StopIteration:
                break
            shelf.put(item)
            del item  # or the last one would live on here while the thread waits
        shelf.end()
    except BaseException as error:  # noqa: BLE001 - raised again where the items are taken
        shelf.end(error)
