"""Append-only shards with a manifest: what was written stays, whatever interrupts the writing.

A folder holds ``shard-00000.safetensors``, ... and ``manifest.json``. A shard is written under a temporary
name, flushed to the disk and renamed; then the manifest, which alone says which shards exist, goes the same
way. Killed at any moment, the folder is the one before or after a shard: a shard the manifest does not know is
written again.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from distill.data.conversation import Conversation
from distill.errors import UserError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
EMPTY_HASH = hashlib.sha256(b"").hexdigest()


@dataclass(kw_only=True)
class Manifest:
    """What a folder holds.

    Attributes:
        target: fingerprint of the model that wrote or tokenised the conversations.
        settings: the options that decided what was written.
        origin: hash of the source's files, or the data set's name; "self" when the target wrote the prompts.
        next_index: number of the first candidate not taken yet.
        conversations, tokens, supervised_tokens, greedy: totals of what was kept.
        left_out: dropped candidates and turns, by reason.
        seconds: time spent writing.
        stopped: why writing stopped; None while it goes on.
        budget: the limits in force when it stopped.
        coverage: draft-vocabulary size -> share of supervised tokens it covers.
        data_hash: chained hash of the conversations, independent of how they lie in shards.
        shards: file, sha256 and counts of each shard.
    """

    schema_version: int = SCHEMA_VERSION
    target: dict[str, Any]
    settings: dict[str, Any]
    origin: str
    next_index: int = 0
    conversations: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    greedy: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    stopped: str | None = None
    budget: dict[str, Any] = field(default_factory=dict)
    coverage: dict[str, float] = field(default_factory=dict)
    data_hash: str = EMPTY_HASH
    shards: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one candidate.

    Attributes:
        index, key: the candidate's.
        conversation: None when it was dropped.
        greedy: answered greedily (False for sampled and for finished conversations).
        counts: one entry per reason something was left out.
    """

    index: int
    key: int
    conversation: Conversation | None
    greedy: bool = False
    counts: Counter[str] = field(default_factory=Counter)


class Store:
    """A folder of shards, appended to by one process at a time; use as a context manager.

    Args:
        folder: created when missing.
        target: fingerprint of the target.
        settings: ``DataConfig.writing_settings()``.
        origin: what the source was read from.

    Raises:
        UserError: another process has it open, it was written by another target or with other settings, a shard is
            damaged, the folder cannot be written.
    """

    def __init__(self, folder: Path, *, target: Mapping[str, Any], settings: Mapping[str, Any], origin: str):
        self.folder = folder
        with _explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take_lock()
            wanted = Manifest(target=_plain(target), settings=_plain(settings), origin=origin)
            existing = read_manifest(folder)
            if existing is not None:
                _check_same(folder, existing, wanted)
            self.manifest = existing or wanted
            self.seen = {int(key) for shard in read_shards(folder, self.manifest) for key in shard["seen"]}
        except BaseException:
            os.close(self._lock)
            raise
        for leftover in folder.glob("*.tmp"):
            leftover.unlink(missing_ok=True)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"data folder {self.folder} must be written by one process at a time, got a second one; "
                "wait for the other or use another data.folder"
            ) from error

    def append(self, outcomes: list[Outcome], *, seconds: float) -> None:
        """Add one shard with these outcomes, in order; returns when it is safely on the disk.

        Args:
            outcomes: the candidates from ``manifest.next_index`` on.
            seconds: time spent writing so far, earlier sessions included.

        Raises:
            UserError: the disk is full or not writable; the folder is as before.
        """
        assert [o.index for o in outcomes] == list(
            range(self.manifest.next_index, self.manifest.next_index + len(outcomes))
        ), "outcomes must come without gaps"
        kept = [o.conversation for o in outcomes if o.conversation is not None]
        data = save(
            {
                "ids": np.concatenate([c.ids for c in kept] or [np.empty(0, np.int32)]).astype(np.int32),
                "loss_mask": np.concatenate([c.loss_mask for c in kept] or [np.empty(0, bool)]).astype(np.uint8),
                "lengths": np.array([len(c.ids) for c in kept], dtype=np.int64),
                "keys": np.array([c.key for c in kept], dtype=np.int64),
                "seen": np.array([o.key for o in outcomes if o.key], dtype=np.int64),
            }
        )
        old = self.manifest
        name = f"shard-{len(old.shards):05d}.safetensors"
        entry = {"file": name, "sha256": hashlib.sha256(data).hexdigest(), "conversations": len(kept)}
        new = Manifest(**asdict(old))
        new.shards = [*old.shards, entry]
        new.next_index += len(outcomes)
        new.conversations += len(kept)
        new.tokens += sum(len(c.ids) for c in kept)
        new.supervised_tokens += sum(int(c.loss_mask.sum()) for c in kept)
        new.greedy += sum(o.greedy for o in outcomes)
        new.left_out = dict(sum((o.counts for o in outcomes), Counter(old.left_out)))
        new.data_hash = chain_hash(old.data_hash, kept)
        new.seconds = seconds
        new.stopped = None
        write_atomic(self.folder / name, data)
        self._write_manifest(new)

    def finish(self, *, stopped: str, budget: Mapping[str, Any], coverage: Mapping[str, float], seconds: float) -> None:
        """Record why writing stopped."""
        new = Manifest(**asdict(self.manifest))
        new.stopped, new.budget, new.coverage, new.seconds = stopped, _plain(budget), dict(coverage), seconds
        self._write_manifest(new)

    def _write_manifest(self, manifest: Manifest) -> None:
        text = json.dumps(asdict(manifest), indent=1) + "\n"
        write_atomic(self.folder / MANIFEST, text.encode())
        self.manifest = manifest


