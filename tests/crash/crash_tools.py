"""Crashes at every point of an operation, full disks at every point, and what must hold afterwards."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tracer
from tracer import Call, Trace, trace

from distill.errors import UserError

Step = Callable[[Path], object]


def refusal(action: Callable[[], object], first: int) -> str:
    """What a second process is told: that the first one, by its number, has the folder; "" when it went through."""
    try:
        action()
    except UserError as error:
        said = str(error)
    else:
        return ""
    assert "must be used by one process at a time, got a second one while" in said
    assert f"process {first} on " in said or "another process has it" in said
    return said


class Disk:
    """A disk without room, everywhere: no file may grow any more. See ``conftest.py`` for a real one."""

    strict = True
    fill = staticmethod(tracer.limit_file_size)

    def __init__(self, folder: Path):
        self.folder = folder

    def free(self) -> None:
        """The limit ended with the child."""


class SmallDisk(Disk):
    """A file system of its own, filled to the last page. What is deleted meanwhile makes room again."""

    strict = False

    def fill(self, *_: object) -> None:
        with contextlib.suppress(OSError), (self.folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))

    def free(self) -> None:
        (self.folder / "filler").unlink()


def crash_everywhere(
    tmp_path: Path,
    action: Step,
    check: Step,
    *,
    before: Step = lambda folder: None,
    how: str = "kill",
    at_most: int | None = None,
) -> int:
    """Run ``action`` in fresh copies of what ``before`` made, ended at every file-system call in turn; then ``check``.

    Args:
        how: "kill" at every call, or "tear" at every write: half of its bytes are in the file.
        at_most: spread over that many points instead of all.

    Returns:
        The number of points.
    """
    calls = watch(tmp_path, action, before).calls
    points = spread([n for n, call in enumerate(calls) if how == "kill" or (call.writes and call.size > 1)], at_most)
    for n in points:
        with copied(tmp_path, before) as folder, noted(f"{how} at call {n} of {len(calls)}: {calls[n]}"):
            assert trace(lambda here=folder: action(here), folder, at=n, how=how).killed
            check(folder)
    return len(points)


def fill_everywhere(
    disk: Disk,
    action: Step,
    check: Callable[[Path, str], object],
    *,
    before: Step = lambda folder: None,
    at_most: int | None = None,
) -> int:
    """Take the room away at every write in turn; ``check`` gets the folder and what was said, with room again.

    An action that needs room afterwards must end with a ``UserError``: one sentence that says what to do.
    """
    calls = watch(disk.folder, action, before).calls
    points = spread([n for n, call in enumerate(calls) if call.writes and call.size > 1], at_most)
    for n in points:
        with copied(disk.folder, before) as folder, noted(f"no room from call {n} of {len(calls)} on: {calls[n]}"):
            done = trace(lambda here=folder: action(here), folder, at=n, how=disk.fill)
            disk.free()
            if done.said or (disk.strict and not calls[n].path.endswith(".lock")):
                assert done.said.startswith("UserError: "), done.said or "nothing was said"
                assert "free some" in done.said
                assert "\n" not in done.said
            check(folder, done.said)
    return len(points)


def meet_everywhere(
    tmp_path: Path,
    action: Step,
    check: Step,
    *,
    before: Step = lambda folder: None,
    at_most: int | None = None,
) -> list[str]:
    """Let a second process do the same while the first stands still at each of its calls in turn; then ``check``.

    Returns:
        What was said to the second process at each call; "" when it went through.
    """
    calls = watch(tmp_path, action, before).calls
    said = []
    for n in spread(list(range(len(calls))), at_most):
        with copied(tmp_path, before) as folder, noted(f"met at call {n} of {len(calls)}: {calls[n]}"):

            def second(child: int, call: Call, offset: int, here: Path = folder) -> None:
                said.append(refusal(lambda: action(here), child))

            assert trace(lambda here=folder: action(here), folder, at=n, how=second).said == ""
            check(folder)
    return said


def watch(tmp_path: Path, action: Step, before: Step = lambda folder: None) -> Trace:
    """An undisturbed run, call by call."""
    with copied(tmp_path, before) as folder:
        seen = trace(lambda: action(folder), folder)
        assert seen.said == ""
    return seen


def spread(points: list[int], at_most: int | None) -> list[int]:
    """All, or that many at equal distances, the first and the last included."""
    if at_most is None or len(points) <= at_most:
        return points
    return [points[round(i * (len(points) - 1) / (at_most - 1))] for i in range(at_most)]


@contextmanager
def copied(tmp_path: Path, before: Step) -> Iterator[Path]:
    """A folder with what ``before`` makes, gone afterwards; made once, then copied."""
    ready, folder = tmp_path / "ready", tmp_path / "now"
    if not ready.exists():
        ready.mkdir()
        before(ready)
    shutil.copytree(ready, folder)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def noted(text: str) -> Iterator[None]:
    """Say with a failure where it happened."""
    try:
        yield
    except BaseException as error:
        error.add_note(text)
        raise


def names(folder: Path) -> set[str]:
    """Every file and folder below, hidden ones included."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def untimed(path: Path) -> Any:
    """A JSON file without the time a run took, which an interruption changes."""
    return json.loads(path.read_text(), object_hook=lambda part: {k: part[k] for k in part if k != "train/minutes"})


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below, hidden ones included."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------- order on the disk
def check_order(calls: list[Call], root: Path) -> None:
    """What a power cut could tear is on the disk before it counts.

    1. A file is synced after its last write, and a folder after its last change, before it gets its final name.
    2. A final name is on the disk (its folder synced) before anything relies on it: the next final name, or the
       deletion of a file that had one; and before the end.
    3. So is a folder made on the way.
    """
    unsynced: dict[str, str] = {}  # contents the disk may not have yet -> why
    unnamed: dict[str, str] = {}  # folders with a final name the disk may not have yet -> why
    for n, call in enumerate(calls):
        where, folder = f"call {n}: {call}", str(Path(call.to or call.path).parent)
        final = not _temporary(call.to or call.path, root)
        if call.writes or call.name in ("open", "truncate"):
            unsynced[call.path] = where
        if call.name in ("open", "mkdir", "rmdir", "unlink", "rename"):
            unsynced[folder] = where
        if call.name == "fsync":
            unsynced.pop(call.path, None)
            unnamed.pop(call.path, None)
        if call.name == "rename":
            inside = [path for path in unsynced if path == call.path or path.startswith(call.path + "/")]
            assert not (inside and final), f"{where} before the disk has {[unsynced[path] for path in inside]}"
            for path in inside:
                unsynced[call.to + path.removeprefix(call.path)] = unsynced.pop(path)
        if call.name in ("rename", "unlink") and final:
            assert not unnamed, f"{where} before the disk has {list(unnamed.values())}"
        if call.name in ("rename", "mkdir") and final:
            unnamed[folder] = where
    assert not unnamed, f"the end comes before the disk has {list(unnamed.values())}"


def _temporary(path: str, root: Path) -> bool:
    return any(part.startswith(".") or part.endswith(".tmp") for part in Path(path).relative_to(root).parts)
