"""The five losses on rows of logits, with their gradients in closed form.

With q = softmax(z) and l the loss of one row, dl/dz is

* ``ce``, ``kl``   q - p~
* ``reverse_kl``   q (log q - log p~ - l)
* ``tv``           q (sum_j q_j [q_j < p_j] - [q < p])
* ``lk``           the same, divided by alpha

so nothing of the size of the logits is kept for a backward pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Half precision to fp32; fp64 stays."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The target's distribution at C positions, seen through a draft vocabulary of W tokens.

    Attributes:
        kept_CW: p~, renormalised over the draft vocabulary.
        probs_CW: p, normalised over the target's whole vocabulary; the same tensor where that is all of it.
        log_kept_CW: log p~, for the losses that need it.
        choice_C: the target's own choice as a draft id, -1 where it is outside.
    """

    kept_CW: Tensor
    probs_CW: Tensor
    log_kept_CW: Tensor | None
    choice_C: Tensor

    @classmethod
    def make(cls, name: str, logits_CW: Tensor, normaliser_C: Tensor | None, choice_C: Tensor) -> "Rows":
        """Prepare for the loss ``name``; ``normaliser_C`` is the log-sum-exp over all of V, None where W is V."""
        log_kept = logits_CW.log_softmax(-1) if name in ("kl", "reverse_kl") else None
        kept = logits_CW.softmax(-1) if log_kept is None else log_kept.exp()
        probs = kept if normaliser_C is None else (logits_CW - normaliser_C[:, None]).exp_()
        return cls(kept_CW=kept, probs_CW=probs, log_kept_CW=log_kept, choice_C=choice_C)

    def take(self, at: slice | Tensor) -> "Rows":
        """Some of the rows; a slice copies nothing."""
        kept = self.kept_CW[at]
        return Rows(
            kept_CW=kept,
            probs_CW=kept if self.probs_CW is self.kept_CW else self.probs_CW[at],
            log_kept_CW=None if self.log_kept_CW is None else self.log_kept_CW[at],
            choice_C=self.choice_C[at],
        )


def pointwise(name: str, p: Rows, logits_CW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss_C, alpha_C, gradient_CW of each row's loss with respect to its logits)."""
    log_q = logits_CW.to(torch.promote_types(p.kept_CW.dtype, logits_CW.dtype)).log_softmax(-1)
    if name in ("ce", "kl"):
        loss = -torch.linalg.vecdot(p.kept_CW, log_q)
        if p.log_kept_CW is not None:
            loss = torch.linalg.vecdot(p.kept_CW, p.log_kept_CW - log_q)
        q = log_q.exp_()
        alpha = torch.minimum(p.probs_CW, q).sum(-1)
        return loss, alpha, q.sub_(p.kept_CW)
    if name == "reverse_kl":
        assert p.log_kept_CW is not None
        q = log_q.exp()
        gap = log_q.sub_(p.log_kept_CW)
        loss = torch.linalg.vecdot(q, gap)
        alpha = torch.minimum(p.probs_CW, q).sum(-1)
        return loss, alpha, gap.sub_(loss[:, None]).mul_(q)
    assert name in ("tv", "lk"), name
    q = log_q.exp_()
    alpha = torch.minimum(p.probs_CW, q).sum(-1)
    below = (q < p.probs_CW).to(q.dtype)
    grad = torch.linalg.vecdot(q, below)[:, None].sub(below).mul_(q)
    if name == "tv":
        return 1 - alpha, alpha, grad
    least = torch.finfo(alpha.dtype).tiny
    grad.mul_(torch.where(alpha > least, 1 / alpha.clamp(min=least), 0.0)[:, None])
    return -alpha.clamp(min=least).log(), alpha, grad
