"""task=check: run a drafter in a real engine and hold its own acceptance counters against ours.

The engine decodes held-out prompts greedily, plain and drafted; the texts must be the same, and the share of proposals
whose first 1, 2, ... tokens were kept must be what our loop keeps with the same drafter, chain and prompts.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from distill.config import opt, to_dict
from distill.decode import Decoder, StepRecord
from distill.drafters.base import Drafter
from distill.errors import UserError
from distill.export import collect, load_drafter
from distill.export.adopt import LayerIds, adopt
from distill.export.convert import read_native
from distill.export.recognise import recognise
from distill.files import write_atomic
from distill.target import Target, TargetConfig, load_target, target_folder
from distill.tree import Chain
from engines import Engine, EngineResult, engine
from serve_eval.measure import encode, opening
from serve_eval.prompts import load_prompts

SCHEMA_VERSION = 1
BATCH = 16


@dataclass(kw_only=True)
class Config:
    """Options of task=check."""

    folder: str | None = opt(None, "the drafter's folder, in a layout the engine reads")
    engine: Literal["vllm", "llama_cpp", "openvino"] = opt("vllm", "the program that runs it")
    checkpoint: str | None = opt(None, "native export to compare with; null: the folder itself, adopted")
    target: TargetConfig = field(default_factory=TargetConfig, metadata={"help": "the model it drafts for"})
    layer_ids: LayerIds = opt("auto", "how the folder counts layers, where it is adopted: entering, output or auto")
    prompts: list[str] = opt(["mtbench", "humaneval"], "prompt sets: mtbench, humaneval, or JSON-lines files")
    limit: int | None = opt(8, "prompts per set, spread evenly over its categories; null takes all")
    max_new_tokens: int = opt(96, "tokens per answer")
    length: int = opt(3, "tokens drafted per pass (a chain)")
    tolerance: float = opt(0.02, "largest difference of the share kept at a position")
    out: str | None = opt(None, "also write the figures to this JSON file")
    chat: bool = opt(True, "put prompts through the chat template; false feeds plain text (base models)")

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit must be at least 1, or null for all prompts, got {self.limit}")
        if not 0 < self.tolerance < 1:
            raise UserError(f"tolerance must be between 0 and 1, got {self.tolerance}")


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What came out.

    Attributes:
        version: of the engine.
        same_text: prompts whose drafted text is the engine's own plain text, and all prompts.
        ours: share of our proposals whose first 1, 2, ... drafts were kept.
        theirs: likewise in the engine; one figure, drafts kept per draft, where it does not count positions.
        drafts: proposals counted in the engine (or drafted tokens, where it does not count proposals).
        fine: texts alike and no figure further apart than the tolerance.
    """

    version: str
    same_text: tuple[int, int]
    ours: list[float]
    theirs: list[float]
    drafts: int
    fine: bool

    @property
    def largest(self) -> float:
        """Largest difference of a figure."""
        return max(abs(a - b) for a, b in zip(self.ours, self.theirs, strict=True))


def run(config: Config, *, console: Console | None = None) -> CheckResult:
    """Check one folder in one engine.

    Raises:
        UserError: nothing given, an engine that is not installed or cannot read the folder, or a drafter that does
            not fit.
        SystemExit: 1, when the texts or the acceptance differ.
    """
    if not config.folder:
        raise UserError("folder must be a drafter's folder, got none; add folder=DIR")
    console = console or Console(soft_wrap=True)
    chosen = engine(config.engine)
    method = method_of(config)
    known = [name for name in chosen.formats if name != "none"]
    if method not in known:
        raise UserError(f"engine {config.engine} must be given one of {', '.join(known)}, got {method}")
    chosen.environment.require()
    if config.target.name == "tiny":
        raise UserError("target must be a model that has a folder, which engines load, got tiny")
    # Only in full precision is the same text what has to come out.
    target = load_target(TargetConfig(**{**to_dict(config.target), "dtype": "float32"}))
    drafter = reference(config, target)
    prompts = [
        encode(target, opening(prompt), chat=config.chat) for prompt in load_prompts(config.prompts, limit=config.limit)
    ]
    result = compare(config, chosen, method, target, drafter, prompts)
    _print(result, config, console)
    if config.out:
        record = {"schema_version": SCHEMA_VERSION, **asdict(result), "provenance": collect(config=to_dict(config))}
        write_atomic(Path(config.out), json.dumps(record, indent=1) + "\n")
    if not result.fine:
        raise SystemExit(1)
    return result


