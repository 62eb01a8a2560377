"""The native checkpoint: a folder that says everything a loader needs and that a loader refuses when it does not fit.

    config.json         schema version, drafter name, every flag, tap convention and taps, target fingerprint, sha256
    model.safetensors   the drafter's own weights; ``d2t`` int64[W] offsets and ``t2d`` bool[V] when it has a vocabulary
    provenance.json     commit, versions, command line, resolved config, data hash, measured figures
    README.md           the model card
    calibration.json    optional: how often its choices are the target's (``calibration.py``), for these weights only

Nothing is guessed on loading: a flag that is missing, a tensor too many, a map that contradicts itself or another
target is an error, never a default. Pickles are never read.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from distill.calibration import Calibration, read
from distill.config import build, flatten, to_dict
from distill.drafters.base import Drafter
from distill.errors import UserError
from distill.export.card import render
from distill.export.files import read_json, sha256, to_json
from distill.files import fresh_folder, swap_folder, unwritable, write_atomic
from distill.registry import drafter_class
from distill.target import Target
from distill.vocab import DraftVocab

FORMAT = "draftsmith"
SCHEMA_VERSION = 1
TAP_CONVENTION = "entering"
"""Tap k is the hidden state entering layer k (``TargetOutput``); the only convention this format knows."""

CONFIG, WEIGHTS, PROVENANCE, CARD = "config.json", "model.safetensors", "provenance.json", "README.md"
CALIBRATION = "calibration.json"
KEYS = {
    *("format", "schema_version", "drafter", "config", "tap_convention", "taps", "draft_vocab_size", "dtype"),
    *("target", "weights_sha256", "flags_sha256"),
}
MAPS = {"vocab.d2t": "d2t", "vocab.t2d": "t2d"}
"""State-dict name -> name in the file, where the two differ."""


# ------------------------------------------------------------------------------------------------------ writing
def save_drafter(
    drafter: Drafter,
    folder: str | Path,
    *,
    provenance: Mapping,
    card: Mapping | None = None,
    overwrite: bool = False,
) -> Path:
    """Write ``drafter`` to ``folder``; the folder appears complete or not at all.

    Args:
        drafter: weights are written in the type they have.
        folder: must not exist, unless ``overwrite`` and it holds an export (anything else is never replaced).
        provenance: what ``provenance.collect`` returned.
        card: measured figures for the model card, name -> value (``{"tau": 1.93}``).
        overwrite: replace an export that is already there.

    Raises:
        UserError: the folder is taken, or cannot be written.
    """
    folder = Path(folder)
    if drafter.target.base is not None and next(drafter.parameters()).dtype not in (torch.float32, torch.float64):
        raise UserError(
            "an adapted target's drafter must be saved in the precision of its training, or its adapter rounds, "
            f"got {_dtype_name(next(drafter.parameters()).dtype)}; load it without dtype="
        )
    tensors = {MAPS.get(k, k): v.detach().cpu().contiguous() for k, v in drafter.state_dict().items()}
    record = {**provenance, "measured": dict(card or {})}
    with fresh_folder(folder, what="export folder") as fresh:
        _check_free(folder, overwrite=overwrite)
        try:
            save_file(tensors, fresh / WEIGHTS)
        except SafetensorError as error:
            raise unwritable(folder, error) from error
        config = _describe(drafter) | {"weights_sha256": sha256(fresh / WEIGHTS)}
        config["flags_sha256"] = flags_sha256(config)
        (fresh / CONFIG).write_text(to_json(config), encoding="utf-8")
        (fresh / PROVENANCE).write_text(to_json(record), encoding="utf-8")
        (fresh / CARD).write_text(render(config, record), encoding="utf-8")
        shutil.copymode(fresh / CONFIG, fresh / WEIGHTS)  # safetensors keeps its file from everybody else
        swap_folder(fresh, folder)
    return folder


def copy_export(checkpoint: str | Path, out: str | Path, *, overwrite: bool = False) -> Path:
    """Check the export behind ``checkpoint`` and copy it to ``out``, complete or not at all.

    Raises:
        UserError: no such export, a damaged one, or ``out`` is taken or cannot be written.
    """
    source, out = resolve_checkpoint(checkpoint), Path(out)
    read_tensors(source, read_config(source))
    for name in (PROVENANCE, CARD):
        if not (source / name).is_file():
            raise UserError(f"{source} must hold {name}, got a folder without it; export the run again")
    read_json(source / PROVENANCE)
    with fresh_folder(out, what="export folder") as fresh:
        _check_free(out, overwrite=overwrite)
        extra = [CALIBRATION] if read_calibration(source, read_config(source)) else []
        for name in (CONFIG, WEIGHTS, PROVENANCE, CARD, *extra):
            # Not ``copyfile``: its ``sendfile`` may end early at a limit, and that is taken for the end of the file.
            with (source / name).open("rb") as file, (fresh / name).open("wb") as copy:
                shutil.copyfileobj(file, copy, 1 << 20)
        if sha256(fresh / WEIGHTS) != read_config(fresh)["weights_sha256"]:
            raise UserError(f"{source} must stay as it is while it is copied, got a change meanwhile; copy it again")
        swap_folder(fresh, out)
    return out


def _check_free(folder: Path, *, overwrite: bool) -> None:
    if folder.exists() and not (overwrite and _is_export(folder)):
        hint = "remove it first" if overwrite else "choose another folder or pass overwrite=true"
        raise UserError(f"the export folder must not exist yet, got {folder}; {hint}")


def update_card(folder: str | Path, measured: Mapping[str, Any]) -> None:
    """Add measured figures to an export's provenance and render its model card again."""
    folder = Path(folder)
    config = read_config(folder)
    record = read_json(folder / PROVENANCE)
    record["measured"] = {**record.get("measured", {}), **measured}
    write_atomic(folder / PROVENANCE, to_json(record))
    write_atomic(folder / CARD, render(config, record))


