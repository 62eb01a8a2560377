"""Turning token ids into text one id at a time."""

from collections.abc import Callable, Sequence


class TextStream:
    """Decodes a growing list of ids; the pieces it returns add up to the decoded whole.

    A character that takes several ids comes with the last of them, and ids are decoded behind their predecessors,
    because tokenizers merge and strip across neighbours.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """Return the text that ``token`` completes; empty while a character is still open."""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        if text.endswith("\ufffd"):
            return ""
        piece = text[len(self._decode(self._ids[self._start : self._shown])) :]
        self._start, self._shown = self._shown, len(self._ids)
        return piece


def pieces(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Return one piece of text per id."""
    stream = TextStream(decode)
    return [stream.push(token) for token in ids]
