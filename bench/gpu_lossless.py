"""Checks of ``bench.gpu_check``: decoding on the device emits, token for token, what the target itself says.

The oracle is the same random target in fp64 on the CPU, called without cache, tree or drafter
(``serve_eval.oracle.recompute``); a difference is a fault unless its two best scores lie closer than 1e-4 there.
Every function here is a check: it returns what it counted and raises ``Fault``; ``tests/gpu`` calls the same ones.
"""

import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.forced import Forced
from bench.gpu_parts import Fault, Skipped
from bench.gpu_setup import SHAPES, Setting, habit_model, random_eagle3
from distill.decode import Decoder, Generation
from distill.drafters.base import Drafter
from distill.errors import UserError
from distill.sampling import Sampling
from distill.target import Target
from distill.target.check import verify
from distill.target.tiny import FAMILIES, tiny_target
from distill.tree import Chain, Dynamic, Plan, Static
from serve_eval.arms import TransformersArm
from serve_eval.oracle import recompute

V, W = 61, 40
NEW_TOKENS = 24
PROMPTS = ([5], [7, 3, 9, 11, 4, 8, 30, 22, 17, 41, 12, 6, 50], [3, 14, 15, 9, 26, 5, 35, 8])
"""Uneven, one of a single token, one longer than the prefill chunk."""
PREFILL_CHUNK = 5
SETTINGS = (
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=1.0, top_k=10, top_p=0.9, seed=2),
)
PLANS: tuple[Plan, ...] = (
    Chain(4),
    Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (0, 0, 0, 0))),
    Dynamic(top_k=3, depth=4, total=10),
)
MARK = "pytest.mark.gpu"
PATTERN = (0, 2, 4, 1, 3)
"""Drafted tokens the forced drafter gets accepted, round by round and another at every row."""


@dataclass(kw_only=True)
class Count:
    """What was compared, and how it came out."""

    outputs: int = 0
    tokens: int = 0
    accepted: int = 0
    ties: int = 0
    faults: list[str] = field(default_factory=list)

    def judge(self, oracle: Target, prompt: list[int], out: Generation, sampling: Sampling, label: str) -> None:
        """Compare one output with the oracle."""
        choices = recompute(oracle, prompt, out.ids, sampling=sampling, request_id=out.request_id)
        self.outputs += 1
        self.tokens += len(out.ids)
        self.accepted += sum(step.accepted for step in out.steps)
        if len(out.ids) < NEW_TOKENS and out.ids[-1] not in oracle.info.eos_ids:
            self.faults.append(f"{label}: {len(out.ids)} tokens, neither the limit nor the end of text")
        for i, (ours, theirs) in enumerate(zip(out.ids, choices.ids, strict=True)):
            if ours != theirs and choices.gaps[i] <= choices.tie_gaps[i]:
                self.ties += 1
            elif ours != theirs:
                self.faults.append(f"{label}: token {i} is {ours}, the target says {theirs} by {choices.gaps[i]:.3g}")

    def result(self) -> dict[str, Any]:
        """Return the counts.

        Raises:
            Fault: anything differed beyond a tie.
        """
        if self.faults:
            raise Fault(f"{len(self.faults)} of {self.tokens} tokens wrong; {'; '.join(self.faults[:3])}")
        return {"outputs": self.outputs, "tokens": self.tokens, "drafted": self.accepted, "ties": self.ties}


def eager(setting: Setting) -> dict[str, Any]:
    """fp32 on the device, eager engine: plain, chain, static and dynamic; greedy and sampled; batch 1 and 3."""
    # Without a GPU this only shows that the script runs; the project's own tests do the rest there.
    return _lossless(setting, "eager", PLANS, SETTINGS if setting.cuda else SETTINGS[1:2])


def fast(setting: Setting) -> dict[str, Any]:
    """The same with the fast engine (CUDA graphs on a GPU), in fewer combinations: each records its own shapes."""
    settings = SETTINGS[:2] if setting.cuda else SETTINGS[1:2]
    return _lossless(setting, "fast", (PLANS[0], PLANS[2]), settings)


def _lossless(
    setting: Setting, engine: str, plans: Iterable[Plan], settings: Iterable[Sampling], family: str = "llama"
) -> dict[str, Any]:
    options = engine_options(engine)
    oracle = _target(family, torch.float64, torch.device("cpu"))
    target = _target(family, torch.float32, setting.device)
    count = Count()
    for sampling in settings:
        recorded = []
        for batch in (1, len(PROMPTS)):
            prompts = [list(p) for p in PROMPTS[-batch:]]
            plain = Decoder(target, sampling=sampling, prefill_chunk=PREFILL_CHUNK, **options)
            more = plain.generate(prompts, max_new_tokens=NEW_TOKENS + 8, ignore_eos=True)
            recorded = [p + g.ids for p, g in zip(prompts, more, strict=True)]
            for plan, drafter in _arms(target, plans, recorded):
                decoder = Decoder(target, drafter, plan=plan, sampling=sampling, prefill_chunk=PREFILL_CHUNK, **options)
                name = "plain" if drafter is None else f"{drafter.name} {plan}"
                for prompt, out in zip(prompts, decoder.generate(prompts, max_new_tokens=NEW_TOKENS), strict=True):
                    count.judge(oracle, prompt, out, sampling, f"{name}, T={sampling.temperature}, batch {batch}")
    if not count.accepted:
        raise Fault("no drafted token was ever accepted: nothing about drafting was shown")
    return count.result()


