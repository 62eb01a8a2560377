"""Our chain with a draft model against transformers' assisted generation with the same two models.

Greedy, batch 1, one process, arms in turns. The draft is the target without a few of its middle layers, untrained: what
is compared is the time of the same accepted tokens, so acceptance must be equal and its height does not matter. In fp32
it is equal pass by pass, which is measured too; in bf16 scores that round alike may fall one way here, another there.
"""

import math
import statistics
from typing import Literal

from bench.record import Measurement, Options
from distill.drafters.draft_model import DraftModel, DraftModelConfig
from distill.sampling import Sampling
from distill.target import Target, TargetConfig, load_target
from distill.tree import Chain
from serve_eval.arms import Arm, DecoderArm, PeerArm, TransformersArm

PART = "draft_chain"
LENGTH = 3
QUESTIONS = ("Explain how rainbows form.", "Write a short story about a lighthouse.", "What is a prime number?")


def run(options: Options) -> list[Measurement]:
    """Measure tokens/s of both, and of plain ``generate``."""
    dtype: Literal["float32", "bfloat16"] = "float32" if options.quick else "bfloat16"
    target, drafter = _pair(options, dtype)
    new, repeats = (8, 1) if options.quick else (64, 2)
    greedy = Sampling()
    # Transformers first: the fast engine lays the draft's weights side by side, which only moves them.
    arms: dict[str, Arm] = {
        "assisted": PeerArm.assisted(target, drafter.backbone.model, sampling=greedy, length=LENGTH),
        "generate": TransformersArm(target, sampling=greedy),
        "ours": DecoderArm(target, sampling=greedy, drafter=drafter, plan=Chain(LENGTH), engine=options.engine),
    }
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    accepted: dict[str, list[float]] = {"ours": [], "assisted": []}
    for repeat in range(repeats + 1):
        for question in QUESTIONS[: 1 if options.quick else None]:
            ids = _prompt(target, question)
            for name, arm in arms.items():
                done = arm.run(ids, request_id=0, max_new_tokens=new, ignore_eos=True)
                if repeat:
                    speeds[name].append((len(done.ids) - 1) / done.decode_s)
                    if name in accepted:
                        accepted[name].append(sum(len(s.tokens) for s in done.steps) / len(done.steps))
    tau = {name: statistics.mean(values) for name, values in accepted.items()}
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    del target, drafter, arms, arm
    alike, passes = _passes_alike(options, new)
    note = f"chain of {LENGTH}, tau {tau['ours']:.2f} and {tau['assisted']:.2f}, {dtype}"
    detail = {"tokens_per_s": medians, "tau": tau}
    return [
        Measurement(
            part=PART,
            name="our chain over transformers' assisted generation, same two models",
            value=medians["ours"] / medians["assisted"],
            unit="x",
            bar=1.3,
            at_least=True,
            note=note,
            detail=detail,
        ),
        Measurement(
            part=PART,
            name="acceptance length, ours over assisted generation",
            value=tau["ours"] / tau["assisted"],
            unit="x",
            note="differs where bf16 rounds two scores alike, and by what the first pass settles",
            detail=tau,
        ),
        Measurement(
            part=PART,
            name="passes that accept as many drafts as assisted generation, fp32",
            value=100 * alike / passes if passes else math.nan,
            unit="%",
            bar=100.0,
            at_least=True,
            note=f"{passes} passes",
        ),
    ]


def _pair(options: Options, dtype: Literal["float32", "bfloat16"]) -> tuple[Target, DraftModel]:
    """The target, and itself without two of its middle layers."""
    target = load_target(TargetConfig(name=options.target, dtype=dtype, device="cpu", verify=False))
    n = target.info.n_layers
    kept = [layer for layer in range(n) if layer not in (n // 3, n // 2)]
    return target, DraftModel(DraftModelConfig(layers=kept), target).to(target.dtype).eval()


def _prompt(target: Target, question: str) -> list[int]:
    return target.encode_chat([{"role": "user", "content": question}], add_generation_prompt=True)


def _passes_alike(options: Options, new: int) -> tuple[int, int]:
    """(passes with as many accepted drafts, passes), in fp32."""
    target, drafter = _pair(options, "float32")
    theirs = PeerArm.assisted(target, drafter.backbone.model, sampling=Sampling(), length=LENGTH)
    ours = DecoderArm(target, sampling=Sampling(), drafter=drafter, plan=Chain(LENGTH), engine=options.engine)
    alike = passes = 0
    for question in QUESTIONS[: 1 if options.quick else None]:
        ids = _prompt(target, question)
        mine = ours.run(ids, request_id=0, max_new_tokens=new, ignore_eos=True)
        # Assisted generation drafts for the first token as well: it gets ours. Its first pass is not among its steps.
        peer = theirs.run([*ids, mine.ids[0]], request_id=0, max_new_tokens=new - 1, ignore_eos=True)
        pairs = list(zip(mine.steps[1:], peer.steps, strict=False))[:-1]  # the last one is cut at the limit
        alike += sum(len(one.tokens) == len(other.tokens) for one, other in pairs)
        passes += len(pairs)
    return alike, passes
