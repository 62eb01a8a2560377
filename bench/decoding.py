"""How fast decoding is: against transformers, against the memory's bandwidth, and against its own formula.

All arms of a figure run in one process, in turns, after a warm-up of each; ratios are taken within a turn and the
median over the turns is reported. Clocks start when the first token is on the host (``Generation.decode_s``).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from bench.forced import Forced
from bench.machine import Machine, measure
from bench.record import Measurement, Options
from distill.decode import Decoder, Generation
from distill.sampling import Sampling
from distill.target import Target, TargetConfig, load_target
from distill.tree import Chain, Dynamic, Plan
from serve_eval.arms import DecoderArm, TransformersArm, rotation
from serve_eval.cost import VerifyCurve, round_costs, verify_curve

PART = "decoding"
AR_BAR, V8_BAR, V16_BAR, LOOP_BAR, NOISE_BAR = 1.8, 1.3, 1.6, 95.0, 2.0
DEPTH = 5
TREE = Dynamic(top_k=4, depth=4, total=16)
BATCHES = (1, 2, 4, 8, 16, 32)
UNEVEN = (0, 1, 2, 3)
"""Accepted tokens from round to round in a batch, each row one place further: 2.5 tokens a round on average."""


def run(options: Options) -> list[Measurement]:
    """Measure everything; about four minutes with SmolLM2 on two cores."""
    config = TargetConfig(name=options.target, device="cpu", verify=False)
    if options.target.startswith("tiny"):  # random weights are seldom certain: in bf16 rounding would decide
        config.dtype = "float32"
    target = load_target(config)
    bench = _Bench(target=target, options=options, machine=measure(options))
    return [*_against_transformers(bench), *_verify(bench), *_loop(bench), *_noise(bench), *_batches(bench)]


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """What the measurements share: the target, the machine's rates, and the one place that picks the engine."""

    target: Target
    options: Options
    machine: Machine

    @property
    def new_tokens(self) -> int:
        """Tokens per run; all but the first (the prefill's) divide evenly into the rounds of every acceptance."""
        return 13 if self.options.quick else 61

    @property
    def acceptances(self) -> Sequence[int]:
        """Drafted tokens accepted per round."""
        return (0, 2, 5) if self.options.quick else range(DEPTH + 1)

    def turns(self, full: int) -> int:
        """How often arms take turns."""
        return 1 if self.options.quick else full

    def decoder(self, **arguments: Any) -> Decoder:
        """A decoder on the engine asked for."""
        return Decoder(self.target, engine=self.options.engine, **arguments)

    def curve(self, *, context: int, rounds: int, widths: Sequence[int]) -> VerifyCurve:
        """Time passes over ``widths`` nodes on the engine asked for."""
        model: Any = self.target.fast if self.options.engine == "fast" else self.target
        return verify_curve(model, context=context, rounds=rounds, widths=widths)

    def prompts(self, batch: int) -> list[list[int]]:
        """Sentences that repeat: their continuation is so certain that rounding never changes it."""
        assert self.target.tokenizer is not None
        texts = [f"{b + 10} ships sailed from the old harbour in the morning. " * 6 for b in range(batch)]
        return [list(self.target.tokenizer(text)["input_ids"]) for text in texts]

    def bytes_per_step(self, context: int, batch: int = 1) -> int:
        """Weights, and keys and values of ``context`` tokens a row, that one step must read at least."""
        info, model = self.target.info, self.target.model
        weights = {p.data_ptr(): p for p in model.parameters()}
        looked_up, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        if looked_up.data_ptr() != head.data_ptr():  # an embedding that is not also the head is read row by row
            del weights[looked_up.data_ptr()]
        cached = 2 * info.n_layers * info.n_kv_heads * info.head_dim * context * batch
        return sum(p.numel() * p.element_size() for p in weights.values()) + cached * head.element_size()

    def least_step_s(self, *, tokens: int, context: int, batch: int = 1) -> float:
        """Seconds that the machine's rates allow for one pass over ``tokens`` tokens in all (roofline)."""
        read = self.bytes_per_step(context, batch) / self.machine.bandwidth
        multiplied = 2 * self.bytes_per_step(0) / self.target.dtype.itemsize * tokens
        return max(read, multiplied / self.machine.matrix_rate(self.target.dtype))


def _decode(decoder: Decoder, prompts: Sequence[list[int]], new_tokens: int) -> list[Generation]:
    return decoder.generate(prompts, max_new_tokens=new_tokens, ignore_eos=True)


def _window(generations: Sequence[Generation]) -> float:
    """Seconds from the first token on the host to the last row's end."""
    return max(g.decode_s for g in generations)


