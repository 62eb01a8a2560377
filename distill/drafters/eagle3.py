"""EAGLE-3 (arXiv:2503.01840): one decoder layer over fused target features, trained on its own drafts.

At position i and step k the layer reads the embedding of t_{i+1+k} and a feature g: the fused taps of the
target at step 0, its own previous output afterwards (training-time test). It speaks about t_{i+2+k}.

    a   = [ input_layernorm(e(t_{i+1+k})) ; hidden_norm(g) ]        2D, embedding first
    h   = g + attention(a)                                          residual un-normed unless norm_before_residual
    out = h + mlp(post_attention_layernorm(h))
    q   = lm_head(norm(out)),   next g = out  (norm(out) with EAGLE-3.1's norm_output)

The query at step k sees the step-0 keys up to i and its own keys of steps 1..k, which is exactly what a
drafted node sees: the prefix made from true features, and its ancestors.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distill import alignment
from distill.attention import Documents, attend, attend_with_own, segments, tree_mask
from distill.config import opt
from distill.drafters.base import Drafter, DrafterState
from distill.drafters.blocks import MLP, Attend, Attention, BlockShape, RMSNorm, Rotary
from distill.errors import UserError
from distill.kv_cache import KVCache
from distill.products import project
from distill.target import Target, TargetInfo
from distill.types import Batch, Frontier, StepPrediction, TargetOutput
from distill.vocab import DraftVocab


@dataclass(kw_only=True)
class Eagle3Config:
    """Every flag is written into checkpoints; null sizes follow the target."""

    name: str = opt("eagle3", "drafter name")
    ttt_steps: int = opt(7, "training-time-test steps K; also how deep a draft was trained for")
    step_decay: float = opt(0.8, "weight of step k is step_decay ** k")
    draft_vocab_size: int = opt(32000, "kept target tokens, at most the target's vocabulary")
    taps: list[int] | None = opt(None, "hidden states entering these layers are fused; null: 2, n/2, n-3")
    intermediate_size: int | None = opt(None, "MLP width; null: the target's")
    norm_before_residual: bool = opt(False, "residual carries hidden_norm(g) instead of g")
    fc_norm: bool = opt(False, "EAGLE-3.1: a norm for each tap before they are fused")
    norm_output: bool = opt(False, "EAGLE-3.1: feed back norm(out) instead of out")
    head_init: str = opt("target", "start of the draft head: target (rows of the target's head) or random")

    def __post_init__(self) -> None:
        if self.ttt_steps < 1:
            raise UserError(f"drafter.ttt_steps must be >= 1, got {self.ttt_steps}")
        if self.draft_vocab_size < 1:
            raise UserError(f"drafter.draft_vocab_size must be >= 1, got {self.draft_vocab_size}")
        if self.intermediate_size is not None and self.intermediate_size < 1:
            raise UserError(
                f"drafter.intermediate_size must be >= 1, got {self.intermediate_size}; null takes the target's"
            )
        if not 0 < self.step_decay <= 1:
            raise UserError(f"drafter.step_decay must be in (0, 1], got {self.step_decay}")
        if self.head_init not in ("target", "random"):
            raise UserError(f"drafter.head_init must be target or random, got {self.head_init!r}")


class Layer(nn.Module):
    """The drafter's decoder layer; its attention reads twice the width."""

    def __init__(self, shape: BlockShape, norm_before_residual: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape, input_size=2 * shape.hidden)
        self.mlp = MLP(shape)
        self.norm_before_residual = norm_before_residual
        self.recompute = False

    def forward(self, embeds_BLD: Tensor, g_BLD: Tensor, rotary: tuple[Tensor, Tensor], attend_: Attend) -> Tensor:
        """Return out_BLD, before the final norm."""
        run = _recomputed if self.recompute and torch.is_grad_enabled() else _kept
        residual, q, k, v = run(self._before, embeds_BLD, g_BLD, rotary)
        h = residual + self.self_attn.join(attend_(q, k, v))
        return run(self._after, h)

    def _before(self, embeds_BLD: Tensor, g_BLD: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        normed = self.hidden_norm(g_BLD)
        residual = normed if self.norm_before_residual else g_BLD
        x = torch.cat([self.input_layernorm(embeds_BLD), normed], dim=-1)
        return residual, *self.self_attn.project(x, rotary)

    def _after(self, h_BLD: Tensor) -> Tensor:
        return h_BLD + self.mlp(self.post_attention_layernorm(h_BLD))


def _kept(part: Callable[..., Any], *args: Any) -> Any:
    return part(*args)


def _recomputed(part: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(part, *args, use_reentrant=False, preserve_rng_state=False)  # a layer without randomness


@dataclass(kw_only=True)
class Eagle3State(DrafterState):
    """Decoding state.

    Attributes:
        last_B1D: layer output at the last stable position, which speaks about the token after the root.
        outputs_BFD: layer outputs of the frontier before, the features its children read.
    """

    cache: KVCache
    last_B1D: Tensor
    outputs_BFD: Tensor | None = field(default=None)


class Eagle3(Drafter):
    """The EAGLE-3 drafter."""

    name = "eagle3"
    Config = Eagle3Config
    config: Eagle3Config
    vocab: DraftVocab

    def __init__(self, config: Eagle3Config, target: Target, vocab: DraftVocab):
        super().__init__(config, target, vocab)
        info = target.info
        shape = BlockShape(
            hidden=info.hidden_size,
            intermediate=config.intermediate_size or info.intermediate_size,
            n_heads=info.n_heads,
            n_kv_heads=info.n_kv_heads,
            head_dim=info.head_dim,
            eps=info.rms_norm_eps,
        )
        self.shape = shape
        self._taps = self.taps(config, info)
        self.rotary = Rotary(info, shape.head_dim)
        self.fc = nn.Linear(len(self._taps) * shape.hidden, shape.hidden, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(shape.hidden, shape.eps) for _ in self._taps)
        self.layers = nn.ModuleList([Layer(shape, config.norm_before_residual)])
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, vocab.size, bias=False)
        if config.head_init == "target":
            rows = target.head_rows(vocab.target_ids.to(target.device))
            self.lm_head.weight.data.copy_(rows)

    @classmethod
    def taps(cls, config: Eagle3Config, info: TargetInfo) -> tuple[int, ...]:
        """Low, middle and high features; on shallow targets the last three distinct hidden states."""
        n = info.n_layers
        if config.taps is not None:
            chosen = tuple(config.taps)
            if sorted(set(chosen)) != list(chosen) or not all(0 <= k <= n for k in chosen) or not chosen:
                raise UserError(
                    f"drafter.taps must be ascending, distinct and between 0 and {n} for this target, "
                    f"got {list(chosen)}"
                )
            return chosen
        default = (2, n // 2, n - 3)
        return default if default[0] < default[1] < default[2] else tuple(range(max(0, n - 3), n))

    # -- the step shared by training and drafting

    def fuse(self, output: TargetOutput) -> Tensor:
        """Fused feature g_BLD of step 0 from the target's taps, low to high."""
        taps = [output.taps[k].to(self.fc.weight.dtype) for k in self._taps]
        if self.config.fc_norm:
            taps = [norm(x) for norm, x in zip(self.fc_norm, taps, strict=True)]
        return project(self.fc, torch.cat(taps, dim=-1))

    @property
    def _decoder_layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def _layer(self, ids_BL: Tensor, g_BLD: Tensor, positions_BL: Tensor, attend_: Attend) -> Tensor:
        embeds = self.target.embed(ids_BL).to(g_BLD.dtype)
        return self.layers[0](embeds, g_BLD, self.rotary(positions_BL, g_BLD.dtype), attend_)

    def _feedback(self, out_BLD: Tensor) -> Tensor:
        return self.norm(out_BLD) if self.config.norm_output else out_BLD

    # -- training

    def recompute_activations(self, on: bool) -> None:
        """Keep what attention and the loss read, and compute the rest of the layer again in the backward pass."""
        self._decoder_layer.recompute = on

    @property
    def steps(self) -> int:
        """K."""
        return self.config.ttt_steps

    def kept_floats(self, share: float) -> float:
        """What a position keeps for attention and loss at every step, and, where it counts, for the rest."""
        wide, narrow = self.shape.n_heads * self.shape.head_dim, self.shape.n_kv_heads * self.shape.head_dim
        hidden, steps = self.shape.hidden, self.steps
        attention = hidden + 2 * wide + 2 * narrow
        joined = 5 * hidden + wide
        layer = 4 * hidden + 4 * self.shape.intermediate
        chosen = 1 + (steps - 1) * share
        inside = 0.0 if self._decoder_layer.recompute else layer
        return len(self._taps) * hidden + steps * attention + chosen * (joined + inside)

    def backward_floats(self) -> float:
        """The inside of the layer, computed again, or its gradients alone."""
        gradients = 2 * self.shape.intermediate
        return gradients + (4 * self.shape.hidden + 4 * self.shape.intermediate) * self._decoder_layer.recompute

    def training_steps(self, batch: Batch, output: TargetOutput) -> list[StepPrediction]:
        """One prediction per training-time-test step; step k speaks about token t_{i+2+k}.

        From step 1 on a position is read by nobody but itself, so steps are computed only where they count; hidden
        states are 0 elsewhere. (All positions take part in step 0, whose keys are read by later ones.)
        """
        masks = [alignment.recurrent_mask(batch, k) for k in range(self.config.ttt_steps)]
        rows = _Chosen(masks[min(1, len(masks) - 1)])  # later masks are inside this one
        memory = _StepMemory(segments(batch.doc_BL), rows)
        out = self._layer(alignment.input_ids(batch, 0), self.fuse(output), batch.positions_BL, memory)
        hiddens = [self.norm(out)]
        out = rows.take(out)
        for k in range(1, self.config.ttt_steps):
            ids, positions = rows.take(alignment.input_ids(batch, k)), rows.take(batch.positions_BL + k)
            out = self._layer(ids, self._feedback(out), positions, memory)
            hiddens.append(rows.put(self.norm(out)))
        return [
            StepPrediction(
                hidden_BLD=hidden, head=self.lm_head, shift=2 + k, mask_BL=mask, weight=self.config.step_decay**k
            )
            for k, (hidden, mask) in enumerate(zip(hiddens, masks, strict=True))
        ]

    # -- drafting

    def new_state(self, batch_size: int, capacity: int) -> Eagle3State:
        """Empty state."""
        weight = self.fc.weight
        cache = KVCache(
            n_layers=1,
            batch_size=batch_size,
            n_kv_heads=self.shape.n_kv_heads,
            capacity=capacity,
            head_dim=self.shape.head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )
        last = torch.zeros(batch_size, 1, self.shape.hidden, dtype=weight.dtype, device=weight.device)
        return Eagle3State(cache=cache, last_B1D=last)

    def extend(
        self,
        state: Eagle3State,
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
        attend_ = self._cached(state.cache, causal, behind=0)
        out_BLD = self._layer(follows_BL, self.fuse(output), positions_BL, attend_)
        picked = out_BLD.gather(1, last_B1[:, :, None].expand(-1, -1, out_BLD.shape[2]))
        state.last_B1D = torch.where((n_B > 0)[:, None, None], picked, state.last_B1D)
        state.cache.advance(n_B, longest=longest)

    def step(self, state: Eagle3State, frontier: Frontier) -> Tensor:
        """Logits for the children of each frontier node; the root's come from the last ``extend``."""
        if frontier.depth == 0:
            out_BFD = state.last_B1D
            state.drafted = 0
        else:
            assert state.outputs_BFD is not None
            g_BFD = self._feedback(
                state.outputs_BFD.gather(1, frontier.parent_BF[:, :, None].expand(-1, -1, self.shape.hidden))
            )
            ancestors = frontier.ancestors_BFM[:, :, 1:]  # the root's pair is stable, it was fed by extend
            # Stable entries end at the root's pair, so a node of depth d sits d positions behind it.
            positions_BF = (state.cache.lengths_B + frontier.depth - 1)[:, None].expand_as(frontier.tokens_BF)
            attend_ = self._cached(state.cache, ancestors, behind=state.drafted)
            out_BFD = self._layer(frontier.tokens_BF, g_BFD, positions_BF, attend_)
            state.drafted += frontier.tokens_BF.shape[1]
        state.outputs_BFD = out_BFD
        return self.lm_head(self.norm(out_BFD))

    def rollback(self, state: Eagle3State) -> None:
        """Forget drafted entries: they lie behind the committed length and are overwritten."""
        state.drafted = 0
        state.outputs_BFD = None

    def _cached(self, cache: KVCache, ancestors_BNM: Tensor, *, behind: int) -> Attend:
        """Attention over the cache: everything committed, and each new entry's ancestors in the scratch."""
        view = cache.begin(ancestors_BNM.shape[1], behind=behind)
        mask = tree_mask(lengths_B=cache.lengths_B, ancestors_BNM=ancestors_BNM, view=view)

        def attend_(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.update(k, v, 0)
            return attend(q, keys, values, mask.full_B1QT)

        return attend_


class _Chosen:
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
    """Attention of the training-time test: remembers the keys and values of the steps before.

    Step 0 comes with every position, later steps with the ``rows`` where they count.
    """

    def __init__(self, documents: Documents, rows: _Chosen):
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
