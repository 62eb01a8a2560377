"""A transformers causal LM behind our masks, caches and hidden states: what target and draft model share."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from distill.attention import AttentionMask, Documents, attend_documents, attend_with_own, packed_mask, segments
from distill.errors import UserError
from distill.kv_cache import KVCache
from distill.products import is_bare, product
from distill.target.fast import FastTarget
from distill.target.info import FULL, SLIDING, describe, layer_kinds
from distill.types import TargetOutput


class Backbone:
    """A transformers causal LM whose attention honours a 4-D mask. Not an ``nn.Module``.

    Args:
        model: the causal LM.
        name: what to call it in messages and records.
        tokenizer: its tokenizer; None where only ids are used.
        n_layers: run the first layers only, then the final norm and the head; the modules are the model's own.

    Raises:
        UserError: the architecture cannot be run this way.
    """

    def __init__(self, model: PreTrainedModel, *, name: str, tokenizer: Any = None, n_layers: int | None = None):
        self.model: Any = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.tokenizer = tokenizer
        self._backbone: Any = model.get_decoder()
        self.config_hf: Any = self._backbone.config
        self._embedding: Any = model.get_input_embeddings()
        self._head: Any = model.get_output_embeddings()
        self._kinds = layer_kinds(self.config_hf, name)
        self._layers = _decoder_layers(self._backbone, self.config_hf.num_hidden_layers, name)
        # transformers renamed the argument in 5.24.
        parameters = inspect.signature(self._backbone.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._additive = self.config_hf._attn_implementation == "eager"
        if self.config_hf._attn_implementation not in ("sdpa", "eager"):
            raise UserError(
                f"attention of target {name} must be sdpa or eager, got "
                f"{self.config_hf._attn_implementation}; set target.attention to one of them"
            )
        if self._head is None:
            raise UserError(f"target {name} must be a causal language model, got one without an output head")
        self.info = describe(model, name=name, tokenizer=tokenizer, kinds=self._kinds)
        if n_layers is not None:
            self._layers = self._layers[:n_layers]
            self._backbone = _with_layers(self._backbone, self._layers)
            self.info = replace(self.info, n_layers=n_layers)

    @property
    def attention(self) -> str:
        """The model's own attention implementation: sdpa or eager."""
        return self.config_hf._attn_implementation

    maskless = False
    """Whether a pass through a cache can do without a mask that hides nothing."""

    def embed(self, ids: Tensor) -> Tensor:
        """Return what enters layer 0 for ``ids`` [...]: [..., D], any embedding scale included."""
        scale = getattr(self.config_hf, "embedding_multiplier", None)  # Granite scales outside its module
        embedded = self._embedding(ids)
        return embedded if scale is None else embedded * scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [..., D] to logits [..., V] as the model does: head, logit scale, soft-capping.

        Differentiable with respect to ``hidden``; the head itself is frozen.
        """
        hidden = hidden.to(self.dtype)
        # The teacher's head is a third of a training step, and oneDNN is the faster one at its shape.
        quick = not torch.is_grad_enabled() and is_bare(self._head)
        return self.scale_logits(product(hidden, self._head.weight) if quick else self._head(hidden))

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Apply what the model does to its head's output: logit scale, soft-capping."""
        config = self.config_hf
        if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / divisor
        if (factor := getattr(config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * factor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    @property
    def draft_head(self) -> Callable[[Tensor], Tensor]:
        """``logits`` for losses: the output layer itself where the model does nothing else with its output."""
        config = self.config_hf
        changed = any(
            getattr(config, key, None) is not None
            for key in ("logits_scaling", "logit_scale", "final_logit_softcapping")
        )
        return self._head if is_bare(self._head) and not changed else self.logits

    def run(
        self,
        ids_BL: Tensor,
        *,
        positions_BL: Tensor | None = None,
        mask: AttentionMask | None = None,
        doc_BL: Tensor | None = None,
        cache: KVCache | None = None,
        taps: Iterable[int] = (),
    ) -> TargetOutput:
        """Run the decoder layers, never the head; gradients follow the context.

        Args:
            ids_BL: token ids (padding clamped to a valid id).
            positions_BL: position of each token; 0..L-1 by default.
            mask: who sees whom, per kind of layer; by default plain causal attention over ``ids_BL``.
            doc_BL: instead of a mask, the documents of packed rows (-1 on padding, whose output is undefined): each
                is causal in itself, in memory linear in L (quadratic where the model attends eagerly).
            cache: where keys and values are kept; the caller has announced the write with ``cache.begin``
                and gives positions and mask.
            taps: hidden states to keep; tap k enters layer k, tap n leaves the last one.

        Returns:
            The last hidden state after the final norm, and the requested taps only.
        """
        if cache is not None and (mask is None or positions_BL is None):
            raise ValueError("forward with a cache needs positions_BL and mask, since slots are not positions")
        if positions_BL is None:
            positions_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device).expand(ids_BL.shape)
        if mask is None and doc_BL is None:
            mask = packed_mask(torch.zeros_like(ids_BL), positions_BL, window=self.info.sliding_window)
        if doc_BL is not None and (self._additive or not self.model._supports_attention_backend):
            mask, doc_BL = packed_mask(doc_BL, positions_BL, window=self.info.sliding_window), None
        taps = tuple(taps)
        caught: dict[int, Tensor] = {}
        # Hooks live for this call only: nothing is left on the model, even when the forward fails.
        with ExitStack() as hooks:
            for tap in taps:
                hooks.callback(self._catch(tap, caught).remove)
            packed = {} if doc_BL is None else hooks.enter_context(self._by_document(doc_BL))
            output = self._backbone(
                input_ids=ids_BL,
                attention_mask=None if mask is None else self._native(mask),
                position_ids=positions_BL,
                **{self._cache_name: cache},
                use_cache=cache is not None,
                **packed,
            )
        return TargetOutput(last_BLD=output.last_hidden_state, taps={tap: caught[tap] for tap in taps})

    forward = torch.no_grad()(run)
    """``run`` without gradients."""

    def fast_twin(self) -> FastTarget:
        """The same weights behind the fast engine, compared with this forward first."""
        return FastTarget.checked(self)

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """Return an empty cache with this model's shapes for ``batch_size`` rows of ``capacity`` slots."""
        return KVCache(
            n_layers=self.info.n_layers,
            batch_size=batch_size,
            n_kv_heads=self.info.n_kv_heads,
            capacity=capacity,
            head_dim=self.info.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def _native(self, mask: AttentionMask) -> Tensor | dict[str, Tensor]:
        """Give the mask the form this model takes: bool or additive, one tensor or one per kind of layer."""
        by_kind = {FULL: mask.full_B1QT, SLIDING: mask.sliding_B1QT}
        native: dict[str, Tensor] = {}
        for kind in self._kinds:
            allowed = by_kind[kind]
            if allowed is None:
                raise ValueError("this target has sliding-window layers: build the mask with its window")
            native[kind] = self._to_additive(allowed) if self._additive else allowed
        return native if len(native) > 1 else native[self._kinds[0]]

    @contextmanager
    def _by_document(self, doc_BL: Tensor) -> Iterator[dict[str, Documents]]:
        """Let the layers attend document by document, for one call; yields what the call must be given."""
        before = self.config_hf._attn_implementation
        self.config_hf._attn_implementation = _BY_DOCUMENT
        try:
            yield {"documents": segments(doc_BL)}
        finally:
            self.config_hf._attn_implementation = before

    def _to_additive(self, allowed: Tensor) -> Tensor:
        blocked = torch.zeros(allowed.shape, dtype=self.dtype, device=allowed.device)
        return blocked.masked_fill_(~allowed, torch.finfo(self.dtype).min)

    def _catch(self, tap: int, caught: dict[int, Tensor]) -> Any:
        if not 0 <= tap <= self.info.n_layers:
            raise ValueError(f"tap must be in 0..{self.info.n_layers}, got {tap}")

        def entering(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            caught[tap] = args[0] if args else kwargs["hidden_states"]

        def leaving(_module: nn.Module, _args: tuple, output: Any) -> None:
            caught[tap] = output[0] if isinstance(output, tuple) else output

        if tap == self.info.n_layers:
            return self._layers[-1].register_forward_hook(leaving)
        return self._layers[tap].register_forward_pre_hook(entering, with_kwargs=True)


_BY_DOCUMENT = "draftsmith_documents"
"""Name under which transformers knows ``attend_documents``; it builds no mask for a name it has none for."""


def _attend_documents(
    _layer: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _mask: None,
    *,
    documents: Documents,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if q.dtype != v.dtype:  # autocast, which rotates in fp32
        q, k = q.to(v.dtype), k.to(v.dtype)
    plain = sliding_window is None and scaling in (None, q.shape[-1] ** -0.5)
    if plain and torch.is_grad_enabled() and q.requires_grad:  # one backward for all documents
        return attend_with_own(q, k, v, [], documents).transpose(1, 2), None
    out_BHLK = attend_documents(q, k, v, documents, scale=scaling, window=sliding_window)
    return out_BHLK.transpose(1, 2), None


AttentionInterface.register(_BY_DOCUMENT, _attend_documents)


def _with_layers(decoder: Any, layers: list[nn.Module]) -> Any:
    """The same decoder with fewer layers: a second shell around the same modules and the same config."""
    (name,) = (n for n, child in decoder.named_children() if isinstance(child, nn.ModuleList) and layers[0] in child)
    short = copy.copy(decoder)
    short._modules = {**decoder._modules, name: nn.ModuleList(layers)}
    return short


def _decoder_layers(backbone: nn.Module, n_layers: int, name: str) -> list[nn.Module]:
    for child in backbone.children():
        if isinstance(child, nn.ModuleList) and len(child) >= n_layers:
            return list(child)[:n_layers]
    raise UserError(
        f"target {name} must keep its {n_layers} decoder layers in one list, got {type(backbone).__name__} "
        "without one; choose another architecture"
    )


def twin(module: nn.Module, made: dict[int, Any] | None = None) -> Any:
    """A second tree of modules around the same parameters and buffers; hooks and children can be changed apart."""
    made = {} if made is None else made
    if id(module) in made:
        return made[id(module)]
    copied = made[id(module)] = copy.copy(module)
    own = vars(copied)
    own.update({key: value.copy() for key, value in own.items() if isinstance(value, dict)})
    own.pop("forward", None)  # the packed forward of the fast engine belongs to the original
    copied._modules = {name: None if child is None else twin(child, made) for name, child in copied._modules.items()}
    return copied
