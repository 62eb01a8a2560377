"""The arms of a benchmark: the project's loop with and without a drafter, and transformers ``generate``.

Every arm counts the same thing: generated ids up to and including the first end token, capped. Every clock
starts its decode window when the first token has reached the host, so prefill is reported apart.
"""

import contextlib
import ctypes
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from distill.decode import Decoder, Engine, StepRecord, Typical
from distill.drafters.base import Drafter
from distill.sampling import Sampling
from distill.target import Target
from distill.tree import Dynamic, Plan, Static

Kind = Literal["ar", "spec", "hf", "peer"]
"""The loop alone, the loop with a drafter, transformers ``generate``, and its own speculative decoding."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """One arm on one prompt turn, once. Seconds; ``steps`` is empty for ``hf``, lengths alone for peers."""

    ids: list[int]
    ttft_s: float
    decode_s: float
    steps: Sequence[StepRecord] = field(default=())


class Arm(Protocol):
    """Anything that answers a prompt and times itself."""

    name: str
    kind: Kind
    tree: str | None

    def run(self, prompt: list[int], *, request_id: int, max_new_tokens: int, ignore_eos: bool = False) -> ArmRun:
        """Answer one prompt at batch 1."""
        ...


class DecoderArm:
    """The project's decode loop. Without a drafter it is the autoregressive baseline: same loop, same kernels."""

    def __init__(
        self,
        target: Target,
        *,
        sampling: Sampling,
        drafter: Drafter | None = None,
        plan: Plan | None = None,
        verifier: str = "match",
        candidates: str = "auto",
        typical: Typical | None = None,
        engine: Engine = "eager",
    ):
        self.kind: Kind = "ar" if plan is None else "spec"
        self.tree = None if plan is None else plan_label(plan)
        self.name = self.tree or "ar"
        self.plan = plan
        drafter = drafter if plan is not None else None
        self.drafter, self.verifier = drafter, verifier
        self.decoder = Decoder(
            target,
            drafter,
            plan=plan,
            sampling=sampling,
            verifier=verifier,
            candidates=candidates,
            typical=typical,
            engine=engine,
        )
        self.candidates = None if self.decoder.drafting is None else self.decoder.drafting.candidates
        self._eos = target.info.eos_ids

    def run(self, prompt: list[int], *, request_id: int, max_new_tokens: int, ignore_eos: bool = False) -> ArmRun:
        """Answer one prompt with ``Decoder.generate``, which keeps its own clock."""
        (out,) = self.decoder.generate(
            [prompt], max_new_tokens=max_new_tokens, request_ids=[request_id], ignore_eos=ignore_eos
        )
        ids = count_ids(out.ids, () if ignore_eos else self._eos, max_new_tokens)
        assert len(ids) == len(out.ids), "the decoder must stop at the first end token and at the limit itself"
        return ArmRun(ids=ids, ttft_s=out.ttft_s, decode_s=out.decode_s, steps=out.steps)


class TransformersArm:
    """``model.generate`` with its default dynamic cache, for comparison with published figures."""

    name = "hf"
    kind: Kind = "hf"
    tree: str | None = None
    options: Mapping[str, Any] = {}
    """Further arguments of ``generate``."""
    settings: Mapping[str, Any] = {}
    """Further fields of its generation config."""

    def __init__(self, target: Target, *, sampling: Sampling):
        self._target = target
        self._sampling = sampling

    def run(self, prompt: list[int], *, request_id: int, max_new_tokens: int, ignore_eos: bool = False) -> ArmRun:
        """Answer one prompt; sampled runs are seeded by the request, but draw other tokens than keyed noise."""
        eos = () if ignore_eos else self._target.info.eos_ids
        device = self._target.device
        ids_1L = torch.tensor([prompt], device=device)
        watch = _Watch(device)
        seeded = [torch.device(device)] if torch.device(device).type == "cuda" else []
        with _clean_defaults(self._target.model), torch.random.fork_rng(devices=seeded), torch.inference_mode():
            torch.manual_seed(self._sampling.seed + request_id)
            out_1L = self._target.model.generate(
                ids_1L,
                attention_mask=torch.ones_like(ids_1L),
                generation_config=self._config(eos, max_new_tokens),
                streamer=watch,
                **self.options,
            )
            end = now(device)
        ids = count_ids(out_1L[0, len(prompt) :].tolist(), eos, max_new_tokens)
        steps = self.passes(watch.sizes, len(ids))
        return ArmRun(ids=ids, ttft_s=watch.first - watch.start, decode_s=end - watch.first, steps=steps)

    def passes(self, sizes: Sequence[int], new_tokens: int) -> list[StepRecord]:
        """Passes of the target by the number of tokens each gave; none where every pass gives one."""
        return []

    def _config(self, eos: tuple[int, ...], max_new_tokens: int) -> GenerationConfig:
        s = self._sampling
        picked = {} if s.greedy else {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p}
        return GenerationConfig(
            do_sample=not s.greedy,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(eos) or None,
            pad_token_id=eos[0] if eos else 0,
            **picked,
            **self.settings,
        )


