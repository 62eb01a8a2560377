"""Several processes of one run write the data together: a part each, through files, without a collective.

The first process waits for the parts, merges them and writes what is missing; the others go on when it says so. What
comes out is what one process would have written, whatever their number.

The parts lie in ``.ranks`` inside the data folder, and go when they are merged. Parts of an interrupted run with
another number of processes are merged as far as they know without a gap.
"""

import itertools
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.data.config import DataConfig
from distill.data.merge import find_parts, merged_outcomes, read_parts
from distill.data.prepare import MakeDecoder, is_complete, opened, prepare, quota, write_part
from distill.data.prepared import PreparedData
from distill.data.progress import OnProgress, Progress, say, stderr_progress
from distill.data.store import Part, read_manifest
from distill.errors import UserError
from distill.target import Target

RANKS = ".ranks"
ALIVE = ".alive"
"""Touched by a process for every conversation it finishes."""

POLL_S = 0.3


def is_shared(config: DataConfig, folder: Path, *, world: int) -> bool:
    """Whether writing is worth sharing: the target writes in every process, and nobody has divided it already.

    Every process comes to the same answer, whenever it asks.
    """
    writes = config.source in ("self", "prompts") and config.writer == "target"
    return world > 1 and writes and not find_parts(folder)


def write_share(
    config: DataConfig,
    target: Target,
    folder: Path,
    *,
    rank: int,
    world: int,
    timeout_s: float,
    make_decoder: MakeDecoder | None = None,
) -> None:
    """Write the part of one process other than the first; afterwards it waits until the first one has the data.

    Args:
        config: what all write together.
        target: the same in every process.
        folder: of all the data; every process sees it.
        rank: of this process, 1 to ``world`` - 1.
        world: how many there are.
        timeout_s: seconds to wait for the first process to clear away the parts of an earlier run.
        make_decoder: see ``prepare``.

    Raises:
        UserError: as ``prepare``; the first process does not clear up.
    """
    if not is_shared(config, folder, world=world):
        return
    _wait(
        lambda: not _leftovers(folder, world),
        lambda: _state(folder),
        timeout_s=timeout_s,
        what=f"the first process must clear away the parts of an earlier run in {folder / RANKS}",
    )
    whole = read_manifest(folder)
    if whole is None or not is_complete(whole, config):
        _write(config, target, folder, rank=rank, world=world, progress=lambda _: None, make_decoder=make_decoder)


def prepare_together(
    config: DataConfig,
    target: Target,
    folder: Path,
    progress: OnProgress | None = None,
    *,
    world: int,
    timeout_s: float,
    make_decoder: MakeDecoder | None = None,
) -> PreparedData:
    """What the first of ``world`` processes does while the others run ``write_share``; with one it is ``prepare``.

    Args:
        config: what all write together.
        target: the same in every process.
        folder: of all the data; every process sees it.
        progress: called after every conversation of its own part; None prints to stderr.
        world: how many processes there are.
        timeout_s: seconds without a conversation of the others after which they count as gone.
        make_decoder: see ``prepare``.

    Raises:
        UserError: as ``prepare``; another process writes nothing any more.
    """
    parts: list[Path] = []
    if is_shared(config, folder, world=world):
        _absorb(config, target, folder, world)
        whole = read_manifest(folder)
        if whole is None or not is_complete(whole, config):
            own = progress or stderr_progress()
            _write(config, target, folder, rank=0, world=world, progress=own, make_decoder=make_decoder)
            parts = [folder / RANKS / Part(number=rank + 1, of=world).name for rank in range(world)]
            _await_parts(config, folder, parts, timeout_s=timeout_s)
    data = prepare(config, target, folder, progress, parts=parts, make_decoder=make_decoder)
    shutil.rmtree(folder / RANKS, ignore_errors=True)
    return data


def _write(
    config: DataConfig,
    target: Target,
    folder: Path,
    *,
    rank: int,
    world: int,
    progress: OnProgress,
    make_decoder: MakeDecoder | None,
) -> None:
    alive = folder / RANKS / Part(number=rank + 1, of=world).name / ALIVE

    def note(done: Progress) -> None:
        alive.touch()
        progress(done)

    mine = replace(config, part=f"{rank + 1}/{world}")
    write_part(mine, target, folder, note, place=folder / RANKS, make_decoder=make_decoder)


def _await_parts(config: DataConfig, folder: Path, parts: list[Path], *, timeout_s: float) -> None:
    """Wait until every part holds its share."""
    whole = read_manifest(folder)

    def finished(place: Path) -> bool:
        manifest = read_manifest(place)
        if manifest is None or manifest.stopped is None or manifest.part is None:
            return False
        return is_complete(manifest, quota(config, Part(**manifest.part), whole))

    def unfinished() -> list[str]:
        return [place.name for place in parts if not finished(place)]

    if unfinished():
        say(f"waiting for {', '.join(unfinished())}")
    _wait(
        lambda: not unfinished(),
        lambda: _state(folder),
        timeout_s=timeout_s,
        what=f"the other processes must go on writing their parts in {folder / RANKS}",
    )


def _wait(ready: Callable[[], bool], state: Callable[[], Any], *, timeout_s: float, what: str) -> None:
    """Wait as long as something changes."""
    last, since = state(), time.monotonic()
    while not ready():
        time.sleep(POLL_S)
        now = state()
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > timeout_s:
            raise UserError(
                f"{what}, got no change in {timeout_s:g} s; see whether all processes run and share that folder, "
                "then start again: what was written is kept"
            )


def _state(folder: Path) -> list[tuple[str, int]]:
    """Times of all files that change while data are written (compared with each other only, never with a clock)."""
    files = itertools.chain(folder.glob("manifest.json"), (folder / RANKS).glob("part-*/*"))
    return sorted((str(path), path.stat().st_mtime_ns) for path in files if path.is_file())


def _leftovers(folder: Path, world: int) -> list[Path]:
    """Parts of a run with another number of processes, or that are being merged."""
    whole = read_manifest(folder)
    base = whole.next_index if whole else 0
    found = []
    for place in find_parts(folder / RANKS):
        manifest = read_manifest(place)
        part = None if manifest is None or manifest.part is None else Part(**manifest.part)
        if not place.name.endswith(f"-of-{world}") or (part is not None and part.base != base):
            found.append(place)
    return found


def _absorb(config: DataConfig, target: Target, folder: Path, world: int) -> None:
    """Take over what an interrupted run's parts know without a gap, and clear them away."""
    leftovers = _leftovers(folder, world)
    by_division = itertools.groupby(sorted(leftovers, key=_division), _division)
    for _, places in by_division:
        with opened(config, target, folder) as (_, store):
            parts = read_parts(store, list(places), partial=True)
            outcomes = list(merged_outcomes(parts, store, set(store.seen)))
            if outcomes:
                seconds = max(manifest.seconds for _, manifest in parts)
                store.append(outcomes, seconds=max(seconds, store.manifest.seconds))
    for place in leftovers:
        shutil.rmtree(place, ignore_errors=True)


def _division(place: Path) -> str:
    return place.name.partition("-of-")[2]
