"""The target answers prompts, many at a time; what it writes is filtered and put back in order.

Noise is keyed by (seed, candidate, position), so an answer does not depend on what else is in the batch: a
resumed run, or one that writes a part, writes the same conversations (up to rounding in low-precision matrix
products, which may depend on the batch).
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from distill.data.config import DataConfig
from distill.data.conversation import Conversation, from_parts, keyed_share
from distill.data.sources import Candidate, Streams, unknown_ids
from distill.data.store import Manifest, Outcome
from distill.data.template import ChatTemplate
from distill.decode import Generation, Request
from distill.sampling import Sampling

Stop = Literal["n_conversations", "max_tokens", "max_minutes", "source_exhausted"]

MAX_PERIOD = 64
MIN_REPEATS = 4


class Budget:
    """Decides whether another candidate may be started, and remembers why the answer became no.

    Args:
        config: the limits.
        before: what is there already; None for nothing.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: DataConfig,
        before: Manifest | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config = config
        self._clock = clock
        self._begin = clock() - (before.seconds if before else 0.0)
        self.kept = before.conversations if before else 0
        self.tokens = before.supervised_tokens if before else 0
        self.stopped: Stop | None = None
        self._longest_s = 0.0

    @property
    def seconds(self) -> float:
        """Time spent, earlier sessions included."""
        return self._clock() - self._begin

    @property
    def full(self) -> bool:
        """True when as much as was asked for is there, whatever the time."""
        limits = ((self.kept, self._config.limit), (self.tokens, self._config.max_tokens))
        return any(limit is not None and have >= limit for have, limit in limits)

    @property
    def fraction(self) -> float:
        """How far the nearest limit is reached, 0 to 1; 0 without limits."""
        config = self._config
        minutes = None if config.max_minutes is None else config.max_minutes * 60
        pairs = ((self.kept, config.limit), (self.tokens, config.max_tokens), (self.seconds, minutes))
        return min(1.0, max((have / limit for have, limit in pairs if limit), default=0.0))

    def admits(self, in_flight: int) -> bool:
        """True when one more candidate may be started beside ``in_flight`` unfinished ones."""
        config = self._config
        if self.stopped is not None:
            return False
        if config.limit is not None and self.kept + in_flight >= config.limit:
            if self.kept >= config.limit:  # not final before: what is in flight may be dropped
                self.stopped = "n_conversations"
            return False
        if config.max_tokens is not None and self.tokens >= config.max_tokens:
            self.stopped = "max_tokens"
        # Answers under way are finished, else short ones would be over-represented; their time is set aside.
        if config.max_minutes is not None and self.seconds + self._longest_s >= config.max_minutes * 60:
            self.stopped = "max_minutes"
        return self.stopped is None

    def now(self) -> float:
        """The clock."""
        return self._clock()

    def took(self, begin: float) -> None:
        """Note that something started at ``begin`` is finished now."""
        self._longest_s = max(self._longest_s, self._clock() - begin)

    def spend(self, seconds: float) -> None:
        """Count time that was spent elsewhere."""
        self._begin -= seconds

    def keep(self, conversation: Conversation) -> None:
        """Count a kept conversation."""
        self.kept += 1
        self.tokens += int(conversation.loss_mask.sum())


@dataclass(kw_only=True)
class _Draft:
    """A conversation being written."""

    candidate: Candidate
    sampling: Sampling
    begin: float
    parts: list[tuple[list[int], bool]]
    follow_ups: deque[str]
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def ids(self) -> list[int]:
        return [token for piece, _ in self.parts for token in piece]


def finished_outcomes(candidates: Iterator[Candidate], budget: Budget) -> Generator[Outcome]:
    """Outcomes of a source whose conversations are finished already."""
    while budget.admits(0):
        candidate = next(candidates, None)
        if candidate is None:
            budget.stopped = "source_exhausted"
            return
        outcome = _passed_on(candidate)
        if outcome.conversation is not None:
            budget.keep(outcome.conversation)
        yield outcome


