"""Masks built from positions, and attention over them.

Every mask follows one rule: key visible iff same document (or ancestor in the tree), not in the future, and
inside the layer's window, the window counted in positions, never in cache slots.

Training, two packed documents (rows are queries)::

    doc 0 0 0 1 1          x . . . .
                           x x . . .
                           x x x . .
                           . . . x .
                           . . . x x

Decoding, prefix of 2, tree 0 -> (1, 2), 1 -> 3::

    slot  p p 0 1 2 3      0: x x x . . .
                           1: x x x x . .
                           2: x x x . x .
                           3: x x x x . x
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """Boolean masks per kind of layer; True = may attend.

    Attributes:
        full_B1QT: for layers that see everything.
        sliding_B1QT: for layers with a window; None where the model has none.
    """

    full_B1QT: Tensor
    sliding_B1QT: Tensor | None = None


def packed_mask(doc_BL: Tensor, positions_BL: Tensor, *, window: int | None = None) -> AttentionMask:
    """Causal mask inside each document of a packed row; padding (doc -1) sees only itself."""
    same_BLL = doc_BL[:, :, None] == doc_BL[:, None, :]
    length = doc_BL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=doc_BL.device).tril()
    full = same_BLL & causal_LL
    # Padding must not attend to other padding (its positions repeat), but a row without any key gives NaN.
    padded_B1L = (doc_BL < 0)[:, None, :]
    full = (full & ~padded_B1L) | torch.eye(length, dtype=torch.bool, device=doc_BL.device)
    sliding = None
    if window is not None:
        sliding = (full & (positions_BL[:, None, :] > positions_BL[:, :, None] - window))[:, None]
    return AttentionMask(full_B1QT=full[:, None], sliding_B1QT=sliding)


def tree_mask(
    *,
    lengths_B: Tensor,
    ancestors_BNM: Tensor,
    view: int,
    depths_BM: Tensor | None = None,
    window: int | None = None,
) -> AttentionMask:
    """Mask for N query nodes over a cache whose scratch holds M >= N nodes behind each row's committed tokens.

    Args:
        lengths_B: committed tokens per row.
        ancestors_BNM: True where scratch entry m is query n itself or an ancestor of it; queries are the last
            N of the M entries.
        view: number of cache slots attention reads.
        depths_BM: depth of each scratch entry, its position being ``lengths_B + depth``; windows need it.
        window: sliding window in positions, or None.
    """
    n_nodes = ancestors_BNM.shape[1]
    slot_T = torch.arange(view, device=lengths_B.device)
    if ancestors_BNM.shape[2] == 1:  # plain decoding, every step: the committed tokens and the new one
        visible_BT = slot_T <= lengths_B[:, None]
        near_BT = None if window is None else visible_BT & (slot_T > lengths_B[:, None] - window)
        return AttentionMask(
            full_B1QT=visible_BT[:, None, None],
            sliding_B1QT=None if near_BT is None else near_BT[:, None, None],
        )
    relative_BT = slot_T - lengths_B[:, None]
    inside_BT = (relative_BT >= 0) & (relative_BT < ancestors_BNM.shape[2])
    node_BT = relative_BT.clamp(0, ancestors_BNM.shape[2] - 1)
    tree_BNT = ancestors_BNM.gather(2, node_BT[:, None].expand(-1, n_nodes, -1)) & inside_BT[:, None]
    full = (relative_BT < 0)[:, None] | tree_BNT
    sliding = None
    if window is not None:
        assert depths_BM is not None, "a window is counted in positions"
        key_BT = torch.where(relative_BT < 0, slot_T, lengths_B[:, None] + depths_BM.gather(1, node_BT))
        query_BN = lengths_B[:, None] + depths_BM[:, -n_nodes:]
        sliding = (full & (key_BT[:, None] > query_BN[:, :, None] - window))[:, None]
    return AttentionMask(full_B1QT=full[:, None], sliding_B1QT=sliding)


def attend(q_BHNK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask_B1NT: Tensor) -> Tensor:
    """Masked attention with grouped key/value heads (H a multiple of G), without repeating keys.

    The query heads of one group are laid side by side along the query axis, which share the mask.
    """
    batch, heads, n, dim = q_BHNK.shape
    groups = k_BGTK.shape[1]
    per_group = heads // groups
    q = q_BHNK.reshape(batch, groups, per_group * n, dim)
    mask = mask_B1NT.expand(batch, 1, n, -1).repeat(1, 1, per_group, 1)
    out = F.scaled_dot_product_attention(q, k_BGTK, v_BGTK, attn_mask=mask)
    return out.reshape(batch, heads, n, dim)


# -- packed documents: each one causal in itself, no L x L mask

Documents = list[tuple[int, int, int]]
"""(row, start, end) of every document of a packed batch."""

_BLOCK = 512  # queries whose scores exist at once where no fused kernel can be used


def segments(doc_BL: Tensor) -> Documents:
    """Documents of a packed batch as (row, start, end); documents are contiguous, padding (-1) is in none."""
    found = []
    for row, docs in enumerate(doc_BL.tolist()):
        start = 0
        for end in range(1, len(docs) + 1):
            if end == len(docs) or docs[end] != docs[start]:
                if docs[start] >= 0:
                    found.append((row, start, end))
                start = end
    return found


def attend_documents(
    q_BHLK: Tensor,
    k_BGLK: Tensor,
    v_BGLK: Tensor,
    documents: Documents,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention inside each document, in O(L) memory; what ``packed_mask`` says, without the mask.

    Args:
        q_BHLK: queries.
        k_BGLK: keys, H a multiple of G.
        v_BGLK: values.
        documents: from ``segments``.
        scale: of the scores; None is K ** -0.5.
        window: how many positions a query sees, itself included; None: all.

    Returns:
        out_BHLK; zero on padding.
    """
    out = q_BHLK.new_zeros(*q_BHLK.shape[:3], v_BGLK.shape[3])
    shared = q_BHLK.shape[1] != k_BGLK.shape[1]
    for row, start, end in documents:
        q, k, v = (x[row : row + 1, :, start:end] for x in (q_BHLK, k_BGLK, v_BGLK))
        if window is None or end - start <= window:
            out[row : row + 1, :, start:end] = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=shared
            )
            continue
        for begin in range(0, end - start, _BLOCK):
            stop, first = min(begin + _BLOCK, end - start), max(0, begin - window + 1)
            distance = torch.arange(begin, stop, device=q.device)[:, None] - torch.arange(first, stop, device=q.device)
            seen = (distance >= 0) & (distance < window)
            out[row : row + 1, :, start + begin : start + stop] = F.scaled_dot_product_attention(
                q[:, :, begin:stop],
                k[:, :, first:stop],
                v[:, :, first:stop],
                attn_mask=seen,
                scale=scale,
                enable_gqa=shared,
            )
    return out


