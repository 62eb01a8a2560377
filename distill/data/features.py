"""Writing the feature store: the target runs over every prepared conversation once, instead of in every step.

The forward is the one training uses, over rows packed in the same way. What a token's features are does not depend on
what shares its row, up to rounding: a matrix product over other rows may add the same numbers in another order.
"""

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from distill.data.config import DataConfig
from distill.data.feature_store import (
    MANIFEST,
    FeatureManifest,
    FeatureStore,
    check_same,
    content_hashes,
    dtype_name,
    read_feature_manifest,
    tap_name,
    verify_shards,
)
from distill.data.packing import fill, pack
from distill.data.prepared import PreparedData
from distill.errors import UserError
from distill.files import Lock, write_atomic
from distill.target import Target

SHARD_BYTES = 256 << 20
"""Size of a shard: the most an interruption can lose. Three times as much is held in memory."""

BATCH_TOKENS = 4096
"""Tokens in a forward, at least one row."""

ASK_ABOVE_BYTES = 10**9
ASK_ABOVE_SHARE = 0.1
"""Stores larger than this, or than this share of the free disk, are written only when confirmed."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Say = Callable[[str], None]
Ask = Callable[[str], bool]


def prepare_features(
    config: DataConfig,
    data: PreparedData,
    target: Target,
    folder: Path | str,
    *,
    taps: Iterable[int],
    say: Say,
    ask: Ask | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> FeatureStore:
    """Write what is missing in a feature store, then open it.

    Args:
        config: cut, dtype, confirmation.
        data: the conversations, validation included.
        target: whose features.
        folder: of the store; an interrupted run goes on where it was, further conversations are appended.
        taps: the hidden states a drafter reads.
        say: shows one line.
        ask: asks the user a yes-or-no question; None asks on the terminal, if there is one.
        shard_bytes: size of a shard.

    Raises:
        UserError: a store of another target, other data, taps, dtype or schema; one that is too large for the disk, or
            large and not confirmed; a damaged shard; a full disk; another process is writing.
    """
    folder, wanted = Path(folder), _wanted(config, data, target, taps)
    there = _usable(folder, wanted, data)
    if there is None or there.conversations < len(data):
        _confirm(there or wanted, wanted, data, folder, config, say, ask or _terminal())
        with Lock(folder / ".lock", what=f"feature store {folder}", instead="use another data.features_folder"):
            there = _usable(folder, wanted, data) or wanted
            there.max_len = wanted.max_len  # what is there is the same cut at either: its hashes say so
            for leftover in folder.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)
            there = _write(there, data, target, folder, pack_len=config.pack_len, say=say, shard_bytes=shard_bytes)
    return FeatureStore(folder, there, taps=wanted.taps, dtype=target.dtype)


def open_features(
    config: DataConfig, data: PreparedData, target: Target, folder: Path | str, *, taps: Iterable[int]
) -> FeatureStore:
    """Open a complete feature store; nothing is written.

    Raises:
        UserError: it is not there, not complete, or not of this target and these data.
    """
    folder, wanted = Path(folder), _wanted(config, data, target, taps)
    there = _usable(folder, wanted, data)
    held = 0 if there is None else there.conversations
    if there is None or held < len(data):
        raise UserError(
            f"feature store {folder} must hold all {len(data)} conversations, got {held}; let one process "
            "write it first"
        )
    return FeatureStore(folder, there, taps=wanted.taps, dtype=target.dtype)


def bytes_per_token(manifest: FeatureManifest) -> int:
    """Disk space of one token: the taps and the last hidden state."""
    return (len(manifest.taps) + 1) * manifest.hidden_size * getattr(torch, manifest.dtype).itemsize


def _wanted(config: DataConfig, data: PreparedData, target: Target, taps: Iterable[int]) -> FeatureManifest:
    return FeatureManifest(
        target=dict(target.fingerprint),
        target_dtype=dtype_name(target.dtype),
        taps=sorted(set(taps)),
        dtype=dtype_name(DTYPES.get(config.features_dtype, target.dtype)),
        hidden_size=target.info.hidden_size,
        max_len=config.max_len,
        data_hash=data.data_hash,
    )


def _usable(folder: Path, wanted: FeatureManifest, data: PreparedData) -> FeatureManifest | None:
    """The manifest of what is there, if it may be used and extended; None when nothing is there."""
    there = read_feature_manifest(folder)
    if there is not None:
        verify_shards(folder, there)
        check_same(folder, there, wanted, data)
    return there


def _confirm(
    there: FeatureManifest,
    wanted: FeatureManifest,
    data: PreparedData,
    folder: Path,
    config: DataConfig,
    say: Say,
    ask: Ask | None,
) -> None:
    """Say how much disk is needed, and ask where that is much."""
    tokens = int(np.minimum(data.lengths[there.conversations :], wanted.max_len).sum())
    per_token = bytes_per_token(there)
    # Two numbers a conversation, and a header a shard, which holds one conversation at least.
    need = tokens * per_token + (len(data) - there.conversations) * 16 + (tokens * per_token // SHARD_BYTES + 1) * 1024
    free = shutil.disk_usage(next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())).free
    size = f"{_size(need)} ({tokens} tokens of {per_token} bytes)"
    say(f"features: {folder} takes {size}; {_size(free)} are free")
    if need >= free:
        raise UserError(
            f"the disk of {folder} must have room for {size}, got {_size(free)}; use another data.features_folder, "
            "fewer conversations, or data.features=online"
        )
    if config.features_confirm or (need <= ASK_ABOVE_BYTES and need <= ASK_ABOVE_SHARE * free):
        return
    if ask is None or not ask(f"Write {_size(need)} of features to {folder}?"):
        raise UserError(
            f"a feature store of {size} must be confirmed, got no yes; run again with data.features_confirm=true (and "
            "the same run_dir, so that the data are there already) or with data.features=online"
        )


def _terminal() -> Ask | None:
    """Ask on the terminal; None without one."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None

    def ask(question: str) -> bool:
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().casefold() in ("y", "yes")

    return ask


