"""task=bench: measure decoding with and without the drafter, every arm under the same conditions.

The protocol: one process, batch 1, arms interleaved prompt by prompt in rotating order after a warm-up of each, clocks
that start when the first token is on the host, ids counted identically. A second turn is asked about the ``ar`` arm's
answer, so all arms always see the same prompt.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from distill.config import opt, to_dict
from distill.errors import UserError
from distill.export.provenance import collect
from distill.sampling import Sampling
from distill.target import Target, TargetConfig
from distill.tree import PlanConfig, make_plan
from serve_eval import stats
from serve_eval.arms import Arm, ArmRun, DecoderArm, PeakMemory, TransformersArm, rotation
from serve_eval.checkpoint import Pair, auto_target, load_pair
from serve_eval.cost import WIDTHS, CostReport, predict, round_costs, verify_curve, write_costs
from serve_eval.journal import Journal
from serve_eval.oracle import recompute
from serve_eval.pieces import pieces
from serve_eval.prompts import Prompt, load_prompts
from serve_eval.rows import Record, Row, write_jsonl
from serve_eval.summary import print_summary

log = logging.getLogger(__name__)

RESULTS, RECORDS, COSTS, REPORT = "results.jsonl", "records.jsonl", "cost.json", "report.html"
WARMUP_TOKENS = 16
COST_PROMPTS, COST_TOKENS = 3, 48
TURN_STRIDE = 64
"""Request ids of one prompt's turns: prompt index * stride + turn; more turns than this are refused."""


@dataclass(kw_only=True)
class Config:
    """Options of task=bench."""

    checkpoint: str | None = opt(None, "run folder or export folder of the drafter")
    target: TargetConfig = field(
        default_factory=auto_target, metadata={"help": "target model; name auto takes the checkpoint's own"}
    )
    prompts: list[str] = opt(["mtbench"], "prompt sets: mtbench, humaneval, or JSON-lines files")
    limit: int | None = opt(None, "prompts per set, spread evenly over its categories; null takes all")
    tree: PlanConfig = field(default_factory=PlanConfig, metadata={"help": "shape of the proposals"})
    trees: list[PlanConfig] = opt([], "further plans, each measured as its own arm, e.g. [{name:chain,length:3}]")
    verifier: str = opt("match", "verification rule: match")
    temperature: float = opt(0.0, "sampling temperature; 0 is greedy")
    top_k: int = opt(0, "sample among the k most likely tokens; 0 switches it off")
    top_p: float = opt(1.0, "sample among the most likely tokens of this mass; 1 switches it off")
    seed: int = opt(0, "keys the sampling noise and the bootstrap")
    max_new_tokens: int = opt(128, "generated tokens per turn at most")
    ignore_eos: bool = opt(False, "decode past the end of text, so that all lengths are equal (pure speed runs)")
    repeats: int = opt(3, "measurements of every turn; its time is their median")
    warmup: int = opt(2, "unmeasured runs of every arm before the first measurement")
    hf: bool = opt(True, "measure transformers generate as a further arm")
    cost: bool = opt(True, "measure the verify-cost curve and where a round's time goes")
    chat: bool = opt(True, "put prompts through the chat template; false feeds plain text (base models)")
    viewer: int = opt(3, "prompts per set whose decoded text the report shows")
    threads: int = opt(0, "CPU threads; 0 leaves the library's choice")
    out: str | None = opt(None, "folder for the results; null makes a new runs/<date>-bench")
    report: bool = opt(True, "write report.html beside the results")

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("repeats", 1), ("warmup", 0), ("viewer", 0), ("threads", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} must be at least {least}, got {getattr(self, name)}")
        self.sampling()

    def sampling(self) -> Sampling:
        """The sampling settings as one record; refuses impossible ones."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What a benchmark measured, and where it was written."""

    rows: list[Row]
    records: list[Record]
    costs: CostReport | None
    out: Path


