"""Whole runs on a tiny target: resumed equals uninterrupted bit for bit; folders, plans and refusals."""

import csv
import json
import logging
import math
import warnings

import pytest
import torch
import train_tools as tools
import yaml

from distill.config import build, describe
from distill.data import Batches
from distill.drafters.eagle3 import Eagle3
from distill.errors import UserError
from distill.export import load_drafter
from distill.train.callbacks import AfterStep
from distill.train.checkpoint import AtomicCheckpointIO
from distill.train.config import TrainConfig
from distill.train.folder import RunFolder
from distill.train.parallel import World
from distill.train.run import run


@pytest.fixture(autouse=True)
def _ready(monkeypatch):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    tools.in_memory(monkeypatch)


class KilledError(Exception):
    """Stands for a process that dies."""


def kill_after(monkeypatch, step):
    """Die in the middle of the step behind ``step``: after its forward, before its update."""
    from distill.train import module

    plain = module.DraftModule.configure_gradient_clipping

    def clip(self, *args, **kwargs):
        if self.trainer.global_step == step:
            raise KilledError
        plain(self, *args, **kwargs)

    monkeypatch.setattr(module.DraftModule, "configure_gradient_clipping", clip)


def metrics(folder):
    with (folder / "logs" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith("speed/")} for row in rows]


def last_state(folder):
    return AtomicCheckpointIO().load_checkpoint(max((folder / "checkpoints").glob("*.ckpt")))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize(
    "dies, options",
    [
        (4, {"checkpoint_every": 2, "log_every": 5, "decode_every": 6}),  # on a checkpoint nothing else goes with
        (5, {"checkpoint_every": 3, "log_every": 2}),  # two steps behind the checkpoint of a validation
        (2, {"checkpoint_every": 4, "accumulate": 2, "batch_size": 1}),  # before the first checkpoint
        (4, {"checkpoint_every": 1, "accumulate": 3, "batch_size": 1, "decode_every": 2, "log_every": 3}),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(tmp_path, monkeypatch, dies, options):
    run(tools.config(tmp_path / "whole", **options))
    with monkeypatch.context() as patch:
        kill_after(patch, dies)
        with pytest.raises(KilledError):
            run(tools.config(tmp_path / "torn", **options))
    torch.manual_seed(99)  # another process has another random state
    run(tools.config(tmp_path / "torn", **options))

    a, b = last_state(tmp_path / "whole"), last_state(tmp_path / "torn")
    assert a["global_step"] == b["global_step"] == 6
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert same(a[part], b[part]), part
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "torn")
    samples = [(tmp_path / name / "logs" / "samples.jsonl").read_text() for name in ("whole", "torn")]
    assert samples[0] == samples[1]
    indices = [json.loads((tmp_path / name / "checkpoints" / "index.json").read_text()) for name in ("whole", "torn")]
    best = [{k: v for k, v in index["best"]["metrics"].items() if k != "train/minutes"} for index in indices]
    assert best[0] == best[1]
    exports = [tmp_path / name / "export" / "provenance.json" for name in ("whole", "torn")]
    measured = [json.loads(path.read_text())["measured"] for path in exports]
    logged = [row for row in metrics(tmp_path / "whole") if int(row["step"]) <= measured[0]["step"]]
    seen = sum(float(row["train/supervised_tokens"] or 0) for row in logged)
    assert [m["train/tokens"] for m in measured] == [seen, seen], "supervised tokens, those before the interruption too"
    assert all(m["train/minutes"] > 0 for m in measured)
    weights = [(tmp_path / name / "export" / "model.safetensors").read_bytes() for name in ("whole", "torn")]
    assert weights[0] == weights[1]


def test_a_damaged_last_checkpoint_costs_steps_not_the_run(tmp_path, monkeypatch):
    run(tools.config(tmp_path / "whole", checkpoint_every=1))
    with monkeypatch.context() as patch:
        kill_after(patch, 4)
        with pytest.raises(KilledError):
            run(tools.config(tmp_path / "torn", checkpoint_every=1))
    last = tmp_path / "torn" / "checkpoints" / "step-00000004.ckpt"
    last.write_bytes(last.read_bytes()[:1000])
    run(tools.config(tmp_path / "torn", checkpoint_every=1))
    assert same(last_state(tmp_path / "whole")["state_dict"], last_state(tmp_path / "torn")["state_dict"])
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "torn")


