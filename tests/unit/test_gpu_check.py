"""``make gpu-check`` without a GPU: it runs to the end, survives its parts, and its checks can fail."""

import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import gpu_attention, gpu_check, gpu_decode, gpu_errors, gpu_lossless, gpu_parity, gpu_report
from bench.gpu_parts import PARTS, Fault, Part, Skipped
from bench.gpu_setup import SHAPES, Setting, habit_model
from distill.decode import Decoder
from distill.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("hydra", "omegaconf", "datasets", "wandb", "gguf", "rich", "pytest", "accelerate", "matplotlib", "flash_attn")
# yaml is not among them: transformers and lightning need it themselves.
BARE = f"""
import importlib.metadata, sys

absent = {ABSENT!r}
sys.modules.update(dict.fromkeys(absent))
known = importlib.metadata.Distribution.from_name.__func__


def from_name(cls, name):
    if name.lower().replace("-", "_").removesuffix("_core") in absent:
        raise importlib.metadata.PackageNotFoundError(name)
    return known(cls, name)


importlib.metadata.Distribution.from_name = classmethod(from_name)
"""


@pytest.fixture(scope="module")
def setting():
    return Setting.of("cpu", "tiny")


# -- the whole script


@pytest.mark.slow
def test_runs_on_a_machine_with_pytorch_transformers_and_lightning_only(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BARE)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    run = partial(subprocess.run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    for name in ABSENT[:3]:
        assert "ModuleNotFoundError" in run([sys.executable, "-c", f"import {name}"]).stderr
    out = tmp_path / "deep" / "results.json"
    done = run([sys.executable, "-m", "bench.gpu_check", "--out", str(out), "--device", "cpu"])
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["complete"]
    assert report["machine"]["device"] == "cpu"
    assert report["machine"]["shape"] == "tiny"
    assert [part["name"] for part in report["parts"]] == [part.name for part in PARTS]
    status = {part["name"]: part["status"] for part in report["parts"]}
    assert {name for name, state in status.items() if state == "skipped"} == {
        "host waits",
        "other gpu-marked tests",
        "transformers, static cache",
    }
    assert set(status.values()) == {"passed", "measured", "skipped"}
    figures = [figure for part in report["parts"] for figure in part["figures"]]
    taus = {f"tau {n}, {engine}" for n in range(1, 7) for engine in ("eager", "fast")}
    assert taus <= {figure["name"] for figure in figures}
    assert all(figure["value"] > 0 for figure in figures if figure["name"] != "one drafted token")
    assert "No GPU: this shows that the script runs; its figures mean nothing." in done.stdout


# -- the supervisor, with workers that import nothing heavy

PARTS_OF_A_TEST = """
import os, time

from bench import gpu_check
from bench.gpu_parts import Fault, Skipped


class Setting:
    # Counts its worker's parts; stands for a device that always answers.
    count = 0

    def answers(self):
        return True

    def clear(self):
        self.count += 1


def work(pipe):
    pipe.send({"device": "fake"})
    gpu_check.serve(pipe, Setting())


def work_without_device(pipe):
    pipe.send({"error": "no such device"})


def good(setting):
    return {"count": setting.count}


def wrong(setting):
    raise Fault("three is not four")


def absent(setting):
    raise Skipped("not here")


def crash(setting):
    raise RuntimeError("first line\\nsecond line")


def die(setting):
    os._exit(7)


def hang(setting):
    time.sleep(60)
"""


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    (tmp_path / "parts_of_a_test.py").write_text(PARTS_OF_A_TEST)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "parts_of_a_test", raising=False)
    module = importlib.import_module("parts_of_a_test")

    def run(*names, time_left=200.0, start="work", **seconds):
        parts = [
            Part(name=n, kind="check", address=f"parts_of_a_test:{n}", seconds=seconds.get(n, 30.0)) for n in names
        ]
        outcomes, machines = [], []
        gpu_check.supervise(
            parts,
            getattr(module, start),
            deadline=time.monotonic() + time_left,
            ready=machines.append,
            note=outcomes.append,
        )
        return outcomes, machines

    return run


