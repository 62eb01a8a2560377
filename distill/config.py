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

from distill.errors import UserError, did_you_mean

T = TypeVar("T")

WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    dict: "a group",
}


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
def build(cls: type[T], mapping: Any, *, path: str = "", parts: Mapping[str, type] | None = None) -> T:
    """Convert a mapping to the dataclass ``cls``, refusing everything that does not fit.

    Args:
        cls: a dataclass; nested dataclasses, Optional, Literal, list, tuple and dict fields are converted too.
        mapping: plain values (see ``plain``), or an instance of ``cls``, which is returned as it is.
        path: dotted prefix for messages.
        parts: see ``describe``; only widens the search for the option that was meant.

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
            raise UserError(_unknown(cls, str(key), path, parts))
    values = {}
    for name, field in fields.items():
        if name in mapping:
            value = _over(default_of(field), mapping[name])
            values[name] = convert(hints[name], value, path=_join(path, name))
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{_join(path, name)} must be given ({field.metadata.get('help', WORDS[str])})")
    return cls(**values)


def _over(usual: Any, value: Any) -> Any:
    """Lay a mapping over the config instance that is the field's default: what it leaves out stays as it is there."""
    if not (dataclasses.is_dataclass(usual) and isinstance(value, Mapping)):
        return value
    return {
        **{name: getattr(usual, name) for name in _field_names(type(usual))},
        **{key: _over(getattr(usual, str(key), None), item) for key, item in value.items()},
    }


def default_of(field: dataclasses.Field) -> Any:
    """The default of a field; None if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


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
        convert(item_hint, item, path=f"{path}[{i}]")
        for i, (item_hint, item) in enumerate(zip(inner, value, strict=True))
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
    several = isinstance(value, list) or (isinstance(value, str) and "," in value)
    fix = "; several values to try in turn need -m" if several else ""
    return UserError(f"{path} must be {type_text(hint)}, got {got}{fix}")


def _unknown(cls: type, key: str, path: str, parts: Mapping[str, type] | None) -> str:
    """The sentence for a key that ``cls`` does not have: nearest option here, else deeper down, else the list."""
    here = {name: name for name in _field_names(cls)}
    deeper = {option.path.rpartition(".")[2]: option.path for option in describe(cls, parts=parts)}
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


def flatten(values: Mapping[str, Any], *, path: str = "") -> dict[str, Any]:
    """Return nested values under their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = _join(path, str(key))
        flat |= flatten(value, path=name) if isinstance(value, Mapping) else {name: value}
    return flat


def plain(config: Any, *, resolve: bool = True) -> Any:
    """Return a composed Hydra config (or a list in it) as plain containers, interpolations resolved.

    Raises:
        UserError: an interpolation points nowhere, or a mandatory value ``???`` was not given.
    """
    # Here and not at the top: the dataclasses above serve machines that have no Hydra, too.
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        return OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} must be given") from error
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
        inner = "groups of options" if dataclasses.is_dataclass(args[0]) else type_text(args[0])
        return f"a list of {words.get(inner, 'lists' if inner.startswith('a list') else inner)}"
    if dataclasses.is_dataclass(hint):
        return "a group of options"
    return WORDS.get(hint if origin is None else origin, getattr(hint, "__name__", str(hint)))


def describe(cls: type, *, path: str = "", parts: Mapping[str, type] | None = None, usual: Any = None) -> list[Option]:
    """List every option of a dataclass, nested ones by dotted name, in order of declaration.

    Args:
        cls: a dataclass.
        path: dotted prefix.
        parts: dataclass behind a field whose declared type is open (``drafter`` -> the chosen drafter's Config).
        usual: instance whose values are the defaults; None takes those of the class.
    """
    hints, options = typing.get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        name, hint = _join(path, field.name), (parts or {}).get(field.name, hints[field.name])
        default = default_of(field) if usual is None else getattr(usual, field.name)
        members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        nested = next((member for member in members if dataclasses.is_dataclass(member)), None)
        if nested is not None:
            below = default if isinstance(default, typing.cast(type, nested)) else None
            options += describe(typing.cast(type, nested), path=name, usual=below)
        else:
            options.append(Option(name, type_text(hint), default, field.metadata.get("help", "")))
    return options


def format_help(options: Iterable[Option], *, width: int | None = None) -> str:
    """Lay options out in aligned columns, one block per group: ``name = default``, then what it does and takes."""
    width = width or min(max(shutil.get_terminal_size().columns, 80), 120)
    indent, blocks = 30, dict[str, list[str]]()
    for option in options:
        head = f"  {option.path}={yaml_text(option.default)}"
        wrapped = textwrap.wrap(f"{option.help} ({option.type})", width - indent)
        lines = blocks.setdefault(option.path.rpartition(".")[0], [])
        lines.append(head.ljust(indent) + wrapped.pop(0) if len(head) < indent - 1 else head)
        lines += [" " * indent + line for line in wrapped]
    return "\n\n".join("\n".join([f"{name or 'general'}:", *lines]) for name, lines in blocks.items())


def yaml_text(value: Any) -> str:
    """A value as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "{" + ",".join(f"{name}:{yaml_text(item)}" for name, item in to_dict(value).items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(yaml_text(item) for item in value)}]"
    return str(value)


def config_dir() -> Path:
    """The folder of YAML configs: the checkout's ``configs/`` beside the package, else the wheel's copy."""
    checkout = Path(__file__).resolve().parent.parent / "configs"
    if (checkout / "train.yaml").is_file():
        return checkout
    return Path(str(importlib.resources.files("distill"))) / "_configs"
