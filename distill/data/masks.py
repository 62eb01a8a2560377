r"""Which tokens of a finished conversation the target wrote.

An assistant turn, as text and as mask (ChatML)::

    <|im_start|> assistant \n  Hello there  <|im_end|>  \n
         0           0     0     1     1         1       0

Supervised: what the assistant wrote and the token that ends its turn (a drafter must learn to draft it),
never what the template wrote around it. Places come from the template's generation markers, else from
renderings of the conversation's prefixes; both are then checked on tokens: a boundary counts only where
tokenising the text up to it gives exactly the first tokens of the whole. A turn that fails is left
unsupervised and counted; message contents are never searched for template text.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from distill.data.conversation import Conversation
from distill.data.template import SENTINEL, ChatTemplate, Message
from distill.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """A conversation with its mask, and what had to be left out.

    Attributes:
        conversation: None when no turn could be supervised.
        counts: turns left out, by reason.
    """

    conversation: Conversation | None
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True)
class _Span:
    """Characters [start, stop) an assistant wrote, after a prompt that ends at ``served``."""

    served: int
    start: int
    stop: int


def supervise(messages: list[Message], template: ChatTemplate, *, key: int = 0) -> Supervised:
    """Tokenise a finished conversation and mark what the assistant wrote.

    Args:
        messages: OpenAI-style messages with at least one assistant turn.
        template: the target's chat template.
        key: passed on to the conversation.

    Raises:
        UserError: no assistant turn, or the template refuses the messages.
    """
    turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UserError("a conversation must have an assistant turn, got none")
    if any(template.has_special(text) for message in messages for text in _strings(message)):
        # The tokenizer would read that text as the template's own token; no mask can repair the context.
        return Supervised(conversation=None, counts=Counter({"special_token_in_text": len(turns)}))
    text, spans, counts = (_marked if template.has_markers else _rendered)(messages, turns, template)
    ids = template.encode(text)
    mask = np.zeros(len(ids), dtype=bool)
    for span in spans:
        place = _tokens(text, ids, span, template)
        if place is None:
            counts["boundary_merged"] += 1
        else:
            mask[place[0] : place[1]] = True
    if not mask.any():
        return Supervised(conversation=None, counts=counts)
    conversation = Conversation(ids=np.array(ids, dtype=np.int32), loss_mask=mask, key=key)
    return Supervised(conversation=conversation, counts=counts)


def _strings(value: object) -> list[str]:
    """Every text inside a message, at any depth."""
    if isinstance(value, dict):
        return [text for item in value.values() for text in _strings(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) else []


def _marked(messages: list[Message], turns: list[int], template: ChatTemplate) -> tuple[str, list[_Span], Counter[str]]:
    """Spans from the template's own generation markers."""
    text, places = template.render_marked(messages)
    if text != template.render(messages):
        return _rendered(messages, turns, template)
    spans = [_Span(served=start, start=start, stop=stop) for start, stop in places if start < stop]
    missing = len(turns) - len(spans)
    return text, spans, Counter({"not_marked": missing} if missing > 0 else {})


def _rendered(
    messages: list[Message], turns: list[int], template: ChatTemplate
) -> tuple[str, list[_Span], Counter[str]]:
    """Spans from rendering the conversation up to each assistant turn, with and without the turn."""
    text = template.render(messages)
    spans: list[_Span] = []
    counts: Counter[str] = Counter()
    for k in turns:
        if k == 0:
            counts["nothing_before"] += 1
            continue
        served = template.render(messages[:k], add_generation_prompt=True)
        with_turn = template.render(messages[: k + 1])
        if not with_turn.startswith(served):
            counts["prompt_rewritten"] += 1
            continue
        place = _content_place(messages, k, served, with_turn, template)
        if place is None:
            counts["content_rewritten"] += 1
        elif not text.startswith(with_turn[: place[1]]):
            counts["history_rewritten"] += 1
        else:
            spans.append(_Span(served=len(served), start=place[0], stop=place[1]))
    return text, spans, counts


def _content_place(
    messages: list[Message], k: int, served: str, with_turn: str, template: ChatTemplate
) -> tuple[int, int] | None:
    """Characters of turn k's content inside ``with_turn``; None when it is not shown verbatim."""
    content = messages[k].get("content") or ""
    if any(messages[k].get(name) for name in messages[k] if name not in ("role", "content")):
        # Reasoning or tool calls: the assistant wrote all of the turn, in the template's spelling.
        return len(served), len(with_turn.rstrip())
    probe = template.render([*messages[:k], {"role": "assistant", "content": SENTINEL}])
    cut = probe.rfind(SENTINEL)
    if cut < 0:
        return None
    after = probe[cut + len(SENTINEL) :]
    # What stands before the content may be more than the generation prompt (an empty reasoning block).
    for before in (probe[:cut], served):
        for written in (content, content.strip(), content.lstrip(), content.rstrip()):
            if written and before.startswith(served) and with_turn == before + written + after:
                return len(before), len(before) + len(written)
    return None


def _tokens(text: str, ids: list[int], span: _Span, template: ChatTemplate) -> tuple[int, int] | None:
    """Token range of a span, turn end included; None when a token lies across a boundary."""
    # "[/INST] word": where a prompt ends before a blank, the target writes the blank.
    blank = not text[span.served : span.start].strip()
    first = _boundary(text, ids, span.served if blank else span.start, template)
    last = _boundary(text, ids, span.stop, template)
    if first is None or last is None or first >= last:
        return None
    inside = last
    while inside > first and not template.decode(ids[inside - 1 : inside]).strip():
        inside -= 1
    if inside > first and ids[inside - 1] == template.turn_end:
        return first, inside  # the span held the turn end itself, and perhaps a line break after it
    length = template.leading_turn_end(ids[last:])
    if length and ids[last + length - 1] == template.turn_end:
        last += length
    return first, last


def _boundary(text: str, ids: list[int], place: int, template: ChatTemplate) -> int | None:
    """Number of tokens in text[:place] when those are the first tokens of the whole text, else None."""
    before = template.encode(text[:place])
    return len(before) if ids[: len(before)] == before else None
