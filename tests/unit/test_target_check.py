"""What the start-up check refuses, each with one sentence, and what it lets through."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from distill.errors import UserError
from distill.target import check
from distill.target.check import verify
from distill.target.model import Target
from distill.target.tiny import tiny_target

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip


def target_of(config, **options) -> Target:
    return Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options), name=config.model_type)


def refused(target: Target) -> str:
    with pytest.raises(UserError) as error:
        verify(target)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(f"target {target.info.name}")
    return message


def test_learned_positions_are_refused():
    config = AutoConfig.for_model("gpt2", vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    assert "learned positions" in refused(target_of(config))


def test_a_model_that_takes_no_4d_mask_is_refused():
    config = AutoConfig.for_model("bloom", vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    config.max_position_embeddings = 64
    message = refused(target_of(config))
    assert "must take a 4-D attention mask" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_that_ignores_the_mask_is_refused(dtype, monkeypatch):
    target = tiny_target(dtype=dtype)
    backbone = target.model.get_decoder()
    forward = backbone.forward
    monkeypatch.setattr(backbone, "forward", lambda attention_mask=None, **rest: forward(**rest))
    assert "ignores the mask" in refused(target)


def test_a_model_that_ignores_positions_is_refused(monkeypatch):
    target = tiny_target()
    backbone = target.model.get_decoder()
    forward = backbone.forward
    monkeypatch.setattr(backbone, "forward", lambda position_ids=None, **rest: forward(**rest))
    assert "ignores the mask or the positions" in refused(target)


def test_a_window_the_model_does_not_use_is_refused():
    # Llama has no window; a config that names one would make our masks narrower than the model's.
    target = target_of(LlamaConfig(**SIZES, sliding_window=4096))
    assert "different ones" in refused(target)
    assert target.config_hf.sliding_window == 4096


@pytest.mark.parametrize("window", [8, 4096])
def test_windows_of_any_length_are_checked_and_restored(window, monkeypatch):
    target = tiny_target("mistral", sliding_window=window)
    verify(target)
    assert target.config_hf.sliding_window == window
    packed_mask = check.packed_mask
    monkeypatch.setattr(check, "packed_mask", lambda doc, positions, window: packed_mask(doc, positions, window=99))
    assert "different ones" in refused(target)
    assert target.config_hf.sliding_window == window


def test_an_unknown_change_of_the_logits_is_refused(monkeypatch):
    target = tiny_target()
    forward = target.model.forward

    def rescaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.05
        return output

    monkeypatch.setattr(target.model, "forward", rescaled)
    assert "different ones" in refused(target)


def test_a_lost_soft_cap_is_refused():
    target = tiny_target("gemma2")
    verify(target)
    target.logits = target._head  # the bare head
    assert "soft-capping" in refused(target)


@pytest.mark.parametrize(
    "family, kind",
    [("mamba", "linear_attention"), ("llama4_text", "chunked_attention"), ("qwen3_next", "linear_attention")],
)
def test_unsupported_layers_are_named(family, kind):
    config = AutoConfig.for_model(family, **SIZES, num_local_experts=2, num_experts=2, num_experts_per_tok=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=f"must be full or sliding-window attention, got {kind}"):
        Target(model, name=family)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_mixtures_of_experts_pass(family):
    moe = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    verify(target_of(AutoConfig.for_model(family, **{**SIZES, **moe}, head_dim=8)))


def test_an_attention_we_cannot_mask_is_refused():
    target = tiny_target()
    target.model.config._attn_implementation = "flex_attention"
    with pytest.raises(UserError, match="must be sdpa or eager, got flex_attention"):
        Target(target.model, name="flex")
