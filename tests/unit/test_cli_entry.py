"""The shared entry: every kind of bad command line ends as one sentence and exit code 2; sweeps never collide."""

import errno
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from distill import entry
from distill.config import build, describe, opt

FILES = {
    "train.yaml": """\
defaults:
  - _self_
  - hydra: quiet
  - drafter: small
  - experiment: null
run_dir: null
sets: []
seed: 0
""",
    "drafter/small.yaml": "# A small one.\nname: small\nttt_steps: 7\n",
    "drafter/large.yaml": "# A large one.\nname: large\nttt_steps: 9\n",
    "experiment/fast.yaml": "# @package _global_\nseed: 5\n",
}


@dataclass(kw_only=True)
class Drafter:
    name: str = opt("small", "which")
    ttt_steps: int = opt(7, "how many steps")


@dataclass(kw_only=True)
class Config:
    drafter: Drafter = field(default_factory=Drafter)
    run_dir: str | None = opt(None, "where")
    sets: list[str] = opt([], "names")
    seed: int = opt(0, "keys everything")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Call the entry in an empty folder; returns (code, what it printed, jobs) where jobs are (config, folder)."""
    shipped = entry.config_dir() / "hydra" / "quiet.yaml"
    configs, work = tmp_path / "configs", tmp_path / "work"
    for name, text in {**FILES, "hydra/quiet.yaml": shipped.read_text()}.items():
        (configs / name).parent.mkdir(parents=True, exist_ok=True)
        (configs / name).write_text(text)
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(entry, "config_dir", lambda: configs)

    def call(*argv, action=lambda config: None):
        jobs = []

        def task(values, job):
            config = build(Config, values)
            jobs.append((config, entry.run_folder(config.run_dir, job, parts=(config.drafter.name,))))
            action(config)

        code = entry.launch(task, config_name="train", help=lambda overrides: "the help", argv=argv)
        return code, "".join(capsys.readouterr()), jobs

    return call


BAD = {
    "foo=1": "unknown option 'foo'; there are drafter, run_dir, sets, seed",
    "+foo=1": "unknown option 'foo'; there are drafter, run_dir, sets, seed",
    "++foo=1": "unknown option 'foo'; there are drafter, run_dir, sets, seed",
    "drafter.stps=4": "unknown option 'drafter.stps'. Did you mean 'drafter.ttt_steps'?",
    "+drafter.stps=4": "unknown option 'drafter.stps'. Did you mean 'drafter.ttt_steps'?",
    "++drafter.stps=4": "unknown option 'drafter.stps'. Did you mean 'drafter.ttt_steps'?",
    "ttt_steps=4": "unknown option 'ttt_steps'. Did you mean 'drafter.ttt_steps'?",
    "seed.x=1": "seed must be a whole number, got {'x': 1}",
    "drafter=lrge": "drafter must be one of large, small, got 'lrge'. Did you mean 'large'?",
    "drafter=3": "the configuration cannot be composed: Config group override must be a string or a list. Got int",
    "experiment=none": "experiment must be one of fast, got 'none'.",
    "+experiment=fast": "experiment is given twice; write experiment=NAME once, without a plus",
    "seed=a": "seed must be a whole number, got 'a'",
    "seed=1,2": "seed must be a whole number, got '1,2'; several values to try in turn need -m",
    "seed=???": "seed must be given",
    "seed=${nope}": "the configuration cannot be resolved: Interpolation key 'nope' not found",
    "~nope": "the configuration cannot be composed: Could not delete from config. 'nope' does not exist.",
    "train": "the command line takes name=value, got 'train'; see --help",
    "sets=[a": "override 'sets=[a' cannot be read (no viable alternative at input '[a'); quote values with",
    "--seed=3": "unknown flag '--seed'; write seed=3, without dashes (see --help)",
    "--fast": "unknown flag '--fast'; options are written name=value, without dashes (see --help)",
    "hydra.sweeper.foo=1": "unknown option 'hydra.sweeper.foo'; see --help",
    "hydra/launcher=nope": "hydra/launcher must be one of basic, got 'nope'.",
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_command_line_is_one_sentence_and_code_2(run, argument):
    code, err, jobs = run(argument)
    assert code == 2
    assert err.startswith(f"error: {BAD[argument]}")
    assert err.count("\n") == 1
    assert not jobs
    assert not list(Path().iterdir())


def test_interpolation_on_the_command_line(run):
    code, _, [(config, _)] = run("drafter.ttt_steps=${seed}", "seed=4")
    assert (code, config.drafter.ttt_steps) == (0, 4)


@pytest.mark.parametrize("argument", ["foo=1", "drafter=nope"])
def test_bad_sweep_leaves_nothing(run, argument):
    code, err, _ = run("-m", argument, "seed=1")
    assert code == 2
    assert err.count("\n") == 1
    assert [path for path in Path().rglob("*") if path.is_file()] == []


def test_cfg_job_prints_the_composition_and_refuses_unknown_keys(run):
    code, out, _ = run("--cfg", "job", "seed=3")
    assert code == 0
    assert "seed: 3" in out
    assert run("--cfg", "job", "foo=1")[:2] == (2, "error: unknown option 'foo'; see --help\n")


def test_values_reach_the_task(run):
    code, _, [(config, folder)] = run("drafter=large", "drafter.ttt_steps=3", "sets=a,b", "experiment=fast")
    assert code == 0
    assert config == Config(drafter=Drafter(name="large", ttt_steps=3), sets=["a", "b"], seed=5)
    assert folder.parent == Path("runs")
    assert folder.name.endswith("-large")
    assert not list(Path().iterdir())  # Hydra wrote nothing


@pytest.mark.parametrize("text", ["Why is it so?", "Well, why?", "it's 3 = 3", "a: b", "(x)", "50%, or so!"])
def test_a_sentence_needs_no_quotes_of_its_own(run, text):
    code, said, jobs = run(f"run_dir={text}")
    assert (code, said) == (0, "")
    assert jobs[0][0].run_dir == text


def test_default_folders_of_the_same_second_differ(run, monkeypatch):
    folders = []
    for _ in range(3):
        _, _, [(_, folder)] = run()
        folder.mkdir(parents=True)
        folders.append(folder)
    assert len(set(folders)) == 3


@pytest.mark.parametrize("arguments", [[], ["run_dir=mine"], ["run_dir=a,b"]])
def test_jobs_of_a_sweep_have_folders_of_their_own(run, arguments):
    code, _, jobs = run("-m", "seed=1,2", "drafter=small,large", *arguments)
    folders = [folder for _, folder in jobs]
    assert code == 0
    assert len(set(folders)) == len(folders) == (8 if arguments == ["run_dir=a,b"] else 4)
    assert folders[0].name == "0-seed=1-drafter=small"
    if arguments == ["run_dir=mine"]:
        assert {folder.parent for folder in folders} == {Path("mine")}


def test_a_failing_job_of_a_sweep_does_not_stop_the_others(run):
    code, err, jobs = run("-m", "seed=a,2")
    assert code == 2
    assert err == "error: seed must be a whole number, got 'a'\n"
    assert [config.seed for config, _ in jobs] == [2]


def test_bugs_keep_their_traceback(run):
    def bug(config):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(action=bug)


def test_ctrl_c_says_how_to_go_on(run):
    def stop(config):
        raise KeyboardInterrupt("resume with: this")

    assert run(action=stop)[:2] == (130, "\ninterrupted; resume with: this\n")


def test_a_full_disk_is_a_sentence(run):
    def full(config):
        raise OSError(errno.ENOSPC, "No space left on device", "x/model.tmp")

    assert run(action=full)[:2] == (2, "error: x/model.tmp cannot be written: No space left on device\n")


def test_help_page_shows_groups_options_and_the_composed_defaults(run):
    text = entry.help_page(
        summary="What it does.",
        usage="run",
        groups=entry.config_groups("train"),
        options=describe(Config),
        defaults={"seed": 3},
        examples=["run seed=1"],
    )
    for part in (
        "What it does.",
        "drafter=large",
        "A large one.",
        "keys everything",
        "drafter.ttt_steps=7",
        "run seed=1",
    ):
        assert part in text
    assert run("--help")[0] == 0


@pytest.mark.parametrize(
    "text,expected", [("a/b c", "a-b-c"), ("optim.lr=1e-4", "optim.lr=1e-4"), ("", "run"), ("../", "run")]
)
def test_slug_is_one_safe_name(text, expected):
    assert entry.slug(text) == expected


def test_a_task_may_compose_another_config(run):
    """The demo composes the training config while Hydra runs the evaluation's."""
    seeds = []
    code, printed, _ = run(action=lambda config: seeds.append(entry.compose_values("train", ["seed=3"])["seed"]))
    assert (code, seeds) == (0, [3]), printed


def test_a_file_that_is_no_yaml_is_named(run):
    (entry.config_dir() / "drafter" / "small.yaml").write_text("name: small\n  ttt_steps: 7\n")
    code, printed, jobs = run()
    assert code == 2
    assert not jobs
    assert "small.yaml must be YAML, got a fault in line 2" in str(printed)
    with pytest.raises(entry.UserError, match=r"small\.yaml must be YAML"):
        entry.compose_values("train")


def test_the_sweep_flag_may_come_last(run):
    code, printed, jobs = run("seed=1,2", "-m")
    assert code == 0, printed
    assert [config.seed for config, _ in jobs] == [1, 2]
