"""Plans from configs: what is built, and which sentences refuse what is none."""

import pytest

from distill.errors import UserError
from distill.tree import Chain, Dynamic, PlanConfig, Static, make_plan


def test_make_plan():
    assert make_plan(PlanConfig(name="chain", length=4)) == Chain(4)
    assert make_plan(PlanConfig(name="static", paths=[[0], [0, 1]])) == Static(((0,), (0, 1)))
    assert make_plan(PlanConfig(name="dynamic", top_k=2, depth=3, total=7)) == Dynamic(top_k=2, depth=3, total=7)


@pytest.mark.parametrize(
    "name,sizes",
    [
        ("chain", {"depth": 3}),
        ("chain", {"top_k": 9}),
        ("chain", {"total": 99}),
        ("dynamic", {"length": 7}),
        ("dynamic", {"paths": [[0]]}),
        ("calibrated", {"length": 2}),
        ("static", {"depth": 2, "paths": [[0]]}),
    ],
)
def test_sizes_of_another_kind_of_plan_are_refused(name, sizes):
    with pytest.raises(UserError, match=f"tree.{next(iter(sizes))} must be left alone with tree={name}"):
        PlanConfig(name=name, **sizes)


@pytest.mark.parametrize("deepest,depth", [(None, 4), (2, 2), (9, 4)])
def test_a_depth_that_is_left_open_is_what_the_drafter_reaches(deepest, depth):
    assert make_plan(PlanConfig(name="dynamic", top_k=2, total=7), deepest=deepest).depth == depth
    asked = make_plan(PlanConfig(name="dynamic", top_k=2, depth=5, total=7), deepest=deepest)
    assert asked.depth == 5, "what was asked for is not changed behind the user's back"


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Chain(0), "tree.length must be >= 1"),
        (lambda: Chain(-2), "tree.length must be >= 1"),
        (lambda: Static(()), "distinct non-empty paths"),
        (lambda: Static(((),)), "distinct non-empty paths"),
        (lambda: Static(((0,), (0,))), "distinct non-empty paths"),
        (lambda: Static(((0,), (1, 0))), "every node's parent"),
        (lambda: Static(((0,), (-1,))), "tree.paths"),
        (lambda: Static(((0,), (0, -2))), "tree.paths"),
        (lambda: Dynamic(top_k=0, depth=2, total=4), "tree.top_k must be >= 1"),
        (lambda: Dynamic(top_k=2, depth=0, total=4), "tree.depth must be >= 1"),
        (lambda: Dynamic(top_k=2, depth=2, total=1), "tree.total must be >= 2"),
        (lambda: Dynamic(top_k=2, depth=2, total=4097), "tree.total must be at most 4096, got 4097"),
        (lambda: make_plan(PlanConfig(name="static", paths=[])), "tree.paths"),
        (lambda: make_plan(PlanConfig(name="dynamix")), "chain, static, calibrated, dynamic.*Did you mean 'dynamic'"),
    ],
)
def test_impossible_plans(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_the_message_about_a_negative_rank_says_so():
    """The sentence must name what is wrong; the parent of [-1] is the root, which is there."""
    with pytest.raises(UserError) as caught:
        Static(((0,), (-1,)))
    assert "without []" not in str(caught.value)