# -- training-time test: step-0 keys by flash attention, later steps' own keys merged by log-sum-exp


def attend_with_own(
    q_BHLK: Tensor, k_BGLK: Tensor, v_BGLK: Tensor, own: list[tuple[Tensor, Tensor]], documents: Documents
) -> Tensor:
    """Training-time-test attention (EAGLE-3, arXiv:2503.01840, section 3.2) in O(L) memory.

    Query i attends causally to the step-0 keys of its document, and to one key per later step, its own::

        step 2:   [ causal L x L | diag 1 | diag 2 ]   one softmax over all of it

    The causal part runs document by document and is never materialised; the parts are merged by their
    log-sum-exp. Differentiating through the merge needs the global log-sum-exp, so this is one autograd function.

    Args:
        q_BHLK: queries of the current step.
        k_BGLK: step-0 keys, H a multiple of G.
        v_BGLK: step-0 values.
        own: keys and values of steps 1..k, each [B, G, L, K].
        documents: from ``segments``.

    Returns:
        out_BHLK; zero on padding when there are no own keys.
    """
    return _OwnKeys.apply(documents, q_BHLK, k_BGLK, v_BGLK, *(t for pair in own for t in pair))


class _OwnKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, documents: Documents, q: Tensor, k: Tensor, v: Tensor, *own: Tensor):
        scale = q.shape[-1] ** -0.5
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
        for row, start, end in documents:
            part = slice(row, row + 1), slice(None), slice(start, end)
            out[part], lse[part] = _causal_forward(q[part], k[part], v[part])
        if own:
            grouped = _by_group(q, k)
            own_scores = [(grouped * key[:, :, None]).sum(-1, dtype=wide).mul_(scale) for key in own[0::2]]
            merged = torch.stack([lse.view_as(own_scores[0]), *own_scores]).logsumexp(0)
            lse = lse.view_as(merged)
            out_ = out.view(grouped.shape)
            out_ *= (lse - merged).exp()[..., None]
            for score, value in zip(own_scores, own[1::2], strict=True):
                out_.addcmul_((score - merged).exp()[..., None], value[:, :, None])
            lse = merged.view(q.shape[:3])
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, *own)
        ctx.documents = documents
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        q, k, v, out, lse, *own = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        grad = grad.contiguous()
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for row, start, end in ctx.documents:
            part = slice(row, row + 1), slice(None), slice(start, end)
            # exp(score - global lse) are this part's share of the one softmax, and out is the merged output,
            # so the ordinary flash backward gives this part's gradients exactly.
            dq[part], dk[part], dv[part] = _causal_backward(grad[part], q[part], k[part], v[part], out[part], lse[part])
        if not own:
            return None, dq, dk, dv
        q_, dq_, grad_, lse_ = (_by_group(x, k) for x in (q, dq, grad, lse))
        delta = _by_group((grad * out).sum(-1, dtype=lse.dtype), k)
        d_own = []
        for key, value in zip(own[0::2], own[1::2], strict=True):
            key, value = key[:, :, None], value[:, :, None]
            weight = ((q_ * key).sum(-1, dtype=lse.dtype) * scale - lse_).exp_()
            d_score = ((grad_ * value).sum(-1, dtype=lse.dtype) - delta).mul_(weight).mul_(scale)
            d_score, weight = d_score[..., None].to(q.dtype), weight[..., None].to(q.dtype)
            dq_.addcmul_(d_score, key)
            d_own += [(d_score * q_).sum(2), (weight * grad_).sum(2)]
        return None, dq, dk, dv, *d_own


