"""Every YAML file that ships is composed and converted strictly, and says nothing else than the dataclasses do."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from distill.config import build, config_dir, describe, flatten, to_dict
from distill.entry import choices, compose_values
from distill.registry import drafter_class
from distill.train.config import TrainConfig
from distill.train.main import train_config
from distill.tree import PlanConfig, make_plan
from serve_eval.__main__ import task_module

GROUPS = ["target", "drafter", "data", "loss", "optim", "trainer", "tracking", "debug", "experiment"]
CHOICES = [(group, name) for group in GROUPS for name in choices(group)]
FILES = sorted(config_dir().rglob("*.yaml"))

# What must be named beside a choice that cannot know it.
GIVEN = {
    "target=hub": ["target.name=some/model"],
    **{f"data={s}": ["data.path=x.jsonl"] for s in ("chat", "prompts", "text")},
}


@cache
def composed(choice: str) -> dict[str, Any]:
    """The values of ``python train.py <choice>``."""
    return compose_values("train", [choice, *GIVEN.get(choice, [])])


def compose_task(task: str, *overrides: str):
    """Compose and convert one evaluation task."""
    values = compose_values("eval", [f"task={task}", *overrides])
    assert values.pop("task") == task
    return build(task_module(task).Config, values)


def test_defaults_in_yaml_and_in_python_are_the_same():
    assert train_config(compose_values("train")) == TrainConfig()


@pytest.mark.parametrize("group,name", CHOICES, ids=lambda value: value)
def test_every_choice_of_training_composes(group, name):
    config = train_config(composed(f"{group}={name}"))
    assert build(TrainConfig, to_dict(config)) == config


@pytest.mark.parametrize("group,name", [c for c in CHOICES if c[0] in ("data", "loss", "tracking")])
def test_choices_repeat_the_defaults_of_everything_they_do_not_choose(group, name):
    chosen, usual = (flatten(to_dict(config)) for config in (train_config(composed(f"{group}={name}")), TrainConfig()))
    different = {path for path in usual if chosen[path] != usual[path]}
    assert different <= {f"{group}.{field}" for field in ("name", "source", "path")}


def test_every_option_stands_in_some_file_of_its_group():
    written = {path for group, name in CHOICES for path in flatten(composed(f"{group}={name}"))}
    options = describe(TrainConfig, parts={"drafter": drafter_class("eagle3").Config})
    assert {option.path for option in options} - written == set()


@pytest.mark.parametrize("task", choices("task"))
def test_every_task_composes_to_its_defaults(task):
    assert compose_task(task) == task_module(task).Config()


PUBLISHED = {"eagle1": ("static", 26, 5), "eagle2": ("dynamic", 60, 6), "medusa": ("static", 64, 4)}
"""Trees from papers: the plan each is a case of, its nodes with the root, and its depth."""


@pytest.mark.parametrize("name", [name for name in choices("tree") if name != "calibrated"])
def test_every_tree_composes_and_can_be_planned(name):
    config = compose_task("bench", f"tree={name}")
    plan = make_plan(config.tree)
    assert (plan.name, plan.n_nodes, plan.depth) == PUBLISHED.get(name, (name, plan.n_nodes, plan.depth))


def test_the_default_tree_is_the_default_plan():
    assert compose_task("bench").tree == PlanConfig()


@pytest.mark.parametrize("name", choices("verify"))
def test_every_verifier_composes(name):
    assert compose_task("bench", f"verify={name}").verifier == name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(config_dir())))
def test_every_file_begins_with_its_purpose(path: Path):
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "@package" not in line]
    assert lines[0].startswith("# ")
    assert len(lines[0]) > 20
    if path.parent.name in ("experiment", "debug", "task"):
        assert [line.split(":")[0] for line in lines[1:4]] == ["# Command", "# Hardware", "# Expected"]
