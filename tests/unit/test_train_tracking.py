import csv
import errno
import json
import logging
import types
from pathlib import Path

import pytest
import train_tools as tools

from distill.train.callbacks import ProgressBar
from distill.train.config import TrackingConfig
from distill.train.run import run
from distill.train.schedule import Plan
from distill.train.tracking import CsvTracker, Sample, Tracker, WandbTracker, make_trackers


def rows(folder):
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def silent(_):
    pass


def test_one_row_per_step_and_columns_as_they_come(tmp_path):
    tracker = CsvTracker(tmp_path)
    tracker.log_metrics({"a": 1.0}, 1)
    tracker.log_metrics({"a": 2.0, "b": 0.5}, 2)
    tracker.log_metrics({"c": 7.0}, 2)
    tracker.log_metrics({"a": 3.0}, 3)
    assert rows(tmp_path) == [
        {"step": "1", "a": "1.0", "b": "", "c": ""},
        {"step": "2", "a": "2.0", "b": "0.5", "c": "7.0"},
        {"step": "3", "a": "3.0", "b": "", "c": ""},
    ]


def test_a_resumed_run_writes_the_later_rows_again(tmp_path):
    tracker = CsvTracker(tmp_path)
    for step in (1, 2, 3):
        tracker.log_metrics({"a": float(step)}, step)
        tracker.log_samples([Sample(prompt="p", answer=f"ä\u2028\n{step}", tau=1.0)], step)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("4,4.")  # a row torn by a crash
    resumed = CsvTracker(tmp_path, from_step=2)
    resumed.log_metrics({"a": 30.0}, 3)
    assert [(r["step"], r["a"]) for r in rows(tmp_path)] == [("1", "1.0"), ("2", "2.0"), ("3", "30.0")]
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().split("\n")[:-1]]
    assert [(s["step"], s["answer"]) for s in samples] == [(1, "ä\u2028\n1"), (2, "ä\u2028\n2")]


def test_a_full_disk_is_said_once_and_then_ignored(tmp_path, monkeypatch):
    tracker = CsvTracker(tmp_path)
    tracker.log_metrics({"a": 1.0}, 1)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.warns(UserWarning, match="tracking with csv stopped, training goes on: .*No space left"):
        tracker.log_metrics({"a": 2.0}, 2)
    tracker.log_metrics({"a": 3.0}, 3)
    tracker.log_samples([], 3)


def test_the_null_tracker_takes_everything(tmp_path):
    (tracker,) = make_trackers(TrackingConfig(name="none"), tmp_path, from_step=0, say=silent)
    assert type(tracker) is Tracker
    tracker.log_hyperparams({"a": 1})
    tracker.log_metrics({"a": 1.0}, 1)
    tracker.log_samples([Sample(prompt="p", answer="a", tau=1.0)], 1)
    tracker.log_export(tmp_path)
    tracker.close()
    assert not list(tmp_path.iterdir())


class FakeWandb(types.ModuleType):
    """Records what is logged; can be without a key, or without network."""

    def __init__(self, *, key=True, network=True):
        super().__init__("wandb")
        self.key, self.network = key, network
        self.inits, self.logged, self.artifacts, self.tables, self.finished = [], [], [], [], 0
        self.Settings = dict
        self.config = types.SimpleNamespace(update=lambda values, **_: self.logged.append(("config", values)))
        self.id, self.dir = "abc", "/x/offline-run-1/files"

    def login(self, **_):
        return self.key

    def init(self, **options):
        if options["mode"] == "online" and not self.network:
            raise ConnectionError("no route to host")
        self.inits.append(options)
        return self

    def log(self, metrics, step=None):
        if not self.network and self.inits[-1]["mode"] == "online":
            raise ConnectionError("no route to host")
        self.logged.append((step, metrics))

    def Table(self, columns, data):  # noqa: N802 - wandb's name
        return {"columns": columns, "data": data}

    def Artifact(self, name, type):  # noqa: N802, A002 - wandb's names
        return types.SimpleNamespace(name=name, type=type, add_dir=self.artifacts.append)

    def log_artifact(self, artifact):
        self.artifacts.append(artifact.name)

    def finish(self):
        self.finished += 1


def fake(monkeypatch, **options):
    import sys

    monkeypatch.delenv("WANDB_MODE", raising=False)
    module = FakeWandb(**options)
    errors = types.ModuleType("wandb.errors")
    errors.Error = type("Error", (Exception,), {})
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setitem(sys.modules, "wandb.errors", errors)
    return module


