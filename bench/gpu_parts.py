"""The parts of ``bench.gpu_check`` in the order they run; names only, so that nothing heavy is imported here."""

from dataclasses import dataclass
from typing import Literal

PATIENCE = 3.0
"""A part is ended when it takes so many times what it should."""


class Fault(AssertionError):  # noqa: N818 - what a check reports, as a failed assert does
    """A check found something wrong; the message says what."""


class Skipped(Exception):  # noqa: N818 - not an error
    """A part does not apply here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One check or measurement.

    Attributes:
        name: what the report calls it.
        kind: a check passes or fails; a measurement gives figures (and fails if the text it decodes is wrong).
        address: "module:function", called with a ``Setting``.
        seconds: how long it should take on one big GPU; it is not begun when less is left.
    """

    name: str
    kind: Literal["check", "measure"]
    address: str
    seconds: float

    @property
    def limit(self) -> float:
        """Seconds after which it is ended."""
        return PATIENCE * self.seconds


def _check(name: str, address: str, seconds: float) -> Part:
    return Part(name=name, kind="check", address=f"bench.{address}", seconds=seconds)


def _measure(name: str, address: str, seconds: float) -> Part:
    return Part(name=name, kind="measure", address=f"bench.{address}", seconds=seconds)


# What costs most and matters least comes last: it is what falls away when time runs short.
PARTS: tuple[Part, ...] = (
    _check("cache commits", "gpu_parity:cache_commits", 5),
    _check("attention over cache and tree", "gpu_attention:tree_attention", 10),
    _check("attention inside documents", "gpu_attention:document_attention", 10),
    _check("training-time-test attention", "gpu_attention:training_attention", 20),
    _check("chunked losses", "gpu_parity:chunked_losses", 10),
    _check("training step", "gpu_parity:training_step", 15),
    _check("lossless, eager", "gpu_lossless:eager", 40),
    _check("same trees as on the CPU", "gpu_lossless:same_trees", 30),
    _check("every kind of target", "gpu_lossless:families", 30),
    _check("bf16 text", "gpu_lossless:bf16_text", 10),
    _measure("machine", "gpu_passes:rates", 10),
    _measure("verify cost", "gpu_passes:verify_cost", 30),
    _measure("draft cost", "gpu_passes:draft_cost", 10),
    _measure("autoregressive", "gpu_decode:autoregressive", 20),
    _measure("forced acceptance", "gpu_decode:forced", 40),
    _measure("host waits", "gpu_decode:host_reads", 15),
    _measure("training", "gpu_training:training", 25),
    _check("lossless, fast", "gpu_lossless:fast", 60),
    _measure("verify cost, fast", "gpu_passes:verify_cost_fast", 20),
    _measure("autoregressive, fast", "gpu_decode:autoregressive_fast", 45),
    _measure("forced acceptance, fast", "gpu_decode:forced_fast", 45),
    _check("other gpu-marked tests", "gpu_lossless:marked_tests", 30),
    _measure("transformers, static cache", "gpu_decode:transformers_static", 60),
)
