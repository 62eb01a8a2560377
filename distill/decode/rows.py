"""State of a batch being decoded: tensors on the device, bookkeeping on the host; refilling and dropping rows."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distill.decode.records import Generation, Request
from distill.drafters.base import DrafterState
from distill.kv_cache import KVCache

_TENSORS = ("root_B", "request_B", "active_B")
_LISTS = ("lengths", "requests", "results", "started", "active", "greedy")


@dataclass(kw_only=True)
class Rows:
    """One batch.

    Attributes:
        root_B: last committed token of each row, not in the cache yet.
        request_B: keys of the noise.
        active_B: rows still running (device copy of ``active``).
        lengths: host copy of ``cache.lengths_B``.
        greedy: rows that take the argmax whatever the decoder samples.
        started: when the row's first token was on the host, seconds.
    """

    cache: KVCache
    drafter: DrafterState | None
    root_B: Tensor
    request_B: Tensor
    active_B: Tensor
    lengths: list[int]
    requests: list[Request]
    results: list[Generation]
    started: list[float]
    active: list[bool]
    greedy: list[bool]

    @property
    def live(self) -> list[int]:
        """Indices of the running rows."""
        return [b for b, active in enumerate(self.active) if active]


def merge(rows: Rows, fresh: Rows) -> Rows:
    """Put freshly prefilled rows into the places of finished ones (autoregressive rows only)."""
    free = [b for b, active in enumerate(rows.active) if not active]
    assert len(fresh.requests) <= len(free), "more fresh rows than free places"
    places = free[: len(fresh.requests)]
    rows.cache.reserve(fresh.cache.capacity)
    rows.cache.insert(places, fresh.cache)
    index = torch.tensor(places, device=rows.root_B.device)
    for name in _TENSORS:
        getattr(rows, name)[index] = getattr(fresh, name)
    for source, place in enumerate(places):
        for name in _LISTS:
            getattr(rows, name)[place] = getattr(fresh, name)[source]
    # Rows that finished long ago must not keep attention wide.
    for b in range(len(rows.lengths)):
        if not rows.active[b]:
            rows.lengths[b] = 0
    rows.cache.lengths_B = torch.tensor(rows.lengths, device=rows.root_B.device)
    rows.cache.longest = max(rows.lengths)
    return rows


def compact(rows: Rows) -> Rows:
    """Drop finished rows once the requests have run out."""
    live = rows.live
    if not live:
        return rows
    index = torch.tensor(live, device=rows.root_B.device)
    kept: dict[str, Any] = {name: getattr(rows, name)[index] for name in _TENSORS}
    kept |= {name: [getattr(rows, name)[b] for b in live] for name in _LISTS}
    return replace(rows, cache=rows.cache.select(live, longest=max(rows.lengths[b] for b in live)), **kept)
