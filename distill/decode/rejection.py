"""Speculative sampling: accept a drafted token with probability min(1, p / q), otherwise draw from what is left of p.

At a node with target distribution p and draft distribution q, the children x_1, x_2, ... were drawn from q without
replacement: x_i from q_i, which is q without the earlier ones, renormalised. With r_1 = p, child i is accepted with
probability min(1, r_i(x_i) / q_i(x_i)); if it is not, r_{i+1} = norm((r_i - q_i)+). When all are rejected the token is
drawn from the last r; below a leaf it is drawn from p. The law of the output is p for every q (Leviathan et al.,
arXiv:2211.17192, for chains; by induction over the children, arXiv:2402.14160, for trees).

Three streams of keyed randomness beside the target's own noise are used (``sampling.STREAMS``): what the draft draws
with, the coins, and the last draw, each a function of (seed, request, position of the token). Why that is as good as
fresh draws in every round:

- What is decided at position t (accept, reject, the token emitted) is a function of the tokens before t and of the
  three streams at t: the children offered there hang below the walked path and were drawn with the noise of t.
- A round may have drafted beyond the position where it ends. The next round uses the noise of those positions again,
  but its first use had no influence on any token: nodes below a rejected one are never walked to, and a static plan
  does not choose nodes by what was drawn. (A reranked tree would, which is why it is refused.)
- So given all tokens before t, the streams at t are still independent uniform numbers, whichever round decides t.

For the same reason all nodes of one depth may share their noise: one of them at most is walked through, and which one
was decided by the streams of the positions above.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.decode.coupling import RoundNoise
from distill.sampling import warp
from distill.types import Accepted, DraftTree


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What the rule decided, and with which chances.

    Attributes:
        node_B: last kept node.
        depth_B: its depth.
        path_BP: the kept path, root first, padded with -1; P is max_depth + 1.
        law_BV: the distribution that the token after it is drawn from.
        chance_BN: probability with which each child that was asked was accepted; NaN for all other nodes.
    """

    node_B: Tensor
    depth_B: Tensor
    path_BP: Tensor
    law_BV: Tensor
    chance_BN: Tensor


def rejection(
    tree: DraftTree,
    logits_BNV: Tensor,
    noise: RoundNoise,
    *,
    children: Sequence[int],
    draft_to_target: Tensor | None = None,
) -> Accepted:
    """Decide a round by coins, and draw the token after the kept path.

    Args:
        tree: drawn from ``q_BFW``.
        logits_BNV: the target's logits after every node.
        noise: keys of this round; its sampling warps the target's logits as it warped the draft's.
        children: most children of a node, per depth of the parent.
        draft_to_target: target ids of the draft vocabulary; None where it is the target's.
    """
    row_B = torch.arange(len(logits_BNV), device=logits_BNV.device)

    def target_at(node_B: Tensor) -> Tensor:
        logits_BV = logits_BNV[row_B, node_B]
        exact = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
        return warp(exact, noise.sampling).softmax(-1)

    coins_BPC = noise.coins(max(children, default=0))
    walked = walk(tree, target_at, coins_BPC, children=children, draft_to_target=draft_to_target)
    last_BV = noise.of_stream("residual", vocab=logits_BNV.shape[-1], place_B=walked.depth_B)[:, 0]
    next_B = (walked.law_BV.log() + last_BV).argmax(1)
    return Accepted(path_BN=walked.path_BP, n_B=walked.depth_B + 1, next_B=next_B)


