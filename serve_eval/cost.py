"""Where the time of a decoding round goes, and what speedup that explains.

Two measurements: the verify-cost curve v(T) of the target alone, and instrumented runs of the decode loop that time
every target and drafter call. On CUDA the instrumented runs synchronise around each call, so they are slower than
the benchmark and never enter its speeds. Formulas: ``docs/metrics.md``.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from distill.attention import tree_mask
from distill.decode import StepRecord
from distill.errors import UserError
from distill.kv_cache import KVCache
from distill.target import FastTarget, Target
from serve_eval.arms import DecoderArm, now, rotation
from serve_eval.rows import SCHEMA_VERSION, write_text

WIDTHS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class VerifyCurve:
    """Cost of one target pass over T tokens, behind ``context`` cached ones.

    Attributes:
        widths: the T's.
        seconds: median time of a pass over T tokens, head and argmax included.
        ratio: v(T), median over rounds of the time at T over the time at T = 1 measured right before it.
    """

    context: int
    widths: list[int]
    seconds: list[float]
    ratio: list[float]


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """Mean seconds per verification round of one arm, instrumented.

    Attributes:
        nodes: tokens verified per round (1 for plain decoding).
        tau: tokens emitted per round in these runs.
        target_s: target forward and head.
        draft_s: growing the proposal: the drafter's steps and the choice of candidates.
        extend_s: the drafter taking in the committed tokens.
        host_s: everything else (tree bookkeeping, choosing tokens, cache commits, Python).
    """

    arm: str
    rounds: int
    nodes: int
    tau: float
    target_s: float
    draft_s: float
    extend_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        """Seconds per round."""
        return self.target_s + self.draft_s + self.extend_s + self.host_s


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Costs of a round in units of one autoregressive step, and the speedup tau / (v + draft + host) they imply.

    ``tau`` and ``measured`` (the benchmark's ratio of totals) are over all prompts of the benchmark.
    """

    arm: str
    tau: float
    v: float
    draft: float
    host: float
    speedup: float
    measured: float | None


@dataclass(frozen=True, kw_only=True)
class CostReport:
    """What ``cost.json`` holds."""

    curve: VerifyCurve
    rounds: list[RoundCost]
    predictions: list[Prediction]


@torch.inference_mode()
def verify_curve(
    target: Target | FastTarget, *, context: int = 256, rounds: int = 7, widths: Sequence[int] = WIDTHS, seed: int = 0
) -> VerifyCurve:
    """Measure v(T), every width interleaved with T = 1 so that drift cancels.

    Args:
        target: the frozen target, or its fast twin.
        context: cached tokens the pass attends to.
        rounds: measurements per width; two warm-up rounds are not counted.
        widths: token counts; 1 is added where missing.
        seed: of the random token ids (their values do not matter for the cost).
    """
    widths = sorted({1, *widths})
    context = min(context, target.info.max_positions - widths[-1])
    cache = target.new_cache(1, context + widths[-1])
    generator = torch.Generator().manual_seed(seed)
    ids_1L = torch.randint(target.info.vocab_size, (1, context + widths[-1]), generator=generator).to(target.device)
    _chain_pass(target, cache, ids_1L[:, :context])
    cache.advance(torch.tensor([context], device=target.device), longest=context)
    tail_1N = ids_1L[:, context:]
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    ratios: dict[int, list[float]] = {width: [] for width in widths}
    for index in range(rounds + 2):
        for width in widths:
            single = _timed(target, lambda: _chain_pass(target, cache, tail_1N[:, :1]))
            wide = _timed(target, lambda w=width: _chain_pass(target, cache, tail_1N[:, :w]))  # type: ignore[misc]
            if index >= 2:
                seconds[width].append(wide)
                ratios[width].append(wide / single)
    return VerifyCurve(
        context=context,
        widths=list(widths),
        seconds=[median(seconds[w]) for w in widths],
        ratio=[1.0 if w == 1 else median(ratios[w]) for w in widths],
    )


@torch.inference_mode()
def probe(target: Target | FastTarget) -> None:
    """One pass over one token, for choosing a number of threads."""
    _chain_pass(target, target.new_cache(1, 2), torch.zeros(1, 1, dtype=torch.long, device=target.device))


def _chain_pass(target: Target | FastTarget, cache: KVCache, ids_BN: torch.Tensor) -> list[int]:
    """One pass over a chain hanging below the committed tokens, its choices read back to the host as decoding does."""
    count = ids_BN.shape[1]
    depths_BN = torch.arange(count, device=ids_BN.device)[None]
    ancestors_BNN = torch.ones(1, count, count, dtype=torch.bool, device=ids_BN.device).tril()
    view = cache.begin(count)
    mask = tree_mask(
        lengths_B=cache.lengths_B,
        ancestors_BNM=ancestors_BNN,
        depths_BM=depths_BN,
        view=view,
        window=target.info.sliding_window,
    )
    output = target.forward(ids_BN, positions_BL=cache.lengths_B[:, None] + depths_BN, mask=mask, cache=cache)
    return target.logits(output.last_BLD).float().argmax(-1)[0].tolist()


def _timed(target: Target | FastTarget, call: Callable[[], Any]) -> float:
    start = now(target.device)
    call()
    return now(target.device) - start


class _Stopwatch:
    """Sums the time spent in wrapped calls; a call inside another counts for the outer one only."""

    def __init__(self, device: torch.device | str):
        self._device = device
        self._busy = False
        self.seconds: dict[str, float] = {}

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._busy:
                return function(*args, **kwargs)
            self._busy = True
            start = now(self._device)
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + now(self._device) - start
                self._busy = False

        return timed


