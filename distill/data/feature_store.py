"""The target's features of prepared conversations on disk: what a folder holds, and reading it.

A folder holds ``manifest.json`` and ``shard-00000.safetensors``, ..., each with consecutive conversations::

    last      [T, D]     what the head reads, the tokens of one conversation after the other
    tap_<k>   [T, D]     the hidden state entering layer k
    lengths   int64 [n]  tokens of each conversation
    content   int64 [n]  hash of each conversation's tokens

Shards are written whole and then named in the manifest, as the data's are (``store.py``). They are read through
memory maps, a conversation at a time: the store may be far larger than the memory.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from distill.data.packing import Row
from distill.data.prepared import PreparedData
from distill.data.store import read_versioned
from distill.errors import UserError
from distill.types import TargetOutput

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
OPEN_SHARDS = 256
"""Maps kept open at a time."""


@dataclass(kw_only=True)
class FeatureManifest:
    """What a folder holds.

    Attributes:
        target: fingerprint of the model.
        target_dtype: what the model computed in.
        taps: which hidden states are there beside the last one.
        dtype: what is stored.
        hidden_size: D.
        max_len: conversations were cut here.
        data_hash: of the data that were last written from.
        conversations, tokens: totals.
        shards: file, sha256, size, mtime_ns and counts of each shard.
    """

    schema_version: int = SCHEMA_VERSION
    target: dict[str, str]
    target_dtype: str
    taps: list[int]
    dtype: str
    hidden_size: int
    max_len: int
    data_hash: str
    conversations: int = 0
    tokens: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)


class FeatureStore:
    """The features of prepared data, read row by row.

    Args:
        folder: of a complete store.
        manifest: what is in it.
        taps: the hidden states to read.
        dtype: what they are handed out in, whatever they are stored in.

    Raises:
        UserError: a shard is missing or damaged.
    """

    def __init__(self, folder: Path, manifest: FeatureManifest, *, taps: Iterable[int], dtype: torch.dtype):
        self.folder, self.manifest, self.dtype = folder, manifest, dtype
        self._taps = tuple(taps)
        self._open = lru_cache(maxsize=OPEN_SHARDS)(lambda number: open_shard(folder / manifest.shards[number]["file"]))
        lengths = [read_shard(folder, entry, "lengths") for entry in manifest.shards]
        self._lengths = np.concatenate(lengths)
        self._shard = np.repeat(np.arange(len(lengths)), [len(n) for n in lengths])
        self._begin = np.concatenate([np.cumsum(n) - n for n in lengths])

    def rows(self, rows: Sequence[Row], *, pack_len: int, max_len: int) -> TargetOutput:
        """Lay out the features of packed rows as ``packing.fill`` lays out their tokens; padding is 0.

        Args:
            rows: conversations of each of the B rows.
            pack_len: tokens in a row, L.
            max_len: conversations are cut here.

        Raises:
            UserError: a shard has gone since the store was opened.
        """
        shape = (len(rows), pack_len, self.manifest.hidden_size)
        out = {name: torch.zeros(shape, dtype=self.dtype) for name in ("last", *map(tap_name, self._taps))}
        for r, row in enumerate(rows):
            place = 0
            for i in row:
                shard, begin = self._open(int(self._shard[i])), int(self._begin[i])
                length = min(int(self._lengths[i]), max_len)
                for name, x_BLD in out.items():
                    x_BLD[r, place : place + length] = shard.get_slice(name)[begin : begin + length]
                place += length
        return TargetOutput(last_BLD=out["last"], taps={k: out[tap_name(k)] for k in self._taps})


def tap_name(tap: int) -> str:
    """Name of a tap's tensor."""
    return f"tap_{tap}"


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def content_hashes(data: PreparedData, *, max_len: int, count: int) -> np.ndarray:
    """What the features of the first ``count`` conversations depend on: int64 hashes of their cut tokens."""
    ends = np.minimum(data.offsets[1 : count + 1], data.offsets[:count] + max_len)
    digests = [
        hashlib.blake2b(data.ids[begin:end].astype("<i4").tobytes(), digest_size=8).digest()
        for begin, end in zip(data.offsets[:count], ends, strict=True)
    ]
    return np.frombuffer(b"".join(digests), dtype="<i8")


def read_feature_manifest(folder: Path) -> FeatureManifest | None:
    """Return a folder's manifest, None when there is none; raises as ``read_versioned``."""
    fix = "delete the folder or use another data.features_folder"
    return read_versioned(
        folder / MANIFEST,
        FeatureManifest,
        version=SCHEMA_VERSION,
        what="the manifest of a feature store",
        fixes=(fix, fix),
    )


def verify_shards(folder: Path, manifest: FeatureManifest) -> None:
    """Check every shard; one whose size and time are still the noted ones is not hashed again.

    Raises:
        UserError: a shard is missing or damaged; names the file.
    """
    for entry in manifest.shards:
        path = folder / entry["file"]
        try:
            now = path.stat()
            same = now.st_size == entry["size"]
            if same and now.st_mtime_ns != entry["mtime_ns"]:
                with path.open("rb") as file:
                    same = hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]
        except OSError as error:
            raise UserError(f"{path} must be a readable shard, got: {error.strerror}; {DELETE}") from error
        if not same:
            raise UserError(
                f"{path} must be the shard the manifest describes, got a truncated or changed file; {DELETE}"
            )


DELETE = "restore it, or delete the folder to write the features again"


def check_same(folder: Path, there: FeatureManifest, wanted: FeatureManifest, data: PreparedData) -> None:
    """Refuse a store that does not hold the features of these data; more conversations or more taps are no fault.

    Raises:
        UserError: lists what differs.
    """
    before, after = (
        {**{f"target {part}": value for part, value in m.target.items()}, "target dtype": m.target_dtype}
        | {"hidden size": m.hidden_size, "dtype": m.dtype, "taps": m.taps}
        for m in (there, wanted)
    )
    if set(wanted.taps) <= set(there.taps):
        before.pop("taps")
    differ = [f"{name} was {before[name]!r}, is now {after.get(name)!r}" for name in before]
    differ = [text for text, name in zip(differ, before, strict=True) if before[name] != after.get(name)]
    ours = content_hashes(data, max_len=wanted.max_len, count=min(len(data), there.conversations))
    stored = [read_shard(folder, entry, "content") for entry in there.shards]
    unequal = np.flatnonzero(ours != np.concatenate([*stored, np.empty(0, np.int64)])[: len(ours)])
    if len(unequal):
        cut = "" if there.max_len == wanted.max_len else f", max_len was {there.max_len}, is now {wanted.max_len}"
        differ.append(
            f"data hash was {there.data_hash[:16]}, is now {wanted.data_hash[:16]} (conversation {unequal[0]} is the "
            f"first that differs{cut})"
        )
    if differ:
        raise UserError(
            f"feature store {folder} must have been written by the same target from the same data, got "
            f"{'; '.join(differ)}; use another data.features_folder or delete this one"
        )


def read_shard(folder: Path, entry: dict[str, Any], name: str) -> np.ndarray:
    """One small tensor of a shard."""
    return open_shard(folder / entry["file"]).get_tensor(name).numpy()


def open_shard(path: Path) -> Any:
    """Map a shard.

    Raises:
        UserError: it is not there or not a safetensors file.
    """
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} must be a readable shard of features, got: {error}; {DELETE}") from error
