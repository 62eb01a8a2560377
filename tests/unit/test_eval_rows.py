"""Result files: schema, refusal of other versions, atomic writing, and the journal of a running benchmark."""

import json

import pytest

from distill.errors import UserError
from serve_eval.journal import Journal
from serve_eval.rows import SCHEMA_VERSION, Record, Row, read_records, read_rows, to_line, write_jsonl

REQUIRED = {
    *("arm", "target", "drafter", "tree", "verifier", "temperature", "prompts", "n_prompts", "new_tokens", "tau"),
    *("accept_by_depth", "speedup_median", "speedup_total", "speedup_ci", "speedup_vs_hf", "tokens_per_s", "ttft_s"),
    *("match_rate", "peak_memory_bytes", "schema_version", "provenance"),
}


def row(**changes):
    fields = {
        "arm": "chain-3",
        "kind": "spec",
        "target": "tiny",
        "drafter": "eagle3",
        "tree": "chain-3",
        "verifier": "match",
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "prompts": "set",
        "category": "all",
        "n_prompts": 2,
        "n_turns": 3,
        "repeats": 1,
        "new_tokens": 30,
        "n_steps": 14,
        "tau": 2.0,
        "tau_prompt_mean": 2.1,
        "accept_by_depth": [0.6, 0.5],
        "speedup_median": 1.2,
        "speedup_median_ci": [1.0, 1.4],
        "speedup_total": 1.25,
        "speedup_ci": [1.1, 1.3],
        "speedup_end_to_end": 1.15,
        "speedup_vs_hf": None,
        "tokens_per_s": 50.0,
        "ttft_s": 0.1,
        "match_rate": 1.0,
        "tie_rate": 0.0,
        "peak_memory_bytes": 1 << 20,
        "provenance": {"date": "2026-01-01"},
    }
    return Row(**(fields | changes))


def record(id="p", arm="ar", **changes):
    fields = {"prompts": "set", "category": "all", "turn": 0, "prompt_tokens": 3, "ids": [5, 6]}
    fields |= {"emitted": [1], "accepted": [0], "offered": [0], "ttft_s": [0.1], "decode_s": [0.2]}
    return Record(id=id, arm=arm, **(fields | changes))


def test_a_row_has_every_promised_field_and_survives_the_disk(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    write_jsonl(path, [row(), row(arm="ar", kind="ar", drafter=None, tree=None)])
    assert set(json.loads(path.read_text().splitlines()[0])) >= REQUIRED
    assert read_rows(path) == [row(), row(arm="ar", kind="ar", drafter=None, tree=None)]
    assert [p.name for p in path.parent.iterdir()] == ["results.jsonl"]


@pytest.mark.parametrize("version", [None, 0, SCHEMA_VERSION + 1, "1"])
def test_another_schema_version_is_refused(tmp_path, version):
    path = tmp_path / "results.jsonl"
    path.write_text(to_line(row()) + json.dumps(json.loads(to_line(row())) | {"schema_version": version}) + "\n")
    with pytest.raises(
        UserError, match=rf"results\.jsonl line 2: schema version must be {SCHEMA_VERSION}, got {version}"
    ):
        read_rows(path)


def test_unknown_missing_and_broken_fields_are_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(json.loads(to_line(row())) | {"acceptance": 1}) + "\n")
    with pytest.raises(UserError, match="unknown acceptance"):
        read_rows(path)
    item = json.loads(to_line(row()))
    del item["tau"]
    path.write_text(json.dumps(item) + "\n")
    with pytest.raises(UserError, match="line 1: .*tau"):
        read_rows(path)
    path.write_text('{"schema_version": 1')
    with pytest.raises(UserError, match="line 1: .*invalid JSON"):
        read_rows(path)
    with pytest.raises(UserError, match="must exist"):
        read_rows(tmp_path / "none.jsonl")


def test_values_no_json_reader_takes_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="Out of range"):
        write_jsonl(tmp_path / "results.jsonl", [row(tau=float("nan"))])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="out must be a folder that can be written"):
        write_jsonl(tmp_path / "file" / "results.jsonl", [row()])


def test_records_survive_the_disk(tmp_path):
    write_jsonl(tmp_path / "records.jsonl", [record(pieces=["é", "\n"])])
    assert read_records(tmp_path / "records.jsonl") == [record(pieces=["é", "\n"])]


def test_journal_resumes_finished_prompts_and_measures_torn_ones_again(tmp_path):
    path, expected = tmp_path / "part.jsonl", {("set", "p"): 2, ("set", "q"): 2}
    journal = Journal(path, {"seed": 0}, expected)
    assert journal.done == {}
    journal.add([record(), record(arm="x")])
    journal.add([record("q"), record("q", arm="x")])
    path.write_text(path.read_text()[:-20])  # the process died while writing
    again = Journal(path, {"seed": 0}, expected)
    assert again.done == {("set", "p"): [record(), record(arm="x")]}
    again.add([record("q"), record("q", arm="x")])
    assert set(Journal(path, {"seed": 0}, expected).done) == set(expected)


def test_journal_of_other_settings_is_discarded(tmp_path):
    path, expected = tmp_path / "part.jsonl", {("set", "p"): 1}
    Journal(path, {"seed": 0}, expected).add([record()])
    assert Journal(path, {"seed": 1}, expected).done == {}
    assert Journal(path, {"seed": 0}, expected).done == {}
