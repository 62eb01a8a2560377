"""GGUF files for llama.cpp: EAGLE-3 drafters and draft models of the Llama family.

llama.cpp rotates neighbouring pairs of a head where transformers rotates its halves, so the rows of q and k are
reordered; its draft map holds target ids, not offsets. The vocabulary is copied from the target's own file: a drafter
must read and write the very same ids.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from torch import Tensor

from distill.errors import UserError
from distill.export.convert import check_free, described, read_native
from distill.export.eagle import aux_ids, decoder_table
from distill.export.fields import check_family
from distill.export.files import to_json
from distill.export.layout import Key, Native, to_theirs
from distill.files import fresh_folder, swap_folder

FILE = "drafter.gguf"
TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}

_BLOCK = {
    "input_layernorm.weight": "attn_norm.weight",
    "hidden_norm.weight": "attn_norm_2.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def _block(prefix: str, width: str, norms: Sequence[str], over: tuple[str, ...] = ()) -> tuple[Key, ...]:
    i = "{i}" if over else "0"
    rows = [Key(f"{prefix}.{norm}", f"blk.{i}.{_BLOCK[norm]}", ("D",), over) for norm in norms]
    for key in decoder_table(prefix, "", width, over):
        rows.append(Key(key.ours, f"blk.{i}.{_BLOCK[key.theirs.removeprefix('.')]}", key.shape, over))
    return tuple(rows)


EAGLE3 = (
    Key("fc.weight", "fc.weight", ("D", "T*D")),
    *_block("layers.0", "2*D", ("input_layernorm.weight", "hidden_norm.weight")),
    Key("norm.weight", "output_norm.weight", ("D",)),
    Key("lm_head.weight", "output.weight", ("W", "D")),
    Key("d2t", "d2t", ("W",), dtype=torch.int64),
)
LLAMA = (
    Key("model.embed_tokens.weight", "token_embd.weight", ("V", "D")),
    *_block("model.layers.{i}", "D", ("input_layernorm.weight",), ("layers",)),
    Key("model.norm.weight", "output_norm.weight", ("D",)),
    Key("lm_head.weight", "output.weight", ("V", "D"), when="untied"),
)


def convert_gguf(
    checkpoint: str | Path,
    out: str | Path,
    vocabulary: str | None,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    tokens: int = 3,
) -> tuple[Path, str]:
    """Write a folder with ``drafter.gguf``; it appears complete or not at all.

    Args:
        checkpoint: run folder or native export.
        out: a folder that does not exist, or with ``overwrite`` one that was written here.
        vocabulary: the target's own GGUF file.
        dtype: of the matrices; None: as they are.
        overwrite: replace what an earlier call wrote.
        tokens: drafted per pass, in the launch command.

    Returns:
        The folder, and the command that serves it.

    Raises:
        UserError: a drafter llama.cpp has no place for, no vocabulary or another one, or a folder that is taken.
    """
    native, source = read_native(checkpoint)
    if native.drafter not in ("eagle3", "draft_model"):
        raise UserError(
            f"format=gguf must be given for eagle3 or draft_model, got {native.drafter}; llama.cpp has no other"
        )
    if vocabulary is None:
        raise UserError("vocabulary must be the target's own GGUF file with format=gguf, got none; add vocabulary=FILE")
    tokenizer = tokenizer_fields(Path(vocabulary), size=native.target["vocab_size"])
    fields, tensors = (_eagle3 if native.drafter == "eagle3" else draft_model_fields)(native)
    out = Path(out)
    kind = "draft-eagle3" if native.drafter == "eagle3" else "draft-simple"
    command = f"llama-server -m {vocabulary} -md {out / FILE} --spec-type {kind} --draft-max {tokens}"
    record, card = described(source, "gguf", reader="llama.cpp", command=command)
    with fresh_folder(out, what="export folder") as fresh:
        check_free(out, overwrite=overwrite)
        write_gguf(fresh / FILE, fields, tokenizer, tensors, dtype=dtype or native.dtype)
        (fresh / "provenance.json").write_text(to_json(record), encoding="utf-8")
        (fresh / "README.md").write_text(card, encoding="utf-8")
        swap_folder(fresh, out)
    return out, command


def _eagle3(native: Native) -> tuple[dict[str, Any], dict[str, Tensor]]:
    check_family(native, "gguf")
    for flag in ("fc_norm", "norm_output"):
        if native.flags[flag]:
            raise UserError(f"format=gguf must have drafter.{flag}=false, which llama.cpp does not read, got true")
    if len(native.taps) != 3:
        raise UserError(f"format=gguf must have three taps, which llama.cpp extracts, got {len(native.taps)}")
    target = native.target
    tensors = to_theirs(EAGLE3, native, left_out=["t2d"])
    fields = {
        **_llama("eagle3", native, target, layers=1),
        "eagle3.target_layers": aux_ids(native, format_name="gguf"),
        "eagle3.target_hidden_size": target["hidden_size"],
        "eagle3.norm_before_residual": native.flags["norm_before_residual"],
        "eagle3.norm_before_fc": False,
    }
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    return fields, _paired(tensors, target["n_heads"], target["n_kv_heads"])


def draft_model_fields(native: Native) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields and tensors of a causal LM of the Llama family.

    Raises:
        UserError: another family, or biases.
    """
    config = native.flags["architecture"]
    if config.get("model_type") != "llama":
        raise UserError(
            f"format=gguf must be given for a draft model of the family llama, got {config.get('model_type')}; write "
            "it as format=transformers and use llama.cpp's own converter"
        )
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise UserError("format=gguf must be given for a draft model without biases, got one with them")
    heads = config["num_attention_heads"]
    shape = {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "vocab_size": config["vocab_size"],
        "rms_norm_eps": config["rms_norm_eps"],
        "max_positions": config["max_position_embeddings"],
        "rope_parameters": config["rope_parameters"],
        "name": native.target["name"],
    }
    layers = config["num_hidden_layers"]
    untied = "lm_head.weight" in native.tensors
    flags = {"num_layers": layers, "untied": untied}
    renamed = Native(drafter=native.drafter, flags=flags, target=shape, taps=(), tensors=native.tensors)
    fields = _llama("llama", renamed, shape, layers=layers)
    return fields, _paired(to_theirs(LLAMA, renamed), shape["n_heads"], shape["n_kv_heads"])


