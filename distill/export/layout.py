"""Layouts of other programs: which tensors they have, as data, and the check that a folder has exactly those.

A loader that skips what it does not know turns a renamed tensor or a missing flag into low acceptance, not into an
error. So every name and every shape is checked here, when a layout is written and when it is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distill.errors import UserError

Sizes = Mapping[str, int]
"""Shape letters -> numbers: D hidden, A and K width of queries and keys, I feed-forward, T taps, V, W vocabularies."""


@dataclass(frozen=True)
class Key:
    """One row of a table: a tensor here, there, and its shape in letters (``("A", "2*D")``).

    ``{i}`` and ``{j}`` in the names run over ``over``, letters of ``Sizes`` each. ``when`` names a flag of the drafter
    without which the tensor is not there. ``dtype`` is checked where it is given.
    """

    ours: str
    theirs: str
    shape: tuple[str, ...]
    over: tuple[str, ...] = ()
    when: str = ""
    dtype: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True)
class Native:
    """What a native export holds, without the target: see ``format.py`` for the fields."""

    drafter: str
    flags: dict[str, Any]
    target: dict[str, Any]
    taps: tuple[int, ...]
    tensors: dict[str, Tensor]

    def sizes(self) -> dict[str, int]:
        """Letters of ``Sizes`` for this drafter."""
        return sizes_of(self.target, self.flags, taps=len(self.taps))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return next(x.dtype for x in self.tensors.values() if x.is_floating_point())


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """Another program's folder: the content of ``config.json``, the tensors, and the name of the file they lie in."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: str = "model.safetensors"
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Further JSON files, name -> content."""


def sizes_of(target: Mapping[str, Any], flags: Mapping[str, Any], *, taps: int = 0) -> dict[str, int]:
    """Letters of ``Sizes`` for a target and a drafter's flags."""
    sizes = {
        "D": target["hidden_size"],
        "A": target["n_heads"] * target["head_dim"],
        "K": target["n_kv_heads"] * target["head_dim"],
        "I": flags.get("intermediate_size") or target["intermediate_size"],
        "T": taps,
        "V": target["vocab_size"],
        "W": flags.get("draft_vocab_size") or target["vocab_size"],
    }
    counts = {"heads": flags.get("heads"), "blocks": flags.get("blocks"), "layers": flags.get("num_layers")}
    return sizes | {name: count for name, count in counts.items() if count is not None}


def expand(table: Sequence[Key], sizes: Sizes, flags: Mapping[str, Any]) -> Iterator[tuple[Key, str, str]]:
    """(row, our name, their name) of every tensor that must be there."""
    for row in table:
        if row.when and not flags.get(row.when):
            continue
        places: list[dict[str, int]] = [{}]
        for letter, size in zip("ij", row.over, strict=False):
            places = [{**place, letter: n} for place in places for n in range(sizes[size])]
        for place in places:
            yield row, row.ours.format(**place), row.theirs.format(**place)


def shape_of(row: Key, sizes: Sizes) -> tuple[int, ...]:
    """The row's shape in numbers."""
    return tuple(_product(term, sizes) for term in row.shape)


def _product(term: str, sizes: Sizes) -> int:
    result = 1
    for factor in term.split("*"):
        result *= int(factor) if factor.isdigit() else sizes[factor]
    return result


def to_theirs(table: Sequence[Key], native: Native, *, left_out: Sequence[str] = ()) -> dict[str, Tensor]:
    """Rename a native export's tensors.

    Args:
        table: of the layout.
        native: what is exported.
        left_out: tensors of ours that the layout has no place for, by name.
    """
    names = {ours: theirs for _, ours, theirs in expand(table, native.sizes(), native.flags)}
    check(table, native.sizes(), native.flags, {names.get(k, k): v for k, v in native.tensors.items()}, left_out)
    return {names[name]: tensor for name, tensor in native.tensors.items() if name not in left_out}


def to_ours(
    table: Sequence[Key], sizes: Sizes, flags: Mapping[str, Any], tensors: Mapping[str, Tensor], *, where: str
) -> dict[str, Tensor]:
    """Rename a layout's tensors, all of which must be in the table.

    Raises:
        UserError: one is missing, unexpected or of another shape.
    """
    check(table, sizes, flags, tensors, where=where)
    return {ours: tensors[theirs] for _, ours, theirs in expand(table, sizes, flags)}


def check(
    table: Sequence[Key],
    sizes: Sizes,
    flags: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    left_out: Sequence[str] = (),
    *,
    where: str = "the export",
) -> None:
    """Hold tensors against a table.

    Raises:
        UserError: names, shapes or types differ; says which.
    """
    rows = {theirs: row for row, _, theirs in expand(table, sizes, flags)}
    missing, unexpected = sorted(set(rows) - set(tensors)), sorted(set(tensors) - set(rows) - set(left_out))
    if missing or unexpected:
        parts = [f"{word} {_some(names)}" for word, names in (("without", missing), ("with", unexpected)) if names]
        raise UserError(f"{where} must hold exactly the tensors of its layout, got it {' and '.join(parts)}")
    for name, row in rows.items():
        want, tensor = shape_of(row, sizes), tensors[name]
        if tuple(tensor.shape) != want:
            raise UserError(
                f"{where}: {name} must have shape {list(want)} for this target, got {list(tensor.shape)}; its config "
                "or its target is another one"
            )
        if row.dtype is not None and tensor.dtype != row.dtype:
            raise UserError(f"{where}: {name} must be {row.dtype}, got {tensor.dtype}")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"
