"""Lightning's view of the batches."""

from collections.abc import Callable, Generator, Iterable, Iterator
from weakref import WeakSet

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from distill.data.batches import Batches
from distill.data.feature_store import FeatureStore
from distill.data.prefetch import prefetched
from distill.data.prepared import PreparedData
from distill.types import Batch


class _Loader:
    """Batches made ahead by a thread, which starts when iteration does.

    Args:
        batches: makes the batches, from the beginning.
        pin: put them into pinned memory, from where copies to the device overlap with its work.
        running: told of every iteration, so that its thread can be ended.
    """

    def __init__(self, batches: Callable[[], Iterable[Batch]], *, pin: bool, running: WeakSet[Generator]):
        self._batches, self._pin, self._running = batches, pin, running

    def __iter__(self) -> Iterator[Batch]:
        made = iter(self._batches())
        if self._pin:
            made = (batch.map(Tensor.pin_memory) for batch in made)
        ahead = prefetched(made)
        self._running.add(ahead)
        return ahead


class DataModule(LightningDataModule):
    """Feeds a trainer; after a resume it goes on with the step the trainer is at.

    Training data have no end (the trainer's number of steps decides), and one "epoch" in Lightning's sense is
    the whole run. There are no worker processes and no sampler to replace: everything is in memory or mapped, and a
    thread makes the next two batches while a step computes. Which batches those are follows from the step the trainer
    was at when the loader was asked for, not from how many were made.

    Args:
        data: prepared conversations.
        pack_len, max_len, batch_size, accumulate, seed, features: see ``Batches``.
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
        features: FeatureStore | None = None,
    ):
        super().__init__()
        self._data, self._features = data, features
        self._sizes = {
            "pack_len": pack_len,
            "max_len": max_len,
            "batch_size": batch_size,
            "accumulate": accumulate,
            "seed": seed,
        }
        self._running: WeakSet[Generator] = WeakSet()

    def batches(self, *, rank: int = 0, world: int = 1) -> Batches:
        """The batches of one process, usable without a trainer."""
        return Batches(self._data, **self._sizes, rank=rank, world=world, features=self._features)

    def _of_this_process(self) -> Batches:
        assert self.trainer is not None, "attached by the trainer"
        return self.batches(rank=self.trainer.global_rank, world=self.trainer.world_size)

    def _loader(self, batches: Callable[[], Iterable[Batch]]) -> _Loader:
        assert self.trainer is not None, "attached by the trainer"
        return _Loader(batches, pin=self.trainer.strategy.root_device.type == "cuda", running=self._running)

    def train_dataloader(self) -> _Loader:
        """Micro-batches from the trainer's current step on, without end."""
        assert self.trainer is not None, "attached by the trainer"
        batches, start_step = self._of_this_process(), self.trainer.global_step
        return self._loader(lambda: (batch for step in batches.steps(start_step) for batch in step))

    def val_dataloader(self) -> _Loader:
        """The held-out batches."""
        batches = self._of_this_process().validation()
        return self._loader(lambda: batches)

    def transfer_batch_to_device(self, batch, device, dataloader_idx: int) -> Batch:
        """Move the tensors of a batch; the step's work is queued behind the copies."""
        return batch.to(device, non_blocking=torch.device(device).type == "cuda")

    def teardown(self, stage: str) -> None:
        """End the threads when training ends, ..."""
        for ahead in list(self._running):
            ahead.close()

    def on_exception(self, exception: BaseException) -> None:
        """... or is ended."""
        self.teardown("fit")
