"""Where conversations come from: candidates, numbered, in a fixed order.

Every source yields *all* of its candidates, the unusable ones with a reason, so that the number of the last
one taken is all a resumed run needs to go on. Who writes a part takes every n-th number.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from distill.data.config import DataConfig
from distill.data.conversation import Conversation, content_key
from distill.data.masks import supervise
from distill.data.records import Record
from distill.data.template import ChatTemplate, Message, system_message
from distill.decode import Generation, Request
from distill.errors import UserError
from distill.target import Target

HOPELESS = 400
"""Candidates in a row without one usable prompt before the self source gives up."""


class Streams(Protocol):
    """The part of the decoder that writing needs."""

    def stream(self, requests: Iterator[Request], *, slots: int) -> Iterator[Generation]:
        """Decode requests, refilling slots as they finish."""
        ...


def unknown_ids(generation: Generation) -> str | None:
    """Why what was written cannot be used: a writer elsewhere could not say its token ids; None: it can."""
    return generation.tag if isinstance(generation.tag, str) else None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One thing a source offers: a prompt to answer, a finished conversation, or a reason why neither.

    Attributes:
        index: number in the source, without gaps; also the request id that keys the noise.
        key: hash of the content; 0 for one that is dropped for a fault of its own, which makes nothing a duplicate.
        messages: what the target is to answer.
        follow_ups: further user turns.
        conversation: already finished.
        dropped: reason, or None.
        counts: turns left out, by reason.
    """

    index: int
    key: int = 0
    messages: list[Message] = field(default_factory=list)
    follow_ups: tuple[str, ...] = ()
    conversation: Conversation | None = None
    dropped: str | None = None
    counts: Counter[str] = field(default_factory=Counter)


def self_candidates(
    config: DataConfig, template: ChatTemplate, decoder: Streams, *, numbers: range, seen: set[int]
) -> Generator[Candidate]:
    """The target writes user turns: it is given its own template up to where a user's first word goes.

    Args:
        config: lengths, sampling.
        template: the target's.
        decoder: samples with ``config.prompt_sampling()``.
        numbers: of the candidates.
        seen: keys already there; grows.

    Raises:
        UserError: the target writes no usable prompts.
    """
    slot, marker = template.user_slot(config.system)
    requests = (Request(request_id=i, prompt=slot, max_new_tokens=config.max_prompt_tokens) for i in numbers)
    early: dict[int, Generation] = {}
    index, barren = numbers.start, 0
    for generation in decoder.stream(requests, slots=config.slots or 1):
        early[generation.request_id] = generation
        while index in early:  # finished out of order, taken in order
            candidate = _user_turn(index, early.pop(index), marker, config, template, seen)
            barren = barren + 1 if candidate.dropped else 0
            if barren >= HOPELESS:
                raise UserError(
                    f"the target must write user turns of at most {config.max_prompt_tokens} tokens for "
                    f"data.source=self, got no new one in {HOPELESS} tries; use data.source=prompts"
                )
            yield candidate
            index += numbers.step


def _user_turn(
    index: int,
    generation: Generation,
    marker: str,
    config: DataConfig,
    template: ChatTemplate,
    seen: set[int],
) -> Candidate:
    if (reason := unknown_ids(generation)) is not None:
        return Candidate(index=index, dropped=reason)
    ended = generation.finished == "eos"
    text, found, _ = template.decode(generation.ids[:-1] if ended else generation.ids).partition(marker)
    text = text.strip()
    if not (ended or found):
        return Candidate(index=index, dropped="prompt_too_long")
    if template.has_special(text):
        return Candidate(index=index, dropped="special_token_in_text")
    if not any(letter.isalnum() for letter in text):
        return Candidate(index=index, dropped="prompt_empty")
    key = content_key(text)
    if key in seen:
        return Candidate(index=index, key=key, dropped="duplicate")
    seen.add(key)
    messages = [*system_message(config.system), {"role": "user", "content": text}]
    return Candidate(index=index, key=key, messages=messages)


def file_candidates(
    config: DataConfig, target: Target, records: Sequence[Record], *, numbers: range, seen: set[int]
) -> Generator[Candidate]:
    """Candidates from records that were read from files or a data set.

    Args:
        config: says which kind of source it is.
        target: for its template or tokenizer.
        records: checked already, see ``records.py``.
        numbers: of the candidates to yield.
        seen: keys already there; grows.
    """
    offered: Iterator[tuple[int, Candidate]]
    if config.source == "text":
        pieces = itertools.chain.from_iterable(map(_text_maker(config, target), records))
        offered = ((index, piece) for index, piece in enumerate(pieces) if index in numbers)
    else:
        template = ChatTemplate(target, source=config.source)
        make = (_prompt_maker if config.source == "prompts" else _chat_maker)(config, template)
        offered = ((index, make(records[index])) for index in range(numbers.start, len(records), numbers.step))
    for index, found in offered:
        yield _numbered(found, index, seen)


def _numbered(found: Candidate, index: int, seen: set[int]) -> Candidate:
    if found.dropped is not None:
        return replace(found, index=index, key=0)
    if found.key in seen:
        return Candidate(index=index, key=found.key, dropped="duplicate")
    seen.add(found.key)
    return replace(found, index=index)


def _prompt_maker(config: DataConfig, template: ChatTemplate) -> Callable[[Record], Candidate]:
    """Every user turn is answered by the target; answers that came with the file are not used."""

    def make(record: Record) -> Candidate:
        system = [m for m in record.messages if m["role"] in ("system", "developer")][:1]
        users = [m["content"] for m in record.messages if m["role"] == "user"]
        opening = [*(system or system_message(config.system)), {"role": "user", "content": users[0]}]
        texts = [message["content"] for message in opening] + users[1:]
        key, dropped = content_key(*texts), None
        if any(map(template.has_special, texts)):
            dropped = "special_token_in_text"
        elif not all(text.strip() for text in users):
            dropped = "prompt_empty"
        return Candidate(index=0, key=key, messages=opening, follow_ups=tuple(users[1:]), dropped=dropped)

    return make


def _chat_maker(config: DataConfig, template: ChatTemplate) -> Callable[[Record], Candidate]:
    def make(record: Record) -> Candidate:
        key = content_key(*(f"{m['role']}: {m.get('content')}" for m in record.messages))
        try:
            result = supervise(record.messages, template, key=key)
        except UserError as error:
            raise UserError(f"{record.place}: {error}") from error
        dropped = None if result.conversation is not None else "no_turn_left"
        return Candidate(index=0, key=key, conversation=result.conversation, dropped=dropped, counts=result.counts)

    return make


def _text_maker(config: DataConfig, target: Target) -> Callable[[Record], Iterator[Candidate]]:
    """Plain text in pieces of ``max_len`` tokens; everything but a piece's first token is supervised."""
    tokenizer: Any = target.tokenizer
    if tokenizer is None:
        raise UserError(f"target {target.info.name!r} must have a tokenizer for data.source=text, got none")

    def make(record: Record) -> Iterator[Candidate]:
        # A special token's spelling inside plain text is text.
        ids = np.array(tokenizer.encode(record.text, split_special_tokens=True), dtype=np.int32)
        for begin in range(0, len(ids), config.max_len):
            piece = ids[begin : begin + config.max_len]
            key = content_key(*map(str, piece.tolist()))
            if len(piece) < 2:
                yield Candidate(index=0, key=key, dropped="too_short")
                continue
            mask = np.ones(len(piece), dtype=bool)
            mask[0] = False
            yield Candidate(index=0, key=key, conversation=Conversation(ids=piece, loss_mask=mask, key=key))

    return make
