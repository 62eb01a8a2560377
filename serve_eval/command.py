"""Command lines for people: how something was started, and how to start it again."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.config import flatten, to_dict


def repeat(task: str, config: Any) -> str:
    """Return the command that does the same again: every option of ``config`` that is not at its default."""
    usual = flatten(to_dict(type(config)()))
    changed = [f"{key}={_value(value)}" for key, value in flatten(to_dict(config)).items() if usual.get(key) != value]
    return shlex.join(["python", "-m", "serve_eval", f"task={task}", *changed])


def typed(argv: Sequence[str]) -> str:
    """Return a command as it was typed; a module's file is shown as ``python -m``."""
    if not argv:
        return ""
    path = Path(argv[0])
    program = ["python", "-m", path.parent.name] if path.name == "__main__.py" else [path.name]
    return shlex.join([*program, *argv[1:]])


def _value(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_value(item) for item in value) + "]"
    return json.dumps(value) if isinstance(value, bool) else str(value)
