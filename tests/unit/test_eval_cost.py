"""Costs: the formula by hand, time attributed to the right part, nothing left on the models afterwards."""

import time

import pytest

from distill.errors import UserError
from distill.sampling import Sampling
from distill.target.tiny import tiny_target
from distill.tree import Chain
from serve_eval.arms import DecoderArm
from serve_eval.cost import RoundCost, VerifyCurve, _instrumented, predict, round_costs, verify_curve
from serve_eval.replay import ReplayDrafter


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_predicted_speedup_by_hand():
    curve = VerifyCurve(context=8, widths=[1, 4], seconds=[0.08, 0.12], ratio=[1.0, 1.5])
    rounds = [
        RoundCost(arm="ar", rounds=9, nodes=1, tau=1.0, target_s=0.08, draft_s=0.0, extend_s=0.0, host_s=0.02),
        RoundCost(arm="x", rounds=9, nodes=4, tau=2.0, target_s=0.11, draft_s=0.03, extend_s=0.01, host_s=0.02),
    ]
    (found,) = predict(curve, rounds, {"x": 2.4}, {"x": 1.3})
    # one plain step takes 0.1 s, so v = 1.2, draft 0.4, host 0.2
    assert (found.v, found.draft, found.host) == pytest.approx((1.2, 0.4, 0.2))
    assert found.speedup == pytest.approx(2.4 / 1.8)
    assert found.measured == 1.3


def test_time_goes_to_the_part_that_took_it(target):
    drafter = ReplayDrafter(target)
    drafter.script = list(range(4, 40))
    slow_step, slow_forward = drafter.step, target.forward
    drafter.step = lambda *a: (time.sleep(0.004), slow_step(*a))[1]
    target.forward = lambda *a, **k: (time.sleep(0.03), slow_forward(*a, **k))[1]
    try:
        arm = DecoderArm(target, sampling=Sampling(), drafter=drafter, plan=Chain(3))
        (cost,) = round_costs([arm], [[5, 6, 7]], max_new_tokens=6)
    finally:
        del target.forward
    assert cost.nodes == 4
    assert cost.target_s >= 0.03
    assert 0.012 <= cost.draft_s < 0.03 * 3
    assert cost.host_s >= 0
    assert cost.total_s == pytest.approx(cost.target_s + cost.draft_s + cost.extend_s + cost.host_s)


def test_the_prefill_belongs_to_no_round(target):
    forward = target.forward

    def slow_prefill(ids_BL, **kwargs):
        if ids_BL.shape[1] > 4:
            time.sleep(0.3)
        return forward(ids_BL, **kwargs)

    target.forward = slow_prefill
    try:
        (cost,) = round_costs([DecoderArm(target, sampling=Sampling())], [list(range(4, 24))], max_new_tokens=4)
    finally:
        del target.forward
    assert cost.rounds == 3
    assert cost.tau == 1.0
    assert cost.total_s < 0.1


def test_instrumenting_leaves_no_trace_and_counts_nested_calls_once(target):
    drafter = ReplayDrafter(target)
    arm = DecoderArm(target, sampling=Sampling(), drafter=drafter, plan=Chain(2))
    with _instrumented(arm) as watch:
        outer = watch.wrap("draft", lambda: watch.wrap("target", lambda: time.sleep(0.01))())
        outer()
        assert watch.seconds["draft"] >= 0.01
        assert "target" not in watch.seconds
        assert "forward" in vars(target)
    assert not {"forward", "logits"} & set(vars(target))
    assert not {"step", "extend"} & set(vars(drafter))


def test_verify_curve_has_every_width_and_starts_at_one(target):
    curve = verify_curve(target, context=16, rounds=2, widths=[6, 4])
    assert curve.widths == [1, 4, 6]
    assert curve.ratio[0] == 1.0
    assert len(curve.seconds) == len(curve.ratio) == 3
    assert min(curve.seconds) > 0


def test_costs_need_a_round(target):
    with pytest.raises(UserError, match="max_new_tokens must be at least 2"):
        round_costs([DecoderArm(target, sampling=Sampling())], [[5]], max_new_tokens=1)
