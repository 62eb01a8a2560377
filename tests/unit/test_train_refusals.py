"""Faults a user found: refused runs leave nothing behind, and nothing is lost or doubled around a run's folder."""

import importlib
import json
from dataclasses import replace

import numpy as np
import pytest
import train_tools as tools

from distill.data import Conversation, DataConfig, PreparedData, prepare
from distill.data.batches import Batches
from distill.drafters.draft_model import DraftModelConfig
from distill.drafters.eagle1 import Eagle1Config
from distill.drafters.eagle3 import Eagle3Config
from distill.drafters.medusa import MedusaConfig
from distill.drafters.prompt_lookup import PromptLookupConfig
from distill.errors import UserError
from distill.export import copy_export, load_drafter, save_drafter
from distill.export.format import flags_sha256
from distill.losses import LossConfig
from distill.registry import drafter_class
from distill.target.tiny import tiny_target
from distill.train.folder import RunFolder
from distill.train.run import result_of, run
from distill.tree import Chain, Dynamic


def test_a_refused_source_leaves_no_folder(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    config = tools.config(tmp_path / "run")
    data = replace(config.data, source="prompts", path=str(tmp_path / "empty.jsonl"))
    with pytest.raises(UserError, match=r"empty\.jsonl"):
        run(replace(config, data=data))
    assert not (tmp_path / "run").exists()


def test_taps_are_refused_before_data_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr("distill.train.run.prepare_together", lambda *_, **__: pytest.fail("data were written first"))
    config = tools.config(tmp_path / "run")
    with pytest.raises(UserError, match=r"drafter\.taps"):
        run(replace(config, drafter={**config.drafter, "taps": [99]}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"n_layers": 99}, r"drafter\.n_layers must be at most"),
        ({"layers": [99]}, r"drafter\.layers must be between"),
        ({"source": "checkpoint", "path": "nowhere/at/all"}, r"drafter\.path must be a local folder"),
    ],
    ids=str,
)
def test_a_draft_model_that_does_not_fit_is_refused_before_data_are_written(options, said, tmp_path, monkeypatch):
    monkeypatch.setattr("distill.train.run.prepare_together", lambda *_, **__: pytest.fail("data were written first"))
    config = replace(tools.config(tmp_path / "run"), drafter={"name": "draft_model", **options})
    with pytest.raises(UserError, match=said):
        run(config)
    assert not (tmp_path / "run").exists()