def _by_group(x: Tensor, k_BGLK: Tensor) -> Tensor:
    """View [B, H, ...] as [B, G, H/G, ...]: query heads beside the key/value head they share."""
    return x.unflatten(1, (k_BGLK.shape[1], -1))


def _kernel(q: Tensor) -> str:
    """Which implementation returns the log-sum-exp and takes it back: cpu, flash (a GPU's) or blocks."""
    if q.device.type == "cpu":
        return "cpu"
    half = q.dtype in (torch.float16, torch.bfloat16)
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    if q.device.type == "cuda" and half and fits and torch.backends.cuda.is_flash_attention_available():
        return "flash" if torch.cuda.get_device_capability(q.device) >= (8, 0) else "blocks"
    return "blocks"


def _causal_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention of one document: (out, lse), lse [1, H, L] in fp32 (fp64 stays)."""
    kernel = _kernel(q)
    if kernel == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    if kernel == "flash":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)
        return out, lse
    k, v = _repeat(q, k), _repeat(q, v)
    outs, lses = [], []
    for start in range(0, q.shape[2], _BLOCK):
        scores, end = _block_scores(q, k, start)
        lses.append(scores.logsumexp(-1))
        outs.append((scores - lses[-1][..., None]).exp().to(v.dtype) @ v[:, :, :end])
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _causal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one document's causal part, given the output and log-sum-exp of the whole softmax."""
    kernel = _kernel(q)
    if kernel == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True)
    if kernel == "flash":
        # Read only with dropout or with documents given by their cumulative lengths, which are None here.
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        length = q.shape[2]
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, length, length, 0.0, True, unused, unused
        )
    groups = k.shape[1]
    k, v = _repeat(q, k), _repeat(q, v)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (grad * out).sum(-1, keepdim=True, dtype=lse.dtype)
    for start in range(0, q.shape[2], _BLOCK):
        scores, end = _block_scores(q, k, start)
        rows = slice(start, start + scores.shape[2])
        weights = (scores - lse[:, :, rows, None]).exp()
        d_scores = weights * ((grad[:, :, rows] @ v[:, :, :end].transpose(-1, -2)) - delta[:, :, rows])
        d_scores = (d_scores * q.shape[-1] ** -0.5).to(q.dtype)
        dq[:, :, rows] = d_scores @ k[:, :, :end]
        dk[:, :, :end] += d_scores.transpose(-1, -2) @ q[:, :, rows]
        dv[:, :, :end] += weights.to(q.dtype).transpose(-1, -2) @ grad[:, :, rows]
    return dq, dk.unflatten(1, (groups, -1)).sum(2), dv.unflatten(1, (groups, -1)).sum(2)


def _repeat(q: Tensor, x: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _block_scores(q: Tensor, k: Tensor, start: int) -> tuple[Tensor, int]:
    """Masked scores of one block of queries against the keys up to its end."""
    end = min(start + _BLOCK, q.shape[2])
    scores = (q[:, :, start:end] @ k[:, :, :end].transpose(-1, -2)) * q.shape[-1] ** -0.5
    scores = scores if scores.dtype == torch.float64 else scores.float()
    hidden = torch.ones(end - start, end, dtype=torch.bool, device=q.device).triu(start + 1)
    return scores.masked_fill(hidden, float("-inf")), end
