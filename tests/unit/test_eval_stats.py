"""The arithmetic of the result rows against figures worked out by hand."""

import pytest

from serve_eval import stats
from serve_eval.rows import Record


def record(
    arm="ar", id="p", turn=0, n=5, decode_s=(1.0,), ttft_s=(0.5,), emitted=None, accepted=None, offered=None, **more
):
    emitted = [1] * (n - 1) if emitted is None else emitted
    assert sum(emitted) == n - 1
    return Record(
        arm=arm,
        prompts="set",
        category="all",
        id=id,
        turn=turn,
        prompt_tokens=3,
        ids=list(range(100, 100 + n)),
        emitted=emitted,
        accepted=accepted or [0] * len(emitted),
        offered=offered or [0] * len(emitted),
        ttft_s=list(ttft_s),
        decode_s=list(decode_s),
        **more,
    )


def test_a_turn_takes_the_median_of_its_repeats_and_turns_are_pooled():
    turns = [record(n=5, decode_s=(1.0, 9.0, 2.0)), record(turn=1, n=11, decode_s=(4.0, 4.0, 4.0))]
    (speed,) = stats.speeds(turns).values()
    assert (speed.decoded, speed.decode_s) == (4 + 10, 2.0 + 4.0)  # the first token of a turn is outside the window
    assert (speed.new_tokens, speed.total_s) == (16, 0.5 + 2.0 + 0.5 + 4.0)


def test_speedup_by_hand():
    base = [
        record(id="a", n=11, decode_s=(2.0,)),
        record(id="b", n=21, decode_s=(4.0,)),
        record(id="c", n=11, decode_s=(2.0,)),
    ]
    fast = [
        record("x", id="a", n=11, decode_s=(1.0,)),  # 10 against 5 tokens/s: 2
        record("x", id="b", n=21, decode_s=(1.0,)),  # 20 against 5: 4
        record("x", id="c", n=11, decode_s=(2.0,)),  # 1
    ]
    found = stats.speedup(fast, base)
    assert found.median == pytest.approx(2.0)
    assert found.total == pytest.approx((40 / 4.0) / (40 / 8.0))
    assert found.end_to_end == pytest.approx((43 / 5.5) / (43 / 9.5))
    assert found.total_ci[0] < found.total < found.total_ci[1]
    assert found.total_ci[0] >= 1.0
    assert found.total_ci[1] <= 4.0


def test_median_and_totals_differ_when_one_long_prompt_dominates():
    base = [record(id=i, n=n, decode_s=(float(n - 1),)) for i, n in (("a", 11), ("b", 11), ("c", 101))]
    fast = [record("x", id=i, n=n, decode_s=(s,)) for i, n, s in (("a", 11, 5.0), ("b", 11, 5.0), ("c", 101, 100.0))]
    found = stats.speedup(fast, base)
    assert found.median == pytest.approx(2.0)
    assert found.total == pytest.approx(120 / 110)


def test_interval_is_seeded_narrow_without_spread_and_absent_for_one_prompt():
    base = [record(id=str(i), n=11, decode_s=(2.0,)) for i in range(4)]
    same = [record("x", id=str(i), n=11, decode_s=(1.0,)) for i in range(4)]
    assert stats.speedup(same, base).total_ci == pytest.approx([2.0, 2.0])
    mixed = [record("x", id=str(i), n=11, decode_s=(1.0 + i,)) for i in range(4)]
    assert stats.speedup(mixed, base, seed=1) == stats.speedup(mixed, base, seed=1)
    assert stats.speedup(same[:1], base[:1]).total_ci is None


def test_bootstrap_interval_covers_the_true_ratio_about_as_often_as_it_says():
    import random

    draw, covered, trials = random.Random(0), 0, 60
    for _ in range(trials):
        base = [record(id=str(i), n=11, decode_s=(1.0,)) for i in range(30)]
        fast = [record("x", id=str(i), n=11, decode_s=(draw.uniform(0.3, 0.7),)) for i in range(30)]
        low, high = stats.speedup(fast, base, resamples=300).total_ci
        covered += low <= 2.0 <= high
    assert 0.85 <= covered / trials <= 1.0


def test_a_prompt_that_ends_with_its_first_token_has_no_speed():
    base, fast = [record(n=1, decode_s=(0.1,))], [record("x", n=1, decode_s=(0.1,))]
    assert stats.speedup(fast, base) == stats.Speedup(
        median=None, median_ci=None, total=None, total_ci=None, end_to_end=None
    )
    assert stats.tokens_per_s(fast) is None


def test_acceptance_pools_passes_and_averages_prompts_separately():
    records = [
        # 3 passes, 6 tokens: tau 2
        record("x", id="a", n=7, emitted=[3, 1, 2], accepted=[2, 0, 1], offered=[2, 2, 2]),
        # 1 pass, 4 tokens: tau 4
        record("x", id="b", n=5, emitted=[4], accepted=[3], offered=[3]),
    ]
    tau, per_prompt, by_depth = stats.acceptance(records)
    assert tau == pytest.approx(10 / 4)
    assert per_prompt == pytest.approx((2 + 4) / 2)
    # depth 1: 3 of 4 accepted; depth 2: 2 of those 3; depth 3: offered once after two accepted, accepted once
    assert by_depth == pytest.approx([3 / 4, 2 / 3, 1.0])


def test_steps_are_rebuilt_with_the_tokens_they_emitted():
    found = stats.steps([record("x", n=6, emitted=[2, 3], accepted=[1, 2], offered=[2, 2])])
    assert [s.tokens for s in found] == [(101, 102), (103, 104, 105)]


def test_plain_decoding_has_tau_one_even_where_no_pass_is_recorded():
    assert stats.acceptance([record(n=5)])[0] == 1.0
    hf = record("hf", n=5)
    hf.emitted, hf.accepted, hf.offered = [], [], []
    assert stats.acceptance([hf]) == (1.0, 1.0, [])


def test_match_rate_counts_turns_and_skips_the_unknown():
    assert stats.match_rate([record(matches=m) for m in (True, True, False, None)]) == pytest.approx(2 / 3)
    assert stats.match_rate([record(matches=None)]) is None
    differing = [record(matches=False, difference_tie=tie) for tie in (True, False)]
    assert stats.tie_rate([*differing, record(matches=True), record(matches=None)]) == pytest.approx(1 / 3)
    assert stats.tie_rate([record(matches=None)]) is None
