"""Measurements of ``bench.gpu_check``: decoding a known text, plain and at forced acceptance, and transformers' own."""

import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from bench.gpu_forced import forced_eagle3
from bench.gpu_lossless import engine_options
from bench.gpu_parts import Fault, Skipped
from bench.gpu_passes import DEPTH, read_bytes
from bench.gpu_setup import Setting, figure
from bench.record import Measurement
from distill.decode import Decoder
from distill.drafters.base import Drafter
from distill.sampling import Sampling
from distill.tree import Chain, Dynamic, Plan
from serve_eval.arms import PeakMemory, TransformersArm, now


def autoregressive(setting: Setting) -> list[Measurement]:
    """Plain decoding, eager engine, against transformers' ``generate`` with its dynamic cache."""
    other = TransformersArm(setting.model.target, sampling=Sampling())
    prompt, new = setting.model.prompt(setting.shape.prompt), setting.shape.new_tokens

    def transformers() -> float:
        run = other.run(prompt, request_id=0, max_new_tokens=new, ignore_eos=True)
        _same_text(setting, prompt, run.ids, "transformers")
        return run.decode_s

    return _plain(setting, {"eager": _arm(setting, "eager"), "transformers": transformers})


def autoregressive_fast(setting: Setting) -> list[Measurement]:
    """Plain decoding, fast engine, against the eager one."""
    return _plain(setting, {"fast": _arm(setting, "fast"), "eager": _arm(setting, "eager")})


def _arm(
    setting: Setting, engine: str, drafter: Drafter | None = None, plan: Plan | None = None
) -> Callable[[], float]:
    """Seconds of the decode window of one run."""
    decoder = Decoder(setting.model.target, drafter, plan=plan, **engine_options(engine))
    prompt = setting.model.prompt(setting.shape.prompt)

    def run() -> float:
        (out,) = decoder.generate([prompt], max_new_tokens=setting.shape.new_tokens, ignore_eos=True)
        _same_text(setting, prompt, out.ids, engine)
        setting.known["tau"] = (len(out.ids) - 1) / max(len(out.steps), 1)
        return out.decode_s

    return run


def _same_text(setting: Setting, prompt: list[int], ids: list[int], arm: str) -> None:
    if ids != setting.model.text(prompt, setting.shape.new_tokens):
        raise Fault(f"{arm}: not the model's text, which it says by a lead no rounding explains")


