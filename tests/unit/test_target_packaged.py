import errno
import os

import pytest
import torch
from safetensors import SafetensorError

from distill.errors import UserError
from distill.target import TargetConfig, load_target, packaged
from distill.target.packaged import smollm2_folder
from distill.target.tiny import tiny_target


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    return tmp_path / "targets"


@pytest.fixture
def converter(monkeypatch, tmp_path):
    """Stand in for the download and the conversion: a tiny model is written instead."""
    calls = []

    def convert(gguf, folder):
        calls.append(gguf)
        target = tiny_target(tokenizer=True, layers=1)
        target.model.save_pretrained(folder)
        target.tokenizer.save_pretrained(folder)

    monkeypatch.setattr(packaged, "fetch_wheel_member", lambda *args: tmp_path / "model.gguf")
    monkeypatch.setattr(packaged, "convert", convert)
    monkeypatch.setattr(packaged, "sync_folder", lambda folder: None)  # slow where the disk is busy
    return calls


def test_conversion_happens_once(cache, converter, capsys):
    folder = smollm2_folder()
    assert folder == smollm2_folder() == cache / "smollm2-b179c952"
    assert len(converter) == 1
    assert os.listdir(cache) == [folder.name]  # noqa: PTH208
    assert capsys.readouterr().err.startswith("converting SmolLM2")
    assert load_target(TargetConfig(dtype="float32", device="cpu")).info.name == "smollm2"


def test_an_interrupted_conversion_is_never_used(cache, converter, monkeypatch):
    real = packaged.convert

    def interrupted(gguf, folder):
        real(gguf, folder)
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(packaged, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2_folder()
    assert list(cache.iterdir()) == []
    # What a killed process leaves behind has another name.
    (cache / ".smollm2-b179c952-abc" / "converted").mkdir(parents=True)
    monkeypatch.setattr(packaged, "convert", real)
    assert (smollm2_folder() / "model.safetensors").stat().st_size > 1000


def test_a_folder_with_a_missing_file_is_made_again(cache, converter):
    folder = smollm2_folder()
    (folder / "model.safetensors").unlink()
    assert (smollm2_folder() / "model.safetensors").is_file()
    assert len(converter) == 2
    assert list(cache.iterdir()) == [folder]


def test_of_two_conversions_at_once_the_first_to_finish_wins(cache, converter, monkeypatch):
    real = packaged.convert
    marks = []

    def slow(gguf, folder):
        monkeypatch.setattr(packaged, "convert", real)
        marks.append((smollm2_folder() / "config.json").stat().st_ino)  # the other process, start to end
        real(gguf, folder)

    monkeypatch.setattr(packaged, "convert", slow)
    folder = smollm2_folder()
    assert [(folder / "config.json").stat().st_ino] == marks
    assert list(cache.iterdir()) == [folder]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_while_converting_leaves_nothing(cache, converter, monkeypatch, error):
    def full(gguf, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(packaged, "convert", full)
    with pytest.raises(UserError, match="could not convert SmolLM2 .* the disk is full"):
        smollm2_folder()
    assert list(cache.iterdir()) == []


@pytest.mark.network
@pytest.mark.slow
def test_the_real_wheel_is_fetched_converted_and_speaks(cache):
    target = load_target(TargetConfig(dtype="float32", device="cpu"))
    assert (target.info.n_layers, target.info.hidden_size, target.info.vocab_size) == (30, 576, 49152)
    assert target.info.rms_norm_eps == 1e-5
    assert target.info.eos_ids == (2,)
    ids = target.encode_chat(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    ids_1L = torch.tensor([ids])
    for _ in range(7):
        next_1 = target.logits(target.forward(ids_1L).last_BLD[:, -1]).argmax(-1)
        ids_1L = torch.cat([ids_1L, next_1[:, None]], dim=1)
    assert target.decode(ids_1L[0, len(ids) :].tolist()).startswith("The capital of France is Paris")
