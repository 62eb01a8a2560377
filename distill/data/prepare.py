"""Preparing data: from a source to shards, whole or in parts."""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from distill.data.config import DataConfig
from distill.data.endpoint import Endpoint
from distill.data.merge import Parts, find_parts, merged_outcomes, read_parts
from distill.data.prepared import PreparedData, load_prepared
from distill.data.progress import OnProgress, Progress, stderr_progress
from distill.data.records import Record, read_records
from distill.data.sources import Streams, file_candidates, self_candidates
from distill.data.store import Manifest, Outcome, Part, Store, read_manifest
from distill.data.template import ChatTemplate
from distill.data.writer import Budget, answered_outcomes, finished_outcomes
from distill.decode import Decoder
from distill.errors import UserError
from distill.target import Target

BARREN = 1000
"""Conversations a target may waste in a row before it counts as unable to write its own data."""

MakeDecoder = Callable[..., Streams]


def prepare(
    config: DataConfig,
    target: Target,
    folder: Path | str,
    progress: OnProgress | None = None,
    *,
    parts: Sequence[Path] = (),
    partial: bool = False,
    make_decoder: MakeDecoder | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> PreparedData:
    """Write what is missing in a folder of shards, then read it. Parts that lie in the folder are merged first.

    Args:
        config: what to write.
        target: writes and tokenises.
        folder: of the shards; an interrupted run goes on where it was.
        progress: called after every conversation; None prints to stderr.
        parts: folders of parts that lie elsewhere.
        partial: merge what there is of the parts, however incomplete.
        make_decoder: called with the target and ``sampling``; None takes what ``data.writer`` says.
        clock: seconds, monotonic.

    Raises:
        UserError: unusable source, target without a chat template, folder of another target or other settings,
            parts that do not belong together, damaged shard, full disk, endpoint that does not answer.
    """
    if config.part is not None:
        raise UserError(
            f"data.part={config.part} must go to `python -m serve_eval task=data`, which writes that part only; "
            "once all parts lie in data.folder, leave data.part out"
        )
    folder = Path(folder)
    with opened(config, target, folder) as (source, store):
        budget = None
        # Without a reason it was interrupted, perhaps just before the reason was written down.
        if store.manifest.stopped is None or not is_complete(store.manifest, config):
            pieces = read_parts(store, [*find_parts(folder), *parts], partial=partial)
            budget = Budget(config, store.manifest, clock=clock)
            outcomes = source.outcomes(store, budget, pieces, partial=partial, make_decoder=make_decoder)
            with closing(outcomes):
                _append_all(outcomes, source.config, store, budget, progress or stderr_progress())
        data = load_prepared(folder, config, vocab_size=target.info.vocab_size)
        if budget is not None:
            _finish(store, config, budget, data.stats["coverage"])
    data.stats.update(stopped=store.manifest.stopped, seconds_writing=round(store.manifest.seconds, 1))
    return data


def write_part(
    config: DataConfig,
    target: Target,
    folder: Path | str,
    progress: OnProgress | None = None,
    *,
    place: Path | None = None,
    make_decoder: MakeDecoder | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Path:
    """Write one part of the data, without word from whoever writes the others; see ``merge.py``.

    Args:
        config: what to write altogether, and in ``part`` which part of it.
        target: writes and tokenises.
        folder: of all the data.
        place: where the part gets its folder; None: inside ``folder``.
        progress: called after every conversation; None prints to stderr.
        make_decoder: called with the target and ``sampling``; None takes what ``data.writer`` says.
        clock: seconds, monotonic.

    Returns:
        The part's folder.

    Raises:
        UserError: as ``prepare``.
    """
    share = config.share()
    assert share is not None, "a part has a number"
    whole = read_manifest(Path(folder))
    part = Part(number=share[0], of=share[1], base=whole.next_index if whole else 0)
    place = (place or Path(folder)) / part.name
    if whole is not None and is_complete(whole, config):
        raise UserError(f"data folder {folder} must lack something to write a part for, got all that was asked for")
    mine = quota(config, part, whole)
    with opened(mine, target, place, part) as (source, store):
        if store.manifest.stopped is None or not is_complete(store.manifest, mine):
            budget = Budget(mine, store.manifest, clock=clock)
            with closing(source.outcomes(store, budget, [], make_decoder=make_decoder)) as outcomes:
                _append_all(outcomes, source.config, store, budget, progress or stderr_progress())
            _finish(store, mine, budget, {})
    return place


def quota(config: DataConfig, part: Part, whole: Manifest | None) -> DataConfig:
    """What one part has to write: an even share of what is missing."""

    def mine(total: int | None, have: int) -> int | None:
        if total is None:
            return None
        missing = max(total - have, 0)
        return max(1, missing // part.of + (part.number <= missing % part.of))

    have = (0, 0) if whole is None else (whole.conversations, whole.supervised_tokens)
    limit, tokens = mine(config.limit, have[0]), mine(config.max_tokens, have[1])
    return replace(config, part=None, n_conversations=limit, max_tokens=tokens)


def is_complete(manifest: Manifest, config: DataConfig) -> bool:
    """True when a finished folder already has what is asked for."""
    if manifest.stopped == "source_exhausted" or (config.limit and manifest.conversations >= config.limit):
        return True
    if config.max_tokens and manifest.supervised_tokens >= config.max_tokens:
        return True
    # Time is up a little before the limit, so the limit itself is compared.
    before = manifest.budget.get("max_minutes") or 0.0
    return bool(manifest.stopped == "max_minutes" and config.max_minutes and config.max_minutes <= before)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What is written from.

    Attributes:
        config: with the number of slots decided.
        target: writes and tokenises.
        template: None for plain text.
        records: of a file or data set.
    """

    config: DataConfig
    target: Target
    template: ChatTemplate | None
    records: list[Record]

    def outcomes(
        self,
        store: Store,
        budget: Budget,
        parts: Parts,
        *,
        partial: bool = False,
        make_decoder: MakeDecoder | None = None,
    ) -> Generator[Outcome]:
        """What becomes of the candidates from where the store ends: taken from parts, then written."""
        seen, numbers, taken = set(store.seen), store.numbers, 0
        for outcome in merged_outcomes(parts, store, seen, partial=partial):
            if budget.full:
                break
            taken += 1
            if outcome.conversation is not None:
                budget.keep(outcome.conversation)
            yield outcome
        budget.spend(max((manifest.seconds for _, manifest in parts), default=0.0))
        if budget.admits(0):
            yield from self._written(numbers[taken:], seen, budget, make_decoder)

    def _written(
        self, numbers: range, seen: set[int], budget: Budget, make_decoder: MakeDecoder | None
    ) -> Generator[Outcome]:
        config, target = self.config, self.target
        with ExitStack() as stack:
            if make_decoder is None and config.writer == "endpoint":
                assert self.template is not None, "only what has a template is answered"
                make_decoder = stack.enter_context(closing(Endpoint(config.endpoint, target, self.template))).decoder
            make: MakeDecoder = make_decoder or partial(Decoder, engine="fast")
            if config.source == "self":
                assert self.template is not None
                prompts = make(target, sampling=config.prompt_sampling())
                candidates = self_candidates(config, self.template, prompts, numbers=numbers, seen=seen)
            else:
                candidates = file_candidates(config, target, self.records, numbers=numbers, seen=seen)
            stack.enter_context(closing(candidates))
            if config.source in ("chat", "text"):
                outcomes = finished_outcomes(candidates, budget)
            else:
                assert self.template is not None
                answers = make(target, sampling=config.answer_sampling())
                outcomes = answered_outcomes(candidates, config, self.template, answers, budget)
            yield from stack.enter_context(closing(outcomes))


@contextmanager
def opened(
    config: DataConfig, target: Target, folder: Path, part: Part | None = None
) -> Iterator[tuple[_Source, Store]]:
    """Check and read everything that could be refused, then hold the folder."""
    if config.max_len > target.info.max_positions:
        raise UserError(
            f"data.max_len must be at most the target's {target.info.max_positions} positions, got {config.max_len}"
        )
    if config.slots is None:
        here = 32 if target.device.type == "cpu" else 256
        config = replace(config, slots=config.endpoint.concurrency if config.writer == "endpoint" else here)
    records, origin = ([], "self") if config.source == "self" else read_records(config)
    template = None if config.source == "text" else ChatTemplate(target, source=config.source)
    source = _Source(config=config, target=target, template=template, records=records)
    settings = config.writing_settings()
    with Store(folder, target=target.fingerprint, settings=settings, origin=origin, part=part) as store:
        yield source, store


def _finish(store: Store, config: DataConfig, budget: Budget, coverage: dict[str, float]) -> None:
    store.finish(
        stopped=budget.stopped or "n_conversations",
        budget={name: getattr(config, name) for name in ("n_conversations", "max_tokens", "max_minutes")},
        coverage=coverage,
        seconds=budget.seconds,
    )


def _append_all(
    outcomes: Iterable[Outcome], config: DataConfig, store: Store, budget: Budget, progress: OnProgress
) -> None:
    begin_s, begin_tokens = budget.seconds, budget.tokens
    waiting: list[Outcome] = []
    n_kept = 0
    barren: Counter[str] = Counter()  # why everything since the last kept conversation was dropped
    for outcome in _kept_on_failure(outcomes, waiting, store, budget):
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
            waiting.clear()
            n_kept = 0
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


def _kept_on_failure(
    outcomes: Iterable[Outcome], waiting: list[Outcome], store: Store, budget: Budget
) -> Iterator[Outcome]:
    """Pass outcomes on; when their writer fails or is interrupted, those that wait for a full shard are kept."""
    source = iter(outcomes)
    while True:
        try:
            outcome = next(source, None)
        except (UserError, KeyboardInterrupt):
            if waiting:
                store.append(waiting, seconds=budget.seconds)
            raise
        if outcome is None:
            return
        yield outcome
