import json
import subprocess
import sys

from distill.export import collect
from distill.export.provenance import git_state


def git(folder, *args):
    author = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *author, *args], check=True, capture_output=True)


def test_the_record_is_plain_and_complete():
    record = collect(["train.py", "loss=kl"], {"loss": {"name": "kl"}}, "1234")
    assert json.loads(json.dumps(record)) == record
    assert record["argv"] == ["train.py", "loss=kl"]
    assert record["config"] == {"loss": {"name": "kl"}}
    assert record["data_hash"] == "1234"
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record["versions"]["torch"]
    assert record["hardware"]["cores"] >= 1
    assert record["date"].endswith("+00:00")


def test_the_command_line_is_this_process_by_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "y=1"])
    assert collect()["argv"] == ["x", "y=1"]


def test_commit_and_dirt(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "a")
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == {"commit": state["commit"], "dirty": True}


def test_an_installation_inside_another_repository_has_no_commit(tmp_path):
    git(tmp_path, "init")
    inside = tmp_path / "site-packages"
    inside.mkdir()
    assert git_state(inside) == {"commit": None, "dirty": None}


def test_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == {"commit": None, "dirty": None}