def test_a_nan_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    class Poison(AfterStep):
        def after_step(self, trainer, module, step):
            if step == 4:
                with torch.no_grad():
                    module.drafter.fc.weight[0, 0] = float("nan")

    monkeypatch.setattr("distill.train.run.ProgressBar", lambda plan: Poison())
    with pytest.raises(UserError, match=r"must be finite, got nan at step 5, row 8 .*row 9 "):
        run(tools.config(tmp_path / "run", checkpoint_every=2, val_every=2))
    # Step 4's checkpoint was written before the poison.
    assert all(
        torch.isfinite(v).all() for k, v in last_state(tmp_path / "run")["state_dict"].items() if "vocab" not in k
    )
    assert not (tmp_path / "run" / "export").exists()


def test_what_a_finished_run_leaves(tmp_path, monkeypatch):
    result = run(tools.config(tmp_path / "run"))
    names = {p.name for p in result.run_dir.iterdir()}
    assert names == {"config.yaml", "provenance.json", "vocab.json", "plan.json", "checkpoints", "logs", "export"}
    assert set(result.metrics) >= {"step", "val/tau", "val/loss", "export/tau"}
    values = yaml.safe_load((result.run_dir / "config.yaml").read_text())
    assert build(TrainConfig, values) == World().resolve(tools.config(tmp_path / "run"))
    assert values["drafter"]["fc_norm"] is False  # defaults are written, too
    assert json.loads((result.run_dir / "provenance.json").read_text())["data_hash"] == tools.data().data_hash
    vocab = json.loads((result.run_dir / "vocab.json").read_text())
    assert (vocab["size"], 0.3 < vocab["coverage"] < 1) == (tools.W, True)
    rows = metrics(result.run_dir)
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert {"train/loss", "train/acc_1", "train/alpha_0", "train/tau", "optim/lr", "optim/grad_norm"} <= set(rows[0])
    assert [bool(row["val/tau"]) for row in rows] == [False, False, True, False, False, True]
    assert [bool(row["decode/tau"]) for row in rows] == [False, True, False, True, False, True]
    assert not list(result.run_dir.rglob("*.tmp"))
    drafter = load_drafter(result.export_dir, tools.target())
    assert isinstance(drafter, Eagle3)

    monkeypatch.setattr("distill.train.run.load_target", lambda _: pytest.fail("a finished run was begun again"))
    assert run(tools.config(tmp_path / "run")) == result


def test_the_learning_rate_logged_is_the_one_used(tmp_path):
    run(tools.config(tmp_path / "run", optim={"lr": 0.1, "warmup": 2, "min_lr": 0.5, "schedule": "linear"}))
    assert [float(row["optim/lr"]) for row in metrics(tmp_path / "run")] == pytest.approx(
        [0.05, 0.1, 0.0875, 0.075, 0.0625, 0.05]
    )


