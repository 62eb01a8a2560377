"""Running every arm on every turn of a prompt under the same conditions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from distill.errors import UserError
from distill.sampling import Sampling
from distill.target import Target
from serve_eval.arms import Arm, ArmRun, PeakMemory, rotation
from serve_eval.oracle import recompute
from serve_eval.pieces import pieces
from serve_eval.prompts import Message, Prompt
from serve_eval.rows import Record

TURN_STRIDE = 64
"""The noise of a turn is keyed by prompt index * stride + turn; more turns than this are refused."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What all arms share: sampling, the cap on new tokens, repeats, the way prompts become ids."""

    sampling: Sampling
    max_new_tokens: int
    ignore_eos: bool = False
    repeats: int = 1
    chat: bool = True


def measure_prompt(
    target: Target,
    prompt: Prompt,
    arms: Sequence[Arm],
    conditions: Conditions,
    *,
    index: int,
    memory: PeakMemory,
    shown: bool = False,
) -> list[Record]:
    """Let every arm answer every turn of one prompt, repeatedly, in rotating order.

    Args:
        target: encodes and decodes text, and judges where arms differ.
        prompt: the conversation.
        arms: the first must be ``ar``: its answers are the history of later turns, for all arms.
        conditions: what they share.
        index: number of the prompt; decides the rotation and the noise.
        memory: the meter.
        shown: keep the text of every token of the speculative arms for the report.
    """
    messages = opening(prompt)
    records: list[Record] = []
    for turn, question in enumerate(prompt.turns):
        if turn:
            messages.append({"role": "user", "content": question})
        ids = encode(target, messages, chat=conditions.chat)
        request_id = index * TURN_STRIDE + turn
        runs: dict[str, list[ArmRun]] = {arm.name: [] for arm in arms}
        peaks: dict[str, list[int]] = {arm.name: [] for arm in arms}
        for repeat in range(conditions.repeats):
            for arm in rotation(arms, index + turn + repeat):
                memory.start()
                run = arm.run(
                    ids,
                    request_id=request_id,
                    max_new_tokens=conditions.max_new_tokens,
                    ignore_eos=conditions.ignore_eos,
                )
                peak = memory.stop()
                runs[arm.name].append(run)
                if peak is not None:
                    peaks[arm.name].append(peak)
        base = runs[arms[0].name][0].ids
        for arm in arms:
            record = _record(prompt, turn, ids, arm, runs[arm.name], peaks[arm.name])
            # Transformers draws its own random numbers, and so does rejection: other samples of the same law.
            own_draws = arm.kind in ("hf", "peer") or getattr(arm, "verifier", "match") != "match"
            if conditions.sampling.greedy or not own_draws:
                _compare(record, base, target, ids, conditions.sampling, request_id)
            if shown and arm.kind == "spec":
                record.question = question
                record.pieces = pieces(record.ids, partial(target.decode, skip_special_tokens=False))
            records.append(record)
        answer = [token for token in base if token not in target.info.eos_ids]
        messages.append({"role": "assistant", "content": target.decode(answer)})
    return records


def _record(
    prompt: Prompt, turn: int, ids: list[int], arm: Arm, runs: Sequence[ArmRun], peaks: Sequence[int]
) -> Record:
    steps = runs[0].steps
    return Record(
        arm=arm.name,
        prompts=prompt.set,
        category=prompt.category,
        id=prompt.id,
        turn=turn,
        prompt_tokens=len(ids),
        ids=runs[0].ids,
        emitted=[len(step.tokens) for step in steps],
        accepted=[step.accepted for step in steps],
        offered=[step.offered for step in steps],
        ttft_s=[run.ttft_s for run in runs],
        decode_s=[run.decode_s for run in runs],
        peak_memory_bytes=max(peaks, default=None),
    )


def _compare(
    record: Record, base: list[int], target: Target, prompt: list[int], sampling: Sampling, request_id: int
) -> None:
    """Note whether an arm produced the ``ar`` arm's ids and, where not, how close the target's decision was."""
    record.matches = record.ids == base
    if record.matches:
        return
    pairs = enumerate(zip(record.ids, base, strict=False))
    at = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(record.ids), len(base)))
    record.first_difference = at
    judged = recompute(target, prompt, base[: at + 1], sampling=sampling, request_id=request_id)
    record.difference_tie = at < len(judged.gaps) and judged.gaps[at] <= judged.tie_gaps[at]
    # One output a prefix of the other, or a single token left by the filters: there is no gap to speak of.
    if at < len(judged.gaps) and judged.gaps[at] < float("inf"):
        record.difference_gap = judged.gaps[at]


def opening(prompt: Prompt) -> list[Message]:
    """Return the messages up to the first question."""
    return [*prompt.history, {"role": "user", "content": prompt.turns[0]}]


def encode(target: Target, messages: Sequence[Message], *, chat: bool) -> list[int]:
    """Return a prompt's token ids: through the chat template, or the plain text of all messages.

    Raises:
        UserError: the target lacks the template or, for plain text, the tokenizer.
    """
    if chat:
        return target.encode_chat(messages, add_generation_prompt=True)
    if target.tokenizer is None:
        raise UserError(f"target {target.info.name} must have a tokenizer for text prompts, got none")
    return list(target.tokenizer("\n".join(m["content"] for m in messages))["input_ids"])


def check_fits(target: Target, prompt: Prompt, conditions: Conditions) -> None:
    """Refuse a prompt whose turns could not all be answered in full, before anything is measured.

    Raises:
        UserError: naming the prompt.
    """
    messages = opening(prompt)
    for question in prompt.turns[1:]:
        messages += [{"role": "assistant", "content": "."}, {"role": "user", "content": question}]
    length = len(encode(target, messages, chat=conditions.chat))
    answers = len(prompt.turns) * conditions.max_new_tokens
    limit = target.info.max_positions
    if length + answers > limit:
        raise UserError(
            f"prompt {prompt.id!r} of {prompt.set} must fit the model's {limit} positions, got {length} tokens plus "
            f"{answers} for its answers; lower max_new_tokens or shorten the prompt"
        )
    if len(prompt.turns) > TURN_STRIDE:
        raise UserError(
            f"prompt {prompt.id!r} of {prompt.set} must have at most {TURN_STRIDE} turns, got {len(prompt.turns)}"
        )