def save_calibration(folder: str | Path, calibration: Calibration) -> Path:
    """Write what was measured of an export's drafter beside it.

    Raises:
        UserError: no export there, or it cannot be written.
    """
    folder = resolve_checkpoint(folder)
    record = asdict(replace(calibration, weights_sha256=read_config(folder)["weights_sha256"]))
    write_atomic(folder / CALIBRATION, to_json(record))
    return folder / CALIBRATION


def read_calibration(folder: Path, config: Mapping) -> Calibration | None:
    """Read an export's calibration; None where there is none.

    Raises:
        UserError: it is damaged, or was measured of other weights.
    """
    path = folder / CALIBRATION
    if not path.is_file():
        return None
    calibration = read(read_json(path), str(path))
    if calibration.weights_sha256 != config["weights_sha256"]:
        got = f"one of {calibration.weights_sha256[:16] or 'unknown weights'}"
        raise UserError(
            f"{path} must have been measured of this checkpoint ({config['weights_sha256'][:16]}), got {got}; run "
            f"python -m serve_eval task=calibrate checkpoint={folder}"
        )
    return calibration


def flags_sha256(config: Mapping) -> str:
    """Digest of everything a ``config.json`` says, but for the digest itself."""
    rest = {name: value for name, value in config.items() if name != "flags_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()


def _describe(drafter: Drafter) -> dict[str, Any]:
    info = drafter.target.info
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "drafter": drafter.name,
        "config": to_dict(drafter.config),
        "tap_convention": TAP_CONVENTION,
        "taps": list(drafter.taps(drafter.config, info)),
        "draft_vocab_size": None if drafter.vocab is None else drafter.vocab.size,
        "dtype": _dtype_name(next(drafter.parameters()).dtype),
        "target": {**to_dict(info), "fingerprint": dict(drafter.target.base or drafter.target.fingerprint)},
    }


