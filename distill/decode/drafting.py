"""Asking the drafter for a proposal, recorded as one CUDA graph where the fast engine does so.

Growing a tree is dozens of small operations per depth and reads nothing back to the host; as a graph it is one launch.
"""

import copy
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from distill.decode.coupling import RoundNoise, ranker
from distill.graphs import BUCKET, Graphs, Storage, rounded
from distill.growing import grow
from distill.sampling import Sampling
from distill.tree import Plan
from distill.types import Candidates, DraftTree


class Drafting:
    """Grows proposals with one drafter and plan.

    Args:
        drafter: the drafter.
        plan: shape of the proposals.
        sampling: the target's.
        candidates: how drafts are picked.
        graphs: where growing is recorded; None runs it as it is.
    """

    def __init__(
        self, drafter: Any, plan: Plan, sampling: Sampling, *, candidates: Candidates, graphs: Graphs | None = None
    ):
        self.drafter, self.plan, self.sampling, self.candidates = drafter, plan, sampling, candidates
        self.graphs = graphs if drafter.soft else None  # what a lookup finds is not made of recordable operations
        self._storage = Storage()

    def new_state(self, batch_size: int, capacity: int) -> Any:
        """The drafter's empty state; with graphs, in memory that stays where it is."""
        if self.graphs is None:
            return self.drafter.new_state(batch_size, capacity)
        state = self.drafter.new_state(batch_size, rounded(capacity) + BUCKET)
        if state.cache is not None:
            state.cache.bucket = BUCKET
            self._storage.adopt(state.cache)
        return state

    def propose(self, state: Any, root_B: Tensor, noise: RoundNoise) -> DraftTree:
        """Draft one tree under every root and forget what the drafter wrote meanwhile."""
        columns = None if self.drafter.vocab is None else self.drafter.vocab.target_ids
        noise_BPW = noise.for_drafts(self.candidates, columns)
        if self.graphs is None:
            tree = self._grow(state, root_B, noise_BPW)
            return tree if self.drafter.soft or root_B.device.type != "cpu" else trimmed(tree)
        names = [f.name for f in fields(state) if isinstance(getattr(state, f.name), Tensor)]
        cache = state.cache
        fed = self.plan.fed + state.behind
        # Every replay must attend to as many slots as the recording: the last of the bucket.
        end = 0 if cache is None else rounded(cache.longest + fed)
        # Of the state itself nothing may stay in the recording, or its memory could never be handed on.
        frame = replace(state, cache=copy.copy(cache))
        silent = noise_BPW is None

        def step(root_B: Tensor, lengths_B: Tensor, *tensors: Tensor) -> DraftTree:
            fixed = copy.copy(frame.cache)
            if fixed is not None:
                fixed.lengths_B, fixed.longest = lengths_B, end - fed
            own = dict(zip(names, tensors, strict=False))
            return self._grow(replace(frame, cache=fixed, **own), root_B, None if silent else tensors[-1])

        lengths_B, where = (root_B, 0) if cache is None else (cache.lengths_B, cache.kv.data_ptr())
        inputs = [root_B, lengths_B, *(getattr(state, name) for name in names)]
        inputs += [] if noise_BPW is None else [noise_BPW]
        tree = self.graphs.run(step, inputs, key=(where, end, self.plan, self.sampling))
        self.drafter.rollback(state)  # what the recording did to its own copy
        return tree

    def _grow(self, state: Any, root_B: Tensor, noise_BPW: Tensor | None) -> DraftTree:
        calibration = getattr(self.drafter, "calibration", None)
        ranks = ranker(self.candidates, self.sampling, noise_BPW, calibration)
        tree = grow(self.drafter, state, self.plan, root_B, ranks)
        self.drafter.rollback(state)
        return tree


def trimmed(tree: DraftTree) -> DraftTree:
    """Drop the last nodes if no row uses them: a drafter with nothing to say must not cost a wider pass."""
    used = int((tree.tokens_BN >= 0).any(0).nonzero().max()) + 1
    depth = min(tree.max_depth, used - 1)  # nodes are sorted by depth, so fewer nodes than levels are a chain
    return replace(tree, tokens_BN=tree.tokens_BN[:, :used], parents_BN=tree.parents_BN[:, :used], max_depth=depth)
