"""The fast engine: the same target with a decode step that takes as little time as we can make it.

On a CPU: projections joined and packed (``packed.py``), few operations (``fused.py``). On CUDA the same fused step
is replayed from a graph per shape (``distill/graphs.py``). Families that ``fused.py`` does not know keep their
transformers forward with packed projections. Prefill chunks, verification and plain decoding all go through here, so a
drafted and an undrafted run are equally fast per pass.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from distill.attention import AttentionMask, tree_mask
from distill.graphs import BUCKET, FixedCache, Graphs, Storage, rounded
from distill.kv_cache import KVCache
from distill.packed import PackedLinear, Packing
from distill.target.fused import FusedLayers, why_not
from distill.target.info import FULL, SLIDING
from distill.types import TargetOutput

_MOST_ROWS = 256  # new tokens in all up to which recording a step is worth its memory

# Largest accepted error of one position's vector, relative to its norm. Different kernels round differently:
# bf16 keeps 8 bits, about one per cent after 30 layers; a wrong mask or a lost scale is far above.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}


class FastTarget:
    """Decodes like ``Target``, faster; training keeps the transformers forward.

    Args:
        target: the target whose weights are used (its projections become views of joined ones).
        reason: why the decoder layers must not be fused; None looks at them.

    Attributes:
        reason: why the decoder layers are not fused; None when they are.
    """

    def __init__(self, target: Any, *, reason: str | None = None):
        self.target = target
        self.info, self.device, self.dtype = target.info, target.device, target.dtype
        backbone = target._backbone
        self.reason = reason or why_not(target._layers) or _missing(backbone)
        self._packing: Packing | None = None
        self._fused: FusedLayers | None = None
        if self.reason is None:
            n = target.info.n_layers
            kinds = list(getattr(target.config_hf, "layer_types", None) or target._kinds * n)[:n]
            self._fused = FusedLayers(
                target._layers,
                backbone.norm,
                kinds=kinds,
                n_heads=target.info.n_heads,
                n_kv_heads=target.info.n_kv_heads,
                head_dim=target.info.head_dim,
            )
        else:
            self._packing = Packing(backbone, on=False)
        self._head = PackedLinear(target._head.weight, target._head.bias)
        self.graphs: Graphs | None = Graphs() if self._fused is not None and self.device.type == "cuda" else None
        self.storage = Storage()

    @classmethod
    def checked(cls, target: Any) -> "FastTarget":
        """Build and compare with the model's own forward; a step that differs is not used."""
        fast = cls(target)
        if fast.reason is not None:
            return fast
        try:
            same = fast._agrees()
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            return cls(target, reason=f"a failure: {str(error).splitlines()[0] if str(error) else error!r}")
        return fast if same else cls(target, reason="a fused step that differed from the model's own")

    def first(self, backbone: Any) -> "FastTarget":
        """The same engine over the first layers only: ``backbone`` is the target cut short, no weight is held twice."""
        short = copy.copy(self)
        short.target, short.info = backbone, backbone.info
        if self._fused is not None:
            short._fused = self._fused.first(backbone.info.n_layers)
            short.graphs = None if self.graphs is None else Graphs()
        short.storage = Storage()
        return short

    @torch.inference_mode()
    def _agrees(self) -> bool:
        """Run a dozen tokens through both, with masks that differ between kinds of layers."""
        n, window = 12, None if self.info.sliding_window is None else 4
        ids_1N = torch.arange(n, device=self.device)[None] * 7 % self.info.vocab_size
        depths_1N = torch.arange(n, device=self.device)[None]
        causal_1NN = torch.ones(1, n, n, dtype=torch.bool, device=self.device).tril()
        taps = (0, self.info.n_layers // 2, self.info.n_layers)
        outputs = []
        for forward in (self.forward, self.target.run):
            cache = self.target.new_cache(1, n)
            mask = tree_mask(
                lengths_B=cache.lengths_B,
                ancestors_BNM=causal_1NN,
                view=cache.begin(n),
                depths_BM=depths_1N,
                window=window,
            )
            outputs.append(forward(ids_1N, positions_BL=depths_1N, mask=mask, cache=cache, taps=taps))
        ours, theirs = outputs
        pairs = [(ours.last_BLD, theirs.last_BLD), *((ours.taps[k], theirs.taps[k]) for k in taps)]
        # The median position: in half precision the first one, a sink of attention with a huge norm, rounds far apart.
        errors = [((a - b).double().norm(dim=-1) / b.double().norm(dim=-1)).median() for a, b in pairs]
        return bool((torch.stack(errors) <= TOLERANCE[self.dtype]).all())

    @property
    def maskless(self) -> bool:
        """Whether ``forward`` takes None for a mask that hides nothing."""
        return self._fused is not None

    def embed(self, ids: Tensor) -> Tensor:
        """As ``Target.embed``."""
        return self.target.embed(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """As ``Target.logits``, without gradients."""
        return self.target.scale_logits(self._head(hidden.to(self.dtype)))

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """As ``Target.new_cache``; with graphs, in memory that stays where it is and shapes that repeat."""
        if self.graphs is None:
            return self.target.new_cache(batch_size, capacity)
        cache = self.target.new_cache(batch_size, rounded(capacity))
        cache.bucket = BUCKET
        return self.storage.adopt(cache)

    def forward(
        self,
        ids_BL: Tensor,
        *,
        positions_BL: Tensor,
        mask: AttentionMask | None,
        cache: KVCache,
        taps: Iterable[int] = (),
    ) -> TargetOutput:
        """As ``Target.forward`` with a cache; mask None: every slot in the cache's view may be attended."""
        taps = tuple(taps)
        if self._fused is None:
            assert self._packing is not None
            assert mask is not None
            self._packing.on = True
            try:
                return self.target.run(ids_BL, positions_BL=positions_BL, mask=mask, cache=cache, taps=taps)
            finally:
                self._packing.on = False
        masks: dict[str, Tensor | None] = {}
        if mask is not None:
            masks = {FULL: mask.full_B1QT, SLIDING: mask.sliding_B1QT}
        if self.graphs is None or ids_BL.numel() > _MOST_ROWS:
            return self._run(ids_BL, positions_BL, masks, cache, taps)
        kinds = [kind for kind, allowed in masks.items() if allowed is not None]
        kv, view = cache.kv, cache.view

        def step(ids: Tensor, positions: Tensor, slots: Tensor, *allowed: Tensor) -> TargetOutput:
            fixed = FixedCache(kv, slots, view)
            return self._run(ids, positions, dict(zip(kinds, allowed, strict=True)), fixed, taps)

        inputs = [ids_BL, positions_BL, cache.slots_BN, *(allowed for allowed in masks.values() if allowed is not None)]
        return self.graphs.run(step, inputs, key=(kv.data_ptr(), view, taps, tuple(kinds)))

    def _run(
        self, ids_BL: Tensor, positions_BL: Tensor, masks: dict[str, Tensor | None], cache: Any, taps: tuple
    ) -> TargetOutput:
        x_BND = self.target.embed(ids_BL)
        rotary = self.target._backbone.rotary_emb(x_BND, positions_BL)
        assert self._fused is not None
        last, caught = self._fused.run(x_BND, rotary, masks, cache, taps)
        return TargetOutput(last_BLD=last, taps=caught)


def _missing(backbone: Any) -> str | None:
    for name in ("norm", "rotary_emb", "embed_tokens"):
        if not hasattr(backbone, name):
            return f"a backbone without {name}"
    return None
