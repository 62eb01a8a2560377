"""From a ``TargetConfig`` to a checked ``Target``; every failure is one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from distill.errors import UserError, did_you_mean
from distill.target import fingerprint
from distill.target.check import first_line, verify
from distill.target.info import TargetConfig
from distill.target.model import Target
from distill.target.packaged import smollm2_folder
from distill.target.quiet import no_bars
from distill.target.tiny import FAMILIES, tiny_target

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_BUILT_IN = ("smollm2", "tiny", *(f"tiny-{family}" for family in FAMILIES))
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def load_target(config: TargetConfig) -> Target:
    """Load, freeze and check the target that ``config`` names.

    Raises:
        UserError: unknown name, no network, damaged files, unsupported architecture or device.
    """
    if config.shard != "none":
        raise UserError(f"target.shard must be none outside training, got {config.shard}; leave it out")
    if config.dtype not in DTYPES:
        raise UserError(
            f"target.dtype must be one of {', '.join(DTYPES)}, got {config.dtype!r}."
            f"{did_you_mean(config.dtype, DTYPES)}"
        )
    device = choose_device(config.device)
    if config.name == "tiny" or config.name.startswith("tiny-"):
        target = tiny_target(
            config.name.removeprefix("tiny").removeprefix("-") or next(iter(FAMILIES)),
            seed=config.seed,
            dtype=DTYPES[config.dtype],
            device=device,
            tokenizer=True,
            attention=None if config.attention == "auto" else config.attention,
        )
    else:
        target = _from_folder(target_folder(config), config, device)
    if config.verify:
        verify(target)
    return target


def load_for_sharding(config: TargetConfig) -> Target:
    """Load a target whose layers ``shard_target`` is going to divide: on the CPU (mapped from the files), unchecked."""
    return load_target(replace(config, shard="none", device="cpu", verify=False))


def shard_target(target: Target, *, mesh: Any, device: torch.device, check: bool) -> None:
    """Divide the decoder layers over the processes of ``mesh`` (FSDP2); a layer is whole only while it runs.

    Embedding, final norm and head stay whole: they are read alone, outside the decoder's forward. From here on every
    process has to run the same number of forwards, each on its own batch.

    Args:
        target: loaded by ``load_for_sharding``; changed in place.
        mesh: one axis of ``torch.distributed.DeviceMesh``.
        device: of this process.
        check: compare with the model's own logits and masks, in all processes together.

    Raises:
        UserError: quantised weights, or the check's refusal.
    """
    decoder = target.model.get_decoder()
    if any(not parameter.is_floating_point() for parameter in decoder.parameters()):
        raise UserError(f"target {target.info.name} must have plain weights to be sharded, got quantised ones")
    for layer in target._layers:
        fully_shard(layer, mesh=mesh)
    divided = {parameter for layer in target._layers for parameter in layer.parameters()}
    alone = set(decoder.parameters()) - divided
    # A root above the layers lets a layer's weights arrive while the one before it runs.
    fully_shard(decoder, mesh=mesh, ignored_params=alone)
    target.model.to(device)
    target.device = device
    if check:
        verify(target)


def is_sharded(target: Target) -> bool:
    """Whether a forward needs every process."""
    return isinstance(target.model.get_decoder(), FSDPModule)


def choose_device(name: str) -> torch.device:
    """The device that ``target.device`` means here.

    Raises:
        UserError: this machine has none of that name.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"target.device must be auto or a device of this machine, got {name!r} ({reason}); use cpu"
        ) from error
    return device


def target_folder(config: TargetConfig) -> Path:
    """Return the local folder of the model, downloading it first where ``config.name`` is a hub name.

    Raises:
        UserError: no such name, no network, or no permission.
    """
    if config.name == "smollm2":
        return smollm2_folder()
    folder = Path(config.name).expanduser()
    if folder.is_dir():
        return folder
    wanted = [*_HUB_FILES, "*.py"] if config.trust_remote_code else _HUB_FILES
    hint = "give a local folder, smollm2 or tiny to work without the hub"
    try:
        # Only the root of the repository: subfolders hold other formats of the same weights.
        found = snapshot_download(
            config.name,
            revision=config.revision,
            allow_patterns=wanted,
            ignore_patterns=["*/*", "consolidated*"],
        )
    except HFValidationError as error:
        raise UserError(
            f"target.name must be {', '.join(_BUILT_IN)}, an existing folder or a hub name, got "
            f"{config.name!r}.{did_you_mean(config.name, _BUILT_IN)}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"target {config.name!r} must be a local folder or in the local hub cache while the hub cannot "
            f"be reached; check the name and the network, or {hint}.{did_you_mean(config.name, _BUILT_IN)}"
        ) from error
    except HfHubHTTPError as error:
        raise UserError(
            f"target {config.name!r} could not be fetched from the hub ({first_line(error)}); check the "
            f"name, the revision and your access to it, or {hint}"
        ) from error
    except OSError as error:
        raise UserError(f"target {config.name!r} could not be stored ({first_line(error)}); {hint}") from error
    return Path(found)


def _from_folder(folder: Path, config: TargetConfig, device: torch.device) -> Target:
    if not (folder / "config.json").is_file():
        raise UserError(f"target folder must be a transformers model with a config.json, got {folder} without one")
    fingerprint.weight_files(folder)
    trust = config.trust_remote_code
    with _load_errors(folder), no_bars():
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
        options: dict[str, Any] = {"attn_implementation": _attention(config, hf_config)}
        quantised = getattr(hf_config, "quantization_config", None) is not None
        if quantised:  # such weights are placed while they load and cannot be cast or moved afterwards
            options["device_map"] = {"": device}
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=DTYPES[config.dtype],
            use_safetensors=True,
            trust_remote_code=trust,
            output_loading_info=True,
            **options,
        )
        model, report = loaded
        tokenizer = None
        if any((folder / name).is_file() for name in TOKENIZER_FILES):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"weights of target {folder} must be complete, got {len(missing)} missing ({missing[0]}, ...); "
            "fetch or save the model again"
        )
    if not quantised:
        model = model.to(device)
    return Target(model, name=config.name, tokenizer=tokenizer, weights=lambda: fingerprint.folder_weights(folder))


def _attention(config: TargetConfig, hf_config: Any) -> str | None:
    """Pick the attention implementation; None leaves the choice (sdpa where supported) to transformers."""
    if config.attention != "auto":
        return config.attention
    # sdpa has no place for soft-capping.
    capped = getattr(hf_config.get_text_config(), "attn_logit_softcapping", None)
    return "eager" if capped else None


@contextmanager
def _load_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise UserError(
            f"weights in {folder} must be readable safetensors, got a truncated or corrupted file ({error}); "
            "fetch the model again"
        ) from error
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise UserError(
            f"target {folder} must be a causal LM that transformers can load, got: {first_line(error)}"
        ) from error
