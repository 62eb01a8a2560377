"""Writing answers: our writer against transformers ``generate``, on answers of uneven length.

The same prompts in the same order, the same number of rows at a time, the same limit and the same rule for picking
tokens; both arms run on the same weights in bf16. ``generate`` gets left-padded batches and starts the next one when
the longest answer of a batch is done; it sees the prompts in the order they come, as a script would.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

from bench.record import Measurement, Options
from distill.decode import Decoder, Generation, Request
from distill.sampling import Sampling
from distill.target import Target, TargetConfig, load_target
from distill.target.tiny import tiny_target

PART = "writing"
BAR = 2.0
KINDS = (
    "In one word: what colour is {}?",
    "Define {} in one sentence.",
    "Write three short facts about {}.",
    "Write a story about a child who is afraid of {}.",
)
TOPICS = [
    topic
    for line in (
        "rain, a lion, the moon, an apple, snow, a river, gold, the sea, a train, a clock, bread, a violin, the desert",
        "a spider, thunder, a lemon, coal, a whale, the forest, a candle, chess, a bridge, an owl, the wind",
    )
    for topic in line.split(", ")
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Equal work for both arms.

    Attributes:
        prompts: token ids.
        slots: rows decoded together.
        max_new_tokens: where answers are cut.
        sampling: how tokens are picked.
    """

    prompts: list[list[int]]
    slots: int
    max_new_tokens: int
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an arm did: tokens generated, seconds, and the length of every answer."""

    seconds: float
    lengths: list[int]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(self.lengths) / self.seconds


def run(options: Options) -> list[Measurement]:
    """Measure both arms, greedy and sampled, and where our step spends its time."""
    target = _target(options)
    topics = TOPICS[:3] if options.quick else TOPICS
    prompts = [_encode(target, kind.format(topic)) for topic in topics for kind in KINDS]
    sizes = {"slots": 4, "max_new_tokens": 8} if options.quick else {"slots": 32, "max_new_tokens": 256}
    greedy = Case(prompts=prompts, sampling=Sampling(), **sizes)
    # Half of them for the second rule: the ratio is the same kind of figure, and the bench has to end.
    some = prompts[: len(prompts) // 2]
    sampled = Case(prompts=some, sampling=Sampling(temperature=0.8, top_k=50, seed=options.seed), **sizes)
    rows = [
        row
        for name, case in (("greedy", greedy), ("sampled", sampled))
        for row in _compare(target, case, name, options)
    ]
    return [*rows, _shares(target, greedy, options)]


def _target(options: Options) -> Target:
    if options.quick:
        return tiny_target("llama", tokenizer=True)
    return load_target(TargetConfig(name=options.target, dtype="bfloat16"))


def _encode(target: Target, text: str) -> list[int]:
    return target.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True)


def _compare(target: Target, case: Case, name: str, options: Options) -> Iterator[Measurement]:
    arms: dict[str, Callable[[Case], Outcome]] = {
        "ours": lambda work: write(target, work, engine=options.engine),
        "generate": lambda work: generate(target, work),
    }
    small = Case(prompts=case.prompts[:4], slots=4, max_new_tokens=4, sampling=case.sampling)
    for arm in arms.values():  # allocator, kernels, packing
        arm(small)
    done = {arm: call(case) for arm, call in arms.items()}
    ours, theirs = done["ours"], done["generate"]
    detail = {
        "prompts": len(case.prompts),
        "slots": case.slots,
        "mean answer": round(mean(ours.lengths), 1),
        "shortest": min(ours.lengths),
        "longest": max(ours.lengths),
        "tokens": {arm: sum(outcome.lengths) for arm, outcome in done.items()},
        "seconds": {arm: round(outcome.seconds, 2) for arm, outcome in done.items()},
        # Row-steps that produce nothing: generate computes a batch until its longest answer is done.
        "idle share of generate": round(1 - sum(theirs.lengths) / _row_steps(theirs.lengths, case.slots), 3),
    }
    yield Measurement(
        part=PART,
        name=f"{name} tokens/s over transformers generate",
        value=ours.rate / theirs.rate,
        unit="x",
        bar=None if options.quick or name != "greedy" else BAR,
        at_least=None if options.quick or name != "greedy" else True,
        note=f"{case.slots} rows, {len(case.prompts)} answers of {min(ours.lengths)} to {max(ours.lengths)} tokens",
        detail=detail,
    )
    yield Measurement(part=PART, name=f"{name} tokens/s", value=ours.rate, unit="tokens/s", detail=detail)


def write(target: Target, case: Case, *, engine: Literal["fast", "eager"]) -> Outcome:
    """Our writer: slots are refilled as their answers finish."""
    decoder = Decoder(target, sampling=case.sampling, engine=engine)
    requests = (
        Request(request_id=i, prompt=prompt, max_new_tokens=case.max_new_tokens)
        for i, prompt in enumerate(case.prompts)
    )
    begin = time.perf_counter()
    done: list[Generation] = list(decoder.stream(requests, slots=case.slots))
    seconds = time.perf_counter() - begin
    by_number = sorted(done, key=lambda generation: generation.request_id)
    return Outcome(seconds=seconds, lengths=[len(generation.ids) for generation in by_number])


def generate(target: Target, case: Case) -> Outcome:
    """Transformers: left-padded batches, one after the other."""
    model: Any = target.model
    rule: dict[str, Any] = {"do_sample": False}
    if not case.sampling.greedy:
        rule = {"do_sample": True, "temperature": case.sampling.temperature, "top_k": case.sampling.top_k}
        torch.manual_seed(case.sampling.seed)
    eos = list(target.info.eos_ids)
    lengths: list[int] = []
    begin = time.perf_counter()
    for first in range(0, len(case.prompts), case.slots):
        batch = case.prompts[first : first + case.slots]
        width = max(map(len, batch))
        ids_BL = torch.tensor([[eos[0]] * (width - len(prompt)) + prompt for prompt in batch])
        mask_BL = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        with torch.inference_mode():
            out_BL = model.generate(
                input_ids=ids_BL.to(target.device),
                attention_mask=mask_BL.to(target.device),
                max_new_tokens=case.max_new_tokens,
                eos_token_id=eos,
                pad_token_id=eos[0],
                top_p=1.0,
                repetition_penalty=1.0,
                **rule,
            )
        lengths += [_length(row, eos) for row in out_BL[:, width:].tolist()]
    return Outcome(seconds=time.perf_counter() - begin, lengths=lengths)


def _length(row: Sequence[int], eos: Sequence[int]) -> int:
    return next((i + 1 for i, token in enumerate(row) if token in eos), len(row))


def _row_steps(lengths: Sequence[int], slots: int) -> int:
    batches = [lengths[i : i + slots] for i in range(0, len(lengths), slots)]
    return sum(max(batch) * len(batch) for batch in batches)


def _shares(target: Target, case: Case, options: Options) -> Measurement:
    """Where a step of full slots spends its time, by kind of operation."""
    decoder = Decoder(target, sampling=Sampling(temperature=0.8, top_k=50), engine=options.engine)
    prompts = case.prompts[: case.slots]
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        begin = time.perf_counter()
        decoder.generate(prompts, max_new_tokens=8, ignore_eos=True)
        seconds = time.perf_counter() - begin
    shares: dict[str, float] = {}
    for event in watched.key_averages():
        kind = _kind(event.key)
        shares[kind] = shares.get(kind, 0.0) + event.self_cpu_time_total / 1e6 / seconds
    shares["outside operations"] = max(0.0, 1 - sum(shares.values()))
    percent = {kind: round(100 * share, 1) for kind, share in sorted(shares.items(), key=lambda item: -item[1])}
    return Measurement(
        part=PART,
        name="share of matrix products in a sampled step",
        value=percent.get("matrix products", 0.0),
        unit="%",
        note=", ".join(f"{kind} {share:.0f}" for kind, share in percent.items()),
        detail=percent,
    )


def _kind(name: str) -> str:
    words = {
        "matrix products": ("mm", "linear", "matmul"),
        "attention": ("attention", "softmax"),
        "choosing tokens": ("topk", "sort", "argmax", "log", "gather"),
        "cache": ("index", "copy", "cat", "scatter"),
    }
    return next((kind for kind, parts in words.items() if any(part in name for part in parts)), "other operations")
