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

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from distill import alignment
from distill.attention import attend, attend_with_own, segments, tree_mask
from distill.config import opt
from distill.drafters.base import Drafter, DrafterState
from distill.drafters.blocks import MLP, Attend, Attention, BlockShape, RMSNorm, Rotary
from distill.errors import UserError
from distill.kv_cache import KVCache
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

    def forward(self, embeds_BLD: Tensor, g_BLD: Tensor, rotary: tuple[Tensor, Tensor], attend_: Attend) -> Tensor:
        """Return out_BLD, before the final norm."""
        normed = self.hidden_norm(g_BLD)
        residual = normed if self.norm_before_residual else g_BLD
        x = torch.cat([self.input_layernorm(embeds_BLD), normed], dim=-1)
        h = residual + self.self_attn(x, rotary, attend_)
        return h + self.mlp(self.post_attention_layernorm(h))


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
        return self.fc(torch.cat(taps, dim=-1))

    def _layer(self, ids_BL: Tensor, g_BLD: Tensor, positions_BL: Tensor, attend_: Attend) -> Tensor:
        embeds = self.target.embed(ids_BL).to(g_BLD.dtype)
        return self.layers[0](embeds, g_BLD, self.rotary(positions_BL, g_BLD.dtype), attend_)

    def _feedback(self, out_BLD: Tensor) -> Tensor:
        return self.norm(out_BLD) if self.config.norm_output else out_BLD

    # -- training

    def training_steps(self, batch: Batch, output: TargetOutput) -> list[StepPrediction]:
        """One prediction per training-time-test step; step k speaks about token t_{i+2+k}."""
        memory = _StepMemory(segments(batch.doc_BL), self.shape.n_heads // self.shape.n_kv_heads)
        g_BLD = self.fuse(output)
        steps = []
        for k in range(self.config.ttt_steps):
            out_BLD = self._layer(alignment.input_ids(batch, k), g_BLD, batch.positions_BL + k, memory)
            steps.append(
                StepPrediction(
                    hidden_BLD=self.norm(out_BLD),
                    head=self.lm_head,
                    shift=2 + k,
                    mask_BL=alignment.recurrent_mask(batch, k),
                    weight=self.config.step_decay**k,
                )
            )
            g_BLD = self._feedback(out_BLD)
        return steps

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


class _StepMemory:
    """Attention of the training-time test: remembers the keys and values of the steps before."""

    def __init__(self, documents: list[tuple[int, int, int]], per_group: int):
        self.documents = documents
        self.per_group = per_group
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(self.per_group, 1), v.repeat_interleave(self.per_group, 1)
        self.seen.append((k, v))
        (first_k, first_v), later = self.seen[0], self.seen[1:]
        return attend_with_own(q, first_k, first_v, later, self.documents)
