"""Append-only shards with a manifest: what was written stays, whatever interrupts the writing.

A folder holds ``shard-00000.safetensors``, ... and ``manifest.json``. A shard is written under a temporary
name, flushed to the disk and renamed; then the manifest, which alone says which shards exist, goes the same
way. Killed at any moment, the folder is the one before or after a shard: a shard the manifest does not know is
written again.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from distill.data.conversation import Conversation
from distill.errors import UserError
from distill.files import Lock, write_atomic

R = TypeVar("R")
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
        part: which candidates belong here, see ``Part``; None for all.
        next_index: how many candidates were taken: the number of the next one, where all belong here.
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
    part: dict[str, int] | None = None
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
class Part:
    """Which candidates a folder is for: every ``of``-th, beginning with the ``number``-th after the first ``base``.

    Attributes:
        number: 1 to ``of``.
        of: how many parts there are.
        base: candidates that were taken before there were parts.
    """

    number: int = 1
    of: int = 1
    base: int = 0

    def numbers(self, taken: int) -> range:
        """Candidates that belong here behind the first ``taken`` of them."""
        return range(self.base + self.number - 1 + taken * self.of, sys.maxsize, self.of)

    @property
    def name(self) -> str:
        """The folder's, beside the other parts."""
        return f"part-{self.number}-of-{self.of}"


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
        part: which candidates belong here; None for all.

    Raises:
        UserError: another process has it open, it was written by another target or with other settings, a shard is
            damaged, the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        target: Mapping[str, Any],
        settings: Mapping[str, Any],
        origin: str,
        part: Part | None = None,
    ):
        self.folder = folder
        self._part = part or Part()
        self._lock = Lock(folder / ".lock", what=f"data folder {folder}", instead="use another data.folder")
        try:
            wanted = Manifest(target=_plain(target), settings=_plain(settings), origin=origin)
            wanted.part = None if part is None else asdict(part)
            existing = read_manifest(folder)
            if existing is not None:
                check_same(folder, existing, wanted)
            self.manifest = existing or wanted
            self.seen = {int(key) for shard in read_shards(folder, self.manifest) for key in shard["seen"]}
        except BaseException:
            self._lock.release()
            raise
        for leftover in folder.glob("*.tmp"):
            leftover.unlink(missing_ok=True)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def numbers(self) -> range:
        """Candidates that belong here and were not taken yet."""
        return self._part.numbers(self.manifest.next_index)

    def append(self, outcomes: list[Outcome], *, seconds: float) -> None:
        """Add one shard with these outcomes, in order; returns when it is safely on the disk.

        Args:
            outcomes: of the first of ``numbers``.
            seconds: time spent writing so far, earlier sessions included.

        Raises:
            UserError: the disk is full or not writable; the folder is as before.
        """
        assert [o.index for o in outcomes] == list(self.numbers[: len(outcomes)]), "outcomes must come without gaps"
        kept = [o.conversation for o in outcomes if o.conversation is not None]
        data = save(
            {
                "ids": np.concatenate([c.ids for c in kept] or [np.empty(0, np.int32)]).astype(np.int32),
                "loss_mask": np.concatenate([c.loss_mask for c in kept] or [np.empty(0, bool)]).astype(np.uint8),
                "lengths": np.array([len(c.ids) for c in kept], dtype=np.int64),
                "keys": np.array([c.key for c in kept], dtype=np.int64),
                "seen": np.array([o.key for o in outcomes if o.key], dtype=np.int64),
                "outcomes": _packed(outcomes),
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


def read_versioned(
    path: Path, record: Callable[..., R], *, version: int, what: str, fixes: tuple[str, str]
) -> R | None:
    """Read a JSON file of one schema version into a record; None when there is none.

    Args:
        path: the file.
        record: made of its fields.
        version: what ``schema_version`` must be.
        what: what the file is, for a damaged one.
        fixes: what to do about another version, and about a damaged file.

    Raises:
        UserError: it is damaged or of another schema version.
    """
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_bytes())
        if (found := fields["schema_version"]) != version:
            raise UserError(f"{path} must have schema version {version}, got {found}; {fixes[0]}")
        return record(**fields)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} must be {what}, got another or a damaged file; {fixes[1]}") from error


def read_manifest(folder: Path) -> Manifest | None:
    """Return a folder's manifest, None when there is none; raises as ``read_versioned``."""
    fixes = ("write the data again", "delete the folder to start over")
    return read_versioned(folder / MANIFEST, Manifest, version=SCHEMA_VERSION, what="an intact manifest", fixes=fixes)


def read_shards(folder: Path, manifest: Manifest) -> Iterator[dict[str, np.ndarray]]:
    """Yield the tensors of each shard: ids, loss_mask, lengths, keys, seen, outcomes.

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


def shard_conversations(shard: Mapping[str, np.ndarray]) -> Iterator[Conversation]:
    """The conversations of a shard, in order."""
    ends = np.cumsum(shard["lengths"])
    for begin, end, key in zip(ends - shard["lengths"], ends, shard["keys"], strict=True):
        ids, mask = shard["ids"][begin:end], shard["loss_mask"][begin:end].astype(bool)
        yield Conversation(ids=ids, loss_mask=mask, key=int(key))


def read_outcomes(folder: Path, manifest: Manifest) -> Iterator[Outcome]:
    """Yield what ``Store.append`` was given, in order.

    Raises:
        UserError: a shard is missing, damaged, or from before outcomes were kept.
    """
    numbers = iter(Part(**manifest.part or {}).numbers(0))
    for entry, shard in zip(manifest.shards, read_shards(folder, manifest), strict=True):
        if "outcomes" not in shard:
            raise UserError(f"{folder / entry['file']} must say what became of every candidate, got an old shard")
        conversations = shard_conversations(shard)
        for key, kept, greedy, counts in json.loads(shard["outcomes"].tobytes()):
            conversation = next(conversations) if kept else None
            yield Outcome(
                index=next(numbers), key=key, conversation=conversation, greedy=bool(greedy), counts=Counter(counts)
            )


def _packed(outcomes: Iterable[Outcome]) -> np.ndarray:
    """What became of each candidate, as JSON in bytes: key, kept, greedy, counts."""
    rows = [(o.key, int(o.conversation is not None), int(o.greedy), dict(o.counts)) for o in outcomes]
    return np.frombuffer(json.dumps(rows, separators=(",", ":")).encode(), dtype=np.uint8)


def chain_hash(previous: str, conversations: Iterable[Conversation]) -> str:
    """Extend a hash by conversations, one after the other."""
    for c in conversations:
        mask = c.loss_mask.astype(np.uint8)
        content = hashlib.sha256(c.ids.astype("<i4").tobytes() + b"|" + mask.tobytes()).hexdigest()
        previous = hashlib.sha256(f"{previous}{content}{c.key}".encode()).hexdigest()
    return previous


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As it will be read back from JSON."""
    return json.loads(json.dumps(dict(value)))


def check_same(folder: Path, old: Manifest, new: Manifest) -> None:
    """Refuse a folder of another target, other settings, other files or another part.

    Raises:
        UserError: lists what differs.
    """
    before = {**{f"target {k}": v for k, v in old.target.items()}, **old.settings, "source files": old.origin}
    after = {**{f"target {k}": v for k, v in new.target.items()}, **new.settings, "source files": new.origin}
    before["part"], after["part"] = old.part, new.part
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if names:
        listed = "; ".join(f"{name} was {before.get(name)!r}, is now {after.get(name)!r}" for name in names)
        raise UserError(
            f"data folder {folder} must have been written by the same target with the same settings, got {listed}; "
            "use another data.folder or delete this one"
        )
