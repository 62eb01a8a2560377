"""The commands export, inspect and adopt, from the command line to the folder."""

import json

import pytest
import torch
from safetensors.torch import load_file

import distill.export.hub as hub
import serve_eval.export as export
from distill.drafters.medusa import Medusa, MedusaConfig
from distill.errors import UserError
from distill.export import load_drafter, save_drafter
from distill.target import TargetConfig, load_target
from serve_eval.cli import main

FULL = "target.dtype=float32"
TINY = TargetConfig(name="tiny", dtype="float32")


@pytest.fixture(scope="module")
def target():
    return load_target(TINY)


@pytest.fixture
def native(target, tmp_path):
    torch.manual_seed(2)
    drafter = Medusa(MedusaConfig(heads=2), target)
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight)
    return save_drafter(drafter, tmp_path / "native", provenance={})


def test_there_and_back_by_command(native, target, tmp_path, capfd):
    out, back = tmp_path / "vllm", tmp_path / "back"
    assert main(["export", f"checkpoint={native}", "format=vllm", f"out={out}", "tokens=2", FULL]) == 0
    told = capfd.readouterr().out
    assert f'"method": "medusa", "model": "{out}", "num_speculative_tokens": 2' in told
    head = load_file(out / "model.safetensors")["lm_heads.0.weight"]
    assert torch.equal(head, target.head_rows(torch.arange(target.info.vocab_size))), "the shared head is the target's"
    assert "draftsmith check" in (out / "README.md").read_text()
    assert main(["inspect", str(out)]) == 0
    assert "Medusa, vLLM's layout" in capfd.readouterr().out
    assert main(["adopt", str(out), "target=tiny", FULL, f"out={back}"]) == 0
    before, after = (load_drafter(folder, target).state_dict() for folder in (native, back))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "arguments,says",
    [
        (["export", "format=vllm"], "checkpoint and out must both be given"),
        (["export", "checkpoint=NATIVE", "out=OUT", "format=vlm"], "Did you mean 'vllm'"),
        (["export", "checkpoint=NATIVE", "out=OUT", "format=speculators"], "can be written as native, vllm, medusa"),
        (["export", "checkpoint=NATIVE", "out=OUT", "format=gguf"], "eagle3 or draft_model, got medusa"),
        (["export", "checkpoint=NATIVE", "out=OUT", "dtype=bfloat16"], "dtype must be null with format=native"),
        (["export", "checkpoint=NATIVE", "out=OUT", "format=vllm", "dtype=int8"], "dtype must be float32, bfloat16"),
        (["export", "checkpoint=NATIVE", "out=OUT", "format=vllm", "vocabulary=x"], "vocabulary must be null"),
        (["export", "checkpoint=NATIVE", "out=OUT", "format=vllm", "tokens=0"], "tokens must be at least 1"),
        (["inspect"], "folder must be a drafter's folder, got none"),
        (["inspect", "OUT"], "which is none"),
        (["adopt", "NATIVE", "target=tiny"], "folder and out must both be given"),
        (["adopt", "NATIVE", "target=tiny", "out=OUT"], "got a native one; load it as it is"),
        (["check", "NATIVE", "engine=vlm"], "Did you mean 'vllm'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(arguments, says, native, tmp_path, capfd):
    out = tmp_path / "out"
    filled = [a.replace("NATIVE", str(native)).replace("OUT", str(out)) for a in arguments]
    assert main(filled) == 2
    error = capfd.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_pushing(native, tmp_path, monkeypatch, capfd):
    done = []

    class Api:
        def create_repo(self, name, **options):
            done.append((name, options))

        def upload_folder(self, **options):
            done.append(options["folder_path"])
            return "https://hub/me/mine"

    monkeypatch.setattr(hub, "HfApi", Api)
    out = tmp_path / "out"
    assert main(["export", f"checkpoint={native}", "format=vllm", f"out={out}", "hub=me/mine"]) == 0
    assert done == [("me/mine", {"private": True, "exist_ok": True}), out]
    assert "pushed to https://hub/me/mine" in capfd.readouterr().out


def test_a_hub_that_refuses_is_one_sentence(native, monkeypatch):
    class Api:
        def create_repo(self, name, **_):
            raise OSError("no network\nat all")

    monkeypatch.setattr(hub, "HfApi", Api)
    with pytest.raises(UserError, match=r"hub must be a repository you may write to, got 'x/y': no network; log in"):
        hub.push(native, "x/y")


def test_what_is_told_to_serve(native):
    assert export.served_name("meta-llama/Llama-3.1-8B-Instruct") == "meta-llama/Llama-3.1-8B-Instruct"
    config = json.loads((native / "config.json").read_text())
    assert config["target"]["name"] == "tiny-llama"
