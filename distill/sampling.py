"""Warping logits as transformers does it, and Gumbel noise that is a pure function of its key.

A token drawn as ``argmax(warp(logits) + G)`` with G standard Gumbel follows softmax(warp(logits)) (the
Gumbel-max trick). Because G depends only on (seed, request, position, vocabulary id), the token at a
position is a function of the prefix alone, whoever asks: plain decoding, a tree of any shape, a batch of
any size. That is what makes sampled losslessness testable by equality.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from distill import kernels
from distill.errors import UserError

_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the target picks tokens: temperature 0 is argmax; top_k 0 and top_p 1 switch those filters off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature must be a finite number >= 0, got {self.temperature}; 0 means greedy")
        if self.top_k < 0:
            raise UserError(f"top_k must be >= 0, got {self.top_k}; 0 switches it off")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], got {self.top_p}; 1 switches it off")
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed must be a signed 64-bit number, got {self.seed}")

    @property
    def greedy(self) -> bool:
        """True when no noise is used."""
        return self.temperature == 0


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Temperature, then top-k, then top-p over the last axis; filtered entries become -inf.

    The same distribution as transformers' logits processors in that order; tokens tied with the last
    survivor all stay (transformers leaves their order open), so the result never depends on a sort order.
    With both filters on, top-p only looks at the k survivors, which spares a sort of the vocabulary.
    """
    if sampling.greedy:
        return logits
    logits = logits / sampling.temperature
    vocab = logits.shape[-1]
    k = min(sampling.top_k or vocab, vocab)
    if k == vocab and sampling.top_p == 1:
        return logits
    if k < vocab:
        values = logits.topk(k, dim=-1).values
        threshold = values[..., -1:]
        if sampling.top_p < 1:
            survivors = logits.masked_fill(logits < threshold, float("-inf"))
            threshold = _nucleus(values, survivors.logsumexp(-1, keepdim=True), sampling.top_p)
        return logits.masked_fill(logits < threshold, float("-inf"))
    normaliser = logits.logsumexp(-1, keepdim=True)
    values = logits
    # Sorting 49,000 numbers takes a third of a decode step on a CPU; the nucleus is nearly always among the first few.
    # Elsewhere sorting is cheap and looking would cost a read.
    for enough in (64, 1024) if logits.device.type == "cpu" and vocab > 2048 else ():
        values = logits.topk(enough, dim=-1).values
        if bool(((values - normaliser).exp().sum(-1) > sampling.top_p).all()):
            break
        values = logits
    if values is logits:
        values = logits.sort(dim=-1, descending=True).values
    return logits.masked_fill(logits < _nucleus(values, normaliser, sampling.top_p), float("-inf"))


def _nucleus(values: Tensor, normaliser: Tensor, top_p: float) -> Tensor:
    """Smallest logit that top-p keeps, [..., 1]; ``values`` descend and hold at least the nucleus."""
    probs = (values - normaliser).exp()
    # A token stays while the mass before it is below top_p; the first always stays.
    n_kept = (probs.cumsum(-1) - probs < top_p).sum(-1, keepdim=True).clamp(min=1)
    return values.gather(-1, n_kept - 1)


def _mix32(x: Tensor) -> Tensor:
    """Bijective 32-bit finaliser (constants 0x21f0aaad, 0xd35a2d97 of Wellons' hash prospector), in place on int32.

    In place, because 49,000 hashes a token are made of a dozen passes over memory and little else.
    """
    shifted = x >> 16
    x ^= shifted.bitwise_and_(0xFFFF)
    x *= 0x21F0AAAD
    x ^= torch.bitwise_right_shift(x, 15, out=shifted).bitwise_and_(0x1FFFF)
    x *= -0x2CA5D269  # 0xD35A2D97 as a signed number
    x ^= torch.bitwise_right_shift(x, 15, out=shifted).bitwise_and_(0x1FFFF)
    return x


