"""Layouts of engines: names and shapes against lists written by hand for real sizes, flags, refusals, commands."""

import json

import pytest
import torch

from distill.errors import UserError
from distill.export.convert import FORMATS, format_of, names
from distill.export.eagle import (
    eagle1_sglang,
    eagle1_vllm,
    eagle3_openvino,
    eagle3_sglang,
    eagle3_speculators,
    eagle3_vllm,
)
from distill.export.fields import rope_fields, rope_of
from distill.export.layout import Native
from distill.export.medusa import medusa_original, medusa_vllm

SIZES = {
    "8B": {"D": 4096, "A": 4096, "K": 1024, "I": 14336, "layers": 32, "heads": 32, "kv": 8},
    "70B": {"D": 8192, "A": 8192, "K": 1024, "I": 28672, "layers": 80, "heads": 64, "kv": 8},
}
V, W = 128256, 32000
LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

EAGLE3_8B = {
    "fc.weight": [4096, 12288],
    "midlayer.input_layernorm.weight": [4096],
    "midlayer.hidden_norm.weight": [4096],
    "midlayer.self_attn.q_proj.weight": [4096, 8192],
    "midlayer.self_attn.k_proj.weight": [1024, 8192],
    "midlayer.self_attn.v_proj.weight": [1024, 8192],
    "midlayer.self_attn.o_proj.weight": [4096, 4096],
    "midlayer.post_attention_layernorm.weight": [4096],
    "midlayer.mlp.gate_proj.weight": [14336, 4096],
    "midlayer.mlp.up_proj.weight": [14336, 4096],
    "midlayer.mlp.down_proj.weight": [4096, 14336],
    "norm.weight": [4096],
    "lm_head.weight": [32000, 4096],
    "d2t": [32000],
    "t2d": [128256],
}
EAGLE3_70B = {
    "fc.weight": [8192, 24576],
    "midlayer.input_layernorm.weight": [8192],
    "midlayer.hidden_norm.weight": [8192],
    "midlayer.self_attn.q_proj.weight": [8192, 16384],
    "midlayer.self_attn.k_proj.weight": [1024, 16384],
    "midlayer.self_attn.v_proj.weight": [1024, 16384],
    "midlayer.self_attn.o_proj.weight": [8192, 8192],
    "midlayer.post_attention_layernorm.weight": [8192],
    "midlayer.mlp.gate_proj.weight": [28672, 8192],
    "midlayer.mlp.up_proj.weight": [28672, 8192],
    "midlayer.mlp.down_proj.weight": [8192, 28672],
    "norm.weight": [8192],
    "lm_head.weight": [32000, 8192],
    "d2t": [32000],
    "t2d": [128256],
}
EAGLE1_8B = {
    "fc.weight": [4096, 8192],
    "layers.0.self_attn.q_proj.weight": [4096, 4096],
    "layers.0.self_attn.k_proj.weight": [1024, 4096],
    "layers.0.self_attn.v_proj.weight": [1024, 4096],
    "layers.0.self_attn.o_proj.weight": [4096, 4096],
    "layers.0.post_attention_layernorm.weight": [4096],
    "layers.0.mlp.gate_proj.weight": [14336, 4096],
    "layers.0.mlp.up_proj.weight": [14336, 4096],
    "layers.0.mlp.down_proj.weight": [4096, 14336],
}
MEDUSA_8B = {
    "blocks.0.layers.0.weight": [4096, 4096],
    "blocks.0.layers.0.bias": [4096],
    "blocks.1.layers.0.weight": [4096, 4096],
    "blocks.1.layers.0.bias": [4096],
    "lm_heads.0.weight": [128256, 4096],
}
ORIGINAL_8B = {
    "0.0.linear.weight": [4096, 4096],
    "0.0.linear.bias": [4096],
    "0.1.weight": [128256, 4096],
    "1.0.linear.weight": [4096, 4096],
    "1.0.linear.bias": [4096],
    "1.1.weight": [128256, 4096],
}


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def target_of(size: str) -> dict:
    s = SIZES[size]
    return {
        **{"name": f"llama-3.1-{size}", "model_type": "llama", "n_layers": s["layers"], "hidden_size": s["D"]},
        **{"vocab_size": V, "n_heads": s["heads"], "n_kv_heads": s["kv"], "head_dim": 128, "rms_norm_eps": 1e-5},
        **{"intermediate_size": s["I"], "rope_parameters": LLAMA3, "max_positions": 131072, "eos_ids": [128009]},
        **{"sliding_window": None},
    }


