"""The demo's stages: order, skipping, resumption, budgets handed on; the stages themselves are stand-ins here."""

import dataclasses
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from distill.errors import UserError
from serve_eval import demo
from serve_eval.bench import BenchResult
from serve_eval.rows import Row, write_jsonl


def row(arm, kind, tau):
    fields = {
        f.name: None for f in dataclasses.fields(Row) if f.name not in ("settings", "provenance", "schema_version")
    }
    fields |= {"arm": arm, "kind": kind, "tau": tau, "prompts": "mtbench", "category": "all", "speedup_total": 1.25}
    return Row(**fields)


@pytest.fixture
def calls(monkeypatch):
    """Replace the work of every stage by the writing of its output."""
    log = []

    class Manifest:
        stopped = "max_minutes"

    def prepare(config, target, folder, progress):
        log.append(("data", config.max_minutes))
        folder.mkdir(parents=True)

    def train(config):
        log.append(("train", config.trainer.max_time))
        export = Path(config.run_dir) / "export"
        export.mkdir()
        (export / "config.json").write_text("{}")

    def bench(config, *, quiet):
        log.append(("evaluate", config.max_minutes, config.checkpoint, [t.name for t in (config.tree, *config.trees)]))
        rows = [row("ar", "ar", 1.0), row("chain-3", "spec", 1.9)]
        write_jsonl(Path(config.out) / "results.jsonl", rows)
        return BenchResult(rows=rows, records=[], costs=None, out=Path(config.out))

    def report(config):
        log.append(("report", config.results))
        (Path(config.results) / "report.html").write_text("page")

    monkeypatch.setattr(demo, "load_target", lambda config: log.append(("target", config.name)))
    monkeypatch.setattr(demo, "prepare", prepare)
    monkeypatch.setattr(demo, "read_manifest", lambda folder: Manifest() if folder.is_dir() else None)
    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo.benchmark, "run", bench)
    monkeypatch.setattr(demo.report, "run", report)
    monkeypatch.setattr(demo, "update_card", lambda folder, figures: log.append(("card", figures)))
    monkeypatch.setattr(demo, "print_summary", lambda *a, **k: None)
    return log


def run(tmp_path, **changes):
    out = io.StringIO()
    config = replace(demo.Config(run_dir=str(tmp_path / "demo"), experiment="tiny-eagle3"), **changes)
    demo.run(config, console=Console(file=out, width=200, color_system=None))
    return out.getvalue()


def test_stages_run_in_order_with_their_budgets(tmp_path, calls):
    text = run(tmp_path, data_minutes=2.0, train_minutes=3.0, eval_minutes=1.0)
    names = [name for name, *_ in calls]
    assert list(dict.fromkeys(names)) == ["target", "data", "train", "evaluate", "card", "report"]
    assert ("data", 2.0) in calls
    assert ("train", 3.0) in calls
    assert ("evaluate", 1.0, str(tmp_path / "demo"), ["chain", "calibrated", "dynamic"]) in calls
    assert ("card", {"mtbench, chain-3: tau": 1.9, "mtbench, chain-3: speedup": 1.25}) in calls
    assert "[1/5] target:" in text
    assert "about 7:35 min for what is left" in text
    assert "1.90 tokens" in text
    assert str(tmp_path / "demo" / "report.html") in text


def test_a_finished_demo_does_nothing_again(tmp_path, calls):
    run(tmp_path)
    calls.clear()
    text = run(tmp_path)
    assert calls == []
    assert text.count("already there") == 5


def test_an_interrupted_demo_goes_on_with_the_stage_that_was_left(tmp_path, calls, monkeypatch):
    working = demo.train

    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    calls.clear()
    monkeypatch.setattr(demo, "train", working)
    text = run(tmp_path)
    assert [name for name, *_ in calls] == ["train", "evaluate", "card", "report"]
    assert text.count("already there") == 2


def test_budgets_may_be_left_to_the_experiment_but_not_be_nothing(tmp_path, calls):
    run(tmp_path, data_minutes=None, train_minutes=None, eval_minutes=None)
    assert ("data", None) in calls
    assert ("train", None) in calls
    with pytest.raises(UserError, match="train_minutes must be above 0"):
        demo.Config(train_minutes=0)