# ------------------------------------------------------------------------------------------------------ reading
def load_drafter(
    folder: str | Path,
    target: Target,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    allow_target_mismatch: bool = False,
    calibrated: bool = True,
) -> Drafter:
    """Load an export for decoding with ``target``.

    Args:
        folder: an export folder, or a run folder that holds one.
        target: the model the drafter was trained for; decode with the drafter's own ``target``, which for Medusa-2 is
            this one adapted.
        device: None follows the target.
        dtype: None keeps the type the weights were written in.
        allow_target_mismatch: turn a differing fingerprint into a warning (decoding stays lossless, acceptance
            suffers); shapes must agree all the same.
        calibrated: read its calibration; False for who measures a new one, whatever became of the old.

    Raises:
        UserError: anything missing, unexpected, damaged, contradictory, or made for another target.
    """
    folder = resolve_checkpoint(folder)
    config = read_config(folder)
    if target.base is not None:
        raise UserError(
            f"{folder} must be loaded for a target as it was published, got {target.label}; load that one anew"
        )
    _check_target(folder, config["target"], target, allow_mismatch=allow_target_mismatch)
    cls: Any = drafter_class(config["drafter"])
    flags = _read_flags(folder, cls.Config, config["config"])
    taps = list(cls.taps(flags, target.info))
    if config["tap_convention"] != TAP_CONVENTION or config["taps"] != taps:
        got = f"{config['taps']} ({config['tap_convention']})"
        raise UserError(f"{folder / CONFIG}: taps must be {taps} ({TAP_CONVENTION}), got {got}; export the run again")
    tensors = read_tensors(folder, config)
    vocab = read_vocab(folder, config, tensors, target.info.vocab_size)
    drafter = cls(flags, target, vocab)
    _fill(folder, drafter, tensors)
    drafter.calibration = read_calibration(folder, config) if calibrated else None
    # Before they change their type: what an adapter makes of the target depends on every bit.
    drafter = drafter.decoding()
    return drafter.to(device=target.device if device is None else device, dtype=dtype).eval()


