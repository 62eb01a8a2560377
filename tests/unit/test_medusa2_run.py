"""A whole run of Medusa-2: killed and resumed it is bit for bit the same; its export decodes with an adapted target."""

import logging

import pytest
import train_tools as tools
from oracles import stepped
from test_train_run import KilledError, kill_after, last_state, metrics, same

from distill.config import build, to_dict
from distill.decode import Decoder
from distill.export import load_drafter
from distill.sampling import Sampling
from distill.train.config import TrainConfig
from distill.train.run import run
from distill.tree import Chain

pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def _ready(monkeypatch):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    tools.in_memory(monkeypatch)


def config(run_dir):
    values = to_dict(tools.config(run_dir, checkpoint_every=2, decode_every=4))
    values["drafter"] = {"name": "medusa", "heads": 2, "lora_rank": 2, "adapter_warmup": 0.5}
    values["loss"]["name"] = "kl"
    return build(TrainConfig, values)


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(tmp_path, monkeypatch):
    frozen = {key: value.clone() for key, value in tools.target().model.state_dict().items()}
    result = run(config(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        kill_after(patch, 3)
        with pytest.raises(KilledError):
            run(config(tmp_path / "torn"))
    run(config(tmp_path / "torn"))
    a, b = last_state(tmp_path / "whole"), last_state(tmp_path / "torn")
    assert len(a["optimizer_states"][0]["param_groups"]) == 3  # matrices and biases of the heads, and the adapter
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert same(a[part], b[part]), part
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "torn")
    weights = [(tmp_path / name / "export" / "model.safetensors").read_bytes() for name in ("whole", "torn")]
    assert weights[0] == weights[1]

    target = tools.target()
    assert same(dict(target.model.state_dict()), frozen)
    loaded = load_drafter(result.export_dir, target)
    assert float(loaded.adapter.pairs[0].B.weight.detach().abs().max()) > 0
    assert "val/other_0" in result.metrics
    decoder = Decoder(loaded.target, loaded, plan=Chain(2))
    found = decoder.generate([[5, 6, 7]], max_new_tokens=8, ignore_eos=True)
    assert [g.ids for g in found] == stepped(loaded.target, [[5, 6, 7]], 8, Sampling(), stop=())