def block(prefix: str, s: dict, width: int) -> dict:
    return {
        f"{prefix}.self_attn.q_proj.weight": meta(s["A"], width),
        f"{prefix}.self_attn.k_proj.weight": meta(s["K"], width),
        f"{prefix}.self_attn.v_proj.weight": meta(s["K"], width),
        f"{prefix}.self_attn.o_proj.weight": meta(s["D"], s["A"]),
        f"{prefix}.mlp.gate_proj.weight": meta(s["I"], s["D"]),
        f"{prefix}.mlp.up_proj.weight": meta(s["I"], s["D"]),
        f"{prefix}.mlp.down_proj.weight": meta(s["D"], s["I"]),
        f"{prefix}.post_attention_layernorm.weight": meta(s["D"]),
    }


def eagle3(size="8B", **flags) -> Native:
    s = SIZES[size]
    flags = {"draft_vocab_size": W, "norm_before_residual": False, "fc_norm": False, "norm_output": False, **flags}
    tensors = {
        "fc.weight": meta(s["D"], 3 * s["D"]),
        "layers.0.input_layernorm.weight": meta(s["D"]),
        "layers.0.hidden_norm.weight": meta(s["D"]),
        **block("layers.0", s, 2 * s["D"]),
        "norm.weight": meta(s["D"]),
        "lm_head.weight": meta(W, s["D"]),
        "d2t": meta(W, dtype=torch.int64),
        "t2d": meta(V, dtype=torch.bool),
    }
    if flags["fc_norm"]:
        tensors |= {f"fc_norm.{i}.weight": meta(s["D"]) for i in range(3)}
    n = s["layers"]
    return Native(drafter="eagle3", flags=flags, target=target_of(size), taps=(2, n // 2, n - 3), tensors=tensors)


def eagle1(layers=1, fc_bias=False) -> Native:
    s = SIZES["8B"]
    tensors = {"fc.weight": meta(s["D"], 2 * s["D"])}
    for i in range(layers):
        tensors |= block(f"layers.{i}", s, s["D"])
        if i:
            tensors[f"layers.{i}.input_layernorm.weight"] = meta(s["D"])
    if fc_bias:
        tensors["fc.bias"] = meta(s["D"])
    flags = {"num_layers": layers, "fc_bias": fc_bias}
    return Native(drafter="eagle1", flags=flags, target=target_of("8B"), taps=(), tensors=tensors)


def medusa(head="shared", **flags) -> Native:
    d = 4096
    flags = {"heads": 2, "blocks": 1, "head": head, "lora_rank": 0, **flags}
    tensors = {f"heads.{i}.0.linear.weight": meta(d, d) for i in range(2)}
    tensors |= {f"heads.{i}.0.linear.bias": meta(d) for i in range(2)}
    if head == "own":
        tensors |= {f"lm_heads.{i}.weight": meta(V, d) for i in range(2)}
    return Native(drafter="medusa", flags=flags, target=target_of("8B"), taps=(), tensors=tensors)


def lend(name: str) -> torch.Tensor:
    return meta(V, 4096)


def shapes(foreign) -> dict:
    return {name: list(tensor.shape) for name, tensor in foreign.tensors.items()}


# ---------------------------------------------------------------------------------------------- names and shapes
@pytest.mark.parametrize("size,wanted", [("8B", EAGLE3_8B), ("70B", EAGLE3_70B)])
@pytest.mark.parametrize("write", [eagle3_vllm, eagle3_sglang, eagle3_openvino])
def test_eagle3_raw(write, size, wanted):
    foreign = write(eagle3(size), lend)
    assert shapes(foreign) == wanted
    assert foreign.config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert foreign.config["max_position_embeddings"] == 131072
    assert (foreign.config["rope_theta"], foreign.config["rope_scaling"]["rope_type"]) == (500000.0, "llama3")
    assert foreign.config["rope_parameters"] == LLAMA3


def test_eagle3_speculators():
    foreign = eagle3_speculators(eagle3(), lend)
    wanted = {name.replace("midlayer", "layers.0"): shape for name, shape in EAGLE3_8B.items()}
    assert shapes(foreign) == wanted | {"embed_tokens.weight": [128256, 4096]}
    assert foreign.config["eagle_aux_hidden_state_layer_ids"] == [2, 16, 29]
    assert foreign.config["transformer_layer_config"]["num_attention_heads"] == 32
    assert foreign.config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]


def test_layer_ids_are_counted_as_each_engine_counts():
    def ids(foreign):
        return foreign.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]

    assert ids(eagle3_vllm(eagle3(), lend)) == [2, 16, 29]
    assert ids(eagle3_sglang(eagle3(), lend)) == [1, 15, 28]
    assert eagle3_openvino(eagle3(), lend).extra["openvino_rt_info.json"] == {"hidden_layers_list": "1 15 28"}