def _write(
    manifest: FeatureManifest,
    data: PreparedData,
    target: Target,
    folder: Path,
    *,
    pack_len: int,
    say: Say,
    shard_bytes: int,
) -> FeatureManifest:
    """Append shards until every conversation is there."""
    lengths = np.minimum(data.lengths, manifest.max_len)
    content = content_hashes(data, max_len=manifest.max_len, count=len(data))
    report = _reporter(say, int(lengths[manifest.conversations :].sum()), len(data))
    while manifest.conversations < len(data):
        begin = manifest.conversations
        inside = int((np.cumsum(lengths[begin:]) * bytes_per_token(manifest) <= shard_bytes).sum())
        numbers = np.arange(begin, begin + max(1, inside))
        tensors = _features(target, data, numbers, manifest, pack_len=pack_len)
        tensors |= {"lengths": torch.from_numpy(lengths[numbers]), "content": torch.from_numpy(content[numbers].copy())}
        manifest = _append(folder, manifest, tensors, data_hash=data.data_hash)
        report(manifest.conversations, int(lengths[numbers].sum()))
    return manifest


def _features(
    target: Target, data: PreparedData, numbers: np.ndarray, manifest: FeatureManifest, *, pack_len: int
) -> dict[str, Tensor]:
    """Run the target over conversations, packed; returns ``last`` and the taps, [T, D], in the conversations' order."""
    max_len = manifest.max_len
    lengths = np.minimum(data.lengths, max_len)
    ends = dict(zip(numbers.tolist(), np.cumsum(lengths[numbers]).tolist(), strict=True))
    shape, dtype = (int(lengths[numbers].sum()), manifest.hidden_size), getattr(torch, manifest.dtype)
    out = {name: torch.empty(shape, dtype=dtype) for name in ("last", *map(tap_name, manifest.taps))}
    rows, at_once = pack(lengths, numbers, pack_len=pack_len), max(1, BATCH_TOKENS // pack_len)
    for begin in range(0, len(rows), at_once):
        group = rows[begin : begin + at_once]
        packed = fill(data, group, pack_len=pack_len, max_len=max_len)
        output = target.forward(
            torch.from_numpy(packed.ids_RL.astype(np.int64)).to(target.device),
            positions_BL=torch.from_numpy(packed.positions_RL).to(target.device),
            doc_BL=torch.from_numpy(packed.doc_RL).to(target.device),
            taps=manifest.taps,
        )
        hidden = {"last": output.last_BLD} | {tap_name(k): tap_BLD for k, tap_BLD in output.taps.items()}
        for name, x_BLD in hidden.items():
            x_BLD = x_BLD.to("cpu", dtype)
            for row_LD, row in zip(x_BLD, group, strict=True):
                parts = row_LD.split([*lengths[row].tolist(), pack_len - int(lengths[row].sum())])
                for i, part in zip(row, parts, strict=False):
                    out[name][ends[i] - len(part) : ends[i]] = part
    return out


def _append(folder: Path, old: FeatureManifest, tensors: dict[str, Tensor], *, data_hash: str) -> FeatureManifest:
    """Add one shard; returns when it is safely on the disk and in the manifest."""
    name = f"shard-{len(old.shards):05d}.safetensors"
    blob = save(tensors)
    write_atomic(folder / name, blob)
    count, tokens = len(tensors["lengths"]), len(tensors["last"])
    entry = {
        "file": name,
        "sha256": hashlib.sha256(blob).hexdigest(),
        "size": len(blob),
        "mtime_ns": (folder / name).stat().st_mtime_ns,
        "conversations": count,
        "tokens": tokens,
    }
    new = FeatureManifest(**asdict(old))
    new.shards = [*old.shards, entry]
    new.conversations += count
    new.tokens += tokens
    new.data_hash = data_hash
    write_atomic(folder / MANIFEST, (json.dumps(asdict(new), indent=1) + "\n").encode())
    return new


def _reporter(say: Say, total_tokens: int, conversations: int, *, every_s: float = 10.0) -> Callable[[int, int], None]:
    """Return a callback that says now and then how far writing is."""
    begin = last = time.monotonic()
    done_tokens = 0

    def report(done: int, tokens: int) -> None:
        nonlocal last, done_tokens
        done_tokens += tokens
        now = time.monotonic()
        if now - last < every_s and done < conversations:
            return
        last, speed = now, done_tokens / max(now - begin, 1e-9)
        left = f", {(total_tokens - done_tokens) / speed / 60:.1f} min left" if done < conversations else ""
        say(f"features: {done}/{conversations} conversations, {speed:.0f} tokens/s{left}")

    return report


def _size(n_bytes: int) -> str:
    """Bytes in the unit that suits them."""
    power = min(4, (len(str(n_bytes)) - 1) // 3)
    return f"{n_bytes / 1000**power:.1f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
