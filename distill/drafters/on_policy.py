"""On-policy distillation (arXiv:2306.13649, generalised knowledge distillation): the draft writes, the target scores.

A share of the documents is continued by the draft, sampled at temperature 1, in place of the last answer; the loss then
compares draft and target where the draft will stand when it drafts, on its own text::

    before   prompt  answer answer answer <end>
    after    prompt  draft  draft  <end>  answer        the rest is left as it was, and not supervised
    loss             1      1      1      0
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from distill.attention import segments
from distill.types import Batch

Sample = Callable[[list[list[int]], list[int]], list[list[int]]]
"""(prompts, most tokens each) -> sampled continuations, up to and including the end of text."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a document can be continued: its last supervised run, to the end of the document.

    Attributes:
        row: of the batch.
        start: first column of the document.
        begin: first column of the run; the prompt lies before it.
        end: column behind the document.
    """

    row: int
    start: int
    begin: int
    end: int


def places(batch: Batch) -> list[Place]:
    """Every document with a prompt and a supervised run behind it."""
    found, mask = [], batch.loss_mask_BL.tolist()
    for row, start, end in segments(batch.doc_BL):
        last = next((i for i in reversed(range(start, end)) if mask[row][i]), None)
        if last is None:
            continue
        begin = next((i + 1 for i in reversed(range(start, last)) if not mask[row][i]), start)
        if begin > start + 1:  # the one token that plain text begins with is no prompt
            found.append(Place(row=row, start=start, begin=begin, end=end))
    return found


def rewrite(batch: Batch, chosen: list[Place], *, most: int, sample: Sample) -> Batch:
    """Return the batch with the ``chosen`` documents continued by ``sample``.

    The denominator stays: it belongs to the whole optimiser step, all ranks included, and a step's weight should not
    depend on how long the draft talks.

    Args:
        batch: packed documents.
        chosen: some of ``places(batch)``.
        most: tokens a continuation may have.
        sample: writes them.
    """
    if not chosen:
        return batch
    ids, mask = batch.ids_BL.clone(), batch.loss_mask_BL.clone()
    prompts = [batch.ids_BL[p.row, p.start : p.begin].tolist() for p in chosen]
    limits = [min(most, p.end - p.begin) for p in chosen]
    for place, written in zip(chosen, sample(prompts, limits), strict=True):
        stop = place.begin + len(written)
        ids[place.row, place.begin : stop] = torch.tensor(written, device=ids.device)
        mask[place.row, place.start : place.end] = False
        mask[place.row, place.begin : stop] = True
    return replace(batch, ids_BL=ids, loss_mask_BL=mask)
