"""Two gloo processes, DDP and FSDP2: the gradients, weights and metrics of one process on the same global batch."""

import processes
import pytest
import torch
import train_tools as tools

from distill.data import Batches
from distill.export import load_drafter
from distill.train.fsdp import shard_module, whole
from distill.train.module import DraftModule, step_loss

PARITY = 1e-5
"""fp32: the same numbers added in another order."""

STEP = 3


def module():
    torch.manual_seed(0)
    config = tools.config("unused")
    return DraftModule(tools.drafter(), loss=config.loss, optim=config.optim, max_steps=6)


def batches(rank, world):
    return Batches(tools.data(), pack_len=32, max_len=16, batch_size=2 // world, accumulate=2, rank=rank, world=world)


def gradients(strategy, rank, world):
    """Gradients of the optimiser step's loss, made the way the Trainer makes them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    draft = module()
    step = draft.training_step = lambda batch: step_loss(draft.drafter, batch, draft.loss_config).loss * world
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    draft.drafter.recompute_activations(strategy == "fsdp, recomputed")
    if strategy.startswith("fsdp"):
        shard_module(draft, init_device_mesh("cpu", (world,)), step="training_step")
        step = draft.training_step
    elif strategy == "ddp":
        draft.forward = step
        step = DistributedDataParallel(draft)
    for batch in batches(rank, world).step(STEP):
        step(batch).backward()
    return draft, {name: whole(p.grad) for name, p in draft.named_parameters()}


def save_gradients(rank, world, strategy, path):
    draft, found = gradients(strategy, rank, world)
    if strategy.startswith("fsdp"):
        local = {name: p.to_local().numel() for name, p in draft.named_parameters()}
        assert all(local[name] < found[name].numel() for name in local), "weights are not in pieces"
    torch.save(found, f"{path}-{rank}")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp, recomputed"])
def test_gradients_equal_those_of_one_process(tmp_path, strategy):
    """The chunked loss makes the head's gradients inside one autograd function: hooks and pieces have to see them."""
    processes.together(save_gradients, strategy, str(tmp_path / "gradients"), world=2, folder=tmp_path)
    _, wanted = gradients("one", 0, 1)
    assert wanted["drafter.lm_head.weight"].abs().max() > 0
    for rank in range(2):
        found = torch.load(tmp_path / f"gradients-{rank}", weights_only=True)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            error = (found[name] - value).norm() / value.norm()
            assert error < PARITY, (name, float(error))


OPTIONS = {"val_every": 2, "checkpoint_every": 2, "decode_every": 3}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_equals_that_of_one_process(tmp_path, strategy):
    processes.together(
        processes.train, str(tmp_path / "one"), {**OPTIONS, "batch_size": 2}, world=1, folder=tmp_path / "1"
    )
    two = {**OPTIONS, "batch_size": 1, "strategy": strategy}
    processes.together(processes.train, str(tmp_path / "two"), two, world=2, folder=tmp_path / "2")

    one, two = (processes.checkpoint(tmp_path / name) for name in ("one", "two"))
    assert one["state_dict"].keys() == two["state_dict"].keys()
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], value, rtol=1e-4, atol=1e-5)  # six Adam steps amplify
    ours, theirs = (c["optimizer_states"][0]["state"] for c in (one, two))
    assert ours.keys() == theirs.keys() != set()
    for number, moments in ours.items():  # the same numbering of parameters, whatever the strategy
        torch.testing.assert_close(theirs[number]["exp_avg"], moments["exp_avg"], rtol=1e-3, atol=1e-6)
    rows = [processes.metrics(tmp_path / name) for name in ("one", "two")]
    assert len(rows[0]) == len(rows[1]) == 6
    for a, b in zip(*rows, strict=True):
        for key in ("train/loss", "train/supervised_tokens", "optim/grad_norm", "train/acc_0", "val/loss", "val/tau"):
            assert (a[key] == "") == (b[key] == ""), key
            if a[key]:
                assert float(b[key]) == pytest.approx(float(a[key]), rel=1e-4, abs=1e-6), key
    exported = [load_drafter(tmp_path / name / "export", tools.target()).state_dict() for name in ("one", "two")]
    for name, value in exported[0].items():
        torch.testing.assert_close(exported[1][name], value, rtol=1e-4, atol=1e-5)
