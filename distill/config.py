"""Dataclass configs: strict conversion from mappings, help text from field metadata.

YAML holds values and choices; types, defaults and checks live in the dataclasses, which are built here once at
the edge. Nothing else in the library reads a mapping. This is the only file that imports omegaconf.
"""

import dataclasses
import difflib
import importlib.resources
import math
import shutil
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distill.errors import UserError, did_you_mean

T = TypeVar("T")

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path", dict: "a group"}


class Option(NamedTuple):
    """One line of help: dotted name, what it takes, its default (a Python value) and what it does."""

    path: str
    type: str
    default: Any
    help: str


def opt(default: Any, help: str) -> Any:
    """Declare a config field with its default and its one-line help; lists and dicts are copied per instance."""
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


# ---------------------------------------------------------------------------------------------- conversion
def build(cls: type[T], mapping: Any, *, path: str = "") -> T:
    """Convert a mapping to the dataclass ``cls``, refusing everything that does not fit.

    Args:
        cls: a dataclass; nested dataclasses, Optional, Literal, list, tuple and dict fields are converted too.
        mapping: plain values (see ``plain``), or an instance of ``cls``, which is returned as it is.
        path: dotted prefix for messages.

    Raises:
        UserError: unknown key (with the nearest name), missing value, wrong type, not a choice, NaN.
    """
    if isinstance(mapping, cls):
        return mapping
    if not isinstance(mapping, Mapping):
        raise UserError(f"{path or 'the configuration'} must be a group of options, got {mapping!r}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for key in mapping:
        if key not in fields:
            raise UserError(_unknown(cls, str(key), path))
    for name, field in fields.items():
        if name not in mapping and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{_join(path, name)} must be given ({field.metadata.get('help', WORDS[str])})")
    return cls(**{name: convert(hints[name], value, path=_join(path, name)) for name, value in mapping.items()})


def convert(hint: Any, value: Any, *, path: str) -> Any:
    """Convert one value to the type ``hint``; ``path`` names the option in the ``UserError``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, path=path)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in args):
            return value
        hint_text = did_you_mean(str(value), (str(choice) for choice in args))
        raise UserError(f"{path} must be {type_text(hint)}, got {value!r}.{hint_text}")
    if origin in (typing.Union, types.UnionType):
        return _convert_union(hint, value, path=path)
    if origin in (list, tuple):
        return _convert_sequence(hint, value, path=path)
    if dict in (hint, origin) and isinstance(value, Mapping):
        inner = args[1] if args else Any
        return {str(key): convert(inner, item, path=_join(path, str(key))) for key, item in value.items()}
    return _convert_scalar(hint, value, path=path)


def _convert_union(hint: Any, value: Any, *, path: str) -> Any:
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    if value is None and type(None) in typing.get_args(hint):
        return None
    for member in members:
        if len(members) == 1 or (dataclasses.is_dataclass(member) and isinstance(value, Mapping)):
            return convert(member, value, path=path)  # keep the inner message: it is the precise one
    exact = sorted(members, key=lambda member: not (isinstance(member, type) and type(value) is member))
    for member in exact:
        try:
            return convert(member, value, path=path)
        except UserError:
            continue
    raise _wrong(hint, value, path)


def _convert_sequence(hint: Any, value: Any, *, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, str):  # "a,b" is how a list is typed on a command line
        value = [part.strip() for part in value.split(",") if part.strip()]
    fixed = origin is tuple and args[-1] is not Ellipsis
    if not isinstance(value, list | tuple) or (fixed and len(value) != len(args)):
        raise _wrong(hint, value, path)
    inner = args if fixed else [args[0]] * len(value)
    return origin(
        convert(item_hint, item, path=f"{path}[{i}]") for i, (item_hint, item) in enumerate(zip(inner, value, strict=True))
    )


def _convert_scalar(hint: Any, value: Any, *, path: str) -> Any:
    number = value
    if hint in (int, float) and isinstance(value, str):  # YAML 1.1 reads 1e-4, without a dot, as text
        try:
            number = float(value)
        except ValueError:
            raise _wrong(hint, value, path) from None
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if hint is float and is_number:
        if math.isnan(number):
            raise UserError(f"{path} must be a number, got NaN")
        return float(number)
    if hint is int and is_number and math.isfinite(number) and float(number).is_integer():
        return int(number)
    if hint is str and is_number:  # a name made of digits
        return str(value)
    if hint is Path and isinstance(value, str | Path):
        return Path(value)
    if hint in (bool, str) and isinstance(value, hint):
        return value
    if hint not in WORDS and isinstance(hint, type) and isinstance(value, hint):
        return value
    raise _wrong(hint, value, path)


def _wrong(hint: Any, value: Any, path: str) -> UserError:
    got = "nothing (null)" if value is None else repr(value)
    fix = "; several values to try in turn need -m" if isinstance(value, list) else ""
    return UserError(f"{path} must be {type_text(hint)}, got {got}{fix}")


def _unknown(cls: type, key: str, path: str) -> str:
    """The sentence for a key that ``cls`` does not have: nearest option here, else deeper down, else the list."""
    here = {name: name for name in _field_names(cls)}
    deeper = {option.path.rpartition(".")[2]: option.path for option in describe(cls)}
    for names in (here, deeper):
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
        if near:
            return f"unknown option {_join(path, key)!r}. Did you mean {_join(path, names[near[0]])!r}?"
    where = f"{path} has" if path else "there are"
    return f"unknown option {_join(path, key)!r}; {where} {', '.join(here) or 'no options'}"


def _field_names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def to_dict(obj: Any) -> Any:
    """Return plain containers for a config instance: dicts, lists, numbers, text (paths become text)."""
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {name: to_dict(getattr(obj, name)) for name in _field_names(type(obj))}
    if isinstance(obj, Mapping):
        return {str(key): to_dict(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [to_dict(item) for item in obj]
    return str(obj) if isinstance(obj, Path) else obj


def plain(config: DictConfig) -> dict[str, Any]:
    """Return a composed Hydra config as plain containers, interpolations resolved.

    Raises:
        UserError: an interpolation points nowhere, or a mandatory value ``???`` was not given.
    """
    try:
        return typing.cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise UserError(f"the configuration cannot be resolved: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of a message that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# ---------------------------------------------------------------------------------------------------- help
def type_text(hint: Any) -> str:
    """What a type accepts, in words: "a whole number", "one of a, b", "a list of numbers or null"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(str(choice) for choice in args)}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else type_text(arg) for arg in args)
    if origin in (list, tuple):
        if origin is tuple and args[-1] is not Ellipsis:
            return f"a list of {len(args)} ({', '.join(type_text(arg) for arg in args)})"
        words = {"a whole number": "whole numbers", "a number": "numbers", "text": "texts"}
        inner = type_text(args[0])
        return f"a list of {words.get(inner, 'lists' if inner.startswith('a list') else inner)}"
    if dataclasses.is_dataclass(hint):
        return "a group of options"
    return WORDS.get(hint if origin is None else origin, getattr(hint, "__name__", str(hint)))


