"""Packing keeps every token once; batches are a pure function of (seed, step), however they are divided."""

import itertools

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from distill.data import Batches, Conversation, PreparedData
from distill.data.conversation import content_key
from distill.data.datamodule import DataModule
from distill.data.packing import RowOrder, pack
from distill.data.prepared import coverage, split_of
from distill.errors import UserError

V = 5000


def prepared(n=60, longest=30, validation=0.1, seed=0):
    """Conversations whose tokens are all different, so that a token names its place."""
    rng, conversations, token = np.random.default_rng(seed), [], itertools.count(1)
    for i in range(n):
        length = int(rng.integers(2, longest))
        ids = np.array([next(token) for _ in range(length)], dtype=np.int32)
        conversations.append(Conversation(ids=ids, loss_mask=rng.random(length) < 0.6, key=content_key(f"c{i}")))
    return PreparedData.from_conversations(conversations, vocab_size=V, validation=validation)


def batches(data, **options):
    return Batches(data, **{"pack_len": 32, "max_len": 30, "batch_size": 2, **options})


def documents(batch):
    """Each document of a batch as (ids, mask, positions)."""
    for row in range(len(batch.ids_BL)):
        for doc in range(int(batch.doc_BL[row].max()) + 1):
            here = batch.doc_BL[row] == doc
            yield tuple(x[row][here].tolist() for x in (batch.ids_BL, batch.loss_mask_BL, batch.positions_BL))