def answered_outcomes(
    candidates: Iterator[Candidate],
    config: DataConfig,
    template: ChatTemplate,
    decoder: Streams,
    budget: Budget,
) -> Generator[Outcome]:
    """Let the target answer; yields in the order of the candidates, without gaps.

    Args:
        candidates: prompts; ones that are dropped already are passed on.
        config: lengths, sampling, slots.
        template: the target's.
        decoder: autoregressive, sampling with ``config.answer_sampling()``.
        budget: asked before every new candidate; all that were started are finished.
    """
    order: deque[int] = deque()
    done: dict[int, Outcome] = {}
    drafts: dict[int, _Draft] = {}
    ready: deque[Request] = deque()  # follow-up turns

    def requests() -> Iterator[Request]:
        while True:
            if ready:
                yield ready.popleft()
                continue
            if not budget.admits(len(drafts)):
                return
            candidate = next(candidates, None)
            if candidate is None:
                budget.stopped = "source_exhausted"
                return
            order.append(candidate.index)
            draft = _opened(candidate, config, template, budget.now()) if candidate.dropped is None else None
            if draft is None:
                done[candidate.index] = _passed_on(candidate)
                continue
            if draft.counts:
                done[candidate.index] = _closed(draft, config)
                continue
            drafts[candidate.index] = draft
            yield _request(draft, config)

    while True:
        for generation in decoder.stream(requests(), slots=config.slots or 1):
            draft = drafts[generation.request_id]
            if _take(draft, generation, config, template):
                ready.append(_request(draft, config))
            else:
                outcome = _closed(drafts.pop(generation.request_id), config)
                budget.took(draft.begin)
                if outcome.conversation is not None:
                    budget.keep(outcome.conversation)
                done[outcome.index] = outcome
            while order and order[0] in done:
                yield done.pop(order.popleft())
        while order and order[0] in done:
            yield done.pop(order.popleft())
        # The stream also ends while the limit is only reached on paper, or follow-ups came too late for it.
        if not ready and not budget.admits(0):
            return


def _passed_on(candidate: Candidate) -> Outcome:
    counts = Counter(candidate.counts)
    if candidate.dropped is not None:
        counts[candidate.dropped] += 1
    return Outcome(index=candidate.index, key=candidate.key, conversation=candidate.conversation, counts=counts)


def greedy_choice(config: DataConfig, index: int) -> bool:
    """Whether candidate ``index`` is answered greedily; a pure function of the seed and the number."""
    return keyed_share("greedy", config.seed, index) < config.greedy_share


def _opened(candidate: Candidate, config: DataConfig, template: ChatTemplate, now: float) -> _Draft:
    prompt = template.encode(template.render(candidate.messages, add_generation_prompt=True))
    sampling = config.answer_sampling()
    if greedy_choice(config, candidate.index):
        sampling = replace(sampling, temperature=0.0)
    draft = _Draft(
        candidate=candidate,
        sampling=sampling,
        begin=now,
        parts=[(prompt, False)],
        follow_ups=deque(candidate.follow_ups),
    )
    if len(prompt) + config.max_answer_tokens > config.max_len:
        draft.counts["prompt_too_long"] += 1
    return draft


def _request(draft: _Draft, config: DataConfig) -> Request:
    return Request(
        request_id=draft.candidate.index,
        prompt=draft.ids,
        max_new_tokens=config.max_answer_tokens,
        sampling=draft.sampling,
    )


def _take(draft: _Draft, generation: Generation, config: DataConfig, template: ChatTemplate) -> bool:
    """Add an answer to its conversation; True when another turn is to be written."""
    ids = generation.ids
    content = ids[:-1] if generation.finished == "eos" else ids
    reason = unknown_ids(generation)
    if reason is not None:
        pass
    elif len(content) < config.min_answer_tokens:
        reason = "too_short"
    elif is_degenerate(content):
        reason = "degenerate"
    if reason is not None:
        draft.counts[reason] += 1
        return False
    draft.parts.append((ids, True))
    if not draft.follow_ups:
        return False
    user = draft.follow_ups.popleft()
    messages = draft.candidate.messages
    glue = None
    if generation.finished == "eos" and ids[-1] == template.turn_end:
        glue = template.continuation(messages, user)
    if glue is None or len(draft.ids) + len(glue) + config.max_answer_tokens > config.max_len:
        draft.counts["follow_up_dropped"] += 1 + len(draft.follow_ups)
        return False
    draft.parts.append((glue, False))
    messages.extend([{"role": "assistant", "content": template.decode(content)}, {"role": "user", "content": user}])
    return True


def _closed(draft: _Draft, config: DataConfig) -> Outcome:
    """A conversation ends with its last good answer; without one it is dropped."""
    parts = draft.parts
    while parts and not parts[-1][1]:
        parts.pop()
    conversation = from_parts(parts, key=draft.candidate.key) if parts else None
    return Outcome(
        index=draft.candidate.index,
        key=draft.candidate.key,
        conversation=conversation,
        greedy=draft.sampling.greedy and conversation is not None,
        counts=draft.counts,
    )


def is_degenerate(ids: list[int]) -> bool:
    """True when an answer ends in a loop that is most of it.

    The longest suffix in which every token equals the one ``period`` places before it, for the best period up to
    64; it counts when the loop runs at least four times and covers at least half of the answer.
    """
    tokens = np.asarray(ids)
    for period in range(1, min(MAX_PERIOD, len(ids) // MIN_REPEATS) + 1):
        same = tokens[period:][::-1] == tokens[:-period][::-1]
        run = len(same) if same.all() else int(same.argmin())
        loop = run + period if run else 0
        if loop >= MIN_REPEATS * period and 2 * loop >= len(ids):
            return True
    return False