def describe(cls: type, *, path: str = "", parts: Mapping[str, type] | None = None) -> list[Option]:
    """List every option of a dataclass, nested ones by dotted name, in order of declaration.

    Args:
        cls: a dataclass.
        path: dotted prefix.
        parts: dataclass behind a field whose declared type is open (``drafter`` -> the chosen drafter's Config).
    """
    hints, options = typing.get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        name, hint = _join(path, field.name), (parts or {}).get(field.name, hints[field.name])
        nested = next((a for a in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(a)), None)
        if nested is not None:
            options += describe(typing.cast(type, nested), path=name)
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = None if default is dataclasses.MISSING else default
        options.append(Option(name, type_text(hint), default, field.metadata.get("help", "")))
    return options


def format_help(options: Iterable[Option], *, width: int | None = None) -> str:
    """Lay options out in aligned columns, one block per group: ``name = default``, then what it does and takes."""
    width = width or min(max(shutil.get_terminal_size().columns, 80), 120)
    indent, blocks = 30, dict[str, list[str]]()
    for option in options:
        head = f"  {option.path}={yaml_text(option.default)}"
        wrapped = textwrap.wrap(f"{option.help.rstrip('.')} ({option.type})", width - indent)
        lines = blocks.setdefault(option.path.rpartition(".")[0], [])
        lines.append(head.ljust(indent) + wrapped.pop(0) if len(head) < indent - 1 else head)
        lines += [" " * indent + line for line in wrapped]
    return "\n\n".join("\n".join([f"{name or 'general'}:", *lines]) for name, lines in blocks.items())


def yaml_text(value: Any) -> str:
    """A value as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(yaml_text(item) for item in value)}]"
    return str(value)


def config_dir() -> Path:
    """The folder of YAML configs: the checkout's ``configs/`` beside the package, else the wheel's copy."""
    checkout = Path(__file__).resolve().parent.parent / "configs"
    if (checkout / "train.yaml").is_file():
        return checkout
    return Path(str(importlib.resources.files("distill"))) / "_configs"
