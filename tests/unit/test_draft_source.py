"""Where a draft model's weights come from, what is refused, and that a checkpoint holds all it needs."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from distill.drafters.cutting import spread
from distill.drafters.draft_model import DraftModel, DraftModelConfig
from distill.drafters.early_exit import EarlyExit, EarlyExitConfig
from distill.errors import UserError
from distill.export import load_drafter, save_drafter
from distill.target.model import Target
from distill.target.tiny import FAMILIES, tiny_target
from distill.train.config import TrainConfig
from distill.train.memory import module_bytes
from distill.train.run import run

IDS = torch.tensor([[5, 9, 33, 3, 17, 30, 8, 21]])


def draft(target, **options) -> DraftModel:
    return DraftModel(DraftModelConfig(**options), target)


def logits(drafter) -> torch.Tensor:
    with torch.no_grad():
        return drafter.backbone.model(input_ids=IDS, use_cache=False).logits


# -- cut out of the target


def test_layers_are_spread_evenly_with_first_and_last():
    assert spread(30, 6) == [0, 6, 12, 17, 23, 29]
    assert spread(4, 4) == [0, 1, 2, 3]
    assert spread(7, 1) == [0]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_make_a_copy(family):
    target = tiny_target(family, dtype=torch.float64)
    drafter = draft(target, layers=[0, 1, 2, 3])
    # Gemma's embedding scale is rounded to the precision a model is built in, fp32 for the target here.
    near = 1e-6 if "gemma" in family else 0
    torch.testing.assert_close(
        logits(drafter), target.model(input_ids=IDS, use_cache=False).logits, rtol=near, atol=near
    )
    frozen = {p.data_ptr() for p in target.model.parameters()}
    assert not any(p.data_ptr() in frozen for p in drafter.parameters()), "the target's own weights would be trained"
    assert all(p.requires_grad for p in drafter.parameters())
    assert not any(p.requires_grad for p in target.model.parameters())


def test_chosen_layers_in_the_order_given():
    target = tiny_target("gemma3")
    drafter = draft(target, layers=[3, 1])
    for ours, theirs in zip(drafter.model.layers, (3, 1), strict=True):
        for name, weight in ours.state_dict().items():
            assert torch.equal(weight, target.model.model.layers[theirs].state_dict()[name])
    assert drafter.backbone.config_hf.layer_types == ["full_attention", "full_attention"]


def dead_channels(family: str, hidden: list[int], inner: list[int]):
    """A target in which some channels of the residual stream and of the feed-forward layers do nothing."""
    target = tiny_target(family, dtype=torch.float64, rms_norm_eps=1e-30)
    with torch.no_grad():
        for name, weight in target.model.named_parameters():
            if weight.ndim == 1:
                continue
            if "down_proj" in name or "o_proj" in name:
                weight[hidden] = 0
            else:
                weight[:, hidden] = 0
            if "down_proj" in name:
                weight[:, inner] = 0
            elif "gate_up" in name:
                weight[inner] = 0
                weight[[i + weight.shape[0] // 2 for i in inner]] = 0
            elif "gate" in name or "up_proj" in name:
                weight[inner] = 0
    return target


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_narrower_keeps_what_does_something(family):
    """Leaving out channels without effect changes nothing but the mean in the norms, which the test makes up for."""
    target = dead_channels(family, [1, 4, 5, 20, 31, 8, 9, 10], [0, 7, 33, 63])
    drafter = draft(target, layers=[0, 1, 2, 3], hidden_size=24, intermediate_size=60)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.ndim == 1:
                weight *= (32 / 24) ** 0.5
    theirs = target.model(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(logits(drafter), theirs, rtol=1e-5, atol=1e-5)  # norms work in fp32


def test_tied_and_untied():
    tied, untied = tiny_target("qwen3"), tiny_target("llama")
    for target, tie, is_tied in ((tied, None, True), (untied, None, False), (tied, False, False), (untied, True, True)):
        drafter = draft(target, tie=tie)
        embedding, head = drafter.model.embed_tokens.weight, drafter.lm_head.weight
        assert (embedding is head) == is_tied
        assert ("lm_head.weight" in drafter.state_dict()) == (not is_tied)
        assert torch.equal(embedding, target.model.get_input_embeddings().weight)
        if not is_tied:
            assert torch.equal(head, target.model.get_output_embeddings().weight)
    frozen = draft(tied, freeze_embedding=True)
    assert [n for n, p in frozen.named_parameters() if not p.requires_grad] == ["model.embed_tokens.weight"]


# -- random weights, checkpoints


def test_sizes_of_a_config():
    torch.manual_seed(0)
    drafter = draft(
        tiny_target("qwen2"), source="config", n_layers=1, hidden_size=48, intermediate_size=40, n_heads=6, n_kv_heads=3
    )
    info = drafter.backbone.info
    assert (info.n_layers, info.hidden_size, info.intermediate_size) == (1, 48, 40)
    assert (info.n_heads, info.n_kv_heads, info.head_dim, info.vocab_size) == (6, 3, 8, 64)
    torch.manual_seed(0)
    options = {"n_layers": 1, "hidden_size": 48, "intermediate_size": 40, "n_heads": 6, "n_kv_heads": 3}
    again = draft(tiny_target("qwen2"), source="config", **options)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))
    assert 0 < float(drafter.lm_head.weight.detach().std()) < 0.1


def test_a_checkpoint_of_another_family(tmp_path):
    target, other = tiny_target("llama", tokenizer=True), tiny_target("qwen3", layers=2, tokenizer=True)
    other.model.save_pretrained(tmp_path)
    other.tokenizer.save_pretrained(tmp_path)
    drafter = draft(target, source="checkpoint", path=str(tmp_path))
    torch.testing.assert_close(logits(drafter), other.model(input_ids=IDS, use_cache=False).logits)


@pytest.mark.parametrize(
    "options",
    [
        {"layers": [0, 3]},
        {"n_layers": 2, "hidden_size": 24},
        {"source": "config", "n_layers": 1, "tie": True},
        {"source": "checkpoint"},
    ],
    ids=str,
)
def test_an_export_needs_nothing_but_itself(options, tmp_path):
    """The source may be gone: architecture and weights are in the export, and plain transformers can read them."""
    target = tiny_target("gemma2", tokenizer=True)
    if options.get("source") == "checkpoint":
        small = tiny_target("gemma2", layers=2, tokenizer=True, seed=5)
        small.model.save_pretrained(tmp_path / "source")
        options = {**options, "path": str(tmp_path / "source")}
    drafter = draft(target, **options)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.01)
    save_drafter(drafter, tmp_path / "export", provenance={})
    if "path" in options:
        (tmp_path / "source" / "config.json").unlink()
    loaded = load_drafter(tmp_path / "export", target)
    assert torch.equal(logits(loaded), logits(drafter))
    assert loaded.config == drafter.config
    config = json.loads((tmp_path / "export" / "config.json").read_text())["config"]
    drafter.backbone.model.save_pretrained(tmp_path / "plain")
    plain = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert {k: config["architecture"][k] for k in plain if k in config["architecture"]}.items() >= {
        "model_type": "gemma2",
        "num_hidden_layers": drafter.backbone.info.n_layers,
        "hidden_size": drafter.backbone.info.hidden_size,
    }.items()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(again(input_ids=IDS, use_cache=False).logits, logits(drafter))


def test_another_precision_reaches_the_cache():
    drafter = draft(tiny_target(), n_layers=2).to(torch.bfloat16)
    assert drafter.new_state(1, 8).cache.kv.dtype == torch.bfloat16


def test_the_early_exit_holds_nothing():
    target = tiny_target()
    drafter = EarlyExit(EarlyExitConfig(), target)
    assert (drafter.backbone.info.n_layers, target.info.n_layers) == (1, 4)
    assert not list(drafter.parameters())
    assert module_bytes(drafter) == 0
    drafter.accelerate()
    assert drafter.engine._fused.layers[0] is target.fast._fused.layers[0]
    assert drafter.engine._head is target.fast._head


# -- refusals


def tokenizer_with(target, change) -> PreTrainedTokenizerFast:
    fields = json.loads(target.tokenizer.backend_tokenizer.to_str())
    change(fields["model"]["vocab"])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(fields)))


def swap(vocab: dict[str, int]) -> None:
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def grow(vocab: dict[str, int]) -> None:
    vocab["more"] = len(vocab)


@pytest.mark.parametrize(
    "change, extra, said",
    [
        (swap, 0, r"2 ids of which differ, the first: 70 \('b' instead of 'a'\), 71 \('a' instead of 'b'\)"),
        (grow, 1, r"got 101 tokens instead of 100, 1 ids of which differ, the first: 100 \('more' instead of None\)"),
    ],
    ids=["permuted", "larger"],
)
def test_another_vocabulary_is_refused(change, extra, said, tmp_path):
    target = tiny_target(tokenizer=True)
    tiny_target(layers=1, vocab_size=target.info.vocab_size + extra).model.save_pretrained(tmp_path)
    tokenizer_with(target, change).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=said):
        draft(target, source="checkpoint", path=str(tmp_path))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"vocab_size": 65}, "vocabulary of 64 tokens, got 65"),
        ({"vocab_size": 60}, "vocabulary of 64 tokens, got 60"),
        ({"max_position_embeddings": 512}, "as far as the target's 2048 positions, got 512"),
    ],
    ids=str,
)
def test_a_checkpoint_that_does_not_fit_is_refused(options, said, tmp_path):
    tiny_target(layers=1, **options).model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=said):
        draft(tiny_target(), source="checkpoint", path=str(tmp_path))


def test_nothing_to_load_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"drafter\.path must be a local folder or a hub name"):
        draft(tiny_target(), source="checkpoint", path=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"layers": [0, 4]}, r"drafter\.layers must be between 0 and 3"),
        ({"n_layers": 5}, r"drafter\.n_layers must be at most the target's 4"),
        ({"hidden_size": 33}, r"drafter\.hidden_size must be at most the target's 32"),
        ({"intermediate_size": 65}, r"drafter\.intermediate_size must be at most the target's 64"),
        ({"layers": [0], "n_layers": 1}, r"drafter\.layers must name at least one layer and stand without"),
        ({"layers": []}, r"drafter\.layers must name at least one layer"),
        ({"path": "x"}, r"drafter\.path must be null with drafter\.source=layers"),
        ({"n_heads": 4}, r"drafter\.n_heads must be null with drafter\.source=layers"),
        ({"source": "config", "layers": [0]}, r"drafter\.layers must be null with drafter\.source=config"),
        (
            {"source": "config", "n_heads": 6, "n_kv_heads": 4},
            r"n_kv_heads must divide the 6 query heads, got 4; give drafter\.n_h",
        ),
        ({"hidden_size": 1}, r"sizes must make a llama model, got drafter\.hidden_size=1:"),
        ({"source": "config", "hidden_size": 7}, r"sizes must make a llama model, got drafter\.hidden_size=7:"),
        ({"source": "checkpoint"}, r"source=checkpoint must have drafter\.path and no sizes of its own, got no path"),
        ({"source": "checkpoint", "path": "x", "n_layers": 1}, r"no sizes of its own, got drafter\.n_layers"),
        ({"on_policy": 1.5}, r"drafter\.on_policy must be in \[0, 1\]"),
        ({"on_policy_tokens": 0}, r"drafter\.on_policy_tokens must be >= 1"),
        ({"n_layers": 0}, r"drafter\.n_layers must be >= 1"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        draft(tiny_target(), **options)


def whole(path):
    target = tiny_target(layers=1, tokenizer=True)
    target.model.save_pretrained(path)
    target.tokenizer.save_pretrained(path)
    return path


def without_a_weight(path):
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "spoil,options,said",
    [
        (without_a_weight, {}, r"must hold every weight .* without model\.layers\.0\.mlp\.up_proj\.weight"),
        (lambda p: (p / "model.safetensors").write_bytes(b"x" * 50), {}, r"drafter\.path must be a local folder"),
        (lambda p: (p / "config.json").write_text('{"model_type": "llama", "hidden_size": "a"}'), {}, r"drafter\.path"),
        (lambda p: (p / "tokenizer.json").write_text("{"), {}, r"drafter\.path must be a local folder"),
        (lambda p: None, {"tie": True}, r"drafter\.tie must be null or false for .*, whose head is not its embedding"),
    ],
)
def test_a_spoilt_checkpoint_is_refused(spoil, options, said, tmp_path):
    spoil(whole(tmp_path))
    with pytest.raises(UserError, match=said):
        draft(tiny_target(tokenizer=True), source="checkpoint", path=str(tmp_path), **options)


@pytest.mark.parametrize("path", ["", "  ", "/nowhere", "./nowhere"])
def test_a_path_that_is_no_folder_is_not_asked_for_at_the_hub(path):
    with pytest.raises(
        UserError, match=r"drafter\.path must be a local folder or a hub name, got .*, which is no folder"
    ):
        draft(tiny_target(), source="checkpoint", path=path)


@pytest.mark.parametrize(
    "fields", [{}, {"a": 1}, {"model_type": "no_such"}, {"model_type": "llama", "hidden_size": "a"}], ids=str
)
def test_an_architecture_that_is_none_is_refused(fields):
    with pytest.raises(UserError, match=r"drafter\.architecture must be a transformers config"):
        draft(tiny_target(), architecture=fields)


def test_an_architecture_beside_another_source_is_refused():
    """It would silently win over the layers that were asked for."""
    it, fields = tiny_target(), {"model_type": "llama", "num_hidden_layers": 1}
    with pytest.raises(UserError, match="architecture must be null with drafter.source=layers"):
        DraftModel.check_target(DraftModelConfig(architecture=fields), it)


def test_an_exit_behind_the_last_layer_is_refused():
    with pytest.raises(UserError, match=r"drafter\.layers must be at most the target's 4, got 5"):
        EarlyExit(EarlyExitConfig(layers=5), tiny_target())
    with pytest.raises(UserError, match=r"drafter\.layers must be >= 1"):
        EarlyExitConfig(layers=0)


def test_a_drafter_without_weights_is_not_trained(tmp_path):
    config = TrainConfig(run_dir=str(tmp_path / "run"), drafter={"name": "early_exit"})
    with pytest.raises(UserError, match="early_exit, which has no weights"):
        run(config)
    assert not (tmp_path / "run").exists()


def test_quantised_targets_are_not_cut():
    target = tiny_target()
    layer = target.model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UserError, match="plain weights to cut from, got quantised ones"):
        draft(Target(target.model, name="quantised"))
