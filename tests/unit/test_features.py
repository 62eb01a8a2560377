"""Stored features are the target's own, row by row, and training on them is training online without its forwards."""

import csv
import logging

import feature_tools as features
import numpy as np
import pytest
import torch
import train_tools as tools
from safetensors.torch import load_file

from distill.config import build, to_dict
from distill.data import Batches, Conversation, PreparedData
from distill.data.features import open_features
from distill.losses import LossConfig
from distill.target.model import Target
from distill.train.config import TrainConfig
from distill.train.evaluate import validate
from distill.train.module import step_loss
from distill.train.run import run

FP32 = (
    1e-5  # relative, of a norm: a conversation has other neighbours here than in a training row, and a matrix product
)
# over other rows may add the same numbers in another order: equality is to rounding, not bit for bit
FP64 = 1e-9
BF16 = 2.0**-8  # half a unit in the last place of a stored number, relative


def gradients(drafter, batch):
    result = step_loss(drafter, batch, LossConfig())
    return result, torch.autograd.grad(result.loss, list(drafter.parameters()))


def alone(target, ids):
    """What transformers says about one conversation: every hidden state, and the last one after the norm."""
    with torch.no_grad():
        out = target.model(torch.tensor([ids]), output_hidden_states=True)
    return [state[0] for state in out.hidden_states]


# ---------------------------------------------------------------------------------------------- what is stored
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, FP32), (torch.float64, FP64)])
def test_every_conversations_features_are_those_of_the_model_alone(tmp_path, dtype, tolerance):
    target, data = tools.target(dtype), tools.data()
    features.stored(tmp_path, target=target)
    seen = 0
    for path in sorted(tmp_path.glob("*.safetensors")):
        shard = load_file(path)
        ends = shard["lengths"].cumsum(0).tolist()
        for begin, end in zip([0, *ends], ends, strict=False):
            ids = data[seen].ids[:16].tolist()
            states = alone(target, ids)
            assert end - begin == len(ids)
            for name, expected in [("last", states[-1]), *((f"tap_{k}", states[k]) for k in features.TAPS)]:
                found = shard[name][begin:end]
                assert found.dtype == dtype
                assert (found - expected).norm() <= tolerance * expected.norm()
            seen += 1
    assert seen == len(data)


def test_bf16_is_the_rounded_value(tmp_path):
    options = features.config(features_dtype="bf16")
    exact, rounded = (features.stored(tmp_path / name, o) for name, o in (("a", None), ("b", options)))
    rows = [[0, 5], [7]]
    a, b = (store.rows(rows, pack_len=32, max_len=16) for store in (exact, rounded))
    assert b.last_BLD.dtype == torch.float32, "handed out as the target would"
    assert torch.equal(b.last_BLD, a.last_BLD.bfloat16().float())
    assert all(torch.equal(b.taps[k], a.taps[k].bfloat16().float()) for k in features.TAPS)
    sizes = [sum(map(len, features.shards(tmp_path / name).values())) for name in "ab"]
    assert 1.8 < sizes[0] / sizes[1] < 2.0


@pytest.mark.parametrize("pack_len, max_len", [(32, 16), (16, 16), (40, 9)])
def test_rows_are_laid_out_as_their_tokens_are(tmp_path, pack_len, max_len):
    """The features of a token say which token it is: tap 0 is its embedding."""
    store, target = features.stored(tmp_path), tools.target()
    batches = Batches(tools.data(), pack_len=pack_len, max_len=max_len, batch_size=3, features=store)
    for batch in batches.step(0) + list(batches.validation()):
        real = batch.doc_BL >= 0
        assert batch.features.last_BLD.shape == (3, pack_len, features.D)
        assert torch.equal(batch.features.taps[0][real], target.embed(batch.ids_BL)[real])
        for x_BLD in (batch.features.last_BLD, *batch.features.taps.values()):
            assert not x_BLD[~real].any()
            assert x_BLD[real].any(-1).all()


# -------------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, FP32), (torch.float64, FP64)])
def test_loss_and_gradients_are_those_of_training_online(tmp_path, dtype, tolerance):
    drafter = tools.drafter(dtype)
    store = features.stored(tmp_path, target=tools.target(dtype))
    online, offline = (
        Batches(tools.data(), **features.SIZES, batch_size=2, accumulate=2, features=f) for f in (None, store)
    )
    for number in (0, 1, 5):
        for ours, theirs in zip(offline.step(number), online.step(number), strict=True):
            assert theirs.features is None
            (a, a_grads), (b, b_grads) = gradients(drafter, ours), gradients(drafter, theirs)
            assert a.loss.item() == pytest.approx(b.loss.item(), rel=tolerance)
            assert torch.equal(a.hits_K, b.hits_K)
            for x, y in zip(a_grads, b_grads, strict=True):
                assert (x - y).norm() <= tolerance * y.norm()


