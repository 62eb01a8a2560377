"""The two entries and the console script, with the shipped configs."""

import subprocess
import sys
from pathlib import Path

import pytest

from distill.config import describe
from distill.entry import choices
from distill.registry import DRAFTERS
from distill.train import main as train_main
from distill.train.config import TrainConfig
from serve_eval import __main__ as eval_main
from serve_eval import cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Replace the training run by a recorder; returns the list of configs it was given."""
    import distill.train.run

    configs = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(distill.train.run, "run", configs.append)
    return configs


def test_train_reaches_the_run_with_the_values_given(started):
    line = ["drafter=eagle3", "drafter.ttt_steps=5", "loss=kl", "optim.lr=3e-4", "trainer.max_steps=500"]
    assert train_main.main(line) == 0
    [config] = started
    assert (config.drafter["ttt_steps"], config.loss.name, config.optim.lr) == (5, "kl", 3e-4)
    assert config.trainer.max_steps == 500
    assert Path(config.run_dir).name.endswith("-eagle3-smollm2")


def test_sweep_gives_every_run_a_folder(started):
    assert train_main.main(["-m", "optim.lr=1e-4,3e-4", "target=tiny"]) == 0
    assert len({config.run_dir for config in started}) == 2
    assert [config.optim.lr for config in started] == [1e-4, 3e-4]


KNOWN = ", ".join(sorted(DRAFTERS))


@pytest.mark.parametrize(
    "argument,sentence",
    [
        ("foo=1", "unknown option 'foo'"),
        ("+drafter.ttt_stps=4", "unknown option 'drafter.ttt_stps'. Did you mean 'drafter.ttt_steps'?"),
        ("ttt_steps=4", "unknown option 'ttt_steps'. Did you mean 'drafter.ttt_steps'?"),
        ("lr=1e-3", "unknown option 'lr'. Did you mean 'optim.lr'?"),
        ("drafter=eagle4", f"drafter must be one of {KNOWN}, got 'eagle4'. Did you mean 'eagle3'?"),
        ("drafter.name=eagle4", f"drafter must be one of {KNOWN}, got 'eagle4'. Did you mean 'eagle3'?"),
        ("loss=mse", "loss must be one of ce, hard, jsd, kl, lk, reverse_kl, tv, got 'mse'."),
        ("optim.lr=nan", "optim.lr must be a number, got NaN"),
        ("optim.lr=-1", "optim.lr must be above 0, got -1"),
        ("data.temperature=-1", "temperature must"),
        ("data=prompts", "data.path must be given"),
    ],
)
def test_train_refuses(started, capsys, argument, sentence):
    assert train_main.main([argument]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {sentence}")
    assert err.count("\n") == 1
    assert not started
    assert not list(Path().iterdir())


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_in_training_tells_how_to_resume(started, monkeypatch, capsys, stop):
    import distill.train.run

    def interrupted(config):
        try:
            raise KeyboardInterrupt
        finally:
            raise stop(1)  # Lightning leaves with exit(1)

    monkeypatch.setattr(distill.train.run, "run", interrupted)
    assert train_main.main(["run_dir=my run", "target=tiny"]) == 130
    said = "\ninterrupted; resume with: python train.py target=tiny 'run_dir=my run'\n"
    assert capsys.readouterr().err == said


def test_another_exit_is_not_mistaken_for_ctrl_c(started, monkeypatch):
    import distill.train.run

    def leave(config):
        raise SystemExit(3)

    monkeypatch.setattr(distill.train.run, "run", leave)
    with pytest.raises(SystemExit) as caught:
        train_main.main(["target=tiny"])
    assert caught.value.code == 3


def test_train_help_explains_every_option(capsys):
    assert train_main.main(["--help"]) == 0
    text = capsys.readouterr().out
    options = describe(TrainConfig, parts=train_main.drafter_part({}))
    assert len(options) > 50
    for option in options:
        assert f"  {option.path}=" in text
        assert option.help
        assert " ".join(option.help.split()[:3]) in " ".join(text.split())
    for group in ("target", "drafter", "data", "loss", "optim", "trainer", "tracking", "experiment"):
        assert all(f"{group}={name}" in text for name in choices(group))


@pytest.mark.parametrize("task", choices("task"))
def test_eval_help_explains_every_option_of_the_task(task, capsys):
    assert eval_main.main([f"task={task}", "--help"]) == 0
    text = capsys.readouterr().out
    for option in describe(eval_main.task_module(task).Config):
        assert f"  {option.path}=" in text
        assert option.help
    assert all(f"task={name}" in text for name in choices("task"))


@pytest.mark.parametrize(
    "arguments,sentence",
    [
        (["task=bnch"], "task must be one of "),
        (["task=bench", "temprature=0"], "unknown option 'temprature'. Did you mean 'temperature'?"),
        (["task=bench", "tree=star"], "tree must be one of calibrated, chain, "),
        (["task=bench", "tree.name=star"], "tree.name must be one of chain, static, calibrated, dynamic, got 'star'"),
        (["task=bench", "temperature=-1", "checkpoint=x"], "temperature must"),
        (
            ["task=bench"],
            "either checkpoint (a run folder or an export folder) or drafter (one without weights) must be given",
        ),
        (["task=bench", "prompts=mtbench,nowhere.jsonl", "checkpoint=x"], "prompts"),
    ],
)
def test_eval_refuses(arguments, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert eval_main.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {sentence}")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_sweep_of_a_task_writes_into_folders_of_its_own(monkeypatch, tmp_path):
    configs = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(eval_main.task_module("bench"), "run", configs.append)
    assert eval_main.main(["-m", "checkpoint=x", "temperature=0,1", "out=here"]) == 0
    assert [config.out for config in configs] == [
        "here/0-checkpoint=x-temperature=0",
        "here/1-checkpoint=x-temperature=1",
    ]


def test_console_script_lists_refuses_and_hands_on(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert cli.main(["trian"]) == 2
    assert "got 'trian'. Did you mean 'train'?" in capsys.readouterr().err
    assert cli.main(["train", "foo=1"]) == 2
    assert "unknown option 'foo'" in capsys.readouterr().err
    assert cli.main(["eval", "task=none"]) == 2
    assert "task must be one of" in capsys.readouterr().err


@pytest.mark.slow
def test_as_a_process_bad_input_is_one_line_and_code_2():
    done = subprocess.run([sys.executable, "train.py", "foo=1"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown option 'foo'")
    assert done.stderr.count("\n") == 1