def walk(
    tree: DraftTree,
    target_at: Callable[[Tensor], Tensor],
    coins_BPC: Tensor,
    *,
    children: Sequence[int],
    draft_to_target: Tensor | None = None,
) -> Walk:
    """Walk down from the root, child by child.

    Args:
        tree: drawn from ``q_BFW``; all children of a node were drawn, in index order.
        target_at: nodes [B] -> the target's distribution after them, [B, V].
        coins_BPC: uniform numbers in (0, 1), per depth of the parent and place among its children.
        children: most children of a node, per depth of the parent; its length is the tree's depth.
        draft_to_target: target ids of the draft vocabulary; None where it is the target's.
    """
    assert tree.q_BFW is not None, "rejection needs the distribution that drafts were drawn from"
    assert tree.q_row_N is not None, "and whose it is"
    assert len(children) == tree.max_depth, "one number of children per depth"
    batch, n = tree.parents_BN.shape
    device = tree.parents_BN.device
    # On a CPU looking is cheaper than computing for nobody; elsewhere it would cost a read.
    look = device.type == "cpu"
    rows_B, index_N = torch.arange(batch, device=device), torch.arange(n, device=device)
    node_B = torch.zeros(batch, dtype=torch.long, device=device)
    depth_B, alive_B = torch.zeros_like(node_B), torch.ones_like(node_B, dtype=torch.bool)
    path_BP = torch.full((batch, tree.max_depth + 1), -1, dtype=torch.long, device=device)
    path_BP[:, 0] = 0
    law_BV = target_at(node_B)
    chance_BN = torch.full((batch, n), float("nan"), dtype=law_BV.dtype, device=device)
    for depth, most in enumerate(children):
        child_BN = (tree.parents_BN == node_B[:, None]) & (index_N > 0)
        place_BN = child_BN.cumsum(1) - 1
        q_BW = tree.q_BFW[rows_B, tree.q_row_N[node_B].clamp(min=0)].to(law_BV.dtype)
        q_BV = q_BW if draft_to_target is None else scattered(q_BW, draft_to_target, law_BV.shape[1])
        waiting_B, moved_B = alive_B, torch.zeros_like(alive_B)
        for place in range(most):
            is_it_BN = child_BN & (place_BN == place)
            child_B = is_it_BN.long().argmax(1)
            token_B = tree.tokens_BN[rows_B, child_B]
            x_B1 = token_B.clamp(min=0)[:, None]
            q_x_B, r_x_B = q_BV.gather(1, x_B1)[:, 0], law_BV.gather(1, x_B1)[:, 0]
            # A filter may leave fewer tokens than there are children; the children beyond were never drawn, and
            # passing them over is a function of q alone, which leaves the law as it is.
            asked_B = waiting_B & is_it_BN.any(1) & (token_B >= 0) & (q_x_B > 0)
            chance_B = torch.where(asked_B, (r_x_B / q_x_B).clamp(max=1), 0.0)
            chance_BN[rows_B, child_B] = torch.where(asked_B, chance_B, chance_BN[rows_B, child_B])
            kept_B = asked_B & (coins_BPC[:, depth, place] < chance_B)
            node_B = torch.where(kept_B, child_B, node_B)
            depth_B = depth_B + kept_B
            path_BP[:, depth + 1] = torch.where(kept_B, child_B, path_BP[:, depth + 1])
            moved_B, waiting_B = moved_B | kept_B, waiting_B & ~kept_B
            refused_B1 = (asked_B & ~kept_B)[:, None]
            if look and not refused_B1.any():
                continue
            law_BV = torch.where(refused_B1, residual(law_BV, q_BV), law_BV)
            if place + 1 < most:
                q_BV = torch.where(refused_B1, without(q_BV, x_B1), q_BV)
        alive_B = moved_B
        if look and not alive_B.any():
            break
        law_BV = torch.where(alive_B[:, None], target_at(node_B), law_BV)
    return Walk(node_B=node_B, depth_B=depth_B, path_BP=path_BP, law_BV=law_BV, chance_BN=chance_BN)


def residual(r_BV: Tensor, q_BV: Tensor) -> Tensor:
    """norm((r - q)+); r itself where nothing is left, which only rounding can bring about (r and q are equal)."""
    left_BV = (r_BV - q_BV).clamp(min=0)
    mass_B1 = left_BV.sum(1, keepdim=True)
    return torch.where(mass_B1 > 0, left_BV / mass_B1, r_BV)


def without(q_BV: Tensor, x_B1: Tensor) -> Tensor:
    """The draft distribution once x has been drawn: x removed, renormalised; zero where x was all there was."""
    left_BV = q_BV.scatter(1, x_B1, 0.0)
    mass_B1 = left_BV.sum(1, keepdim=True)
    return torch.where(mass_B1 > 0, left_BV / mass_B1, 0.0)


def scattered(q_BW: Tensor, draft_to_target: Tensor, vocab: int) -> Tensor:
    """A distribution over the draft vocabulary as one over the target's."""
    return q_BW.new_zeros(len(q_BW), vocab).index_copy(1, draft_to_target, q_BW)
