"""Reading prompts, conversations and texts from files, folders and hub data sets."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distill.data.config import DataConfig
from distill.data.template import Message
from distill.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
EXPECTED = {
    "prompts": '"prompt" (text), "turns" (list of texts) or "messages"',
    "chat": '"messages" (list of {"role", "content"})',
    "text": '"text"',
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of a source, checked.

    Attributes:
        place: "file:line", for messages to the user.
        messages: for prompts and chat.
        text: for plain text.
    """

    place: str
    messages: list[Message] = field(default_factory=list)
    text: str = ""


def read_records(config: DataConfig) -> tuple[list[Record], str]:
    """Read and check a whole source before anything is written.

    Returns:
        The records in order, and a hash of what they were read from.

    Raises:
        UserError: missing, empty or malformed input, with file and line.
    """
    assert config.path is not None
    path = Path(config.path)
    if path.exists() or path.suffix in (".jsonl", ".json", ".txt"):
        files = _files(path, config)
        records = [record for file in files for record in _file_records(file, config)]
        digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files))
        origin = digest.hexdigest()[:16]
    else:
        rows = _hub_rows(config)
        places = (f"{config.path}[{config.split}] row {i}" for i in range(len(rows)))
        records = [_record(row, place, config) for row, place in zip(rows, places, strict=True)]
        origin = f"{config.path}/{config.subset or ''}/{config.split}"
    if not records:
        raise UserError(f"{config.path} must hold at least one record with {EXPECTED[config.source]}, got none")
    return records, origin


def _files(path: Path, config: DataConfig) -> list[Path]:
    if not path.exists():
        raise UserError(f"data.path must be an existing file, got {path}, which does not exist")
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.jsonl")) + (sorted(path.glob("*.txt")) if config.source == "text" else [])
    if not files:
        raise UserError(f"data.path must be a folder with .jsonl files, got {path}, which has none")
    return files


def _file_records(file: Path, config: DataConfig) -> Iterator[Record]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} must be UTF-8 text, got other bytes at offset {error.start}") from error
    except OSError as error:
        raise UserError(f"{file} must be readable, got: {error.strerror}") from error
    if not text.strip():
        raise UserError(f"{file} must hold at least one record with {EXPECTED[config.source]}, got an empty file")
    if config.source == "text" and file.suffix == ".txt":
        yield Record(place=str(file), text=text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{place} must be one JSON object, got malformed JSON ({error.msg})") from error
        yield _record(row, place, config)


def _hub_rows(config: DataConfig) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        return load_dataset(config.path, config.subset, split=config.split)
    except (DatasetNotFoundError, FileNotFoundError) as error:
        raise UserError(
            f"data.path must be a file, a folder or a data set on the hub, got {config.path!r}, which is none"
        ) from error
    except (ValueError, OSError, RuntimeError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"data set {config.path!r} cannot be loaded: {first}") from error


def _record(row: Any, place: str, config: DataConfig) -> Record:
    """Check one row and bring it into one form."""
    if isinstance(row, dict):
        if config.source == "text" and isinstance(row.get("text"), str):
            return Record(place=place, text=row["text"])
        if config.source in ("prompts", "chat") and isinstance(row.get("messages"), list):
            return Record(place=place, messages=_messages(row["messages"], place, config))
        if config.source == "prompts":
            turns = [row["prompt"]] if "prompt" in row else row.get("turns")
            if isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns):
                return Record(place=place, messages=[{"role": "user", "content": turn} for turn in turns])
    raise UserError(f"{place} must hold {EXPECTED[config.source]}, got {_shown(row, config)}")


def _shown(row: Any, config: DataConfig) -> str:
    """What is wrong with a row: the value under a key that is right, else its keys, else its type."""
    if not isinstance(row, dict):
        return type(row).__name__
    for name in re.findall(r'"(prompt|turns|messages|text)"', EXPECTED[config.source]):
        value = row.get(name)
        if name == "turns" and isinstance(value, list) and value:
            bad = next(item for item in value if not (isinstance(item, str) and item.strip()))
            return f'"{name}" with {_kind(bad)} in it'
        if name in row:
            return f'"{name}" that is {_kind(value)}'
    return f"keys {', '.join(map(str, row)) or '(none)'}"


def _kind(value: Any) -> str:
    return "empty" if value in ("", []) or (isinstance(value, str) and not value.strip()) else type(value).__name__


def _messages(rows: Iterable[Any], place: str, config: DataConfig) -> list[Message]:
    messages: list[Message] = []
    for row in rows:
        if not isinstance(row, dict) or row.get("role") not in ROLES:
            role = row.get("role") if isinstance(row, dict) else row
            raise UserError(f"{place}: a message's role must be one of {', '.join(ROLES)}, got {role!r}")
        message = {name: value for name, value in row.items() if value is not None}
        content = message.get("content", "")
        if isinstance(content, list):  # the OpenAI form with parts
            parts = [p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str)]
            if len(parts) != len(content):
                raise UserError(f"{place}: a message's content must be text, got parts of another kind")
            content = "".join(parts)
        if not isinstance(content, str):
            raise UserError(f"{place}: a message's content must be text, got {type(content).__name__}")
        messages.append({**message, "content": content})
    needed = "assistant" if config.source == "chat" else "user"
    if not any(message["role"] == needed for message in messages):
        raise UserError(f"{place}: a conversation must have {needed} turns, got none")
    return messages
