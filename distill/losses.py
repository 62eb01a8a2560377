"""Losses between the target's distribution p and the draft's q, chunked so that logits are never held whole.

Per position, with p~ = p restricted to the draft vocabulary and renormalised, and p the target's
probabilities over its full vocabulary:

* ``ce``          -sum p~ log q            (EAGLE-3, arXiv:2503.01840)
* ``kl``          sum p~ (log p~ - log q)  (same gradient as ``ce``)
* ``reverse_kl``  sum q (log q - log p~)
* ``tv``          1 - alpha,  alpha = sum min(p, q): the chance that speculative sampling accepts
* ``lk``          -log alpha               (arXiv:2602.23881, the "alpha" form)

The total is sum_k w_k sum_i l_ik / (sum_k w_k * denominator). The denominator is the number of supervised
tokens in the whole optimiser step, so the learning rate depends neither on how dense the mask is, nor on
accumulation or ranks, nor on the number of steps k. As in EAGLE-3, positions where the target's own choice
is outside the draft vocabulary carry no loss; they count as misses in the metrics.

Memory: a chunk is a few teacher rows and, for every step, the draft rows that are compared with them; the teacher's
logits are made for several chunks at once, of which only the draft vocabulary stays. The larger the vocabularies, the
fewer rows (``chunk_rows``), so what they take does not depend on them.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.alignment import teacher_row
from distill.config import opt
from distill.divergence import Rows, pointwise, wide
from distill.errors import UserError
from distill.heads import Head, head_of
from distill.target import Target
from distill.types import Batch, StepPrediction, TargetOutput
from distill.vocab import DraftVocab

CHUNK_LOGITS = {"cpu": (2**24, 2**22), "cuda": (2**26, 2**26)}
"""Logits of the teacher and of the draft that exist at once. On a CPU 64 and 16 MiB in fp32: enough rows for a matrix
product to be fast, few enough that what is done with them stays near the cache; on a GPU 256 MiB, which keeps it
busy."""


@dataclass(kw_only=True)
class LossConfig:
    """What is minimised."""

    name: Literal["ce", "kl", "reverse_kl", "tv", "lk"] = opt("ce", "ce, kl, reverse_kl, tv or lk")
    chunk: int | None = opt(
        None, "teacher rows whose logits exist at once; null: fewer, the larger the vocabulary; changes only memory"
    )

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise UserError(f"loss.chunk must be at least 1, got {self.chunk}")


@dataclass(frozen=True, kw_only=True)
class LossResult:
    """Loss and what to log; everything but ``loss`` is detached.

    Attributes:
        loss: scalar to back-propagate.
        loss_K: unweighted sum of the loss per step; K counts the predictions of kind ``logits``.
        hits_K: positions where the draft's argmax is the target's argmax, per step.
        alpha_K: sum of alpha per step.
        count_K: positions that count, per step.
        hits_KBL: the hits by draft start (for the simulated acceptance length).
        valid_KBL: where a step counts.
    """

    loss: Tensor
    loss_K: Tensor
    hits_K: Tensor
    alpha_K: Tensor
    count_K: Tensor
    hits_KBL: Tensor
    valid_KBL: Tensor


def total(
    predictions: Sequence[StepPrediction],
    batch: Batch,
    output: TargetOutput,
    *,
    target: Target,
    vocab: DraftVocab | None,
    config: LossConfig,
) -> LossResult:
    """Weighted loss of all predictions of one packed batch.

    Args:
        predictions: what the drafter says (``StepPrediction``).
        batch: gives shapes and the denominator.
        output: the target's features, the teacher of the distributions.
        target: whose head turns features into logits.
        vocab: the draft vocabulary, None for the full one.
        config: which loss.
    """
    features = [_feature_loss(p) for p in predictions if p.kind == "feature"]
    scale = sum(p.weight for p in predictions) * max(batch.denominator, 1.0)  # a step without supervision: 0
    predictions = [p for p in predictions if p.kind == "logits"]
    plan = _Plan.make(predictions, batch)
    teacher = _Teacher(target, output.last_BLD.flatten(0, 1), vocab)
    hiddens = [p.hidden_BLD.flatten(0, 1) for p in predictions]
    modules = [p.head for p in predictions if isinstance(p.head, nn.Module)]
    params = list({id(w): w for head in modules for w in head.parameters() if w.requires_grad}.values())
    learn = torch.is_grad_enabled()
    loss, stats = _ChunkedLoss.apply(plan, teacher, config, learn, len(hiddens), *hiddens, *params)
    shape = (len(predictions), *batch.ids_BL.shape)
    return LossResult(
        loss=(loss + sum(features)) / scale,
        loss_K=stats.loss_K,
        hits_K=stats.hits_KR.sum(1),
        alpha_K=stats.alpha_K,
        count_K=plan.valid_KR.sum(1),
        hits_KBL=stats.hits_KR.view(shape),
        valid_KBL=plan.valid_KR.view(shape),
    )


def chunk_rows(
    config: LossConfig, *, teacher_size: int, draft_size: int, steps: int, device: torch.device
) -> tuple[int, int]:
    """Teacher rows whose logits exist at once, and how many of them the draft is compared with at a time.

    Both are ``config.chunk``, else what keeps logits within ``CHUNK_LOGITS``; the first is a multiple of the second.
    """
    if config.chunk is not None:
        return config.chunk, config.chunk
    for_teacher, for_draft = CHUNK_LOGITS.get(device.type, CHUNK_LOGITS["cuda"])
    teacher = max(1, for_teacher // max(teacher_size, 1))
    draft = min(teacher, max(1, for_draft // max(steps * draft_size, 1)))
    return teacher - teacher % draft, draft


def _feature_loss(prediction: StepPrediction) -> Tensor:
    """Smooth-L1 on features (EAGLE-1, arXiv:2401.15077, eq. 3), mean over D, weighted sum over positions."""
    assert prediction.feature_target_BLD is not None
    hidden, wanted = wide(prediction.hidden_BLD), wide(prediction.feature_target_BLD)
    error_BLD = F.smooth_l1_loss(hidden, wanted, reduction="none")
    return prediction.weight * (error_BLD.mean(-1) * prediction.mask_BL).sum()


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Which flattened positions R = B*L each step counts at, and the teacher row each is compared with.

    Attributes:
        predictions: the steps.
        valid_KR: where a step counts.
        rows: teacher rows any step needs, ascending.
        positions: per step, where it counts, ascending.
        places: per step, the index into ``rows`` of each position's teacher; also on the host.
    """

    predictions: Sequence[StepPrediction]
    valid_KR: Tensor
    rows: Tensor
    positions: list[Tensor]
    places: list[Tensor]
    places_host: list[list[int]]

    @classmethod
    def make(cls, predictions: Sequence[StepPrediction], batch: Batch) -> "_Plan":
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
        return cls(
            predictions=predictions,
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


@dataclass(kw_only=True)
class _Stats:
    loss_K: Tensor
    alpha_K: Tensor
    hits_KR: Tensor


class _Teacher:
    """The target's distribution at chosen rows, seen through the draft vocabulary."""

    BLOCK = 8192  # vocabulary entries whose logits are widened at once

    def __init__(self, target: Target, last_RD: Tensor, vocab: DraftVocab | None):
        self.target, self.last_RD, self.vocab = target, last_RD, vocab

    @torch.no_grad()
    def at(self, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """What the target says at ``rows``, as ``Rows.make`` takes it: kept logits, log-sum-exp, choice."""
        logits_CV = self.target.logits(self.last_RD[rows])
        if self.vocab is None:
            logits_CV = wide(logits_CV)
            return logits_CV, None, logits_CV.argmax(-1)
        best_C, choice_C, sums = None, rows, []
        for start in range(0, logits_CV.shape[1], self.BLOCK):
            block_CB = wide(logits_CV[:, start : start + self.BLOCK])
            sums.append(block_CB.logsumexp(-1))
            value_C, at_C = block_CB.max(-1)
            if best_C is None:
                best_C, choice_C = value_C, at_C
            else:
                choice_C = torch.where(value_C > best_C, at_C + start, choice_C)
                best_C = torch.maximum(best_C, value_C)
        kept_CW = wide(logits_CV.index_select(1, self.vocab.target_ids))
        return kept_CW, torch.stack(sums).logsumexp(0), self.vocab.from_target(choice_C)

    def chunks(self, rows: Tensor, sizes: tuple[int, int], *, name: str) -> Iterator[tuple[int, Rows]]:
        """Where each chunk of ``rows`` starts, and what the loss ``name`` needs of it; sizes from ``chunk_rows``."""
        many, few = sizes
        for first in range(0, len(rows), many):
            kept_CW, normaliser_C, choice_C = self.at(rows[first : first + many])
            for start in range(0, len(choice_C), few):
                part = slice(start, start + few)
                whole_C = None if normaliser_C is None else normaliser_C[part]
                yield first + start, Rows.make(name, kept_CW[part], whole_C, choice_C[part])
            del kept_CW  # before the next ones are made


class _ChunkedLoss(torch.autograd.Function):
    """Sum of the weighted losses; gradients are made chunk by chunk in the forward, so no logits are kept.

    The loss is a plain sum, so the incoming gradient is one number that scales what the forward stored.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, teacher: _Teacher, config: LossConfig, learn: bool, n_hidden: int, *tensors: Tensor
    ) -> tuple[Tensor, _Stats]:
        hiddens, params = tensors[:n_hidden], tensors[n_hidden:]
        # Every hidden state is in one chunk; a weight is in all, and many small additions need fp32.
        grads = [torch.zeros_like(h) if learn and h.requires_grad else None for h in hiddens]
        sums = {id(w): torch.zeros_like(wide(w)) for w in params if learn}
        heads = _Heads(plan.predictions, sums)
        n_steps, device = len(plan.predictions), plan.valid_KR.device
        acc = torch.float64 if any(h.dtype == torch.float64 for h in hiddens) else torch.float32
        stats = _Stats(
            loss_K=torch.zeros(n_steps, dtype=acc, device=device),
            alpha_K=torch.zeros(n_steps, dtype=acc, device=device),
            hits_KR=torch.zeros_like(plan.valid_KR),
        )
        sizes = chunk_rows(
            config,
            teacher_size=teacher.target.info.vocab_size,
            draft_size=teacher.vocab.size if teacher.vocab else teacher.target.info.vocab_size,
            steps=n_steps,
            device=device,
        )
        # The target and the losses keep their precision; heads remember the one they were called in.
        with torch.autocast(device.type, enabled=False):
            for start, p in teacher.chunks(plan.rows, sizes, name=config.name):
                for head, steps in heads.shared:
                    parts = [(k, *plan.part(k, start, start + sizes[1])) for k in steps]
                    logits_NW = head.logits(torch.cat([hiddens[k][at] for k, at, _ in parts]))
                    counts, scales = [len(at) for _, at, _ in parts], []
                    for (k, at, where), logits_CW in zip(parts, logits_NW.split(counts), strict=True):
                        rows = p.take(where)
                        stats.hits_KR[k, at] = logits_CW.argmax(-1) == rows.choice_C
                        loss_C, alpha_C, grad_CW = pointwise(config.name, rows, logits_CW)
                        inside_C = rows.choice_C >= 0
                        stats.loss_K[k] += torch.where(inside_C, loss_C, 0.0).sum()
                        stats.alpha_K[k] += alpha_C.sum()
                        scales.append(inside_C.to(acc) * plan.predictions[k].weight)
                        logits_CW.copy_(grad_CW)  # the logits have served
                    if not learn:
                        continue
                    want = [grads[k] is not None for k, _, _ in parts]
                    grad_ND = head.backward(logits_NW, torch.cat(scales), want_hidden=any(want))
                    if grad_ND is not None:
                        for (k, at, _), grad_CD in zip(parts, grad_ND.split(counts), strict=True):
                            if (total_RD := grads[k]) is not None:
                                total_RD[at] = grad_CD.to(total_RD.dtype)
        weights_K = stats.loss_K.new_tensor([p.weight for p in plan.predictions])
        ctx.grads = [*grads, *(sums[id(w)] if learn else None for w in params)]
        ctx.dtypes = [t.dtype for t in tensors]
        return (stats.loss_K * weights_K).sum(), stats  # autocast would make a product of vectors a bf16 one

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _grad_stats: Any) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        done = [
            None if g is None else g.mul_(grad_loss.to(g.dtype)).to(dtype)
            for g, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return None, None, None, None, None, *done


class _Heads:
    """The different heads of the predictions, each with the steps that speak through it."""

    def __init__(self, predictions: Sequence[StepPrediction], sums: Mapping[int, Tensor]):
        self.shared: list[tuple[Head, list[int]]] = []
        distinct: list[Any] = []
        for k, prediction in enumerate(predictions):
            if prediction.head not in distinct:
                distinct.append(prediction.head)
                self.shared.append((head_of(prediction.head, sums), []))
            self.shared[distinct.index(prediction.head)][1].append(k)
