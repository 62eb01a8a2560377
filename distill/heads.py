"""Draft heads inside the loss: logits of a chunk, and from the gradient of the logits those of inputs and weights.

A bare linear head is two matrix products, its weight's gradient added up in place and in blocks of the vocabulary;
any other head is left to autograd.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from distill.products import is_bare, product


class Head(Protocol):
    """One chunk at a time: ``logits``, then ``backward`` for the same rows."""

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Return logits_NW in a buffer of their own, which the caller may overwrite."""

    def backward(self, grad_NW: Tensor, scale_N: Tensor, *, want_hidden: bool) -> Tensor | None:
        """Add up the weights' gradients for ``scale * grad``, and return that of the hidden states if wanted."""


def head_of(head: Callable[[Tensor], Tensor], sums: Mapping[int, Tensor]) -> Head:
    """Wrap ``head``.

    Args:
        head: maps hidden [N, D] to logits [N, W].
        sums: id(weight) -> where its gradient is added up, fp32 or wider, for the weights that want one.
    """
    return _Linear(head.weight, sums.get(id(head.weight))) if is_bare(head) else _Any(head, sums)


class _Linear:
    BLOCK = 8192  # rows of the weight whose gradient is made at once, where it cannot be added in place

    def __init__(self, weight: Tensor, total: Tensor | None):
        device = weight.device.type
        low = torch.is_autocast_enabled(device) and weight.dtype == torch.float32
        self.weight = weight.detach().to(torch.get_autocast_dtype(device) if low else weight.dtype)
        self.total = total

    def logits(self, hidden_ND: Tensor) -> Tensor:
        self.hidden = hidden_ND.to(self.weight.dtype)
        return product(self.hidden, self.weight)

    def backward(self, grad_NW: Tensor, scale_N: Tensor, *, want_hidden: bool) -> Tensor | None:
        # Rows are scaled where they are narrow: in the hidden states instead of the logits.
        if self.total is not None:
            scaled = self.hidden * scale_N[:, None].to(self.hidden.dtype)
            if self.total.dtype == scaled.dtype:
                self.total.addmm_(grad_NW.T, scaled)
            else:
                for block, grad in zip(self.total.split(self.BLOCK), grad_NW.split(self.BLOCK, dim=1), strict=True):
                    block += grad.T @ scaled
        if not want_hidden:
            return None
        return product(grad_NW, self.weight.T).mul_(scale_N[:, None].to(grad_NW.dtype))


class _Any:
    def __init__(self, head: Callable[[Tensor], Tensor], sums: Mapping[int, Tensor]):
        self.head, self.sums = head, sums
        self.low = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
        parameters = head.parameters() if isinstance(head, nn.Module) else ()
        self.weights = [weight for weight in parameters if id(weight) in sums]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        kind = hidden_ND.device.type
        low = torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=self.low.get(kind, False))
        with torch.enable_grad(), low:
            self.hidden = hidden_ND.detach().requires_grad_()
            self.out = self.head(self.hidden)
        return self.out.detach().clone()  # a head may have saved its output for its own backward

    def backward(self, grad_NW: Tensor, scale_N: Tensor, *, want_hidden: bool) -> Tensor | None:
        grad_NW = (grad_NW * scale_N[:, None]).to(self.out.dtype)
        inputs = [*self.weights, *([self.hidden] if want_hidden else [])]
        if not inputs:
            return None
        made = torch.autograd.grad(self.out, inputs, grad_NW, allow_unused=True, materialize_grads=True)
        for weight, grad in zip(self.weights, made, strict=False):
            self.sums[id(weight)] += grad
        return made[-1] if want_hidden else None
