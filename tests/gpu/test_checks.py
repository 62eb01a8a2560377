"""The checks of ``make gpu-check``, one test each: ``pytest -m gpu tests/gpu`` on a machine with CUDA."""

from importlib import import_module

import pytest
import torch

from bench.gpu_parts import PARTS, Skipped

CHECKS = [part for part in PARTS if part.kind == "check" and part.name != "other gpu-marked tests"]


@pytest.fixture(scope="module")
def setting():
    from bench.gpu_setup import Setting

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return Setting.of("cuda", "tiny")


@pytest.mark.gpu
@pytest.mark.parametrize("part", CHECKS, ids=lambda part: part.name)
def test_check(part, setting):
    module, _, function = part.address.partition(":")
    try:
        assert getattr(import_module(module), function)(setting)
    except Skipped as reason:
        pytest.skip(str(reason))
