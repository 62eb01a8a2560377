"""task=data: the whole, its parts and their union, through the entry people use."""

import json

import pytest

from distill.data.store import read_manifest
from serve_eval import __main__ as eval_main

SMALL = ["target=tiny", "data=prompts", "data.max_answer_tokens=8", "data.max_len=96", "data.min_answer_tokens=1"]


@pytest.fixture
def start(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"why {i}"}) + "\n" for i in range(7)))

    def run(*arguments):
        return eval_main.main(["task=data", *SMALL, f"data.path={path}", *arguments])

    return run


def test_parts_merge_into_the_whole(start, tmp_path, capsys):
    assert start(f"data.folder={tmp_path / 'whole'}") == 0
    for number in (1, 2):
        assert start(f"data.folder={tmp_path / 'parts'}", f"data.part={number}/2") == 0
    assert f"part 2/2 written to {tmp_path / 'parts' / 'part-2-of-2'}" in capsys.readouterr().out
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "parts" / "part-2-of-2").rename(elsewhere)
    assert start(f"data.folder={tmp_path / 'parts'}", f"parts=[{elsewhere}]") == 0
    assert "supervised tokens in" in capsys.readouterr().out
    assert read_manifest(tmp_path / "parts").data_hash == read_manifest(tmp_path / "whole").data_hash


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "data.folder must be given"),
        (["data.folder=d", "data.part=1/2", "partial=true"], "parts and partial are for merging"),
        (["data.folder=d", "data.part=3/2"], "data.part must be like 2/8"),
        (["data.folder=d", "data.writer=endpoint"], "data.writer=endpoint and data.endpoint.url go together"),
    ],
)
def test_what_it_refuses(start, arguments, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert start(*arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")
    assert not (tmp_path / "d").exists()
