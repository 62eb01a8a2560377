"""Losses between the target's distribution p and the draft's q, chunked so that logits are never held whole.

Per position, with p~ = p restricted to the draft vocabulary and renormalised, p the target's probabilities over its
full vocabulary, and y the token that was written:

* ``ce``          -sum p~ log q            (EAGLE-3, arXiv:2503.01840)
* ``kl``          sum p~ (log p~ - log q)  (same gradient as ``ce``)
* ``reverse_kl``  sum q (log q - log p~)
* ``jsd``         b KL(p~ || m) + (1 - b) KL(q || m),  m = b p~ + (1 - b) q  (arXiv:2306.13649; b = ``loss.beta``)
* ``tv``          1 - alpha,  alpha = sum min(p, q): the chance that speculative sampling accepts
* ``lk``          -log alpha               (arXiv:2602.23881, the "alpha" form)
* ``hard``        -log q(y)                (Medusa-1, arXiv:2401.10774)

``loss.hard`` = h mixes the last one into any other: (1 - h) l + h hard. The text is the target's own, so y is what it
said once; where the drafter wrote it (on-policy distillation), ``hard`` would teach the drafter what it does anyway.

The total is sum_k w_k sum_i l_ik / (sum_k w_k * denominator), k over every prediction: steps and heads, drafted or
not, on tokens or on features. The denominator is the number of supervised tokens in the whole optimiser step, so the
learning rate depends neither on how dense the mask is, nor on accumulation or ranks, nor on the number of predictions.
As in EAGLE-3, positions where the target's own choice is outside the draft vocabulary carry no loss, and none of
``hard`` where the written token is; they count as misses in the metrics.

Memory: a chunk is a few teacher rows and, for every step, the draft rows that are compared with them; the teacher's
logits are made for several chunks at once, of which only the draft vocabulary stays. The larger the vocabularies, the
fewer rows (``chunk_rows``), so what they take does not depend on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.config import opt
from distill.divergence import Rows, argmax, pointwise, wide
from distill.errors import UserError
from distill.heads import Head, head_of
from distill.target import Target
from distill.teacher import Plan, Teacher, part_of
from distill.types import Batch, StepPrediction, TargetOutput
from distill.vocab import DraftVocab

CHUNK_LOGITS = {"cpu": (2**24, 2**23), "cuda": (2**26, 2**26)}
"""Logits of the teacher and of the draft that exist at once. On a CPU 64 and 32 MiB in fp32: enough rows for a matrix
product to be fast, few enough that what is done with them stays near the cache; on a GPU 256 MiB, which keeps it
busy."""


@dataclass(kw_only=True)
class LossConfig:
    """What is minimised."""

    name: Literal["ce", "kl", "reverse_kl", "jsd", "tv", "lk", "hard"] = opt(
        "ce", "ce, kl, reverse_kl, jsd, tv, lk or hard"
    )
    beta: float = opt(0.5, "jsd: share of the target in the mixture, between 0 and 1; 0.5 is Jensen-Shannon")
    hard: float = opt(0.0, "share of the cross-entropy with the written token; the rest is the loss named above")
    chunk: int | None = opt(
        None, "teacher rows whose logits exist at once; null: fewer, the larger the vocabulary; changes only memory"
    )

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise UserError(f"loss.chunk must be at least 1, got {self.chunk}")
        if not 0 < self.beta < 1:
            raise UserError(f"loss.beta must be between 0 and 1, both excluded, got {self.beta}")
        if not 0 <= self.hard <= 1:
            raise UserError(f"loss.hard must be between 0 and 1, got {self.hard}")


TOP = 5
"""How many of the draft's likeliest tokens are searched for the target's choice."""


@dataclass(frozen=True, kw_only=True)
class LossResult:
    """Loss and what to log; everything but ``loss`` is detached. K counts the drafted predictions of kind ``logits``.

    Attributes:
        loss: scalar to back-propagate.
        loss_K: unweighted sum of the loss per step.
        hits_K: positions where the draft's argmax is the target's argmax, per step.
        alpha_K: sum of alpha per step.
        count_K: positions that count, per step.
        hits_KBL: the hits by draft start (for the simulated acceptance length).
        valid_KBL: where a step counts.
        top_KJ: positions where the target's argmax is among the draft's 1, ..., ``TOP`` likeliest tokens (one more of
            them per column); without gradients only, else None.
        terms: the other predictions, (unweighted sum, positions): ``feature_j`` for regressions, ``other_j`` for what
            is not drafted, each numbered in the order they came.
    """

    loss: Tensor
    loss_K: Tensor
    hits_K: Tensor
    alpha_K: Tensor
    count_K: Tensor
    hits_KBL: Tensor
    valid_KBL: Tensor
    top_KJ: Tensor | None
    terms: Mapping[str, tuple[Tensor, Tensor]]


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
    scale = sum(p.weight for p in predictions) * max(batch.denominator, 1.0)  # a step without supervision: 0
    features = [p for p in predictions if p.kind == "feature"]
    regressions = [_feature_loss(p) for p in features]
    predictions = [p for p in predictions if p.kind == "logits"]
    plan = Plan.make(predictions, batch)
    teacher = Teacher(target.logits, output.last_BLD, batch.ids_BL, vocab)
    hiddens = [p.hidden_BLD.flatten(0, 1) for p in predictions]
    modules = [head for head, _ in plan.heads if isinstance(head, nn.Module)]
    params = list({id(w): w for head in modules for w in head.parameters() if w.requires_grad}.values())
    learn = torch.is_grad_enabled()
    sizes = chunk_rows(
        config,
        teacher_size=target.info.vocab_size,
        draft_size=vocab.size if vocab else target.info.vocab_size,
        steps=max((len(steps) for _, steps in plan.heads), default=1),
        device=hiddens[0].device if hiddens else output.last_BLD.device,
    )
    loss, work = _ChunkedLoss.apply(plan, teacher, config, sizes, learn, len(hiddens), *hiddens, *params)
    for prediction, regression in zip(features, regressions, strict=True):
        loss = loss + prediction.weight * regression
    count_K = plan.valid_KR.sum(1)
    terms = {
        f"feature_{j}": (regression.detach(), p.mask_BL.sum())
        for j, (p, regression) in enumerate(zip(features, regressions, strict=True))
    }
    others = [k for k, p in enumerate(predictions) if not p.drafted]
    terms |= {f"other_{j}": (work.loss_K[k], count_K[k]) for j, k in enumerate(others)}
    drafted = [k for k, p in enumerate(predictions) if p.drafted]
    shape = (len(drafted), *batch.ids_BL.shape)
    return LossResult(
        loss=loss / scale,
        loss_K=work.loss_K[drafted],
        hits_K=work.hits_KR[drafted].sum(1),
        alpha_K=work.alpha_K[drafted],
        count_K=count_K[drafted],
        hits_KBL=work.hits_KR[drafted].view(shape),
        valid_KBL=plan.valid_KR[drafted].view(shape),
        top_KJ=None if work.top_KJ is None else work.top_KJ[drafted],
        terms=terms,
    )


def chunk_rows(
    config: LossConfig, *, teacher_size: int, draft_size: int, steps: int, device: torch.device
) -> tuple[int, int]:
    """Teacher rows whose logits exist at once, and how many of them the draft is compared with at a time.

    Args:
        config: ``chunk`` overrides both.
        teacher_size: V.
        draft_size: W.
        steps: predictions that go through the same head, whose logits exist together.
        device: what has to hold them.

    Both are ``config.chunk``, else what keeps logits within ``CHUNK_LOGITS``; the first is a multiple of the second.
    """
    if config.chunk is not None:
        return config.chunk, config.chunk
    for_teacher, for_draft = CHUNK_LOGITS.get(device.type, CHUNK_LOGITS["cuda"])
    teacher = max(1, for_teacher // max(teacher_size, 1))
    draft = min(teacher, max(1, for_draft // max(steps * draft_size, 1)))
    return teacher - teacher % draft, draft


def piece_rows(draft_size: int, device: torch.device) -> int:
    """Rows of draft logits that are worked on at once: on a CPU what stays in the cores' own caches."""
    if device.type != "cpu":
        return 2**62
    return max(1, 2**18 * torch.get_num_threads() // draft_size)


def _feature_loss(prediction: StepPrediction) -> Tensor:
    """Smooth-L1 on features (EAGLE-1, arXiv:2401.15077, eq. 3), mean over D, sum over positions."""
    assert prediction.feature_target_BLD is not None
    hidden, wanted = wide(prediction.hidden_BLD), wide(prediction.feature_target_BLD)
    error_BLD = F.smooth_l1_loss(hidden, wanted, reduction="none")
    return (error_BLD.mean(-1) * prediction.mask_BL).sum()


class _Work:
    """Compares the steps with the teacher, chunk by chunk. What a chunk needs lives no longer than it.

    Attributes:
        grads: per step, the gradient of its hidden states; None where nothing wants it.
        loss_K, alpha_K, hits_KR, top_KJ: as in ``LossResult``, of every prediction.
    """

    def __init__(
        self, plan: Plan, config: LossConfig, hiddens: Sequence[Tensor], sums: Mapping[int, Tensor], *, learn: bool
    ):
        self.plan, self.config, self.hiddens, self.learn = plan, config, hiddens, learn
        self.heads = [(head_of(head, sums), steps) for head, steps in plan.heads]
        n_steps, device = len(plan.predictions), plan.valid_KR.device
        acc = torch.float64 if any(h.dtype == torch.float64 for h in hiddens) else torch.float32
        self.grads = [torch.zeros_like(h) if learn and h.requires_grad else None for h in hiddens]
        self.loss_K = torch.zeros(n_steps, dtype=acc, device=device)
        self.alpha_K = torch.zeros(n_steps, dtype=acc, device=device)
        self.hits_KR = torch.zeros_like(plan.valid_KR)
        # Two passes over the logits, 3 % of the loss on a CPU: training does without.
        self.top_KJ = None if learn else torch.zeros(n_steps, TOP, dtype=torch.long, device=device)

    def chunk(self, p: Rows, start: int, end: int) -> None:
        """Everything that is compared with the teacher's rows ``start`` to ``end``."""
        for head, steps in self.heads:
            self._through(head, [(k, *self.plan.part(k, start, end)) for k in steps], p)

    def _through(self, head: Head, parts: Sequence[tuple[int, Tensor, slice | Tensor]], p: Rows) -> None:
        """The steps of one head: (step, positions, places of their teachers in ``p``)."""
        counts = [len(at) for _, at, _ in parts]
        if not sum(counts):
            return
        logits_NW = head.logits(torch.cat([self.hiddens[k][at] for k, at, _ in parts]))
        rows = piece_rows(logits_NW.shape[1], logits_NW.device)
        scales = [
            self._compare(k, at[a : a + rows], p.take(part_of(where, a, a + rows)), logits_CW[a : a + rows])
            for (k, at, where), logits_CW in zip(parts, logits_NW.split(counts), strict=True)
            for a in range(0, len(at), rows)
        ]
        if not self.learn:
            return
        want = any(self.grads[k] is not None for k, _, _ in parts)
        grad_ND = head.backward(logits_NW, torch.cat(scales), want_hidden=want)
        if grad_ND is not None:
            for (k, at, _), grad_CD in zip(parts, grad_ND.split(counts), strict=True):
                if (total_RD := self.grads[k]) is not None:
                    total_RD[at] = grad_CD.to(total_RD.dtype)

    def _compare(self, k: int, at: Tensor, rows: Rows, logits_CW: Tensor) -> Tensor:
        """Count one step, put the gradient in the place of its logits, and return what it is to be scaled with."""
        self.hits_KR[k, at] = argmax(logits_CW) == rows.choice_C
        if self.top_KJ is not None:
            self.top_KJ[k] += _top(logits_CW, rows.choice_C)
        config = self.config
        learned = pointwise(config.name, rows, logits_CW, beta=config.beta, hard=config.hard)
        self.loss_K[k] += learned.loss_C.sum()
        self.alpha_K[k] += learned.alpha_C.sum()
        if self.learn:
            logits_CW.copy_(learned.grad_CW)
        return learned.counts_C.to(self.loss_K.dtype) * self.plan.predictions[k].weight


class _ChunkedLoss(torch.autograd.Function):
    """Sum of the weighted losses; gradients are made chunk by chunk in the forward, so no logits are kept.

    The loss is a plain sum, so the incoming gradient is one number that scales what the forward stored.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        teacher: Teacher,
        config: LossConfig,
        sizes: tuple[int, int],
        learn: bool,
        n_hidden: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, _Work]:
        hiddens, params = tensors[:n_hidden], tensors[n_hidden:]
        # Every hidden state is in one chunk; a weight is in all, and many small additions need fp32.
        sums = {id(w): torch.zeros_like(wide(w)) for w in params if learn}
        work = _Work(plan, config, hiddens, sums, learn=learn)
        # The target and the losses keep their precision; heads remember the one they were called in.
        with torch.autocast(plan.valid_KR.device.type, enabled=False):
            for start, p in teacher.chunks(plan.rows, sizes, name=config.name):
                work.chunk(p, start, start + sizes[1])
                del p  # before the next one is made
        weights_K = work.loss_K.new_tensor([p.weight for p in plan.predictions])
        ctx.grads = [*work.grads, *(sums[id(w)] if learn else None for w in params)]
        ctx.dtypes = [t.dtype for t in tensors]
        return (work.loss_K * weights_K).sum(), work  # autocast would make a product of vectors a bf16 one

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _work: Any) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        done = [
            None if g is None else g.mul_(grad_loss.to(g.dtype)).to(dtype)
            for g, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return None, None, None, None, None, None, *done


def _top(logits_CW: Tensor, choice_C: Tensor) -> Tensor:
    """Rows whose choice is among the 1, ..., ``TOP`` largest logits, [TOP]; a choice outside never is."""
    chosen_C1 = logits_CW.gather(1, choice_C.clamp(min=0)[:, None])
    above_C = (logits_CW > chosen_C1).sum(-1).masked_fill(choice_C < 0, logits_CW.shape[1])
    return (above_C[:, None] < torch.arange(1, TOP + 1, device=above_C.device)).sum(0)