class PeerArm(TransformersArm):
    """Transformers' own speculative decoding: with our draft model as ``assistant_model``, or with prompt lookup.

    Its first pass settles the prompt and several tokens together; they come before the clock starts, in its favour.

    Args:
        target: the target.
        sampling: as for all arms.
        name: of the arm.
        length: tokens drafted per pass.
        options: further arguments of ``generate``.
        settings: further fields of its generation config.
    """

    kind: Kind = "peer"

    def __init__(
        self,
        target: Target,
        *,
        sampling: Sampling,
        name: str,
        length: int,
        options: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        super().__init__(target, sampling=sampling)
        self.name, self.length, self.options, self.settings = name, length, options or {}, settings or {}
        self.tree = f"chain-{length}"

    @classmethod
    def assisted(cls, target: Target, draft: PreTrainedModel, *, sampling: Sampling, length: int) -> "PeerArm":
        """Assisted generation with a fixed number of drafts per pass, as our chain has it."""
        draft.generation_config = GenerationConfig(
            num_assistant_tokens=length,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
            pad_token_id=target.info.eos_ids[0] if target.info.eos_ids else 0,
        )
        options = {"assistant_model": draft}
        return cls(target, sampling=sampling, name=f"hf-assisted-{length}", length=length, options=options)

    @classmethod
    def lookup(cls, target: Target, *, sampling: Sampling, length: int) -> "PeerArm":
        """Prompt lookup."""
        settings = {"prompt_lookup_num_tokens": length}
        return cls(target, sampling=sampling, name=f"hf-lookup-{length}", length=length, settings=settings)

    def passes(self, sizes: Sequence[int], new_tokens: int) -> list[StepRecord]:
        """The passes after the first, cut to the tokens that count."""
        found, left = [], new_tokens - (sizes[0] if sizes else 0)
        for size in sizes[1:]:
            size = min(size, left)
            if size <= 0:
                break
            found.append(StepRecord(tokens=(0,) * size, accepted=size - 1, offered=self.length))
            left -= size
        return found


class _Watch(BaseStreamer):
    """Notes when the first generated token reaches the host; transformers streams the prompt first."""

    def __init__(self, device: torch.device | str):
        self._puts = 0
        self.sizes: list[int] = []
        """Tokens that came at once, the prompt not among them."""
        self.start = now(device)
        self.first = self.start

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts > 1:
            self.sizes.append(value.numel())
        if self._puts == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        """Nothing to flush."""


@contextlib.contextmanager
def _clean_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Hide the checkpoint's generation defaults (penalties, top-k, end tokens): they fill whatever is unset."""
    saved = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = saved


def count_ids(ids: Sequence[int], eos_ids: Sequence[int], limit: int) -> list[int]:
    """Return the ids that count: up to and including the first end token, at most ``limit``."""
    for index, token in enumerate(ids[:limit]):
        if token in eos_ids:
            return list(ids[: index + 1])
    return list(ids[:limit])


def rotation(arms: Sequence[T], turn: int) -> list[T]:
    """Return the arms in the order of this turn: each starts equally often, so drift favours none."""
    start = turn % len(arms)
    return [*arms[start:], *arms[:start]]


def plan_label(plan: Plan) -> str:
    """A short name that tells plans apart: ``chain-3``, ``dynamic-4x4-12`` (top_k x depth - nodes), ``static-9x3``."""
    if isinstance(plan, Dynamic):
        return f"dynamic-{plan.top_k}x{plan.depth}-{plan.n_nodes}"
    assert isinstance(plan, Static)
    return f"chain-{plan.depth}" if plan.name == "chain" else f"{plan.name}-{plan.n_nodes}x{plan.depth}"


def now(device: torch.device | str) -> float:
    """Return the host clock, after the device has finished what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class PeakMemory:
    """Most memory in use while an arm runs, above what the loaded weights take.

    CUDA: the allocator's own peak. Linux: the peak resident set, which the kernel lets a process reset.
    Elsewhere ``stop`` returns None: the peak of a whole process says nothing about one arm.
    """

    def __init__(self, device: torch.device | str):
        self._device = torch.device(device)
        _tidy()  # garbage that falls later, or free memory that is used again, would hide a peak
        self._base = torch.cuda.memory_allocated(device) if self._device.type == "cuda" else _status("VmRSS")

    def start(self) -> None:
        """Forget the peak so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._base is not None:
            try:
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                self._base = None

    def stop(self) -> int | None:
        """Return the peak since ``start`` in bytes."""
        if self._base is None:
            return None
        cuda = self._device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self._device) if cuda else _status("VmHWM")
        return None if peak is None else max(peak - self._base, 0)


def _tidy() -> None:
    """Free what nobody holds, and give free memory back to the system, where the C library can."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _status(key: str) -> int | None:
    """Read a memory figure of this process in bytes; None where the kernel has no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(key + ":")]
    return int(found[0]) * 1024 if found else None
