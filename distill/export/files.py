"""Reading and hashing the files of an export or a run; writing them is in ``distill.files``."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distill.errors import UserError


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
