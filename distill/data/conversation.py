"""One training conversation, and the hash that names it."""

import hashlib
from dataclasses import dataclass

import numpy as np

from distill.errors import UserError

Ids = np.ndarray
"""int32 [L]."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Token ids and which of them the target wrote.

    Attributes:
        ids: int32 [L].
        loss_mask: bool [L], True on assistant tokens and on the token that ends the turn.
        key: hash of the content the conversation came from; decides its split.
    """

    ids: Ids
    loss_mask: np.ndarray
    key: int = 0

    def __post_init__(self) -> None:
        assert self.ids.shape == self.loss_mask.shape == (len(self.ids),), "one mask entry per token"

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first supervised one: what a decoder is given to write the first answer."""
        first = int(self.loss_mask.argmax()) if self.loss_mask.any() else len(self.ids)
        return self.ids[:first].tolist()


def from_parts(parts: list[tuple[list[int], bool]], *, key: int) -> Conversation:
    """Join (ids, supervised) pieces: exact masks for text that was generated here."""
    ids = np.array([token for piece, _ in parts for token in piece], dtype=np.int32)
    mask = np.array([supervised for piece, supervised in parts for _ in piece], dtype=bool)
    return Conversation(ids=ids, loss_mask=mask, key=key)


def content_key(*texts: str) -> int:
    """63-bit hash of texts, blind to case and white space: equal keys are duplicates."""
    normal = "\x1f".join(" ".join(text.casefold().split()) for text in texts)
    return keyed_hash(normal)


def keyed_hash(*parts: object) -> int:
    """63-bit hash of the parts' text; a pure function, the same on every machine."""
    data = "\x1e".join(str(part) for part in parts).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1


def keyed_share(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts only."""
    return keyed_hash(*parts) / 2.0**63


def check_ids(ids: list[int], vocab_size: int, what: str) -> None:
    """Refuse ids outside the vocabulary (a tokenizer that does not belong to the model).

    Raises:
        UserError: an id is negative or too large.
    """
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        worst = max(ids) if max(ids) >= vocab_size else min(ids)
        raise UserError(f"{what} must have token ids below the model's {vocab_size}, got {worst}; check the tokenizer")
