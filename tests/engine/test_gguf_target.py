"""The target as a GGUF file: what llama.cpp is told about tokens, and the tensors, read by the gguf package."""

import json

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from distill.errors import UserError
from engines.gguf_target import bpe_fields, write_target

TOKENIZER = {
    "added_tokens": [
        {"id": 3, "content": "<|end|>", "special": True},
        {"id": 4, "content": "<tab>", "special": False},
    ],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}


@pytest.fixture
def folder(tmp_path):
    """A tiny model with six ids, of which the last has no token."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=6,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=3,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return tmp_path


def test_every_id_has_a_token(folder):
    fields = {name: value for name, (value, _, _) in bpe_fields(folder, size=6).items()}
    assert fields["tokenizer.ggml.tokens"] == ["a", "b", "ab", "<|end|>", "<tab>", "[UNUSED5]"]
    assert fields["tokenizer.ggml.token_type"] == [1, 1, 1, 3, 4, 5]  # normal, control, user-defined, unused
    assert fields["tokenizer.ggml.merges"] == ["a b"]
    assert (fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]) == (0, 3)


def test_the_first_of_several_ends_is_taken(folder):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [4, 3]}))
    assert bpe_fields(folder, size=6)["tokenizer.ggml.eos_token_id"][0] == 4


def test_the_file_holds_the_model(folder, tmp_path):
    path = tmp_path / "out.gguf"
    write_target(folder, path, dtype=torch.float32)
    reader = GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["llama.block_count"].contents() == 2
    assert reader.fields["tokenizer.ggml.tokens"].contents()[3] == "<|end|>"
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    weights = load_file(folder / "model.safetensors")
    assert torch.equal(tensors["token_embd.weight"], weights["model.embed_tokens.weight"])
    assert torch.equal(tensors["blk.1.ffn_down.weight"], weights["model.layers.1.mlp.down_proj.weight"])
    # Rows of a head: halves in transformers (0, 1 | 2, 3), neighbours in llama.cpp (0, 2 | 1, 3).
    q = weights["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(tensors["blk.0.attn_q.weight"][:4], q[[0, 2, 1, 3]])
    assert "output.weight" not in tensors


@pytest.mark.parametrize(
    "content", [None, "{", json.dumps({"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}), json.dumps([1])]
)
def test_another_tokenizer_is_refused(folder, content):
    path = folder / "tokenizer.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match="must find a byte-pair tokenizer"):
        bpe_fields(folder, size=6)
