"""A tiny target, its data, and feature stores of them."""

from functools import lru_cache

import torch
import train_tools as tools

from distill.data import DataConfig, PreparedData
from distill.data.features import open_features, prepare_features
from distill.target.tiny import tiny_target

TAPS = (0, 1, 2)
D = 16
SIZES = {"pack_len": 32, "max_len": 16, "seed": 0}


def config(**options):
    sizes = {"max_len": 16, "pack_len": 32, "max_answer_tokens": 8}
    return DataConfig(**{**sizes, "features": "store", "features_dtype": "target", **options})


@lru_cache
def other_target():
    return tiny_target(vocab_size=tools.V, hidden=D, layers=3, tokenizer=True, seed=1)


def first(n):
    """The first ``n`` of the conversations."""
    data = tools.data()
    return PreparedData.from_conversations([data[i] for i in range(n)], vocab_size=tools.V, validation=0.2)


def stored(folder, options=None, *, data=None, target=None, taps=TAPS, shard_bytes=20_000, **kwargs):
    """Write (or open) a store of several shards."""
    return prepare_features(
        options or config(),
        tools.data() if data is None else data,
        target or tools.target(torch.float32),
        folder,
        taps=taps,
        say=kwargs.pop("say", lambda _: None),
        shard_bytes=shard_bytes,
        **kwargs,
    )


def opened(folder, options=None, *, data=None, target=None, taps=TAPS):
    """Open a store as a process does that does not write."""
    return open_features(
        options or config(),
        tools.data() if data is None else data,
        target or tools.target(torch.float32),
        folder,
        taps=taps,
    )


def shards(folder):
    """Name -> bytes of what is there."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}
