"""Fields of ``config.json`` that every layout with a Llama block has, written from a native export and read back.

All of them are written, also those a loader has a default for: defaults differ between engines and between versions.
"""

from collections.abc import Mapping
from typing import Any

from distill.errors import UserError
from distill.export.layout import Native

PLAIN = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "olmo2", "smollm3")
"""Target families whose embeddings and logits are used as they are: engines share them with a drafter unscaled."""
SCALING = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


def llama_fields(native: Native, *, layers: int) -> dict[str, Any]:
    """Sizes, norms and rotary settings of a drafter that is made of Llama blocks."""
    target, sizes = native.target, native.sizes()
    return {
        "model_type": "llama",
        "hidden_size": sizes["D"],
        "intermediate_size": sizes["I"],
        "num_hidden_layers": layers,
        "num_attention_heads": target["n_heads"],
        "num_key_value_heads": target["n_kv_heads"],
        "head_dim": target["head_dim"],
        "hidden_act": "silu",
        "vocab_size": sizes["V"],
        "rms_norm_eps": target["rms_norm_eps"],
        "max_position_embeddings": target["max_positions"],
        **rope_fields(native.flags.get("rope") or target["rope_parameters"]),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        **type_fields(native),
        **token_fields(target),
    }


def type_fields(native: Native) -> dict[str, Any]:
    """The weights' type under both names transformers has used."""
    name = str(native.dtype).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}


def token_fields(target: Mapping[str, Any]) -> dict[str, Any]:
    """End of text, which ``generate`` and engines read."""
    eos = list(target["eos_ids"])
    return {"eos_token_id": eos[0] if len(eos) == 1 else eos or None}


def rope_fields(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings as transformers 5 names them, and as everything before it did.

    Raises:
        UserError: a kind of scaling that engines do not know.
    """
    kind = parameters.get("rope_type", "default")
    if kind not in SCALING:
        raise UserError(f"rotary scaling must be one of {', '.join(SCALING)} to be exported, got {kind!r}")
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    return {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if kind == "default" else scaling,
        "rope_parameters": {"rope_type": kind, **dict(parameters)},
    }


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings of a folder written by anybody: new names first, then the old ones."""
    if config.get("rope_parameters"):
        return {"rope_type": "default", **config["rope_parameters"]}
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    return {"rope_theta": float(config.get("rope_theta", 10000.0)), "rope_type": kind, **scaling}


def check_family(native: Native, format_name: str) -> None:
    """Refuse targets whose embeddings or logits are scaled: engines hand drafters the bare matrices.

    Raises:
        UserError: such a target.
    """
    family = native.target["model_type"]
    if family not in PLAIN:
        raise UserError(
            f"format={format_name} must be for a target of one of the families {', '.join(PLAIN)}, got {family}: "
            "engines would read its embeddings and logits unscaled; format=native keeps them"
        )


def check_fields(config: Mapping[str, Any], wanted: Mapping[str, Any], *, where: str) -> None:
    """Hold fields of a foreign ``config.json`` against what this target and our drafter can be.

    Raises:
        UserError: one is missing or another.
    """
    for name, value in wanted.items():
        if name not in config:
            raise UserError(f"{where} must have the field {name} ({value!r} for this target), got none")
        if config[name] != value:
            raise UserError(f"{where}: {name} must be {value!r} for this target, got {config[name]!r}")
