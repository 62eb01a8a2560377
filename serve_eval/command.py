"""Command lines for people: how something was started, and how to start it again."""

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distill.config import yaml_text


def repeat(task: str, config: Any) -> str:
    """Return the command that does the same again: every option of ``config`` that is not at its default."""
    changed = [f"{name}={_value(value)}" for name, value in _changed(config)]
    return shlex.join(["python", "-m", "serve_eval", f"task={task}", *changed])


def typed(argv: Sequence[str]) -> str:
    """Return a command as it was typed; a module's file is shown as ``python -m``."""
    if not argv:
        return ""
    path = Path(argv[0])
    program = ["python", "-m", path.parent.name] if path.name == "__main__.py" else [path.name]
    return shlex.join([*program, *argv[1:]])


def _changed(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of the options that differ from those of ``type(config)()``."""
    usual = type(config)()
    for field in dataclasses.fields(config):
        name, value = f"{path}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            before = dict(_changed(getattr(usual, field.name), f"{name}."))
            yield from (item for item in _changed(value, f"{name}.") if item not in before.items())
        elif value != getattr(usual, field.name):
            yield name, value


def _value(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "{" + ",".join(f"{name}:{_value(item)}" for name, item in _changed(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_value(item) for item in value) + "]"
    return yaml_text(value)
