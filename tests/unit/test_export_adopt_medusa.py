"""Medusa heads made by somebody else, and pickles: read for their tensors, or refused before anything runs."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from distill.errors import UserError
from distill.export.adopt import adopt
from distill.target.tiny import tiny_target

V = 64
TARGET = tiny_target(vocab_size=V, hidden=16, layers=8, tokenizer=False)


def by_hand_medusa(tmp_path, *, prefix="", bias=True, own=True) -> Path:
    generator = torch.Generator().manual_seed(6)
    tensors = {}
    for head in range(2):
        tensors[f"{prefix}{head}.0.linear.weight"] = torch.randn(16, 16, generator=generator)
        if bias:
            tensors[f"{prefix}{head}.0.linear.bias"] = torch.randn(16, generator=generator)
        if own:
            tensors[f"{prefix}{head}.1.weight"] = torch.randn(V, 16, generator=generator)
    folder = tmp_path / "theirs"
    folder.mkdir()
    torch.save(tensors, folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    return folder


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("bias", [True, False])
def test_a_foreign_medusa_says_what_its_equations_say(tmp_path, prefix, bias):
    folder = by_hand_medusa(tmp_path, prefix=prefix, bias=bias)
    with pytest.warns(UserWarning, match="is a pickle; only its tensors are read"):
        drafter, notes = adopt(folder, TARGET)
    assert (notes == ["blocks without biases: zeros"]) is not bias
    tensors = {
        k.removeprefix(prefix): v for k, v in torch.load(folder / "medusa_lm_head.pt", weights_only=True).items()
    }
    x = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(2))
    for i, head in enumerate(drafter.heads):
        inner = x @ tensors[f"{i}.0.linear.weight"].T + (tensors[f"{i}.0.linear.bias"] if bias else 0)
        want = (x + inner * torch.sigmoid(inner)) @ tensors[f"{i}.1.weight"].T
        torch.testing.assert_close(drafter.output_head(i)(head(x)), want, rtol=1e-5, atol=1e-5)


class Bomb:
    def __reduce__(self):
        return (open, ("/tmp/never-written-by-a-checkpoint", "w"))


def test_a_pickle_with_more_than_tensors_is_refused_before_anything_runs(tmp_path):
    folder = by_hand_medusa(tmp_path)
    (folder / "medusa_lm_head.pt").write_bytes(pickle.dumps({"0.0.linear.weight": Bomb()}))
    with (
        pytest.raises(UserError, match="must hold tensors and nothing else"),
        pytest.warns(UserWarning, match="pickle"),
    ):
        adopt(folder, TARGET)
    assert not Path("/tmp/never-written-by-a-checkpoint").exists()
