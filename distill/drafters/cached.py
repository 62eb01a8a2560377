"""What drafters that are language models themselves share: one forward, one cache of their own, no target features.

A round costs one pass per depth and no more. ``extend`` only notes the tokens that were committed; the first ``step``
reads them together with the root, and their keys and values become stable at the next ``extend``. Scratch behind the
committed entries of a row, two tokens pending, root r, then the nodes of depth 1::

    slot      c c c | p p r a b        p, p   causal
    position  0 1 2 | 3 4 5 6 6        r      sees c, the row's own p (rows differ in how many), itself
                                       a, b   see what r sees, and their ancestors
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.alignment import generated_run
from distill.attention import AttentionMask, tree_mask
from distill.drafters.base import Drafter, DrafterState
from distill.kv_cache import KVCache
from distill.target.backbone import Backbone
from distill.target.fast import FastTarget
from distill.types import Batch, Frontier, StepPrediction, TargetOutput

_NOTED = 16
"""Tokens that wait for the next step; longer chunks (prompts) are read at once."""


@dataclass(kw_only=True)
class CachedState(DrafterState):
    """Decoding state.

    Attributes:
        pending_BP: committed tokens whose keys are not in the committed part of the cache, left-aligned.
        n_pending_B: how many of them are valid.
        depths_BM: positions of everything in the scratch behind ``cache.lengths_B`` (models with windows only).
        longest: positions of the fullest row, pending ones included.
        read: whether a proposal has put the pending tokens into the scratch.
        read_BM: tokens in the scratch of this proposal.
        chain: whether every frontier of this proposal had one node.
    """

    cache: KVCache
    pending_BP: Tensor
    n_pending_B: Tensor
    read_BM: Tensor
    depths_BM: Tensor | None = None
    longest: int = 0
    read: bool = False
    chain: bool = True


class CachedDrafter(Drafter):
    """A drafter around a ``Backbone``, which subclasses provide."""

    backbone: Backbone
    _fast: FastTarget | None = None

    @classmethod
    def taps(cls, config: Any, info: Any) -> tuple[int, ...]:
        """None: it reads tokens."""
        return ()

    @property
    def engine(self) -> Backbone | FastTarget:
        """What decoding passes go through."""
        return self._fast or self.backbone

    def training_steps(self, batch: Batch, output: TargetOutput) -> list[StepPrediction]:
        """One prediction: position t speaks about token t+1, wherever the target wrote it."""
        hidden_BLD = self.backbone.run(batch.ids_BL, positions_BL=batch.positions_BL, doc_BL=batch.doc_BL).last_BLD
        mask_BL = generated_run(batch, 1, 1)
        return [
            StepPrediction(hidden_BLD=hidden_BLD, head=self.backbone.draft_head, shift=1, mask_BL=mask_BL, weight=1.0)
        ]

    # -- drafting

    def new_state(self, batch_size: int, capacity: int) -> CachedState:
        """Empty state."""
        cache = self.backbone.new_cache(batch_size, capacity + _NOTED)
        pending_BP = torch.zeros(batch_size, 0, dtype=torch.long, device=cache.kv.device)
        return CachedState(
            cache=cache, pending_BP=pending_BP, n_pending_B=torch.zeros_like(cache.lengths_B), read_BM=pending_BP
        )

    def extend(
        self,
        state: CachedState,
        ids_BL: Tensor,
        next_B: Tensor,
        output: TargetOutput | None,
        n_B: Tensor,
        *,
        longest: int,
    ) -> None:
        """Note the tokens, or read them where they are many; see ``Drafter.extend``. Features are not looked at."""
        ids_BL = ids_BL.clamp(min=0)
        on_host = len(ids_BL) == 1 and ids_BL.device.type == "cpu"
        if on_host:  # how many are valid is known
            ids_BL = ids_BL[:, : longest - state.longest]
        if state.read and on_host and state.chain:
            # An accepted chain lies in the cache as it was drafted; what is missing is its end at most.
            drafted_1M = state.read_BM[:, state.pending_BP.shape[1] :][:, : ids_BL.shape[1]]
            same = int((drafted_1M == ids_BL[:, : drafted_1M.shape[1]]).cumprod(1).sum())
            state.cache.advance(state.n_pending_B + same, longest=state.longest + same)
            ids_BL, n_B = ids_BL[:, same:], n_B - same
        elif state.read:
            state.cache.advance(state.n_pending_B, longest=state.longest)
        elif state.pending_BP.shape[1]:
            self._read(state, state.pending_BP, state.n_pending_B, longest=state.longest)
        if ids_BL.shape[1] > _NOTED:
            self._read(state, ids_BL, n_B, longest=longest)
            ids_BL, n_B = ids_BL[:, :0], torch.zeros_like(n_B)
        state.pending_BP, state.n_pending_B = ids_BL, n_B
        state.longest, state.read, state.behind = longest, False, ids_BL.shape[1]

    def step(self, state: CachedState, frontier: Frontier) -> Tensor:
        """Logits for the children of each frontier node."""
        waiting = torch.arange(state.pending_BP.shape[1], device=state.pending_BP.device)
        pending_B1P = (waiting < state.n_pending_B[:, None])[:, None]
        ids_BN, depths_BN = frontier.tokens_BF, (state.n_pending_B + frontier.depth)[:, None]
        seen_BNM = frontier.ancestors_BFM
        if len(waiting):
            seen_BNM = torch.cat([pending_B1P.expand(-1, ids_BN.shape[1], -1), seen_BNM], 2)
        depths_BN = depths_BN.expand_as(ids_BN)
        if frontier.depth == 0:
            state.drafted, state.depths_BM, state.chain = 0, None, True
            if len(waiting):
                causal_PM = torch.ones(len(waiting), len(waiting) + 1, dtype=torch.bool, device=waiting.device).tril()
                seen_BNM = torch.cat([causal_PM.expand(len(ids_BN), -1, -1), seen_BNM], 1)
                ids_BN = torch.cat([state.pending_BP, ids_BN], 1)
                depths_BN = torch.cat([waiting.expand(len(ids_BN), -1), depths_BN], 1)
            state.read_BM = ids_BN
        else:
            state.read_BM = torch.cat([state.read_BM, ids_BN], 1)
        state.chain = state.chain and frontier.tokens_BF.shape[1] == 1
        if self.backbone.info.sliding_window is not None:
            before = [] if state.depths_BM is None else [state.depths_BM]
            state.depths_BM = torch.cat([*before, depths_BN], 1)
        hidden_BND = self._pass(state, ids_BN, depths_BN, seen_BNM)
        state.drafted += ids_BN.shape[1]
        state.read = True
        return self.engine.logits(hidden_BND[:, -frontier.tokens_BF.shape[1] :])

    def rollback(self, state: CachedState) -> None:
        """Forget drafted entries; the pending tokens read with them stay, and count from the next ``extend`` on."""
        state.drafted, state.depths_BM, state.read = 0, None, True

    def _read(self, state: CachedState, ids_BL: Tensor, n_B: Tensor, *, longest: int) -> None:
        """Put committed tokens into the cache at once."""
        batch, width = ids_BL.shape
        depths_BL = torch.arange(width, device=ids_BL.device).expand(batch, -1)
        causal = torch.ones(width, width, dtype=torch.bool, device=ids_BL.device).tril().expand(batch, -1, -1)
        state.drafted, state.depths_BM, state.chain = 0, depths_BL, False
        self._pass(state, ids_BL, depths_BL, causal)
        state.cache.advance(n_B, longest=longest)
        state.depths_BM = None

    def _pass(self, state: CachedState, ids_BN: Tensor, depths_BN: Tensor, seen_BNM: Tensor) -> Tensor:
        """Hidden states of N new entries behind the scratch of this proposal; ``seen_BNM`` covers all of it."""
        cache, engine, window = state.cache, self.engine, self.backbone.info.sliding_window
        view = cache.begin(ids_BN.shape[1], behind=state.drafted)
        mask: AttentionMask | None = None
        # One row, one node at the end of a chain: nothing in the cache to hide from it.
        everything = engine.maskless and state.chain and ids_BN.shape == (1, 1) and cache.bucket == 1
        everything = everything and view == cache.longest + state.drafted + 1 and (window is None or view <= window)
        if not (everything and ids_BN.device.type == "cpu"):
            mask = tree_mask(
                lengths_B=cache.lengths_B,
                ancestors_BNM=seen_BNM,
                view=view,
                depths_BM=state.depths_BM,
                window=window,
            )
        positions_BN = cache.lengths_B[:, None] + depths_BN
        return engine.forward(ids_BN, positions_BL=positions_BN, mask=mask, cache=cache).last_BLD
