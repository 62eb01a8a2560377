"""What a folder holds: which program's layout, which drafter, what it says about itself. Nothing is loaded for it.

Names of tensors decide, not the architecture a config claims: many folders carry a plain ``LlamaForCausalLM``.
"""

import json
import re
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from distill.errors import UserError
from distill.export.files import read_json
from distill.export.format import CONFIG, FORMAT

SAFE = ("model.safetensors", "medusa_lm_head.safetensors")
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")
MOST_HEADER = 100 << 20


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A drafter's folder.

    Attributes:
        layout: native, raw, speculators, eagle1, medusa_vllm, medusa_original, causal_lm or gguf.
        drafter: our name of what is in it.
        config: its ``config.json``.
        shapes: of its tensors, by name.
        weights: the files they lie in.
    """

    path: Path
    layout: str
    drafter: str
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    weights: tuple[Path, ...]


def recognise(path: str | Path) -> Folder:
    """Say what ``path`` holds.

    Raises:
        UserError: no folder, no weights or a damaged file, or nothing that is known here.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"the drafter must be a folder with {CONFIG} and weights, got {path}, which is none")
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs and not (path / CONFIG).is_file():
        return Folder(path=path, layout="gguf", drafter="", config={}, shapes={}, weights=tuple(ggufs))
    config = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    files = weight_files(path)
    shapes = {name: shape for file in files for name, shape in shapes_in(file).items()}
    layout, drafter = _layout(config, shapes)
    if not layout:
        some = ", ".join(sorted(shapes)[:5])
        raise UserError(
            f"{path} must hold an EAGLE-1, EAGLE-3, Medusa or draft model, got tensors of none of them ({some}, ...)"
        )
    return Folder(path=path, layout=layout, drafter=drafter, config=config, shapes=shapes, weights=files)


def _layout(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, str]:
    """(layout, drafter); empty where nothing fits."""
    names = set(shapes)
    if config.get("format") == FORMAT:
        return "native", str(config.get("drafter", ""))
    if "midlayer.self_attn.q_proj.weight" in names:
        return "raw", "eagle3"
    if "fc.weight" in names and "layers.0.hidden_norm.weight" in names:
        return "speculators", "eagle3"
    if "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names:
        return "eagle1", "eagle1"
    if any(re.fullmatch(r"(medusa_heads\.)?blocks\.\d+\.layers\.\d+\.weight", name) for name in names):
        return "medusa_vllm", "medusa"
    if any(re.fullmatch(r"(medusa_heads?\.)?\d+\.\d+\.linear\.weight", name) for name in names):
        return "medusa_original", "medusa"
    if "model.embed_tokens.weight" in names and "model.norm.weight" in names:
        return "causal_lm", "draft_model"
    return "", ""


def weight_files(path: Path) -> tuple[Path, ...]:
    """The files of a folder's tensors, safetensors before anything that holds pickles.

    Raises:
        UserError: none.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        named = sorted(set(read_json(index).get("weight_map", {}).values()))
        files = [path / str(name) for name in named]
        missing = [file.name for file in files if not file.is_file() or file.parent != path]
        if missing or not files:
            raise UserError(
                f"{path} must hold every file its index names, got it without {', '.join(missing) or 'any'}"
            )
        return tuple(files)
    for name in (*SAFE, *PICKLED):
        if (path / name).is_file():
            return (path / name,)
    raise UserError(f"{path} must hold one of {', '.join((*SAFE, *PICKLED))}, got a folder without weights")


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes, from the header alone where it is safetensors.

    Raises:
        UserError: a damaged file.
    """
    if file.suffix != ".safetensors":
        return {name: tuple(tensor.shape) for name, tensor in tensors_in(file).items()}
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > MOST_HEADER:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(stream.read(size))
        return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise UserError(
            f"{file} must be a whole safetensors file, got a damaged one ({error}); copy it again"
        ) from error


def tensors_in(file: Path) -> dict[str, Tensor]:
    """Load one file's tensors; of a pickle nothing but tensors, so that none of its code can run.

    Raises:
        UserError: damaged, or a pickle with something else in it.
    """
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        warnings.warn(f"{file} is a pickle; only its tensors are read. Prefer safetensors", stacklevel=3)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - unpickling fails in many ways, all of them the file's
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{file} must hold tensors and nothing else, got {first}; convert it to safetensors") from error
    if not isinstance(state, dict) or not all(isinstance(x, Tensor) for x in state.values()):
        raise UserError(f"{file} must hold tensors by name, got {type(state).__name__}; convert it to safetensors")
    return state


def load_tensors(folder: Folder) -> dict[str, Tensor]:
    """All of a folder's tensors.

    Raises:
        UserError: a damaged file.
    """
    return {name: tensor for file in folder.weights for name, tensor in tensors_in(file).items()}
