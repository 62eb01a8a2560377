"""Lightning's view of the batches."""

from collections.abc import Iterator

from lightning.pytorch import LightningDataModule

from distill.data.batches import Batches
from distill.data.prepared import PreparedData
from distill.types import Batch


class _Stream:
    """Micro-batches of one optimiser step after the other, from a given step on, without end."""

    def __init__(self, batches: Batches, start_step: int):
        self._batches = batches
        self._start_step = start_step

    def __iter__(self) -> Iterator[Batch]:
        for step in self._batches.steps(self._start_step):
            yield from step


class _HeldOut:
    """A fixed list of batches (Lightning takes a bare list for several loaders)."""

    def __init__(self, batches: list[Batch]):
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


class DataModule(LightningDataModule):
    """Feeds a trainer; after a resume it goes on with the step the trainer is at.

    Training data have no end (the trainer's number of steps decides), and one "epoch" in Lightning's sense is
    the whole run. Everything is in memory, so there are no workers and no sampler to replace.

    Args:
        data: prepared conversations.
        pack_len, max_len, batch_size, accumulate, seed: see ``Batches``.
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
    ):
        super().__init__()
        self._data = data
        self._sizes = {
            "pack_len": pack_len,
            "max_len": max_len,
            "batch_size": batch_size,
            "accumulate": accumulate,
            "seed": seed,
        }

    def batches(self, *, rank: int = 0, world: int = 1) -> Batches:
        """The batches of one process, usable without a trainer."""
        return Batches(self._data, **self._sizes, rank=rank, world=world)

    def _of_this_process(self) -> Batches:
        assert self.trainer is not None, "attached by the trainer"
        return self.batches(rank=self.trainer.global_rank, world=self.trainer.world_size)

    def train_dataloader(self) -> _Stream:
        """Micro-batches from the trainer's current step on."""
        assert self.trainer is not None, "attached by the trainer"
        return _Stream(self._of_this_process(), self.trainer.global_step)

    def val_dataloader(self) -> _HeldOut:
        """The held-out batches."""
        return _HeldOut(self._of_this_process().validation())

    def transfer_batch_to_device(self, batch, device, dataloader_idx: int) -> Batch:
        """Move the tensors of a batch."""
        return batch.to(device)
