"""The losses on rows of logits, with their gradients in closed form.

With q = softmax(z), m = beta p~ + (1 - beta) q, y the token that was written and l the loss of one row, dl/dz is

* ``ce``, ``kl``   q - p~
* ``reverse_kl``   q (log q - log p~ - l)
* ``jsd``          (1 - beta) q (log q - log m - sum_j q_j (log q_j - log m_j))
* ``tv``           q (sum_j q_j [q_j < p_j] - [q < p])
* ``lk``           the same, divided by alpha
* ``hard``         q - e_y

so nothing of the size of the logits is kept for a backward pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Half precision to fp32; fp64 stays."""
    return x if x.dtype == torch.float64 else x.float()


WITH_LOG = ("kl", "reverse_kl", "jsd")
"""Losses that read log p~."""
WORKED_ON = {"ce": 2, "hard": 2, "kl": 3, "reverse_kl": 3, "tv": 3, "lk": 3, "jsd": 4}
"""How many tensors of the size of the logits ``pointwise`` holds at its fullest; one more for a mixture."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What the target says at C positions, seen through a draft vocabulary of W tokens.

    Attributes:
        kept_CW: p~, renormalised over the draft vocabulary.
        probs_CW: p, normalised over the target's whole vocabulary; the same tensor where that is all of it.
        log_kept_CW: log p~, for the losses that need it.
        choice_C: the target's own choice as a draft id, -1 where it is outside.
        written_C: the token that follows in the text as a draft id, -1 where it is outside.
    """

    kept_CW: Tensor
    probs_CW: Tensor
    log_kept_CW: Tensor | None
    choice_C: Tensor
    written_C: Tensor

    @classmethod
    def make(
        cls, name: str, logits_CW: Tensor, normaliser_C: Tensor | None, *, choice_C: Tensor, written_C: Tensor
    ) -> "Rows":
        """Prepare for the loss ``name``; ``normaliser_C`` is the log-sum-exp over all of V, None where W is V."""
        log_kept = logits_CW.log_softmax(-1) if name in WITH_LOG else None
        kept = logits_CW.softmax(-1) if log_kept is None else log_kept.exp()
        probs = kept if normaliser_C is None else (logits_CW - normaliser_C[:, None]).exp_()
        return cls(kept_CW=kept, probs_CW=probs, log_kept_CW=log_kept, choice_C=choice_C, written_C=written_C)

    def take(self, at: slice | Tensor) -> "Rows":
        """Some of the rows; a slice copies nothing."""
        kept = self.kept_CW[at]
        return Rows(
            kept_CW=kept,
            probs_CW=kept if self.probs_CW is self.kept_CW else self.probs_CW[at],
            log_kept_CW=None if self.log_kept_CW is None else self.log_kept_CW[at],
            choice_C=self.choice_C[at],
            written_C=self.written_C[at],
        )


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What one row of draft logits costs.

    Attributes:
        loss_C: the loss, 0 where the row teaches nothing.
        alpha_C: sum min(p, q), everywhere.
        grad_CW: gradient of the loss by the logits, right only where ``counts_C``.
        counts_C: where the row teaches something.
    """

    loss_C: Tensor
    alpha_C: Tensor
    grad_CW: Tensor
    counts_C: Tensor


def pointwise(name: str, p: Rows, logits_CW: Tensor, *, beta: float = 0.5, hard: float = 0.0) -> Learned:
    """Compare draft logits with the target.

    Args:
        name: which loss.
        p: the target at the same positions.
        logits_CW: the draft's logits.
        beta: of ``jsd``.
        hard: share of the loss on the written token; the rest is ``name``'s.
    """
    z = logits_CW.to(torch.promote_types(p.kept_CW.dtype, logits_CW.dtype))
    q = z.softmax(-1)
    inside_C = p.choice_C >= 0
    if name != "hard" and hard == 0:
        loss_C, alpha_C, grad_CW = _soft(name, p, z, q, beta)
        return Learned(loss_C=torch.where(inside_C, loss_C, 0.0), alpha_C=alpha_C, grad_CW=grad_CW, counts_C=inside_C)
    written_C = p.written_C >= 0
    at_C1 = p.written_C.clamp(min=0)[:, None]
    loss_C = torch.where(written_C, _cross_entropy(z.gather(1, at_C1)[:, 0], z, q), 0.0)
    if name == "hard":
        alpha_C = torch.minimum(p.probs_CW, q).sum(-1)
        grad_CW = q.scatter_add_(1, at_C1, q.new_full(at_C1.shape, -1.0))
        return Learned(loss_C=loss_C, alpha_C=alpha_C, grad_CW=grad_CW, counts_C=written_C)
    soft_C, alpha_C, grad_CW = _soft(name, p, z, q.clone(), beta)
    # A token may be outside the draft vocabulary where the target's choice is not, and the other way round.
    of_soft_C1, of_hard_C1 = ((1 - hard) * inside_C.to(q))[:, None], (hard * written_C.to(q))[:, None]
    grad_CW = grad_CW.mul_(of_soft_C1).addcmul_(q, of_hard_C1).scatter_add_(1, at_C1, -of_hard_C1)
    return Learned(
        loss_C=(1 - hard) * torch.where(inside_C, soft_C, 0.0) + hard * loss_C,
        alpha_C=alpha_C,
        grad_CW=grad_CW,
        counts_C=inside_C | written_C,
    )


def argmax(x_CW: Tensor) -> Tensor:
    """Return ``x.argmax(-1)``, the first of equal ones; four times as fast on a CPU.

    PyTorch searches a row entry by entry there, but takes maxima in vectors: of blocks, then of the best block.
    """
    block = 64
    if x_CW.device.type != "cpu" or x_CW.shape[-1] % block or x_CW.numel() == 0:
        return x_CW.argmax(-1)
    blocks_CGN = x_CW.unflatten(-1, (-1, block))
    best_C = blocks_CGN.amax(-1).argmax(-1)
    inside_C = blocks_CGN[torch.arange(len(x_CW)), best_C].argmax(-1)
    return best_C * block + inside_C


def _cross_entropy(mean_z_C: Tensor, z: Tensor, q: Tensor) -> Tensor:
    """The log-sum-exp of z, read off the largest of z and of q = softmax(z), minus the mean of z."""
    return (z.amax(-1) - mean_z_C) - q.amax(-1).log()


def _soft(name: str, p: Rows, z: Tensor, q: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss_C, alpha_C, gradient_CW); ``q`` is used up."""
    alpha = torch.minimum(p.probs_CW, q).sum(-1)
    if name == "ce":
        loss = _cross_entropy(torch.linalg.vecdot(p.kept_CW, z), z, q)
        return loss, alpha, q.sub_(p.kept_CW)
    if name in WITH_LOG:
        assert p.log_kept_CW is not None
        gap = z.log_softmax(-1)
        if name == "kl":
            loss = torch.linalg.vecdot(p.kept_CW, torch.sub(p.log_kept_CW, gap, out=gap))
            return loss, alpha, q.sub_(p.kept_CW)
        if name == "reverse_kl":
            mean_gap = torch.linalg.vecdot(q, gap.sub_(p.log_kept_CW))
            return mean_gap, alpha, gap.sub_(mean_gap[:, None]).mul_(q)
        # Where both are 0 the logarithm only has to be finite: it is multiplied by them.
        log_m = (beta * p.kept_CW).add_(q, alpha=1 - beta).clamp_(min=torch.finfo(q.dtype).tiny).log_()
        mean_gap = torch.linalg.vecdot(q, gap.sub_(log_m))
        loss = beta * torch.linalg.vecdot(p.kept_CW, p.log_kept_CW - log_m) + (1 - beta) * mean_gap
        return loss, alpha, gap.sub_(mean_gap[:, None]).mul_(q).mul_(1 - beta)
    assert name in ("tv", "lk"), name
    below = (q < p.probs_CW).to(q.dtype)
    grad = torch.linalg.vecdot(q, below)[:, None].sub(below).mul_(q)
    if name == "tv":
        return 1 - alpha, alpha, grad
    least = torch.finfo(alpha.dtype).tiny
    grad.mul_(torch.where(alpha > least, 1 / alpha.clamp(min=least), 0.0)[:, None])
    return -alpha.clamp(min=least).log(), alpha, grad
