"""task=export: write a run's drafter in the layout of the program that serves it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor

from distill.config import opt
from distill.errors import UserError
from distill.export import copy_export, push, resolve_checkpoint
from distill.export.convert import convert
from distill.export.gguf import convert_gguf
from distill.target import Target, TargetConfig, load_target, target_folder
from serve_eval.checkpoint import auto_target, resolve_target

FormatName = Literal["native", "vllm", "speculators", "sglang", "medusa", "openvino", "transformers", "gguf"]


@dataclass(kw_only=True)
class Config:
    """Options of task=export."""

    checkpoint: str | None = opt(None, "run folder or export folder")
    format: FormatName = opt("native", "layout to write")
    out: str | None = opt(None, "new folder for the drafter")
    overwrite: bool = opt(False, "replace an export that is already in out")
    dtype: str | None = opt(None, "type of the weights: float32, bfloat16 or float16; null: as trained")
    tokens: int = opt(3, "drafted per pass, in the command that is printed")
    hub: str | None = opt(None, "also push the folder to this model repository, e.g. me/my-drafter")
    vocabulary: str | None = opt(None, "gguf: the target's own GGUF file, whose vocabulary is copied")
    target: TargetConfig = field(
        default_factory=auto_target, metadata={"help": "target model; name auto takes the checkpoint's own"}
    )

    def __post_init__(self) -> None:
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise UserError(f"dtype must be float32, bfloat16, float16 or null, got {self.dtype!r}")
        if self.tokens < 1:
            raise UserError(f"tokens must be at least 1, got {self.tokens}")


class Lender:
    """Loads the target when a layout asks for something of it, once."""

    def __init__(self, checkpoint: str, target: TargetConfig):
        self._checkpoint, self._config = checkpoint, target
        self._target: Target | None = None

    @property
    def target(self) -> Target:
        """The target the drafter was trained for."""
        if self._target is None:
            self._target = load_target(resolve_target(resolve_checkpoint(self._checkpoint), self._config))
        return self._target

    def __call__(self, name: str) -> Tensor:
        """``embed`` or ``head``: the target's own matrix [V, D]."""
        ids = torch.arange(self.target.info.vocab_size, device=self.target.device)
        rows = self.target.head_rows(ids) if name == "head" else self.target.embed(ids[None])[0]
        return rows.detach().cpu().clone()

    def tokenizer(self, folder: Path) -> None:
        """Write the target's tokenizer, which a draft model shares."""
        if self.target.tokenizer is not None:
            self.target.tokenizer.save_pretrained(folder)


def served_name(name: str) -> str:
    """What an engine is given as target: the hub's name, or the folder of the packaged one."""
    return str(target_folder(TargetConfig(name=name))) if name == "smollm2" else name


def run(config: Config, *, console: Console | None = None) -> None:
    """Write the export.

    Raises:
        UserError: nothing given, no such checkpoint, a damaged one, a layout that cannot hold the drafter, or a folder
            that is taken.
    """
    console = console or Console(soft_wrap=True)
    if not config.checkpoint or not config.out:
        raise UserError("checkpoint and out must both be given; add checkpoint=RUN out=DIR")
    only_foreign = {"dtype": config.dtype is None, "vocabulary": config.vocabulary is None or config.format == "gguf"}
    wrong = [name for name, fine in only_foreign.items() if not fine]
    if wrong and (config.format == "native" or wrong == ["vocabulary"]):
        raise UserError(f"{wrong[0]} must be null with format={config.format}, got {getattr(config, wrong[0])}")
    command = ""
    if config.format == "native":
        where = copy_export(config.checkpoint, config.out, overwrite=config.overwrite)
    else:
        lend = Lender(config.checkpoint, config.target)
        options: dict[str, Any] = {
            "dtype": None if config.dtype is None else getattr(torch, config.dtype),
            "overwrite": config.overwrite,
            "tokens": config.tokens,
        }
        name = resolve_target(resolve_checkpoint(config.checkpoint), config.target).name
        if config.format == "gguf":
            where, command = convert_gguf(config.checkpoint, config.out, config.vocabulary, **options)
        else:
            where, command = convert(
                config.checkpoint, config.out, config.format, lend, served=served_name(name), **options
            )
    console.print(f"{config.format} export written to {where}", highlight=False)
    if command:
        console.print(f"serve it: {command}", highlight=False, markup=False)
    if config.hub:
        console.print(f"pushed to {push(where, config.hub)}", highlight=False)
