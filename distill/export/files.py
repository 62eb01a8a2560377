"""Files that are whole or not there: temporary name in the same folder, sync, replace."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distill.errors import UserError


def write_atomic(path: Path, text: str) -> None:
    """Write a text file so that ``path`` holds either what it held before or all of ``text``.

    Raises:
        UserError: disk full, read-only, no such folder.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        temporary.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def unwritable(path: Path, error: Exception) -> UserError:
    """The sentence for a path that could not be written."""
    return UserError(f"{path} must be writable, got {error}; free some space or choose another folder")


def to_json(value: Mapping) -> str:
    """Indented JSON with a final newline; anything JSON does not know becomes text."""
    return json.dumps(value, indent=2, default=str, ensure_ascii=False) + "\n"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: missing, malformed, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} must be readable JSON, got {error}; make it again or copy it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must be a JSON object, got {type(value).__name__}; make it again or copy it again")
    return value


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def swap_folder(fresh: Path, folder: Path) -> None:
    """Put the folder ``fresh`` in ``folder``'s place; an old one goes only once the new one is there."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        folder.replace(old)
    fresh.replace(folder)
    shutil.rmtree(old, ignore_errors=True)
