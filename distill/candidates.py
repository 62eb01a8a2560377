"""Choosing the best candidates out of a vocabulary: the step between a drafter's logits and the nodes of a tree."""

import ctypes

import torch
from torch import Tensor

from distill import kernels

_HALF = {torch.bfloat16: 1, torch.float32: 0}
"""What the kernel reads: the two types that logits come in."""


def job(*values: int) -> tuple[ctypes.Array, int]:
    """Numbers a kernel is given by address: the array, to be kept alive, and where it is."""
    array = (ctypes.c_int64 * len(values))(*values)
    return array, ctypes.addressof(array)


class Best:
    """What ``best`` of the kernels writes into, made once for logits of one shape.

    Args:
        shape_BFW: of the logits.
        k: candidates per node; at most W.
    """

    def __init__(self, shape_BFW: torch.Size, k: int):
        self.shape, (batch, nodes, width) = shape_BFW, shape_BFW
        k = min(k, width)
        with torch.inference_mode(False):
            self.values_BFk = torch.empty(batch, nodes, k)
            self.ids_BFk = torch.empty(batch, nodes, k, dtype=torch.long)
        at = (self.values_BFk.data_ptr(), self.ids_BFk.data_ptr())
        self._array, self.job = job(*at, batch, nodes, width, k)


def best(
    logits_BFW: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    noise_BPW: Tensor | None = None,
    depth: int = 0,
    scale: float | None = None,
    out: Best | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best of ``logits / temperature + noise`` in fp32 (fp64 stays), best first: values and ids, [B, F, k].

    On a CPU our kernel does it in one pass over the logits.

    Args:
        logits_BFW: of any float type.
        k: at most W are returned.
        temperature: divides the logits.
        noise_BPW: added, of place P = ``depth``.
        depth: see there.
        scale: return the log-softmax of ``scale`` times the scores instead of the scores.
        out: memory for the result, which is overwritten when it is used again; None makes it.
    """
    library, half = kernels.load() if logits_BFW.is_cpu else None, _HALF.get(logits_BFW.dtype)
    if library is None or half is None or (noise_BPW is not None and noise_BPW.dtype != torch.float32):
        return _best(logits_BFW, k, temperature, None if noise_BPW is None else noise_BPW[:, depth, None], scale)
    logits_BFW = logits_BFW.contiguous()
    out = Best(logits_BFW.shape, k) if out is None else out
    assert logits_BFW.shape == out.shape, "memory for logits of another shape"
    at, stride = None, 0
    if noise_BPW is not None:
        batch, places, width = noise_BPW.shape
        noise_BPW = noise_BPW.contiguous()
        at, stride = noise_BPW.data_ptr() + 4 * depth * width, places * width
        assert (batch, width) == (out.shape[0], out.shape[2]), "one row of noise per row of the batch"
    library.draftsmith_best(logits_BFW.data_ptr(), half, at, stride, temperature, scale or 0.0, out.job)
    return out.values_BFk, out.ids_BFk


def _best(
    logits_BFW: Tensor, k: int, temperature: float, noise_B1W: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The same in PyTorch."""
    scores = logits_BFW if logits_BFW.dtype == torch.float64 else logits_BFW.float()
    scores = scores if temperature == 1 else scores / temperature
    scores = scores if noise_B1W is None else scores + noise_B1W
    values, ids = scores.topk(min(k, scores.shape[-1]), dim=-1)
    if scale is not None:
        values = values * scale - (scores if scale == 1 else scores * scale).logsumexp(-1, keepdim=True)
    return values, ids
