import math

import pytest
from torch import nn

from distill.drafters.base import ParamGroup
from distill.errors import UserError
from distill.train.config import TrainerConfig, parse_minutes
from distill.train.measure import timed
from distill.train.schedule import OptimConfig, Plan, build_optimizer, group_scale, lr_scale, make_plan

COSTS = {"step": 1.0, "val": 3.0, "checkpoint": 2.0, "decode": 5.0}
OPEN = {"val": None, "checkpoint": None, "decode": None}


def test_warmup_is_linear_and_the_last_step_has_the_floor():
    config = OptimConfig(warmup=4, min_lr=0.25)
    scales = [lr_scale(s, max_steps=12, config=config) for s in range(12)]
    assert scales[:4] == [0.25, 0.5, 0.75, 1.0]
    assert scales[-1] == 0.25
    assert scales[3:] == sorted(scales[3:], reverse=True)
    halfway = lr_scale(7, max_steps=12, config=config)  # 4 of 8 decay steps done: the cosine is at its middle
    assert halfway == pytest.approx(0.25 + 0.75 / 2)


def test_share_of_steps_counts_as_warmup_below_one():
    share, steps = OptimConfig(warmup=0.25), OptimConfig(warmup=5)
    assert [lr_scale(s, max_steps=20, config=share) for s in range(20)] == [
        lr_scale(s, max_steps=20, config=steps) for s in range(20)
    ]


def test_shapes_after_warmup():
    linear = OptimConfig(schedule="linear", warmup=0, min_lr=0.0)
    assert [lr_scale(s, max_steps=4, config=linear) for s in range(4)] == [0.75, 0.5, 0.25, 0.0]
    constant = OptimConfig(schedule="constant", warmup=0)
    assert {lr_scale(s, max_steps=4, config=constant) for s in range(9)} == {1.0}


def test_only_matrices_decay_and_frozen_parameters_stay_out():
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    module[0].bias.requires_grad_(False)
    optimizer, _ = build_optimizer(module, OptimConfig(weight_decay=0.1), max_steps=1)
    decays = {tuple(p.shape): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays == {(2, 2): 0.1, (2,): 0.0}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == 3


def test_groups_of_a_drafter_have_their_own_scale():
    config, group = OptimConfig(warmup=4, min_lr=0.25), ParamGroup(parameters=[], lr=0.5, warmup=0.5)
    usual = [lr_scale(s, max_steps=12, config=config) for s in range(12)]
    plain = ParamGroup(parameters=[])
    assert [group_scale(s, max_steps=12, config=config, group=plain) for s in range(12)] == usual
    slow = [group_scale(s, max_steps=12, config=config, group=group) for s in range(12)]
    assert slow == pytest.approx([0.5 * min(1, (s + 1) / 6) * usual[s] for s in range(12)])


def test_time_becomes_steps_with_everything_paid_for():
    plan = make_plan(max_steps=None, max_seconds=1000.0, every=OPEN, seconds=COSTS)
    assert plan.max_steps == 1000 - 10 * (3 + 2) - 4 * 5
    assert (plan.val_every, plan.checkpoint_every, plan.decode_every) == (93, 93, 233)

    every = {"val": 10, "checkpoint": 5, "decode": 50}
    plan = make_plan(max_steps=None, max_seconds=200.0, every=every, seconds=COSTS)
    spent = lambda n: n * (1 + 3 / 10 + 2 / 5 + 5 / 50) + 3 + 2 + 5  # noqa: E731
    assert spent(plan.max_steps) <= 200 < spent(plan.max_steps + 1)
    assert (plan.val_every, plan.checkpoint_every, plan.decode_every) == (10, 5, 50)


def test_checks_take_a_bounded_share_of_a_short_run():
    plan = make_plan(max_steps=None, max_seconds=100.0, every=OPEN, seconds=COSTS)
    # A tenth of the time pays for two validations with their checkpoints, another for two decodes.
    assert plan.max_steps == 100 - 2 * (3 + 2) - 2 * 5
    assert (plan.val_every, plan.decode_every) == (40, 40)
    assert make_plan(max_steps=None, max_seconds=12.0, every=OPEN, seconds=COSTS).val_every == 2


def test_the_smaller_limit_counts():
    assert make_plan(max_steps=7, max_seconds=200.0, every=OPEN, seconds=COSTS).max_steps == 7
    assert make_plan(max_steps=7, max_seconds=None, every=OPEN, seconds={}).max_steps == 7


def test_too_little_time_is_refused():
    with pytest.raises(UserError, match=r"trainer.max_time must leave room for one step \(11.0 s"):
        make_plan(max_steps=None, max_seconds=10.9, every=OPEN, seconds=COSTS)


def test_everything_happens_after_the_last_step_too():
    plan = Plan(max_steps=10, val_every=4, checkpoint_every=4, decode_every=4, seconds={})
    assert [s for s in range(1, 11) if plan.due(4, s)] == [4, 8, 10]


def test_plan_is_read_back_and_damage_refused(tmp_path):
    plan = make_plan(max_steps=7, max_seconds=None, every=OPEN, seconds={"step": 0.5})
    assert Plan.load(tmp_path / "plan.json") is None
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(UserError, match="must be the plan of a run"):
        Plan.load(tmp_path / "plan.json")


def test_timed_takes_the_median_after_warming_up(monkeypatch):
    clock = iter([0, 200, 201, 300, 307, 400, 402])
    monkeypatch.setattr("distill.train.measure.time.perf_counter", lambda: next(clock))
    assert timed(lambda: None, warmup=1, repeats=3) == 2


@pytest.mark.parametrize(
    "value, seconds", [(None, None), (5, 300.0), ("0.5", 30.0), ("00:05:00", 300.0), ("1:00:00:01", 86401.0)]
)
def test_max_time_forms(value, seconds):
    assert parse_minutes(value) == seconds


@pytest.mark.parametrize("value", ["soon", "1:2", 0, -1, "00:-1:00", math.inf, math.nan])
def test_max_time_refuses(value):
    with pytest.raises(UserError, match=r"trainer.max_time must be minutes or"):
        TrainerConfig(max_time=value)


@pytest.mark.parametrize(
    "options",
    [{"lr": 0.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -1.0}, {"warmup": -1}, {"min_lr": 1.5}, {"clip": -1.0}],
)
def test_optim_refuses(options):
    with pytest.raises(UserError, match=f"optim.{next(iter(options))} must"):
        OptimConfig(**options)


@pytest.mark.parametrize("name", ["batch_size", "accumulate", "max_steps", "val_every", "keep", "devices", "epochs"])
def test_trainer_refuses(name):
    with pytest.raises(UserError, match=f"trainer.{name} must"):
        TrainerConfig(**{name: 0})


def test_schedule_state_holds_no_code():
    _, schedule = build_optimizer(nn.Linear(2, 2), OptimConfig(), max_steps=3)
    assert schedule.state_dict()["lr_lambdas"] == [None, None]
