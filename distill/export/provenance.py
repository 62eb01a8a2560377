"""Where an artefact came from: commit, versions, command line, resolved config, data hash, date, hardware."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("draftsmith", "torch", "transformers", "lightning", "tokenizers", "safetensors", "numpy")
ROOT = Path(__file__).resolve().parents[2]


def collect(argv: Sequence[str] | None = None, config: Mapping | None = None, data_hash: str | None = None) -> dict:
    """Return the provenance record that is written beside every artefact.

    Args:
        argv: the command line; None takes this process's own.
        config: the resolved config as plain values.
        data_hash: hash of the prepared training data, once it is known.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "argv": list(sys.argv if argv is None else argv),
        "git": git_state(),
        "versions": versions(),
        "hardware": hardware(),
        "data_hash": data_hash,
        "config": None if config is None else dict(config),
    }


def git_state(root: Path = ROOT) -> dict[str, Any]:
    """Return ``{"commit", "dirty"}`` of the checkout this code runs from; both None outside one.

    A wheel installed inside somebody else's repository must not report that repository's commit, so the
    checkout's top level has to be ``root`` itself.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return {"commit": None, "dirty": None}
    status = _git(root, "status", "--porcelain")
    return {"commit": _git(root, "rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that decide what the weights look like."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def hardware() -> dict[str, Any]:
    """Return processor, usable cores, accelerators and platform, without the machine's name."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    system = f"{platform.system()}-{platform.release()}"
    return {
        "cpu": _cpu_name(),
        "cores": cores,
        "gpus": gpus,
        "platform": system,
        "machine": platform.machine(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(root: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
