"""The target's side of a loss: which of its rows are needed, and what it says there, a few rows at a time."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.alignment import teacher_row
from distill.divergence import Rows, argmax, wide
from distill.types import Batch, StepPrediction
from distill.vocab import DraftVocab


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which flattened positions R = B*L each step counts at, and the teacher row each is compared with.

    Attributes:
        predictions: the K steps.
        heads: the different heads, each with the steps that speak through it.
        valid_KR: where a step counts.
        rows: teacher rows any step needs, ascending; each is made once, however many steps are compared with it.
        positions: per step, where it counts, ascending.
        places: per step, the index into ``rows`` of each position's teacher; also on the host.
    """

    predictions: Sequence[StepPrediction]
    heads: list[tuple[Callable[[Tensor], Tensor], list[int]]]
    valid_KR: Tensor
    rows: Tensor
    positions: list[Tensor]
    places: list[Tensor]
    places_host: list[list[int]]

    @classmethod
    def make(cls, predictions: Sequence[StepPrediction], batch: Batch) -> "Plan":
        """Read the masks of ``predictions``."""
        flat = batch.loss_mask_BL.flatten()
        valid_KR = (
            torch.stack([p.mask_BL.flatten() for p in predictions]) if predictions else flat.new_zeros(0, len(flat))
        )
        positions = [valid_R.nonzero()[:, 0] for valid_R in valid_KR]
        teachers = [at + teacher_row(p.shift) for at, p in zip(positions, predictions, strict=True)]
        needed = torch.zeros_like(flat)
        for rows in teachers:
            needed[rows] = True
        place_of = needed.cumsum(0) - 1
        places = [place_of[rows] for rows in teachers]
        heads: list[tuple[Callable[[Tensor], Tensor], list[int]]] = []
        for k, prediction in enumerate(predictions):
            # Equal, not identical: a bound method is a new object every time it is looked up.
            same = next((steps for head, steps in heads if head == prediction.head), None)
            if same is None:
                heads.append((prediction.head, [k]))
            else:
                same.append(k)
        return cls(
            predictions=predictions,
            heads=heads,
            valid_KR=valid_KR,
            rows=needed.nonzero()[:, 0],
            positions=positions,
            places=places,
            places_host=[place.tolist() for place in places],
        )

    def part(self, k: int, start: int, end: int) -> tuple[Tensor, slice | Tensor]:
        """Step k's positions whose teachers are ``rows[start:end]``, and where among those each one's teacher is."""
        host = self.places_host[k]
        a, b = bisect_left(host, start), bisect_left(host, end)
        if b > a and host[b - 1] - host[a] == b - 1 - a:  # no gap: a view instead of a copy
            return self.positions[k][a:b], slice(host[a] - start, host[b - 1] + 1 - start)
        return self.positions[k][a:b], self.places[k][a:b] - start


def part_of(places: slice | Tensor, start: int, end: int) -> slice | Tensor:
    """``places[start:end]``."""
    if isinstance(places, slice):
        return slice(places.start + start, min(places.start + end, places.stop))
    return places[start:end]


class Teacher:
    """The target's distribution at chosen rows, and the token written after each, seen through the draft vocabulary.

    Args:
        head: maps features [..., D] to the target's logits [..., V].
        last_BLD: the target's last hidden states.
        ids_BL: the text.
        vocab: the draft vocabulary, None for the full one.
    """

    BLOCK = 8192  # vocabulary entries whose logits are widened at once

    def __init__(
        self, head: Callable[[Tensor], Tensor], last_BLD: Tensor, ids_BL: Tensor, vocab: DraftVocab | None
    ) -> None:
        self.head, self.last_RD, self.vocab = head, last_BLD.flatten(0, 1), vocab
        written_BL = torch.full_like(ids_BL, -1)
        written_BL[:, :-1] = ids_BL[:, 1:]
        self.written_R = written_BL.flatten() if vocab is None else vocab.from_target(written_BL.flatten())

    @torch.no_grad()
    def at(self, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """What the target says at ``rows``, as ``Rows.make`` takes it: kept logits, log-sum-exp, choice."""
        logits_CV = self.head(self.last_RD[rows])
        if self.vocab is None:
            logits_CV = wide(logits_CV)
            return logits_CV, None, argmax(logits_CV)
        best_C, choice_C, sums = None, rows, []
        for start in range(0, logits_CV.shape[1], self.BLOCK):
            block_CB = wide(logits_CV[:, start : start + self.BLOCK])
            sums.append(block_CB.logsumexp(-1))
            at_C = argmax(block_CB)
            value_C = block_CB.gather(1, at_C[:, None])[:, 0]
            if best_C is None:
                best_C, choice_C = value_C, at_C
            else:
                choice_C = torch.where(value_C > best_C, at_C + start, choice_C)
                best_C = torch.maximum(best_C, value_C)
        kept_CW = wide(logits_CV.index_select(1, self.vocab.target_ids))
        return kept_CW, torch.stack(sums).logsumexp(0), self.vocab.from_target(choice_C)

    def chunks(self, rows: Tensor, sizes: tuple[int, int], *, name: str) -> Iterator[tuple[int, Rows]]:
        """Where each chunk of ``rows`` starts, and what the loss ``name`` needs of it.

        Args:
            rows: flattened positions.
            sizes: rows whose logits exist at once, and how many of them are a chunk (``losses.chunk_rows``).
            name: the loss.
        """
        many, few = sizes
        for first in range(0, len(rows), many):
            block = rows[first : first + many]
            kept_CW, normaliser_C, choice_C = self.at(block)
            written_C = self.written_R[block]
            for start in range(0, len(choice_C), few):
                part = slice(start, start + few)
                whole_C = None if normaliser_C is None else normaliser_C[part]
                yield (
                    first + start,
                    Rows.make(name, kept_CW[part], whole_C, choice_C=choice_C[part], written_C=written_C[part]),
                )
            del kept_CW  # before the next ones are made
