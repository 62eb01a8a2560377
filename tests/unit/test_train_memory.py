"""The memory estimate: what is exact is exact, and what cannot fit is refused before it is tried."""

import pytest
import torch
import train_tools as tools

from distill.drafters.base import Drafter
from distill.drafters.eagle3 import Eagle3
from distill.errors import UserError
from distill.losses import LossConfig
from distill.train import memory
from distill.train.memory import announce, estimate, free_memory
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


def test_drafters_that_cannot_recompute_say_so():
    with pytest.raises(UserError, match="activation_checkpointing must be false"):
        Drafter.recompute_activations(tools.drafter(), True)


def test_a_run_is_refused_before_its_first_step(tmp_path, monkeypatch):
    tools.in_memory(monkeypatch)
    seen = []
    monkeypatch.setattr(Eagle3, "recompute_activations", lambda _, on: seen.append(on))
    monkeypatch.setattr(memory, "free_memory", lambda _: 1000)
    monkeypatch.setattr("distill.train.run.build_trainer", None)  # calling it would fail otherwise
    with pytest.raises(UserError, match="must fit into the memory of cpu"):
        run(tools.config(tmp_path / "run", activation_checkpointing=True))
    assert seen == [True]
