"""From another program's folder to a drafter of ours: public EAGLE-1, EAGLE-3, Medusa heads and draft models.

Everything a folder leaves open is decided here, aloud: the flag whose default differs between engines, the layer ids
that two engines count differently, an embedding that is not the target's.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from distill.config import build
from distill.drafters.base import Drafter
from distill.errors import UserError
from distill.export.eagle import RAW, SPECULATORS, eagle1_table
from distill.export.fields import check_fields, rope_of
from distill.export.layout import sizes_of, to_ours
from distill.export.medusa import VLLM, original_table
from distill.export.recognise import Folder, load_tensors, recognise
from distill.registry import drafter_class
from distill.target import Target
from distill.vocab import DraftVocab

LayerIds = Literal["auto", "entering", "output"]


def adopt(path: str | Path, target: Target, *, layer_ids: LayerIds = "auto") -> tuple[Drafter, list[str]]:
    """Make a drafter of ours from a folder in another layout.

    Args:
        path: the folder; safetensors, or a pickle of nothing but tensors.
        target: what it was trained for; sizes must agree.
        layer_ids: how the folder counts layers (``eagle.py``): ``entering`` (vLLM, speculators), ``output`` (SGLang),
            or auto, where the folder's layout or its numbers tell.

    Returns:
        The drafter, and what had to be decided, in sentences.

    Raises:
        UserError: unknown, damaged, for another target, or with parts our drafter does not have.
    """
    folder = recognise(path)
    readers = {
        "raw": _eagle3,
        "speculators": _eagle3,
        "eagle1": _eagle1,
        "medusa_vllm": _medusa,
        "medusa_original": _medusa,
        "causal_lm": _causal_lm,
    }
    if folder.layout not in readers:
        hint = {"native": "load it as it is", "gguf": "adopt the folder it was made from"}[folder.layout]
        raise UserError(f"{path} must be a folder of another program, got a {folder.layout} one; {hint}")
    notes: list[str] = []
    drafter = readers[folder.layout](folder, target, layer_ids, notes)
    return drafter.to(target.device).eval(), notes


# -- EAGLE


def _eagle3(folder: Folder, target: Target, layer_ids: LayerIds, notes: list[str]) -> Drafter:
    config, info = folder.config, target.info
    where = str(folder.path / "config.json")
    nested = config.get("transformer_layer_config")
    layer: dict[str, Any] = {**config, **nested} if isinstance(nested, dict) else config
    _same_block(layer, target, where=where)
    tensors = load_tensors(folder)
    for name in ("input_norm.weight", "fc.bias", "mask_hidden"):
        if name in tensors:
            raise UserError(f"{folder.path} must be an EAGLE-3 of one fused feature, got one with {name}")
    if config.get("norm_before_fc"):
        raise UserError(f"{where}: norm_before_fc must be false, got true; drafters here have no norm there")
    _no_embedding(tensors, target, folder)
    by_speculators = folder.layout == "speculators" and "speculators_model_type" in config
    size = tensors["d2t"].numel() if "d2t" in tensors else info.vocab_size
    flags: dict[str, Any] = {
        "draft_vocab_size": size,
        "taps": _taps(folder, target, layer_ids, notes),
        "intermediate_size": _differs(layer.get("intermediate_size"), info.intermediate_size),
        "norm_before_residual": _flag(config, "norm_before_residual", by_speculators, where, notes),
        "fc_norm": _flag(config, "fc_norm", False, where),
        "norm_output": _flag(config, "norm_output", False, where),
        "head_init": "random",
        "rope": _differs(rope_of(layer), {"rope_type": "default", **info.rope_parameters}),
    }
    vocab, rows = _vocabulary(tensors, info.vocab_size, folder)
    if "lm_head.weight" not in tensors:
        if size != info.vocab_size:
            raise UserError(f"{folder.path} must hold lm_head.weight for its {size} draft tokens, got none")
        notes.append("no head of its own: the target's was copied")
        tensors["lm_head.weight"] = target.head_rows(torch.arange(info.vocab_size, device=target.device)).cpu()
    tensors["lm_head.weight"] = tensors["lm_head.weight"][rows] if rows is not None else tensors["lm_head.weight"]
    tensors |= {"d2t": vocab.d2t, "t2d": vocab.t2d}
    cls: Any = drafter_class("eagle3")
    made = build(cls.Config, {"name": "eagle3", **flags}, path="config")
    sizes = sizes_of(vars(info), flags, taps=len(cls.taps(made, info)))
    ours = to_ours(_eagle3_names(tensors), sizes, flags, tensors, where=str(folder.path))
    return _filled(cls(made, target, vocab), {f"vocab.{k}" if k in ("d2t", "t2d") else k: v for k, v in ours.items()})


def _eagle3_names(tensors: Mapping[str, Tensor]) -> Any:
    return RAW if "midlayer.self_attn.q_proj.weight" in tensors else SPECULATORS


def _eagle1(folder: Folder, target: Target, layer_ids: LayerIds, notes: list[str]) -> Drafter:
    config, info, tensors = folder.config, target.info, load_tensors(folder)
    config = {**config, **config["model"]} if isinstance(config.get("model"), dict) else config  # vLLM's nested form
    where = str(folder.path / "config.json")
    _same_block(config, target, where=where)
    _no_embedding(tensors, target, folder)
    bias = tensors.get("fc.bias")
    if bias is not None and not bool(bias.any()):
        del tensors["fc.bias"]  # SGLang's layout has one in any case
        bias = None
    if "layers.0.input_layernorm.weight" in tensors:
        raise UserError(f"{folder.path} must be an EAGLE-1 whose first layer has no input norm, got one with it")
    layers = int(config.get("num_hidden_layers", 1))
    flags: dict[str, Any] = {
        "num_layers": layers,
        "fc_bias": bias is not None,
        "intermediate_size": _differs(config.get("intermediate_size"), info.intermediate_size),
        "rope": _differs(rope_of(config), {"rope_type": "default", **info.rope_parameters}),
    }
    cls: Any = drafter_class("eagle1")
    made = build(cls.Config, {"name": "eagle1", **flags}, path="config")
    sizes = sizes_of(vars(info), flags)
    return _filled(cls(made, target), to_ours(eagle1_table(layers), sizes, flags, tensors, where=str(folder.path)))


def _same_block(config: Mapping[str, Any], target: Target, *, where: str) -> None:
    """Heads, width and norms must be the target's: our blocks take them from there."""
    info = target.info
    check_fields(
        config,
        {
            "hidden_size": info.hidden_size,
            "num_attention_heads": info.n_heads,
            "num_key_value_heads": info.n_kv_heads,
            "vocab_size": info.vocab_size,
            "rms_norm_eps": info.rms_norm_eps,
        },
        where=where,
    )
    if config.get("head_dim") not in (None, info.head_dim):
        raise UserError(f"{where}: head_dim must be {info.head_dim} for this target, got {config['head_dim']}")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise UserError(f"{where}: {name} must be false, got true; blocks here have no such bias")
    if config.get("target_hidden_size") not in (None, info.hidden_size):
        raise UserError(
            f"{where}: target_hidden_size must be {info.hidden_size} for this target, got "
            f"{config['target_hidden_size']}"
        )


