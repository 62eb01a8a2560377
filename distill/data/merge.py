"""Parts of the data, written anywhere, become what one process would have written.

Part k of n takes candidates k-1, k-1+n, k-1+2n, ... (``store.Part``). What a candidate comes to depends on its
number and the seed alone, so merging is taking the parts' outcomes in the order of their numbers, once each; a
candidate that repeats an earlier one is a duplicate, as it would have been for one process:

    part 1 of 3    0     3     6     9
    part 2 of 3      1     4     7
    part 3 of 3        2     5     8     11
    merged         0 1 2 3 4 5 6 7 8 9       (10 is missing: from here on one process goes on)
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from distill.data.store import Manifest, Outcome, Part, Store, check_same, read_manifest, read_outcomes, read_shards
from distill.errors import UserError

PATTERN = "part-*-of-*"
HOLE = "part_missing"
"""What candidates of missing parts are counted as."""

Parts = list[tuple[Path, Manifest]]


def find_parts(folder: Path) -> list[Path]:
    """Folders of parts inside a folder."""
    return sorted(folder.glob(PATTERN))


def read_parts(store: Store, folders: Sequence[Path], *, partial: bool = False) -> Parts:
    """The parts to merge into a store, checked against it and each other.

    Args:
        store: what they are merged into.
        folders: of the parts.
        partial: parts may be missing or unfinished.

    Raises:
        UserError: a part of other data, twice, missing, unfinished or damaged.
    """
    parts: Parts = []
    for folder in dict.fromkeys(path.resolve() for path in folders):
        manifest = read_manifest(folder)
        if manifest is None or manifest.part is None:
            if partial and manifest is None and folder.is_dir():
                continue
            raise UserError(f"{folder} must be a part of the data, got a folder without one; write it with data.part")
        check_same(folder, manifest, replace(store.manifest, part=manifest.part))
        parts.append((folder, manifest))
    if parts:
        _check_together(parts, store, partial=partial)
    for folder, manifest in parts:  # all of them before the first is merged: a refusal later would leave a gap behind
        for _ in read_shards(folder, manifest):
            pass
    return parts


def _check_together(parts: Parts, store: Store, *, partial: bool) -> None:
    division = {(part.of, part.base) for part in map(_part, parts)}
    if len(division) > 1:
        listed = ", ".join(f"{folder} ({_part((folder, m)).of} parts)" for folder, m in parts)
        raise UserError(f"parts must come from one division of the data, got {listed}; merge them one after the other")
    ((of, base),) = division
    if base > store.manifest.next_index:
        raise UserError(
            f"parts that begin behind the first {base} candidates need the data before them, got "
            f"{store.manifest.next_index} in {store.folder}; merge them where they were begun"
        )
    by_number: dict[int, Path] = {}
    for folder, manifest in parts:
        number = _part((folder, manifest)).number
        if number in by_number:
            raise UserError(f"part {number} of {of} must be there once, got {by_number[number]} and {folder}")
        by_number[number] = folder
        if manifest.stopped is None and not partial:
            raise UserError(
                f"{folder} must be finished before it is merged, got an interrupted part; go on with "
                f"data.part={number}/{of}, or set partial=true"
            )
    missing = [str(number) for number in range(1, of + 1) if number not in by_number]
    if missing and not partial:
        raise UserError(
            f"all {of} parts must be there, got none with number {', '.join(missing)}; write it with "
            f"data.part={missing[0]}/{of}, or set partial=true"
        )


def merged_outcomes(parts: Parts, store: Store, seen: set[int], *, partial: bool = False) -> Iterator[Outcome]:
    """What became of the candidates from ``store.numbers`` on, as far as the parts know without a gap.

    Args:
        parts: of ``read_parts``.
        store: for its next number.
        seen: keys already there; grows.
        partial: go on over gaps, to the end of the longest part; missing candidates count as dropped.
    """
    if not parts:
        return
    of, base = _part(parts[0]).of, _part(parts[0]).base
    reading = {_part(part).number - 1: read_outcomes(*part) for part in parts}
    # A part is read as far as it reaches.
    reach = {_part(part).number - 1: _part(part).numbers(part[1].next_index).start for part in parts}
    end = max(reach.values(), default=0)
    for number in range(base, end):
        place = (number - base) % of
        there = place in reading and number < reach[place]
        if not there and not partial:
            return
        outcome = next(reading[place]) if there else Outcome(index=number, key=0, conversation=None)
        if number < store.numbers.start:
            continue
        if not there:
            outcome = replace(outcome, counts=Counter({HOLE: 1}))
        elif outcome.key in seen:
            outcome = Outcome(index=number, key=outcome.key, conversation=None, counts=Counter({"duplicate": 1}))
        elif outcome.key:
            seen.add(outcome.key)
        yield outcome


def _part(part: tuple[Path, Manifest]) -> Part:
    fields = part[1].part
    assert fields is not None, "checked when it was read"
    return Part(**fields)
