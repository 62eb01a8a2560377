"""The bench command: parts run one after the other, a broken one is reported, finished ones survive an interruption."""

import json
import sys
import types

import pytest

import bench.__main__ as command
from bench import history
from bench.history import begin, save
from bench.record import Measurement, Options


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def parts(monkeypatch):
    """Stand-ins for the parts; a test replaces what each does. ``calls`` notes who ran."""
    calls = []

    def stand_in(name):
        def run(options):
            calls.append((name, options))
            return [Measurement(part=name, name="speed", value=2.0, unit="x", bar=1.5, at_least=True)]

        module = types.ModuleType(f"bench.{name}")
        module.run = run
        monkeypatch.setitem(sys.modules, f"bench.{name}", module)
        return module

    modules = {name: stand_in(name) for name in ("one", "two", "three")}
    monkeypatch.setattr(command, "PARTS", tuple(modules))
    return types.SimpleNamespace(calls=calls, **modules)


def result(folder):
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


def test_all_parts_run_in_order_with_the_options_given(parts, tmp_path, capsys):
    assert command.main(["--threads", "1", "--engine", "eager", "--out", str(tmp_path)]) == 0
    assert [name for name, _ in parts.calls] == ["one", "two", "three"]
    assert {options for _, options in parts.calls} == {Options(target="smollm2", threads=1, engine="eager")}
    found = result(tmp_path)
    assert found["complete"]
    assert [part["name"] for part in found["parts"]] == ["one", "two", "three"]
    assert found["parts"][0]["measurements"][0]["value"] == 2.0
    assert {"commit", "dirty"} == set(found["provenance"]["git"])
    assert found["provenance"]["versions"]["torch"]
    assert found["provenance"]["argv"] == ["bench", "one", "two", "three"]  # no path of this machine
    assert len(found["parts"][0]["load"]) == 3
    assert "3 of 3 bars met" in capsys.readouterr().out


def test_a_failing_part_is_reported_and_hides_none(parts, tmp_path, capsys):
    def broken(options):
        raise RuntimeError("out of [bold]luck")

    parts.two.run = broken
    assert command.main(["--threads", "1", "--out", str(tmp_path)]) == 1
    assert [name for name, _ in parts.calls] == ["one", "three"]
    shown = capsys.readouterr()
    assert "two failed: RuntimeError: out of [bold]luck" in shown.out
    assert "broken" in shown.err  # the traceback
    assert [part["error"] for part in result(tmp_path)["parts"]] == [None, "RuntimeError: out of [bold]luck", None]
    (line,) = history.read_history(tmp_path)
    assert line["failed"] == ["two"]
    assert set(line["figures"]) == {"one/speed", "three/speed"}


def test_a_missing_module_is_a_failing_part(parts, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "PARTS", ("absent", "one"))
    assert command.main(["--threads", "1", "--out", str(tmp_path)]) == 1
    assert [name for name, _ in parts.calls] == ["one"]


def test_a_missed_bar_is_no_failure(parts, tmp_path, capsys):
    parts.one.run = lambda options: [Measurement(part="one", name="slow", value=1.0, unit="x", bar=2, at_least=True)]
    assert command.main(["one", "--threads", "1", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "missed" in shown
    assert "0 of 1 bars met" in shown


def test_an_interrupted_run_keeps_its_parts_and_goes_on(parts, tmp_path, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    working, parts.two.run = parts.two.run, interrupted
    arguments = ["--threads", "1", "--out", str(tmp_path)]
    assert command.main(arguments) == 130
    assert [part["name"] for part in result(tmp_path)["parts"]] == ["one"]
    assert history.read_history(tmp_path) == []
    parts.two.run = working
    assert command.main([*arguments, "--resume"]) == 0
    assert [name for name, _ in parts.calls] == ["one", "two", "three"]  # one was not measured again
    assert result(tmp_path)["complete"]  # in the same file
    (line,) = history.read_history(tmp_path)
    assert set(line["figures"]) == {"one/speed", "two/speed", "three/speed"}
    assert command.main([*arguments, "--resume"]) == 2
    assert "got none" in capsys.readouterr().err


def test_resume_refuses_a_run_with_other_options(parts, tmp_path):
    def interrupted(options):
        raise KeyboardInterrupt

    parts.two.run = interrupted
    assert command.main(["--threads", "1", "--out", str(tmp_path)]) == 130
    assert command.main(["--threads", "1", "--engine", "eager", "--out", str(tmp_path), "--resume"]) == 2


def test_quick_runs_are_not_kept(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    assert command.main(["--quick", "--threads", "1"]) == 0
    assert parts.calls[0][1] == Options(target="tiny", quick=True, threads=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["onee"], "a part must be one of one, two, three, got 'onee'. Did you mean"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--history"], "must hold a history, got none"),
    ],
)
def test_wrong_arguments_are_one_sentence(parts, tmp_path, capsys, arguments, message):
    assert command.main([*arguments, "--out", str(tmp_path)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert parts.calls == []
    assert list(tmp_path.iterdir()) == []


def test_history_shows_how_a_figure_moved(parts, tmp_path, capsys):
    for value in (2.0, 3.0):
        parts.one.run = lambda options, v=value: [Measurement(part="one", name="speed", value=v, unit="x")]
        assert command.main(["one", "--threads", "1", "--out", str(tmp_path)]) == 0
        for path in tmp_path.glob("*.json"):  # two runs within a second must not be one
            path.rename(path.with_name(f"{value}.json"))
        lines = history.read_history(tmp_path)
        (tmp_path / history.HISTORY).write_text("".join(json.dumps(line | {"file": "-"}) + "\n" for line in lines))
    capsys.readouterr()
    assert command.main(["--history", "--out", str(tmp_path)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "one/speed" in line]
    assert row.split() == ["one/speed", "[x]", "2.00", "3.00", "1.50"]


@pytest.mark.slow
@pytest.mark.parametrize("part", command.PARTS)
def test_every_part_runs_on_tiny_shapes(part, tmp_path):
    found = command.run_part(part, Options(target="tiny", quick=True, threads=1))
    assert found.error is None
    assert found.measurements
    assert {m.part for m in found.measurements} == {part}
    assert len({m.name for m in found.measurements}) == len(found.measurements)
    run = begin(Options(), [part])
    run.parts.append(found)
    save(run, tmp_path)
    (line,) = history.read_history(tmp_path)
    assert set(line["figures"]) == {f"{part}/{m.name}" for m in found.measurements}
