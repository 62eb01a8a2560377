"""Dataclass configs: strict conversion from mappings, help text from field metadata."""

import dataclasses
from typing import Any


def opt(default: Any, help: str) -> Any:
    """Declare a config field with its default and its one-line help; lists and dicts are copied per instance."""
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})
