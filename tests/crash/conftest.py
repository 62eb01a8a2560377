"""Skips where processes cannot be traced; disks to fill; the tiny targets, data and configs of the unit tests."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))

import crash_tools
import tracer


@pytest.fixture(autouse=True)
def _traceable():
    if not tracer.available():
        pytest.skip("processes can be traced on Linux only, and not in every container")


@pytest.fixture(params=["limit", "tmpfs"])
def disk(request, tmp_path):
    """A disk to fill: a limit on the size of files works everywhere, a small file system needs root."""
    if request.param == "limit":
        yield crash_tools.Disk(tmp_path)
        return
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, timeout=20).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("only root can mount a file system")
    yield crash_tools.SmallDisk(folder)
    subprocess.run(["umount", str(folder)], check=True, timeout=20)
