"""EAGLE-3 and EAGLE-1 as engines store them: the reference's names, with one dialect per engine.

Layer ids: our tap k is the hidden state that enters layer k. vLLM, llama.cpp and speculators count the same way; SGLang
and OpenVINO name the layer whose output it is, k - 1. Their folders cannot tell, so the engine has to be named.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distill.errors import UserError
from distill.export.fields import check_family, llama_fields
from distill.export.layout import Foreign, Key, Native, to_theirs

Lend = Callable[[str], Tensor]
"""``embed`` or ``head`` -> the target's own matrix [V, D]; loads the target."""


def decoder_table(ours: str, theirs: str, width: str, over: tuple[str, ...] = ()) -> tuple[Key, ...]:
    """Rows of a Llama block whose attention reads ``width``."""
    rows = (
        ("self_attn.q_proj.weight", ("A", width)),
        ("self_attn.k_proj.weight", ("K", width)),
        ("self_attn.v_proj.weight", ("K", width)),
        ("self_attn.o_proj.weight", ("D", "A")),
        ("mlp.gate_proj.weight", ("I", "D")),
        ("mlp.up_proj.weight", ("I", "D")),
        ("mlp.down_proj.weight", ("D", "I")),
        ("post_attention_layernorm.weight", ("D",)),
    )
    return tuple(Key(f"{ours}.{name}", f"{theirs}.{name}", shape, over) for name, shape in rows)


def eagle3_table(layer: str) -> tuple[Key, ...]:
    """EAGLE-3 with its block under the name ``layer``."""
    return (
        Key("fc.weight", "fc.weight", ("D", "T*D")),
        Key("fc_norm.{i}.weight", "fc_norm.{i}.weight", ("D",), ("T",), when="fc_norm"),
        Key("layers.0.input_layernorm.weight", f"{layer}.input_layernorm.weight", ("D",)),
        Key("layers.0.hidden_norm.weight", f"{layer}.hidden_norm.weight", ("D",)),
        *decoder_table("layers.0", layer, "2*D"),
        Key("norm.weight", "norm.weight", ("D",)),
        Key("lm_head.weight", "lm_head.weight", ("W", "D")),
        Key("d2t", "d2t", ("W",), dtype=torch.int64),
        Key("t2d", "t2d", ("V",), dtype=torch.bool),
    )


RAW = eagle3_table("midlayer")
SPECULATORS = eagle3_table("layers.0")
EAGLE1 = (
    Key("fc.weight", "fc.weight", ("D", "2*D")),
    Key("fc.bias", "fc.bias", ("D",), when="fc_bias"),
    *decoder_table("layers.{i}", "layers.{i}", "D", ("layers",)),
)
"""Layers behind the first have an input norm; ``eagle1_table`` adds it."""


def eagle1_table(layers: int) -> tuple[Key, ...]:
    """EAGLE-1 with this many layers, of which the first has no input norm."""
    later = (f"layers.{i}.input_layernorm.weight" for i in range(1, layers))
    return (*EAGLE1, *(Key(name, name, ("D",)) for name in later))


def aux_ids(native: Native, *, format_name: str, shift: int = 0) -> list[int]:
    """Layer ids as the engine counts them.

    Args:
        native: the export.
        format_name: for the message.
        shift: what the engine's number is away from our tap.

    Raises:
        UserError: a tap that the engine has no number for.
    """
    ids, n_layers = [tap + shift for tap in native.taps], native.target["n_layers"]
    if min(ids) < 0 or max(native.taps) >= n_layers:
        raise UserError(
            f"format={format_name} must have taps between {-min(shift, 0)} and {n_layers - 1}, got "
            f"{list(native.taps)}; train with other drafter.taps"
        )
    return ids


def eagle3_fields(native: Native, ids: Sequence[int]) -> dict[str, Any]:
    """``config.json`` of the raw layout."""
    flags = native.flags
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama_fields(native, layers=1),
        "draft_vocab_size": native.sizes()["W"],
        "norm_before_residual": flags["norm_before_residual"],
        "norm_before_fc": False,
        "fc_norm": flags["fc_norm"],
        "norm_output": flags["norm_output"],
        "num_aux_hidden_states": len(ids),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids), "use_aux_hidden_state": True},
    }


