"""The arithmetic behind the result rows. Definitions and formulas: ``docs/metrics.md``.

Everything is computed from records, so a row can always be recomputed from what is on disk.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch
from torch import Tensor

from distill.decode import StepRecord
from distill.metrics import accept_by_depth, tau
from serve_eval.rows import Record

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class PromptSpeed:
    """What one arm did on one prompt, all turns together; a turn's time is the median over its repeats.

    Attributes:
        decoded: tokens produced inside the decode window (the first token of a turn falls before it).
        decode_s: length of the decode windows.
        new_tokens: all generated tokens.
        total_s: time to the first token plus decode window.
    """

    decoded: int
    decode_s: float
    new_tokens: int
    total_s: float


def speeds(records: Iterable[Record]) -> dict[tuple[str, str], PromptSpeed]:
    """Pool the turns of every prompt of one arm; keys are (prompt set, prompt id)."""
    turns: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        turns.setdefault((record.prompts, record.id), []).append(record)
    return {
        key: PromptSpeed(
            decoded=sum(max(len(r.ids) - 1, 0) for r in group),
            # A turn that ended with its first token has no decode window, only the clock's own time.
            decode_s=sum(median(r.decode_s) for r in group if len(r.ids) > 1),
            new_tokens=sum(len(r.ids) for r in group),
            total_s=sum(median(r.ttft_s) + median(r.decode_s) for r in group),
        )
        for key, group in turns.items()
    }


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """Decode speed of one arm over another's on the prompts both decoded, with 95 % bootstrap intervals."""

    median: float | None
    median_ci: list[float] | None
    total: float | None
    total_ci: list[float] | None
    end_to_end: float | None


def speedup(arm: Sequence[Record], base: Sequence[Record], *, seed: int = 0, resamples: int = RESAMPLES) -> Speedup:
    """Compare an arm with a base arm, prompt by prompt.

    The intervals resample prompts with replacement (a prompt's turns stay together: they are not independent).
    """
    ours, theirs = speeds(arm), speeds(base)
    keys = [k for k, s in ours.items() if k in theirs and s.decoded > 0 and theirs[k].decoded > 0]
    if not keys:
        return Speedup(median=None, median_ci=None, total=None, total_ci=None, end_to_end=None)

    def column(source: dict[tuple[str, str], PromptSpeed], name: str) -> Tensor:
        return torch.tensor([getattr(source[k], name) for k in keys], dtype=torch.float64)

    tokens, seconds = column(ours, "decoded"), column(ours, "decode_s")
    base_tokens, base_seconds = column(theirs, "decoded"), column(theirs, "decode_s")
    ratios = (tokens / seconds) / (base_tokens / base_seconds)
    n = len(keys)
    generator = torch.Generator().manual_seed(seed)
    draw_RN = torch.randint(n, (resamples, n), generator=generator)
    totals_R = (tokens[draw_RN].sum(1) / seconds[draw_RN].sum(1)) / (
        base_tokens[draw_RN].sum(1) / base_seconds[draw_RN].sum(1)
    )
    return Speedup(
        median=median(ratios.tolist()),
        median_ci=_interval(ratios[draw_RN].quantile(0.5, dim=1), n),
        total=float((tokens.sum() / seconds.sum()) / (base_tokens.sum() / base_seconds.sum())),
        total_ci=_interval(totals_R, n),
        end_to_end=float(
            (column(ours, "new_tokens").sum() / column(ours, "total_s").sum())
            / (column(theirs, "new_tokens").sum() / column(theirs, "total_s").sum())
        ),
    )


def _interval(values_R: Tensor, n_prompts: int) -> list[float] | None:
    """Percentile interval; a single prompt says nothing about other prompts."""
    if n_prompts < 2:
        return None
    tail = (1 - LEVEL) / 2
    return [float(values_R.quantile(tail)), float(values_R.quantile(1 - tail))]


def tokens_per_s(records: Sequence[Record]) -> float | None:
    """Decode-only speed: total tokens over total seconds."""
    per_prompt = speeds(records).values()
    seconds = sum(s.decode_s for s in per_prompt)
    return sum(s.decoded for s in per_prompt) / seconds if seconds > 0 else None


def steps(records: Iterable[Record]) -> list[StepRecord]:
    """Rebuild the verification passes of records."""
    found: list[StepRecord] = []
    for record in records:
        start = 1  # ids[0] comes from the prefill
        for emitted, accepted, offered in zip(record.emitted, record.accepted, record.offered, strict=True):
            tokens = tuple(record.ids[start : start + emitted])
            found.append(StepRecord(tokens=tokens, accepted=accepted, offered=offered, rejected=()))
            start += emitted
    return found


def acceptance(records: Sequence[Record]) -> tuple[float, float, list[float]]:
    """Return (tau pooled over passes, mean of per-prompt tau, conditional acceptance by depth).

    Plain decoding has one token per pass by definition, also where there is no pass to count.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.prompts, record.id), []).append(record)
    per_prompt = [tau(found) for group in groups.values() if (found := steps(group))]
    if not per_prompt:
        return 1.0, 1.0, []
    pooled = steps(records)
    # NaN marks a depth that was never tried, and then no deeper one was either: the list ends before it.
    return tau(pooled), fmean(per_prompt), [rate for rate in accept_by_depth(pooled) if not math.isnan(rate)]


def match_rate(records: Sequence[Record]) -> float | None:
    """Share of turns whose ids equal those of the ``ar`` arm; None where equality is not due."""
    known = [r.matches for r in records if r.matches is not None]
    return sum(known) / len(known) if known else None


def tie_rate(records: Sequence[Record]) -> float | None:
    """Share of turns that differ from ``ar`` and first do so at a tie; with ``match_rate`` it should come to 1."""
    known = [r.difference_tie is True for r in records if r.matches is not None]
    return sum(known) / len(known) if known else None


def ttft(records: Sequence[Record]) -> float:
    """Median time to the first token over turns (each the median of its repeats)."""
    return median(median(r.ttft_s) for r in records)
