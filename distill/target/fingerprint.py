"""What identifies a target: its weights, its tokenizer and its chat template, each as a short digest.

Weights of a folder are hashed as stored, so the fingerprint does not depend on the dtype they are loaded in.
"""

import hashlib
import json
import struct
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.errors import UserError
from distill.target.cache import cache_dir

_CHUNK = 1 << 22
_REMEMBER_FROM = 64 << 20  # bytes; hashing less takes well under a second
PARTS = ("weights", "tokenizer", "chat_template")


def folder_weights(folder: Path) -> str:
    """Digest of a folder's safetensors weights: names, dtypes, shapes and bytes, in name order.

    For big folders the digest is remembered in the user's cache under the files' paths, sizes and times.

    Raises:
        UserError: a file is missing or not a safetensors file.
    """
    files = weight_files(folder)
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    if sum(size for _, size, _ in stats) < _REMEMBER_FROM:
        return _hash_files(files)
    sidecar = cache_dir() / "fingerprints" / short(json.dumps(stats).encode())
    with suppress(OSError):
        known = sidecar.read_text()
        if len(known) == 16:
            return known
    digest = _hash_files(files)
    # A cache that cannot be written only costs time on the next run.
    with suppress(OSError):
        sidecar.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=sidecar.parent, delete=False) as file:
            file.write(digest)
        Path(file.name).replace(sidecar)
    return digest


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that make up the model in ``folder``.

    Raises:
        UserError: there are none, or a listed shard is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (folder / name).is_file():
            raise UserError(
                f"target folder must hold its weights as safetensors, got {folder} without {name}; "
                "save the model with save_pretrained"
            )
    return [folder / name for name in names]


def state_weights(state: Mapping[str, Tensor]) -> str:
    """Digest of weights in memory: names, dtypes, shapes and bytes, in name order."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of everything that decides how text becomes ids, or "none" without a tokenizer."""
    if tokenizer is None:
        return "none"
    if tokenizer.is_fast:
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        # These two are run-time settings that a call may change.
        described.pop("padding", None)
        described.pop("truncation", None)
    else:
        described = tokenizer.get_vocab()
    return short(json.dumps(described, sort_keys=True).encode())


def chat_template_digest(tokenizer: Any) -> str:
    """Digest of the chat template, or "none"."""
    template = getattr(tokenizer, "chat_template", None)
    return "none" if template is None else short(json.dumps(template, sort_keys=True).encode())


def difference(ours: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Say which parts of two fingerprints differ, for instance in a refusal; empty when they are equal."""
    return "; ".join(
        f"{part.replace('_', ' ')} {ours.get(part, 'unknown')} here, {other.get(part, 'unknown')} there"
        for part in PARTS
        if ours.get(part) != other.get(part)
    )


def short(data: bytes) -> str:
    """The digest of ``data``: 16 hex digits."""
    return hashlib.sha256(data).hexdigest()[:16]


def _hash_files(files: Iterable[Path]) -> str:
    tensors = [(name, *where) for path in files for name, where in _tensor_table(path).items()]
    digest = hashlib.sha256()
    for name, path, dtype, shape, start, end in sorted(tensors):
        digest.update(f"{name}|{dtype}|{shape}|".encode())
        with path.open("rb") as file:
            file.seek(start)
            left = end - start
            while left and (chunk := file.read(min(left, _CHUNK))):
                digest.update(chunk)
                left -= len(chunk)
    return digest.hexdigest()[:16]


def _tensor_table(path: Path) -> dict[str, tuple[Path, str, list[int], int, int]]:
    """Read a safetensors header: name -> (file, dtype, shape, first byte, end byte)."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        first = 8 + size
        return {
            name: (path, t["dtype"], t["shape"], first + t["data_offsets"][0], first + t["data_offsets"][1])
            for name, t in header.items()
        }
    except (struct.error, ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
        raise UserError(
            f"{path} must be a safetensors file, got one that is truncated or corrupted; fetch it again"
        ) from error