def test_a_bf16_store_moves_the_loss_by_no_more_than_its_rounding(tmp_path):
    drafter = tools.drafter()
    store = features.stored(tmp_path, features.config(features_dtype="bf16"))
    online, offline = (Batches(tools.data(), **features.SIZES, batch_size=4, features=f) for f in (None, store))
    (a, a_grads), (b, b_grads) = (gradients(drafter, batches.step(0)[0]) for batches in (offline, online))
    assert a.loss.item() != b.loss.item()
    assert a.loss.item() == pytest.approx(b.loss.item(), rel=BF16)
    flat = [torch.cat([g.flatten() for g in grads]) for grads in (a_grads, b_grads)]
    assert (flat[0] - flat[1]).norm() < 4 * BF16 * flat[1].norm()


def test_nothing_runs_the_target_any_more(tmp_path, monkeypatch):
    store, drafter = features.stored(tmp_path), tools.drafter()
    monkeypatch.setattr(Target, "forward", lambda *_, **__: pytest.fail("the target ran"))
    batches = Batches(tools.data(), **features.SIZES, batch_size=2, features=store)
    for batch in batches.step(3):
        step_loss(drafter, batch, LossConfig()).loss.backward()
    assert validate(drafter, batches.validation(), LossConfig())["val/loss"] > 0


def test_every_rank_reads_its_own_rows(tmp_path):
    store = features.stored(tmp_path)
    whole = Batches(tools.data(), **features.SIZES, batch_size=4, features=store).step(2)[0]
    for rank in (0, 1):
        part = Batches(tools.data(), **features.SIZES, batch_size=2, rank=rank, world=2, features=store).step(2)[0]
        assert torch.equal(part.features.last_BLD, whole.features.last_BLD[rank::2])
        assert torch.equal(part.features.taps[2], whole.features.taps[2][rank::2])


def with_store(folder, **options):
    values = to_dict(tools.config(folder, checkpoint_every=2))
    values["data"] |= {"features": "store", "features_dtype": "target", **options}
    return build(TrainConfig, values)


def losses(folder):
    with (folder / "logs" / "metrics.csv").open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


@pytest.mark.slow
def test_a_whole_run_from_the_store_and_one_that_was_killed(tmp_path, monkeypatch):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    tools.in_memory(monkeypatch)
    online = run(tools.config(tmp_path / "online", checkpoint_every=2))
    monkeypatch.setattr("distill.train.module.target_features", lambda *_: pytest.fail("the target ran"))
    stored = run(with_store(tmp_path / "stored"))
    assert (tmp_path / "stored" / "features" / "manifest.json").is_file()
    assert losses(tmp_path / "stored") == pytest.approx(losses(tmp_path / "online"), rel=FP32)
    assert stored.metrics["val/tau"] == pytest.approx(online.metrics["val/tau"], rel=FP32)

    # The second run uses the first one's store, is killed, and goes on to the same bytes.
    class KilledError(Exception):
        pass

    def clip(module, *args, **kwargs):
        if module.trainer.global_step == 3:
            raise KilledError
        return plain(module, *args, **kwargs)

    from distill.train.module import DraftModule

    plain = DraftModule.configure_gradient_clipping
    config = with_store(tmp_path / "torn", features_folder=str(tmp_path / "stored" / "features"))
    with monkeypatch.context() as patch:
        patch.setattr(DraftModule, "configure_gradient_clipping", clip)
        with pytest.raises(KilledError):
            run(config)
    torn = run(config)
    weights = [(result.export_dir / "model.safetensors").read_bytes() for result in (stored, torn)]
    assert weights[0] == weights[1]
    assert losses(tmp_path / "torn") == losses(tmp_path / "stored")
    assert not (tmp_path / "torn" / "features").exists()


# ------------------------------------------------------------------------------------------------ larger shapes
def test_long_and_short_conversations_share_a_store(tmp_path, monkeypatch):
    """Some alone are larger than a shard; cut ones end where they are cut; two rows at a time."""
    monkeypatch.setattr("distill.data.features.BATCH_TOKENS", 110)
    rng, target = np.random.default_rng(3), tools.target()
    lengths = [1, 40, 3, 2, 64, 31, 5, 5, 5, 64, 2]
    conversations = [
        Conversation(ids=rng.integers(4, tools.V, n).astype(np.int32), loss_mask=np.ones(n, dtype=bool), key=i)
        for i, n in enumerate(lengths)
    ]
    data = PreparedData.from_conversations(conversations, vocab_size=tools.V, validation=0)
    config = features.config(max_len=50, pack_len=50)
    store = features.stored(tmp_path, config, data=data, shard_bytes=4000)
    assert [entry["tokens"] for entry in store.manifest.shards] == [1, 40, 5, 50, 31, 15, 50, 2]
    for i, n in enumerate(lengths):
        output = store.rows([[i]], pack_len=50, max_len=50)
        states = alone(target, conversations[i].ids[:50].tolist())
        for found, expected in [(output.last_BLD, states[-1]), (output.taps[2], states[2])]:
            assert (found[0, : min(n, 50)] - expected).norm() <= FP32 * expected.norm()
    again = open_features(config, data, target, tmp_path, taps=(1,))
    assert list(again.rows([[0]], pack_len=50, max_len=50).taps) == [1]