def _in_turns(arms: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median of what each arm returns, one unmeasured turn first."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repeats + 1):
        for name, run in arms.items():
            value = run()
            if turn:
                found[name].append(value)
    return {name: median(values) for name, values in found.items()}


def _plain(setting: Setting, arms: dict[str, Callable[[], float]]) -> list[Measurement]:
    memory = PeakMemory(setting.device)
    memory.start()
    seconds = _in_turns(arms, min(setting.shape.repeats, 3))
    peak = memory.stop()
    steps = setting.shape.new_tokens - 1
    bandwidth = setting.known.get("bandwidth")
    limit = None
    if bandwidth:
        limit = bandwidth / read_bytes(setting.model.target, setting.shape.prompt + steps // 2)
    for name, value in seconds.items():
        setting.known[f"step_s {name}"] = value / steps
    found = [
        figure(
            "decode",
            f"plain, {name}",
            steps / value,
            "tokens/s",
            limit=limit,
            limit_name="bandwidth",
            note=f"batch 1, {value / steps * 1e3:.2f} ms a token",
            detail={"peak_bytes": peak},
        )
        for name, value in seconds.items()
    ]
    first, second = seconds
    found.append(figure("decode", f"plain, {first} over {second}", seconds[second] / seconds[first], "x"))
    return found


def forced(setting: Setting) -> list[Measurement]:
    """Speedup at forced acceptance, eager engine."""
    return _forced(setting, "eager")


def forced_fast(setting: Setting) -> list[Measurement]:
    """Speedup at forced acceptance, fast engine."""
    return _forced(setting, "fast")


def _forced(setting: Setting, engine: str) -> list[Measurement]:
    plan, drafter = Chain(DEPTH), forced_eagle3(setting.drafter)
    prompt = setting.model.prompt(setting.shape.prompt)
    text = prompt + setting.model.text(prompt, setting.shape.new_tokens + DEPTH + 1)
    drafter.force(text, accepted=0)
    run = _arm(setting, engine, drafter, plan)
    taus: dict[str, float] = {}

    def accepting(count: int) -> float:
        drafter.force(text, accepted=count)
        seconds = run()
        taus[str(count)] = setting.known["tau"]
        return seconds

    arms: dict[str, Callable[[], float]] = {"plain": _arm(setting, engine)}
    arms |= {str(count): partial(accepting, count) for count in range(DEPTH + 1)}
    seconds = _in_turns(arms, min(setting.shape.repeats, 3))
    passes, draft_s = setting.known.get(f"pass_s {engine}", {}), setting.known.get("draft_s")
    new = setting.shape.new_tokens - 1  # decoded in rounds; the first one comes from the prefill
    found = []
    for count in range(DEPTH + 1):
        tau = taus[str(count)]
        wanted = new / math.ceil(new / (count + 1))
        if tau != wanted:
            raise Fault(f"{count} of {DEPTH} drafted tokens were to be accepted, tau {wanted:.3f}, got {tau:.3f}")
        least = None
        if draft_s is not None and DEPTH + 1 in passes:
            least = tau * passes[1] / (passes[DEPTH + 1] + draft_s)
        found.append(
            figure(
                "forced",
                f"tau {count + 1}, {engine}",
                seconds["plain"] / seconds[str(count)],
                "x",
                limit=least,
                limit_name="tau / (v + draft)",
                note=f"{new / seconds[str(count)]:.1f} tokens/s",
                detail={"tau": tau, "seconds": seconds[str(count)], "plain_s": seconds["plain"]},
            )
        )
    return found


def host_reads(setting: Setting) -> list[Measurement]:
    """Calls that make the host wait for the device, per round of the decode loop (more tokens minus fewer)."""
    if not setting.cuda:
        raise Skipped("a CPU has nothing to wait for")
    found = []
    plans: tuple[tuple[str, Plan | None], ...] = (
        ("plain", None),
        ("chain", Chain(DEPTH)),
        ("dynamic tree", Dynamic(top_k=4, depth=4, total=12)),
    )
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        for name, plan in plans:
            drafter = None if plan is None else setting.drafter
            decoder = Decoder(setting.model.target, drafter, plan=plan, sampling=sampling, **engine_options("eager"))
            waits = [_waits(setting, decoder, tokens) for tokens in (8, 24)]
            (few, few_rounds), (many, many_rounds) = waits
            per_round = (many - few) / max(many_rounds - few_rounds, 1)
            found.append(
                figure(
                    "host",
                    f"{name}, {'greedy' if sampling.greedy else 'sampled'}",
                    per_round,
                    "waits/round",
                    bar=1.0,
                    at_least=False,
                )
            )
    return found


def _waits(setting: Setting, decoder: Decoder, tokens: int) -> tuple[int, int]:
    prompt = setting.model.prompt(setting.shape.prompt)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            (out,) = decoder.generate([prompt], max_new_tokens=tokens, ignore_eos=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught), len(out.steps)


# -- transformers with a static cache


class _FirstToken(BaseStreamer):
    """Notes when the first generated token is on the host; the prompt is streamed before it."""

    def __init__(self) -> None:
        self.puts, self.at = 0, 0.0

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        """Nothing to flush."""


def transformers_static(setting: Setting) -> list[Measurement]:
    """Transformers' ``generate`` with a static cache, which it compiles by itself on CUDA."""
    if not setting.cuda:
        raise Skipped("transformers compiles its static cache on accelerators only")
    target, new = setting.model.target, setting.shape.new_tokens
    prompt = setting.model.prompt(setting.shape.prompt)
    ids_1L = torch.tensor([prompt], device=setting.device)
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "cache_implementation": "static"}

    def run() -> float:
        watch = _FirstToken()
        with torch.no_grad():
            out_1L = target.model.generate(
                ids_1L,
                attention_mask=torch.ones_like(ids_1L),
                generation_config=GenerationConfig(**options, pad_token_id=0),
                streamer=watch,
            )
        seconds = now(setting.device) - watch.at
        _same_text(setting, prompt, out_1L[0, len(prompt) :].tolist(), "transformers, static cache")
        return seconds

    run()  # compiles
    seconds = median(run() for _ in range(3))
    steps = new - 1
    ours = min((s for name, s in setting.known.items() if name in ("step_s fast", "step_s eager")), default=None)
    found = [figure("decode", "plain, transformers static", steps / seconds, "tokens/s")]
    if ours is not None:
        found.append(figure("decode", "plain, our best over transformers static", seconds / steps / ours, "x"))
    return found
