"""Batches are made ahead of the step by a thread that changes nothing but the waiting, and never outlives training."""

import itertools
import logging
import threading
import time

import feature_tools as features
import lightning.pytorch as pl
import pytest
import torch
import train_tools as tools

from distill.data import Batches
from distill.data.datamodule import DataModule
from distill.data.prefetch import prefetched
from distill.train.callbacks import AfterStep

PATIENCE = 20  # seconds until a wait for the other thread counts as failed


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    assert threads() == []
    yield
    assert threads() == []


def wait_for(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


# --------------------------------------------------------------------------------------------------- the thread
@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_the_same_items_in_the_same_order(depth, n):
    assert list(prefetched(iter(range(n)), depth=depth)) == list(range(n))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_it_works_ahead_by_depth_and_no_further(depth):
    made = []
    items = prefetched((made.append(i) or i for i in itertools.count()), depth=depth)
    for taken in range(1, 4):
        assert next(items) == taken - 1
        wait_for(lambda taken=taken: len(made) == taken + depth)
        time.sleep(0.01)
        assert len(made) == taken + depth
    items.close()


def test_the_step_waits_only_for_what_is_slower_than_itself():
    """Making takes as long as the step: side by side that costs one of the two, one after the other both."""
    n, seconds = 12, 0.03

    def slow():
        for i in range(n):
            time.sleep(seconds)
            yield i

    def waited(items):
        total, begin = 0.0, time.perf_counter()
        for _ in items:
            total += time.perf_counter() - begin
            time.sleep(seconds)  # the step
            begin = time.perf_counter()
        return total

    alone, ahead = waited(slow()), waited(prefetched(slow()))
    assert alone > 0.9 * n * seconds
    assert ahead < 0.5 * alone, f"waited {ahead:.3f} s of {alone:.3f} s"


def test_what_goes_wrong_in_the_thread_surfaces_as_it_is_and_in_its_place():
    error = ValueError("broken row")

    def items():
        yield 1
        yield 2
        raise error

    taken = prefetched(items())
    assert [next(taken), next(taken)] == [1, 2]
    with pytest.raises(ValueError, match="broken row") as raised:
        next(taken)
    assert raised.value is error
    assert [frame.name for frame in raised.traceback][-1] == "items", "the place it happened is in the traceback"


@pytest.mark.parametrize("how", ["close", "forget", "interrupt"])
def test_the_thread_ends_with_its_user(how):
    closed = []

    def items():
        try:
            yield from itertools.count()
        finally:
            closed.append(True)

    ahead = prefetched(items())
    next(ahead)
    assert len(threads()) == 1
    if how == "close":
        ahead.close()
    elif how == "forget":
        del ahead
    else:
        with pytest.raises(KeyboardInterrupt):
            ahead.throw(KeyboardInterrupt)
    assert threads() == []
    assert closed == [True]


def test_nothing_taken_is_kept():
    """A batch with features is large: what was used must go."""

    class Item:
        alive = 0

        def __init__(self):
            Item.alive += 1

        def __del__(self):
            Item.alive -= 1

    items = prefetched((Item() for _ in range(50)), depth=2)
    for _ in range(20):
        next(items)
        wait_for(lambda: Item.alive == 2)
    items.close()
    assert Item.alive == 0


# --------------------------------------------------------------------------------------------------- the batches
def test_every_tensor_of_a_batch_moves(tmp_path):
    store = features.stored(tmp_path)
    data = DataModule(tools.data(), **features.SIZES, batch_size=2, features=store)
    batch = data.batches().step(0)[0]
    moved = batch.to("meta")
    tensors = [moved.ids_BL, moved.loss_mask_BL, moved.positions_BL, moved.doc_BL, moved.features.last_BLD]
    assert {x.device.type for x in (*tensors, *moved.features.taps.values())} == {"meta"}
    assert list(moved.features.taps) == list(features.TAPS)
    assert moved.denominator == batch.denominator
    assert moved.features.last_BLD.shape == batch.features.last_BLD.shape
    doubled = batch.map(lambda x: x + x)
    assert torch.equal(doubled.ids_BL, 2 * batch.ids_BL)
    assert torch.equal(doubled.features.taps[1], 2 * batch.features.taps[1])


def test_held_out_batches_are_made_when_they_are_looked_at():
    made = []
    batches = DataModule(tools.data(), **features.SIZES, batch_size=1).batches()
    held_out = batches.validation()
    whole = list(held_out)
    split = batches._split
    held_out._make = lambda rows: made.append(rows) or split(rows)[0]
    part = held_out[1:3]
    assert made == []
    assert len(part) == 2
    assert [torch.equal(a.ids_BL, b.ids_BL) for a, b in zip(part, whole[1:3], strict=True)] == [True, True]
    assert len(made) == 2
    assert torch.equal(held_out[-1].ids_BL, whole[-1].ids_BL)


# --------------------------------------------------------------------------------------------------- the trainer
class Recorder(pl.LightningModule):
    """Remembers what it was fed."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = []

    def training_step(self, batch, _):
        self.seen.append((batch, len(threads())))
        return (self.weight * batch.ids_BL.float().mean()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stop(AfterStep):
    def __init__(self, error):
        self.error = error

    def after_step(self, trainer, module, step):
        if step == 3:
            raise self.error


def fit(data, *callbacks, accelerator="cpu"):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Recorder()
    trainer = pl.Trainer(
        accelerator=accelerator,
        max_steps=5,
        max_epochs=-1,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=list(callbacks),
    )
    trainer.fit(module, datamodule=data)
    return module.seen


def datamodule():
    return DataModule(tools.data(), **features.SIZES, batch_size=1, accumulate=2)


@pytest.mark.filterwarnings("ignore:.*no `validation_step`")
def test_training_sees_the_batches_in_order_and_leaves_no_thread():
    data = datamodule()
    expected = [batch for step in range(5) for batch in data.batches().step(step)]
    seen = fit(data)
    assert threads() == []
    assert [b.ids_BL.tolist() for b, _ in seen] == [b.ids_BL.tolist() for b in expected]
    assert {running for _, running in seen} == {1}


@pytest.mark.filterwarnings("ignore:.*no `validation_step`")
@pytest.mark.parametrize("error, raised", [(ValueError("bad"), ValueError), (KeyboardInterrupt(), SystemExit)])
def test_training_that_is_ended_leaves_no_thread(error, raised):
    data = datamodule()
    with pytest.raises(raised):
        fit(data, Stop(error))
    assert threads() == [], "ended by the data module, not by the garbage collector"


@pytest.mark.filterwarnings("ignore:.*no `validation_step`")
def test_a_broken_source_ends_training_with_its_own_error(monkeypatch):
    def broken(self, number):
        if number == 2:
            raise OSError("disk gone")
        return plain(self, number)

    plain = Batches.step
    monkeypatch.setattr(Batches, "step", broken)
    with pytest.raises(OSError, match="disk gone"):
        fit(datamodule())
    assert threads() == []


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*no `validation_step`")
def test_batches_reach_the_device_whole_through_pinned_memory(tmp_path):
    data = DataModule(tools.data(), **features.SIZES, batch_size=1, accumulate=2, features=features.stored(tmp_path))
    expected = [batch for step in range(5) for batch in data.batches().step(step)]
    seen = [batch for batch, _ in fit(data, accelerator="gpu")]
    torch.cuda.synchronize()
    for ours, theirs in zip(seen, expected, strict=True):
        assert ours.ids_BL.is_cuda
        assert torch.equal(ours.ids_BL.cpu(), theirs.ids_BL)
        assert torch.equal(ours.features.last_BLD.cpu(), theirs.features.last_BLD)
        assert torch.equal(ours.features.taps[1].cpu(), theirs.features.taps[1])
