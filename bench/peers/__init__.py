"""Our training step beside other projects' training loops, each in an environment of its own (``README.md``).

Both arms train the same EAGLE-3 drafter (same start, same trained parameters) on the same packed row and the same
stored features of the target, whose forward is part of neither; a step is forward, backward, clipping and AdamW. They
run in two processes, in turns. ``README.md`` says where the work differs.

This file and ``protocol.py`` are imported by the peers' environments, which lack our
dependencies: standard library only, the rest is imported inside ``compare``.
"""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bench.peers.protocol import Arm
from bench.record import Measurement, Options

PART = "peers"
VARIABLE = "DRAFTSMITH_PEER_SPECULATORS"
ROOT = Path(__file__).resolve().parents[2]
DEFAULT = ROOT / ".venv-speculators" / "bin" / "python"
MIB = 2**20
LOSS_MARGIN = 0.03
"""Share by which the two first losses may differ: a few positions at the end of a document count for one arm only."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What both arms train.

    Attributes:
        steps: K of the training-time test.
        length: tokens of the packed row; documents have up to 512, of which the last three quarters are supervised.
        dtype: of the features, and of the autocast (master weights are fp32).
        head: whether the draft head is trained; speculators 0.9.0 keeps it frozen unless told otherwise.
        draft_vocab: W.
        turns: measured steps of each arm, after one that is not.
    """

    steps: int
    length: int
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    head: Literal["trained", "frozen"] = "trained"
    draft_vocab: int = 8192
    turns: int = 3

    @property
    def label(self) -> str:
        """Short name, part of the figures' names."""
        short = {"bfloat16": "bf16", "float32": "fp32"}[self.dtype]
        return f"K={self.steps}, L={self.length}, {short}, head {self.head}"


SETTINGS = (
    Setting(steps=3, length=1024),
    Setting(steps=3, length=1024, head="frozen"),
    Setting(steps=7, length=2048),
)
QUICK = (Setting(steps=2, length=64, draft_vocab=80, turns=1),)


def run(options: Options) -> list[Measurement]:
    """Measure every setting, about two minutes; one line without a figure where the peer is not installed."""
    python = find_python()
    if isinstance(python, str):
        return [Measurement(part=PART, name="tokens/s over speculators", value=nan, unit="x", note=python)]
    return [m for setting in (QUICK if options.quick else SETTINGS) for m in compare(setting, options, python)]


def find_python() -> Path | str:
    """The interpreter of the peer's environment, or one sentence on why there is none."""
    named = os.environ.get(VARIABLE)
    path = Path(named) if named else DEFAULT
    if path.is_file():
        return path
    where = f"{VARIABLE} must name its Python, got {named}" if named else f"neither {VARIABLE} nor .venv-speculators"
    return f"not measured: {where}; see bench/peers/README.md"


def compare(setting: Setting, options: Options, python: Path) -> list[Measurement]:
    """Run both arms in turns."""
    from bench.peers.job import write_job

    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_job(folder, setting, options)
        commands = {
            "ours": [sys.executable, "-m", "bench.peers.our_loop", str(folder)],
            "speculators": [str(python), "-m", "bench.peers.speculators_loop", str(folder)],
        }
        env = {"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        arms = {n: stack.enter_context(Arm(n, command, cwd=ROOT, env=env)) for n, command in commands.items()}
        answers = take_turns(arms, setting.turns)
        about = {n: arm.about for n, arm in arms.items()}
    return figures(setting, answers, about)


def take_turns(arms: Mapping[str, Arm], turns: int) -> dict[str, list[dict[str, float]]]:
    """Every arm's answers; the first of each is the warm-up."""
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for _ in range(turns + 1):
        for name, arm in arms.items():
            answers[name].append(arm.step())
    return answers


def figures(
    setting: Setting, answers: Mapping[str, Sequence[Mapping[str, float]]], about: Mapping[str, Mapping[str, Any]]
) -> list[Measurement]:
    """Speed and memory ratios of one setting.

    Raises:
        RuntimeError: the arms trained different parameters, or started from different losses.
    """
    trained = {name: what["trained_parameters"] for name, what in about.items()}
    if len(set(trained.values())) > 1:
        raise RuntimeError(f"both arms must train the same parameters, got {trained}")
    losses = {name: all_[0]["loss"] for name, all_ in answers.items()}
    if not abs(losses["ours"] - losses["speculators"]) <= LOSS_MARGIN * losses["ours"]:
        raise RuntimeError(f"both arms must start from the same loss, got {losses}")
    seconds = {name: [answer["seconds"] for answer in all_[1:]] for name, all_ in answers.items()}
    grown = {name: max(answer["grown"] for answer in all_) / MIB for name, all_ in answers.items()}
    rate = {name: setting.length / median(each) for name, each in seconds.items()}
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["speculators"], strict=True)]
    detail = {
        "tokens_per_s": rate,
        "seconds": seconds,
        "grown_mib": grown,
        "first_loss": losses,
        "about": {name: dict(what) for name, what in about.items()},
        "draft_vocab": setting.draft_vocab,
    }
    speculators = f"speculators, {setting.label}"
    speeds = f"{rate['ours']:.0f} against {rate['speculators']:.0f} tokens/s"
    return [
        Measurement(
            part=PART,
            name=f"tokens/s over {speculators}",
            value=median(ratios),
            unit="x",
            note=f"{speeds}, {trained['ours'] / 1e6:.1f} M trained",
            detail=detail,
        ),
        Measurement(
            part=PART,
            name=f"memory of {speculators}, over ours",
            value=grown["speculators"] / grown["ours"] if grown["ours"] else nan,
            unit="x",
            note=f"resident memory a step adds: {grown['speculators']:.0f} and {grown['ours']:.0f} MiB",
        ),
    ]
