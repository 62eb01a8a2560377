"""Asking the drafter for a proposal, recorded as one CUDA graph where the fast engine does so.

Growing a tree is dozens of small operations per depth and reads nothing back to the host; as a graph it is one launch.
"""

import copy
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from distill.decode.coupling import CoupledRanker, RoundNoise
from distill.graphs import BUCKET, Graphs, Storage, rounded
from distill.sampling import Sampling
from distill.tree import Plan, grow
from distill.types import DraftTree


class Drafting:
    """Grows proposals with one drafter and plan.

    Args:
        drafter: the drafter.
        plan: shape of the proposals.
        sampling: decides how candidates are ranked.
        graphs: where growing is recorded; None runs it as it is.
    """

    def __init__(self, drafter: Any, plan: Plan, sampling: Sampling, *, graphs: Graphs | None = None):
        self.drafter, self.plan, self.sampling, self.graphs = drafter, plan, sampling, graphs
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
        if self.graphs is None or state.cache is None:
            return self._grow(state, root_B, noise)
        names = [f.name for f in fields(state) if isinstance(getattr(state, f.name), Tensor)]
        cache, full_BPV = state.cache, noise.full
        # Every replay must attend to as many slots as the recording: the last of the bucket.
        end = rounded(cache.longest + self.plan.fed)
        # Of the state itself nothing may stay in the recording, or its memory could never be handed on.
        frame = replace(state, cache=copy.copy(cache))
        request_B, position_BP, vocab = noise.request_B, noise.position_BP, noise.vocab

        def step(root_B: Tensor, lengths_B: Tensor, *tensors: Tensor) -> DraftTree:
            fixed = copy.copy(frame.cache)
            fixed.lengths_B, fixed.longest = lengths_B, end - self.plan.fed
            own = dict(zip(names, tensors, strict=False))
            kept = RoundNoise(sampling=self.sampling, request_B=request_B, position_BP=position_BP, vocab=vocab)
            kept.__dict__["full"] = None if self.sampling.greedy else tensors[-1]
            return self._grow(replace(frame, cache=fixed, **own), root_B, kept)

        inputs = [root_B, cache.lengths_B, *(getattr(state, name) for name in names)]
        inputs += [] if full_BPV is None else [full_BPV]
        return self.graphs.run(step, inputs, key=(cache.kv.data_ptr(), end, self.plan, self.sampling))

    def _grow(self, state: Any, root_B: Tensor, noise: RoundNoise) -> DraftTree:
        columns = None if self.drafter.vocab is None else self.drafter.vocab.target_ids
        ranker = CoupledRanker(self.sampling, noise, columns)
        tree = grow(self.drafter, state, self.plan, root_B, ranker)
        self.drafter.rollback(state)
        return tree
