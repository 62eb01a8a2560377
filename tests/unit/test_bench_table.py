"""What the bench shows and keeps: verdicts, numbers, tables at two widths, the history file."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from bench.history import HISTORY, PartResult, begin, commit_label, read_history, save
from bench.record import Measurement, Options
from bench.table import history_table, number, print_run
from distill.errors import UserError


def measurement(**fields):
    return Measurement(**({"part": "decoding", "name": "plain", "value": 1.0, "unit": "x"} | fields))


def shown(thing, width):
    console = Console(file=io.StringIO(), width=width)
    print_run(thing, console) if hasattr(thing, "parts") else console.print(thing)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "value, at_least, met", [(2.0, True, True), (1.9, True, False), (2.0, False, True), (2.1, False, False)]
)
def test_a_bar_is_met_from_its_own_side(value, at_least, met):
    assert measurement(value=value, bar=2.0, at_least=at_least).met is met


def test_what_could_not_be_measured_meets_no_bar():
    assert measurement(value=math.nan, bar=2.0, at_least=False).met is False
    assert measurement(value=math.nan).met is None
    with pytest.raises(AssertionError, match="direction"):
        measurement(bar=2.0)


@pytest.mark.parametrize(
    "value, text", [(1.234, "1.23"), (-0.5, "-0.50"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12,346")]
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_unknown_numbers_are_a_dash():
    assert (number(math.nan), number(None)) == ("-", "-")


@pytest.fixture
def run():
    run = begin(Options(threads=2), ["decoding"])
    figures = [
        measurement(value=1.9, bar=1.8, at_least=True, limit=3.0, limit_name="bandwidth", note="beside [it]"),
        measurement(name="v(8) [all]", value=1.44, unit="steps", bar=1.3, at_least=False),
        measurement(name="peak", value=math.nan, unit="MiB", note="no such thing here"),
    ]
    run.parts.append(PartResult(name="decoding", seconds=61.0, load=[0.1, 0.1, 0.1], measurements=figures))
    return run


def test_a_table_fits_80_columns_without_breaking_a_figure(run):
    lines = shown(run, 80).splitlines()
    assert max(map(len, lines)) <= 80
    (plain,) = [line for line in lines if line.strip().startswith("plain")]
    assert plain.split() == ["plain", "1.90", "x", ">=", "1.8", "met", "3.00"]
    (wide,) = [line for line in lines if "v(8) [all]" in line]
    assert wide.split()[2:] == ["1.44", "steps", "<=", "1.3", "missed"]
    assert "beside" not in "".join(lines)
    assert "1 of 2 bars met" in lines[-1]


def test_notes_appear_where_there_is_room(run):
    text = shown(run, 120)
    assert "bandwidth" in text
    assert "beside [it]" in text


def test_a_busy_machine_is_pointed_out(run):
    assert "other work" not in shown(run, 80)
    run.parts[0].load = [3.2, 1.0, 1.0]
    assert "load average 3.2 at the start: other work ran, too" in shown(run, 80)


def test_a_run_is_saved_whole_and_once(run, tmp_path):
    path = save(run, tmp_path)
    assert save(run, tmp_path) == path
    item = json.loads(path.read_text())
    assert item["parts"][0]["measurements"][2]["value"] is None  # NaN is no JSON
    (line,) = read_history(tmp_path)
    assert line["figures"]["decoding/plain"] == {"value": 1.9, "unit": "x", "met": True}
    assert line["figures"]["decoding/v(8) [all]"]["met"] is False
    assert line["figures"]["decoding/peak"] == {"value": None, "unit": "MiB", "met": None}
    assert path.name == line["file"]
    assert commit_label(run.provenance["git"]) in path.name


def test_whatever_a_part_hands_over_can_be_saved(run, tmp_path):
    odd = {
        "array": np.float32(0.5),
        "flag": np.bool_(True),
        "tensor": torch.tensor(3),
        "shape": (1, math.inf),
        4: Path("a"),
    }
    run.parts[0].measurements = [measurement(value=np.float64(2.0), bar=1.0, at_least=True, detail=odd)]
    (found,) = json.loads(save(run, tmp_path).read_text())["parts"][0]["measurements"]
    assert found["detail"] == {"array": 0.5, "flag": True, "tensor": 3, "shape": [1, None], "4": "a"}
    (line,) = read_history(tmp_path)
    assert line["figures"]["decoding/plain"] == {"value": 2.0, "unit": "x", "met": True}


def test_an_incomplete_run_is_not_history(run, tmp_path):
    run.wanted.append("training")
    save(run, tmp_path)
    assert not (tmp_path / HISTORY).exists()


@pytest.mark.parametrize(
    "line", [b'{"figures": 3}', b"\xff\xfe", b'{"figures": {}}', b'{"setting": {}, "figures": {}}', b"[]"]
)
def test_a_damaged_history_is_named(run, tmp_path, line):
    save(run, tmp_path)
    with (tmp_path / HISTORY).open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(UserError, match="damaged line 2"):
        read_history(tmp_path)


@pytest.mark.parametrize(
    "git, label",
    [
        ({"commit": "0123456789", "dirty": False}, "0123456"),
        ({"commit": "0123456789", "dirty": True}, "0123456+"),
        ({"commit": None, "dirty": None}, "nocommit"),
    ],
)
def test_commits_are_short(git, label):
    assert commit_label(git) == label


def line(value, *, commit="aaaaaaa", threads=2, **figures):
    setting = {"target": "tiny", "engine": "fast", "threads": threads, "quick": False, "cpu": "c"}
    named = {"part/speed": {"value": value, "unit": "x", "met": None}} | figures
    return {"date": "2026-01-02T03:04:05", "commit": commit, "setting": setting, "figures": named, "file": commit}


def test_history_compares_like_with_like():
    other = line(100.0, commit="bbbbbbb", threads=8)
    new = {"value": None, "unit": "MiB", "met": None}
    text = shown(history_table([line(1.0), other, line(2.0, commit="ccccccc", **{"part/peak [all]": new})]), 100)
    rows = {row.split()[0]: row.split() for row in text.splitlines() if "part/" in row}
    assert rows["part/speed"] == ["part/speed", "[x]", "1.00", "2.00", "2.00"]
    assert rows["part/peak"] == ["part/peak", "[all]", "[MiB]", "-"]
    assert "bbbbbbb" not in text
    assert "1 run with other settings left out" in " ".join(text.split())


def test_history_shows_the_last_runs_only():
    text = shown(history_table([line(float(i), commit=f"commit{i}") for i in range(1, 9)], columns=3), 100)
    assert [f"commit{i}" in text for i in range(1, 9)] == [False] * 5 + [True] * 3