def test_other_options_are_refused_and_listed(tmp_path):
    config = tools.config(tmp_path / "run")
    RunFolder(tmp_path / "run").open(config)
    with pytest.raises(UserError, match=r"\(optim.lr was 0.01, is now 0.02; trainer.max_steps was 6, is now 7\)"):
        run(tools.config(tmp_path / "run", optim={"lr": 0.02}, max_steps=7))
    RunFolder(tmp_path / "run").open(
        tools.config(tmp_path / "run", tracking={"name": "none"}, evaluate={"n": 0}, keep=5, log_every=3)
    )


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        UserError, match=r"run_dir must be a new folder or one of an earlier run, got .* with notes.txt"
    ):
        run(tools.config(tmp_path))
    with pytest.raises(UserError, match="got the file"):
        run(tools.config(tmp_path / "notes.txt"))
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_other_data_are_refused(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open(tools.config(tmp_path / "run"))
    folder.note_data("a" * 64)
    folder.note_data("a" * 64)
    with pytest.raises(UserError, match=r"begun with \(hash aaaaaaaaaaaaaaaa\), got bbbbbbbbbbbbbbbb"):
        folder.note_data("b" * 64)


def test_runs_without_a_name_never_collide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tools.config("x")
    config.run_dir = None
    folders = []
    for _ in range(3):
        folder = RunFolder.choose(config)
        folder.open(config)
        folders.append(folder.path)
    assert len(set(folders)) == 3
    assert all(path.name.endswith(("eagle3-tiny", "eagle3-tiny-2", "eagle3-tiny-3")) for path in folders)


def test_a_process_started_for_another_device_takes_the_first_ones_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tools.config("x")
    config.run_dir = None
    first = RunFolder.choose(config)
    with first.shared():
        second = World(rank=1, local_rank=1, devices=2)
        config.run_dir = "runs/its-own-idea"  # the entry names a folder by the clock in every process
        assert RunFolder.choose(config, second).path == first.path
    assert RunFolder.choose(config, second).path.name == "its-own-idea"


def test_measuring_leaves_no_trace(tmp_path, monkeypatch):
    """A run whose length was measured trains exactly like one whose length was given."""
    monkeypatch.setattr("distill.train.measure.timed", lambda action, **_: (action(), 1.0)[1])
    measured = tools.config(tmp_path / "measured", max_steps=None, max_time="00:00:09", val_every=3, decode_every=3)
    run(measured)
    plan = json.loads((tmp_path / "measured" / "plan.json").read_text())
    assert plan["max_steps"] == 3  # 3 steps, one set of checks, and the final ones
    assert plan["seconds"] == {"step": 1.0, "val": 1.0, "checkpoint": 1.0, "decode": 1.0}
    run(tools.config(tmp_path / "given", max_steps=3, val_every=3, decode_every=3))
    assert same(last_state(tmp_path / "measured")["state_dict"], last_state(tmp_path / "given")["state_dict"])
    assert metrics(tmp_path / "measured") == metrics(tmp_path / "given")


def test_a_resumed_run_keeps_the_measured_number_of_steps(tmp_path, monkeypatch):
    config = {"max_steps": None, "max_time": 2.0, "val_every": 3, "checkpoint_every": 1}
    monkeypatch.setattr("distill.train.measure.timed", lambda action, **_: (action(), 8.0)[1])
    with monkeypatch.context() as patch:
        kill_after(patch, 1)
        with pytest.raises(KilledError):
            run(tools.config(tmp_path / "run", **config))
    plan = (tmp_path / "run" / "plan.json").read_text()
    monkeypatch.setattr("distill.train.measure.measure", lambda *_: pytest.fail("measured again"))
    run(tools.config(tmp_path / "run", **config))
    assert (tmp_path / "run" / "plan.json").read_text() == plan


def test_bf16_trains(tmp_path):
    result = run(tools.config(tmp_path / "run", precision="bf16"))
    drafter = load_drafter(result.export_dir, tools.target())
    assert drafter.fc.weight.dtype == torch.float32
    assert not torch.equal(drafter.fc.weight, tools.drafter().fc.weight)


def test_without_held_out_prompts_or_tracking(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*isinstance")
        result = run(tools.config(tmp_path / "run", tracking={"name": "none"}, evaluate={"n": 0}))
    assert "export/tau" not in result.metrics
    assert not list((tmp_path / "run" / "logs").iterdir())


def test_epochs_give_the_number_of_steps(tmp_path):
    run(tools.config(tmp_path / "run", max_steps=None, epochs=1.5, accumulate=2))
    steps = json.loads((tmp_path / "run" / "plan.json").read_text())["max_steps"]
    rows = Batches(tools.data(), pack_len=32, max_len=16, batch_size=1).steps_per_epoch
    assert steps == math.ceil(1.5 * rows / 4)


def test_a_small_target_keeps_its_whole_vocabulary(tmp_path):
    config = tools.config(tmp_path / "run")
    config.drafter["draft_vocab_size"] = 32000
    result = run(config)
    written = json.loads((result.export_dir / "config.json").read_text())
    assert written["draft_vocab_size"] == written["config"]["draft_vocab_size"] == tools.V


def test_every_option_is_explained():
    assert all(option.help for option in describe(TrainConfig))
    assert "trainer.max_time" in {option.path for option in describe(TrainConfig)}


def test_unknown_drafters_and_options_are_named():
    values = {"drafter": {"name": "eagle9"}}
    with pytest.raises(UserError, match=r"drafter must be one of .*eagle3.*Did you mean 'eagle3'"):
        build(TrainConfig, values)
    with pytest.raises(UserError, match=r"unknown option 'drafter.ttt_stps'. Did you mean 'drafter.ttt_steps'"):
        build(TrainConfig, {"drafter": {"name": "eagle3", "ttt_stps": 3}})