@pytest.mark.slow
def test_a_part_that_fails_dies_or_hangs_costs_no_other(supervised):
    outcomes, machines = supervised("good", "wrong", "absent", "crash", "die", "good", "hang", "good", hang=0.5)
    assert [(o.name, o.status) for o in outcomes] == [
        ("good", "passed"),
        ("wrong", "failed"),
        ("absent", "skipped"),
        ("crash", "failed"),
        ("die", "failed"),
        ("good", "passed"),
        ("hang", "failed"),
        ("good", "passed"),
    ]
    assert [o.note for o in outcomes[1:5]] == [
        "three is not four",
        "not here",
        "RuntimeError: first line",
        "the worker died with exit code 7",
    ]
    assert "second line" in outcomes[3].detail["traceback"]
    assert outcomes[6].note.startswith("ended after 2 s without an answer")
    assert len(machines) == 3  # one worker, one after the death, one after the hang
    assert [o.detail["count"] for o in outcomes if o.name == "good"] == [0, 0, 0]


def test_no_part_is_begun_that_would_not_end_in_time(supervised):
    outcomes, machines = supervised("hang", "hang", hang=5.0, time_left=4.0)
    assert [o.status for o in outcomes] == ["skipped", "skipped"]
    assert outcomes[0].note == "5 s wanted, 4 s left"
    assert machines == []


@pytest.mark.parametrize("left, status", [(0.0, "skipped"), (1000.0, "failed")])
def test_a_part_cut_short_by_the_time_limit_is_no_fault(left, status):
    """One that had all its patience and did not end is; the worker is ended either way."""

    class Silent:
        def send(self, part):
            pass

        def poll(self, limit):
            assert limit == pytest.approx(min(left, 30.0), abs=0.1)
            return False

    worker = object.__new__(gpu_check._Worker)
    worker.pipe = Silent()
    part = Part(name="slow", kind="check", address="", seconds=10.0)
    outcome = worker.run(part, time.monotonic() + left)
    assert (outcome.status, outcome.broken) == (status, True)


def test_a_worker_that_cannot_start_is_an_error(supervised):
    with pytest.raises(gpu_check.StartError, match="no such device"):
        supervised("good", start="work_without_device")


