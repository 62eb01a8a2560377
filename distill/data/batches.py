"""Optimiser steps as batches: the plain iterator that training and the datamodule share."""

from collections.abc import Callable, Iterator, Sequence
from typing import overload

import numpy as np
import torch

from distill.data.feature_store import FeatureStore
from distill.data.packing import Row, RowOrder, fill, fixed_rows, n_cut
from distill.data.prepared import PreparedData
from distill.errors import UserError
from distill.types import Batch


class Batches:
    """Packed batches of prepared data.

    Step s takes the rows [s * R, (s + 1) * R) of the endless row order, R = world * accumulate * batch_size;
    rank r takes every ``world``-th of them, beginning with its r-th, in ``accumulate`` micro-batches. So a step
    is a pure function of (data, seed, s): the same rows for any split of R over ranks and micro-batches.

    Args:
        data: prepared conversations.
        pack_len: tokens in a row.
        max_len: conversations are cut here.
        batch_size: rows in a micro-batch.
        accumulate: micro-batches in a step.
        seed: of the order.
        rank: this process.
        world: number of processes.
        features: the target's features of ``data``, where they are stored.

    Raises:
        UserError: no training conversation.
    """

    def __init__(
        self,
        data: PreparedData,
        *,
        pack_len: int,
        max_len: int,
        batch_size: int,
        accumulate: int = 1,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        features: FeatureStore | None = None,
    ):
        if data.n_train == 0:
            raise UserError(
                "training data must have at least one training conversation, got none; lower data.validation"
            )
        if not any(data[int(i)].loss_mask[:max_len].any() for i in data.indices("train")):
            raise UserError(
                "training data must have supervised tokens within data.max_len, got none in the first "
                f"{max_len} tokens of any conversation; raise data.max_len"
            )
        assert 0 <= rank < world, "rank outside the world"
        assert max_len <= pack_len, "a conversation must fit a row"
        self.data = data
        self.pack_len = pack_len
        self.max_len = max_len
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.rank = rank
        self.world = world
        self._features = features
        self._lengths = np.minimum(data.lengths, max_len)
        self._order = RowOrder(self._lengths, data.indices("train"), pack_len=pack_len, seed=seed)

    @property
    def steps_per_epoch(self) -> float:
        """Optimiser steps in the first pass over the data (later ones differ by a row or two)."""
        return len(self._order.epoch(0)) / (self.world * self.accumulate * self.batch_size)

    @property
    def n_cut(self) -> int:
        """Training conversations cut at ``max_len``."""
        return n_cut(self.data, "train", max_len=self.max_len)

    def step(self, number: int) -> list[Batch]:
        """Return this rank's micro-batches of one optimiser step."""
        size = self.world * self.accumulate * self.batch_size
        return self._split([self._order[number * size + i] for i in range(size)])

    def steps(self, start_step: int = 0) -> Iterator[list[Batch]]:
        """Yield steps without end, from ``start_step`` on."""
        number = start_step
        while True:
            yield self.step(number)
            number += 1

    def validation(self) -> "HeldOut":
        """Held-out batches in a fixed order; every rank gets equally many, filled up with empty rows."""
        rows = fixed_rows(self._lengths, self.data.indices("val"), pack_len=self.pack_len)
        size = self.world * self.batch_size
        rows += [[]] * (-len(rows) % size)
        return HeldOut([rows[i : i + size] for i in range(0, len(rows), size)], lambda step: self._split(step)[0])

    def _split(self, rows: list[Row]) -> list[Batch]:
        """This rank's micro-batches of a step's rows; the denominator counts all of the step."""
        packed = fill(self.data, rows, pack_len=self.pack_len, max_len=self.max_len)
        denominator = float(packed.loss_mask_RL.sum())
        batches = []
        for begin in range(self.rank, len(rows), self.world * self.batch_size):
            mine = slice(begin, begin + self.world * self.batch_size, self.world)
            features = None
            if self._features is not None:
                features = self._features.rows(rows[mine], pack_len=self.pack_len, max_len=self.max_len)
            batches.append(
                Batch(
                    ids_BL=torch.from_numpy(packed.ids_RL[mine].astype(np.int64)),
                    loss_mask_BL=torch.from_numpy(packed.loss_mask_RL[mine].copy()),
                    positions_BL=torch.from_numpy(packed.positions_RL[mine].copy()),
                    doc_BL=torch.from_numpy(packed.doc_RL[mine].copy()),
                    denominator=denominator,
                    features=features,
                )
            )
        return batches


class HeldOut(Sequence[Batch]):
    """A fixed list of batches, each made when it is looked at: with stored features they would fill the memory.

    Args:
        steps: the rows of each.
        make: makes this rank's batch of them.
    """

    def __init__(self, steps: list[list[Row]], make: Callable[[list[Row]], Batch]):
        self._steps, self._make = steps, make

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, i: int) -> Batch: ...
    @overload
    def __getitem__(self, i: slice) -> "HeldOut": ...
    def __getitem__(self, i: int | slice) -> "Batch | HeldOut":
        return HeldOut(self._steps[i], self._make) if isinstance(i, slice) else self._make(self._steps[i])
