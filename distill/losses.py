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
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.alignment import teacher_row
from distill.config import opt
from distill.errors import UserError
from distill.target import Target
from distill.types import Batch, StepPrediction, TargetOutput
from distill.vocab import DraftVocab


@dataclass(kw_only=True)
class LossConfig:
    """What is minimised."""

    name: Literal["ce", "kl", "reverse_kl", "tv", "lk"] = opt("ce", "ce, kl, reverse_kl, tv or lk")
    chunk: int = opt(256, "positions whose logits exist at once; smaller saves memory, changes nothing else")

    def __post_init__(self) -> None:
        if self.chunk < 1:
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
    heads = [p.head if isinstance(p.head, nn.Module) else None for p in predictions]
    params = list({id(w): w for h in heads if h is not None for w in h.parameters() if w.requires_grad}.values())
    loss, stats = _ChunkedLoss.apply(plan, teacher, config, len(hiddens), *hiddens, *params)
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


def _feature_loss(prediction: StepPrediction) -> Tensor:
    """Smooth-L1 on features (EAGLE-1, arXiv:2401.15077, eq. 3), mean over D, weighted sum over positions."""
    assert prediction.feature_target_BLD is not None
    hidden, wanted = _wide(prediction.hidden_BLD), _wide(prediction.feature_target_BLD)
    error_BLD = F.smooth_l1_loss(hidden, wanted, reduction="none")
    return prediction.weight * (error_BLD.mean(-1) * prediction.mask_BL).sum()


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Which flattened positions R = B*L each step counts at, and which teacher rows are needed."""

    predictions: Sequence[StepPrediction]
    valid_KR: Tensor
    rows: Tensor  # teacher rows any step needs, ascending

    @classmethod
    def make(cls, predictions: Sequence[StepPrediction], batch: Batch) -> "_Plan":
        valid_KR = torch.zeros(len(predictions), batch.ids_BL.numel(), dtype=torch.bool, device=batch.ids_BL.device)
        for k, prediction in enumerate(predictions):
            valid_KR[k] = prediction.mask_BL.flatten()
        needed = torch.zeros_like(batch.loss_mask_BL).flatten()
        for prediction, valid_R in zip(predictions, valid_KR, strict=True):
            needed |= valid_R.roll(teacher_row(prediction.shift))
        return cls(predictions=predictions, valid_KR=valid_KR, rows=needed.nonzero()[:, 0])


@dataclass(kw_only=True)
class _Stats:
    loss_K: Tensor
    alpha_K: Tensor
    hits_KR: Tensor


def _wide(x: Tensor) -> Tensor:
    """Half precision to fp32; fp64 stays."""
    return x if x.dtype == torch.float64 else x.float()


class _Teacher:
    """The target's distribution at chosen rows, seen through the draft vocabulary."""

    def __init__(self, target: Target, last_RD: Tensor, vocab: DraftVocab | None):
        self.target, self.last_RD, self.vocab = target, last_RD, vocab

    @torch.no_grad()
    def at(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (logits_CW in the draft vocabulary, log-normaliser_C over all of V, argmax_C as draft id or -1)."""
        with torch.autocast(rows.device.type, enabled=False):  # the target keeps its own precision
            logits_CV = _wide(self.target.logits(self.last_RD[rows]))
        choice_C = logits_CV.argmax(-1)
        normaliser_C = logits_CV.logsumexp(-1)
        if self.vocab is None:
            return logits_CV, normaliser_C, choice_C
        return logits_CV[:, self.vocab.target_ids], normaliser_C, self.vocab.from_target(choice_C)


class _ChunkedLoss(torch.autograd.Function):
    """Sum of the weighted losses; gradients are made chunk by chunk in the forward, so no logits are kept.

    The loss is a plain sum, so the incoming gradient is one number that scales what the forward stored.
    """

    @staticmethod
    def forward(ctx: Any, plan: _Plan, teacher: _Teacher, config: LossConfig, n_hidden: int, *tensors: Tensor):
        hiddens, params = tensors[:n_hidden], tensors[n_hidden:]
        # Sums over many chunks: in fp32 even where the tensor itself is in half precision.
        grads = [
            torch.zeros_like(_wide(t)) if needed else None
            for t, needed in zip(tensors, ctx.needs_input_grad[4:], strict=True)
        ]
        device = plan.valid_KR.device
        n_steps = len(plan.predictions)
        acc = torch.float64 if any(h.dtype == torch.float64 for h in hiddens) else torch.float32
        stats = _Stats(
            loss_K=torch.zeros(n_steps, dtype=acc, device=device),
            alpha_K=torch.zeros(n_steps, dtype=acc, device=device),
            hits_KR=torch.zeros_like(plan.valid_KR),
        )
        loss = torch.zeros((), dtype=acc, device=device)
        for rows in plan.rows.split(config.chunk):
            logits_p, normaliser, choice = teacher.at(rows)
            for k, prediction in enumerate(plan.predictions):
                position = rows - teacher_row(prediction.shift)
                use = (position >= 0) & plan.valid_KR[k, position.clamp(min=0)]
                position = position[use]
                if len(position) == 0:
                    continue
                with torch.enable_grad():
                    hidden = hiddens[k][position].detach().requires_grad_(grads[k] is not None)
                    logits_q = _wide(prediction.head(hidden))
                    loss_C, alpha_C = pointwise(config.name, logits_p[use], normaliser[use], logits_q)
                    chunk_loss = torch.where(choice[use] >= 0, loss_C, 0.0).sum()
                    weighted = prediction.weight * chunk_loss
                _accumulate(weighted, hidden, params, position, grads[k], grads[n_hidden:])
                loss += weighted.detach()
                stats.loss_K[k] += chunk_loss.detach()
                stats.alpha_K[k] += alpha_C.detach().sum()
                stats.hits_KR[k, position] = logits_q.detach().argmax(-1) == choice[use]
        ctx.grads = [None if g is None else g.to(t.dtype) for g, t in zip(grads, tensors, strict=True)]
        return loss, stats

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _grad_stats: Any):
        grads = [None if g is None else g * grad_loss.to(g.dtype) for g in ctx.grads]
        ctx.grads = None
        return None, None, None, None, *grads


def _accumulate(
    loss: Tensor,
    hidden_CD: Tensor,
    params: Sequence[Tensor],
    position_C: Tensor,
    grad_hidden: Tensor | None,
    grad_params: Sequence[Tensor | None],
) -> None:
    """Add the gradients of one chunk to the sums that want them."""
    wanted = [(p, g) for p, g in zip(params, grad_params, strict=True) if g is not None]
    inputs = [p for p, _ in wanted] + ([hidden_CD] if grad_hidden is not None else [])
    if not inputs:
        return
    made = torch.autograd.grad(loss, inputs, allow_unused=True)
    for (_, total_grad), grad in zip(wanted, made, strict=False):
        if grad is not None:
            total_grad.add_(grad)
    if grad_hidden is not None and made[-1] is not None:
        grad_hidden.index_add_(0, position_C, made[-1].to(grad_hidden.dtype))


def pointwise(name: str, logits_p: Tensor, normaliser: Tensor, logits_q: Tensor) -> tuple[Tensor, Tensor]:
    """Per-position loss and alpha.

    Args:
        name: which loss.
        logits_p: target logits over the draft vocabulary, [C, W].
        normaliser: logsumexp of the target's logits over its full vocabulary, [C].
        logits_q: draft logits, [C, W].

    Returns:
        (loss_C, alpha_C).
    """
    log_q = logits_q.log_softmax(-1)
    p = (logits_p - normaliser[:, None]).exp()
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    if name == "tv":
        return 1 - alpha, alpha
    if name == "lk":
        return -alpha.clamp(min=torch.finfo(alpha.dtype).tiny).log(), alpha
    log_p = logits_p.log_softmax(-1)
    if name == "ce":
        return -(log_p.exp() * log_q).sum(-1), alpha
    if name == "kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1), alpha
    assert name == "reverse_kl", name
    return (log_q.exp() * (log_q - log_p)).sum(-1), alpha
