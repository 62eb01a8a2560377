"""The memory estimate: what is exact is exact, and what cannot fit is refused before it is tried."""

import drafter_tools
import pytest
import torch
import train_tools as tools

from bench import training
from bench.peak import Tracker
from distill.drafters.eagle3 import Eagle3
from distill.drafters.medusa import Medusa, MedusaConfig
from distill.errors import UserError
from distill.losses import LossConfig
from distill.target.tiny import tiny_target
from distill.train import memory
from distill.train.memory import announce, estimate, free_memory
from distill.train.module import step_loss
from distill.train.run import run
from distill.train.schedule import OptimConfig, build_optimizer


def test_weights_gradients_and_optimizer_are_exact():
    drafter = tools.drafter()
    need = estimate(drafter, rows=2, length=32, loss=LossConfig())
    adamw, _ = build_optimizer(drafter, OptimConfig(), max_steps=1)
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adamw.step()
    moments = [x for state in adamw.state.values() for x in state.values() if x.ndim]
    assert need.gradients == sum(p.grad.numel() * 4 for p in drafter.parameters())
    assert need.optimizer == sum(x.numel() * 4 for x in moments)
    assert need.weights == sum(x.numel() * x.element_size() for x in drafter.state_dict().values())
    assert need.target >= sum(p.numel() * 4 for p in drafter.target.model.parameters())
    assert need.total == need.target + need.weights + need.gradients + need.optimizer + need.activations


def test_activations_grow_with_what_makes_them():
    drafter = tools.drafter()

    def activations(**change):
        return estimate(drafter, **{"rows": 2, "length": 64, "loss": LossConfig(chunk=1), **change}).activations

    base = activations()
    assert 1.9 < activations(length=128) / base < 2.1
    assert activations(rows=4) == activations(length=128)
    assert activations(low=True) < base
    assert activations(share=0.5) < base
    assert activations(loss=LossConfig(chunk=99)) > base
    drafter.recompute_activations(True)
    assert activations() < 0.9 * base


FULL = [
    ("medusa", {}, {}),
    ("medusa", {"head": "own"}, {}),
    ("medusa", {"head": "own"}, {"length": 1024}),
    ("medusa", {}, {"vocab": 20000}),
    ("medusa", {"head": "pruned", "draft_vocab_size": 500}, {}),
    ("medusa", {"lora_rank": 8}, {}),
    ("medusa", {"lora_rank": 8}, {"length": 1024}),
    ("draft_model", {}, {}),
    ("draft_model", {}, {"vocab": 20000}),
    ("eagle1", {}, {}),
    ("eagle1", {"steps": 3}, {"length": 1024}),
]


@pytest.mark.parametrize("loss", [LossConfig(), LossConfig(name="jsd", hard=0.2)], ids=["ce", "jsd-hard"])
@pytest.mark.parametrize("name, options, sizes", FULL, ids=str)
def test_the_estimate_is_near_the_measured_peak(name, options, sizes, loss):
    """Within a quarter, for the full vocabulary and for one head or many; of the weights' gradients, exactly."""
    vocab, length = sizes.get("vocab", 2048), sizes.get("length", 256)
    target = tiny_target(vocab_size=vocab, hidden=64, layers=4)
    drafter = drafter_tools.make(name, target=target, **options).train()
    batch = training.make_batch(vocab, length, seed=0)
    peak, _ = training.activation_peak(drafter, lambda: step_loss(drafter, batch, loss).loss)
    need = estimate(drafter, rows=1, length=length, loss=loss, share=0.75)
    assert 0.75 < need.activations / peak < 1.25
    assert need.gradients == sum(p.grad.numel() * 4 for p in drafter.parameters())


def test_gradients_of_the_heads_are_made_beside_those_of_earlier_micro_steps():
    """Four heads of their own, so wide that they are what there is to count."""
    vocab, loss = 3000, LossConfig(chunk=8)
    target = tiny_target(vocab_size=vocab, hidden=64, layers=2)
    drafter = drafter_tools.make("medusa", target=target, head="own").train()
    batch = training.make_batch(vocab, 64, seed=0)
    first, second = (
        estimate(drafter, rows=1, length=64, loss=loss, share=0.75, accumulate=again).activations
        for again in (False, True)
    )
    assert second - first == sum(p.numel() * 4 for p in drafter.lm_heads.parameters())
    step_loss(drafter, batch, loss).loss.backward()
    with Tracker() as tracker:
        step_loss(drafter, batch, loss).loss.backward()
    assert 0.75 < second / tracker.peak() < 1.25


def test_divided_weights_count_once():
    drafter = tools.drafter()
    alone, four = (estimate(drafter, rows=1, length=8, loss=LossConfig(), shards=n) for n in (1, 4))
    assert four.optimizer == alone.optimizer // 4
    assert four.activations == alone.activations


def test_what_cannot_fit_is_refused(tmp_path, monkeypatch):
    config = tools.config(tmp_path, batch_size=3)
    line = announce(config, tools.drafter(), processes=1)
    assert line.startswith("memory of a training step: about ")
    assert "GiB free" in line
    monkeypatch.setattr(memory, "free_memory", lambda _: 1000)
    with pytest.raises(UserError, match=r"3 x 32 tokens must fit .* got an estimate of .* lower trainer\.batch_size"):
        announce(config, tools.drafter(), processes=1)
    monkeypatch.setattr(memory, "free_memory", lambda _: None)  # not known: nothing is refused
    assert "free" not in announce(config, tools.drafter(), processes=1)


def test_free_memory_of_this_machine():
    free = free_memory(torch.device("cpu"))
    assert free is None or 0 < free < 2**50


@pytest.mark.parametrize("name", ["medusa", "hydra", "draft_model"])
def test_drafters_that_cannot_recompute_say_so_before_data_are_written(name, tmp_path):
    config = tools.config(tmp_path / "run", activation_checkpointing=True)
    config.drafter = {"name": name}
    with pytest.raises(UserError, match=f"activation_checkpointing must be false for drafter {name}"):
        run(config)
    assert not (tmp_path / "run" / "data").exists()


def test_nobody_is_told_to_recompute_who_cannot(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda _: 1000)
    need = estimate(tools.drafter(), rows=1, length=8, loss=LossConfig())
    heads = Medusa(MedusaConfig(heads=1), tools.target())
    for drafter, told in ((tools.drafter(), True), (heads, False)):
        with pytest.raises(UserError) as caught:
            memory.refuse_unless_it_fits(need, drafter, rows=1, length=8)
        assert ("activation_checkpointing" in str(caught.value)) is told


def test_a_run_is_refused_before_its_first_step(tmp_path, monkeypatch):
    tools.in_memory(monkeypatch)
    seen = []
    monkeypatch.setattr(Eagle3, "recompute_activations", lambda _, on: seen.append(on))
    monkeypatch.setattr(memory, "free_memory", lambda _: 1000)
    monkeypatch.setattr("distill.train.run.build_trainer", None)  # calling it would fail otherwise
    with pytest.raises(UserError, match="must fit into the memory of cpu"):
        run(tools.config(tmp_path / "run", activation_checkpointing=True))
    assert seen == [True]