def eagle3_vllm(native: Native, lend: Lend) -> Foreign:
    """Raw layout as vLLM reads it: the target's embedding is shared, layer ids are our taps."""
    check_family(native, "vllm")
    ids = aux_ids(native, format_name="vllm")
    return Foreign(config=eagle3_fields(native, ids), tensors=to_theirs(RAW, native))


def eagle3_sglang(native: Native, lend: Lend) -> Foreign:
    """Raw layout as SGLang reads it: layer ids one lower, none of the later flags."""
    check_family(native, "sglang")
    for flag in ("norm_before_residual", "fc_norm", "norm_output"):
        if native.flags[flag]:
            raise UserError(
                f"format=sglang must have drafter.{flag}=false, which SGLang does not read, got true; use format=vllm"
            )
    ids = aux_ids(native, format_name="sglang", shift=-1)
    return Foreign(config=eagle3_fields(native, ids), tensors=to_theirs(RAW, native))


def eagle3_openvino(native: Native, lend: Lend) -> Foreign:
    """Raw layout for OpenVINO's converter, which ignores the ids here; the list it needs afterwards stands beside."""
    check_family(native, "openvino")
    for flag in ("norm_before_residual", "fc_norm", "norm_output"):
        if native.flags[flag]:
            raise UserError(f"format=openvino must have drafter.{flag}=false, which its converter drops, got true")
    ids = aux_ids(native, format_name="openvino", shift=-1)
    config = eagle3_fields(native, native.taps)
    runtime = {"hidden_layers_list": " ".join(str(i) for i in ids)}
    return Foreign(config=config, tensors=to_theirs(RAW, native), extra={"openvino_rt_info.json": runtime})


def eagle3_speculators(native: Native, lend: Lend) -> Foreign:
    """Layout of the speculators library, with the target's embedding beside the weights."""
    check_family(native, "speculators")
    ids, fields = aux_ids(native, format_name="speculators"), llama_fields(native, layers=1)
    tokens = 3
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": native.sizes()["W"],
        "target_hidden_size": None,
        "norm_before_residual": native.flags["norm_before_residual"],
        "norm_before_fc": False,
        "fc_norm": native.flags["fc_norm"],
        "norm_output": native.flags["norm_output"],
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": ids,
        "has_no_defaults_at_init": False,
        "tie_word_embeddings": False,
        "dtype": fields["dtype"],
        "torch_dtype": fields["torch_dtype"],
        "transformer_layer_config": fields,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": native.target["name"], "architectures": [_architecture(native.target)]},
        },
    }
    tensors = to_theirs(SPECULATORS, native) | {"embed_tokens.weight": lend("embed").to(native.dtype)}
    return Foreign(config=config, tensors=tensors)


_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def _architecture(target: Mapping[str, Any]) -> str:
    return _CLASSES[target["model_type"]]


def eagle1_vllm(native: Native, lend: Lend) -> Foreign:
    """EAGLE-1 for vLLM, which has no place for the bias of ``fc``."""
    check_family(native, "vllm")
    if native.flags["fc_bias"]:
        raise UserError(
            "format=vllm must have drafter.fc_bias=false for eagle1, since vLLM drops the bias, got true; use "
            "format=sglang, or train without it"
        )
    layers = native.flags["num_layers"]
    config = {"architectures": ["LlamaForCausalLM"], **llama_fields(native, layers=layers), "bias": False}
    return Foreign(config=config, tensors=to_theirs(eagle1_table(layers), native))


def eagle1_sglang(native: Native, lend: Lend) -> Foreign:
    """EAGLE-1 for SGLang, whose ``fc`` has a bias in any case: zeros where ours has none."""
    check_family(native, "sglang")
    layers = native.flags["num_layers"]
    config = {"architectures": ["LlamaForCausalLMEagle"], **llama_fields(native, layers=layers), "bias": True}
    tensors = to_theirs(eagle1_table(layers), native)
    if not native.flags["fc_bias"]:
        tensors["fc.bias"] = torch.zeros(native.sizes()["D"], dtype=native.dtype)
    return Foreign(config=config, tensors=tensors)
