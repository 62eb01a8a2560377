"""The target as a GGUF file, for llama.cpp: the same conversion as a draft model's, with the folder's own tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFValueType as Type
from gguf import TokenType
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from distill.errors import UserError
from distill.export.gguf import draft_model_fields, write_gguf
from distill.export.layout import Native
from distill.target.fingerprint import weight_files

Fields = dict[str, tuple[Any, Type, Type | None]]


def write_target(folder: Path, path: Path, *, dtype: torch.dtype) -> None:
    """Convert a transformers folder of the Llama family.

    Args:
        folder: with ``config.json``, safetensors and ``tokenizer.json``.
        path: the file to write.
        dtype: of the matrices.

    Raises:
        UserError: another family, another kind of tokenizer, or damaged files.
    """
    config = AutoConfig.from_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise UserError(
                f"target {file} must be a readable safetensors file, got {error}; fetch it again"
            ) from error
    native = Native(
        drafter="draft_model",
        flags={"architecture": config.to_dict()},
        target={"name": folder.name},
        taps=(),
        tensors=tensors,
    )
    fields, renamed = draft_model_fields(native)
    write_gguf(path, fields, bpe_fields(folder, size=config.vocab_size), renamed, dtype=dtype)


def bpe_fields(folder: Path, *, size: int) -> Fields:
    """The ``tokenizer.*`` fields of a byte-pair tokenizer; ids without a token get a name of their own.

    Text is split as llama.cpp's default does: engines are given ids here, not text.

    Raises:
        UserError: no ``tokenizer.json``, or one that is not of this kind.
    """
    path = folder / "tokenizer.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        model = content["model"]
        merges, vocabulary, added = model["merges"], model["vocab"], content.get("added_tokens", [])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"engine llama_cpp must find a byte-pair tokenizer in {path}, got none ({type(error).__name__}: {error}); "
            "use another engine"
        ) from error
    tokens = [f"[UNUSED{i}]" for i in range(size)]
    kinds = [int(TokenType.UNUSED)] * size
    for token, i in vocabulary.items():
        tokens[i], kinds[i] = token, int(TokenType.NORMAL)
    for entry in added:
        tokens[entry["id"]] = entry["content"]
        kinds[entry["id"]] = int(TokenType.CONTROL if entry["special"] else TokenType.USER_DEFINED)
    joined = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    fields: Fields = {
        "tokenizer.ggml.model": ("gpt2", Type.STRING, None),
        "tokenizer.ggml.pre": ("default", Type.STRING, None),
        "tokenizer.ggml.tokens": (tokens, Type.ARRAY, Type.STRING),
        "tokenizer.ggml.token_type": (kinds, Type.ARRAY, Type.INT32),
        "tokenizer.ggml.merges": (joined, Type.ARRAY, Type.STRING),
        "tokenizer.ggml.add_bos_token": (False, Type.BOOL, None),
    }
    for name, i in _special(folder).items():
        fields[f"tokenizer.ggml.{name}_token_id"] = (i, Type.UINT32, None)
    return fields


def _special(folder: Path) -> dict[str, int]:
    """Begin and end of text; where there are several ends, the first."""
    try:
        config: Any = GenerationConfig.from_pretrained(folder)
    except OSError:
        config = AutoConfig.from_pretrained(folder)
    found = {}
    for name in ("bos", "eos"):
        value = getattr(config, f"{name}_token_id", None)
        if isinstance(value, list):
            value = value[0] if value else None
        if value is not None:
            found[name] = int(value)
    return found
