"""task=bench: measure decoding with and without the drafter, every arm under the same conditions.

The protocol: one process, batch 1, arms interleaved prompt by prompt in rotating order after a warm-up of each, clocks
that start when the first token is on the host, ids counted identically. A second turn is asked about the ``ar`` arm's
answer, so all arms always see the same prompt.
"""

import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distill import kernels
from distill.config import opt, to_dict
from distill.decode import Engine, lossless
from distill.errors import UserError
from distill.export import collect, resolve_checkpoint
from distill.export.format import read_config
from distill.sampling import Sampling
from distill.target import Target, TargetConfig
from distill.target.step_ops import why_not
from distill.tree import PlanConfig
from serve_eval import report, stats
from serve_eval.arms import Arm, DecoderArm, PeakMemory
from serve_eval.checkpoint import Pair, auto_target, load_pair, training_figures
from serve_eval.command import repeat
from serve_eval.cost import WIDTHS, CostReport, predict, probe, round_costs, verify_curve, write_costs
from serve_eval.journal import Journal
from serve_eval.lineup import ArmConfig, decoder_arms, transformers_arms
from serve_eval.measure import Conditions, check_fits, encode, measure_prompt, opening
from serve_eval.progress import meter
from serve_eval.prompts import Prompt, alternate, load_prompts
from serve_eval.rows import COSTS, RECORDS, RESULTS, Record, Row, write_jsonl
from serve_eval.summary import print_summary
from serve_eval.threads import choose_threads

JOURNAL = "records.part.jsonl"
WARMUP_TOKENS = 16
COST_PROMPTS, COST_TOKENS = 3, 32