def _arms(
    target: Target, plans: Iterable[Plan], recorded: list[list[int]]
) -> Iterator[tuple[Plan | None, Drafter | None]]:
    yield None, None
    untrained = _eagle3(target)
    for plan in plans:
        yield plan, untrained
        yield plan, Forced(target, pattern=PATTERN, recorded=recorded)


def _target(family: str, dtype: torch.dtype, device: torch.device) -> Target:
    return tiny_target(family, seed=3, vocab_size=V, hidden=32, layers=3, dtype=dtype, device=device)


def _eagle3(target: Target) -> Drafter:
    """Weights from the CPU's generator, so that they are the same on every device."""
    cpu = tiny_target("llama", seed=3, vocab_size=V, hidden=32, layers=3)
    kept_W = torch.randperm(V, generator=torch.Generator().manual_seed(0))[:W].sort().values
    drafter = random_eagle3(target, kept_W)
    drafter.load_state_dict(random_eagle3(cpu, kept_W).state_dict())
    return drafter.to(target.dtype).eval().requires_grad_(False)


def engine_options(engine: str) -> dict[str, Any]:
    """Keyword arguments that choose the decoder's engine.

    Raises:
        Skipped: this version of the decoder has none but the eager one.
    """
    if "engine" in inspect.signature(Decoder.__init__).parameters:
        return {"engine": engine}
    if engine == "eager":
        return {}
    raise Skipped("Decoder has no parameter engine")


def same_trees(setting: Setting) -> dict[str, Any]:
    """EAGLE-3 in fp64: rounds on the device equal the CPU's, drafted, accepted and rejected tokens alike."""
    rounds = 0
    for sampling in SETTINGS if setting.cuda else SETTINGS[1:2]:
        for plan in PLANS if setting.cuda else PLANS[2:]:
            found = []
            for device in (torch.device("cpu"), setting.device):
                target = _target("llama", torch.float64, device)
                decoder = Decoder(target, _eagle3(target), plan=plan, sampling=sampling, prefill_chunk=PREFILL_CHUNK)
                found.append(decoder.generate([list(p) for p in PROMPTS], max_new_tokens=NEW_TOKENS))
            for row, (ours, theirs) in enumerate(zip(found[1], found[0], strict=True)):
                if (ours.ids, ours.steps) != (theirs.ids, theirs.steps):
                    pairs = enumerate(zip(ours.steps, theirs.steps, strict=False))
                    at = next((i for i, (one, other) in pairs if one != other), "the last")
                    raise Fault(f"{plan}, T={sampling.temperature}, row {row}: round {at} differs from the CPU's")
                rounds += len(ours.steps)
    return {"rounds": rounds}


def families(setting: Setting) -> dict[str, Any]:
    """Masks, windows, soft-capping and cache of every kind of target, in fp32, and lossless decoding with them."""
    tokens, chosen = 0, tuple(FAMILIES) if setting.cuda else ("llama", "gemma3")
    for family in chosen:
        try:
            verify(tiny_target(family, device=setting.device, vocab_size=V))
        except UserError as error:
            raise Fault(f"{family}: {error}") from error
        if family != "llama":
            tokens += _lossless(setting, "eager", PLANS[2:], SETTINGS[:1], family)["tokens"]
    return {"families": len(chosen), "tokens": tokens}


def bf16_text(setting: Setting) -> dict[str, Any]:
    """A bf16 model with a known text: plain, forced chain and tree, and transformers all write it."""
    model = habit_model(SHAPES["tiny"], setting.device, torch.bfloat16)
    prompt = model.prompt(6)
    text = model.text(prompt, NEW_TOKENS + 8)
    forced = Forced(model.target, pattern=PATTERN, recorded=[prompt + text])
    learnt = random_eagle3(model.target, model.kept_W).bfloat16().eval()
    found = {
        "transformers": TransformersArm(model.target, sampling=Sampling())
        .run(prompt, request_id=0, max_new_tokens=NEW_TOKENS)
        .ids
    }
    for plan, drafter in ((None, None), (PLANS[0], forced), (PLANS[2], forced), (PLANS[2], learnt)):
        decoder = Decoder(model.target, drafter, plan=plan)
        (out,) = decoder.generate([prompt], max_new_tokens=NEW_TOKENS)
        found["plain" if drafter is None else f"{drafter.name} {plan}"] = out.ids
    wrong = [name for name, ids in found.items() if ids != text[:NEW_TOKENS]]
    if wrong:
        raise Fault(f"{', '.join(wrong)}: not the model's text, which it says by a lead no rounding explains")
    return {"arms": len(found), "tokens": NEW_TOKENS}


def marked_tests(setting: Setting) -> dict[str, Any]:
    """The project's other tests with the mark ``gpu``, where pytest is installed; those of ``tests/gpu`` are these."""
    if not setting.cuda:
        raise Skipped("no GPU")
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("pytest is not installed; the checks above are what tests/gpu runs")
    root = Path(__file__).resolve().parents[1]
    files = [p for p in sorted((root / "tests").rglob("test_*.py")) if p.parent.name != "gpu" and MARK in p.read_text()]
    if not files:
        raise Skipped("there are none outside tests/gpu")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1:] or [done.stderr.strip()[-200:]]
    if done.returncode != 0:
        raise Fault(f"pytest ended with {done.returncode}: {last[0]}")
    return {"files": len(files), "result": last[0]}