@contextlib.contextmanager
def _instrumented(arm: DecoderArm) -> Iterator[_Stopwatch]:
    """Time the target's and the drafter's calls by shadowing the methods on these two objects only."""
    decoder = arm.decoder
    watch = _Stopwatch(decoder.target.device)
    shadows: list[tuple[Any, str, str]] = [(decoder.model, "forward", "target"), (decoder.model, "logits", "target")]
    if decoder.drafter is not None:
        shadows += [(decoder.drafting, "propose", "draft"), (decoder.drafter, "extend", "extend")]
    before = [vars(owner).get(method) for owner, method, _ in shadows]
    for owner, method, name in shadows:
        setattr(owner, method, watch.wrap(name, getattr(owner, method)))
    try:
        yield watch
    finally:
        for (owner, method, _), own in zip(shadows, before, strict=True):
            delattr(owner, method) if own is None else setattr(owner, method, own)


def round_costs(arms: Sequence[DecoderArm], prompts: Sequence[list[int]], *, max_new_tokens: int) -> list[RoundCost]:
    """Run each arm over a few prompts, instrumented and interleaved, and average its rounds.

    Raises:
        UserError: the prompts end before a single round.
    """
    sums = {arm.name: dict.fromkeys(("target", "draft", "extend", "total"), 0.0) for arm in arms}
    passes: dict[str, list[StepRecord]] = {arm.name: [] for arm in arms}
    for index, prompt in enumerate(prompts):
        for arm in rotation(arms, index):
            with _instrumented(arm) as watch:

                def on_step(_row: int, record: StepRecord | None, _ids: list[int], watch: _Stopwatch = watch) -> None:
                    if record is None:  # the prefill's token: only what follows belongs to rounds
                        watch.seconds.clear()

                (out,) = arm.decoder.generate(
                    [prompt], max_new_tokens=max_new_tokens, request_ids=[index], ignore_eos=True, on_step=on_step
                )
            for name, value in (watch.seconds | {"total": out.decode_s}).items():
                sums[arm.name][name] += value
            passes[arm.name] += out.steps
    if not all(passes.values()):
        raise UserError(f"max_new_tokens must be at least 2 to measure costs, got {max_new_tokens}; raise it.")
    return [_mean_round(arm, sums[arm.name], passes[arm.name]) for arm in arms]


def _mean_round(arm: DecoderArm, seconds: dict[str, float], passes: list[StepRecord]) -> RoundCost:
    n = len(passes)
    known = seconds["target"] + seconds["draft"] + seconds["extend"]
    return RoundCost(
        arm=arm.name,
        rounds=n,
        nodes=1 if arm.plan is None else arm.plan.n_nodes,
        tau=sum(len(step.tokens) for step in passes) / n,
        target_s=seconds["target"] / n,
        draft_s=seconds["draft"] / n,
        extend_s=seconds["extend"] / n,
        host_s=max(seconds["total"] - known, 0.0) / n,
    )


def predict(
    curve: VerifyCurve,
    rounds: Sequence[RoundCost],
    tau_by_arm: Mapping[str, float],
    measured_by_arm: Mapping[str, float | None],
) -> list[Prediction]:
    """Predict each speculative arm's speedup from its parts: S = tau / (v + draft + host).

    The unit is one autoregressive step of the same loop. The target's share comes from the curve, measured apart, so
    that agreement with the measured speedup means something.

    Args:
        curve: must hold every arm's width.
        rounds: instrumented costs, the ``ar`` arm among them.
        tau_by_arm: acceptance lengths measured in the benchmark.
        measured_by_arm: speedups measured there, to stand beside the predicted ones.
    """
    step_s = next(r for r in rounds if r.arm == "ar").total_s
    predictions = []
    for cost in rounds:
        if cost.arm == "ar":
            continue
        v = curve.seconds[curve.widths.index(cost.nodes)] / step_s
        draft, host = (cost.draft_s + cost.extend_s) / step_s, cost.host_s / step_s
        tau = tau_by_arm[cost.arm]
        predictions.append(
            Prediction(
                arm=cost.arm,
                tau=tau,
                v=v,
                draft=draft,
                host=host,
                speedup=tau / (v + draft + host),
                measured=measured_by_arm.get(cost.arm),
            )
        )
    return predictions


def write_costs(path: Path, report: CostReport) -> None:
    """Write ``cost.json`` atomically."""
    write_text(path, json.dumps({"schema_version": SCHEMA_VERSION} | asdict(report), indent=1) + "\n")


def read_costs(path: Path) -> CostReport | None:
    """Read ``cost.json``; None where the benchmark ran without it.

    Raises:
        UserError: another schema version or a damaged file.
    """
    if not path.is_file():
        return None
    try:
        item = json.loads(path.read_text(encoding="utf-8"))
        if item["schema_version"] != SCHEMA_VERSION:
            raise UserError(f"{path}: schema version must be {SCHEMA_VERSION}, got {item['schema_version']}.")
        return CostReport(
            curve=VerifyCurve(**item["curve"]),
            rounds=[RoundCost(**entry) for entry in item["rounds"]],
            predictions=[Prediction(**entry) for entry in item["predictions"]],
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} must be a cost file of schema {SCHEMA_VERSION}, got a damaged one: {error}") from error
