"""What EAGLE-1 and EAGLE-3 share: a small decoder that reads (next token, feature) pairs and feeds on its own output.

At position i and step k it reads the embedding of t_{i+1+k} and a feature g: made from the target's hidden states at
step 0, its own previous output afterwards. Its output speaks about t_{i+2+k}. The query at step k sees the step-0
keys up to i and its own keys of steps 1..k::

    step-0 keys   x x x x . .      up to i, made from true features
    own keys            x x x      steps 1..k of the same i

which is exactly what a drafted node sees: the prefix, and its ancestors. (HASS, arXiv:2408.15766, writes the same
pattern by the position of the query; the training-time test of EAGLE-3, arXiv:2503.01840, by that of the start.)
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from distill import alignment
from distill.attention import Documents, attend, attend_with_own, segments, tree_mask
from distill.drafters.base import Drafter, DrafterState
from distill.drafters.blocks import Attend, BlockShape, Rotary
from distill.drafters.fused_step import Angles, FusedStep
from distill.kv_cache import KVCache
from distill.packed import edition
from distill.target import Target, TargetInfo
from distill.types import Batch, Frontier, TargetOutput
from distill.vocab import DraftVocab


def block_shape(info: TargetInfo, intermediate_size: int | None) -> BlockShape:
    """Sizes of a drafter's decoder layer: the target's, but for the width of the MLP where it is given."""
    return BlockShape(
        hidden=info.hidden_size,
        intermediate=intermediate_size or info.intermediate_size,
        n_heads=info.n_heads,
        n_kv_heads=info.n_kv_heads,
        head_dim=info.head_dim,
        eps=info.rms_norm_eps,
    )


@dataclass(kw_only=True)
class RecurrentState(DrafterState):
    """Decoding state.

    Attributes:
        last_B1D: output at the last stable position, which speaks about the token after the root.
        outputs_BFD: outputs of the frontier before, the features its children read.
    """

    cache: KVCache
    last_B1D: Tensor
    outputs_BFD: Tensor | None = field(default=None)


class Recurrent(Drafter):
    """Base of the drafters that draft one token at a time from their own features.

    Subclasses have ``fc`` and ``layers``, and say what the first feature is (``features``), what is computed
    (``run``), what is fed back (``feedback``), and how outputs become logits (``draft_logits``).
    """

    fc: nn.Linear
    layers: nn.ModuleList
    detach = False
    """Whether training cuts the gradient between steps."""

    def __init__(self, config: Any, target: Target, vocab: DraftVocab | None, shape: BlockShape):
        super().__init__(config, target, vocab)
        self.shape = shape
        self.rotary = Rotary(target.info, shape.head_dim, config.rope)

    @abstractmethod
    def features(self, output: TargetOutput) -> Tensor:
        """Return g_BLD of step 0 from the target's hidden states."""

    @abstractmethod
    def run(self, ids_BL: Tensor, g_BLD: Tensor, positions_BL: Tensor, attends: Sequence[Attend]) -> Tensor:
        """Return out_BLD for (token, feature) pairs; one ``Attend`` per layer."""

    @abstractmethod
    def draft_logits(self, out_BFD: Tensor) -> Tensor:
        """Return logits_BFW of the tokens that outputs speak about."""

    def feedback(self, out_BLD: Tensor) -> Tensor:
        """Return the feature the next step reads."""
        return out_BLD

    def embedded(self, ids_BL: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the target's embeddings of ``ids``."""
        return self.target.embed(ids_BL).to(dtype)

    # -- training

    def rollout_steps(self, batch: Batch, g_BLD: Tensor, *, steps: int) -> tuple[list[Tensor], "Chosen", list[Tensor]]:
        """Run ``steps`` steps on every position at once.

        From step 1 on a position is read by nobody but itself, so steps are computed only where they count. (All
        positions take part in step 0, whose keys are read by later ones.)

        Args:
            batch: packed documents.
            g_BLD: features of step 0.
            steps: K.

        Returns:
            Outputs per step, [B, L, D] for step 0 and [1, N, D] for the later ones; the N positions; the masks of all
            steps, [B, L].
        """
        masks = [alignment.recurrent_mask(batch, k) for k in range(steps)]
        rows = Chosen(masks[min(1, steps - 1)])  # later masks are inside this one
        documents = segments(batch.doc_BL)
        memories = [_StepMemory(documents, rows) for _ in self.layers]
        outs = [self.run(alignment.input_ids(batch, 0), g_BLD, batch.positions_BL, memories)]
        out = rows.take(outs[0]) if steps > 1 else outs[0]
        for k in range(1, steps):
            ids, positions = rows.take(alignment.input_ids(batch, k)), rows.take(batch.positions_BL + k)
            g = self.feedback(out.detach() if self.detach else out)
            out = self.run(ids, g, positions, memories)
            outs.append(out)
        return outs, rows, masks

    # -- drafting

    def new_state(self, batch_size: int, capacity: int) -> RecurrentState:
        """Empty state."""
        if self.fused is not None:
            self._fuse()
        weight = self.fc.weight
        cache = KVCache(
            n_layers=len(self.layers),
            batch_size=batch_size,
            n_kv_heads=self.shape.n_kv_heads,
            capacity=capacity,
            head_dim=self.shape.head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )
        last = torch.zeros(batch_size, 1, self.shape.hidden, dtype=weight.dtype, device=weight.device)
        return RecurrentState(cache=cache, last_B1D=last)

    def extend(
        self,
        state: RecurrentState,
        ids_BL: Tensor,
        next_B: Tensor,
        output: TargetOutput,
        n_B: Tensor,
        *,
        longest: int,
    ) -> None:
        """Feed the pairs (t_{i+1}, true feature i); see ``Drafter.extend``."""
        batch, width = ids_BL.shape
        last_B1 = (n_B - 1).clamp(min=0)[:, None]
        follows_BL = alignment.shift_left(ids_BL, 1).scatter(1, last_B1, next_B[:, None]).clamp(min=0)
        causal = torch.ones(width, width, dtype=torch.bool, device=ids_BL.device).tril().expand(batch, -1, -1)
        positions_BL = state.cache.lengths_B[:, None] + torch.arange(width, device=ids_BL.device)
        out_BLD = self._decode(state.cache, follows_BL, self.features(output), positions_BL, causal, behind=0)
        picked = out_BLD.gather(1, last_B1[:, :, None].expand(-1, -1, out_BLD.shape[2]))
        state.last_B1D = torch.where((n_B > 0)[:, None, None], picked, state.last_B1D)
        state.cache.advance(n_B, longest=longest)

    def step(self, state: RecurrentState, frontier: Frontier) -> Tensor:
        """Logits for the children of each frontier node; the root's come from the last ``extend``."""
        if frontier.depth == 0:
            out_BFD = state.last_B1D
            state.drafted = 0
        else:
            assert state.outputs_BFD is not None
            g_BFD = self.feedback(
                state.outputs_BFD.gather(1, frontier.parent_BF[:, :, None].expand(-1, -1, self.shape.hidden))
            )
            ancestors = frontier.ancestors_BFM[:, :, 1:]  # the root's pair is stable, it was fed by extend
            # Stable entries end at the root's pair, so a node of depth d sits d positions behind it.
            positions_BF = (state.cache.lengths_B + frontier.depth - 1)[:, None].expand_as(frontier.tokens_BF)
            # Nodes below each other, one row: every drafted entry is an ancestor, and there is nothing to hide.
            chain = ancestors.shape[2] == frontier.depth and len(ancestors) == 1
            out_BFD = self._decode(
                state.cache, frontier.tokens_BF, g_BFD, positions_BF, None if chain else ancestors, behind=state.drafted
            )
            state.drafted += frontier.tokens_BF.shape[1]
        state.outputs_BFD = out_BFD
        return self.draft_logits(out_BFD)

    def rollback(self, state: RecurrentState) -> None:
        """Forget drafted entries: they lie behind the committed length and are overwritten."""
        state.drafted = 0
        state.outputs_BFD = None

    def _decode(
        self,
        cache: KVCache,
        ids_BN: Tensor,
        g_BND: Tensor,
        positions_BN: Tensor,
        ancestors_BNM: Tensor | None,
        *,
        behind: int,
    ) -> Tensor:
        """Run new entries over the cache: they see everything committed, and of the scratch their ancestors.

        ``ancestors_BNM`` None: all of the scratch.
        """
        batch, n = ids_BN.shape
        view = cache.begin(n, behind=behind)
        mask_B1NT = None
        if ancestors_BNM is not None or cache.bucket > 1 or self.fused is None:
            if ancestors_BNM is None:
                ancestors_BNM = torch.ones(batch, n, behind + n, dtype=torch.bool, device=ids_BN.device)
            mask_B1NT = tree_mask(lengths_B=cache.lengths_B, ancestors_BNM=ancestors_BNM, view=view).full_B1QT
        if self.fused is not None:
            return self.fused(self.embedded(ids_BN, g_BND.dtype), g_BND, positions_BN, mask_B1NT, cache)
        assert mask_B1NT is not None
        return self.run(
            ids_BN, g_BND, positions_BN, [self._cached(cache, mask_B1NT, i) for i in range(len(self.layers))]
        )

    @staticmethod
    def _cached(cache: KVCache, mask_B1NT: Tensor, layer: int) -> Attend:
        def attend_(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.update(k, v, layer)
            return attend(q, keys, values, mask_B1NT)

        return attend_

    # -- the fast engine

    fused: FusedStep | None = None
    """The same layers for fast decoding, once ``accelerate`` has made them."""
    _fused_from: list[tuple[int, int]] | None = None

    @abstractmethod
    def fuse(self, angles: Angles) -> FusedStep:
        """Pack the layers."""

    def accelerate(self) -> None:
        """Pack everything; decoding goes through ``fused`` from now on."""
        super().accelerate()
        self._fuse()

    def _fuse(self) -> None:
        """Pack the layers, unless the weights are those that were packed last."""
        if self.fused is None or self._editions() != self._fused_from:
            weight = self.fc.weight
            with torch.inference_mode(False), torch.no_grad():
                self.fused = self.fuse(Angles(self.rotary, weight.dtype, weight.device))
            self._fused_from = self._editions()

    def _editions(self) -> list[tuple[int, int]]:
        """Where only addresses count, joined layers share their memory with the weights, and see every change."""
        found = [edition(weight) for weight in self.parameters()]
        return found if self.fc.weight.is_cpu else [(address, 0) for address, _ in found]


class Chosen:
    """The N positions of a packed batch where a mask is set, as one row."""

    def __init__(self, mask_BL: Tensor):
        self.shape = mask_BL.shape
        self.index_N = mask_BL.flatten().nonzero()[:, 0]

    def take(self, x: Tensor) -> Tensor:
        """[B, L, ...] -> [1, N, ...]."""
        return x.flatten(0, 1)[self.index_N][None]

    def put(self, x: Tensor) -> Tensor:
        """[1, N, ...] -> [B, L, ...], 0 elsewhere."""
        whole = x.new_zeros(self.shape.numel(), *x.shape[2:])
        return whole.index_copy(0, self.index_N, x[0]).view(*self.shape, *x.shape[2:])


class _StepMemory:
    """Attention of one layer over several steps: remembers the keys and values of the steps before.

    Step 0 comes with every position, later steps with the ``rows`` where they count.
    """

    def __init__(self, documents: Documents, rows: Chosen):
        self.documents, self.rows = documents, rows
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.seen:
            self.seen.append((k, v))
            return attend_with_own(q, k, v, [], self.documents)
        q, k, v = (self.rows.put(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v))
        self.seen.append((k, v))
        (first_k, first_v), later = self.seen[0], self.seen[1:]
        out = attend_with_own(q, first_k, first_v, later, self.documents)
        return self.rows.take(out.transpose(1, 2)).transpose(1, 2)