def test_an_epoch_holds_every_token_exactly_once():
    data = prepared()
    some = batches(data)
    order = RowOrder(data.lengths, data.indices("train"), pack_len=32, seed=0)
    n_rows = len(order.epoch(0))
    found = []
    for number in range(-(-n_rows // 2)):
        (batch,) = some.step(number)
        for row in range(2):
            if 2 * number + row < n_rows:
                found += list(documents(batch.map(lambda x, row=row: x[row : row + 1])))
    expected = [(c.ids.tolist(), c.loss_mask.tolist(), list(range(len(c.ids)))) for c in data.conversations("train")]
    assert sorted(found) == sorted(expected)


def test_rows_are_documents_side_by_side_and_then_padding():
    for batch in batches(prepared()).step(0):
        for doc_L, ids_L, mask_L, position_L in zip(
            batch.doc_BL, batch.ids_BL, batch.loss_mask_BL, batch.positions_BL, strict=True
        ):
            docs = doc_L.tolist()
            used = [d for d in docs if d >= 0]
            assert docs == used + [-1] * (len(docs) - len(used))
            assert used == sorted(used)
            assert sorted(set(used)) == list(range(used[-1] + 1))
            pad = doc_L < 0
            assert not ids_L[pad].any()
            assert not mask_L[pad].any()
            starts = [i for i, d in enumerate(used) if i == 0 or used[i - 1] != d]
            assert [int(position_L[i]) for i in starts] == [0] * len(starts)


def test_packing_is_first_fit_and_close_to_full():
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 100, 1500)
    rows = pack(lengths, rng.permutation(1500), pack_len=128)
    assert sorted(i for row in rows for i in row) == list(range(1500))
    filled = [int(lengths[row].sum()) for row in rows]
    assert max(filled) <= 128
    assert sum(filled) / (len(rows) * 128) > 0.95


def fewest_rows(lengths, pack_len):
    """No packing needs fewer (Martello and Toth's second bound): documents that exclude each other, and the rest by
    volume."""
    best = 0
    for small in range(pack_len // 2 + 1):
        large = lengths[lengths > pack_len - small]
        middle = lengths[(lengths <= pack_len - small) & (lengths > pack_len // 2)]
        rest = lengths[(lengths <= pack_len // 2) & (lengths >= small)]
        spare = len(middle) * pack_len - middle.sum()
        best = max(best, len(large) + len(middle) + max(0, -(-(rest.sum() - spare) // pack_len)))
    return best


@pytest.mark.parametrize(
    "median, spread, pack_len, full",
    [
        (250, 0.8, 1024, 0.97),
        (150, 0.6, 2048, 0.97),
        (400, 0.7, 1024, 0.97),
        (600, 1.0, 2048, 0.97),
        (600, 0.5, 512, 0),
    ],
)
def test_rows_are_full_wherever_that_is_possible(median, spread, pack_len, full):
    """Lengths as conversations have them: log-normal, cut at the row. Where most are longer than half a row, no packing
    fills it; then the number of rows is the bound's."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(median), spread, 512).astype(int), 8, pack_len)
    rows = pack(lengths, rng.permutation(512), pack_len=pack_len)
    assert lengths.sum() / (len(rows) * pack_len) >= full
    assert len(rows) <= 1.02 * fewest_rows(lengths, pack_len) + 1


def test_longer_conversations_are_cut_and_counted():
    data = prepared(longest=60)
    some = batches(data, max_len=20)
    assert some.n_cut == sum(len(c.ids) > 20 for c in data.conversations("train")) > 0
    wanted = {c.ids[0]: (c.ids[:20].tolist(), c.loss_mask[:20].tolist()) for c in data.conversations("train")}
    for batch in some.step(0):
        for ids, mask, _ in documents(batch):
            assert (ids, mask) == wanted[ids[0]]


def as_key(steps):
    return [[(b.ids_BL.tolist(), b.loss_mask_BL.tolist(), b.doc_BL.tolist(), b.denominator) for b in s] for s in steps]


def test_steps_from_anywhere_are_the_same_steps():
    data = prepared()
    straight = as_key(itertools.islice(batches(data, accumulate=2).steps(), 40))
    for start in (0, 1, 7, 8, 23, 39):
        resumed = as_key(itertools.islice(batches(data, accumulate=2).steps(start), 40 - start))
        assert resumed == straight[start:]
    assert as_key([batches(data, accumulate=2).step(31)]) == [straight[31]]


def test_epochs_and_seeds_differ():
    data = prepared()
    order = RowOrder(data.lengths, data.indices("train"), pack_len=32, seed=0)
    flat = [sorted(map(tuple, order.epoch(e))) for e in (0, 1)]
    assert flat[0] != flat[1], "another mix of conversations in the rows"
    other = RowOrder(data.lengths, data.indices("train"), pack_len=32, seed=1)
    assert other.epoch(0) != order.epoch(0)


def test_a_step_may_span_epochs():
    data = prepared(n=6)
    n_rows = len(RowOrder(data.lengths, data.indices("train"), pack_len=32, seed=0).epoch(0))
    (batch,) = batches(data, batch_size=2 * n_rows + 1).step(0)
    assert len(batch.ids_BL) == 2 * n_rows + 1
    assert (batch.doc_BL[:, 0] == 0).all()


@pytest.mark.parametrize("layout", [(1, 4, 2), (2, 2, 2), (4, 1, 2), (2, 4, 1), (8, 1, 1)])
def test_ranks_and_micro_batches_share_the_same_rows(layout):
    world, accumulate, batch_size = layout
    data = prepared()
    reference = [row for b in batches(data, batch_size=8).step(3) for row in b.ids_BL.tolist()]
    parts = [
        batches(data, batch_size=batch_size, accumulate=accumulate, rank=rank, world=world).step(3)
        for rank in range(world)
    ]
    rows = [row for part in parts for b in part for row in b.ids_BL.tolist()]
    assert sorted(rows) == sorted(reference)
    denominators = {b.denominator for part in parts for b in part}
    assert denominators == {float(sum(int(b.loss_mask_BL.sum()) for part in parts for b in part))}
    assert all(len(part) == accumulate for part in parts)
    assert all(b.ids_BL.shape == (batch_size, 32) for part in parts for b in part)


@pytest.mark.parametrize("world", [1, 3])
def test_validation_is_fixed_whole_and_equally_long_for_every_rank(world):
    data = prepared(validation=0.3)
    parts = [batches(data, rank=rank, world=world).validation() for rank in range(world)]
    assert len({len(part) for part in parts}) == 1
    found = sorted(ids for part in parts for b in part for ids, _, _ in documents(b))
    assert found == sorted(c.ids.tolist() for c in data.conversations("val"))
    for together in zip(*parts, strict=True):
        total = float(sum(int(b.loss_mask_BL.sum()) for b in together))
        assert {b.denominator for b in together} == {total}


# ----------------------------------------------------------------------------------------------- split
def test_the_split_stays_when_data_are_added():
    keys = np.array([content_key(f"k{i}") for i in range(2000)])
    few, many = (split_of(keys[:n], validation=0.1, seed=0) for n in (1000, 2000))
    assert few.tolist() == many[:1000].tolist()
    assert 60 < few.sum() < 140
    order = np.random.default_rng(0).permutation(1000)
    assert split_of(keys[:1000][order], validation=0.1, seed=0).tolist() == few[order].tolist()
    assert split_of(keys[:1000], validation=0.1, seed=1).tolist() != few.tolist()
    wider = split_of(keys[:1000], validation=0.2, seed=0)
    assert (wider | ~few).all(), "a larger share only adds to what is held out"


@pytest.mark.parametrize("n, validation, held_out", [(2, 0.01, 1), (5, 0.0, 0), (1, 0.5, 0), (3, 1.0, 2)])
def test_small_data_have_both_splits(n, validation, held_out):
    keys = np.array([content_key(f"s{i}") for i in range(n)])
    assert split_of(keys, validation=validation, seed=0).sum() == held_out


def test_splits_share_nothing_and_miss_nothing():
    data = prepared(validation=0.3)
    train, val = (set(data.indices(s).tolist()) for s in ("train", "val"))
    assert train | val == set(range(len(data)))
    assert not train & val
    assert (len(train), len(val)) == (data.n_train, data.n_val)


def test_counts_are_of_supervised_training_tokens():
    data = prepared()
    expected = np.zeros(V, dtype=int)
    for c in data.conversations("train"):
        for token, supervised in zip(c.ids, c.loss_mask, strict=True):
            expected[token] += supervised
    assert data.counts().tolist() == expected.tolist()
    total = data.counts("train").sum() + data.counts("val").sum()
    assert total == data.loss_mask.sum() == data.stats["supervised_tokens"]


def test_coverage_is_the_share_of_the_most_frequent():
    counts = np.zeros(3000, dtype=int)
    counts[::2] = np.arange(1500)
    top = np.sort(counts)[::-1]
    assert coverage(counts) == {str(n): pytest.approx(top[:n].sum() / counts.sum(), abs=1e-6) for n in (1024, 2048)}


def test_unusable_data_are_refused():
    with pytest.raises(UserError, match="at least one conversation"):
        PreparedData.from_conversations([], vocab_size=V)
    bad = Conversation(ids=np.array([3, V], dtype=np.int32), loss_mask=np.ones(2, dtype=bool))
    with pytest.raises(UserError, match=f"below the model's {V}, got {V}"):
        PreparedData.from_conversations([bad], vocab_size=V)


# ------------------------------------------------------------------------------------------- lightning
class Recorder(LightningModule):
    """Remembers what it was fed, per optimiser step."""

    def __init__(self, accumulate=1):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen, self.accumulate = [], accumulate

    def training_step(self, batch, _):
        self.seen.append((self.global_step, batch.ids_BL.tolist(), batch.denominator))
        return (self.weight * batch.ids_BL.float().mean()).sum()

    def validation_step(self, batch, _):
        assert batch.ids_BL.shape[1] == 32

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, steps, resume=None, accumulate=2):
    module = Recorder()
    trainer = Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
        val_check_interval=3 * accumulate,
        check_val_every_n_epoch=None,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")],
    )
    data = DataModule(prepared(), pack_len=32, max_len=30, batch_size=2, accumulate=accumulate)
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    return module.seen


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_trainer_sees_the_batches_an_uninterrupted_one_does(tmp_path):
    straight = fit(tmp_path, 7)
    expected = [
        (s, b.ids_BL.tolist(), b.denominator) for s in range(7) for b in batches(prepared(), accumulate=2).step(s)
    ]
    assert straight == expected
    for step in (1, 3, 4):
        assert fit(tmp_path, 7, resume=tmp_path / f"step={step}.ckpt") == expected[2 * step :]
