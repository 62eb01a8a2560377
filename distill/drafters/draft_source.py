"""Where a draft model comes from: cut out of the target, random weights, or a checkpoint with the same vocabulary."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from distill.config import first_line
from distill.drafters.cutting import cut, resized, spread
from distill.errors import UserError
from distill.target import Target
from distill.target.loading import TOKENIZER_FILES

_UNREADABLE = (OSError, ValueError, KeyError, ImportError, SafetensorError, StrictDataclassError)
"""What transformers raises about a folder that is not what it should be."""


def build_lm(config: Any, target: Target) -> Any:
    """The causal LM that a ``DraftModelConfig`` asks for, trainable, in fp32 (fp64 for a target in fp64).

    Raises:
        UserError: layers or sizes the target does not have, nothing to load, or another vocabulary.
    """
    if config.architecture is not None:  # a checkpoint of ours: its weights come afterwards
        return _random(_known_config(config.architecture, target), target)
    if config.source == "checkpoint":
        return _downloaded(config, target)
    info, own = target.info, target.config_hf
    layers = config.layers
    count = len(layers) if layers else config.n_layers or max(1, info.n_layers // 4)
    if config.source == "layers":
        layers = layers or _evenly(info.n_layers, count)
        if not all(0 <= i < info.n_layers for i in layers):
            raise UserError(f"drafter.layers must be between 0 and {info.n_layers - 1} for this target, got {layers}")
        for name in ("hidden_size", "intermediate_size"):
            if (getattr(config, name) or 1) > getattr(info, name):
                got = getattr(config, name)
                raise UserError(
                    f"drafter.{name} must be at most the target's {getattr(info, name)} with source=layers, got {got}"
                )
    sizes: dict[str, Any] = {
        "num_hidden_layers": count,
        "hidden_size": config.hidden_size or info.hidden_size,
        "intermediate_size": config.intermediate_size or info.intermediate_size,
        "num_attention_heads": config.n_heads or info.n_heads,
        "num_key_value_heads": config.n_kv_heads or (config.n_heads if config.n_heads else info.n_kv_heads),
        "head_dim": info.head_dim,
        "vocab_size": info.vocab_size,
        "tie_word_embeddings": bool(own.tie_word_embeddings) if config.tie is None else config.tie,
    }
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        raise UserError(
            f"drafter.n_kv_heads must divide the {sizes['num_attention_heads']} query heads, got "
            f"{sizes['num_key_value_heads']}; give drafter.n_heads as well"
        )
    try:
        shape = resized(own, sizes, layers if config.source == "layers" else None)
    except (StrictDataclassError, ValueError) as error:
        asked = {name: getattr(config, name) for name in ("hidden_size", "intermediate_size", "n_heads", "n_kv_heads")}
        given = ", ".join(f"drafter.{name}={value}" for name, value in asked.items() if value is not None)
        raise UserError(
            f"a draft model's sizes must make a {own.model_type} model, got {given}: {first_line(error)}"
        ) from error
    lm = _random(shape, target)
    if config.source == "layers":
        assert layers is not None
        cut(target.model, lm, layers)
    return lm


def _evenly(n_layers: int, count: int) -> list[int]:
    if count > n_layers:
        raise UserError(f"drafter.n_layers must be at most the target's {n_layers} with source=layers, got {count}")
    return spread(n_layers, count)


def _random(hf_config: Any, target: Target) -> Any:
    dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
    return AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation=_attention(hf_config))


def _attention(hf_config: Any) -> str:
    # sdpa has no place for soft-capping.
    return "eager" if getattr(hf_config, "attn_logit_softcapping", None) else "sdpa"


def _known_config(fields: dict[str, Any], target: Target) -> Any:
    own = target.config_hf
    try:
        if fields.get("model_type") == own.model_type:
            return type(own).from_dict(dict(fields))
        return AutoConfig.for_model(**fields)
    except (TypeError, ValueError, KeyError, StrictDataclassError) as error:
        raise UserError(
            f"drafter.architecture must be a transformers config with its model_type, got {fields}: "
            f"{first_line(error)}; leave it null, or export the run again"
        ) from error


def _downloaded(config: Any, target: Target) -> Any:
    path: str = config.path
    folder = Path(path)
    if not path.strip() or (path.startswith(("/", ".", "~")) and not folder.is_dir()):
        raise UserError(f"drafter.path must be a local folder or a hub name, got {path!r}, which is no folder")
    try:
        hf_config = AutoConfig.from_pretrained(path)
        options = {} if config.tie is None else {"tie_word_embeddings": config.tie}
        dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=True,
            attn_implementation=_attention(hf_config),
            output_loading_info=True,
            **options,
        )
        # Without a tokenizer of its own, sizes are all there is to compare (transformers would make one up).
        own = not folder.is_dir() or any((folder / name).is_file() for name in TOKENIZER_FILES)
        tokenizer = AutoTokenizer.from_pretrained(path) if target.tokenizer is not None and own else None
    except (*_UNREADABLE, RuntimeError) as error:
        raise UserError(
            f"drafter.path must be a local folder or the hub name of a causal LM, got {path!r}: {first_line(error)}"
        ) from error
    lm, report = loaded
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise UserError(f"drafter.path must hold every weight of its model, got {path} without {missing}")
    if lm.config.tie_word_embeddings and lm.get_output_embeddings().weight is not lm.get_input_embeddings().weight:
        raise UserError(f"drafter.tie must be null or false for {path}, whose head is not its embedding, got true")
    if tokenizer is not None:
        _same_ids(tokenizer, target.tokenizer, path=path)
    return lm


def _same_ids(ours: Any, theirs: Any, *, path: str) -> None:
    """Refuse another vocabulary: the draft's ids are read by the target as they are."""
    tokens, wanted = ({i: t for t, i in words.get_vocab().items()} for words in (ours, theirs))
    wrong = [i for i in range(max(*tokens, *wanted) + 1) if tokens.get(i) != wanted.get(i)]
    if wrong:
        shown = ", ".join(f"{i} ({tokens.get(i)!r} instead of {wanted.get(i)!r})" for i in wrong[:3])
        raise UserError(
            f"the draft model {path} must have the target's vocabulary, got {len(tokens)} tokens instead of "
            f"{len(wanted)}, {len(wrong)} ids of which differ, the first: {shown}; choose a checkpoint with the same "
            "tokenizer"
        )
