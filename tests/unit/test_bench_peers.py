"""The peers part of the bench: what it says without a peer, and how it talks to one (a stand-in, no peer needed)."""

import math
import sys
import textwrap
from pathlib import Path

import pytest

from bench import peers
from bench.peers.protocol import Arm
from bench.record import Options

ROOT = Path(peers.ROOT)

STAND_IN = """
import sys
from bench.peers.protocol import Link
link = Link()
print("a library that prints")
held = []
for turn, _ in enumerate(link.turns({"trained_parameters": int(sys.argv[1])})):
    if turn == 2:
        sys.exit("out of luck")
    held.append(bytes(b"x") * 2**25)
    link.answer(seconds=0.5 * (turn + 1), loss=2.0)
"""


@pytest.fixture
def start(tmp_path):
    """Start a stand-in that answers two steps, then fails; everything is closed at the end."""
    script, arms = tmp_path / "arm.py", []
    script.write_text(textwrap.dedent(STAND_IN))

    def start(name, trained=7, source=script):
        command = [sys.executable, str(source), str(trained)]
        arms.append(Arm(name, command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}))
        return arms[-1]

    yield start
    for arm in arms:
        arm.close()


@pytest.mark.parametrize("named", [None, "/nowhere/python"])
def test_one_sentence_where_the_peer_is_missing(monkeypatch, tmp_path, named):
    monkeypatch.setattr(peers, "DEFAULT", tmp_path / "python")
    monkeypatch.delenv(peers.VARIABLE, raising=False)
    if named:
        monkeypatch.setenv(peers.VARIABLE, named)
    (row,) = peers.run(Options(target="tiny", quick=True))
    assert math.isnan(row.value)
    assert row.bar is None
    assert row.note.startswith("not measured: ")
    assert peers.VARIABLE in row.note
    assert row.note.endswith("see bench/peers/README.md")
    assert ("/nowhere/python" in row.note) == (named is not None)


def test_the_variable_goes_before_the_default(monkeypatch, tmp_path):
    default, named = tmp_path / "default", tmp_path / "named"
    default.touch()
    named.touch()
    monkeypatch.setattr(peers, "DEFAULT", default)
    monkeypatch.delenv(peers.VARIABLE, raising=False)
    assert peers.find_python() == default
    monkeypatch.setenv(peers.VARIABLE, str(named))
    assert peers.find_python() == named


def test_an_arm_answers_steps_and_says_why_it_ended(start):
    """What it prints does not disturb the protocol; its memory is counted from when everything was built."""
    arm = start("stand-in")
    assert arm.about == {"trained_parameters": 7}
    first, second = arm.step(), arm.step()
    assert (first["seconds"], first["loss"], second["seconds"]) == (0.5, 2.0, 1.0)
    if Path("/proc/self/status").exists():
        assert 2**25 <= first["grown"] < 2**26 <= second["grown"] < 2**26 + 2**25
    with pytest.raises(RuntimeError, match="stand-in must answer, got exit code 1: .*out of luck"):
        arm.step()


def test_an_arm_that_cannot_start_says_why(start, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name")
    with pytest.raises(
        RuntimeError, match="peer must answer, got exit code 1: .*No module named 'nothing_of_this_name'"
    ):
        start("peer", source=broken)


def test_arms_take_turns(start):
    answers = peers.take_turns({"ours": start("ours"), "speculators": start("speculators")}, turns=1)
    assert {name: [answer["seconds"] for answer in each] for name, each in answers.items()} == {
        "ours": [0.5, 1.0],
        "speculators": [0.5, 1.0],
    }


def _answers(seconds, loss=2.0, grown=2**20):
    return [{"seconds": s, "loss": loss, "grown": grown} for s in seconds]


SETTING = peers.Setting(steps=3, length=1200)
ABOUT = {"ours": {"trained_parameters": 7}, "speculators": {"trained_parameters": 7}}


def test_ratios_are_taken_within_a_turn_without_the_first():
    answers = {"ours": _answers([9, 1, 2, 4]), "speculators": _answers([1, 3, 8, 8], grown=3 * 2**20)}
    speed, memory = peers.figures(SETTING, answers, ABOUT)
    assert speed.name == "tokens/s over speculators, K=3, L=1200, bf16, head trained"
    assert speed.value == 3  # of 3, 4 and 2
    assert speed.detail["tokens_per_s"] == {"ours": 600, "speculators": 150}
    assert memory.value == 3


@pytest.mark.parametrize(
    "loss, trained, sentence",
    [(2.2, 7, "the same loss"), (math.nan, 7, "the same loss"), (2, 8, "the same para")],
)
def test_unequal_work_is_no_figure(loss, trained, sentence):
    answers = {"ours": _answers([1, 1]), "speculators": _answers([1, 1], loss=loss)}
    with pytest.raises(RuntimeError, match=sentence):
        peers.figures(SETTING, answers, {**ABOUT, "speculators": {"trained_parameters": trained}})


@pytest.mark.engine
def test_quick_form():
    """With the peer installed: both arms start from the same loss on tiny shapes."""
    speed, memory = peers.run(Options(target="tiny", threads=1, quick=True))
    assert speed.value > 0
    assert memory.value > 0