def run(config: Config, *, progress: Callable[[int, int], None] | None = None) -> BenchResult:
    """Measure, write ``results.jsonl``, ``records.jsonl``, ``cost.json`` and the report, print a summary.

    Args:
        config: all options.
        progress: called with (finished prompts, all prompts); None shows a progress bar.

    Raises:
        UserError: bad options, prompts or checkpoint; nothing is written then.
    """
    if config.checkpoint is None:
        raise UserError("checkpoint must be a run folder or an export folder, got none; pass checkpoint=DIR")
    prompts = load_prompts(config.prompts, limit=config.limit)
    plans = [make_plan(tree) for tree in [config.tree, *config.trees]]
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads or threads)
    try:
        pair = load_pair(config.checkpoint, config.target)
        decoders = [DecoderArm(pair.target, sampling=config.sampling())] + [
            DecoderArm(
                pair.target, drafter=pair.drafter, plan=plan, sampling=config.sampling(), verifier=config.verifier
            )
            for plan in plans
        ]
        arms: list[Arm] = [*decoders, *([TransformersArm(pair.target, sampling=config.sampling())] if config.hf else [])]
        if len({arm.name for arm in arms}) < len(arms):
            raise UserError(f"tree and trees must be different plans, got {[arm.name for arm in arms]}")
        out = Path(config.out or f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}-bench")
        records = _measure_all(config, pair.target, prompts, arms, out, progress)
        costs = _measure_costs(config, pair.target, prompts, decoders, records) if config.cost else None
        rows = make_rows(records, arms, config, common=_common(config, pair))
    finally:
        torch.set_num_threads(threads)
    write_jsonl(out / RECORDS, records)
    if costs is not None:
        write_costs(out / COSTS, costs)
    write_jsonl(out / RESULTS, rows)  # last: its presence means the benchmark is complete
    (out / _JOURNAL).unlink(missing_ok=True)
    if config.report:
        from serve_eval import report

        report.run(report.Config(results=str(out), run=str(config.checkpoint)))
    print_summary(rows, costs, where=out)
    return BenchResult(rows=rows, records=records, costs=costs, out=out)


_JOURNAL = "records.part.jsonl"


def _measure_all(
    config: Config,
    target: Target,
    prompts: Sequence[Prompt],
    arms: Sequence[Arm],
    out: Path,
    progress: Callable[[int, int], None] | None,
) -> list[Record]:
    """Measure every prompt that the journal does not hold yet, then judge equality with ``ar``."""
    for prompt in prompts:  # refuse before anything is measured or written
        _check_length(target, prompt, encode(target, _messages(prompt, 0), chat=config.chat), config)
    journal = Journal(
        out / _JOURNAL,
        settings=to_dict(replace(config, report=True, cost=True)),
        records_per_prompt={(p.set, p.id): len(arms) * len(p.turns) for p in prompts},
    )
    memory = PeakMemory(target.device)
    first = encode(target, _messages(prompts[0], 0), chat=config.chat)
    for arm in arms:
        for _ in range(config.warmup):
            arm.run(first, request_id=0, max_new_tokens=min(config.max_new_tokens, WARMUP_TOKENS), ignore_eos=True)
    seen: dict[str, int] = {}
    with _bar(len(prompts), hidden=progress is not None) as advance:
        for index, prompt in enumerate(prompts):
            seen[prompt.set] = seen.get(prompt.set, 0) + 1
            if (prompt.set, prompt.id) not in journal.done:
                shown = seen[prompt.set] <= config.viewer
                journal.add(measure_prompt(target, prompt, arms, config, index=index, memory=memory, shown=shown))
            advance()
            if progress is not None:
                progress(index + 1, len(prompts))
    records = [record for prompt in prompts for record in journal.done[prompt.set, prompt.id]]
    return records