def test_a_device_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(UserError, match="--device must be one this PyTorch .* sees, got cuda; use cpu or auto"):
        Setting.of("cuda", "auto")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--minutes", "0"], "--minutes must be above 0, got 0.0"),
        (["--only", "everything"], "invalid choice: 'everything'"),
        (["--shape", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(["--out", str(tmp_path / "x.json"), *arguments])
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_exit_code_and_results_after_a_failed_part(tmp_path, monkeypatch, capsys):
    def supervise(parts, start, *, deadline, ready, note):
        ready({"device": "cuda:0", "shape": "llama-3.1-8b", "gpu": {"name": "A GPU"}})
        for part, status in zip(parts, ("passed", "failed"), strict=False):
            note(
                gpu_check.Outcome(name=part.name, kind=part.kind, status=status, note="" if status == "passed" else "x")
            )
            on_disk = json.loads((tmp_path / "r.json").read_text())
            assert on_disk["parts"][-1]["name"] == part.name
            assert not on_disk["complete"]

    monkeypatch.setattr(gpu_check, "supervise", supervise)
    assert gpu_check.main(["--out", str(tmp_path / "r.json")]) == 1
    text = capsys.readouterr().out
    assert "llama-3.1-8b on cuda:0 (A GPU)" in text
    assert "No GPU" not in text
    assert f"FAILED {PARTS[1].name}: x" in text
    assert json.loads((tmp_path / "r.json").read_text())["complete"]
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_report_shows_value_limit_and_bar():
    figure = {
        "part": "decode",
        "name": "plain",
        "value": 123.4,
        "unit": "tokens/s",
        "limit": 250.0,
        "limit_name": "bandwidth",
        "bar": 100.0,
        "met": True,
        "note": "batch 1",
    }
    part = {"name": "a", "kind": "measure", "status": "measured", "seconds": 1.0, "note": "", "figures": [figure]}
    text = gpu_report.summary({"machine": {}, "parts": [part], "seconds": 3.0}, Path("out.json"))
    row = next(line for line in text.splitlines() if line.startswith("decode: plain"))
    assert row.split() == [
        "decode:",
        "plain",
        "123",
        "tokens/s",
        "250",
        "bandwidth",
        "bar",
        "100",
        "met;",
        "batch",
        "1",
    ]


# -- the checks can fail


def test_lossless_notices_a_wrong_token(setting, monkeypatch):
    """A verifier that emits the runner-up now and then."""
    from distill.decode import loop

    right = loop.match

    def wrong(*args, **kwargs):
        accepted = right(*args, **kwargs)
        return type(accepted)(path_BN=accepted.path_BN, n_B=accepted.n_B, next_B=(accepted.next_B + 1) % 61)

    monkeypatch.setattr(loop, "match", wrong)
    monkeypatch.setattr(gpu_lossless, "PLANS", gpu_lossless.PLANS[:1])
    with pytest.raises(Fault, match="tokens wrong; .*the target says"):
        gpu_lossless.eager(setting)


def test_lossless_notices_that_nothing_was_drafted(setting, monkeypatch):
    monkeypatch.setattr(gpu_lossless, "_arms", lambda *_: iter([(None, None)]))
    with pytest.raises(Fault, match="no drafted token was ever accepted"):
        gpu_lossless.eager(setting)


def test_bf16_text_notices_another_text(setting, monkeypatch):
    monkeypatch.setattr(Decoder, "generate", lambda self, prompts, **_: [type("Out", (), {"ids": [1, 2]})()])
    with pytest.raises(Fault, match="plain, .*not the model's text"):
        gpu_lossless.bf16_text(setting)


def test_attention_notices_a_key_too_many(setting, monkeypatch):
    right = gpu_attention.segments
    monkeypatch.setattr(gpu_attention, "segments", lambda doc: [(r, max(s - 1, 0), e) for r, s, e in right(doc)])
    with pytest.raises(Fault, match="output float32"):
        gpu_attention.training_attention(setting)
    with pytest.raises(Fault, match="all float32"):
        gpu_attention.document_attention(setting)


def test_losses_notice_a_wrong_weight(setting, monkeypatch):
    right = gpu_parity.total
    equal = lambda steps, *args, **options: right([replace(s, weight=1.0) for s in steps], *args, **options)  # noqa: E731
    monkeypatch.setattr(gpu_parity, "total", equal)
    with pytest.raises(Fault, match=r"loss \(ce, draft vocabulary\): relative error"):
        gpu_parity.chunked_losses(setting)


def test_cache_check_notices_a_wrong_path(setting, monkeypatch):
    right = gpu_parity.KVCache.commit
    monkeypatch.setattr(gpu_parity.KVCache, "commit", lambda self, path, n, **k: right(self, path.flip(1), n, **k))
    with pytest.raises(Fault, match="does not hold what was committed"):
        gpu_parity.cache_commits(setting)


def test_errors_take_no_number_for_an_answer():
    errors = gpu_errors.Errors.none()
    errors.add("nan", torch.tensor([float("nan")]), torch.ones(1), 1.0)
    errors.add("shape", torch.ones(2), torch.ones(1), 1.0)
    errors.add("fine", torch.ones(3), torch.ones(3), 0.0)
    assert len(errors.faults) == 2
    with pytest.raises(Fault, match="nan: relative error inf"):
        errors.result()


# -- the random model


def test_habit_model_says_its_text_by_a_wide_margin():
    model = habit_model(SHAPES["tiny"], torch.device("cpu"), torch.bfloat16)
    prompt = model.prompt(8)
    text = model.text(prompt, 40)
    kept = set(model.kept_W.tolist())
    assert set(text) <= kept
    assert len(set(text)) == 40  # no short loop
    logits_LV = model.target.model(input_ids=torch.tensor([prompt + text])).logits[0, 7:-1].float()
    assert logits_LV.argmax(-1).tolist() == text
    top_L2 = logits_LV.topk(2).values
    assert float((top_L2[:, 0] - top_L2[:, 1]).min()) > 1.0  # bf16 steps there: 1/16


@pytest.mark.slow
def test_forced_acceptance_is_exact(setting):
    figures = gpu_decode.forced(setting)
    new = setting.shape.new_tokens - 1
    assert [figure.detail["tau"] for figure in figures] == [new / -(-new // (n + 1)) for n in range(6)]


def test_parts_for_a_gpu_skip_where_there_is_none(setting):
    for part in (gpu_decode.host_reads, gpu_decode.transformers_static, gpu_lossless.marked_tests):
        with pytest.raises(Skipped):
            part(setting)