def _llama(arch: str, native: Native, shape: Mapping[str, Any], *, layers: int) -> dict[str, Any]:
    """Fields of a model made of Llama blocks."""
    rope = native.flags.get("rope") or shape["rope_parameters"]
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear"):
        raise UserError(f"format=gguf must have plain or linear rotary positions, got {kind!r}; use another format")
    fields = {
        "general.architecture": arch,
        "general.name": f"drafter for {shape['name']}",
        f"{arch}.block_count": layers,
        f"{arch}.context_length": shape["max_positions"],
        f"{arch}.embedding_length": shape["hidden_size"],
        f"{arch}.feed_forward_length": native.sizes()["I"],
        f"{arch}.attention.head_count": shape["n_heads"],
        f"{arch}.attention.head_count_kv": shape["n_kv_heads"],
        f"{arch}.attention.key_length": shape["head_dim"],
        f"{arch}.attention.value_length": shape["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(shape["rms_norm_eps"]),
        f"{arch}.rope.dimension_count": shape["head_dim"],
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        f"{arch}.vocab_size": shape["vocab_size"],
    }
    if kind == "linear":
        fields |= {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": float(rope["factor"])}
    return fields


def _paired(tensors: dict[str, Tensor], heads: int, kv_heads: int) -> dict[str, Tensor]:
    """Reorder the rows of q and k: from halves to neighbouring pairs."""
    counts = {"attn_q.weight": heads, "attn_k.weight": kv_heads}
    return {
        name: paired(tensor, next(n for end, n in counts.items() if name.endswith(end)))
        if name.endswith(tuple(counts))
        else tensor
        for name, tensor in tensors.items()
    }


def paired(rows: Tensor, heads: int) -> Tensor:
    """Row (half h, place p) of every head becomes row (p, h)."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def tokenizer_fields(path: Path, *, size: int) -> dict[str, tuple[Any, GGUFValueType, GGUFValueType | None]]:
    """The ``tokenizer.*`` fields of a GGUF file: value, type, type of the elements.

    Raises:
        UserError: no such file, a damaged one, or a vocabulary of another size.
    """
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise UserError(f"vocabulary must be the target's own GGUF file, got {path}: {error}") from error
    found = {
        name: (field.contents(), field.types[0], field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None)
        for name, field in reader.fields.items()
        if name.startswith("tokenizer.")
    }
    count = len(found["tokenizer.ggml.tokens"][0]) if "tokenizer.ggml.tokens" in found else 0
    if count != size:
        raise UserError(f"vocabulary must be a GGUF file of the target's {size} tokens, got {path} with {count}")
    return found


def write_gguf(
    path: Path,
    fields: Mapping[str, Any],
    tokenizer: Mapping[str, tuple[Any, GGUFValueType, GGUFValueType | None]],
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
) -> None:
    """Write one file: norms in fp32 as llama.cpp wants them, maps as int64, everything else as ``dtype``."""
    writer = GGUFWriter(path, fields["general.architecture"])
    for name, value in fields.items():
        if name == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, (value, kind, element) in tokenizer.items():
        writer.add_key_value(name, value, kind, sub_type=element)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            writer.add_tensor(name, tensor.numpy())
            continue
        kept = torch.float32 if tensor.ndim == 1 else dtype
        data = tensor.to(kept).contiguous()
        raw = data.view(torch.uint8).numpy() if kept == torch.bfloat16 else data.numpy()
        writer.add_tensor(name, np.ascontiguousarray(raw), raw_dtype=TYPES[kept])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
