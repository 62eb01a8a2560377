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


def attend_with_diagonals(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, diagonals: list[tuple[Tensor, Tensor]], mask_B1LL: Tensor
) -> Tensor:
    """Training-time-test attention (EAGLE-3, arXiv:2503.01840, section 3.2).

    Query i attends to the step-0 keys the mask allows and to one key per later step, the one at its own index::

        step 2:   [ causal L x L | diag 1 | diag 2 ]   one softmax over all of it

    Args:
        q_BHLK: queries of the current step.
        k_BHLK: step-0 keys.
        v_BHLK: step-0 values.
        diagonals: keys and values of steps 1..k, each [B, H, L, K].
        mask_B1LL: which step-0 keys a query may see.

    Returns:
        out_BHLK.
    """
    if not diagonals:
        return F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, attn_mask=mask_B1LL)
    scale = q_BHLK.shape[-1] ** -0.5
    length = k_BHLK.shape[2]
    scores = (q_BHLK @ k_BHLK.transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~mask_B1LL, float("-inf"))
    own = [(q_BHLK * k).sum(-1, keepdim=True).float() * scale for k, _ in diagonals]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(v_BHLK.dtype)
    out = weights[..., :length] @ v_BHLK
    for step, (_, v) in enumerate(diagonals):
        out = out + weights[..., length + step : length + step + 1] * v
    return out
