"""task=generate: answer a prompt as a stream, showing which tokens came from accepted drafts."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text

from distill.config import opt
from distill.decode import Decoder, Engine, Generation, StepRecord, Typical, check_thresholds, lossless
from distill.errors import UserError
from distill.metrics import accept_by_depth, tau
from distill.sampling import Sampling
from distill.target import TargetConfig
from distill.tree import PlanConfig
from serve_eval.arms import plan_label
from serve_eval.checkpoint import auto_target, load_pair, plan_for
from serve_eval.measure import encode
from serve_eval.pieces import TextStream

DRAFTED = "green underline"
OPEN, CLOSE = "[", "]"
PLAIN = "plain decoding"


@dataclass(kw_only=True)
class Config:
    """Options of task=generate."""

    checkpoint: str | None = opt(None, "run folder or export folder of the drafter; null decodes without one")
    drafter: dict[str, Any] = opt({}, "instead of a checkpoint: a drafter without weights (prompt_lookup, early_exit)")
    target: TargetConfig = field(
        default_factory=auto_target, metadata={"help": "target model; name auto takes the checkpoint's own"}
    )
    prompt: str | None = opt(None, "what to ask")
    system: str | None = opt(None, "system message; null leaves it to the chat template")
    tree: PlanConfig = field(default_factory=PlanConfig, metadata={"help": "shape of the proposals"})
    verifier: str = opt("match", "which drafts are kept: match, rejection, or typical, which is not lossless")
    candidates: str = opt("auto", "how drafts are picked: auto (what suits the verifier), topk, coupled or sampled")
    typical_epsilon: float = opt(0.09, "typical: a token above this probability is kept")
    typical_delta: float = opt(0.3, "typical: and one above this times exp(-entropy)")
    temperature: float = opt(0.0, "sampling temperature; 0 is greedy")
    top_k: int = opt(0, "sample among the k most likely tokens; 0 switches it off")
    top_p: float = opt(1.0, "sample among the most likely tokens of this mass; 1 switches it off")
    engine: Engine = opt("fast", "fast, or eager: the target's own forward")
    seed: int = opt(0, "keys the sampling noise: the same seed gives the same text")
    max_new_tokens: int = opt(256, "generated tokens at most")
    chat: bool = opt(True, "put the prompt through the chat template; false continues it as plain text")
    marks: bool = opt(True, "mark tokens that came from accepted drafts; false prints the text alone")


def run(config: Config, *, console: Console | None = None) -> Generation:
    """Stream the answer to stdout, then acceptance length and speed.

    Raises:
        UserError: no prompt, one that does not fit the model, or a bad checkpoint.
    """
    if config.prompt is None or not config.prompt.strip():
        raise UserError("prompt must be text to answer, got none; pass \"prompt='Why is the sky blue?'\"")
    sampling = Sampling(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, seed=config.seed)
    pair = load_pair(config.checkpoint, config.target, drafter=config.drafter)
    target, plan = pair.target, None
    if pair.drafter is not None:
        plan = plan_for(pair.drafter, config.tree, sampling)
    elif config.tree != PlanConfig() or config.verifier != "match" or config.candidates != "auto":
        raise UserError(
            "tree, verify and candidates must be left alone without a drafter, which they are about; pass "
            "checkpoint=DIR or drafter=prompt_lookup"
        )
    messages = [{"role": "system", "content": config.system}] if config.system else []
    messages.append({"role": "user", "content": config.prompt})
    prompt = encode(target, messages, chat=config.chat)
    thresholds = Typical(epsilon=config.typical_epsilon, delta=config.typical_delta)
    check_thresholds(thresholds, [config.verifier])
    decoder = Decoder(
        target,
        pair.drafter,
        plan=plan,
        sampling=sampling,
        verifier=config.verifier,
        candidates=config.candidates,
        typical=thresholds,
        engine=config.engine,
    )
    console = console or Console(soft_wrap=True)
    printer = Printer(console, TextStream(partial(target.decode, skip_special_tokens=True)), marks=config.marks)
    (out,) = decoder.generate([prompt], max_new_tokens=config.max_new_tokens, on_step=printer)
    printer.close()
    console.print(_closing(out, _label(decoder)), highlight=False, markup=False)
    return out


def _label(decoder: Decoder) -> str:
    """How the answer was decoded; a text that is not the target's own says so."""
    if decoder.plan is None or decoder.drafter is None:
        return PLAIN
    kept = lossless(decoder.rule, temperature=decoder.sampling.temperature)
    notes = [] if kept else [f"not lossless: {decoder.rule} acceptance"]
    notes += [] if decoder.target.base is None else ["target adapted by its drafter"]
    label = f"{decoder.drafter.name} {plan_label(decoder.plan)}"
    return f"{label} ({'; '.join(notes)})" if notes else label


class Printer:
    """Prints tokens as they come; accepted drafts in colour, or in brackets where there is no colour."""

    def __init__(self, console: Console, stream: TextStream, *, marks: bool = True):
        self._console, self._stream, self._marks = console, stream, marks
        self._colour = console.color_system is not None
        self._inside = False

    def __call__(self, row: int, record: StepRecord | None, ids: list[int]) -> None:
        """Take the tokens of one pass; ``record`` is None for the prefill's token."""
        accepted = record.accepted if record is not None else 0
        for index, token in enumerate(ids):
            piece = self._stream.push(token)
            if piece:
                self._print(piece, drafted=self._marks and index < accepted)
        self._console.file.flush()

    def _print(self, piece: str, *, drafted: bool) -> None:
        if self._colour:
            self._console.print(Text(piece, style=DRAFTED if drafted else ""), end="")
            return
        bracket = OPEN if drafted and not self._inside else CLOSE if self._inside and not drafted else ""
        self._inside = drafted
        self._console.print(bracket + piece, end="", markup=False, highlight=False)

    def close(self) -> None:
        """End the text."""
        self._console.print(CLOSE if self._inside else "", markup=False, highlight=False)


def _closing(out: Generation, label: str) -> str:
    """Figures of this one answer. No speedup: that takes a baseline, which task=bench measures."""
    count = len(out.ids) - 1
    parts = [f"{len(out.ids)} tokens", f"first after {out.ttft_s * 1000:.0f} ms"]
    if count and out.decode_s > 0:
        parts.append(f"then {count / out.decode_s:.1f} tokens/s")
    if out.steps and label != PLAIN:
        drafted = sum(step.accepted for step in out.steps)
        by_depth = " ".join(f"{rate:.0%}" for rate in accept_by_depth(out.steps) if rate == rate)
        parts.append(f"{tau(out.steps):.2f} tokens per target pass")
        parts.append(f"{drafted / len(out.ids):.0%} drafted (accepted by depth: {by_depth})")
    return f"\n{label}: {', '.join(parts)}"
