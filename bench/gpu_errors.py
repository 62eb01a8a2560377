"""Relative errors of ``bench.gpu_check``, and the bounds they are held to."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.gpu_parts import Fault

FP32 = 1e-5
BF16 = 2e-2
"""bf16 keeps 8 bits of mantissa; a softmax over hundreds of terms and its gradients lose two more."""


def no_tf32() -> None:
    """Products of fp32 numbers in fp32."""
    torch.set_float32_matmul_precision("highest")


def error_of(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of ``want``; infinite where something is not finite."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return float("inf")
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


@dataclass
class Errors:
    """The largest error per name, and what broke its bound."""

    worst: dict[str, float]
    faults: list[str]

    @classmethod
    def none(cls) -> "Errors":
        """Nothing compared yet."""
        return cls({}, [])

    def add(self, name: str, got: Tensor, want: Tensor, bound: float, *, where: str = "") -> None:
        """Compare two tensors."""
        error = error_of(got, want)
        self.worst[name] = max(self.worst.get(name, 0.0), error)
        if not error <= bound:
            self.faults.append(f"{name}{where and ' ' + where}: relative error {error:.3g}, at most {bound:g}")

    def result(self) -> dict[str, Any]:
        """Return the largest errors.

        Raises:
            Fault: one was above its bound.
        """
        if self.faults:
            raise Fault("; ".join(self.faults[:4]) + (f"; {len(self.faults)} in all" if len(self.faults) > 4 else ""))
        return {name: float(f"{error:.3g}") for name, error in self.worst.items()}
