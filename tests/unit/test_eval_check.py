"""Acceptance of an engine beside ours: what is compared, what is refused, what is written."""

import io
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import serve_eval.check as check
from distill.decode import Decoder
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.errors import UserError
from distill.export import save_drafter
from distill.export.convert import convert
from distill.target import TargetConfig
from distill.target.tiny import tiny_target
from distill.tree import Chain
from distill.vocab import DraftVocab
from engines import EngineResult

TARGET = tiny_target(vocab_size=64, hidden=16, layers=8, tokenizer=False)
PROMPTS = [[3, 4, 5], [7, 8, 9, 10], [20, 21]]


@pytest.fixture
def drafter():
    torch.manual_seed(3)
    return Eagle3(Eagle3Config(draft_vocab_size=64), TARGET, DraftVocab(torch.arange(64), 64)).eval()


class Fake:
    """An engine that decodes with our loop, and may count or write otherwise."""

    formats = {"eagle3": ("vllm",)}
    environment = SimpleNamespace(require=lambda: None)

    def __init__(self, drafter, *, positions=True, off=0, spoil=False):
        self.drafter, self.positions, self.off, self.spoil = drafter, positions, off, spoil

    def run(self, _target, draft, _method, prompts, *, max_new_tokens, k):
        decoder = Decoder(TARGET, self.drafter if draft else None, plan=Chain(k) if draft else None)
        done = decoder.generate(list(prompts), max_new_tokens=max_new_tokens)
        steps = [step for g in done for step in g.steps] if draft else []
        kept = [sum(s.accepted >= d for s in steps) + self.off * (d == 1) for d in range(1, k + 1)]
        ids = [list(g.ids) for g in done]
        if self.spoil and draft:
            ids[0][-1] ^= 1
        return EngineResult(
            ids=ids,
            version="0",
            drafts=len(steps) if self.positions else None,
            drafted=sum(s.offered for s in steps),
            accepted=sum(s.accepted for s in steps) + self.off,
            accepted_per_position=tuple(kept) if self.positions else None,
        )


def checked(drafter, monkeypatch, tmp_path, **fake):
    native = save_drafter(drafter, tmp_path / "native", provenance={})
    folder, _ = convert(native, tmp_path / "vllm", "vllm", lambda _: None)
    monkeypatch.setattr(check, "engine", lambda _: Fake(drafter, **fake))
    monkeypatch.setattr(check, "load_target", lambda _: TARGET)
    monkeypatch.setattr(check, "target_folder", lambda _: tmp_path)
    monkeypatch.setattr(check, "load_prompts", lambda *_, **__: PROMPTS)
    monkeypatch.setattr(check, "opening", lambda prompt: prompt)
    monkeypatch.setattr(check, "encode", lambda _, prompt, **__: prompt)
    config = check.Config(
        folder=str(folder), target=TargetConfig(name="here"), max_new_tokens=24, out=str(tmp_path / "check.json")
    )
    console = Console(record=True, width=120, file=io.StringIO())
    if not fake.get("off") and not fake.get("spoil"):
        return check.run(config, console=console), console.export_text()
    with pytest.raises(SystemExit, match="1"):
        check.run(config, console=console)
    return None, console.export_text()


@pytest.mark.parametrize("positions", [True, False])
def test_the_same_drafter_is_alike(drafter, monkeypatch, tmp_path, positions):
    result, text = checked(drafter, monkeypatch, tmp_path, positions=positions)
    assert result.fine
    assert result.largest == 0
    assert len(result.ours) == (3 if positions else 1)
    assert "alike; largest difference 0.000" in text
    assert "3 of 3 prompts" in text
    record = json.loads((tmp_path / "check.json").read_text())
    assert record["fine"] is True
    assert record["ours"] == result.ours


@pytest.mark.parametrize(
    "fault,says",
    [
        ({"off": 20}, r"NOT alike (tolerance 0.02)"),
        ({"off": 20, "positions": False}, r"NOT alike (tolerance 0.02)"),
        ({"spoil": True}, "2 of 3 prompts"),
    ],
)
def test_what_differs_is_told_and_fails(drafter, monkeypatch, tmp_path, fault, says):
    result, text = checked(drafter, monkeypatch, tmp_path, **fault)
    assert result is None
    assert says in text
    assert json.loads((tmp_path / "check.json").read_text())["fine"] is False


@pytest.mark.parametrize(
    "options,says",
    [({"max_new_tokens": 0}, "max_new_tokens"), ({"length": 0}, "length"), ({"limit": 0}, "limit"),
     ({"tolerance": 0.0}, "tolerance"), ({"tolerance": float("nan")}, "tolerance")],
)  # fmt: skip
def test_impossible_options(options, says):
    with pytest.raises(UserError, match=f"{says} must be"):
        check.Config(**options)


def test_no_folder_and_an_engine_that_cannot(tmp_path, drafter):
    with pytest.raises(UserError, match="folder must be a drafter's folder, got none"):
        check.run(check.Config())
    native = save_drafter(drafter, tmp_path / "native", provenance={})
    folder, _ = convert(native, tmp_path / "vllm", "vllm", lambda _: None)
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()
    (folder / "drafter.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="checkpoint must name the native export"):
        check.run(check.Config(folder=str(folder), engine="llama_cpp"))