def _no_embedding(tensors: dict[str, Tensor], target: Target, folder: Folder) -> None:
    """An embedding that repeats the target's is dropped; another one has no place."""
    own = tensors.pop("embed_tokens.weight", None)
    if own is None:
        return
    ids = torch.arange(target.info.vocab_size, device=target.device)
    theirs = target.embed(ids[None])[0].to("cpu", torch.float32)
    # Half-precision files round what a full-precision target has.
    if own.shape != theirs.shape or not torch.allclose(own.float(), theirs, rtol=2**-7, atol=1e-6):
        raise UserError(
            f"{folder.path} must read the target's embedding, got one of its own; drafters here share the target's, so "
            "check that this is the target it was trained for"
        )


def _taps(folder: Folder, target: Target, layer_ids: LayerIds, notes: list[str]) -> list[int] | None:
    nested = folder.config.get("eagle_config")
    found = folder.config.get("eagle_aux_hidden_state_layer_ids")
    if found is None and isinstance(nested, dict):
        found = nested.get("eagle_aux_hidden_state_layer_ids")
    if found is None:
        n = target.info.n_layers
        notes.append(f"no layer ids: the usual ones, entering layers 2, {n // 2} and {n - 3}")
        return None
    n = target.info.n_layers
    usual = [2, n // 2, n - 3]
    if layer_ids == "auto":
        if folder.layout == "speculators" and "speculators_model_type" in folder.config or list(found) == usual:
            layer_ids = "entering"
        elif [i + 1 for i in found] == usual:
            layer_ids = "output"
        else:
            raise UserError(
                f"layer_ids must be entering (vLLM) or output (SGLang) for {folder.path}, whose ids {list(found)} fit "
                "both; ask who trained it"
            )
        notes.append(f"layer ids {list(found)} read as {layer_ids}")
    return [int(i) + (layer_ids == "output") for i in found]


def _flag(config: Mapping[str, Any], name: str, default: bool, where: str, notes: list[str] | None = None) -> bool:
    value = config.get(name)
    if value is None:
        if notes is not None:
            notes.append(f"no {name}: {str(default).lower()}, as this layout's readers take it")
        return default
    if not isinstance(value, bool):
        raise UserError(f"{where}: {name} must be true or false, got {value!r}")
    return value


def _vocabulary(tensors: dict[str, Tensor], size: int, folder: Folder) -> tuple[DraftVocab, Tensor | None]:
    """The draft vocabulary, and the order of the head's rows where it is not ascending."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        return DraftVocab(torch.arange(size), size), None
    ids = d2t.long() + torch.arange(len(d2t))
    if int(ids.min()) < 0 or int(ids.max()) >= size or len(ids.unique()) != len(ids):
        as_ids = d2t.long()
        absolute = int(as_ids.min()) >= 0 and int(as_ids.max()) < size and len(as_ids.unique()) == len(as_ids)
        got = "target ids themselves" if absolute else "numbers that name a token twice or none"
        raise UserError(f"{folder.path}: d2t must hold offsets (target id minus draft id), got {got}")
    if t2d is not None and (t2d.numel() != size or not torch.equal(t2d.bool().nonzero().flatten(), ids.sort().values)):
        raise UserError(f"{folder.path}: d2t and t2d must name the same tokens, got maps of two different vocabularies")
    order = ids.argsort()
    ascending = torch.equal(order, torch.arange(len(ids)))
    return DraftVocab(ids[order], size), None if ascending else order


# -- Medusa


def _medusa(folder: Folder, target: Target, layer_ids: LayerIds, notes: list[str]) -> Drafter:
    info, config = target.info, folder.config
    tensors = {_bare(name): tensor for name, tensor in load_tensors(folder).items()}
    if "token_map" in tensors:
        raise UserError(f"{folder.path} must have the target's whole vocabulary, got a truncated one (token_map)")
    vllm = folder.layout == "medusa_vllm"
    numbers = [name.split(".") for name in tensors]
    heads = 1 + max(int(p[1] if vllm else p[0]) for p in numbers if (p[0] == "blocks") == vllm and p[0] != "lm_heads")
    blocks = 1 + max(int(p[3 if vllm else 1]) for p in numbers if "linear" in p or p[0] == "blocks")
    shared = "lm_heads.1.weight" not in tensors and heads > 1 and bool(config.get("original_lm_head"))
    own = not shared and (f"lm_heads.{heads - 1}.weight" if vllm else f"{heads - 1}.{blocks}.weight") in tensors
    if vllm and shared:
        _same_head(tensors.pop("lm_heads.0.weight", None), target, folder)
    flags: dict[str, Any] = {"heads": heads, "blocks": blocks, "head": "own" if own else "shared"}
    table = VLLM if vllm else original_table(blocks)
    _add_biases(tensors, table, heads, blocks, config, notes)
    sizes = sizes_of(vars(info), flags)
    ours = to_ours(table, sizes, {**flags, "own": own}, tensors, where=str(folder.path))
    cls: Any = drafter_class("medusa")
    return _filled(cls(build(cls.Config, {"name": "medusa", **flags}, path="config"), target), ours)


def _bare(name: str) -> str:
    for prefix in ("medusa_heads.", "medusa_head."):
        name = name.removeprefix(prefix)
    return name


def _add_biases(
    tensors: dict[str, Tensor], table: Any, heads: int, blocks: int, config: Mapping[str, Any], notes: list[str]
) -> None:
    """Blocks without biases are blocks with biases of zero."""
    row = next(row for row in table if row.theirs.endswith(".bias"))
    missing = [
        name
        for name in (row.theirs.format(i=i, j=j) for i in range(heads) for j in range(blocks))
        if name not in tensors
    ]
    for name in missing:
        weight = tensors.get(name.removesuffix("bias") + "weight")
        if weight is not None:
            tensors[name] = weight.new_zeros(len(weight))
    if missing:
        notes.append("blocks without biases: zeros")
    elif config.get("medusa_fc_bias") is False:
        notes.append("medusa_fc_bias is false, so vLLM drops the biases that are in the file; they are read here")


def _same_head(head: Tensor | None, target: Target, folder: Folder) -> None:
    ids = torch.arange(target.info.vocab_size, device=target.device)
    theirs = target.head_rows(ids).to("cpu", torch.float32)
    if head is not None and (
        head.shape != theirs.shape or not torch.allclose(head.float(), theirs, rtol=2**-7, atol=1e-6)
    ):
        raise UserError(
            f"{folder.path}: the shared head must be the target's own, got another; check that this is its target"
        )


# -- draft models


def _causal_lm(folder: Folder, target: Target, layer_ids: LayerIds, notes: list[str]) -> Drafter:
    cls: Any = drafter_class("draft_model")
    config = build(cls.Config, {"name": "draft_model", "source": "checkpoint", "path": str(folder.path)}, path="config")
    drafter: Drafter = cls(config, target)
    drafter.config = replace(config, source="config", path=None)
    return drafter


# -- helpers


def _filled(drafter: Drafter, tensors: Mapping[str, Tensor]) -> Drafter:
    """Load weights in the type they have."""
    drafter.to(next(x.dtype for x in tensors.values() if x.is_floating_point()))
    drafter.load_state_dict(dict(tensors), strict=True)
    return drafter


def _differs(value: Any, usual: Any) -> Any:
    """A setting that has to be written down, or None where it is the target's."""
    return None if value is None or value == usual else value
