"""GGUF files: fields, names, absolute ids, and rows that give the same attention under llama.cpp's rotation."""

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter

from distill.drafters.draft_model import DraftModel, DraftModelConfig
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.drafters.medusa import Medusa, MedusaConfig
from distill.errors import UserError
from distill.export import save_drafter
from distill.export.gguf import FILE, convert_gguf, paired
from distill.target.tiny import tiny_target
from distill.vocab import DraftVocab

V, W, LAYERS = 64, 10, 8
KEPT = torch.tensor([0, 2, 3, 7, 11, 20, 21, 40, 55, 63])
TARGET = tiny_target(vocab_size=V, hidden=16, layers=LAYERS, tokenizer=False)


@pytest.fixture
def vocabulary(tmp_path):
    return str(vocabulary_file(tmp_path / "target.gguf", V))


def vocabulary_file(path, size):
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"<{i}>" for i in range(size)])
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def eagle3(**flags):
    torch.manual_seed(1)
    return Eagle3(Eagle3Config(draft_vocab_size=W, intermediate_size=24, **flags), TARGET, DraftVocab(KEPT, V))


def read(folder):
    reader = GGUFReader(folder / FILE)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return fields, {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}


def test_eagle3(tmp_path, vocabulary):
    drafter = eagle3(norm_before_residual=True)
    native = save_drafter(drafter, tmp_path / "native", provenance={})
    folder, command = convert_gguf(native, tmp_path / "out", vocabulary)
    fields, tensors = read(folder)
    info = TARGET.info
    assert fields["general.architecture"] == "eagle3"
    assert fields["eagle3.target_layers"] == [2, 4, 5]
    assert fields["eagle3.target_hidden_size"] == 16
    assert fields["eagle3.norm_before_residual"] is True
    assert fields["eagle3.attention.head_count"] == info.n_heads
    assert fields["eagle3.rope.freq_base"] == pytest.approx(info.rope_parameters["rope_theta"])
    assert fields["eagle3.block_count"] == 1
    assert fields["tokenizer.ggml.tokens"] == [f"<{i}>" for i in range(V)]
    assert (fields["tokenizer.ggml.pre"], fields["tokenizer.ggml.eos_token_id"]) == ("smollm", 2)
    assert fields["tokenizer.ggml.add_bos_token"] is False
    assert tensors["d2t"].tolist() == KEPT.tolist(), "llama.cpp reads target ids, not offsets"
    assert "t2d" not in tensors
    state = drafter.state_dict()
    assert torch.equal(tensors["blk.0.attn_norm.weight"], state["layers.0.input_layernorm.weight"])
    assert torch.equal(tensors["blk.0.attn_norm_2.weight"], state["layers.0.hidden_norm.weight"])
    assert torch.equal(tensors["blk.0.ffn_norm.weight"], state["layers.0.post_attention_layernorm.weight"])
    assert torch.equal(tensors["blk.0.attn_v.weight"], state["layers.0.self_attn.v_proj.weight"])
    assert torch.equal(tensors["output.weight"], state["lm_head.weight"])
    assert not torch.equal(tensors["blk.0.attn_q.weight"], state["layers.0.self_attn.q_proj.weight"])
    assert "-md" in command
    assert vocabulary in command


@pytest.mark.parametrize("heads,width", [(1, 4), (3, 8)])
def test_reordered_rows_give_the_same_scores(heads, width):
    """Halves rotated by transformers, and neighbours rotated by llama.cpp, score alike."""
    generator = torch.Generator().manual_seed(heads)
    wq, wk = (torch.randn(heads * width, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    x, place = torch.randn(6, 5, generator=generator, dtype=torch.float64), torch.arange(6)[:, None, None]
    angle = place / 10000 ** (torch.arange(0, width, 2) / width)

    def halves(w):
        h = (x @ w.T).unflatten(-1, (heads, width))
        left, right = h.chunk(2, -1)
        return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)

    def neighbours(w):
        h = (x @ w.T).unflatten(-1, (heads, width))
        left, right = h[..., 0::2], h[..., 1::2]
        turned = [left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()]
        return torch.stack(turned, -1).flatten(-2)

    def scores(rotate, q, k):
        return torch.einsum("ihk,jhk->hij", rotate(q), rotate(k))

    want = scores(halves, wq, wk)
    torch.testing.assert_close(scores(neighbours, paired(wq, heads), paired(wk, heads)), want, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(scores(neighbours, wq, wk), want)


@pytest.mark.parametrize("tie", [True, False])
def test_draft_model(tmp_path, vocabulary, tie):
    torch.manual_seed(2)
    drafter = DraftModel(DraftModelConfig(layers=[0, 3], tie=tie), TARGET)
    native = save_drafter(drafter, tmp_path / "native", provenance={})
    folder, _ = convert_gguf(native, tmp_path / "out", vocabulary, dtype=torch.bfloat16)
    fields, tensors = read(folder)
    assert (fields["general.architecture"], fields["llama.block_count"]) == ("llama", 2)
    assert ("output.weight" in tensors) == (not tie)
    embedding = tensors["token_embd.weight"].view(torch.bfloat16)
    assert torch.equal(embedding, drafter.model.embed_tokens.weight.bfloat16())
    assert tensors["blk.1.ffn_norm.weight"].dtype == torch.float32, "norms stay in full precision"


def test_refusals(tmp_path, vocabulary):
    native = save_drafter(eagle3(), tmp_path / "native", provenance={})
    with pytest.raises(UserError, match="vocabulary must be the target's own GGUF file with format=gguf, got none"):
        convert_gguf(native, tmp_path / "out", None)
    (tmp_path / "no.gguf").write_bytes(b"nothing of the kind")
    for bad in ("nowhere.gguf", "no.gguf"):
        with pytest.raises(UserError, match="vocabulary must be the target's own GGUF file, got"):
            convert_gguf(native, tmp_path / "out", str(tmp_path / bad))
    other = vocabulary_file(tmp_path / "other.gguf", 60)
    with pytest.raises(UserError, match=r"of the target's 64 tokens, got .* with 60"):
        convert_gguf(native, tmp_path / "out", str(other))
    norms = save_drafter(eagle3(fc_norm=True), tmp_path / "norms", provenance={})
    with pytest.raises(UserError, match="drafter.fc_norm=false, which llama.cpp does not read"):
        convert_gguf(norms, tmp_path / "out", vocabulary)
    heads = save_drafter(Medusa(MedusaConfig(heads=2), TARGET), tmp_path / "heads", provenance={})
    with pytest.raises(UserError, match="eagle3 or draft_model, got medusa"):
        convert_gguf(heads, tmp_path / "out", vocabulary)
    assert not (tmp_path / "out").exists()