def resolve_checkpoint(path: str | Path) -> Path:
    """Return the export folder behind ``path``: the folder itself, or ``export/`` of a run folder.

    Raises:
        UserError: nothing there, a run that is not finished, or a folder of another kind.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"checkpoint must be a run folder or an export folder, got {path}, which does not exist")
    if path.is_file():
        path = path.parent
    if _is_export(path):
        return path
    if _is_export(path / "export"):
        return path / "export"
    if (path / "checkpoints").is_dir():
        raise UserError(
            f"checkpoint must be a finished run, got {path}, which has no export yet; run the same training command "
            "again to resume it"
        )
    raise UserError(f"checkpoint must be a run folder or an export folder, got {path}, which has no {CONFIG} of ours")


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check an export's ``config.json``; every key must be there and no other."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder} must hold {name}, got a folder without it; export the run again")
    config = read_json(folder / CONFIG)
    if config.get("format") != FORMAT:
        raise UserError(f"{folder / CONFIG}: format must be {FORMAT!r}, got {config.get('format')!r}")
    if config.get("schema_version") != SCHEMA_VERSION:
        got = config.get("schema_version")
        raise UserError(f"{folder / CONFIG}: schema_version must be {SCHEMA_VERSION}, got {got!r}; update draftsmith")
    _same_names(KEYS, config, f"{folder / CONFIG}: keys")
    if config["flags_sha256"] != flags_sha256(config):
        raise UserError(
            f"{folder / CONFIG} must be the file that was exported, got a changed one: a flag that is not that of the "
            "training costs acceptance without a word; export the run again"
        )
    needed = {"name", "n_layers", "hidden_size", "vocab_size", "fingerprint"}
    known = set(config["target"]) if isinstance(config["target"], dict) else set()
    _same_names(needed, known & needed, f"{folder / CONFIG}: keys of target")
    if not isinstance(config["target"]["fingerprint"], dict):
        raise UserError(f"{folder / CONFIG}: target.fingerprint must be a mapping, got none; export the run again")
    return config


def _check_target(folder: Path, recorded: Mapping, target: Target, *, allow_mismatch: bool) -> None:
    for key in ("n_layers", "hidden_size", "vocab_size"):
        if recorded[key] != getattr(target.info, key):
            raise UserError(
                f"{folder} was trained for {recorded['name']} ({key} {recorded[key]}), got {target.info.name} "
                f"({key} {getattr(target.info, key)}); load the target it was trained for"
            )
    if recorded["fingerprint"] == dict(target.fingerprint):
        return
    parts = [k for k, v in target.fingerprint.items() if recorded["fingerprint"].get(k) != v]
    then = ", ".join(f"{k} {recorded['fingerprint'].get(k)}" for k in parts)
    now = ", ".join(f"{k} {target.fingerprint[k]}" for k in parts)
    what = f"{folder} was trained for {recorded['name']} ({then}), got {target.info.name} ({now})"
    if not allow_mismatch:
        raise UserError(f"{what}; load that target")
    warnings.warn(f"{what}; expect low acceptance", stacklevel=3)


def _read_flags(folder: Path, cls: type[Any], given: Mapping) -> Any:
    """Build the drafter's Config; a flag left out would silently become today's default, so all must be there."""
    flags: Any = build(cls, given, path="config")
    _same_names(set(flatten(to_dict(flags))), flatten(given), f"{folder / CONFIG}: flags of {cls.__qualname__}")
    return flags


def read_tensors(folder: Path, config: Mapping) -> dict[str, Tensor]:
    """Read an export's tensors.

    Raises:
        UserError: a damaged file, or another one than was exported.
    """
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{path} must be a whole safetensors file, got a damaged one ({error}); copy it again"
        ) from error
    if sha256(path) != config["weights_sha256"]:
        got = f"{sha256(path)[:16]} instead of {config['weights_sha256'][:16]}"
        raise UserError(f"{path} must be the file that was exported, got sha256 {got}; copy it again")
    wrong = {
        k: v.dtype for k, v in tensors.items() if v.is_floating_point() and _dtype_name(v.dtype) != config["dtype"]
    }
    if wrong:
        name, dtype = next(iter(wrong.items()))
        raise UserError(f"{path}: {name} must be {config['dtype']}, got {dtype}; export the run again")
    return tensors


def read_vocab(folder: Path, config: Mapping, tensors: Mapping[str, Tensor], vocab_size: int) -> DraftVocab | None:
    """Check the two vocabulary maps against each other, then build the draft vocabulary from them."""
    size = config["draft_vocab_size"]
    where = f"{folder / WEIGHTS}"
    if size is None:
        return None
    _same_names({"d2t", "t2d"}, [k for k in ("d2t", "t2d") if k in tensors], f"{where}: vocabulary maps")
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    if (d2t.dtype, t2d.dtype) != (torch.int64, torch.bool) or (len(d2t), len(t2d)) != (size, vocab_size):
        got = f"{d2t.dtype}[{len(d2t)}] and {t2d.dtype}[{len(t2d)}]"
        raise UserError(f"{where}: d2t and t2d must be int64[{size}] and bool[{vocab_size}], got {got}")
    kept = t2d.nonzero().flatten()
    if not torch.equal(torch.arange(size) + d2t, kept):
        if torch.equal(d2t, kept):
            raise UserError(f"{where}: d2t must hold offsets (target id minus draft id), got the target ids themselves")
        raise UserError(f"{where}: d2t and t2d must name the same tokens, got maps of two different vocabularies")
    return DraftVocab(kept, vocab_size)


def _fill(folder: Path, drafter: Drafter, tensors: Mapping[str, Tensor]) -> None:
    names = {MAPS.get(name, name): name for name in drafter.state_dict()}
    _same_names(set(names), tensors, f"{folder / WEIGHTS}: tensors")
    own = drafter.state_dict()
    for stored, name in names.items():
        if tensors[stored].shape != own[name].shape:
            shapes = f"{list(own[name].shape)}, got {list(tensors[stored].shape)}"
            raise UserError(f"{folder / WEIGHTS}: {stored} must have shape {shapes}; its config.json is of another run")
    drafter.to(next(v.dtype for v in tensors.values() if v.is_floating_point()))
    drafter.load_state_dict({name: tensors[stored] for stored, name in names.items()}, strict=True)


# ------------------------------------------------------------------------------------------------------ helpers
def _same_names(expected: set[str], got: Any, what: str) -> None:
    missing, unexpected = sorted(expected - set(got)), sorted(set(got) - expected)
    if missing or unexpected:
        parts = [f"{word} {', '.join(names)}" for word, names in (("without", missing), ("with", unexpected)) if names]
        raise UserError(
            f"{what} must be exactly the known ones, got a file {' and '.join(parts)}; export the run again"
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_export(folder: Path) -> bool:
    path = folder / CONFIG
    if not path.is_file():
        return False
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("format") == FORMAT
    except (ValueError, OSError, AttributeError):
        return (folder / WEIGHTS).is_file() and (folder / PROVENANCE).is_file()
