"""Where Draftsmith keeps what it downloaded or derived, and how it writes there."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from distill.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def cache_dir() -> Path:
    """Return the user's cache folder: $DRAFTSMITH_CACHE, else draftsmith/ inside the XDG cache folder."""
    if own := os.environ.get("DRAFTSMITH_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "draftsmith"


@contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turn failures to write into the cache into a UserError that says what was being done.

    Args:
        doing: completes "could not ...", for instance "convert SmolLM2".

    Raises:
        UserError: no space, no permission or another fault of the file system.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        full = number in _FULL or "No space left" in str(error)
        reason = "the disk is full" if full else str(error)
        raise UserError(
            f"could not {doing} in the cache folder {cache_dir()}: {reason}; "
            "free some space or set DRAFTSMITH_CACHE to a folder that can be written to"
        ) from error


def sync_folder(folder: Path) -> None:
    """Flush every file of ``folder`` (not recursively) to the disk, so that a rename publishes it whole."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
