"""Medusa-2 where it meets the rest: several processes, rejection, calibration, the task that decodes, Hydra heads."""

import processes
import pytest
import torch
from drafter_tools import V, make
from oracles import random_prompts, stepped
from plain_rejection import written_out

from distill.decode import Decoder
from distill.decode.calibrate import calibrate
from distill.export import load_drafter, save_drafter
from distill.sampling import Sampling
from distill.target.tiny import tiny_target
from distill.tree import Chain, Dynamic, Static

pytest.importorskip("peft")
LORA = {"lora_rank": 3, "lora_alpha": 6}
BUSHY = Static(((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))


def exported(name, path):
    """A drafter with an adapter that matters, as it is loaded for decoding."""
    target = tiny_target("llama", seed=4, vocab_size=V, hidden=16, layers=3, dtype=torch.float64)
    drafter = make(name, target=target, **LORA)
    return load_drafter(save_drafter(drafter, path / "export", provenance={}), target)


def gradients(rank, world, strategy, path):
    """Gradients of one optimiser step, made as the Trainer makes them; the adapter has left its start."""
    import torch.distributed as dist
    import train_tools as tools
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    from distill.data import Batches
    from distill.train.fsdp import shard_module, whole, whole_weights
    from distill.train.module import DraftModule, step_loss

    config = tools.config("unused")
    config.loss.name = "kl"
    drafter = make("medusa", target=tools.target(), heads=2, **LORA).train()
    draft = DraftModule(drafter, loss=config.loss, optim=config.optim, max_steps=6)
    drafter.on_step(2, 6)
    step = draft.training_step = lambda batch: step_loss(drafter, batch, config.loss).loss * world
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    if strategy == "fsdp":
        shard_module(draft, init_device_mesh("cpu", (world,)), step="training_step")
        step = draft.training_step
    elif strategy == "ddp":
        draft.forward = step
        step = DistributedDataParallel(draft)
    batches = Batches(
        tools.data(), pack_len=32, max_len=16, batch_size=2 // world, accumulate=2, rank=rank, world=world
    )
    for batch in batches.step(0):
        step(batch).backward()
    found = {name: whole(p.grad) for name, p in draft.named_parameters()}
    with whole_weights(draft):
        found["digest"] = drafter.decoding().target.fingerprint["weights"]
    torch.save(found, f"{path}-{rank}")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_and_decoding_in_two_processes(tmp_path, strategy):
    """The adapter's weights are reached through modules of another tree, which hooks and pieces have to serve."""
    processes.together(gradients, strategy, str(tmp_path / "two"), world=2, folder=tmp_path / "logs")
    gradients(0, 1, "one", str(tmp_path / "one"))
    wanted = torch.load(tmp_path / "one-0", weights_only=True)
    for rank in range(2):
        found = torch.load(tmp_path / f"two-{rank}", weights_only=True)
        assert found.keys() == wanted.keys()
        assert found.pop("digest") == wanted["digest"]
        for name, value in found.items():
            assert float(wanted[name].norm()) > 0, name
            assert float((value - wanted[name]).norm() / wanted[name].norm()) < 1e-5, name


@pytest.mark.parametrize("engine", ["eager", "fast"])
@pytest.mark.parametrize("plan", [Chain(4), BUSHY], ids=["chain", "static"])
def test_rejection_equals_the_rule_written_out(plan, engine, tmp_path):
    """p is the adapted target's, q what the heads say on its states."""
    loaded, sampling = exported("medusa", tmp_path), Sampling(temperature=0.8, seed=5)
    target, prompts = loaded.target, random_prompts(3, V, seed=7, longest=12)

    def draft(ids, path):
        last_D = target.model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0, -2]
        return target.model.get_output_embeddings()(loaded.heads[len(path)](last_D))

    with torch.no_grad():
        wanted = [written_out(target, draft, plan, p, i, sampling, 10) for i, p in enumerate(prompts)]
    decoder = Decoder(target, loaded, plan=plan, sampling=sampling, verifier="rejection", engine=engine)
    found = decoder.generate(prompts, max_new_tokens=10, ignore_eos=True)
    assert [g.ids for g in found] == [ids for ids, _ in wanted]
    assert sum(accepted for _, accepted in wanted) > 0


def test_calibration_is_of_the_adapted_target(tmp_path):
    loaded = exported("medusa", tmp_path)
    target, prompts = loaded.target, random_prompts(4, V, seed=7, longest=12)
    measured = calibrate(loaded, prompts, max_new_tokens=12).greedy
    hits, count = [0] * 4, [0] * 4
    with torch.no_grad():
        for prompt, ids in zip(
            prompts, stepped(target, prompts, 12, Sampling(), stop=target.info.eos_ids), strict=True
        ):
            text = torch.tensor([prompt + ids])
            last_LD = target.model.model(input_ids=text, use_cache=False).last_hidden_state[0]
            for root in range(len(prompt), len(prompt) + len(ids) - 1) if len(ids) > 2 else ():
                for depth in range(min(4, text.shape[1] - 1 - root)):
                    said_V = target.model.get_output_embeddings()(loaded.heads[depth](last_LD[root - 1]))
                    hits[depth] += int(said_V.argmax()) == int(text[0, root + 1 + depth])
                    count[depth] += 1
    assert [row[0] for row in measured.hits_DR] == hits
    assert list(measured.count_D) == count
    assert sum(count) > 50


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=3)], ids=["greedy", "T0.9"])
def test_hydra_heads_on_an_adapted_target(sampling, tmp_path):
    loaded = exported("hydra", tmp_path)
    prompts = random_prompts(4, V, seed=7, longest=20)
    wanted = stepped(loaded.target, prompts, 14, sampling, stop=())
    for engine in ("eager", "fast"):
        for plan in (Chain(4), BUSHY, Dynamic(top_k=3, depth=3, total=9)):
            decoder = Decoder(loaded.target, loaded, plan=plan, sampling=sampling, engine=engine)
            assert [g.ids for g in decoder.generate(prompts, max_new_tokens=14, ignore_eos=True)] == wanted
