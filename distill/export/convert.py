"""From the native export to another program's folder: which formats there are, what each can hold, how it is written.

A new format is a function ``(native, lend) -> Foreign`` and a line in ``FORMATS``; reading it back is ``adopt.py``.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from distill.errors import UserError, did_you_mean
from distill.export import format as native_format
from distill.export.card import render_foreign
from distill.export.causal_lm import draft_model_plain
from distill.export.eagle import (
    Lend,
    eagle1_sglang,
    eagle1_vllm,
    eagle3_openvino,
    eagle3_sglang,
    eagle3_speculators,
    eagle3_vllm,
)
from distill.export.files import read_json, to_json
from distill.export.layout import Foreign, Native
from distill.export.medusa import medusa_original, medusa_vllm
from distill.files import fresh_folder, swap_folder, unwritable

Writer = Callable[[Native, Lend], Foreign]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A layout and who reads it.

    Attributes:
        reader: the program, for people.
        writers: what is written, per drafter.
        launch: command that serves it, per drafter; ``{target}``, ``{folder}`` and ``{tokens}`` are filled in.
        note: what to know before relying on it.
    """

    reader: str
    writers: Mapping[str, Writer]
    launch: Mapping[str, str]
    note: str = ""


def _vllm(method: str) -> str:
    spec = '{{"method": "' + method + '", "model": "{folder}", "num_speculative_tokens": {tokens}}}'
    return f"vllm serve {{target}} --speculative-config '{spec}'"


def _sglang(algorithm: str) -> str:
    return (
        "python -m sglang.launch_server --model-path {target} --speculative-algorithm "
        f"{algorithm} --speculative-draft-model-path {{folder}} --speculative-num-steps {{tokens}} "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens {window}"
    )


_ASSISTED = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "t, d = (M.from_pretrained(p) for p in ('{target}', '{folder}')); t.generate(..., assistant_model=d)\""
)

FORMATS: dict[str, Format] = {
    "vllm": Format(
        reader="vLLM",
        writers={
            "eagle3": eagle3_vllm,
            "eagle1": eagle1_vllm,
            "medusa": medusa_vllm,
            "draft_model": draft_model_plain,
        },
        launch={
            "eagle3": _vllm("eagle3"),
            "eagle1": _vllm("eagle"),
            "medusa": _vllm("medusa"),
            "draft_model": _vllm("draft_model"),
        },
    ),
    "speculators": Format(
        reader="vLLM, by the speculators layout",
        writers={"eagle3": eagle3_speculators},
        launch={"eagle3": "vllm serve {folder}"},
    ),
    "sglang": Format(
        reader="SGLang",
        writers={"eagle3": eagle3_sglang, "eagle1": eagle1_sglang, "draft_model": draft_model_plain},
        launch={"eagle3": _sglang("EAGLE3"), "eagle1": _sglang("EAGLE"), "draft_model": _sglang("STANDALONE")},
        note="Names, shapes and fields are checked; it was not run in SGLang, which needs a GPU.",
    ),
    "medusa": Format(
        reader="the original Medusa project, TGI",
        writers={"medusa": medusa_original},
        launch={"medusa": "text-generation-launcher --model-id {folder}"},
        note="Names, shapes and fields are checked; it was not run.",
    ),
    "openvino": Format(
        reader="OpenVINO GenAI",
        writers={"eagle3": eagle3_openvino, "draft_model": draft_model_plain},
        launch={
            "eagle3": "optimum-cli export openvino --model {folder} --task text-generation-with-past "
            "--trust-remote-code {folder}-ir",
            "draft_model": "optimum-cli export openvino --model {folder} --task text-generation-with-past {folder}-ir",
        },
        note="EAGLE-3: the converter ignores the layer ids. Set openvino_rt_info.json's hidden_layers_list in the "
        "converted model's rt_info before serving, or it reads other layers without a word.",
    ),
    "transformers": Format(
        reader="transformers, as assistant_model",
        writers={"draft_model": draft_model_plain},
        launch={"draft_model": _ASSISTED},
    ),
}
"""``gguf`` is not here: it is one file, and needs the target's own (``gguf.py``)."""


def names() -> list[str]:
    """Every format, the native one first."""
    return ["native", *FORMATS, "gguf"]