def test_what_was_worked_for_stays_after_a_refusal(tmp_path):
    config = tools.config(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")

    def work_and_fail():
        with folder.opened(config):
            (folder.path / "data").mkdir()
            (folder.path / "data" / "manifest.json").write_text("{}")
            raise UserError("later")

    with pytest.raises(UserError, match="later"):
        work_and_fail()
    assert (folder.path / "data" / "manifest.json").is_file()
    assert folder.config.is_file()


def test_one_process_at_a_time(tmp_path):
    config = tools.config(tmp_path / "run")
    with RunFolder(tmp_path / "run").opened(config):
        second = RunFolder(tmp_path / "run")
        with pytest.raises(UserError, match="one process at a time"), second.opened(config):
            pytest.fail("two processes in one run")
        assert second.config.is_file()
    with RunFolder(tmp_path / "run").opened(config):
        pass


def test_half_written_files_of_a_killed_process_are_swept(tmp_path):
    config = tools.config(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (folder.path / ".provenance.json.123.tmp").write_text("{")
    with folder.opened(config):
        pass
    (folder.checkpoints / ".index.json.5.tmp").write_text("{")
    (folder.path / ".export.tmp").mkdir()
    with folder.opened(config):
        assert not [path for path in folder.path.rglob(".*.tmp")]


def test_a_killed_export_is_measured_again(tmp_path, monkeypatch):
    """The export appears only with its decoded figure."""
    tools.in_memory(monkeypatch)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("distill.train.run.update_card", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tools.config(tmp_path / "run"))
    assert not (tmp_path / "run" / "export").exists()
    result = run(tools.config(tmp_path / "run"))
    assert result.metrics["export/tau"] >= 1
    assert not [path for path in (tmp_path / "run").rglob(".*.tmp")]
    provenance = tmp_path / "run" / "export" / "provenance.json"
    provenance.write_text("{}")
    assert result_of(RunFolder(tmp_path / "run")).metrics == {}


def test_a_target_that_writes_nothing_usable_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module("distill.data.prepare"), "BARREN", 12)
    monkeypatch.setattr("distill.data.writer.is_degenerate", lambda ids: True)
    config = DataConfig(n_conversations=4, slots=4, max_prompt_tokens=12, max_answer_tokens=8, max_len=96, pack_len=96)
    with pytest.raises(UserError, match="must write usable conversations, got none among its last 1[2-9]"):
        prepare(config, tiny_target(vocab_size=100, tokenizer=True), tmp_path / "data", lambda _: None)


def test_answers_longer_than_the_longest_are_refused():
    with pytest.raises(UserError, match=r"min_answer_tokens must be at most data\.max_answer_tokens \(32\), got 100"):
        DataConfig(min_answer_tokens=100, max_answer_tokens=32)


def test_nothing_supervised_within_max_len_is_refused():
    mask = np.arange(20) >= 10
    data = PreparedData.from_conversations(
        [Conversation(ids=np.arange(20, dtype=np.int32), loss_mask=mask, key=1)], vocab_size=32, validation=0.0
    )
    assert Batches(data, pack_len=11, max_len=11, batch_size=1).step(0)
    with pytest.raises(UserError, match="supervised tokens within"):
        Batches(data, pack_len=10, max_len=10, batch_size=1)


def test_sizes_that_cannot_be_meant_are_refused():
    with pytest.raises(UserError, match=r"loss\.chunk must be at least 1, got 0"):
        LossConfig(chunk=0)
    with pytest.raises(UserError, match="at most 4096 nodes"):
        Dynamic(top_k=100_000, depth=4, total=10)
    for length in (513, 10**9):
        with pytest.raises(UserError, match=f"tree.length must be >= 1 and at most 512, got {length}"):
            Chain(length)
    for name, least in (("intermediate_size", 1), ("draft_vocab_size", 2)):
        with pytest.raises(UserError, match=f"drafter.{name} must be >= {least}, got {least - 1}"):
            tools.drafter(**{name: least - 1})


def test_a_damaged_export_is_a_sentence(tmp_path):
    folder = save_drafter(tools.drafter(), tmp_path / "export", provenance={})
    (folder / "provenance.json").unlink()
    with pytest.raises(UserError, match=r"must hold provenance\.json"):
        copy_export(folder, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["target"]["fingerprint"] = None
    config["flags_sha256"] = flags_sha256(config)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"target\.fingerprint must be a mapping"):
        load_drafter(folder, tools.target())


@pytest.mark.parametrize("name", [None, 5, [], {"a": 1}])
def test_a_drafter_name_that_is_no_name(name):
    with pytest.raises(UserError, match="drafter must be one of draft_model, eagle1"):
        drafter_class(name)


@pytest.mark.parametrize(
    "cls,options,says",
    [
        (Eagle1Config, {"num_layers": 10**6}, "num_layers must be at most 1000, got 1000000"),
        (Eagle1Config, {"intermediate_size": 10**12}, "intermediate_size must be at most 262144"),
        (Eagle1Config, {"step_decay": 0.5}, "step_decay must be 1 with drafter.steps=1"),
        (Eagle3Config, {"ttt_steps": 10**6}, "ttt_steps must be at most 1000"),
        (MedusaConfig, {"blocks": 10**8}, "blocks must be at most 1000"),
        (MedusaConfig, {"lora_rank": 10**6}, "lora_rank must lie between 0 and 4096"),
        (DraftModelConfig, {"source": "config", "n_layers": 10**6}, "n_layers must be at most 1000"),
        (DraftModelConfig, {"on_policy_tokens": 5}, "on_policy_tokens must be 64 with drafter.on_policy=0"),
        (PromptLookupConfig, {"max_ngram": 10**9}, "1 <= min <= max <= 64, got 1 and 1000000000"),
    ],
)
def test_options_that_would_take_the_machine_or_change_nothing(cls, options, says):
    with pytest.raises(UserError, match=says):
        cls(**options)


def test_data_nobody_can_draft_in_are_refused(tmp_path, monkeypatch):
    """Answers of one token: every position is spoken about by the target alone."""
    ids, mask = np.arange(4, 12, dtype=np.int32), np.arange(8) == 7
    data = PreparedData.from_conversations(
        [Conversation(ids=ids, loss_mask=mask, key=i + 1) for i in range(20)], vocab_size=tools.V, validation=0.2
    )
    monkeypatch.setattr("distill.train.run.prepared_data", lambda *_: data)
    monkeypatch.setattr("distill.train.run.held_out_prompts", lambda *_, **__: [])
    with pytest.raises(UserError, match="positions where eagle3 can begin to draft, got none in 6 steps"):
        run(tools.config(tmp_path / "run"))
    assert not (tmp_path / "run" / "export").exists()
