import pytest
import torch
from oracles import pack, random_documents

from distill.attention import packed_mask
from distill.errors import UserError
from distill.target.tiny import FAMILIES, tiny_target, tiny_tokenizer

IDS_BL = torch.tensor([[5, 9, 33, 2, 17, 40]])


def test_the_model_is_frozen_and_in_evaluation_mode():
    target = tiny_target()
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.model.training
    assert not target.forward(IDS_BL).last_BLD.requires_grad
    assert not target.embed(IDS_BL).requires_grad


def test_head_rows_are_rows_of_the_head_and_a_copy():
    target = tiny_target()
    rows = target.head_rows(torch.tensor([7, 3]))
    weight = target.model.lm_head.weight
    assert torch.equal(rows, weight[[7, 3]])
    rows.zero_()
    assert weight[7].abs().sum() > 0


def test_logits_differentiate_with_respect_to_hidden_only():
    target = tiny_target("gemma2")
    hidden = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
    target.model.double()
    target.dtype = torch.float64
    assert torch.autograd.gradcheck(target.logits, hidden)
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_hidden_of_another_dtype_is_accepted_by_the_head():
    target = tiny_target(dtype=torch.bfloat16)
    assert target.logits(torch.randn(2, 32)).dtype == torch.bfloat16


def test_no_hook_survives_a_failing_forward():
    target = tiny_target()
    with pytest.raises(IndexError):
        target.forward(torch.tensor([[10**6]]), taps=(0, 2, 4))
    for layer in target.model.model.layers:
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks


@pytest.mark.parametrize("tap", [-1, 5])
def test_taps_outside_the_model_are_an_error(tap):
    with pytest.raises(ValueError, match=r"tap must be in 0\.\.4"):
        tiny_target().forward(IDS_BL, taps=(tap,))


def test_a_window_missing_from_the_mask_is_an_error():
    mask = packed_mask(torch.zeros_like(IDS_BL), torch.arange(6)[None], window=None)
    with pytest.raises(ValueError, match="sliding-window"):
        tiny_target("mistral").forward(IDS_BL, mask=mask)


def test_a_cache_needs_mask_and_positions():
    target = tiny_target()
    with pytest.raises(ValueError, match="positions_BL and mask"):
        target.forward(IDS_BL, cache=target.new_cache(1, 8))


def test_the_cache_has_the_shapes_of_the_model():
    cache = tiny_target(dtype=torch.bfloat16).new_cache(3, 20)
    assert cache.kv.shape == (4, 2, 3, 2, 20, 8)  # layers, k and v, rows, kv heads, slots, head dim
    assert cache.kv.dtype == torch.bfloat16


def test_info_of_a_gemma_like_target():
    info = tiny_target("gemma3", max_position_embeddings=77).info
    assert (info.n_layers, info.tap_out, info.hidden_size, info.vocab_size) == (4, 4, 32, 64)
    assert (info.n_heads, info.n_kv_heads, info.head_dim, info.intermediate_size) == (4, 2, 8, 64)
    assert (info.max_positions, info.sliding_window) == (77, 8)
    # Rotary settings are those of the full-attention layers, where drafters work.
    assert info.rope_parameters["rope_theta"] == 1_000_000
    assert tiny_target("llama").info.sliding_window is None


def test_context_ends_where_the_rotary_frequencies_would_change():
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    target = tiny_target(
        "phi3",
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64} | factors,
    )
    assert target.info.max_positions == 64


def test_eos_ids_join_all_sources():
    target = tiny_target(tokenizer=True, eos_token_id=[9, 2])
    assert target.info.eos_ids == (9, 2)
    assert tiny_target(eos_token_id=None).info.eos_ids == ()


MESSAGES = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]


def test_chat_round_trip():
    target = tiny_target(tokenizer=True)
    ids = target.encode_chat(MESSAGES[:1], add_generation_prompt=True)
    text = "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
    assert target.decode(ids, skip_special_tokens=False) == text
    assert target.decode(ids) == "user\nHi?\nassistant\n"


def test_generation_markers_select_what_the_assistant_wrote():
    encoded = tiny_tokenizer().apply_chat_template(MESSAGES, return_dict=True, return_assistant_tokens_mask=True)
    own = [i for i, on in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if on]
    assert tiny_tokenizer().decode(own) == "Yes.<|im_end|>"


def test_a_target_without_template_says_so():
    with pytest.raises(UserError, match="must have a chat template"):
        tiny_target().encode_chat(MESSAGES, add_generation_prompt=True)
    with pytest.raises(UserError, match="must have a tokenizer"):
        tiny_target().decode([1])


def test_a_template_that_refuses_its_messages_says_so():
    target = tiny_target(tokenizer=True)
    target.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="roles must alternate"):
        target.encode_chat(MESSAGES, add_generation_prompt=False)


def test_tiny_targets_are_a_function_of_their_seed():
    state = torch.random.get_rng_state()
    one, same, other = tiny_target(seed=1), tiny_target(seed=1, dtype=torch.float64), tiny_target(seed=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(one.model.lm_head.weight.double(), same.model.lm_head.weight)
    assert one.fingerprint == same.fingerprint
    assert one.fingerprint["weights"] != other.fingerprint["weights"]


def test_tiny_targets_say_different_things():
    target = tiny_target(dtype=torch.float64)
    ids_BL = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(3))
    chosen = target.logits(target.forward(ids_BL).last_BLD).argmax(-1)
    assert chosen.unique().numel() > 20
    assert (chosen == ids_BL).float().mean() < 0.5  # not a copy of the input


def test_unknown_family_lists_the_choices():
    with pytest.raises(UserError, match=r"llama, qwen2, .*Did you mean 'gemma3'"):
        tiny_target("gema3")


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_instead_of_a_mask(family):
    """The same features for every family, windows and soft-caps included, and the model is left as it was."""
    target = tiny_target(family, seed=1, dtype=torch.float64)
    batch = pack(random_documents(3, 40, 60, seed=2), 40)
    before = target.config_hf._attn_implementation
    mask = packed_mask(batch.doc_BL, batch.positions_BL, window=target.info.sliding_window)
    want = target.forward(batch.ids_BL, positions_BL=batch.positions_BL, mask=mask, taps=(1, 4))
    got = target.forward(batch.ids_BL, positions_BL=batch.positions_BL, doc_BL=batch.doc_BL, taps=(1, 4))
    real = batch.doc_BL >= 0
    assert bool(got.last_BLD.isfinite().all())
    torch.testing.assert_close(got.last_BLD[real], want.last_BLD[real], rtol=1e-6, atol=1e-6)  # its norm is in fp32
    for tap in (1, 4):
        torch.testing.assert_close(got.taps[tap][real], want.taps[tap][real], rtol=1e-9, atol=1e-9)
    assert target.config_hf._attn_implementation == before