def _key(seed: int, request_B: Tensor, position_BP: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit words per (seed, request, position), by 64-bit splitmix rounds."""

    def splitmix(x: Tensor) -> Tensor:
        x = x + -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number; int64 wraps around
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
        return x ^ ((x >> 31) & 0x1FFFFFFFF)

    base = int(splitmix(torch.tensor(seed, dtype=torch.long)))  # on the host: no copy to the device per call
    key_BP = splitmix(splitmix(request_B.long() ^ base)[:, None] ^ position_BP.long())
    return (key_BP & _MASK32), ((key_BP >> 32) & _MASK32)


STREAMS = {"draft": 1, "coins": 2, "residual": 3}
"""Further streams of keyed randomness (``decode/rejection.py``); the target's own noise is the seed's."""


def stream_seed(seed: int, stream: str) -> int:
    """Seed of another stream: two multiply-and-shift rounds over seed + stream * 0xD1342543DE82EF95, modulo 2**64.

    A bijection of that sum: the streams of a seed differ from each other for certain, and from the seed itself but for
    one in 2**64.
    """
    mask = 2**64 - 1
    x = (seed + STREAMS[stream] * 0xD1342543DE82EF95) & mask
    x = ((x ^ (x >> 32)) * 0xAEF17502108EF2D9) & mask
    x = ((x ^ (x >> 29)) * 0xDA942042E4DD58B5) & mask
    x ^= x >> 32
    return x - 2**64 if x >= 2**63 else x


def _as_int32(x: Tensor) -> Tensor:
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)


def _hashed(seed: int, request_B: Tensor, position_BP: Tensor, vocab: int) -> Tensor:
    """-v of ``gumbel`` for the whole vocabulary, fp32 [B, P, V], by the CPU kernel."""
    library = kernels.load()
    assert library is not None
    minus_v = torch.empty(*position_BP.shape, vocab, dtype=torch.float32)
    mask = 2**64 - 1

    def splitmix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    base, at = splitmix(seed & mask), minus_v.data_ptr()
    for request, positions in zip(request_B.tolist(), position_BP.tolist(), strict=True):
        row = splitmix(base ^ (request & mask))
        for position in positions:
            key = splitmix(row ^ (position & mask))
            low, high = key & _MASK32, key >> 32
            library.draftsmith_hash(low - (low >> 31 << 32), high - (high >> 31 << 32), at, vocab)
            at += 4 * vocab
    return minus_v


def gumbel(*, seed: int, request_B: Tensor, position_BP: Tensor, vocab: int, ids_BPk: Tensor | None = None) -> Tensor:
    """Standard Gumbel noise G_BPV in fp32, a counter-based hash of (seed, request, position, vocabulary id).

    Args:
        seed: the run's seed.
        request_B: integer that tells requests apart; equal prompts with different requests differ.
        position_BP: absolute position of the token being produced.
        vocab: vocabulary size V.
        ids_BPk: vocabulary ids to make noise for, [B, P, k]; all of them by default.
    """
    if ids_BPk is None and position_BP.device.type == "cpu" and kernels.load() is not None:
        return _hashed(seed, request_B, position_BP, vocab).log1p_().neg_().log_().neg_()
    if ids_BPk is None:
        ids_BPk = torch.arange(vocab, device=position_BP.device, dtype=torch.int32)
    v_BPk = uniform(seed=seed, request_B=request_B, position_BP=position_BP, ids_BPk=ids_BPk)
    return v_BPk.neg_().log1p_().neg_().log_().neg_()


def uniform(*, seed: int, request_B: Tensor, position_BP: Tensor, ids_BPk: Tensor) -> Tensor:
    """Uniform numbers in (0, 1) in fp32, [B, P, k]: the same hash, for ids [B, P, k] or [k]."""
    low, high = _key(seed, request_B, position_BP)
    bits = _mix32(ids_BPk.to(torch.int32) ^ _as_int32(low)[..., None])
    bits ^= _as_int32(high)[..., None]
    bits = _mix32(bits).bitwise_and_(0x7FFFFFFF)
    # 31 bits, so that small v (where the largest noise comes from) is exact in fp32; v stays below 1.
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def choose(logits_BNV: Tensor, sampling: Sampling, noise_BNV: Tensor | None = None) -> Tensor:
    """Return the token each row of logits emits: argmax(warp(logits) + noise), plain argmax when greedy."""
    # In fp32 also where greedy: argmax over bf16 takes four times as long on a CPU.
    exact = logits_BNV if logits_BNV.dtype == torch.float64 else logits_BNV.float()
    if sampling.greedy:
        return exact.argmax(-1)
    assert noise_BNV is not None, "sampling needs keyed noise"
    return (warp(exact, sampling) + noise_BNV).argmax(-1)


def choose_among_top(
    logits_BNV: Tensor, sampling: Sampling, noise_at: Callable[[Tensor], Tensor], *, spare: int = 16
) -> Tensor | None:
    """``choose`` with top-k, hashing noise for the k survivors only (49,000 hashes a row would show on a CPU).

    Args:
        logits_BNV: target logits.
        sampling: with top_k set.
        noise_at: maps ids_BNk to their noise.
        spare: places beside k for tokens tied with the k-th, which survive too.

    Returns:
        The same ids as ``choose``, or None if more tokens are tied than there are places.
    """
    width = min(sampling.top_k + spare, logits_BNV.shape[-1])
    values, ids = logits_BNV.topk(width, dim=-1)
    if width < logits_BNV.shape[-1] and bool((values[..., -1] == values[..., sampling.top_k - 1]).any()):
        return None
    # What is left out is below the k-th, so warping the ``width`` best filters exactly as warping them all.
    best = choose(values, sampling, noise_at(ids))
    return ids.gather(-1, best[..., None])[..., 0]
