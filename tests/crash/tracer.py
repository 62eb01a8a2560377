"""Runs an action in a child process under ``ptrace`` and interferes at its n-th file-system call.

Every call counts that changes something below one folder: opening for writing, writing, syncing, renaming, linking,
deleting, making folders; whoever makes it, Python, torch or safetensors. The parent sees each call before the kernel
runs it, and may

    kill   end the child with SIGKILL there
    tear   let half of the bytes of that write reach the file, then end it
    call   a function while the child stands still: to fill the disk, to be a second process on the same folder
"""

import ctypes
import gc
import os
import platform
import resource
import signal
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

TRACEME, CONT, SETOPTIONS, GET_SYSCALL_INFO = 0, 7, 0x4200, 0x420E
EVENT_SECCOMP, WALL = 7, 0x40000000
OPTIONS = 1 << 1 | 1 << 2 | 1 << 3 | 1 << EVENT_SECCOMP | 1 << 20  # fork, vfork, clone; our calls; die with the tracer
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2
LOAD, EQUAL, RETURN, ALLOW, TRACE = 0x20, 0x15, 0x06, 0x7FFF0000, 0x7FF00000
AT_FDCWD, AT_REMOVEDIR = -100, 0x200

NUMBERS: dict[str, dict[int, str]] = {
    "x86_64": {
        **{1: "write", 18: "pwrite", 20: "writev", 40: "sendfile", 326: "copy_range", 74: "fsync", 75: "fsync"},
        **{2: "open", 257: "openat", 82: "rename", 264: "renameat", 316: "renameat", 87: "unlink", 263: "unlinkat"},
        **{83: "mkdir", 258: "mkdirat", 84: "rmdir", 77: "truncate", 285: "truncate"},
        **{86: "link", 265: "linkat", 73: "flock"},
    },
    "aarch64": {
        **{64: "write", 68: "pwrite", 66: "writev", 71: "sendfile", 285: "copy_range", 82: "fsync", 83: "fsync"},
        **{56: "openat", 38: "renameat", 276: "renameat", 35: "unlinkat", 34: "mkdirat"},
        **{46: "truncate", 47: "truncate", 37: "linkat", 32: "flock"},
    },
}
COPIES = {"sendfile": (1, 3), "copy_range": (0, 4)}  # which arguments are the source and the number of bytes
WRITES = ("write", "pwrite", "writev", *COPIES)
CALLS = NUMBERS.get(platform.machine(), {})

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


@dataclass(frozen=True)
class Call:
    """One file-system call, as it was about to happen.

    Attributes:
        name: one of the names above, without "at".
        path: the file or folder; what a rename or link starts from.
        to: where a rename or link goes to.
        size: bytes to be written.
    """

    name: str
    path: str
    to: str = ""
    size: int = 0

    @property
    def writes(self) -> bool:
        return self.name in WRITES


Meanwhile = Callable[[int, Call, int], object]
"""Called with the child's process id, the call it stands at, and the offset at which it would write."""


@dataclass
class Trace:
    """What a traced child did.

    Attributes:
        calls: its file-system calls below the root.
        said: what the action's exception was ("UserError: ..."; others with a traceback), "" when it returned.
        killed: it ended by SIGKILL.
    """

    calls: list[Call] = field(default_factory=list)
    said: str = ""
    killed: bool = False


def trace(action: Callable[[], object], root: Path, *, at: int | None = None, how: str | Meanwhile = "kill") -> Trace:
    """Run ``action`` in a child; interfere at call number ``at`` (from 0) below ``root``.

    Args:
        action: no arguments; its result is dropped.
        root: calls elsewhere are not counted.
        at: None only watches.
        how: "kill", "tear", or what to call.
    """
    reader, writer = os.pipe()
    child = forked(lambda: _be_traced(action, writer))
    os.close(writer)
    result = Trace()
    try:
        os.waitpid(child, 0)
        _ptrace(SETOPTIONS, child, 0, OPTIONS)
        _ptrace(CONT, child, 0, 0)
        known, status = {child}, 0
        while True:  # the child, its threads and its own children
            who, status = os.waitpid(-child, WALL)
            if not os.WIFSTOPPED(status):
                if who == child:
                    break
                continue
            pass_on = 0 if status >> 16 or who not in known else os.WSTOPSIG(status)
            known.add(who)
            seen = _seen(who, str(root)) if status >> 16 == EVENT_SECCOMP else None
            if seen is not None:
                call, offset = seen
                result.calls.append(call)
                if len(result.calls) - 1 == at:
                    if not isinstance(how, str):
                        how(child, call, offset)
                    else:
                        if how == "tear":
                            _tear(who, offset)
                        os.killpg(child, signal.SIGKILL)
                        continue
            with suppress(ProcessLookupError):
                _ptrace(CONT, who, 0, pass_on)
        result.killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert result.killed or (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0), f"the child ended with {status}"
        with os.fdopen(reader, "rb", closefd=False) as said:
            result.said = said.read().decode()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(reader)
    return result


