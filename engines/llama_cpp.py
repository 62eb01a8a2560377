"""llama.cpp through xllamacpp: EAGLE-3 and draft models as GGUF files; it counts drafted and accepted tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch

from distill.errors import UserError
from engines.base import Dtype, Engine, Method
from engines.environment import Environment
from engines.gguf_target import write_target


class LlamaCpp(Engine):
    """llama.cpp, one prompt after the other; reads ``drafter.gguf`` of an export, the target is converted here."""

    environment: ClassVar[Environment] = Environment(
        name="llama_cpp",
        steps=(("install", "xllamacpp==2026.10.11549"),),
        probe="import xllamacpp",
        size="130 MB",
    )
    formats: ClassVar[Mapping[Method, tuple[str, ...]]] = {"eagle3": ("gguf",), "draft_model": ("gguf",)}
    complaint: ClassVar[str] = r"[\d.]+ E (.+)"

    def prepare_target(self, target: Path, dtype: Dtype) -> Path:
        """The target as a GGUF file; a drafter's export takes its vocabulary from there."""
        weights = getattr(torch, dtype)
        folder = self.converted(target, dtype, lambda out: write_target(target, out / "target.gguf", dtype=weights))
        return folder / "target.gguf"

    def prepare_draft(self, draft: Path, method: Method, target: Path, dtype: Dtype, work: Path) -> Path:
        """The one GGUF file in the folder."""
        files = sorted(draft.glob("*.gguf")) if draft.is_dir() else [draft]
        if len(files) != 1 or not files[0].is_file():
            raise UserError(
                f"engine llama_cpp must be given a folder with one GGUF file, got {draft} with {len(files)}; "
                "export with format=gguf"
            )
        return files[0]
