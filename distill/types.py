"""The records that cross module borders.

Shape letters, used in tensor names everywhere: B batch, L sequence, N tree nodes, F frontier nodes, M nodes
fed to the drafter so far, D hidden, V target vocabulary, W draft vocabulary, H heads, K head dim, T cache
length. p is always the target's distribution, q always the draft's. Rows of a batch are uneven: padding is
-1 (ids that must be embedded are clamped to 0 by the consumer), lengths are per row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Candidates = Literal["topk", "coupled", "sampled"]
"""How a tree's tokens were picked: deterministically, with the target's own noise, or drawn from q."""

Kind = Literal["logits", "feature"]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed training documents.

    Attributes:
        ids_BL: token ids; padding is 0 with ``doc_BL`` -1.
        loss_mask_BL: bool, True on tokens the target wrote (assistant tokens and the turn end).
        positions_BL: position of each token inside its own document.
        doc_BL: document index inside the row, -1 on padding.
        denominator: supervised tokens in the whole optimiser step (all micro-batches, all ranks); losses are
            sums divided by it, so the learning rate depends neither on mask density nor on accumulation.
        features: what the target's forward leaves, where it was stored (``data.features=store``); padding is 0. None:
            run the target.
    """

    ids_BL: Tensor
    loss_mask_BL: Tensor
    positions_BL: Tensor
    doc_BL: Tensor
    denominator: float
    features: "TargetOutput | None" = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with ``change`` applied to each of its tensors."""
        return Batch(
            ids_BL=change(self.ids_BL),
            loss_mask_BL=change(self.loss_mask_BL),
            positions_BL=change(self.positions_BL),
            doc_BL=change(self.doc_BL),
            denominator=self.denominator,
            features=None if self.features is None else self.features.map(change),
        )

    def to(self, device, *, non_blocking: bool = False) -> "Batch":
        """Return the batch with its tensors on ``device``; non-blocking copies overlap where memory is pinned."""
        return self.map(lambda x: x.to(device, non_blocking=non_blocking))


@dataclass(frozen=True, kw_only=True)
class TargetOutput:
    """What one forward of the frozen target leaves behind.

    Attributes:
        last_BLD: what the head reads (after the final norm).
        taps: tap k -> hidden state entering layer k, k = 0..n-1 (transformers ``hidden_states[k]``); key n is
            ``tap_out``, the residual after the last layer, before the norm. Only the requested ones are kept.
    """

    last_BLD: Tensor
    taps: dict[int, Tensor]

    def map(self, change: Callable[[Tensor], Tensor]) -> "TargetOutput":
        """Return it with ``change`` applied to each of its tensors."""
        return TargetOutput(last_BLD=change(self.last_BLD), taps={k: change(x) for k, x in self.taps.items()})


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """At position t these hidden states, through this head, speak about token t+shift, where the mask says so.

    Attributes:
        hidden_BLD: hidden states, not logits, so that the loss can chunk over tokens.
        head: maps hidden [..., D] to logits [..., W] in the draft vocabulary; a module's weights are trained unless
            frozen, a plain function has none. The target's own head is ``target.draft_head``.
        shift: distance from a position to the token it speaks about (EAGLE-3 step k: 2 + k).
        mask_BL: bool, from ``alignment.py``.
        weight: weight of this step in the total.
        kind: ``logits`` (a loss on distributions) or ``feature`` (a regression on ``feature_target_BLD``).
        drafted: False for a term that trains something else than a draft (Medusa-2's own next token): it counts in the
            loss, and not in accuracies and the simulated acceptance length.
        feature_target_BLD: what ``hidden_BLD`` should equal, for feature regression.
    """

    hidden_BLD: Tensor
    head: Callable[[Tensor], Tensor]
    shift: int
    mask_BL: Tensor
    weight: float
    kind: Kind = "logits"
    drafted: bool = True
    feature_target_BLD: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class DraftTree:
    """A proposal. Node 0 is the last committed token; parents precede children; a chain is one child per node.

    Attributes:
        tokens_BN: target-vocabulary ids; -1 marks an unused node.
        parents_BN: index of each node's parent; the root's is 0.
        max_depth: depth of the deepest node the plan can grow (root = 0); a host integer.
        candidates: how the tokens were picked.
        q_BFW: warped distributions over the draft vocabulary, one for every node that was grown on; its children were
            drawn from it without replacement, in index order (``sampled`` only).
        q_row_N: row of ``q_BFW`` for every node, -1 for the leaves (``sampled`` only).
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    max_depth: int
    candidates: Candidates
    q_BFW: Tensor | None = None
    q_row_N: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """What verification decided.

    Attributes:
        path_BN: node indices of the kept path, root first (so it has n_B valid entries), padded with -1;
            N is max_depth + 1 here.
        n_B: number of kept nodes, root included (1..max_depth+1); n_B - 1 drafted tokens were accepted.
        next_B: the target's token after the last kept node (the correction or bonus token).
    """

    path_BN: Tensor
    n_B: Tensor
    next_B: Tensor


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The nodes of one depth that the drafter is asked to continue.

    The tensors are written again for the next tree: what a drafter wants to keep of them it copies.

    Attributes:
        tokens_BF: target-vocabulary ids.
        depth: depth of these nodes (root = 0), a host integer.
        parent_BF: index of each node's parent inside the previous frontier (zeros for the root).
        ancestors_BFM: bool over all nodes fed so far, this frontier included, in feeding order: True where the
            fed node is an ancestor or the node itself. The root is column 0.
    """

    tokens_BF: Tensor
    depth: int
    parent_BF: Tensor
    ancestors_BFM: Tensor
