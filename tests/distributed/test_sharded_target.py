"""A target in pieces (FSDP2, two gloo processes) gives the features, logits and embeddings of the whole one."""

import processes
import pytest
import torch
import train_tools as tools

from distill.target import TargetConfig, load_target
from distill.target.loading import is_sharded, load_for_sharding, shard_target

PARITY = 1e-5


def config(family):
    return TargetConfig(name=f"tiny-{family}", dtype="float32", device="cpu")


def speak(target, rank):
    """Features, logits and embeddings of a batch that only this rank sees."""
    generator = torch.Generator().manual_seed(rank)
    ids_BL = torch.randint(target.info.vocab_size, (2, 12), generator=generator)
    output = target.forward(ids_BL, taps=(0, 2, target.info.tap_out))
    return {
        **{f"tap {tap}": value for tap, value in output.taps.items()},
        "last": output.last_BLD,
        "logits": target.logits(output.last_BLD),
        "embed": target.embed(ids_BL),
        "rows": target.head_rows(torch.tensor([3, 1])),
    }


def sharded(rank, world, family, path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", rank=rank, world_size=world)
    target = load_for_sharding(config(family))
    whole = sum(p.numel() for layer in target._layers for p in layer.parameters())
    shard_target(target, mesh=init_device_mesh("cpu", (world,)), device=torch.device("cpu"), check=True)
    assert is_sharded(target)
    here = sum(p.to_local().numel() for layer in target._layers for p in layer.parameters())
    assert here <= 0.6 * whole, (here, whole)
    torch.save(speak(target, rank), f"{path}-{rank}")
    for parameter in target._layers[0].parameters():
        assert parameter.to_local().numel() < parameter.numel(), "a layer stayed whole after its forward"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_features_equal_the_whole_targets(tmp_path, family):
    processes.together(sharded, family, str(tmp_path / "features"), world=2, folder=tmp_path)
    target = load_target(config(family))
    assert not is_sharded(target)
    for rank in range(2):
        found = torch.load(tmp_path / f"features-{rank}", weights_only=True)
        for name, value in speak(target, rank).items():
            error = (found[name] - value).norm() / value.norm()
            assert error < PARITY, (name, float(error))


def divided(rank):
    import pytest

    from distill.train import run

    pytest.MonkeyPatch().setattr(run, "load_for_sharding", lambda _: tools.target())


def train(rank, world, run_dir, options):
    """As ``processes.train``, with the target in pieces."""
    plain = tools.config

    def with_shards(*args, **kwargs):
        made = plain(*args, **kwargs)
        made.target.shard = "fsdp"
        return made

    pytest.MonkeyPatch().setattr(tools, "config", with_shards)
    processes.train(rank, world, run_dir, options, divided)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_training_with_it_equals_training_without(tmp_path, strategy):
    options = {"val_every": 2, "decode_every": 3, "batch_size": 1, "strategy": strategy, "timeout_s": 60}
    processes.together(processes.train, str(tmp_path / "whole"), options, world=2, folder=tmp_path / "1")
    processes.together(train, str(tmp_path / "pieces"), options, world=2, folder=tmp_path / "2")
    a, b = (processes.checkpoint(tmp_path / name)["state_dict"] for name in ("whole", "pieces"))
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=1e-4, atol=1e-5)
    rows = [processes.metrics(tmp_path / name) for name in ("whole", "pieces")]
    assert [row["decode/tau"] for row in rows[0]] == [row["decode/tau"] for row in rows[1]]
    for one, two in zip(*rows, strict=True):
        assert float(one["train/loss"]) == pytest.approx(float(two["train/loss"]), rel=1e-4)


def test_outside_training_it_is_refused():
    from distill.errors import UserError

    with pytest.raises(UserError, match="target.shard must be none outside training, got fsdp"):
        load_target(TargetConfig(name="tiny", shard="fsdp"))