def format_of(name: str, drafter: str) -> tuple[Format, Writer]:
    """The format and its writer for a drafter.

    Raises:
        UserError: unknown, or it cannot hold this drafter; says which formats can.
    """
    if name not in FORMATS:
        raise UserError(f"format must be one of {', '.join(names())}, got {name!r}.{did_you_mean(name, names())}")
    chosen = FORMATS[name]
    if drafter not in chosen.writers:
        able = ["native", *(other for other, f in FORMATS.items() if drafter in f.writers)]
        if drafter in ("eagle3", "draft_model"):
            able.append("gguf")
        raise UserError(
            f"format={name} must be given for one of {', '.join(chosen.writers)}, got {drafter}; it can be written as "
            f"{', '.join(able)}"
        )
    return chosen, chosen.writers[drafter]


def read_native(checkpoint: str | Path) -> tuple[Native, Path]:
    """A native export's content without its target, and the folder it came from.

    Raises:
        UserError: no such export, or a damaged one.
    """
    folder = native_format.resolve_checkpoint(checkpoint)
    config = native_format.read_config(folder)
    tensors = native_format.read_tensors(folder, config)
    native_format.read_vocab(folder, config, tensors, config["target"]["vocab_size"])
    native = Native(
        drafter=config["drafter"],
        flags=config["config"],
        target=config["target"],
        taps=tuple(config["taps"]),
        tensors=tensors,
    )
    return native, folder


def convert(
    checkpoint: str | Path,
    out: str | Path,
    name: str,
    lend: Lend,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    tokens: int = 3,
    served: str | None = None,
) -> tuple[Path, str]:
    """Write an export in another program's layout; the folder appears complete or not at all.

    Args:
        checkpoint: run folder or native export.
        out: a folder that does not exist, or with ``overwrite`` one that was written here.
        name: of the format.
        lend: gives the target's embedding or head, where the layout repeats it.
        dtype: of the weights; None: as they are.
        overwrite: replace what an earlier call wrote.
        tokens: drafted per pass, in the launch command.
        served: how the engine finds the target; None: by the name it was loaded under.

    Returns:
        The folder, and the command that serves it.

    Raises:
        UserError: a format that cannot hold this drafter, or a folder that is taken or cannot be written.
    """
    native, source = read_native(checkpoint)
    chosen, writer = format_of(name, native.drafter)
    if dtype is not None:
        cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in native.tensors.items()}
        native = replace(native, tensors=cast)
    foreign = writer(native, lend)
    out = Path(out)
    values = {"target": served or native.target["name"], "folder": out, "tokens": tokens, "window": tokens + 1}
    command = chosen.launch[native.drafter].format(**values)
    record, card = described(source, name, reader=chosen.reader, command=command, note=chosen.note)
    write_foreign(out, foreign, provenance=record, card=card, overwrite=overwrite)
    return out, command


def described(source: Path, name: str, *, reader: str, command: str, note: str = "") -> tuple[dict[str, Any], str]:
    """Provenance and card of what is made from the native export ``source``; see ``render_foreign``."""
    config = native_format.read_config(source)
    path = source / native_format.PROVENANCE
    record = read_json(path) if path.is_file() else {}
    record |= {"format": name, "source_sha256": config["weights_sha256"]}
    return record, render_foreign(config, record, reader=reader, command=command, note=note)


def write_foreign(
    out: Path, foreign: Foreign, *, provenance: Mapping[str, Any], card: str, overwrite: bool = False
) -> None:
    """Write a layout's files; the folder appears complete or not at all.

    Raises:
        UserError: it is taken, or cannot be written.
    """
    with fresh_folder(out, what="export folder") as fresh:
        check_free(out, overwrite=overwrite)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in foreign.tensors.items()}
        try:
            # Readers of safetensors ask for the framework.
            save_file(tensors, fresh / foreign.weights, metadata={"format": "pt"})
        except SafetensorError as error:
            raise unwritable(out, error) from error
        (fresh / foreign.weights).chmod(0o644)  # safetensors keeps its file from everybody else
        for file, content in {"config.json": foreign.config, **foreign.extra, "provenance.json": provenance}.items():
            (fresh / file).write_text(to_json(content), encoding="utf-8")
        (fresh / "README.md").write_text(card, encoding="utf-8")
        swap_folder(fresh, out)


def check_free(out: Path, *, overwrite: bool) -> None:
    """Only what was written here may be replaced.

    Raises:
        UserError: the folder is taken.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    ours = (out / "provenance.json").is_file() and "source_sha256" in _quiet_json(out / "provenance.json")
    if not (overwrite and ours):
        hint = "remove it first" if overwrite else "choose another folder or pass overwrite=true"
        raise UserError(f"the export folder must not exist yet, got {out}; {hint}")


def _quiet_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
