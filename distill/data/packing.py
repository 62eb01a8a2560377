"""Which conversations share a training row, and in which order rows come.

Rows of ``pack_len`` tokens, drawn with the documents a, b, c::

    ids        a0 a1 a2 a3 b0 b1 b2 c0 c1  0  0
    positions   0  1  2  3  0  1  2  0  1  0  0
    doc         0  0  0  0  1  1  1  2  2 -1 -1

Everything here is arithmetic on lengths; nothing reads a token.
"""

import bisect
from dataclasses import dataclass

import numpy as np

from distill.data.prepared import PreparedData, Split

WINDOW = 512
"""Conversations packed together: enough for full rows, few enough for rows to stay a random mix."""

Row = list[int]
"""Numbers of the conversations in a row, in order."""


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Rows as arrays: int32 ids_RL, bool loss_mask_RL, int64 positions_RL, int64 doc_RL."""

    ids_RL: np.ndarray
    loss_mask_RL: np.ndarray
    positions_RL: np.ndarray
    doc_RL: np.ndarray


def pack(lengths: np.ndarray, order: np.ndarray, *, pack_len: int) -> list[Row]:
    """Fit conversations into rows: first fit, longest first, window by window.

    Args:
        lengths: tokens of every conversation, none above ``pack_len``.
        order: the conversations to pack, in the order windows are cut from.
        pack_len: tokens in a row.
    """
    rows: list[Row] = []
    for begin in range(0, len(order), WINDOW):
        window = order[begin : begin + WINDOW]
        opened: list[Row] = []
        room: list[int] = []
        for i in window[np.argsort(-lengths[window], kind="stable")]:
            length = int(lengths[i])
            assert length <= pack_len, "a conversation longer than a row"
            place = next((r for r, free in enumerate(room) if free >= length), None)
            if place is None:
                opened.append([int(i)])
                room.append(pack_len - length)
            else:
                opened[place].append(int(i))
                room[place] -= length
        rows += opened
    return rows


class RowOrder:
    """The endless sequence of training rows: epoch after epoch, each packed and shuffled anew.

    Row number r is a pure function of (seed, lengths, r), so a run continues anywhere without reading what
    came before. No row is ever left out: a step may begin in one epoch and end in the next.

    Args:
        lengths: tokens of every conversation, cut to ``max_len``.
        chosen: the conversations of the split.
        pack_len: tokens in a row.
        seed: of the shuffles.
    """

    def __init__(self, lengths: np.ndarray, chosen: np.ndarray, *, pack_len: int, seed: int):
        assert len(chosen), "no conversations to order"
        self._lengths = lengths
        self._chosen = chosen
        self._pack_len = pack_len
        self._seed = seed
        self._starts = [0]  # number of the first row of each epoch
        self._cached: tuple[int, list[Row]] = (-1, [])

    def epoch(self, epoch: int) -> list[Row]:
        """Rows of one epoch, in order; each conversation is in exactly one of them."""
        if self._cached[0] != epoch:
            generator = np.random.default_rng([self._seed, epoch])
            rows = pack(self._lengths, generator.permutation(self._chosen), pack_len=self._pack_len)
            self._cached = (epoch, [rows[i] for i in generator.permutation(len(rows))])
        return self._cached[1]

    def __getitem__(self, number: int) -> Row:
        while self._starts[-1] <= number:
            self._starts.append(self._starts[-1] + len(self.epoch(len(self._starts) - 1)))
        epoch = bisect.bisect_right(self._starts, number) - 1
        return self.epoch(epoch)[number - self._starts[epoch]]


def fixed_rows(lengths: np.ndarray, chosen: np.ndarray, *, pack_len: int) -> list[Row]:
    """Rows of a split in a fixed order (validation)."""
    return pack(lengths, chosen, pack_len=pack_len)


def fill(data: PreparedData, rows: list[Row], *, pack_len: int, max_len: int) -> PackedRows:
    """Copy rows into arrays; conversations are cut at ``max_len``, padding has doc -1 and id 0."""
    shape = (len(rows), pack_len)
    packed = PackedRows(
        ids_RL=np.zeros(shape, dtype=np.int32),
        loss_mask_RL=np.zeros(shape, dtype=bool),
        positions_RL=np.zeros(shape, dtype=np.int64),
        doc_RL=np.full(shape, -1, dtype=np.int64),
    )
    for r, row in enumerate(rows):
        begin = 0
        for doc, i in enumerate(row):
            length = min(int(data.lengths[i]), max_len)
            source = slice(int(data.offsets[i]), int(data.offsets[i]) + length)
            place = slice(begin, begin + length)
            packed.ids_RL[r, place] = data.ids[source]
            packed.loss_mask_RL[r, place] = data.loss_mask[source]
            packed.positions_RL[r, place] = np.arange(length)
            packed.doc_RL[r, place] = doc
            begin += length
    return packed


def n_cut(data: PreparedData, split: Split, *, max_len: int) -> int:
    """Conversations of a split that are longer than ``max_len``."""
    return int((data.lengths[data.indices(split)] > max_len).sum())
