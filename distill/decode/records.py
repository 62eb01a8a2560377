"""What goes into a decode and what comes out."""

from dataclasses import dataclass, field
from typing import Any, Literal

from distill.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: generated tokens at most, the first one (from the prefill) included.
        request_id: keys the noise; equal prompts with different ids get different samples.
        sampling: None takes the decoder's; a batch may mix greedy rows and rows of one sampled setting.
        tag: carried through to the result.
    """

    prompt: list[int]
    max_new_tokens: int
    request_id: int = 0
    sampling: Sampling | None = None
    tag: Any = None


@dataclass(frozen=True)
class StepRecord:
    """One pass of the target over one proposal.

    Attributes:
        tokens: ids emitted, truncated at the end of text and at the limit; the first ``accepted`` were drafted.
        accepted: drafted tokens among them.
        offered: depth of the proposal's deepest node, cut to what the truncation left room for.
        rejected: the other drafted ids of the tree, in node order (for viewers).
    """

    tokens: tuple[int, ...]
    accepted: int
    offered: int
    rejected: tuple[int, ...] = ()


@dataclass(kw_only=True)
class Generation:
    """One finished continuation.

    Attributes:
        ids: generated ids up to and including the first end-of-text, capped at ``max_new_tokens``.
        steps: one record per target pass after the prefill (whose token is ``ids[0]``).
        finished: why it ended.
        ttft_s: seconds until the first token was on the host.
        decode_s: seconds from then until the last.
    """

    request_id: int
    prompt_len: int
    ids: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    finished: Literal["eos", "length"] = "length"
    ttft_s: float = 0.0
    decode_s: float = 0.0
    tag: Any = None