def _in_turns(arms: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """What every arm returned, turn by turn, in rotating order, after one unmeasured run of each."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(-1, turns):
        for name in rotation(list(arms), turn + 1):
            value = arms[name]()
            if turn >= 0:
                found[name].append(value)
    return found


def _ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return median(a / b for a, b in zip(over, under, strict=True))


def _against_transformers(bench: _Bench) -> list[Measurement]:
    (prompt,) = bench.prompts(1)
    decoder, other = bench.decoder(), TransformersArm(bench.target, sampling=Sampling())

    def transformers() -> float:
        return other.run(prompt, request_id=0, max_new_tokens=bench.new_tokens, ignore_eos=True).decode_s

    seconds = _in_turns(
        {"ar": lambda: _window(_decode(decoder, [prompt], bench.new_tokens)), "hf": transformers}, bench.turns(9)
    )
    steps = bench.new_tokens - 1
    context = len(prompt) + steps // 2
    rate, theirs = steps / median(seconds["ar"]), steps / median(seconds["hf"])
    limit = 1 / bench.least_step_s(tokens=1, context=context)
    read = bench.bytes_per_step(context)
    shared = {"context": context, "new_tokens": bench.new_tokens, "seconds": seconds}
    return [
        Measurement(
            part=PART,
            name="plain over transformers",
            value=_ratio(seconds["hf"], seconds["ar"]),
            unit="x",
            bar=AR_BAR,
            at_least=True,
            limit=limit / theirs,
            limit_name="bandwidth",
            note=f"transformers: {theirs:.1f} tokens/s",
            detail=shared,
        ),
        Measurement(
            part=PART,
            name="plain",
            value=rate,
            unit="tokens/s",
            limit=limit,
            limit_name="bandwidth",
            note=f"{read / 1e6:.0f} MB a token",
            detail={"bytes_per_token": read},
        ),
        Measurement(
            part=PART,
            name="plain, share of bandwidth",
            value=100 * rate * read / bench.machine.bandwidth,
            unit="%",
            limit=100.0,
            limit_name="bandwidth",
            note=f"{rate * read / 1e9:.1f} of {bench.machine.bandwidth / 1e9:.1f} GB/s",
        ),
    ]


def _verify(bench: _Bench) -> list[Measurement]:
    widths, context = (1, 2, 4, 8, 16, 32), 256
    curve = bench.curve(context=context, rounds=bench.turns(15), widths=widths)
    bars = {8: V8_BAR, 16: V16_BAR}
    least = {width: bench.least_step_s(tokens=width, context=context) for width in widths}
    return [
        Measurement(
            part=PART,
            name=f"v({width})",
            value=ratio,
            unit="steps",
            bar=bars.get(width),
            at_least=False if width in bars else None,
            limit=least[width] / curve.seconds[0],  # of the step as it is: what ideal wide passes would give
            limit_name="roofline",
            note=f"{seconds * 1e3:.1f} of {curve.seconds[0] * 1e3:.1f} ms",
            detail={"seconds": seconds, "context": context},
        )
        for width, seconds, ratio in zip(curve.widths, curve.seconds, curve.ratio, strict=True)
        if width > 1
    ]


def _loop(bench: _Bench) -> list[Measurement]:
    """Measured speedup against tau / (v + draft), everything in units of one autoregressive step."""
    (prompt,) = bench.prompts(1)
    plain, steps = bench.decoder(), bench.new_tokens - 1
    recorded = [*prompt, *_decode(plain, [prompt], bench.new_tokens + DEPTH + 1)[0].ids]
    arms = [_forced_arm(bench, recorded, accepted=a, plan=Chain(DEPTH)) for a in bench.acceptances]
    arms.append(_forced_arm(bench, recorded, accepted=2, plan=TREE))
    taus: dict[str, float] = {}

    def forced(arm: DecoderArm) -> float:
        (out,) = _decode(arm.decoder, [prompt], bench.new_tokens)
        taus[arm.name] = steps / len(out.steps)
        return out.decode_s

    def verify(nodes: int) -> float:
        curve = bench.curve(context=len(prompt) + steps // 2, rounds=bench.turns(5), widths=[1, nodes])
        return curve.seconds[-1]

    calls: dict[str, Callable[[], float]] = {"ar": lambda: _decode(plain, [prompt], bench.new_tokens)[0].decode_s}
    calls |= {f"verify-{n}": partial(verify, n) for n in {arm.plan.n_nodes for arm in arms if arm.plan}}
    calls |= {arm.name: partial(forced, arm) for arm in arms}
    seconds = _in_turns(calls, bench.turns(9))
    costs = round_costs(arms, [prompt] * bench.turns(3), max_new_tokens=bench.new_tokens)
    found = []
    for arm, cost in zip(arms, costs, strict=True):
        draft_s, passes = cost.draft_s + cost.extend_s, seconds[f"verify-{cost.nodes}"]
        predicted = [
            taus[arm.name] * ar / steps / (verify_s + draft_s)
            for ar, verify_s in zip(seconds["ar"], passes, strict=True)
        ]
        speedups = [ar / own for ar, own in zip(seconds["ar"], seconds[arm.name], strict=True)]
        found.append(
            Measurement(
                part=PART,
                name=f"loop, {arm.name}",
                value=100 * _ratio(speedups, predicted),
                unit="%",
                bar=LOOP_BAR,
                at_least=True,
                limit=100.0,
                limit_name="tau / (v + draft)",
                note=f"speedup {median(speedups):.2f} of {median(predicted):.2f}",
                detail={
                    "tau": taus[arm.name],
                    "speedups": speedups,
                    "predicted": predicted,
                    "step_s": median(seconds["ar"]) / steps,
                    "verify_s": median(passes),
                    "draft_s": cost.draft_s,
                    "extend_s": cost.extend_s,
                    "round_s": median(seconds[arm.name]) * taus[arm.name] / steps,
                },
            )
        )
    return found


def _forced_arm(bench: _Bench, recorded: list[int], *, accepted: int, plan: Plan) -> DecoderArm:
    drafter = Forced(bench.target, pattern=(accepted,), recorded=[recorded])
    arm = DecoderArm(bench.target, sampling=Sampling(), drafter=drafter, plan=plan)
    arm.name, arm.decoder = f"{arm.name}, {accepted} accepted", bench.decoder(drafter=drafter, plan=plan)
    return arm


def _noise(bench: _Bench) -> list[Measurement]:
    """Sampled against greedy steps; the median step of a run, so that an interruption spoils one step only."""
    (prompt,) = bench.prompts(1)
    settings = {"sampled": Sampling(temperature=1.0), "top-k 50": Sampling(temperature=1.0, top_k=50)}
    decoders = {name: bench.decoder(sampling=sampling) for name, sampling in settings.items()}
    decoders["greedy"] = bench.decoder()
    arms = {name: partial(_median_step, decoder, prompt, bench.new_tokens) for name, decoder in decoders.items()}
    seconds = _in_turns(arms, bench.turns(15))
    greedy_s = seconds["greedy"]
    return [
        Measurement(
            part=PART,
            name=f"keyed noise, {name}",
            value=100 * (_ratio(seconds[name], greedy_s) - 1),
            unit="%",
            bar=NOISE_BAR,
            at_least=False,
            limit=0.0,
            limit_name="greedy",
            note=f"{median(seconds[name]) * 1e3:.2f} of {median(greedy_s) * 1e3:.2f} ms",
            detail={"step_s": seconds[name], "greedy_step_s": greedy_s},
        )
        for name in settings
    ]


def _median_step(decoder: Decoder, prompt: list[int], new_tokens: int) -> float:
    ticks: list[float] = []
    decoder.generate(
        [prompt],
        max_new_tokens=new_tokens,
        ignore_eos=True,
        on_step=lambda _row, _record, _ids: ticks.append(time.perf_counter()),
    )
    return median(after - before for before, after in zip(ticks, ticks[1:], strict=False))


def _batches(bench: _Bench) -> list[Measurement]:
    found = []
    for batch in BATCHES[:3] if bench.options.quick else BATCHES:
        prompts = bench.prompts(batch)
        plain, plan = bench.decoder(), Chain(max(UNEVEN))
        said = _decode(plain, prompts, bench.new_tokens + plan.depth + 1)
        recorded = [[*prompt, *out.ids] for prompt, out in zip(prompts, said, strict=True)]
        forced = bench.decoder(drafter=Forced(bench.target, pattern=UNEVEN, recorded=recorded), plan=plan)
        taus: list[float] = []

        def drafted(forced: Decoder = forced, prompts: list[list[int]] = prompts, taus: list[float] = taus) -> float:
            out = _decode(forced, prompts, bench.new_tokens)
            taus.append(sum(len(g.ids) - 1 for g in out) / sum(len(g.steps) for g in out))
            return _window(out)

        arms = {
            "ar": lambda plain=plain, prompts=prompts: _window(_decode(plain, prompts, bench.new_tokens)),
            "forced": drafted,
        }
        seconds = _in_turns(arms, bench.turns(3))
        tokens, context = batch * (bench.new_tokens - 1), len(prompts[0]) + bench.new_tokens // 2
        least_s = bench.least_step_s(tokens=batch, context=context, batch=batch)
        wide_s = bench.least_step_s(tokens=batch * plan.n_nodes, context=context, batch=batch)
        found += [
            Measurement(
                part=PART,
                name=f"batch {batch}, plain",
                value=tokens / median(seconds["ar"]),
                unit="tokens/s",
                limit=batch / least_s,
                limit_name="roofline",
                detail={"seconds": seconds["ar"]},
            ),
            Measurement(
                part=PART,
                name=f"batch {batch}, forced over plain",
                value=_ratio(seconds["ar"], seconds["forced"]),
                unit="x",
                limit=median(taus) * median(seconds["ar"]) / (bench.new_tokens - 1) / wide_s,
                limit_name="roofline",
                note=f"{tokens / median(seconds['forced']):.0f} tokens/s at tau {median(taus):.2f}",
                detail={"seconds": seconds["forced"], "tau": median(taus), "pattern": UNEVEN},
            ),
        ]
    return found
