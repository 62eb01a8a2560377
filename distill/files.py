"""Files and folders that are whole or not there, whatever becomes of the process, the disk or the power.

Everything is written under a temporary name beside its final one, synced, renamed, and the folder synced: a reader
sees what was there before or all of the new. ``kill -9`` leaves at most hidden ``.NAME.tmp`` and ``.NAME.lock``, which
the next writer of the same name clears away; a lock ends with its process, so a stale file blocks nobody.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

from distill.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
AT_FDCWD, RENAME_EXCHANGE = -100, 2


# ------------------------------------------------------------------------------------------------------- writing
def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that ``path`` holds either what it held before or all of ``content``, also after a power cut.

    Two processes that write the same file do so one after the other.

    Raises:
        UserError: disk full, read-only, no such folder; nothing half-written stays.
    """
    temporary = temporary_of(path)
    try:
        handle = _claimed(temporary, wait=True)
        try:
            os.ftruncate(handle, 0)
            view = memoryview(content.encode() if isinstance(content, str) else content)
            while view:
                view = view[os.write(handle, view) :]
            os.fsync(handle)
            os.replace(temporary, path)  # noqa: PTH105 - the tests cut the power at each of these calls
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
        sync(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error


def temporary_of(path: Path) -> Path:
    """The name under which a file or folder is written before it has its own."""
    return path.with_name(f".{path.name}.tmp")


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that knows no syncing of folders
            raise
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, and wait until they are on the disk.

    Raises:
        OSError: it cannot be made.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def unwritable(path: Path, error: Exception) -> UserError:
    """The sentence for a path that could not be written."""
    if isinstance(error, OSError):
        full = error.errno in FULL
        reason = f"{error.strerror or error}" + (" (the disk must have room for it)" if full else "")
    else:
        reason = " ".join(str(error).split())
    return UserError(f"{path} must be writable, got {reason}; free some space or choose another folder")


# ------------------------------------------------------------------------------------------------------- folders
@contextlib.contextmanager
def fresh_folder(folder: Path, *, what: str) -> Iterator[Path]:
    """Yield an empty folder beside ``folder``, to be filled and handed to ``swap_folder``; one process at a time.

    Args:
        folder: the final place.
        what: what to call it in messages ("export folder").

    Raises:
        UserError: another process is writing there, or it cannot be written.
    """
    fresh, old = temporary_of(folder), _old(folder)
    with Lock(folder.with_name(f".{folder.name}.lock"), what=f"{what} {folder}", instead="choose another folder"):
        try:
            if old.is_dir() and not folder.exists():  # killed between the two renames of ``swap_folder``
                old.rename(folder)
            for stray in (fresh, old):
                shutil.rmtree(stray, ignore_errors=True)
            fresh.mkdir()
            yield fresh
        except OSError as error:
            raise unwritable(folder, error) from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def swap_folder(fresh: Path, folder: Path) -> None:
    """Put ``fresh`` in ``folder``'s place, which always holds one of the two; the old one is deleted afterwards.

    Where the file system cannot exchange two names at once (NFS; not Linux), a kill between two renames leaves the old
    folder under a hidden name; ``fresh_folder`` puts it back.
    """
    for path in (*fresh.rglob("*"), fresh):
        sync(path)
    if not folder.exists():
        fresh.rename(folder)
        sync(folder.parent)
        return
    old = fresh
    if not _exchange(fresh, folder):
        old = _old(folder)
        folder.rename(old)
        fresh.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step; False where that cannot be done."""
    try:
        call = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    return call(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) == 0


# --------------------------------------------------------------------------------------------------------- locks
class Lock:
    """An exclusive claim that ends with ``release`` or with its process, whatever ends that; a context manager.

    Args:
        path: a file made for it, gone again afterwards; its folder is made when missing.
        what: what is claimed ("data folder X").
        instead: what else can be done ("use another data.folder").

    Raises:
        UserError: another process has it (named), or the file cannot be made.
    """

    def __init__(self, path: Path, *, what: str, instead: str):
        self.path = path
        try:
            make_folder(path.parent)
            self._handle = _claimed(path, wait=False)
        except BlockingIOError as error:
            raise UserError(
                f"{what} must be used by one process at a time, got a second one while {_holder(path)} has it; "
                f"wait for that one or {instead}"
            ) from error
        except OSError as error:
            raise unwritable(path.parent, error) from error
        with contextlib.suppress(OSError):  # no room for a name; the lock holds all the same
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")

    def release(self) -> None:
        """Give it back."""
        self.path.unlink(missing_ok=True)
        os.close(self._handle)

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip() or "another process"
    except (OSError, ValueError):
        return "another process"


def _claimed(path: Path, *, wait: bool) -> int:
    """Open the file at ``path`` and lock it: the one that is there once it is locked, for owners rename and delete it.

    Raises:
        BlockingIOError: another process has it and ``wait`` is False.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise
            except OSError as error:
                warnings.warn(
                    f"{path.parent} is on a file system without locks ({error.strerror}); "
                    "see to it that one process at a time writes there",
                    stacklevel=2,
                )
                return handle
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), path.stat()):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
