"""Reading other programs' folders: round trips bit for bit, folders made by hand, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from distill.drafters.draft_model import DraftModel, DraftModelConfig
from distill.drafters.eagle1 import Eagle1, Eagle1Config
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.drafters.medusa import Medusa, MedusaConfig
from distill.errors import UserError
from distill.export import save_drafter
from distill.export.adopt import adopt
from distill.export.convert import convert
from distill.export.recognise import recognise
from distill.target.tiny import tiny_target
from distill.vocab import DraftVocab
from serve_eval.export import Lender
from serve_eval.inspect import report

V, W, LAYERS = 64, 10, 8
KEPT = torch.tensor([0, 2, 3, 7, 11, 20, 21, 40, 55, 63])
TARGET = tiny_target(vocab_size=V, hidden=16, layers=LAYERS, tokenizer=False)


class Own(Lender):
    """Lends from the tiny target, which has no name to load it by."""

    def __init__(self):
        super().__init__("", None)
        self._target = TARGET


def randomised(drafter):
    generator = torch.Generator().manual_seed(3)
    for weight in drafter.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.3
    return drafter


def eagle3(**flags):
    config = Eagle3Config(**{"draft_vocab_size": W, "intermediate_size": 8, **flags})
    return randomised(Eagle3(config, TARGET, DraftVocab(KEPT, V)))


DRAFTERS = {
    "eagle3": lambda: eagle3(),
    "eagle3-flags": lambda: eagle3(fc_norm=True, norm_output=True, norm_before_residual=True),
    "eagle3-taps": lambda: eagle3(taps=[1, 3, 6]),
    "eagle1": lambda: randomised(Eagle1(Eagle1Config(), TARGET)),
    "eagle1-bias": lambda: randomised(Eagle1(Eagle1Config(fc_bias=True, num_layers=2), TARGET)),
    "medusa": lambda: randomised(Medusa(MedusaConfig(heads=3, blocks=2), TARGET)),
    "medusa-own": lambda: randomised(Medusa(MedusaConfig(heads=2, head="own"), TARGET)),
    "draft_model": lambda: randomised(DraftModel(DraftModelConfig(layers=[0, 3]), TARGET)),
}
TRIPS = [
    *(("eagle3", f) for f in ("vllm", "speculators", "sglang", "openvino")),
    *(("eagle3-flags", f) for f in ("vllm", "speculators")),
    *(("eagle3-taps", f) for f in ("vllm", "speculators", "sglang")),
    *(("eagle1", f) for f in ("vllm", "sglang")),
    ("eagle1-bias", "sglang"),
    *(("medusa", f) for f in ("vllm", "medusa")),
    *(("medusa-own", f) for f in ("vllm", "medusa")),
    *(("draft_model", f) for f in ("transformers", "vllm", "sglang", "openvino")),
]
LAYER_IDS = {"vllm": "entering", "sglang": "output", "openvino": "entering"}
TRAINING = {"ttt_steps", "head_init", "steps", "source", "layers", "path", "architecture"}
"""Flags that say how a drafter was trained or where it came from; other programs do not keep them."""


def written(name: str, form: str, tmp_path: Path, **options) -> Path:
    native = save_drafter(DRAFTERS[name](), tmp_path / "native", provenance={})
    return convert(native, tmp_path / "out", form, Own(), **options)[0]


@pytest.mark.parametrize("name,form", TRIPS)
def test_there_and_back_is_bit_identical(tmp_path, name, form):
    drafter = DRAFTERS[name]()
    folder = written(name, form, tmp_path)
    back, _ = adopt(folder, TARGET, layer_ids=LAYER_IDS.get(form, "auto"))
    assert type(back) is type(drafter)
    before, after = drafter.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    assert back.taps(back.config, TARGET.info) == drafter.taps(drafter.config, TARGET.info)
    for flag in vars(drafter.config).keys() - TRAINING - {"taps"}:
        assert getattr(back.config, flag) == getattr(drafter.config, flag), flag


@pytest.mark.parametrize("name,form", TRIPS)
def test_inspect_names_what_was_written(tmp_path, name, form):
    folder = written(name, form, tmp_path)
    found = recognise(folder)
    assert found.drafter == name.split("-")[0]
    text = "\n".join(report(found))
    assert "lacks" not in text
    assert str(folder) in text


def test_an_export_can_be_read_by_everybody_and_overwritten(tmp_path):
    folder = written("eagle3", "vllm", tmp_path)
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in folder.iterdir())
    with pytest.raises(UserError, match="must not exist yet.*pass overwrite=true"):
        convert(tmp_path / "native", folder, "vllm", Own())
    (folder / "old").write_text("x")
    convert(tmp_path / "native", folder, "sglang", Own(), overwrite=True)
    assert not (folder / "old").exists()
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="remove it first"):
        convert(tmp_path / "native", other, "vllm", Own(), overwrite=True)
    assert [file.name for file in other.iterdir()] == ["thesis.txt"]


def test_another_type(tmp_path):
    folder = written("eagle3", "vllm", tmp_path, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16, torch.int64, torch.bool}
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"


# ------------------------------------------------------------------------------------- folders made by somebody else
def by_hand_eagle3(tmp_path, **changes) -> Path:
    """The reference's names and its config, written without anything of ours."""
    generator = torch.Generator().manual_seed(5)
    info = TARGET.info
    d, a, k, i = info.hidden_size, info.n_heads * info.head_dim, info.n_kv_heads * info.head_dim, 24

    def rand(*shape):
        return torch.randn(shape, generator=generator)

    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[KEPT] = True
    tensors = {
        "fc.weight": rand(d, 3 * d),
        "midlayer.input_layernorm.weight": rand(d),
        "midlayer.hidden_norm.weight": rand(d),
        "midlayer.self_attn.q_proj.weight": rand(a, 2 * d),
        "midlayer.self_attn.k_proj.weight": rand(k, 2 * d),
        "midlayer.self_attn.v_proj.weight": rand(k, 2 * d),
        "midlayer.self_attn.o_proj.weight": rand(d, a),
        "midlayer.post_attention_layernorm.weight": rand(d),
        "midlayer.mlp.gate_proj.weight": rand(i, d),
        "midlayer.mlp.up_proj.weight": rand(i, d),
        "midlayer.mlp.down_proj.weight": rand(d, i),
        "norm.weight": rand(d),
        "lm_head.weight": rand(W, d),
        "d2t": KEPT - torch.arange(W),
        "t2d": t2d,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": d,
        "intermediate_size": i,
        "num_hidden_layers": 1,
        "num_attention_heads": info.n_heads,
        "num_key_value_heads": info.n_kv_heads,
        "vocab_size": V,
        "draft_vocab_size": W,
        "rms_norm_eps": info.rms_norm_eps,
        "rope_theta": info.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "max_position_embeddings": 2048,
    }
    for name, value in changes.items():
        target = tensors if isinstance(value, torch.Tensor) or name in tensors else config
        if value is None:
            del target[name]
        else:
            target[name] = value
    folder = tmp_path / "theirs"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plain_eagle3(t: dict, embeds_ND: torch.Tensor, taps_NT: torch.Tensor, *, normed_residual: bool) -> torch.Tensor:
    """EAGLE-3 from its equations, one sequence, fp64, causal; returns logits over the draft vocabulary."""
    info = TARGET.info
    n, k = info.n_heads, info.head_dim

    def norm(x, w):
        return x / (x.pow(2).mean(-1, keepdim=True) + info.rms_norm_eps).sqrt() * w

    g = taps_NT @ t["fc.weight"].T
    fused = norm(g, t["midlayer.hidden_norm.weight"])
    x = torch.cat([norm(embeds_ND, t["midlayer.input_layernorm.weight"]), fused], -1)
    place = torch.arange(len(x), dtype=torch.float64)
    angle = place[:, None] / info.rope_parameters["rope_theta"] ** (torch.arange(0, k, 2, dtype=torch.float64) / k)

    def turned(h):  # [L, K]
        left, right = h[:, : k // 2], h[:, k // 2 :]
        return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)

    outs = []
    for head in range(n):
        group = head // (n // info.n_kv_heads)
        q = turned(x @ t["midlayer.self_attn.q_proj.weight"][head * k : (head + 1) * k].T)
        key = turned(x @ t["midlayer.self_attn.k_proj.weight"][group * k : (group + 1) * k].T)
        value = x @ t["midlayer.self_attn.v_proj.weight"][group * k : (group + 1) * k].T
        scores = (q @ key.T / k**0.5).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        outs.append(scores.softmax(-1) @ value)
    h = (fused if normed_residual else g) + torch.cat(outs, -1) @ t["midlayer.self_attn.o_proj.weight"].T
    y = norm(h, t["midlayer.post_attention_layernorm.weight"])
    gate, up = y @ t["midlayer.mlp.gate_proj.weight"].T, y @ t["midlayer.mlp.up_proj.weight"].T
    out = h + (torch.nn.functional.silu(gate) * up) @ t["midlayer.mlp.down_proj.weight"].T
    return norm(out, t["norm.weight"]) @ t["lm_head.weight"].T


