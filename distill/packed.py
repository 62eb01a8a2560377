"""Linear layers with their weights laid out once for the CPU.

A decode step reads every weight once for a handful of rows. A plain product rearranges the weight on every call; laid
out in advance, a layer of SmolLM2 takes half the time (oneDNN's layout) or less (our own kernel, which reads it as fast
as memory delivers). Other devices and dtypes get the plain product, so callers need not ask.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill import kernels

SKINNY_ROWS = 128
"""Rows (tokens) up to which our kernels are used; beyond, a product is bound by arithmetic, and PyTorch is as good."""
_WIDEST = 256  # rows up to which oneDNN's own layout is faster than a plain product


def packable(weight_OI: Tensor) -> bool:
    """Whether ``weight_OI`` is of a kind that packing speeds up here."""
    return (
        weight_OI.device.type == "cpu"
        and weight_OI.dtype in (torch.bfloat16, torch.float32)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def edition(weight: Tensor) -> tuple[int, int]:
    """Address and version of a weight: others once it has been moved or changed in place."""
    return weight.data_ptr(), -1 if weight.is_inference() else weight._version


class PackedLinear:
    """A frozen linear layer: ``x @ weight_OI.T (+ bias) (+ add)``.

    Args:
        weight_OI: output x input features; kept by reference for wide inputs.
        bias_O: or None.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None):
        self.weight_OI = weight_OI.detach()
        self.bias_O = None if bias_O is None else bias_O.detach()
        self._packed: Tensor | None = None
        self._kernel = None
        n_out, n_in = weight_OI.shape
        if weight_OI.dtype == torch.bfloat16 and weight_OI.device.type == "cpu" and n_out % 16 == n_in % 8 == 0:
            self._kernel = kernels.load()
        if self._kernel is not None:
            blocks = self.weight_OI.reshape(n_out // 16, 16, n_in // 2, 2)
            self._packed = blocks.permute(0, 2, 1, 3).contiguous()
        elif packable(weight_OI):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight_OI.contiguous(), None)
        self._most = (_WIDEST if self._kernel is None else SKINNY_ROWS) * n_in

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Map x [..., I] to [..., O], plus ``add`` [..., O] where given (a residual)."""
        if self._packed is None or x.dtype != self.weight_OI.dtype or x.numel() > self._most:
            y = F.linear(x, self.weight_OI, self.bias_O)
            return y if add is None else y + add
        if self._kernel is not None:
            return self._skinny(x, add)
        if add is None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias_O, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, add, self._packed, self.bias_O, "add")

    def _skinny(self, x: Tensor, add: Tensor | None) -> Tensor:
        assert self._kernel is not None
        assert self._packed is not None
        n_out, n_in = self.weight_OI.shape
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], n_out)
        if add is not None:
            add = add.contiguous()
        self._kernel.draftsmith_linear(
            x.data_ptr(),
            self._packed.data_ptr(),
            None if self.bias_O is None else self.bias_O.data_ptr(),
            None if add is None else add.data_ptr(),
            y.data_ptr(),
            x.numel() // n_in,
            n_in,
            n_out,
        )
        return y


class PackedNorm:
    """A frozen RMS norm with a scale, rounding where transformers does.

    Args:
        weight_D: the scale.
        eps: added to the mean square.
    """

    def __init__(self, weight_D: Tensor, eps: float):
        self.weight_D, self.eps = weight_D.detach(), eps
        fits = weight_D.dtype == torch.bfloat16 and weight_D.device.type == "cpu" and len(weight_D) % 16 == 0
        self._kernel = kernels.load() if fits else None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        size = len(self.weight_D)
        if x.dtype == torch.float64:  # transformers leaves double precision here, and so must we
            narrow = F.rms_norm(x.float(), (size,), None, self.eps)
            return self.weight_D * narrow.to(x.dtype)
        if self._kernel is None or x.dtype != torch.bfloat16 or x.numel() > 1024 * size or not x.is_contiguous():
            return F.rms_norm(x, (size,), self.weight_D, self.eps)
        y = torch.empty_like(x)
        rows = x.numel() // size
        self._kernel.draftsmith_rms_norm(x.data_ptr(), self.weight_D.data_ptr(), y.data_ptr(), rows, size, self.eps)
        return y


def joined(linears: list[nn.Linear]) -> PackedLinear:
    """Return one layer that computes all of ``linears`` side by side; their inputs are the same tensor.

    The layers' own weights become views of the joined one, so nothing is held twice.
    """
    weight_OI = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias for linear in linears]
    bias_O = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
    for linear, part in zip(linears, weight_OI.split([linear.out_features for linear in linears]), strict=True):
        linear.weight.data = part
    return PackedLinear(weight_OI, bias_O)


class Packing:
    """Packed forwards of every ``nn.Linear`` (and of our ``RMSNorm``) inside ``module``, used while ``on``.

    Training and checkpoints see no difference: with gradients or under autocast the plain product runs, and a weight
    that has changed is packed again at its next call.
    """

    def __init__(self, module: nn.Module, *, on: bool = True):
        self.on = on
        for child in module.modules():
            if "forward" in child.__dict__:
                continue
            if type(child) is nn.Linear and packable(child.weight):
                child.forward = _PackedForward(child, self)  # type: ignore[assignment]
            elif type(child).__name__ == "RMSNorm" and isinstance(getattr(child, "eps", None), float):
                child.forward = _PackedNormForward(child, self, child.forward)


class _PackedForward:
    """Takes the place of a module's ``forward``."""

    def __init__(self, linear: nn.Linear, packing: Packing):
        self._linear, self._packing = linear, packing
        self._state: tuple[int, int] | None = None
        self._packed: PackedLinear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        linear = self._linear
        fits = self._packing.on and x.dtype == linear.weight.dtype
        if not fits or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return F.linear(x, linear.weight, linear.bias)
        weight = linear.weight
        state = edition(weight)
        if self._packed is None or self._state != state:
            self._packed, self._state = PackedLinear(weight, linear.bias), state
        return self._packed(x)


class _PackedNormForward:
    """The same for a norm; what the kernel does not take goes the module's own way."""

    def __init__(self, norm: Any, packing: Packing, plain: Callable[[Tensor], Tensor]):
        self._norm, self._packing, self._plain = norm, packing, plain

    def __call__(self, x: Tensor) -> Tensor:
        norm = self._norm
        fits = self._packing.on and x.dtype == norm.weight.dtype == torch.bfloat16
        if not fits or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return self._plain(x)
        return PackedNorm(norm.weight, norm.eps)(x)
