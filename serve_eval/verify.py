"""task=verify: prove on a real target that drafting changes nothing.

Every output, greedy and sampled, of every plan, is compared token by token with what the target itself says when
everything is recomputed without cache, tree or drafter (``oracle.recompute``). The produced text is fed through one
uncached forward, which judges every position given the tokens before it. As long as all earlier tokens agree this is
the same as an uncached loop that steps token by token, so the first wrong token cannot hide; after a difference the
rest is still judged against what the target says next.

In fp32 a difference is a fault unless the oracle's two best scores there lie closer than 1e-4: rounding may then pick
either. Such ties are counted and shown.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from distill.config import opt, to_dict
from distill.decode import Decoder, Engine, Generation
from distill.drafters.base import Drafter
from distill.errors import UserError
from distill.export import collect
from distill.registry import drafter_class
from distill.sampling import Sampling
from distill.target import Target, TargetConfig
from distill.tree import USUAL_DEPTH, Plan, PlanConfig, make_plan
from distill.vocab import choose_vocab
from serve_eval.arms import count_ids, plan_label
from serve_eval.checkpoint import AUTO, load_pair
from serve_eval.measure import TURN_STRIDE, encode, opening
from serve_eval.oracle import TIE_GAP, recompute
from serve_eval.progress import meter
from serve_eval.prompts import load_prompts
from serve_eval.replay import ReplayDrafter
from serve_eval.rows import SCHEMA_VERSION, write_text

PLANS = (
    PlanConfig(name="chain", length=4),
    PlanConfig(name="static", paths=[[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]),
    PlanConfig(name="dynamic", top_k=3, depth=4, total=10),
)


@dataclass(kw_only=True)
class Config:
    """Options of task=verify."""

    checkpoint: str | None = opt(None, "run or export folder whose drafter is checked; null: an untrained one")
    drafter: dict[str, Any] = opt({}, "instead of a checkpoint: a drafter without weights (prompt_lookup, early_exit)")
    target: TargetConfig = field(
        default_factory=lambda: TargetConfig(name=AUTO, dtype="float32"),
        metadata={"help": "target model; name auto takes the checkpoint's own, or smollm2"},
    )
    prompts: list[str] = opt(["mtbench"], "prompt sets: mtbench, humaneval, or JSON-lines files")
    limit: int | None = opt(4, "prompts per set, spread evenly over its categories; null takes all")
    trees: list[PlanConfig] = opt([], "plans to check; empty: a chain, a static and a dynamic tree, if the drafter can")
    engine: Engine = opt("fast", "fast, or eager: the target's own forward; the oracle always recomputes with that")
    temperatures: list[float] = opt([0.0, 0.7, 1.0], "temperatures to check; 0 is greedy")
    top_k: int = opt(50, "top-k of one further setting at the highest temperature; 0 leaves the filter out")
    top_p: float = opt(0.9, "top-p of that setting; 1 leaves the filter out")
    seed: int = opt(0, "keys the sampling noise")
    max_new_tokens: int = opt(32, "generated tokens per output at most")
    out: str = opt("runs/verify", "folder for verify.json")

    def settings(self) -> list[Sampling]:
        """Every sampling setting to check."""
        if not self.temperatures:
            raise UserError("temperatures must hold at least one number, got none; 0 is greedy")
        found = [Sampling(temperature=t, seed=self.seed) for t in self.temperatures]
        hottest = max(self.temperatures)
        if hottest > 0 and (self.top_k, self.top_p) != (0, 1):
            found.append(Sampling(temperature=hottest, top_k=self.top_k, top_p=self.top_p, seed=self.seed))
        return found


@dataclass(kw_only=True)
class Check:
    """One drafter with one plan and one sampling setting, over all prompts.

    Attributes:
        drafter: name, or "none" for plain decoding.
        tree: label of the plan.
        outputs, tokens, passes: how much was checked; ``accepted`` tokens of it were drafted.
        ties: differences where the oracle's two best scores lie closer than the tie gap.
        faults: every other difference, and every output of a wrong length.
        examples: where the first few of them are.
    """

    drafter: str
    tree: str
    temperature: float
    top_k: int
    top_p: float
    outputs: int = 0
    tokens: int = 0
    passes: int = 0
    accepted: int = 0
    ties: int = 0
    faults: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, drafter: str, tree: str, sampling: Sampling) -> "Check":
        """Return a check with nothing counted yet."""
        s = sampling
        return cls(drafter=drafter, tree=tree, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p)


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """All checks, and the file they were written to."""

    checks: list[Check]
    path: Path

    @property
    def faults(self) -> int:
        """Differences that rounding does not explain."""
        return sum(check.faults for check in self.checks)


def run(config: Config) -> VerifyResult:
    """Check, write ``verify.json``, print a table.

    Raises:
        SystemExit: code 1, after everything is written, when there was a fault.
        UserError: bad options, prompts or checkpoint.
    """
    settings = config.settings()
    prompts = load_prompts(config.prompts, limit=config.limit)
    target_config = config.target
    if config.checkpoint is None and target_config.name == AUTO:
        target_config = TargetConfig(**{**to_dict(target_config), "name": "smollm2"})
    pair = load_pair(config.checkpoint, target_config, drafter=config.drafter)
    target = pair.target
    replay = ReplayDrafter(target)
    learnt = pair.drafter or untrained(target)
    ids = [encode(target, opening(prompt), chat=True) for prompt in prompts]
    checks: dict[tuple[str, str, Sampling], Check] = {}
    plans = {s: [(d, plan) for d in (learnt, replay) for plan in _plans(config, learnt, d, s)] for s in settings}
    work = [(sampling, index) for sampling in settings for index in range(len(ids))]
    console = Console()
    limit = config.max_new_tokens
    with meter(len(work), "verifying", unit="prompts") as advance:
        for sampling, index in work:
            outputs = _outputs(target, plans[sampling], ids[index], sampling, index * TURN_STRIDE, limit, config.engine)
            for drafter, plan, out in outputs:
                key = ("none" if drafter is None else drafter.name, "plain" if plan is None else plan_label(plan))
                check = checks.setdefault((*key, sampling), Check.of(*key, sampling))
                judge(check, target, ids[index], out, sampling=sampling, limit=limit, where=prompts[index].id)
            advance()
    result = VerifyResult(checks=list(checks.values()), path=Path(config.out) / "verify.json")
    _write(result, target, config)
    _print(result, console)
    if result.faults:
        raise SystemExit(1)
    return result


def untrained(target: Target, *, seed: int = 0) -> Drafter:
    """A randomly initialised EAGLE-3: nearly everything it drafts is rejected."""
    cls: Any = drafter_class("eagle3")
    size = min(4096, target.info.vocab_size)
    vocab, _ = choose_vocab(torch.ones(target.info.vocab_size), size, always=target.info.eos_ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = cls(cls.Config(draft_vocab_size=size), target, vocab)
    return drafter.to(device=target.device, dtype=target.dtype).eval()


def _plans(config: Config, learnt: Drafter, drafter: Drafter, sampling: Sampling) -> list[Plan]:
    """The plans a drafter is checked with: those asked for, or as much of ``PLANS`` as it can propose."""
    trees = config.trees or [tree for tree in map(partial(_within, drafter), PLANS) if tree is not None]
    rates, deepest = learnt.calibration, drafter.max_depth
    return [make_plan(tree, calibration=rates, greedy=sampling.greedy, deepest=deepest) for tree in trees]


def _within(drafter: Drafter, tree: PlanConfig) -> PlanConfig | None:
    """A plan no deeper than the drafter can propose; None for a dynamic one it has no confidences for."""
    if tree.name == "dynamic" and not drafter.soft:
        return None
    if drafter.max_depth is None:
        return tree
    if tree.name == "chain":
        return replace(tree, length=min(tree.length, drafter.max_depth))
    if tree.name == "static":
        return replace(tree, paths=[path for path in tree.paths if len(path) <= drafter.max_depth])
    depth, k = min(tree.depth or USUAL_DEPTH, drafter.max_depth), tree.top_k
    return replace(tree, depth=depth, total=min(tree.total, 1 + k + (depth - 1) * k * k))


def _outputs(
    target: Target,
    plans: Sequence[tuple[Drafter, Plan]],
    prompt: list[int],
    sampling: Sampling,
    request_id: int,
    limit: int,
    engine: Engine,
) -> Iterator[tuple[Drafter | None, Plan | None, Generation]]:
    """Decode one prompt plainly and with every pair of drafter and plan."""

    def generate(decoder: Decoder) -> Generation:
        return decoder.generate([prompt], max_new_tokens=limit, request_ids=[request_id])[0]

    plain = generate(Decoder(target, sampling=sampling, engine=engine))
    yield None, None, plain
    for drafter, plan in plans:
        if isinstance(drafter, ReplayDrafter):
            drafter.script = prompt + plain.ids
        yield drafter, plan, generate(Decoder(target, drafter, plan=plan, sampling=sampling, engine=engine))


def judge(
    check: Check, target: Target, prompt: list[int], out: Generation, *, sampling: Sampling, limit: int, where: str
) -> None:
    """Compare one output with the oracle and add what was found to ``check``."""
    choices = recompute(target, prompt, out.ids, sampling=sampling, request_id=out.request_id)
    check.outputs += 1
    check.tokens += len(out.ids)
    check.passes += len(out.steps)
    check.accepted += sum(step.accepted for step in out.steps)
    eos = target.info.eos_ids
    complete = len(out.ids) == limit or (bool(out.ids) and out.ids[-1] in eos)
    if not complete or count_ids(out.ids, eos, limit) != out.ids:
        check.faults += 1
        check.examples.append({"prompt": where, "fault": f"length {len(out.ids)} does not fit limit and end of text"})
    for index, (ours, oracle, gap) in enumerate(zip(out.ids, choices.ids, choices.gaps, strict=True)):
        if ours == oracle:
            continue
        tie = gap < TIE_GAP
        check.ties += tie
        check.faults += not tie
        if len(check.examples) < 5:
            check.examples.append(
                {"prompt": where, "token": index, "got": ours, "oracle": oracle, "gap": gap, "tie": tie}
            )


def _write(result: VerifyResult, target: Target, config: Config) -> None:
    record = {
        "schema_version": SCHEMA_VERSION,
        "target": target.label,
        "target_fingerprint": dict(target.fingerprint),
        "dtype": str(target.dtype).removeprefix("torch."),
        "tie_gap": TIE_GAP,
        "outputs": sum(c.outputs for c in result.checks),
        "tokens": sum(c.tokens for c in result.checks),
        "ties": sum(c.ties for c in result.checks),
        "faults": result.faults,
        "checks": [asdict(check) for check in result.checks],
        "provenance": collect(config=to_dict(config)),
    }
    write_text(result.path, json.dumps(record, indent=1) + "\n")


def _print(result: VerifyResult, console: Console) -> None:
    """One row per drafter and plan, all sampling settings together; the file has them apart."""
    title = "compared with an uncached recomputation"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("drafter", no_wrap=True)
    table.add_column("plan", no_wrap=True)
    for name in ("outputs", "tokens", "greedy tau", "sampled tau", "ties", "faults"):
        table.add_column(name, justify="right")
    for drafter, tree in dict.fromkeys((c.drafter, c.tree) for c in result.checks):
        own = [c for c in result.checks if (c.drafter, c.tree) == (drafter, tree)]
        greedy, sampled = [c for c in own if c.temperature == 0], [c for c in own if c.temperature > 0]
        sums = [sum(getattr(c, name) for c in own) for name in ("outputs", "tokens", "ties", "faults")]
        cells = [str(sums[0]), str(sums[1]), _tau(greedy), _tau(sampled), str(sums[2]), str(sums[3])]
        table.add_row(drafter, tree, *cells, style="bold red" if sums[3] else None)
    console.print(table)
    tokens, ties = sum(c.tokens for c in result.checks), sum(c.ties for c in result.checks)
    verdict = f"{result.faults} FAULTS" if result.faults else "no faults"
    console.print(f"{tokens} tokens checked: {verdict}, {ties} ties (gap below {TIE_GAP:g})", highlight=False)
    for check in result.checks:
        for example in check.examples[:3]:
            where = f"{check.drafter} {check.tree} T={check.temperature:g}"
            console.print(f"  {where}: {example}", markup=False, highlight=False)
    console.print(str(result.path), highlight=False)


def _tau(checks: Sequence[Check]) -> str:
    """Tokens per pass; the first token of an output comes from the prefill."""
    passes = sum(c.passes for c in checks)
    return f"{sum(c.tokens - c.outputs for c in checks) / passes:.2f}" if passes else "-"