@pytest.mark.parametrize("flag", ["norm_before_residual", "fc_norm", "norm_output"])
def test_later_flags_are_written_for_vllm_and_refused_elsewhere(flag):
    native = eagle3(**{flag: True})
    for write in (eagle3_vllm, eagle3_speculators):
        foreign = write(native, lend)
        assert [foreign.config[name] for name in ("norm_before_residual", "fc_norm", "norm_output")].count(True) == 1
        assert foreign.config[flag] is True
        assert ("fc_norm.2.weight" in foreign.tensors) == (flag == "fc_norm")
    for write, engine in ((eagle3_sglang, "sglang"), (eagle3_openvino, "openvino")):
        with pytest.raises(UserError, match=f"format={engine} must have drafter.{flag}=false"):
            write(native, lend)


def test_eagle1():
    foreign = eagle1_vllm(eagle1(), lend)
    assert shapes(foreign) == EAGLE1_8B
    assert foreign.config["architectures"] == ["LlamaForCausalLM"]
    foreign = eagle1_sglang(eagle1(), lend)
    assert foreign.config["architectures"] == ["LlamaForCausalLMEagle"]
    assert foreign.tensors["fc.bias"].shape == (4096,)
    assert not foreign.tensors["fc.bias"].any()
    assert "fc.bias" in eagle1_sglang(eagle1(fc_bias=True), lend).tensors
    with pytest.raises(UserError, match="fc_bias=false for eagle1, since vLLM drops the bias"):
        eagle1_vllm(eagle1(fc_bias=True), lend)
    two = shapes(eagle1_vllm(eagle1(layers=2), lend))
    assert set(two) - set(EAGLE1_8B) == {
        *(name.replace("layers.0", "layers.1") for name in EAGLE1_8B if name.startswith("layers.0")),
        "layers.1.input_layernorm.weight",
    }


