"""Prepared conversations in memory, divided into training and validation."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from distill.data.config import DataConfig
from distill.data.conversation import Conversation, check_ids, keyed_hash
from distill.data.store import EMPTY_HASH, chain_hash, read_manifest, read_shards, shard_conversations
from distill.errors import UserError

Split = Literal["train", "val"]

COVERAGE_SIZES = (1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Conversations in memory: flat arrays, and which conversation is for what.

    Attributes:
        ids: int32 [total tokens].
        loss_mask: bool [total tokens].
        offsets: int64 [n + 1], where each conversation begins.
        keys: int64 [n].
        is_val: bool [n].
        vocab_size: V of the target.
        data_hash: of these conversations, in this order.
        stats: counts for logs and reports.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    keys: np.ndarray
    is_val: np.ndarray
    vocab_size: int
    data_hash: str
    stats: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_conversations(
        cls,
        conversations: Sequence[Conversation],
        *,
        vocab_size: int,
        validation: float = 0.05,
        seed: int = 0,
    ) -> "PreparedData":
        """Build from conversations in memory, as the shards would be read.

        Raises:
            UserError: no conversations, or ids outside the vocabulary.
        """
        if not conversations:
            raise UserError("training data must have at least one conversation, got none")
        lengths = [len(c.ids) for c in conversations]
        ids = np.concatenate([c.ids for c in conversations]).astype(np.int32)
        check_ids([int(ids.min()), int(ids.max())], vocab_size, "training data")
        keys = np.array([c.key for c in conversations], dtype=np.int64)
        data = cls(
            ids=ids,
            loss_mask=np.concatenate([c.loss_mask for c in conversations]).astype(bool),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            keys=keys,
            is_val=split_of(keys, validation=validation, seed=seed),
            vocab_size=vocab_size,
            data_hash=chain_hash(EMPTY_HASH, conversations),
        )
        data.stats.update(_stats(data))
        return data

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, i: int) -> Conversation:
        where = slice(self.offsets[i], self.offsets[i + 1])
        return Conversation(ids=self.ids[where], loss_mask=self.loss_mask[where], key=int(self.keys[i]))

    def indices(self, split: Split) -> np.ndarray:
        """Numbers of the conversations of a split, ascending."""
        return np.flatnonzero(self.is_val == (split == "val"))

    def conversations(self, split: Split) -> list[Conversation]:
        """The conversations of a split (views of the flat arrays)."""
        return [self[i] for i in self.indices(split)]

    @property
    def n_train(self) -> int:
        """Conversations to train on."""
        return int((~self.is_val).sum())

    @property
    def n_val(self) -> int:
        """Conversations held out."""
        return int(self.is_val.sum())

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each conversation, int64 [n]."""
        return np.diff(self.offsets)

    def counts(self, split: Split = "train") -> np.ndarray:
        """How often each vocabulary id is supervised, int64 [V]: what a draft vocabulary is chosen by."""
        in_split = np.repeat(self.is_val == (split == "val"), self.lengths)
        return np.bincount(self.ids[in_split & self.loss_mask], minlength=self.vocab_size)


def split_of(keys: np.ndarray, *, validation: float, seed: int) -> np.ndarray:
    """Which conversations are held out: bool [n].

    Each is decided by a hash of its own content alone, so it stays where it is when data are added. Of two or more
    conversations at least one is held out (the one with the smallest hash) unless ``validation`` is 0, and at least
    one is not.
    """
    shares = np.array([keyed_hash("split", seed, int(key)) for key in keys], dtype=np.float64) / 2.0**63
    is_val = shares < validation
    if len(keys) > 1 and validation > 0 and not is_val.any():
        is_val[shares.argmin()] = True
    if len(keys) > 0 and is_val.all():
        is_val[shares.argmax()] = False
    return is_val


def coverage(counts_V: np.ndarray) -> dict[str, float]:
    """Share of the counted tokens that the most frequent ids cover, by draft-vocabulary size."""
    total = max(1, int(counts_V.sum()))
    cumulated = np.cumsum(np.sort(counts_V)[::-1])
    return {str(size): round(float(cumulated[size - 1]) / total, 6) for size in COVERAGE_SIZES if size <= len(counts_V)}


def _stats(data: PreparedData) -> dict[str, Any]:
    counts = data.counts("train")
    return {
        "conversations": len(data),
        "n_train": data.n_train,
        "n_val": data.n_val,
        "tokens": len(data.ids),
        "supervised_tokens": int(data.loss_mask.sum()),
        "distinct_tokens": int((counts > 0).sum()),
        "longest": int(data.lengths.max()),
        "coverage": coverage(counts),
    }


def load_prepared(folder: Path | str, config: DataConfig, *, vocab_size: int) -> PreparedData:
    """Read a prepared folder; ``config`` gives the split and how many conversations to take.

    Raises:
        UserError: nothing is there, or something is damaged.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"data folder {folder} must hold prepared data, got no manifest; run training to write them")
    conversations = [c for shard in read_shards(folder, manifest) for c in shard_conversations(shard)]
    if not conversations:
        raise UserError(f"data folder {folder} must hold at least one conversation, got none: {manifest.left_out}")
    data = PreparedData.from_conversations(
        conversations[: config.limit], vocab_size=vocab_size, validation=config.validation, seed=config.seed
    )
    data.stats["left_out"] = manifest.left_out
    return data
