"""Preparing data: from a source to shards."""

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from distill.data.config import DataConfig
from distill.data.prepared import PreparedData, load_prepared
from distill.data.records import Record, read_records
from distill.data.sources import Candidate, Streams, file_candidates, self_candidates
from distill.data.store import Manifest, Store
from distill.data.template import ChatTemplate
from distill.data.writer import Budget, Outcome, answered_outcomes, finished_outcomes
from distill.decode import Decoder
from distill.errors import UserError
from distill.target import Target


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


BARREN = 1000
"""Conversations a target may waste in a row before it counts as unable to write its own data."""

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
    barren: Counter[str] = Counter()  # why everything since the last kept conversation was dropped
    for outcome in outcomes:
        waiting.append(outcome)
        n_kept += outcome.conversation is not None
        barren = Counter() if outcome.conversation is not None else barren + outcome.counts
        if config.source == "self" and barren.total() >= BARREN:
            reasons = ", ".join(f"{count} {name}" for name, count in barren.most_common(3))
            raise UserError(
                f"the target must write usable conversations, got none among its last {barren.total()} ({reasons}); "
                "change data.min_answer_tokens or data.temperature, or use data=prompts"
            )
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
