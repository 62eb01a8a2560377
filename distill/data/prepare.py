"""Preparing data: from a source to shards, and from shards to what training reads."""

import functools
import math
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from distill.data.config import DataConfig
from distill.data.conversation import Conversation, check_ids, keyed_hash
from distill.data.records import Record, read_records
from distill.data.sources import Candidate, Streams, file_candidates, self_candidates
from distill.data.store import Manifest, Store, chain_hash, read_manifest, read_shards
from distill.data.template import ChatTemplate
from distill.data.writer import Budget, Outcome, answered_outcomes, finished_outcomes
from distill.decode import Decoder
from distill.errors import UserError
from distill.target import Target

Split = Literal["train", "val"]

COVERAGE_SIZES = (1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far writing is.

    Attributes:
        done: conversations kept.
        total: conversations wanted; None when another limit decides.
        tokens: supervised tokens kept.
        seconds: time spent writing, earlier sessions included.
        tokens_per_s: supervised tokens per second, this session.
        seconds_left: estimate; None while nothing is known.
    """

    done: int
    total: int | None
    tokens: int
    seconds: float
    tokens_per_s: float
    seconds_left: float | None


OnProgress = Callable[[Progress], None]


def stderr_progress(every_s: float = 10.0) -> OnProgress:
    """Return a callback that prints a line to stderr at most every ``every_s`` seconds."""
    last = -math.inf

    def report(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last < every_s:
            return
        last = time.monotonic()
        of = "" if progress.total is None else f"/{progress.total}"
        left = "" if progress.seconds_left is None else f", {_clock(progress.seconds_left)} left"
        sys.stderr.write(
            f"data: {progress.done}{of} conversations, {progress.tokens} tokens, "
            f"{progress.tokens_per_s:.0f} tokens/s{left}\n"
        )
        sys.stderr.flush()

    return report


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Conversations in memory: flat arrays, and which conversation is for what.

    Attributes:
        ids: int32 [total tokens].
        loss_mask: bool [total tokens].
        offsets: int64 [n + 1], where each conversation begins.
        keys: int64 [n].
        is_val: bool [n].
        vocab_size: V of the target.
        data_hash: of these conversations, in this order.
        stats: counts for logs and reports.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    keys: np.ndarray
    is_val: np.ndarray
    vocab_size: int
    data_hash: str
    stats: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_conversations(
        cls,
        conversations: Sequence[Conversation],
        *,
        vocab_size: int,
        validation: float = 0.05,
        seed: int = 0,
    ) -> "PreparedData":
        """Build from conversations in memory, as the shards would be read.

        Raises:
            UserError: no conversations, or ids outside the vocabulary.
        """
        if not conversations:
            raise UserError("training data must have at least one conversation, got none")
        lengths = [len(c.ids) for c in conversations]
        ids = np.concatenate([c.ids for c in conversations]).astype(np.int32)
        check_ids([int(ids.min()), int(ids.max())], vocab_size, "training data")
        keys = np.array([c.key for c in conversations], dtype=np.int64)
        data = cls(
            ids=ids,
            loss_mask=np.concatenate([c.loss_mask for c in conversations]).astype(bool),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            keys=keys,
            is_val=split_of(keys, validation=validation, seed=seed),
            vocab_size=vocab_size,
            data_hash=chain_hash(Manifest(target={}, settings={}, origin="").data_hash, list(conversations)),
        )
        data.stats.update(_stats(data))
        return data

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, i: int) -> Conversation:
        where = slice(self.offsets[i], self.offsets[i + 1])
        return Conversation(ids=self.ids[where], loss_mask=self.loss_mask[where], key=int(self.keys[i]))

    def indices(self, split: Split) -> np.ndarray:
        """Numbers of the conversations of a split, ascending."""
        return np.flatnonzero(self.is_val == (split == "val"))

    def conversations(self, split: Split) -> list[Conversation]:
        """The conversations of a split (views of the flat arrays)."""
        return [self[i] for i in self.indices(split)]

    @property
    def n_train(self) -> int:
        """Conversations to train on."""
        return int((~self.is_val).sum())

    @property
    def n_val(self) -> int:
        """Conversations held out."""
        return int(self.is_val.sum())

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each conversation, int64 [n]."""
        return np.diff(self.offsets)

    def counts(self, split: Split = "train") -> np.ndarray:
        """How often each vocabulary id is supervised, int64 [V]: what a draft vocabulary is chosen by."""
        in_split = np.repeat(self.is_val == (split == "val"), self.lengths)
        return np.bincount(self.ids[in_split & self.loss_mask], minlength=self.vocab_size)


def split_of(keys: np.ndarray, *, validation: float, seed: int) -> np.ndarray:
    """Which conversations are held out: bool [n].

    Each is decided by a hash of its own content alone, so it stays where it is when data are added. Of two or more
    conversations at least one is held out (the one with the smallest hash) unless ``validation`` is 0, and at least
    one is not.
    """
    shares = np.array([keyed_hash("split", seed, int(key)) for key in keys], dtype=np.float64) / 2.0**63
    is_val = shares < validation
    if len(keys) > 1 and validation > 0 and not is_val.any():
        is_val[shares.argmin()] = True
    if len(keys) > 0 and is_val.all():
        is_val[shares.argmax()] = False
    return is_val


def coverage(counts_V: np.ndarray) -> dict[str, float]:
    """Share of the counted tokens that the most frequent ids cover, by draft-vocabulary size."""
    total = max(1, int(counts_V.sum()))
    cumulated = np.cumsum(np.sort(counts_V)[::-1])
    return {str(size): round(float(cumulated[size - 1]) / total, 6) for size in COVERAGE_SIZES if size <= len(counts_V)}


def _stats(data: PreparedData) -> dict[str, Any]:
    counts = data.counts("train")
    return {
        "conversations": len(data),
        "n_train": data.n_train,
        "n_val": data.n_val,
        "tokens": len(data.ids),
        "supervised_tokens": int(data.loss_mask.sum()),
        "distinct_tokens": int((counts > 0).sum()),
        "longest": int(data.lengths.max()),
        "coverage": coverage(counts),
    }


def load_prepared(folder: Path | str, config: DataConfig, *, vocab_size: int) -> PreparedData:
    """Read a prepared folder; ``config`` gives the split and how many conversations to take.

    Raises:
        UserError: nothing is there, or something is damaged.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"data folder {folder} must hold prepared data, got no manifest; run training to write them")
    conversations: list[Conversation] = []
    for shard in read_shards(folder, manifest):
        ends = np.cumsum(shard["lengths"])
        for begin, end, key in zip(ends - shard["lengths"], ends, shard["keys"], strict=True):
            ids, mask = shard["ids"][begin:end], shard["loss_mask"][begin:end].astype(bool)
            conversations.append(Conversation(ids=ids, loss_mask=mask, key=int(key)))
    if not conversations:
        raise UserError(f"data folder {folder} must hold at least one conversation, got none: {manifest.left_out}")
    data = PreparedData.from_conversations(
        conversations[: config.limit], vocab_size=vocab_size, validation=config.validation, seed=config.seed
    )
    data.stats["left_out"] = manifest.left_out
    return data


def prepare(
    config: DataConfig,
    target: Target,
    folder: Path | str,
    progress: OnProgress | None = None,
    *,
    make_decoder: Callable[..., Streams] = Decoder,
    clock: Callable[[], float] = time.monotonic,
) -> PreparedData:
    """Write what is missing in a folder of shards, then read it.

    Args:
        config: what to write.
        target: writes and tokenises.
        folder: of the shards; an interrupted run goes on where it was.
        progress: called after every conversation; None prints to stderr.
        make_decoder: called with the target and ``sampling``.
        clock: seconds, monotonic.

    Raises:
        UserError: unusable source, target without a chat template, folder of another target or other settings,
            damaged shard, full disk.
    """
    folder = Path(folder)
    _check_context(config, target)
    if config.slots is None:
        config = replace(config, slots=32 if target.device.type == "cpu" else 256)
    records, origin = ([], "self") if config.source == "self" else read_records(config)
    template = None if config.source == "text" else ChatTemplate(target, source=config.source)
    with Store(folder, target=target.fingerprint, settings=config.writing_settings(), origin=origin) as store:
        budget = None
        if not _complete(store.manifest, config):
            budget = Budget(config, store.manifest, clock=clock)
            candidates, outcomes = _pipeline(config, target, template, records, store, budget, make_decoder)
            with closing(candidates), closing(outcomes):
                _append_all(outcomes, config, store, budget, progress or stderr_progress())
        data = load_prepared(folder, config, vocab_size=target.info.vocab_size)
        if budget is not None:
            store.finish(
                stopped=budget.stopped or "n_conversations",
                budget={name: getattr(config, name) for name in ("n_conversations", "max_tokens", "max_minutes")},
                coverage=data.stats["coverage"],
                seconds=budget.seconds,
            )
    data.stats.update(stopped=store.manifest.stopped, seconds_writing=round(store.manifest.seconds, 1))
    return data


def _check_context(config: DataConfig, target: Target) -> None:
    if config.max_len > target.info.max_positions:
        raise UserError(
            f"data.max_len must be at most the target's {target.info.max_positions} positions, got {config.max_len}"
        )


def _complete(manifest: Manifest, config: DataConfig) -> bool:
    """True when a finished folder already has what is asked for."""
    if manifest.stopped == "source_exhausted" or (config.limit and manifest.conversations >= config.limit):
        return True
    if config.max_tokens and manifest.supervised_tokens >= config.max_tokens:
        return True
    # Time is up a little before the limit, so the limit itself is compared.
    before = manifest.budget.get("max_minutes") or 0.0
    return bool(manifest.stopped == "max_minutes" and config.max_minutes and config.max_minutes <= before)


def _pipeline(
    config: DataConfig,
    target: Target,
    template: ChatTemplate | None,
    records: list[Record],
    store: Store,
    budget: Budget,
    make_decoder: Callable[..., Streams],
) -> tuple[Generator[Candidate], Generator[Outcome]]:
    """Candidates from where the store ends, and what becomes of them."""
    start, seen = store.manifest.next_index, set(store.seen)
    if config.source == "self":
        assert template is not None
        prompts = make_decoder(target, sampling=config.prompt_sampling())
        candidates = self_candidates(config, template, prompts, start=start, seen=seen)
    else:
        candidates = file_candidates(config, target, records, start=start, seen=seen)
    if config.source in ("chat", "text"):
        return candidates, finished_outcomes(candidates, budget)
    assert template is not None
    answers = make_decoder(target, sampling=config.answer_sampling())
    return candidates, answered_outcomes(candidates, config, template, answers, budget)


def _append_all(
    outcomes: Iterable[Outcome], config: DataConfig, store: Store, budget: Budget, progress: OnProgress
) -> None:
    begin_s, begin_tokens = budget.seconds, budget.tokens
    waiting: list[Outcome] = []
    n_kept = 0
    for outcome in outcomes:
        waiting.append(outcome)
        n_kept += outcome.conversation is not None
        if n_kept >= config.shard_size:
            store.append(waiting, seconds=budget.seconds)
            waiting, n_kept = [], 0
        fraction, seconds = budget.fraction, budget.seconds
        progress(
            Progress(
                done=budget.kept,
                total=config.limit,
                tokens=budget.tokens,
                seconds=seconds,
                tokens_per_s=(budget.tokens - begin_tokens) / max(seconds - begin_s, 1e-9),
                seconds_left=seconds * (1 - fraction) / fraction if fraction else None,
            )
        )
    if waiting:
        store.append(waiting, seconds=budget.seconds)
