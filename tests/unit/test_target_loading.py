import json

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file

from distill.errors import UserError
from distill.target import TargetConfig, load_target, loading
from distill.target.tiny import tiny_target


def load(name, **options):
    return load_target(TargetConfig(name=str(name), **{"device": "cpu", "dtype": "float32", **options}))


def refusal(name, **options) -> str:
    with pytest.raises(UserError) as error:
        load(name, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def folder(tmp_path):
    target = tiny_target("qwen3", tokenizer=True, layers=2)
    target.model.save_pretrained(tmp_path / "model")
    target.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name, kind", [("tiny", "llama"), ("tiny-gemma2", "gemma2"), ("tiny-gemma3", "gemma3_text")])
def test_tiny_targets_come_with_a_tokenizer_of_their_size(name, kind):
    target = load(name)
    assert target.info.model_type == kind
    assert target.info.vocab_size == len(target.tokenizer) == 100
    assert target.encode_chat([{"role": "user", "content": "Hi"}], add_generation_prompt=True)


def test_a_local_folder_gives_the_model_that_was_saved(folder):
    target, saved = load(folder), tiny_target("qwen3", tokenizer=True, layers=2)
    ids = torch.tensor([[4, 8, 15, 16, 23, 42]])
    assert torch.equal(target.forward(ids).last_BLD, saved.forward(ids).last_BLD)
    assert target.tokenizer.chat_template == saved.tokenizer.chat_template
    assert target.info.eos_ids == (2,)
    assert target.fingerprint["tokenizer"] == saved.fingerprint["tokenizer"]
    assert target.fingerprint["chat_template"] == saved.fingerprint["chat_template"]


def test_dtype_attention_and_seed_are_used(folder):
    assert load(folder, dtype="bfloat16").dtype == torch.bfloat16
    assert load(folder, attention="eager").config_hf._attn_implementation == "eager"
    assert load("tiny", seed=1).fingerprint != load("tiny", seed=2).fingerprint


def test_soft_capping_selects_eager_attention_by_itself(tmp_path):
    tiny_target("gemma3", layers=2, attn_logit_softcapping=2.0, attention="eager").model.save_pretrained(tmp_path)
    assert load(tmp_path).config_hf._attn_implementation == "eager"


def test_eos_ids_of_the_generation_config_come_first(folder):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [7, 2]}))
    assert load(folder).info.eos_ids == (7, 2)


def test_a_folder_without_tokenizer_files_has_none(tmp_path):
    tiny_target(layers=1).model.save_pretrained(tmp_path)
    assert load(tmp_path).tokenizer is None


def test_the_start_up_check_runs_unless_switched_off(folder, monkeypatch):
    def fail(target):
        raise UserError("checked")

    monkeypatch.setattr(loading, "verify", fail)
    assert refusal(folder) == "checked"
    assert refusal("tiny") == "checked"
    load(folder, verify=False)


def test_no_network():
    message = refusal("smolm2")
    assert "hub cannot be reached" in message
    assert "Did you mean 'smollm2'?" in message


def test_a_hub_that_refuses(monkeypatch):
    class Response:
        headers: dict = {}
        request = None

    def refuse(*args, **kwargs):
        raise HfHubHTTPError("401 Client Error.\n\nRepository Not Found", response=Response())

    monkeypatch.setattr(loading, "snapshot_download", refuse)
    assert "could not be fetched from the hub (401 Client Error.)" in refusal("someone/private")


def test_a_hub_name_is_loaded_from_its_snapshot(folder, monkeypatch):
    asked = {}

    def snapshot(name, **options):
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(loading, "snapshot_download", snapshot)
    target = load("someone/model", revision="v1")
    assert (asked["name"], asked["revision"], target.info.name) == ("someone/model", "v1", "someone/model")
    assert not any(pattern.endswith((".py", ".bin")) for pattern in asked["allow_patterns"])


def test_a_path_that_does_not_exist(tmp_path):
    assert "must be smollm2, tiny" in refusal(tmp_path / "nowhere")


def test_a_folder_without_a_model(tmp_path):
    assert "without one" in refusal(tmp_path)


def test_pickled_weights_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "must hold its weights as safetensors" in refusal(folder)


def test_a_missing_shard_is_named(tmp_path):
    tiny_target(layers=2).model.save_pretrained(tmp_path, max_shard_size="20KB")
    shard = max(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    assert f"without {shard.name}" in refusal(tmp_path)


def test_truncated_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "truncated or corrupted" in refusal(folder)


def test_missing_weights_are_not_made_up(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert "must be complete, got 1 missing (model.norm.weight" in refusal(folder)


def test_weights_of_another_shape(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, file, metadata={"format": "pt"})
    assert "must be a causal LM that transformers can load" in refusal(folder)


def test_an_unknown_architecture(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "no-such-model"}))
    assert "no-such-model" in refusal(folder)


def test_an_attention_the_model_does_not_have(tmp_path):
    tiny_target("gemma2", layers=2).model.save_pretrained(tmp_path)
    assert "Gemma2" in refusal(tmp_path, attention="sdpa")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"dtype": "float31"}, "Did you mean 'float32'"),
        ({"device": "gpu"}, "target.device must be"),
        ({"device": "cuda:99"}, "target.device must be"),
    ],
)
def test_bad_options(options, words):
    assert words in refusal("tiny", **options)


def test_unknown_tiny_family():
    assert "must be one of llama" in refusal("tiny-lama")