def test_medusa():
    foreign = medusa_vllm(medusa(), lend)
    assert shapes(foreign) == MEDUSA_8B
    assert foreign.config["medusa_fc_bias"] is True
    assert foreign.config["original_lm_head"] is True
    renamed = [key for key in foreign.config if "num" in key and ("heads" in key or "layers" in key)]
    assert sorted(renamed) == ["num_heads", "num_hidden_layers"], "vLLM renames every such key"
    own = shapes(medusa_vllm(medusa("own"), lend))
    assert own == MEDUSA_8B | {"lm_heads.1.weight": [128256, 4096]}
    foreign = medusa_original(medusa("own"), lend)
    assert shapes(foreign) == ORIGINAL_8B
    assert "version" not in foreign.config
    foreign = medusa_original(medusa(), lend)
    assert shapes(foreign) == {name: shape for name, shape in ORIGINAL_8B.items() if "linear" in name}
    assert foreign.config["version"] == "2"


@pytest.mark.parametrize(
    "native,says",
    [
        (medusa("pruned"), "drafter.head=shared or own for medusa, got pruned"),
        (medusa(lora_rank=8), r"got Medusa-2 \(drafter.lora_rank=8\)"),
    ],
)
@pytest.mark.parametrize("write", [medusa_vllm, medusa_original])
def test_medusa_that_no_engine_holds(write, native, says):
    with pytest.raises(UserError, match=says):
        write(native, lend)


def test_scaled_embeddings_are_refused():
    native = eagle3()
    native.target["model_type"] = "gemma2"
    with pytest.raises(UserError, match="got gemma2: engines would read its embeddings and logits unscaled"):
        eagle3_vllm(native, lend)


def test_a_tap_that_an_engine_has_no_number_for():
    native = eagle3()
    for taps, write in (((0, 5, 9), eagle3_sglang), ((2, 16, 32), eagle3_vllm)):
        changed = Native(drafter="eagle3", flags=native.flags, target=native.target, taps=taps, tensors=native.tensors)
        with pytest.raises(UserError, match="must have taps between"):
            write(changed, lend)


@pytest.mark.parametrize(
    "spoil,says",
    [
        (lambda t: t.pop("norm.weight"), "got it without norm.weight"),
        (lambda t: t.update(extra=meta(1)), "got it with extra"),
        (lambda t: t.update({"norm.weight": meta(4095)}), r"norm.weight must have shape \[4096\].*got \[4095\]"),
        (lambda t: t.update(d2t=meta(W)), "d2t must be torch.int64, got torch.bfloat16"),
    ],
)
def test_what_is_not_in_the_table_is_not_written(spoil, says):
    native = eagle3()
    spoil(native.tensors)
    with pytest.raises(UserError, match=says):
        eagle3_vllm(native, lend)


# ------------------------------------------------------------------------------------------------------- fields
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_theta": 10000.0, "rope_type": "default"},
        LLAMA3,
        {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ],
)
def test_rotary_settings_read_the_same_by_old_and_new_names(parameters):
    fields = rope_fields(parameters)
    assert rope_of(fields) == parameters
    del fields["rope_parameters"]
    assert rope_of(fields) == parameters


def test_an_old_kind_of_scaling_name():
    assert rope_of({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}) == {
        "rope_theta": 1e4,
        "rope_type": "linear",
        "factor": 2.0,
    }


def test_unknown_formats_and_drafters_that_do_not_fit():
    with pytest.raises(UserError, match="format must be one of native, vllm, .*Did you mean 'vllm'"):
        format_of("vlm", "eagle3")
    with pytest.raises(
        UserError, match="format=speculators must be given for one of eagle3, got medusa; .*native, vllm"
    ):
        format_of("speculators", "medusa")
    with pytest.raises(UserError, match="got hydra; it can be written as native$"):
        format_of("vllm", "hydra")
    assert set(names()) == {"native", "gguf", *FORMATS}


def test_every_writer_has_its_command():
    for chosen in FORMATS.values():
        assert set(chosen.writers) == set(chosen.launch)
        for command in chosen.launch.values():
            line = command.format(target="T", folder="F", tokens=3, window=4)
            assert "{" not in line.replace('{"method"', "") or '"num_speculative_tokens": 3' in line
            if "speculative-config" in line:
                json.loads(line.split("'")[1])