@pytest.mark.parametrize("normed", [False, True])
def test_a_foreign_eagle3_says_what_its_equations_say(tmp_path, normed):
    folder = by_hand_eagle3(tmp_path, norm_before_residual=normed)
    drafter, notes = adopt(folder, TARGET)
    assert any("no layer ids" in note for note in notes)
    ids = torch.randint(V, (1, 12), generator=torch.Generator().manual_seed(1))
    output = TARGET.forward(ids, taps=drafter.taps(drafter.config, TARGET.info))
    state = drafter.new_state(1, 16)
    drafter.extend(state, ids[:, :11], ids[:, 11], output_until(output, 11), torch.tensor([11]), longest=11)
    got = drafter.draft_logits(state.last_B1D)[0, 0].double()
    tensors = {k: v.double() for k, v in load_file(folder / "model.safetensors").items() if k not in ("d2t", "t2d")}
    taps = torch.cat([output.taps[k][0, :11] for k in (2, LAYERS // 2, LAYERS - 3)], -1).double()
    want = plain_eagle3(tensors, TARGET.embed(ids)[0, 1:12].double(), taps, normed_residual=normed)[-1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def output_until(output, n):
    return replace(output, last_BLD=output.last_BLD[:, :n], taps={k: v[:, :n] for k, v in output.taps.items()})


def test_a_foreign_map_in_another_order_gives_the_same_tokens(tmp_path):
    order = torch.tensor([3, 1, 0, 2, *range(4, W)])
    folder = by_hand_eagle3(tmp_path, d2t=KEPT[order] - torch.arange(W))
    rows = load_file(folder / "model.safetensors")["lm_head.weight"]
    drafter, _ = adopt(folder, TARGET)
    for row, token in enumerate(KEPT[order].tolist()):
        mine = (drafter.vocab.target_ids == token).nonzero().item()
        assert torch.equal(drafter.lm_head.weight[mine], rows[row])


@pytest.mark.parametrize(
    "changes,says",
    [
        ({"d2t": KEPT.clone()}, r"d2t must hold offsets .*, got target ids themselves"),
        ({"d2t": torch.full((W,), -5)}, "d2t must hold offsets .*, got numbers that name a token twice or none"),
        ({"t2d": torch.ones(V, dtype=torch.bool)}, "d2t and t2d must name the same tokens"),
        ({"norm.weight": None}, "got it without norm.weight"),
        ({"surprise": torch.zeros(2)}, "got it with surprise"),
        ({"lm_head.weight": None}, "must hold lm_head.weight for its 10 draft tokens"),
        ({"fc.weight": torch.zeros(16, 32)}, r"fc.weight must have shape \[16, 48\]"),
        ({"hidden_size": 32}, "hidden_size must be 16 for this target, got 32"),
        ({"hidden_size": None}, "must have the field hidden_size"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps must be"),
        ({"attention_bias": True}, "attention_bias must be false"),
        ({"norm_before_fc": True}, "norm_before_fc must be false"),
        ({"norm_before_residual": "yes"}, "norm_before_residual must be true or false, got 'yes'"),
        ({"target_hidden_size": 99}, "target_hidden_size must be 16"),
        ({"input_norm.weight": torch.zeros(48)}, "got one with input_norm.weight"),
        ({"embed_tokens.weight": torch.zeros(V, 16)}, "must read the target's embedding, got one of its own"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}, "layer_ids must be entering .* or output"),
    ],
    ids=str,
)
def test_folders_that_do_not_fit_are_refused(tmp_path, changes, says):
    folder = by_hand_eagle3(tmp_path, **changes)
    with pytest.raises(UserError, match=says):
        adopt(folder, TARGET)


@pytest.mark.parametrize(
    "ids,layer_ids,taps",
    [([2, 4, 5], "auto", (2, 4, 5)), ([1, 3, 4], "auto", (2, 4, 5)), ([1, 4, 6], "entering", (1, 4, 6)),
     ([1, 4, 6], "output", (2, 5, 7))],
)  # fmt: skip
def test_layer_ids(tmp_path, ids, layer_ids, taps):
    drafter, _ = adopt(by_hand_eagle3(tmp_path, eagle_aux_hidden_state_layer_ids=ids), TARGET, layer_ids=layer_ids)
    assert drafter.taps(drafter.config, TARGET.info) == taps


def test_other_rotary_settings_are_kept(tmp_path):
    folder = by_hand_eagle3(tmp_path, rope_theta=77.0)
    drafter, _ = adopt(folder, TARGET)
    assert drafter.config.rope == {"rope_theta": 77.0, "rope_type": "default"}
    native = save_drafter(drafter, tmp_path / "native", provenance={})
    again = convert(native, tmp_path / "out", "vllm", Own())[0]
    assert json.loads((again / "config.json").read_text())["rope_theta"] == 77.0


@pytest.mark.parametrize(
    "files,says",
    [
        ({}, "must hold one of model.safetensors"),
        ({"config.json": b"{"}, "must be readable JSON"),
        ({"model.safetensors": b"abc"}, "must be a whole safetensors file, got a damaged one"),
        ({"model.safetensors": b"\xff" * 8}, "must be a whole safetensors file, got a damaged one"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "../x.safetensors"}}'}, "every file its index names"),
        ({"model.safetensors.index.json": b"{}"}, "every file its index names"),
    ],
    ids=str,
)
def test_damaged_folders(tmp_path, files, says):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        recognise(tmp_path)


def test_no_drafter_at_all(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"must hold an EAGLE-1, EAGLE-3, Medusa or draft model, .*\(a, \.\.\.\)"):
        recognise(tmp_path)
    with pytest.raises(UserError, match="which is none"):
        recognise(tmp_path / "nowhere")


def test_a_native_export_needs_no_adoption(tmp_path):
    native = save_drafter(eagle3(), tmp_path / "native", provenance={})
    with pytest.raises(UserError, match="got a native one; load it as it is"):
        adopt(native, TARGET)


@pytest.mark.parametrize("form", ["transformers", "vllm"])
def test_transformers_reads_a_draft_model(tmp_path, form):
    folder = written("draft_model", form, tmp_path)
    plain, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    drafter = DRAFTERS["draft_model"]()
    ids = torch.randint(V, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, drafter.backbone.model(ids).logits, rtol=1e-5, atol=1e-5)
    counts = [assisted_passes(TARGET.model, model, ids) for model in (plain, drafter.backbone.model)]
    assert counts[0] == counts[1]


def assisted_passes(model, assistant, ids) -> list[int]:
    """Tokens that come at once, pass by pass, with ``assistant`` as transformers' assistant_model."""
    sizes = []

    class Watch(BaseStreamer):
        def put(self, value):
            sizes.append(value.numel())

        def end(self):
            """Nothing to flush."""

    assistant.generation_config = GenerationConfig(
        num_assistant_tokens=3, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    settings = GenerationConfig(do_sample=False, max_new_tokens=24, pad_token_id=0)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=assistant,
        generation_config=settings,
        streamer=Watch(),
    )
    assert len(sizes) > 2
    return sizes