def method_of(config: Config) -> Any:
    """Kind of drafter in the folder; GGUF files do not say it to us, the native export beside them does."""
    found = recognise(config.folder or "")
    if found.drafter:
        return found.drafter
    if config.checkpoint is None:
        raise UserError(f"checkpoint must name the native export that {config.folder} was made from, got none")
    return read_native(config.checkpoint)[0].drafter


def reference(config: Config, target: Target) -> Drafter:
    """The drafter our side decodes with: the export the folder was made from, or the folder as we read it."""
    if config.checkpoint is not None:
        return load_drafter(config.checkpoint, target, dtype=torch.float32)
    drafter, _ = adopt(config.folder or "", target, layer_ids=config.layer_ids)
    return drafter.to(dtype=torch.float32)


def compare(
    config: Config, chosen: Engine, method: Any, target: Target, drafter: Drafter, prompts: Sequence[list[int]]
) -> CheckResult:
    """Decode in the engine, plain and drafted, and here."""
    folder = target_folder(config.target)
    options: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "k": config.length}
    plain = chosen.run(folder, None, "none", prompts, **options)
    drafted = chosen.run(folder, Path(config.folder or ""), method, prompts, **options)
    decoder = Decoder(drafter.target, drafter, plan=Chain(config.length))
    # A batch's rows do not see each other, so how many there are changes only the time.
    batches = [prompts[start : start + BATCH] for start in range(0, len(prompts), BATCH)]
    done = [g for batch in batches for g in decoder.generate(batch, max_new_tokens=config.max_new_tokens)]
    steps = [step for generation in done for step in generation.steps]
    ours, theirs, count = figures(steps, drafted, length=config.length)
    same = sum(a == b for a, b in zip(plain.ids, drafted.ids, strict=True))
    close = all(abs(a - b) <= config.tolerance for a, b in zip(ours, theirs, strict=True))
    return CheckResult(
        version=drafted.version,
        same_text=(same, len(prompts)),
        ours=ours,
        theirs=theirs,
        drafts=count,
        fine=close and same == len(prompts),
    )


def figures(steps: Sequence[StepRecord], theirs: EngineResult, *, length: int) -> tuple[list[float], list[float], int]:
    """(ours, the engine's, what it counted) per position, or kept per drafted where it says no more."""
    if theirs.accepted_per_position is not None and theirs.drafts:
        ours = [sum(s.accepted >= d for s in steps) / max(len(steps), 1) for d in range(1, length + 1)]
        return ours, [n / theirs.drafts for n in theirs.accepted_per_position], theirs.drafts
    kept, offered = sum(s.accepted for s in steps), sum(s.offered for s in steps)
    return [kept / max(offered, 1)], [theirs.accepted / max(theirs.drafted, 1)], theirs.drafted


def _print(result: CheckResult, config: Config, console: Console) -> None:
    title = f"{config.folder} in {config.engine} {result.version}, {result.drafts} drafted steps, greedy, float32"
    if len(result.ours) == 1:
        title = title.replace("drafted steps", "drafted tokens")
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for name in ("", "here", config.engine, "difference"):
        table.add_column(name, justify="right" if name else "left")
    names = [f"first {d} kept" for d in range(1, len(result.ours) + 1)] if len(result.ours) > 1 else ["kept / drafted"]
    for name, ours, theirs in zip(names, result.ours, result.theirs, strict=True):
        table.add_row(name, f"{ours:.3f}", f"{theirs:.3f}", f"{theirs - ours:+.3f}")
    console.print(table)
    same, count = result.same_text
    console.print(f"text as without drafter: {same} of {count} prompts", highlight=False)
    verdict = "alike" if result.fine else f"NOT alike (tolerance {config.tolerance})"
    console.print(f"{verdict}; largest difference {result.largest:.3f}", highlight=False)