@dataclass(kw_only=True)
class Config:
    """Options of task=bench."""

    checkpoint: str | None = opt(None, "run folder or export folder of the drafter")
    drafter: dict[str, Any] = opt({}, "instead of a checkpoint: a drafter without weights (prompt_lookup, early_exit)")
    baselines: list[str] = opt(
        [], "drafters without weights to measure as well, each with the longest chain among the trees"
    )
    target: TargetConfig = field(
        default_factory=auto_target, metadata={"help": "target model; name auto takes the checkpoint's own"}
    )
    prompts: list[str] = opt(["mtbench"], "prompt sets: mtbench, humaneval, or JSON-lines files")
    limit: int | None = opt(None, "prompts per set, spread evenly over its categories; null takes all")
    max_minutes: float | None = opt(None, "time for the prompts; no further one is begun that would not fit")
    tree: PlanConfig = field(default_factory=PlanConfig, metadata={"help": "shape of the proposals"})
    trees: list[ArmConfig] = opt([], "further arms, e.g. [{name:chain,length:3},{name:chain,verifier:rejection}]")
    verifier: str = opt("match", "which drafts are kept: match, rejection, or typical, which is not lossless")
    candidates: str = opt("auto", "how drafts are picked: auto (what suits the verifier), topk, coupled or sampled")
    typical_epsilon: float = opt(0.09, "typical: a token above this probability is kept")
    typical_delta: float = opt(0.3, "typical: and one above this times exp(-entropy)")
    engine: Engine = opt("fast", "fast, or eager: the target's own forward; all arms but hf share it")
    temperature: float = opt(0.0, "sampling temperature; 0 is greedy")
    top_k: int = opt(0, "sample among the k most likely tokens; 0 switches it off")
    top_p: float = opt(1.0, "sample among the most likely tokens of this mass; 1 switches it off")
    seed: int = opt(0, "keys the sampling noise and the bootstrap")
    max_new_tokens: int = opt(128, "generated tokens per turn at most")
    ignore_eos: bool = opt(False, "decode past the end of text, so that all lengths are equal (pure speed runs)")
    repeats: int = opt(3, "measurements of every turn; its time is their median")
    warmup: int = opt(2, "unmeasured runs of every arm before the first measurement")
    hf: bool = opt(True, "measure transformers generate as a further arm")
    hf_assisted: bool = opt(False, "measure its assisted generation with our draft model, for every chain")
    hf_lookup: bool = opt(False, "measure its prompt lookup")
    cost: bool = opt(True, "measure the verify-cost curve and where a round's time goes")
    chat: bool = opt(True, "put prompts through the chat template; false feeds plain text (base models)")
    viewer: int = opt(3, "prompts per set whose decoded text the report shows")
    threads: int = opt(0, "CPU threads of all arms; 0 measures at the start which number makes a step fastest")
    out: str | None = opt(None, "folder for the results; null makes a new runs/<date>-bench")
    report: bool = opt(True, "write report.html beside the results")

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("repeats", 1), ("warmup", 0), ("viewer", 0), ("threads", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise UserError(f"max_minutes must be above 0, got {self.max_minutes}; null means no limit")
        self.sampling()

    def sampling(self) -> Sampling:
        """The sampling settings as one record; refuses impossible ones."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)

    def conditions(self) -> Conditions:
        """What all arms share."""
        return Conditions(
            sampling=self.sampling(),
            max_new_tokens=self.max_new_tokens,
            ignore_eos=self.ignore_eos,
            repeats=self.repeats,
            chat=self.chat,
        )


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What a benchmark measured, and where it was written."""

    rows: list[Row]
    records: list[Record]
    costs: CostReport | None
    out: Path


def run(config: Config, *, quiet: bool = False) -> BenchResult:
    """Measure, write ``results.jsonl``, ``records.jsonl``, ``cost.json`` and the report, print a summary.

    An interrupted benchmark goes on where it stopped when it is run again with the same settings and folder.

    Args:
        config: all options.
        quiet: leave the summary to the caller.

    Raises:
        UserError: bad options, prompts or checkpoint; nothing is written then.
    """
    if config.checkpoint is None and not config.drafter:
        raise UserError(
            "either checkpoint (a run folder or an export folder) or drafter (one without weights) must be given, got "
            "none; pass checkpoint=DIR or drafter=prompt_lookup"
        )
    prompts = load_prompts(config.prompts, limit=config.limit)
    out = Path(config.out or f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}-bench")
    with _threads(config.threads):
        pair = load_pair(config.checkpoint, config.target, drafter=config.drafter)
        decoders = decoder_arms(config, pair)
        if not config.threads and pair.target.device.type == "cpu":
            torch.set_num_threads(choose_threads(partial(probe, decoders[0].decoder.model)))
        arms: list[Arm] = [*decoders]
        arms += transformers_arms(config, pair, decoders)
        common = _common(config, pair)  # what is wrong with the checkpoint's own record shows before anything runs
        records = _measure(config, pair.target, prompts, arms, out)
        with_costs = config.cost and config.max_new_tokens > 1
        costs = _costs(config, pair.target, prompts, decoders, records) if with_costs else None
        rows = make_rows(records, arms, seed=config.seed, common=common)
    if costs is not None:
        write_costs(out / COSTS, costs)
    else:  # an earlier benchmark's costs do not belong to these results
        (out / COSTS).unlink(missing_ok=True)
    write_jsonl(out / RECORDS, records)
    write_jsonl(out / RESULTS, rows)  # last: its presence means the benchmark is complete
    (out / JOURNAL).unlink(missing_ok=True)
    if config.report:
        report.run(report.Config(results=str(out), run=config.checkpoint))
    if not quiet:
        print_summary(rows, costs, where=out)
    return BenchResult(rows=rows, records=records, costs=costs, out=out)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Use ``count`` CPU threads inside the block (0: as many as now), and the present setting afterwards."""
    saved = torch.get_num_threads()
    torch.set_num_threads(count or saved)
    try:
        yield
    finally:
        torch.set_num_threads(saved)


def _measure(config: Config, target: Target, prompts: Sequence[Prompt], arms: Sequence[Arm], out: Path) -> list[Record]:
    """Measure every prompt that the journal does not hold yet."""
    conditions = config.conditions()
    for prompt in prompts:  # refuse before anything is measured or written
        check_fits(target, prompt, conditions)
    journal = Journal(
        out / JOURNAL,
        settings=_settings_key(config, prompts),
        records_per_prompt={(p.set, p.id): len(arms) * len(p.turns) for p in prompts},
    )
    memory = PeakMemory(target.device)
    first = encode(target, opening(prompts[0]), chat=config.chat)
    for arm in arms:
        for _ in range(config.warmup):
            arm.run(first, request_id=0, max_new_tokens=min(config.max_new_tokens, WARMUP_TOKENS), ignore_eos=True)
    seen: dict[str, int] = {}
    start, limit = time.monotonic(), math.inf if config.max_minutes is None else 60 * config.max_minutes
    with meter(len(prompts), "measuring", unit="prompts", limit_s=limit) as advance:
        for index, prompt in enumerate(alternate(prompts)):
            seen[prompt.set] = seen.get(prompt.set, 0) + 1
            if (prompt.set, prompt.id) not in journal.done:
                # The next prompt will take about as long as those before.
                if index and (time.monotonic() - start) * (index + 1) / index > limit:
                    break
                shown = seen[prompt.set] <= config.viewer
                journal.add(measure_prompt(target, prompt, arms, conditions, index=index, memory=memory, shown=shown))
            advance()
    done = [journal.done.get((prompt.set, prompt.id), []) for prompt in prompts]
    return [record for records in done for record in records]


def _settings_key(config: Config, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What the figures of a prompt depend on: options, prompts and the drafter's weights."""
    weights = "" if config.checkpoint is None else read_config(resolve_checkpoint(config.checkpoint))["weights_sha256"]
    texts = json.dumps([asdict(prompt) for prompt in prompts], sort_keys=True)
    options = to_dict(replace(config, report=True, cost=True, out=None, max_minutes=None))
    return {"options": options, "weights": weights, "prompts": hashlib.sha256(texts.encode()).hexdigest()}


def _costs(
    config: Config, target: Target, prompts: Sequence[Prompt], arms: Sequence[DecoderArm], records: Sequence[Record]
) -> CostReport:
    """Measure v(T) at every arm's width and instrument a few prompts."""
    chosen = [encode(target, opening(p), chat=config.chat) for p in prompts[:COST_PROMPTS]]
    curve = verify_curve(
        arms[0].decoder.model, widths=[*WIDTHS, *(arm.plan.n_nodes for arm in arms if arm.plan is not None)]
    )
    rounds = round_costs(arms, chosen, max_new_tokens=min(COST_TOKENS, config.max_new_tokens))
    own = {arm.name: [r for r in records if r.arm == arm.name] for arm in arms}
    taus = {name: stats.acceptance(found)[0] for name, found in own.items()}
    speedups = {name: stats.speedup(found, own["ar"]).total for name, found in own.items()}
    return CostReport(curve=curve, rounds=rounds, predictions=predict(curve, rounds, taus, speedups))


def _common(config: Config, pair: Pair) -> dict[str, Any]:
    """Fields that all rows of one benchmark share."""
    target, drafter, sampling = pair.target, pair.drafter, config.sampling()
    return {
        # Whatever shows the name shows that lossless means relative to another model.
        "target": target.label,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "repeats": config.repeats,
        "settings": {
            "command": repeat("bench", config),
            "checkpoint": config.checkpoint,
            "max_new_tokens": config.max_new_tokens,
            "limit": config.limit,
            "ignore_eos": config.ignore_eos,
            "warmup": config.warmup,
            "seed": config.seed,
            "chat": config.chat,
            "batch_size": 1,
            "engine": config.engine,
            # Whoever compares two results must see whether the kernels and the fused step were really used.
            "kernels": kernels.why_not() or why_not(target.info.head_dim) or "used",
            "fused": (target.fast.reason or "used") if config.engine == "fast" else "not asked for",
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "threads": torch.get_num_threads(),
            "target_fingerprint": dict(target.fingerprint),
            "drafter": None if drafter is None else drafter.name,
            "training": {} if pair.folder is None else training_figures(pair.folder),
        },
        "provenance": collect(config=to_dict(config)),
    }


def make_rows(records: Sequence[Record], arms: Sequence[Arm], *, seed: int, common: dict[str, Any]) -> list[Row]:
    """One row per arm for every prompt set, followed by one per category where a set has several."""
    rows: list[Row] = []
    for name in dict.fromkeys(r.prompts for r in records):
        of_set = [r for r in records if r.prompts == name]
        categories = list(dict.fromkeys(r.category for r in of_set))
        groups = {"all": of_set}
        if len(categories) > 1:
            groups |= {category: [r for r in of_set if r.category == category] for category in categories}
        for category, group in groups.items():
            by_arm = {arm.name: [r for r in group if r.arm == arm.name] for arm in arms}
            for arm in arms:
                drafter = arm.drafter if isinstance(arm, DecoderArm) else None
                verifier = arm.verifier if isinstance(arm, DecoderArm) and drafter is not None else None
                rows.append(
                    Row(
                        arm=arm.name,
                        kind=arm.kind,
                        drafter=None if drafter is None else drafter.name,
                        tree=arm.tree,
                        verifier=verifier,
                        candidates=arm.candidates if isinstance(arm, DecoderArm) else None,
                        lossless=verifier is None or lossless(verifier, temperature=common["temperature"]),
                        drafter_parameters=0 if drafter is None else sum(p.numel() for p in drafter.parameters()),
                        prompts=name,
                        category=category,
                        **_figures(arm, by_arm, seed),
                        **common,
                    )
                )
    return rows


def _figures(arm: Arm, by_arm: dict[str, list[Record]], seed: int) -> dict[str, Any]:
    """The measured fields of one row."""
    own = by_arm[arm.name]
    over_ar = stats.speedup(own, by_arm["ar"], seed=seed)
    tau, tau_prompt_mean, by_depth = stats.acceptance(own)
    return {
        "n_prompts": len({r.id for r in own}),
        "n_turns": len(own),
        "new_tokens": sum(len(r.ids) for r in own),
        "n_steps": None if arm.kind == "hf" else sum(len(r.emitted) for r in own),
        "tau": tau,
        "tau_prompt_mean": tau_prompt_mean,
        "accept_by_depth": by_depth,
        "speedup_median": over_ar.median,
        "speedup_median_ci": over_ar.median_ci,
        "speedup_total": over_ar.total,
        "speedup_ci": over_ar.total_ci,
        "speedup_end_to_end": over_ar.end_to_end,
        "speedup_vs_hf": stats.speedup(own, by_arm["hf"], seed=seed).total if "hf" in by_arm else None,
        "tokens_per_s": stats.tokens_per_s(own),
        "ttft_s": stats.ttft(own),
        "match_rate": stats.match_rate(own),
        "tie_rate": stats.tie_rate(own),
        "peak_memory_bytes": max((r.peak_memory_bytes for r in own if r.peak_memory_bytes is not None), default=None),
    }