def measure_prompt(
    target: Target,
    prompt: Prompt,
    arms: Sequence[Arm],
    config: Config,
    *,
    index: int,
    memory: PeakMemory,
    shown: bool = False,
) -> list[Record]:
    """Let every arm answer every turn of one prompt, ``repeats`` times, in rotating order.

    Args:
        target: encodes and decodes text, and judges where arms differ.
        prompt: the conversation.
        arms: the first must be ``ar``: its answers are the history of later turns.
        config: repeats, limits, sampling.
        index: number of the prompt; decides the rotation and the noise.
        memory: the meter.
        shown: keep the text of every token for the report.
    """
    messages = _messages(prompt, 0)
    records: list[Record] = []
    for turn in range(len(prompt.turns)):
        if turn:
            messages.append({"role": "user", "content": prompt.turns[turn]})
        ids = encode(target, messages, chat=config.chat)
        _check_length(target, prompt, ids, config)
        request_id = index * TURN_STRIDE + turn
        runs: dict[str, list[ArmRun]] = {arm.name: [] for arm in arms}
        peaks: dict[str, list[int]] = {arm.name: [] for arm in arms}
        for repeat in range(config.repeats):
            for arm in rotation(arms, index + turn + repeat):
                memory.start()
                runs[arm.name].append(
                    arm.run(
                        ids, request_id=request_id, max_new_tokens=config.max_new_tokens, ignore_eos=config.ignore_eos
                    )
                )
                if (peak := memory.stop()) is not None:
                    peaks[arm.name].append(peak)
        base = runs[arms[0].name][0].ids
        for arm in arms:
            record = _record(prompt, turn, ids, arm, runs[arm.name], peaks[arm.name])
            _compare(record, arm, base, target, ids, config, request_id)
            if shown and arm.kind == "spec":
                record.question = prompt.turns[turn]
                record.pieces = pieces(record.ids, target.decode)
            records.append(record)
        eos = target.info.eos_ids
        messages.append({"role": "assistant", "content": target.decode([i for i in base if i not in eos])})
    return records


def _record(
    prompt: Prompt, turn: int, ids: list[int], arm: Arm, runs: Sequence[ArmRun], peaks: Sequence[int]
) -> Record:
    steps = runs[0].steps
    return Record(
        arm=arm.name,
        prompts=prompt.set,
        category=prompt.category,
        id=prompt.id,
        turn=turn,
        prompt_tokens=len(ids),
        ids=runs[0].ids,
        emitted=[len(step.tokens) for step in steps],
        accepted=[step.accepted for step in steps],
        offered=[step.offered for step in steps],
        ttft_s=[run.ttft_s for run in runs],
        decode_s=[run.decode_s for run in runs],
        peak_memory_bytes=max(peaks, default=None),
    )


def _compare(
    record: Record, arm: Arm, base: list[int], target: Target, prompt: list[int], config: Config, request_id: int
) -> None:
    """Note whether an arm produced the ``ar`` arm's ids and, where not, how close the target's decision was.

    Transformers draws its own random numbers, so sampled runs of ``hf`` are not compared.
    """
    if arm.kind == "hf" and config.temperature > 0:
        return
    record.matches = record.ids == base
    if record.matches:
        return
    pairs = enumerate(zip(record.ids, base, strict=False))
    at = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(record.ids), len(base)))
    judged = recompute(target, prompt, base[: at + 1], sampling=config.sampling(), request_id=request_id)
    record.first_difference = at
    gap = judged.gaps[at] if at < len(judged.gaps) else float("inf")
    record.difference_gap = gap if gap < float("inf") else None


def _messages(prompt: Prompt, turn: int) -> list[dict[str, str]]:
    return [*prompt.history, {"role": "user", "content": prompt.turns[turn]}]


def encode(target: Target, messages: list[dict[str, str]], *, chat: bool) -> list[int]:
    """Return the prompt's token ids: through the chat template, or the plain text of all messages.

    Raises:
        UserError: plain text was asked of a target without a tokenizer, or a template of one without it.
    """
    if chat:
        return target.encode_chat(messages, add_generation_prompt=True)
    if target.tokenizer is None:
        raise UserError(f"target {target.info.name!r} must have a tokenizer for text prompts, got none")
    return list(target.tokenizer("\n".join(m["content"] for m in messages))["input_ids"])


def _check_length(target: Target, prompt: Prompt, ids: list[int], config: Config) -> None:
    limit = target.info.max_positions
    if len(ids) + config.max_new_tokens > limit:
        raise UserError(
            f"prompt {prompt.id!r} of {prompt.set} must fit the model's {limit} positions, got {len(ids)} tokens plus "
            f"max_new_tokens={config.max_new_tokens}; lower max_new_tokens or shorten the prompt"
        )
    if len(prompt.turns) > TURN_STRIDE:
        raise UserError(f"prompt {prompt.id!r} of {prompt.set} must have at most {TURN_STRIDE} turns")


