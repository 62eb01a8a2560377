"""Checks of ``bench.gpu_check``: attention on the device against a softmax written out, in fp64 on the CPU.

Every function without an underscore is a check: it returns what it saw and raises ``Fault``.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu_errors import BF16, FP32, Errors, no_tf32
from bench.gpu_parts import Fault
from bench.gpu_setup import Setting
from distill.attention import attend, attend_documents, attend_with_own, segments, tree_mask


def tree_attention(setting: Setting) -> dict[str, Any]:
    """Attention over cache and tree (``attend``), and each SDPA kernel that takes the mask, against a softmax."""
    no_tf32()
    errors, refused = Errors.none(), []
    generator = torch.Generator().manual_seed(0)
    batch, heads, groups, dim, nodes = 3, 8, 2, 64, 13  # 13: no kernel's favourite alignment
    lengths_B = torch.tensor([0, 37, 100])
    parents = [0, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 10]
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[parents[node]]
    view = int(lengths_B.max()) + nodes
    allowed_BNT = torch.zeros(batch, nodes, view, dtype=torch.bool)
    for row, length in enumerate(lengths_B.tolist()):
        allowed_BNT[row, :, :length] = True
        allowed_BNT[row, :, length : length + nodes] = ancestors
    q = torch.randn(batch, heads, nodes, dim, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, batch, groups, view, dim, generator=generator, dtype=torch.float64)
    for dtype, bound in ((torch.float32, FP32), (torch.bfloat16, BF16)):
        our_q, our_k, our_v = (x.to(setting.device, dtype) for x in (q, k, v))
        wide_q, wide_k, wide_v = (x.to(dtype).double() for x in (q, k, v))
        want = _softmax_attention(wide_q, wide_k, wide_v, allowed_BNT)
        mask = tree_mask(
            lengths_B=lengths_B.to(setting.device),
            ancestors_BNM=ancestors.expand(batch, -1, -1).to(setting.device),
            view=view,
        ).full_B1QT
        if not torch.equal(mask[:, 0].cpu(), allowed_BNT):
            raise Fault("the tree's mask differs from the one walked out by hand")
        name = str(dtype).removeprefix("torch.")
        errors.add(f"attend {name}", attend(our_q, our_k, our_v, mask), want, bound)
        all_k, all_v = (x.repeat_interleave(heads // groups, 1) for x in (our_k, our_v))
        for backend in _backends():
            try:
                with sdpa_kernel([backend]):
                    out = scaled_dot_product_attention(our_q, all_k, all_v, attn_mask=mask)
            except RuntimeError:  # this kernel takes no such mask, type or device
                refused.append(f"{backend.name} {name}")
                continue
            errors.add(f"{backend.name} {name}", out, want, bound)
    return {**errors.result(), "not available": refused}


def _backends() -> list[SDPBackend]:
    names = ("MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION")
    return [getattr(SDPBackend, name) for name in names if hasattr(SDPBackend, name)]


def _softmax_attention(q_BHNK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, allowed_BNT: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q_BHNK.shape[1] // k_BGTK.shape[1], 1) for x in (k_BGTK, v_BGTK))
    scores = (q_BHNK @ k.mT * q_BHNK.shape[-1] ** -0.5).masked_fill(~allowed_BNT[:, None], float("-inf"))
    return scores.softmax(-1).nan_to_num() @ v


def document_attention(setting: Setting) -> dict[str, Any]:
    """Attention inside packed documents without a mask (the target's in training), with and without a window."""
    no_tf32()
    errors = Errors.none()
    generator = torch.Generator().manual_seed(1)
    heads, groups, dim, length = 8, 2, 64, 1300 if setting.cuda else 120
    doc_BL = _documents(length)
    q = torch.randn(len(doc_BL), heads, length, dim, generator=generator)
    k, v = torch.randn(2, len(doc_BL), groups, length, dim, generator=generator)
    place_L = torch.arange(length)
    for window in (None, length // 6):
        allowed_BLL = _causal(doc_BL)
        if window is not None:
            allowed_BLL = allowed_BLL & (place_L[None, :] > place_L[:, None] - window)
        for dtype, bound in ((torch.float32, FP32), (torch.bfloat16, BF16)):
            our_q, our_k, our_v = (x.to(setting.device, dtype) for x in (q, k, v))
            out = attend_documents(our_q, our_k, our_v, segments(doc_BL.to(setting.device)), window=window)
            wide_q, wide_k, wide_v = (x.to(dtype).double() for x in (q, k, v))
            want = _softmax_attention(wide_q, wide_k, wide_v, allowed_BLL)
            name = f"{'all' if window is None else 'window'} {str(dtype).removeprefix('torch.')}"
            errors.add(name, out, want * (doc_BL >= 0)[:, None, :, None], bound)
    return errors.result()


def training_attention(setting: Setting) -> dict[str, Any]:
    """Training-time-test attention, forward and backward, over packed documents, against one dense softmax."""
    no_tf32()
    errors = Errors.none()
    for dtype, bound in ((torch.float32, FP32), (torch.bfloat16, BF16)):
        for steps in (0, 1, 6):
            for dim, groups in ((64, 2), (128, 4)) if setting.cuda else ((64, 2),):
                _compare_own(setting, errors, dtype=dtype, bound=bound, steps=steps, dim=dim, groups=groups)
    return errors.result()


def _compare_own(
    setting: Setting, errors: Errors, *, dtype: torch.dtype, bound: float, steps: int, dim: int, groups: int
) -> None:
    generator = torch.Generator().manual_seed(steps)
    length, heads = 700 if setting.cuda else 150, 4
    doc_BL = _documents(length)
    real = (doc_BL >= 0)[:, None, :, None]

    def draw(count: int) -> Tensor:
        return torch.randn(len(doc_BL), count, length, dim, generator=generator).to(dtype)

    drawn = [draw(heads), *(draw(groups) for _ in range(2 + 2 * steps))]
    weight = draw(heads) * real  # padding is read by nobody, so it sends no gradient
    ours = [x.to(setting.device).requires_grad_() for x in drawn]
    q, k, v, *own = ours
    pairs = list(zip(own[::2], own[1::2], strict=True))
    out = attend_with_own(q, k, v, pairs, segments(doc_BL.to(setting.device)))
    grads = torch.autograd.grad((out * weight.to(setting.device)).sum(), ours)
    wide = [x.double().requires_grad_() for x in drawn]
    want = _dense_own(wide, doc_BL)
    want_grads = torch.autograd.grad((want * weight.double()).sum(), wide)
    name, where = str(dtype).removeprefix("torch."), f"({steps} own keys, head size {dim}, {groups} key heads)"
    errors.add(f"output {name}", out.detach().cpu() * real, want, bound, where=where)
    for label, got, wanted in zip(["q", "k", "v", *["own"] * len(own)], grads, want_grads, strict=True):
        errors.add(f"gradient of {label} {name}", got, wanted, bound, where=where)


def _documents(length: int) -> Tensor:
    """One row with a document longer than a kernel's block, single tokens and padding; one that is all one document."""
    ends = [[1, length * 3 // 4, length * 3 // 4 + 1, length - 20], [length]]
    doc_BL = torch.full((len(ends), length), -1)
    for row, row_ends in enumerate(ends):
        for document, (start, end) in enumerate(zip([0, *row_ends], row_ends, strict=False)):
            doc_BL[row, start:end] = document
    return doc_BL


def _causal(doc_BL: Tensor) -> Tensor:
    length = doc_BL.shape[1]
    return (doc_BL[:, :, None] == doc_BL[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()


def _dense_own(leaves: list[Tensor], doc_BL: Tensor) -> Tensor:
    """One softmax over [L x L | one own key | ...], zero on padding."""
    q = leaves[0]
    k, v, *own = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in leaves[1:])
    length = q.shape[2]
    scores = [(q @ k.mT).masked_fill(~_causal(doc_BL)[:, None], float("-inf"))]
    scores += [(q * key).sum(-1, keepdim=True) for key in own[::2]]
    weights = (torch.cat(scores, -1) * q.shape[-1] ** -0.5).softmax(-1)
    out = weights[..., :length] @ v
    for i, value in enumerate(own[1::2]):
        out = out + weights[..., length + i, None] * value
    return out * (doc_BL >= 0)[:, None, :, None]
