"""What a benchmark leaves behind: one row per arm and prompt group, one record per arm and prompt turn.

Both are JSON lines with a schema version; a file of another version is refused, not guessed at. The meaning of
every number is defined in ``docs/metrics.md``.
"""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from distill.errors import UserError
from distill.files import write_atomic

SCHEMA_VERSION = 2
RESULTS, RECORDS, COSTS, REPORT = "results.jsonl", "records.jsonl", "cost.json", "report.html"

T = TypeVar("T")


@dataclass(kw_only=True)
class Row:
    """One arm on one prompt set (``category`` "all") or on one category of it.

    Attributes:
        arm: unique name inside the file: ``ar``, ``hf``, or the label of the tree plan.
        kind: ``ar`` (the same loop without a drafter), ``spec``, ``hf`` (transformers ``generate``) or ``peer`` (its
            own speculative decoding).
        tree: label of the plan, None without a drafter; likewise ``drafter``, ``verifier`` and ``candidates``.
        lossless: whether the output follows the target's law (typical acceptance does not at temperatures above 0).
        new_tokens: generated ids up to and including the first end token, capped; one repeat.
        tau: tokens per verification pass, bonus included, pooled; 1 for plain decoding.
        tau_prompt_mean: the same per prompt, then averaged.
        accept_by_depth: P(depth d accepted | depth d-1 accepted), d = 1, 2, ...
        speedup_median: median over prompts of the ratio of decode speeds to ``ar``.
        speedup_total: ratio of total decode speeds to ``ar``; ``speedup_ci`` is its 95 % bootstrap interval.
        speedup_end_to_end: the same with the time to the first token counted in.
        speedup_vs_hf: ratio of total decode speeds to ``hf``; None when that arm was not run.
        tokens_per_s: decode-only speed.
        match_rate: share of turns whose ids equal those of ``ar``; None where sampling differs by design.
        tie_rate: share of turns that differ, and first do so where rounding may pick either token.
        peak_memory_bytes: most memory in use above the loaded weights; None where it cannot be measured.
    """

    schema_version: int = SCHEMA_VERSION
    arm: str
    kind: str
    target: str
    drafter: str | None
    tree: str | None
    verifier: str | None
    candidates: str | None = None
    lossless: bool = True
    drafter_parameters: int = 0
    temperature: float
    top_k: int
    top_p: float
    prompts: str
    category: str
    n_prompts: int
    n_turns: int
    repeats: int
    new_tokens: int
    n_steps: int | None
    tau: float
    tau_prompt_mean: float
    accept_by_depth: list[float]
    speedup_median: float | None
    speedup_median_ci: list[float] | None
    speedup_total: float | None
    speedup_ci: list[float] | None
    speedup_end_to_end: float | None
    speedup_vs_hf: float | None
    tokens_per_s: float | None
    ttft_s: float
    match_rate: float | None
    tie_rate: float | None
    peak_memory_bytes: int | None
    settings: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Record:
    """One arm on one turn of one prompt.

    Attributes:
        ids: generated ids up to and including the first end token, capped at the limit.
        emitted, accepted, offered: per verification pass: tokens emitted, how many of them were drafted, and the
            depth that was offered. The first of ``ids`` comes from the prefill and belongs to no pass.
        ttft_s, decode_s: seconds, one entry per repeat.
        first_difference: index of the first id that differs from ``ar``; None when all agree or none is due.
        difference_gap: distance between the target's two best scores there.
        difference_tie: whether that is so little that rounding decides.
        pieces: text of every id, only where the report shows the decode.
    """

    schema_version: int = SCHEMA_VERSION
    arm: str
    prompts: str
    category: str
    id: str
    turn: int
    prompt_tokens: int
    ids: list[int]
    emitted: list[int]
    accepted: list[int]
    offered: list[int]
    ttft_s: list[float]
    decode_s: list[float]
    peak_memory_bytes: int | None = None
    matches: bool | None = None
    first_difference: int | None = None
    difference_gap: float | None = None
    difference_tie: bool | None = None
    question: str = ""
    pieces: list[str] | None = None


def write_text(path: Path, text: str) -> None:
    """Write a file that is either complete or absent, making its folder where needed.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out must be a folder that can be written, got {path.parent} ({error.strerror})") from error
    write_atomic(path, text)


def write_jsonl(path: Path, items: Iterable[Row | Record]) -> None:
    """Write dataclasses as JSON lines, atomically."""
    write_text(path, "".join(to_line(item) for item in items))


def to_line(item: Row | Record) -> str:
    """Return one JSON line; NaN and infinity are refused, since no other JSON reader takes them."""
    return json.dumps(dataclasses.asdict(item), ensure_ascii=False, allow_nan=False) + "\n"


def read_rows(path: Path) -> list[Row]:
    """Read ``results.jsonl``; see ``_read``."""
    return _read(path, Row)


def read_records(path: Path) -> list[Record]:
    """Read ``records.jsonl``; see ``_read``."""
    return _read(path, Record)


def _read(path: Path, cls: type[T]) -> list[T]:
    """Read JSON lines into ``cls``.

    Raises:
        UserError: missing file, invalid JSON, another schema version, or fields that do not fit.
    """
    if not path.is_file():
        raise UserError(f"{path} must exist, got nothing there; run task=bench first.")
    return [
        parse_line(line, cls, where=f"{path} line {number}")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if line.strip()
    ]


def parse_line(line: str, cls: type[T], *, where: str) -> T:
    """Parse one JSON line into a ``Row`` or ``Record``, refusing another schema version."""
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: a line must be one JSON object, got invalid JSON ({error.msg}).") from None
    version = item.get("schema_version") if isinstance(item, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{where}: schema version must be {SCHEMA_VERSION}, got {version}; measure again with task=bench."
        )
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(item) - names):
        raise UserError(f"{where}: fields must be those of schema {SCHEMA_VERSION}, got unknown {', '.join(unknown)}.")
    try:
        return cls(**item)
    except TypeError as error:
        raise UserError(f"{where}: fields must be those of schema {SCHEMA_VERSION}, got {error}.") from None