def _measure_costs(
    config: Config, target: Target, prompts: Sequence[Prompt], arms: Sequence[DecoderArm], records: Sequence[Record]
) -> CostReport | None:
    """Measure v(T) and instrument a few prompts."""
    if config.max_new_tokens < 2:
        return None
    chosen = [encode(target, _messages(p, 0), chat=config.chat) for p in prompts[:COST_PROMPTS]]
    widths = sorted({*WIDTHS, *(arm.plan.n_nodes for arm in arms if arm.plan is not None)})
    curve = verify_curve(target, widths=widths)
    rounds = round_costs(arms, chosen, max_new_tokens=min(COST_TOKENS, config.max_new_tokens))
    taus = {arm.name: stats.acceptance([r for r in records if r.arm == arm.name])[0] for arm in arms}
    return CostReport(curve=curve, rounds=rounds, predictions=predict(curve, rounds, taus))


def _common(config: Config, pair: Pair) -> dict[str, Any]:
    """Fields that all rows of one benchmark share."""
    target, drafter = pair.target, pair.drafter
    sampling = config.sampling()
    return {
        "target": target.info.name,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "repeats": config.repeats,
        "settings": {
            "checkpoint": config.checkpoint,
            "max_new_tokens": config.max_new_tokens,
            "limit": config.limit,
            "ignore_eos": config.ignore_eos,
            "warmup": config.warmup,
            "seed": config.seed,
            "chat": config.chat,
            "batch_size": 1,
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "threads": torch.get_num_threads(),
            "target_fingerprint": dict(target.fingerprint),
            "drafter": None if drafter is None else drafter.name,
            "drafter_parameters": 0 if drafter is None else sum(p.numel() for p in drafter.parameters()),
        },
        "provenance": collect(config=to_dict(config)),
    }


def make_rows(
    records: Sequence[Record], arms: Sequence[Arm], config: Config, *, common: dict[str, Any]
) -> list[Row]:
    """One row per arm for every prompt set, followed by one per category where a set has several."""
    rows: list[Row] = []
    for name in dict.fromkeys(r.prompts for r in records):
        of_set = [r for r in records if r.prompts == name]
        categories = list(dict.fromkeys(r.category for r in of_set))
        groups = {"all": of_set}
        if len(categories) > 1:
            groups |= {category: [r for r in of_set if r.category == category] for category in categories}
        for category, group in groups.items():
            rows += [_row(group, arm, config, name, category, common) for arm in arms]
    return rows


def _row(
    group: Sequence[Record], arm: Arm, config: Config, name: str, category: str, common: dict[str, Any]
) -> Row:
    records = {r.arm: [x for x in group if x.arm == r.arm] for r in group}
    own = records[arm.name]
    over_ar = stats.speedup(own, records["ar"], seed=config.seed)
    over_hf = stats.speedup(own, records["hf"], seed=config.seed).total if "hf" in records else None
    tau, tau_prompt_mean, by_depth = stats.acceptance(own)
    peaks = [r.peak_memory_bytes for r in own if r.peak_memory_bytes is not None]
    fields = dict(common)
    return Row(
        arm=arm.name,
        kind=arm.kind,
        drafter=fields["settings"]["drafter"] if arm.kind == "spec" else None,
        tree=arm.tree,
        verifier=config.verifier if arm.kind == "spec" else None,
        prompts=name,
        category=category,
        n_prompts=len({r.id for r in own}),
        n_turns=len(own),
        new_tokens=sum(len(r.ids) for r in own),
        n_steps=None if arm.kind == "hf" else sum(len(r.emitted) for r in own),
        tau=tau,
        tau_prompt_mean=tau_prompt_mean,
        accept_by_depth=by_depth,
        speedup_median=over_ar.median,
        speedup_median_ci=over_ar.median_ci,
        speedup_total=over_ar.total,
        speedup_ci=over_ar.total_ci,
        speedup_end_to_end=over_ar.end_to_end,
        speedup_vs_hf=over_hf,
        tokens_per_s=stats.tokens_per_s(own),
        ttft_s=stats.ttft(own),
        match_rate=stats.match_rate(own),
        peak_memory_bytes=max(peaks, default=None),
        **fields,
    )


class _bar:  # noqa: N801 - used as a context manager
    """A progress bar with the time left; silent when the caller shows its own."""

    def __init__(self, total: int, *, hidden: bool):
        columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TextColumn("prompts"))
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), disable=hidden)
        self._task = self._progress.add_task("measuring", total=total)

    def __enter__(self) -> Callable[[], None]:
        self._progress.start()
        return lambda: self._progress.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