def forked(action: Callable[[], object]) -> int:
    """Run ``action`` in a child process without output; it exits with 0 when that returns. Returns its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # idle threads stay behind; nothing here waits for them
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        gc.disable()  # it would copy every page it looks at
        # What pytest puts in their place are files, and have no room on a full disk either.
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
        action()
        code = 0
    finally:
        os._exit(code)


@cache
def available() -> bool:
    """Whether this machine lets a process be traced."""
    if sys.platform != "linux" or not CALLS:
        return False
    try:
        return trace(lambda: None, Path("/nowhere")).said == ""
    except OSError:
        return False


def limit_file_size(child: int, call: Call, offset: int) -> None:
    """Full disk without a disk: no file of the child may grow beyond half of what it is about to write."""
    limit = offset + call.size // 2 if call.writes else 0
    resource.prlimit(child, resource.RLIMIT_FSIZE, (limit, limit))


def _be_traced(action: Callable[[], object], writer: int) -> None:
    """The child's whole life."""
    os.setpgid(0, 0)
    _ptrace(TRACEME, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    _stop_at(CALLS)
    try:
        action()
    except Exception as error:  # noqa: BLE001 - told to the parent
        said = f"{type(error).__name__}: {error}"
        if type(error).__name__ != "UserError":
            said += f"\n{traceback.format_exc()}"
        os.write(writer, said.encode()[:60000])


def _stop_at(numbers: Iterable[int]) -> None:
    """Let the kernel stop this process at these system calls only: a filter that looks at the number."""
    program = [(LOAD, 0, 0, 0)]
    for number in numbers:
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, TRACE)]
    code = b"".join(struct.pack("HBBI", *step) for step in [*program, (RETURN, 0, 0, ALLOW)])
    buffer = ctypes.create_string_buffer(code)
    filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, MODE_FILTER, ctypes.addressof(filter), 0, 0)):
        if libc.prctl(*map(ctypes.c_ulong, arguments)):
            raise OSError(ctypes.get_errno(), "prctl")


def _ptrace(request: int, child: int, address: int, data: int) -> int:
    result = libc.ptrace(request, child, address, data)
    if result == -1 and ctypes.get_errno():
        raise OSError(ctypes.get_errno(), f"ptrace request {request:#x}")
    return result


def _arguments(child: int) -> tuple[int, tuple[int, ...]]:
    """The number of the call the child is about to make, and its arguments."""
    buffer = ctypes.create_string_buffer(88)
    _ptrace(GET_SYSCALL_INFO, child, len(buffer), ctypes.addressof(buffer))
    number, *rest = struct.unpack_from("<24xQ6Q", buffer)
    return number, tuple(rest)


def _seen(child: int, root: str) -> tuple[Call, int] | None:
    """The file-system call below ``root`` the child is entering, and the offset it would write at."""
    number, args = _arguments(child)
    name = CALLS[number]
    if name in (*WRITES, "fsync", "truncate", "flock"):
        size = 0
        if name in ("write", "pwrite"):
            size = args[2]
        elif name in COPIES:
            source, asked = COPIES[name]
            left = Path(f"/proc/{child}/fd/{args[source]}").stat().st_size - _position(child, args[source])
            size = min(args[asked], left)
        handle = args[2 if name == "copy_range" else 0]
        call = Call(name, str(Path(f"/proc/{child}/fd/{handle}").readlink()), size=size)
        offset = args[3] if name == "pwrite" else _position(child, handle) if name in WRITES else 0
        return (call, offset) if _below(call.path, root) else None
    at, kind = name.endswith("at"), name.removesuffix("at")
    paths = [(args[0], args[1]), (args[2], args[3])] if at else [(AT_FDCWD, args[0]), (AT_FDCWD, args[1])]
    if kind == "open" and not args[2 if at else 1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
        return None
    if kind == "unlink" and at and args[2] & AT_REMOVEDIR:
        kind = "rmdir"
    two = kind in ("rename", "link")
    where = [_path(child, *place) for place in (paths[:2] if two else paths[:1])]
    if kind != "open" and os.path.lexists(where[0]) == (kind == "mkdir"):  # noqa: PTH110
        return None  # it will fail, as its caller expects, and change nothing
    call = Call(kind, where[0], to=where[1] if two else "")
    return (call, 0) if any(_below(path, root) for path in where) else None


def _below(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")


def _path(child: int, folder: int, address: int) -> str:
    with open(f"/proc/{child}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
        memory.seek(address)
        text = os.fsdecode(memory.read(512).partition(b"\0")[0])
    signed = ctypes.c_int(folder & 0xFFFFFFFF).value
    base = Path(f"/proc/{child}/{'cwd' if signed == AT_FDCWD else f'fd/{signed}'}").readlink()
    return os.path.normpath(base / text)


def _position(child: int, handle: int) -> int:
    lines = Path(f"/proc/{child}/fdinfo/{handle}").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    if int(facts["flags"], 8) & os.O_APPEND:
        return Path(f"/proc/{child}/fd/{handle}").stat().st_size
    return int(facts["pos"])


def _tear(child: int, offset: int) -> None:
    """Do the first half of the write the child is about to make."""
    number, args = _arguments(child)
    name = CALLS[number]
    if name in ("write", "pwrite"):
        out, half = args[0], args[2] // 2
        with open(f"/proc/{child}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
            memory.seek(args[1])
            data = memory.read(half)
    else:
        source, out = args[COPIES[name][0]], args[2 if name == "copy_range" else 0]
        data = Path(f"/proc/{child}/fd/{source}").read_bytes()[_position(child, source) :]
        data = data[: len(data) // 2]
    handle = os.open(f"/proc/{child}/fd/{out}", os.O_WRONLY)
    try:
        os.pwrite(handle, data, offset)
    finally:
        os.close(handle)