def test_wandb_gets_everything_under_the_folders_name(tmp_path, monkeypatch):
    wandb = fake(monkeypatch)
    config = TrackingConfig(name="wandb", project="p", entity="e")
    _, tracker = make_trackers(config, tmp_path / "run7", from_step=0, say=silent)
    tracker.log_hyperparams({"optim": {"lr": 1}})
    tracker.log_metrics({"train/loss": 1.0}, 3)
    tracker.log_samples([Sample(prompt="p", answer="a", tau=1.5)], 3)
    tracker.log_export(tmp_path / "export")
    tracker.finalize("success")
    assert wandb.finished == 0  # Lightning's end comes before the export
    tracker.close()
    assert {k: wandb.inits[0][k] for k in ("project", "entity", "name", "mode", "resume")} == {
        "project": "p",
        "entity": "e",
        "name": "run7",
        "mode": "online",
        "resume": "allow",
    }
    table = {"columns": ["prompt", "answer", "tau"], "data": [["p", "a", 1.5]]}
    assert wandb.logged == [("config", {"optim": {"lr": 1}}), (3, {"train/loss": 1.0}), (3, {"samples": table})]
    assert wandb.artifacts == [str(tmp_path / "export"), "drafter-abc"]
    assert wandb.finished == 1


def test_wandb_continues_a_resumed_run_and_keeps_others_apart(tmp_path, monkeypatch):
    wandb = fake(monkeypatch)
    for folder in ("a", "a", "b"):
        WandbTracker(TrackingConfig(name="wandb"), tmp_path / folder, say=silent)
    ids = [options["id"] for options in wandb.inits]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    "options, config, words",
    [
        ({"key": False}, {}, ["wandb logs offline to"]),
        ({}, {"offline": True}, ["wandb logs offline to"]),
        ({"network": False}, {}, ["wandb cannot be reached (no route to host)", "wandb logs offline to"]),
    ],
)
def test_wandb_goes_offline_with_a_note(tmp_path, monkeypatch, options, config, words):
    wandb, said = fake(monkeypatch, **options), []
    WandbTracker(TrackingConfig(name="wandb", **config), tmp_path, say=said.append)
    assert wandb.inits[-1]["mode"] == "offline"
    assert [any(word in line for line in said) for word in words] == [True] * len(words)
    assert "wandb sync /x/offline-run-1" in said[-1]


def test_wandb_follows_its_own_variable(tmp_path, monkeypatch):
    wandb, said = fake(monkeypatch), []
    monkeypatch.setenv("WANDB_MODE", "disabled")
    WandbTracker(TrackingConfig(name="wandb"), tmp_path, say=said.append)
    assert wandb.inits[-1]["mode"] == "disabled"
    assert not said


def test_wandb_losing_the_network_does_not_stop_training(tmp_path, monkeypatch):
    wandb = fake(monkeypatch)
    tracker = WandbTracker(TrackingConfig(name="wandb"), tmp_path, say=silent)
    wandb.network = False
    with pytest.warns(UserWarning, match="tracking with wandb stopped, training goes on: no route"):
        tracker.log_metrics({"a": 1.0}, 1)
    tracker.log_metrics({"a": 1.0}, 2)
    tracker.log_export(tmp_path)
    tracker.close()
    assert not wandb.artifacts


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_wandb_itself_works_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    tools.in_memory(monkeypatch)
    run(tools.config(tmp_path / "run", tracking={"name": "wandb", "offline": True}))
    assert list((tmp_path / "run" / "logs" / "wandb").glob("offline-run-*/*.wandb"))
    assert (tmp_path / "run" / "logs" / "metrics.csv").is_file()


def test_progress_says_how_long_it_takes(monkeypatch):
    said, clock = [], iter([100.0, 110.0, 116.0, 130.0])
    monkeypatch.setattr("distill.train.callbacks.say", said.append)
    monkeypatch.setattr("distill.train.callbacks.time.monotonic", lambda: next(clock))
    bar = ProgressBar(Plan(max_steps=10, val_every=9, checkpoint_every=9, decode_every=9, seconds={}), seconds=15)
    trainer = types.SimpleNamespace(global_step=4, is_global_zero=True)
    module = types.SimpleNamespace(metrics={"train/loss": 2.5})
    bar.on_train_start(trainer, module)
    bar.after_step(trainer, module, 5)  # too early for a line
    bar.after_step(trainer, module, 6)  # two steps in 16 s, four to go
    assert said == ["step 6/10  loss 2.5  0.5 min left"]
    bar.after_step(trainer, module, 10)
    assert said[-1].startswith("step 10/10")
