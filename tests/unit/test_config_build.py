"""Strict conversion: what is accepted, and the one sentence for everything else."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from distill.config import Option, build, describe, format_help, opt, plain, to_dict
from distill.errors import UserError


@dataclass(kw_only=True)
class Optim:
    lr: float = opt(1e-3, "peak learning rate")
    betas: tuple[float, float] = opt((0.9, 0.99), "betas")
    clip: float | None = opt(None, "largest gradient norm")


@dataclass(kw_only=True)
class Root:
    name: str = opt("x", "a name")
    steps: int = opt(10, "how many")
    fast: bool = opt(False, "hurry")
    kind: Literal["chain", "static", 3] = opt("chain", "which kind")
    sets: list[str] = opt([], "names")
    paths: list[list[int]] = opt([], "paths")
    where: Path | None = opt(None, "a folder")
    either: str | list[str] = opt("a", "one or several")
    extra: dict[str, float] = opt({}, "weights")
    optim: Optim = field(default_factory=Optim)
    open_part: Any = opt(None, "decided elsewhere")


@dataclass(kw_only=True)
class Needs:
    path: str = field(metadata={"help": "the file"})


@pytest.mark.parametrize(
    "values,expected",
    [
        ({"optim": {"lr": 1}}, Root(optim=Optim(lr=1.0))),
        ({"optim": {"lr": "1e-4"}}, Root(optim=Optim(lr=1e-4))),  # YAML 1.1 reads 1e-4 as text
        ({"optim": {"betas": [0, "0.5"], "clip": None}}, Root(optim=Optim(betas=(0.0, 0.5)))),
        ({"steps": 1e3}, Root(steps=1000)),
        ({"steps": "2e2"}, Root(steps=200)),
        ({"name": 7}, Root(name="7")),
        ({"kind": 3}, Root(kind=3)),
        ({"sets": "a, b"}, Root(sets=["a", "b"])),
        ({"paths": [[0], [0, 1]]}, Root(paths=[[0], [0, 1]])),
        ({"where": "a/b"}, Root(where=Path("a/b"))),
        ({"either": ["a", "b"]}, Root(either=["a", "b"])),
        ({"either": "a"}, Root(either="a")),
        ({"extra": {"a": 1}}, Root(extra={"a": 1.0})),
        ({"optim": Optim(lr=2.0), "open_part": object}, Root(optim=Optim(lr=2.0), open_part=object)),
    ],
)
def test_accepts(values, expected):
    built = build(Root, values)
    assert built == expected
    assert repr(built) == repr(expected)  # 1 == 1.0 == True would hide a wrong type


@pytest.mark.parametrize(
    "values,sentence",
    [
        ({"stps": 1}, "unknown option 'stps'. Did you mean 'steps'?"),
        ({"lr": 1}, "unknown option 'lr'. Did you mean 'optim.lr'?"),
        ({"optim": {"bettas": 1}}, "unknown option 'optim.bettas'. Did you mean 'optim.betas'?"),
        ({"optim": {"zzzz": 1}}, "unknown option 'optim.zzzz'; optim has lr, betas, clip"),
        ({"zzzz": 1}, "unknown option 'zzzz'; there are name, steps, "),
        ({"optim": {"lr": "fast"}}, "optim.lr must be a number, got 'fast'"),
        ({"optim": {"lr": True}}, "optim.lr must be a number, got True"),
        ({"optim": {"lr": math.nan}}, "optim.lr must be a number, got NaN"),
        ({"optim": {"lr": "nan"}}, "optim.lr must be a number, got NaN"),
        ({"optim": {"lr": None}}, "optim.lr must be a number, got nothing (null)"),
        (
            {"optim": {"lr": [1, 2]}},
            "optim.lr must be a number, got [1, 2]; several values to try in turn need -m",
        ),
        ({"optim": {"betas": [0.9]}}, "optim.betas must be a list of 2 (a number, a number), got [0.9]"),
        ({"optim": 3}, "optim must be a group of options, got 3"),
        ({"steps": True}, "steps must be a whole number, got True"),
        ({"steps": 1.5}, "steps must be a whole number, got 1.5"),
        ({"steps": math.inf}, "steps must be a whole number, got inf"),
        ({"fast": 1}, "fast must be true or false, got 1"),
        ({"name": True}, "name must be text, got True"),
        ({"kind": "chian"}, "kind must be one of chain, static, 3, got 'chian'. Did you mean 'chain'?"),
        ({"kind": 3.0}, "kind must be one of chain, static, 3, got 3.0"),
        ({"paths": [[0], 1]}, "paths[1] must be a list of whole numbers, got 1"),
        ({"paths": [["a"]]}, "paths[0][0] must be a whole number, got 'a'"),
        ({"extra": {"a": "b"}}, "extra.a must be a number, got 'b'"),
        ({"either": True}, "either must be text or a list of texts, got True"),
    ],
)
def test_refuses_in_one_sentence(values, sentence):
    with pytest.raises(UserError) as caught:
        build(Root, values)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_field_without_default_must_be_given():
    with pytest.raises(UserError, match=r"data\.path must be given \(the file\)"):
        build(Needs, {}, path="data")
    assert build(Needs, {"path": "x"}).path == "x"


def test_default_lists_are_not_shared():
    build(Root, {}).sets.append("mine")
    assert build(Root, {}).sets == []


@dataclass(kw_only=True)
class Wide:
    optim: Optim = field(default_factory=lambda: Optim(lr=5.0, clip=1.0))
    several: list[Optim] = opt([], "groups")


def test_a_group_that_is_partly_given_keeps_the_rest_of_its_default():
    assert build(Wide, {"optim": {"lr": 2}}).optim == Optim(lr=2.0, clip=1.0)
    assert build(Wide, {"several": [{"lr": 2}]}).several == [Optim(lr=2.0)]
    with pytest.raises(UserError, match=r"unknown option 'optim.bettas'"):
        build(Wide, {"optim": {"bettas": 2}})
    assert Option("optim.lr", "a number", 5.0, "peak learning rate") in describe(Wide)
    assert Option("several", "a list of groups of options", [], "groups") in describe(Wide)


def test_to_dict_and_build_are_inverse():
    config = build(Root, {"where": "a/b", "sets": ["a"], "optim": {"betas": [0.1, 0.2]}})
    values = to_dict(config)
    assert values["optim"] == {"lr": 1e-3, "betas": [0.1, 0.2], "clip": None}
    assert values["where"] == "a/b"
    assert build(Root, values) == config


def test_plain_resolves_and_refuses():
    from omegaconf import OmegaConf

    assert plain(OmegaConf.create({"a": 1, "b": "${a}"})) == {"a": 1, "b": 1}
    with pytest.raises(UserError, match=r"cannot be resolved.*nope"):
        plain(OmegaConf.create({"b": "${nope}"}))
    with pytest.raises(UserError, match=r"^data\.path must be given$"):
        plain(OmegaConf.create({"data": {"path": "???"}}))


def test_describe_lists_every_option_with_type_default_and_help():
    options = describe(Root)
    assert Option("optim.lr", "a number", 1e-3, "peak learning rate") in options
    assert Option("optim.clip", "a number or null", None, "largest gradient norm") in options
    assert Option("kind", "one of chain, static, 3", "chain", "which kind") in options
    assert [option.path for option in describe(Root, parts={"open_part": Needs})][-1] == "open_part.path"


def test_help_is_aligned_and_within_the_width():
    text = format_help(describe(Root), width=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.index("peak") for line in lines if "peak" in line} == {30}
    assert all(option.path + "=" in text and option.help.split()[0] in text for option in describe(Root))
    assert lines[0] == "general:"
    assert "optim:" in lines
