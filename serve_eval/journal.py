"""Records on disk while a benchmark runs, so that an interrupted one goes on where it stopped."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.errors import UserError
from serve_eval.rows import Record, parse_line, to_line, write_text


class Journal:
    """Finished prompts of a benchmark with given settings; anything half-written is measured again.

    Args:
        path: file that grows by the records of one prompt at a time.
        settings: what the figures depend on; a journal of other settings is discarded.
        records_per_prompt: arms x turns of each prompt, by (set, id).
    """

    def __init__(self, path: Path, settings: dict[str, Any], records_per_prompt: dict[tuple[str, str], int]):
        self._path = path
        self.done: dict[tuple[str, str], list[Record]] = {}
        head = json.dumps({"settings": settings}, sort_keys=True)
        for record in _read(path, head):
            self.done.setdefault((record.prompts, record.id), []).append(record)
        self.done = {key: found for key, found in self.done.items() if len(found) == records_per_prompt.get(key)}
        write_text(path, head + "\n" + "".join(to_line(r) for found in self.done.values() for r in found))

    def add(self, records: Sequence[Record]) -> None:
        """Append the records of one finished prompt."""
        self.done[records[0].prompts, records[0].id] = list(records)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(to_line(record) for record in records)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"{self._path} must be writable, got {error.strerror}; free some space.") from error


def _read(path: Path, head: str) -> list[Record]:
    """Return the readable records if the first line is ``head``; reading stops at the first damaged line."""
    if not path.is_file():
        return []
    first, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records: list[Record] = []
    if first == head:
        for line in filter(None, lines):
            try:
                records.append(parse_line(line, Record, where=path.name))
            except UserError:
                break
    return records
