"""Tiny targets, data and configs for the training tests."""

from functools import lru_cache

import numpy as np
import torch

from distill.config import build
from distill.data import Conversation, PreparedData
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.target.tiny import tiny_target
from distill.train.config import TrainConfig
from distill.vocab import choose_vocab

V, W = 100, 40


@lru_cache
def target(dtype=torch.float32):
    return tiny_target(vocab_size=V, hidden=16, layers=3, dtype=dtype, tokenizer=True)


@lru_cache
def data(n=40, density=0.7, validation=0.2):
    """``n`` short random conversations; ``density`` of each is supervised, after a prompt of three tokens."""
    rng = np.random.default_rng(0)
    conversations = []
    for i in range(n):
        length = int(rng.integers(8, 17))
        mask = np.arange(length) >= 3
        mask &= np.arange(length) < 3 + density * (length - 3)
        ids = rng.integers(4, V, length).astype(np.int32)
        conversations.append(Conversation(ids=ids, loss_mask=mask, key=i + 1))
    return PreparedData.from_conversations(conversations, vocab_size=V, validation=validation)


def drafter(dtype=torch.float32, seed=0, **options):
    torch.manual_seed(seed)
    vocab, _ = choose_vocab(torch.from_numpy(data().counts()), W, always=(2,))
    config = Eagle3Config(**{"ttt_steps": 2, "draft_vocab_size": W, "intermediate_size": 16, **options})
    return Eagle3(config, target(dtype), vocab).to(dtype)


def config(run_dir, *, optim=None, tracking=None, evaluate=None, **trainer):
    return build(
        TrainConfig,
        {
            "run_dir": str(run_dir),
            "target": {"name": "tiny", "dtype": "float32"},
            "drafter": {"name": "eagle3", "ttt_steps": 2, "draft_vocab_size": W, "intermediate_size": 16},
            "data": {"max_len": 16, "pack_len": 32, "max_answer_tokens": 8},
            "optim": {"lr": 1e-2, "warmup": 2, **(optim or {})},
            "trainer": {"max_steps": 6, "batch_size": 2, "val_every": 3, "log_every": 1, **trainer},
            "tracking": tracking or {"name": "csv"},
            "eval": {"n": 1, "max_new_tokens": 4, "depth": 2, **(evaluate or {})},
        },
    )


def in_memory(monkeypatch):
    """Let ``run`` take the tiny target and the data above instead of loading and preparing."""
    import distill.train.run as module

    monkeypatch.setattr(module, "load_target", lambda _: target())
    monkeypatch.setattr(module, "prepare_together", lambda *_, **__: data())
    monkeypatch.setattr(module, "load_prepared", lambda *_, **__: data())
    monkeypatch.setattr(module, "write_share", lambda *_, **__: None)
