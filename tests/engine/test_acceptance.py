"""Trained drafters in real engines: the text is the engine's own, and it keeps as many drafts as our loop.

The drafters are trained here for a few minutes (``conftest.py``); their height does not matter, their agreement does.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import engines
from distill.export.convert import convert
from distill.export.gguf import convert_gguf
from distill.target import TargetConfig
from distill.target.packaged import smollm2_folder
from serve_eval.check import Config, run
from serve_eval.export import Lender

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CASES = [
    *(("vllm", drafter, "vllm") for drafter in ("eagle3", "eagle1", "medusa", "draft_model")),
    ("vllm", "eagle3", "speculators"),
    *(("llama_cpp", drafter, "gguf") for drafter in ("eagle3", "draft_model")),
    *(("openvino", drafter, "openvino") for drafter in ("eagle3", "draft_model")),
]
STEPS = 2000


def written(trained, engine: str, drafter: str, form: str, folder):
    """The export an engine reads."""
    if engines.engine(engine).environment.state() != "ready":
        pytest.skip(f"python -m engines setup {engine}")
    if form == "gguf":
        vocabulary = engines.engine("llama_cpp").prepare_target(smollm2_folder(), "float32")
        return convert_gguf(trained[drafter], folder, str(vocabulary))[0]
    return convert(trained[drafter], folder, form, Lender(str(trained[drafter]), TargetConfig(name="smollm2")))[0]


def config_of(folder, engine: str, checkpoint, **changes) -> Config:
    options = {"limit": 24, "max_new_tokens": 96, **changes}
    target = TargetConfig(name="smollm2", device="cpu")
    return Config(folder=str(folder), engine=engine, checkpoint=str(checkpoint), target=target, **options)


@pytest.mark.parametrize("engine,drafter,form", CASES)
def test_an_engine_accepts_what_we_accept(engine, drafter, form, trained, tmp_path):
    folder = written(trained, engine, drafter, form, tmp_path / "out")
    result = run(config_of(folder, engine, trained[drafter]))
    assert result.fine
    assert result.drafts >= STEPS


def layer_ids(folder):
    edit(folder, lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[3, 16, 28]))


def norm_flag(folder):
    edit(folder, lambda c: c.update(norm_before_residual=True))


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def ids_for_offsets(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))
    save_file(tensors, folder / "model.safetensors")


def no_biases(folder):
    edit(folder, lambda c: c.update(medusa_fc_bias=False))


@pytest.mark.parametrize(
    "drafter,spoil",
    [("eagle3", layer_ids), ("eagle3", norm_flag), ("eagle3", ids_for_offsets), ("medusa", no_biases)],
)
def test_one_wrong_thing_is_seen(drafter, spoil, trained, tmp_path):
    right = written(trained, "vllm", drafter, "vllm", tmp_path / "right")
    wrong = shutil.copytree(right, tmp_path / "wrong")
    spoil(wrong)
    with pytest.raises(SystemExit):
        run(config_of(wrong, "vllm", trained[drafter], limit=12))
