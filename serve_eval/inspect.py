"""task=inspect: what a drafter's folder holds, how it counts and what is missing, without loading the target."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from distill.config import opt
from distill.errors import UserError
from distill.export.recognise import Folder, recognise

LAYOUTS = {
    "native": "native export",
    "raw": "EAGLE-3, raw layout (vLLM, SGLang)",
    "speculators": "EAGLE-3, speculators layout",
    "eagle1": "EAGLE-1",
    "medusa_vllm": "Medusa, vLLM's layout",
    "medusa_original": "Medusa, original layout",
    "causal_lm": "draft model, plain transformers",
    "gguf": "GGUF for llama.cpp",
}
EXPECTED: dict[str, tuple[str, ...]] = {
    "raw": (
        *("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "draft_vocab_size"),
        *("rms_norm_eps", "rope_theta", "max_position_embeddings", "norm_before_residual"),
    ),
    "speculators": (
        *("speculators_model_type", "draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids"),
        "transformer_layer_config",
    ),
    "eagle1": ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "rms_norm_eps", "rope_theta"),
    "medusa_vllm": ("hidden_size", "vocab_size", "num_heads", "num_hidden_layers", "medusa_fc_bias"),
    "medusa_original": ("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"),
    "causal_lm": ("model_type", "hidden_size", "vocab_size"),
}
"""Fields without which a reader falls back on a default of its own."""


@dataclass(kw_only=True)
class Config:
    """Options of task=inspect."""

    folder: str | None = opt(None, "a drafter's folder, in any layout")


def run(config: Config, *, console: Console | None = None) -> None:
    """Print what is there.

    Raises:
        UserError: no folder given, or one that holds no drafter.
    """
    if not config.folder:
        raise UserError("folder must be a drafter's folder, got none; add folder=DIR")
    console = console or Console(soft_wrap=True)
    for line in report(recognise(config.folder)):
        console.print(line, highlight=False, markup=False)


def report(folder: Folder) -> list[str]:
    """Lines about a folder."""
    lines = [f"{folder.path}: {LAYOUTS[folder.layout]}"]
    if folder.layout == "gguf":
        return [*lines, *(f"  {file.name}" for file in folder.weights)]
    count = sum(_numel(shape) for name, shape in folder.shapes.items() if name not in ("d2t", "t2d"))
    lines.append(f"  {len(folder.shapes)} tensors, {count:,} numbers, in {', '.join(f.name for f in folder.weights)}")
    lines += [f"  {line}" for line in _conventions(folder)]
    missing = [name for name in EXPECTED.get(folder.layout, ()) if name not in folder.config]
    if missing:
        lines.append(f"  config.json lacks {', '.join(missing)}: every reader then takes a default of its own")
    if any(file.suffix != ".safetensors" for file in folder.weights):
        lines.append("  the weights are a pickle: only tensors are read from it here, other programs may run its code")
    return lines


def _conventions(folder: Folder) -> list[str]:
    config, shapes = folder.config, folder.shapes
    if folder.layout == "native":
        return [
            f"drafter {config['drafter']} for {config['target']['name']}, reads taps {config['taps']} (entering)",
            f"draft vocabulary: {config['draft_vocab_size'] or 'the whole one'}; weights {config['dtype']}",
        ]
    lines = []
    if folder.drafter == "eagle3":
        ids = _ids(config)
        counted = "as vLLM counts (entering)" if folder.layout == "speculators" else "vLLM and SGLang count differently"
        lines.append(f"layer ids: {ids} ({counted})" if ids else "layer ids: none, readers take 2, n/2, n-3 (entering)")
        width = shapes["lm_head.weight"][0] if "lm_head.weight" in shapes else None
        lines.append(f"draft vocabulary: {width or 'through the head of the target'}")
        if width is not None and width != config.get("vocab_size", width) and "d2t" not in shapes:
            lines.append("no d2t: vLLM would take draft ids for target ids, and nothing would be accepted")
        lines.append(f"norm_before_residual: {config.get('norm_before_residual', 'not said')}")
    if folder.layout == "eagle1" and "fc.bias" in shapes:
        lines.append("fc has a bias: vLLM drops it, SGLang reads it")
    biased = any(name.endswith(".bias") for name in shapes)
    if folder.layout == "medusa_vllm" and biased and not config.get("medusa_fc_bias"):
        lines.append("medusa_fc_bias is not true: vLLM drops the biases that are there")
    if folder.layout == "medusa_vllm" and "token_map" in shapes:
        lines.append("a truncated vocabulary: vLLM cannot load it")
    if "embed_tokens.weight" in shapes:
        lines.append("carries an embedding of its own")
    return lines


def _ids(config: dict[str, Any]) -> Any:
    nested = config.get("eagle_config")
    inner = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, dict) else None
    return config.get("eagle_aux_hidden_state_layer_ids") or inner


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
