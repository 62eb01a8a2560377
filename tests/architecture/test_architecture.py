"""The shape of the code base, held by tests: imports point one way, third parties stay behind their fence."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from distill.registry import DRAFTERS

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path for package in ("distill", "serve_eval", "engines", "bench") for path in (ROOT / package).rglob("*.py")
)

# A module may import from its own layer and from lower ones. The longest matching prefix decides.
LAYERS = {
    "distill": 0,  # config, types, errors, tree, cache, attention, sampling, alignment, vocab, losses, metrics
    "distill.target": 1,
    "distill.drafters": 1,
    "distill.data": 2,
    "distill.decode": 2,
    "distill.export": 3,
    "distill.train": 3,
    "engines": 4,
    "serve_eval": 5,
    "bench": 6,
}

# Records of a higher layer that a lower one names in a signature; nothing is called at import.
UPWARD = {
    (
        "distill.losses",
        "distill.target",
    ),  # total(..., target) reads the teacher's logits through the one target class
}

# Who may import what: the module prefixes that are on the inside of the fence.
FENCES = {
    "hydra": {"distill.entry"},
    "omegaconf": {"distill.entry", "distill.config"},
    "lightning": {"distill.train", "distill.data.datamodule"},
    "wandb": {"distill.train.tracking"},
    "flash_attn": {"distill.attention"},
    "peft": {"distill.target.adapter"},
    "jinja2": {
        "serve_eval.report",
        "distill.target.model",
        "distill.data.template",
    },  # the latter two: its errors
    "distill.entry": {"distill.train.main", "serve_eval.__main__", "serve_eval.demo"},
}

# Longer than 400 lines, and why.
LONG: dict[str, str] = {}


def module_name(path: Path) -> str:
    """``distill/train/run.py`` -> ``distill.train.run``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def syntax(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports(path: Path) -> set[str]:
    """Every module a file imports, at whatever depth of the code; ``from a import b`` gives ``a`` and ``a.b``."""
    names = {alias.name for node in syntax(path) if isinstance(node, ast.Import) for alias in node.names}
    for node in syntax(path):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def inside(module: str, prefixes: set[str]) -> bool:
    """Whether ``module`` is one of ``prefixes`` or below one."""
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def layer(module: str) -> int:
    """The layer of one of our modules."""
    return LAYERS[max((prefix for prefix in LAYERS if inside(module, {prefix})), key=len)]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_one_way(path):
    module = module_name(path)
    upward = {
        name
        for name in imports(path)
        if inside(name, {"distill", "engines", "serve_eval"}) and layer(name) > layer(module)
    }
    allowed = {high for low, high in UPWARD if low == module}
    assert {name for name in upward if not inside(name, allowed)} == set()


@pytest.mark.parametrize("fenced", FENCES)
def test_third_parties_stay_behind_their_fence(fenced):
    users = {module_name(path) for path in FILES if any(inside(name, {fenced}) for name in imports(path))}
    assert {user for user in users - {fenced} if not inside(user, FENCES[fenced])} == set()


def test_the_two_packages_are_all_there_is_beside_the_entry():
    text = (ROOT / "train.py").read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if line and not line.startswith('"""')]) == 3


def test_files_are_short_enough_to_read():
    lines = {module_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {module for module, count in lines.items() if count > 400} == set(LONG)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_loose_ends(path):
    text = path.read_text(encoding="utf-8")
    calls = [node.func.id for node in syntax(path) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert "print" not in calls or module_name(path) in {"serve_eval.cli"}
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    assert not re.search(r"^\s*except\s*:", text, re.MULTILINE)


def test_every_drafter_has_a_config_and_every_config_a_drafter():
    assert {path.stem for path in (ROOT / "configs" / "drafter").glob("*.yaml")} == set(DRAFTERS)


def test_no_config_names_code():
    named = [path for path in (ROOT / "configs").rglob("*.yaml") if "_target_" in path.read_text(encoding="utf-8")]
    assert named == []
