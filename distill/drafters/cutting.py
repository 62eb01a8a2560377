"""Cutting a small model out of a large one: some of its layers, some of its channels, whole attention heads.

Channels are kept by their share of the squared weights, as in magnitude pruning of whole rows and columns
(arXiv:1608.08710, section 3.1): for the residual stream summed over every matrix that reads or writes it, so that one
choice serves all layers; for the feed-forward width per layer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distill.errors import UserError


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    hidden: int
    intermediate: int


@torch.no_grad()
def cut(large: Any, small: Any, layers: list[int]) -> None:
    """Fill ``small`` with what it shares with ``large``.

    Args:
        large: a transformers causal LM with plain weights.
        small: one of the same class, as deep as ``layers`` is long, narrower in hidden or feed-forward size or equal.
        layers: which layer of ``large`` each layer of ``small`` is taken from.

    Raises:
        UserError: quantised weights.
    """
    source = dict(large.get_decoder().named_parameters())
    if not all(p.is_floating_point() for p in source.values()):
        raise UserError(
            "drafter.source=layers must have a target with plain weights to cut from, got quantised ones; "
            "use drafter.source=config or checkpoint"
        )
    wide, narrow = (_Sizes(hidden=c.hidden_size, intermediate=c.intermediate_size) for c in _configs(large, small))
    stem = next(name for name, child in small.get_decoder().named_children() if isinstance(child, nn.ModuleList))
    pairs: list[tuple[Tensor, Tensor, int]] = []  # (large, small, layer or -1)
    for name, parameter in small.get_decoder().named_parameters():
        layer = -1
        if name.startswith(f"{stem}."):
            _, number, rest = name.split(".", 2)
            layer = int(number)
            name = f"{stem}.{layers[layer]}.{rest}"
        pairs.append((source[name], parameter, layer))
    heads = (large.get_output_embeddings().weight, small.get_output_embeddings().weight)
    if heads[1] is not small.get_input_embeddings().weight:
        pairs.append((*heads, -1))
    kept_D = _strongest(pairs, wide.hidden, narrow.hidden)
    for layer in range(-1, len(layers)):
        own = [pair for pair in pairs if pair[2] == layer]
        kept_I = _strongest(own, wide.intermediate, narrow.intermediate)
        for theirs, ours, _ in own:
            for axis, (size, wanted) in enumerate(zip(theirs.shape, ours.shape, strict=True)):
                if size != wanted:
                    kept = kept_D if (size, wanted) == (wide.hidden, narrow.hidden) else kept_I
                    parts = size // (wide.hidden if kept is kept_D else wide.intermediate)
                    theirs = theirs.index_select(axis, _repeated(kept, parts, size).to(theirs.device))
            ours.copy_(theirs)


def spread(n_layers: int, count: int) -> list[int]:
    """``count`` of ``n_layers`` layers, evenly spaced, first and last among them."""
    if count == 1:
        return [0]
    return [round(i * (n_layers - 1) / (count - 1)) for i in range(count)]


def _configs(*models: Any) -> list[Any]:
    return [model.get_decoder().config for model in models]


def _repeated(kept: Tensor, parts: int, size: int) -> Tensor:
    """Indices into an axis that holds ``parts`` blocks side by side (gate and up in one matrix)."""
    return torch.cat([kept + part * (size // parts) for part in range(parts)])


def _strongest(pairs: Iterable[tuple[Tensor, Tensor, int]], size: int, wanted: int) -> Tensor:
    """The ``wanted`` of ``size`` channels with the largest share of the squared weights, ascending."""
    score = torch.zeros(size, dtype=torch.float64)
    for theirs, ours, _ in pairs:
        for axis, (full, left) in enumerate(zip(theirs.shape, ours.shape, strict=True)):
            if full == left or full % size or full // size * wanted != left or theirs.ndim < 2:
                continue
            energy = theirs.detach().double().square()
            energy = energy.sum([other for other in range(energy.ndim) if other != axis]).cpu()
            score += energy.view(-1, size).sum(0) / energy.sum()
    return score.topk(wanted).indices.sort().values


def resized(config: Any, sizes: Mapping[str, Any], layers: list[int] | None) -> Any:
    """Return a copy of a transformers config with other sizes; ``layers`` says which layers' kinds are kept."""
    fields = {k: v for k, v in config.to_dict().items() if k not in ("quantization_config", "transformers_version")}
    count = sizes["num_hidden_layers"]
    if kinds := fields.get("layer_types"):
        fields["layer_types"] = [kinds[i] for i in layers] if layers else [kinds[i % len(kinds)] for i in range(count)]
    return type(config).from_dict({**fields, **sizes})
