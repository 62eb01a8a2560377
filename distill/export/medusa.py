"""Medusa heads as vLLM and as the original project store them. The biases of the blocks are kept in both."""

from dataclasses import replace
from typing import Any

from distill.errors import UserError
from distill.export.eagle import Lend
from distill.export.fields import check_family, token_fields, type_fields
from distill.export.layout import Foreign, Key, Native, to_theirs

_BLOCK = ("heads", "blocks")
VLLM = (
    Key("heads.{i}.{j}.linear.weight", "blocks.{i}.layers.{j}.weight", ("D", "D"), _BLOCK),
    Key("heads.{i}.{j}.linear.bias", "blocks.{i}.layers.{j}.bias", ("D",), _BLOCK),
    Key("lm_heads.{i}.weight", "lm_heads.{i}.weight", ("V", "D"), ("heads",), when="own"),
)


def original_table(blocks: int) -> tuple[Key, ...]:
    """The original project numbers a head's blocks and, behind the last one, its output."""
    return (
        Key("heads.{i}.{j}.linear.weight", "{i}.{j}.linear.weight", ("D", "D"), _BLOCK),
        Key("heads.{i}.{j}.linear.bias", "{i}.{j}.linear.bias", ("D",), _BLOCK),
        Key("lm_heads.{i}.weight", f"{{i}}.{blocks}.weight", ("V", "D"), ("heads",), when="own"),
    )


def _checked(native: Native, format_name: str) -> Native:
    """Refuse what no engine can hold; adds the flag that the tables ask for."""
    check_family(native, format_name)
    flags = native.flags
    if flags["lora_rank"]:
        raise UserError(
            f"format={format_name} must be for heads on the target as it is, got Medusa-2 (drafter.lora_rank="
            f"{flags['lora_rank']}), whose target is an adapted one; format=native holds both"
        )
    if flags["head"] == "pruned":
        raise UserError(
            f"format={format_name} must have drafter.head=shared or own for medusa, got pruned: there is no place "
            "for a shorter vocabulary; train with another head, or use format=native"
        )
    return replace(native, flags={**flags, "own": flags["head"] == "own"})


def medusa_vllm(native: Native, lend: Lend) -> Foreign:
    """VLLM's layout; a shared head is written once, as the target has it.

    No further field may have "num" and "heads", or "num" and "layers", in its name: vLLM renames all of those.
    """
    native = _checked(native, "vllm")
    flags, sizes = native.flags, native.sizes()
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": sizes["D"],
        "vocab_size": sizes["V"],
        "num_heads": flags["heads"],
        "num_hidden_layers": flags["blocks"],
        "max_paths": 64,
        "topk": 10,
        "truncated_vocab_size": sizes["V"],
        "medusa_fc_bias": True,
        "original_lm_head": not flags["own"],
        "max_position_embeddings": native.target["max_positions"],
        **type_fields(native),
        **token_fields(native.target),
    }
    tensors = to_theirs(VLLM, native)
    if not flags["own"]:
        tensors["lm_heads.0.weight"] = lend("head").to(native.dtype)
    return Foreign(config=config, tensors=tensors)


def medusa_original(native: Native, lend: Lend) -> Foreign:
    """The original project's layout; without output heads it is its version 2, which takes the target's."""
    native = _checked(native, "medusa")
    flags, sizes = native.flags, native.sizes()
    config: dict[str, Any] = {
        "medusa_num_heads": flags["heads"],
        "medusa_num_layers": flags["blocks"],
        "base_model_name_or_path": native.target["name"],
        "hidden_size": sizes["D"],
        "vocab_size": sizes["V"],
        "medusa_fc_bias": True,
        **({} if flags["own"] else {"version": "2"}),
        **type_fields(native),
    }
    table = original_table(flags["blocks"])
    return Foreign(config=config, tensors=to_theirs(table, native), weights="medusa_lm_head.safetensors")