def read_manifest(folder: Path) -> Manifest | None:
    """Return a folder's manifest, None when there is none.

    Raises:
        UserError: it is damaged or of another schema version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_bytes())
        version = fields["schema_version"]
        if version != SCHEMA_VERSION:
            raise UserError(f"{path} must have schema version {SCHEMA_VERSION}, got {version}; write the data again")
        return Manifest(**fields)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} must be an intact manifest, got a damaged one; delete the folder to start over"
        ) from error


def read_shards(folder: Path, manifest: Manifest) -> Iterator[dict[str, np.ndarray]]:
    """Yield the tensors of each shard: ids, loss_mask, lengths, keys, seen.

    Raises:
        UserError: a shard is missing or damaged; names the file.
    """
    for entry in manifest.shards:
        path = folder / entry["file"]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path} must be a readable shard, got: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise UserError(
                f"{path} must be the shard the manifest describes, got a truncated or changed file; "
                "restore it or delete the folder to start over"
            )
        try:
            yield load(data)
        except SafetensorError as error:
            raise UserError(f"{path} must be a safetensors file, got a damaged one: {error}") from error


def chain_hash(previous: str, conversations: Iterable[Conversation]) -> str:
    """Extend a hash by conversations, one after the other."""
    for c in conversations:
        mask = c.loss_mask.astype(np.uint8)
        content = hashlib.sha256(c.ids.astype("<i4").tobytes() + b"|" + mask.tobytes()).hexdigest()
        previous = hashlib.sha256(f"{previous}{content}{c.key}".encode()).hexdigest()
    return previous


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that it is there completely or not at all, also after a power cut.

    Raises:
        UserError: the disk is full or not writable.
    """
    temporary = path.with_name(path.name + ".tmp")
    with _explained(path):
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(handle, view) :]
                os.fsync(handle)
            finally:
                os.close(handle)
            os.replace(temporary, path)  # noqa: PTH105 - the tests cut the power at each of these calls
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn the errors of writing into sentences."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"the disk must have room for {path}, got a full one; free some space and run again"
            ) from error
        raise UserError(f"{path} must be writable, got: {error.strerror}") from error


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As it will be read back from JSON."""
    return json.loads(json.dumps(dict(value)))


def _check_same(folder: Path, old: Manifest, new: Manifest) -> None:
    before = {**{f"target {k}": v for k, v in old.target.items()}, **old.settings, "source files": old.origin}
    after = {**{f"target {k}": v for k, v in new.target.items()}, **new.settings, "source files": new.origin}
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if names:
        listed = "; ".join(f"{name} was {before.get(name)!r}, is now {after.get(name)!r}" for name in names)
        raise UserError(
            f"data folder {folder} must have been written by the same target with the same settings, got {listed}; "
            "use another data.folder or delete this one"
        )
