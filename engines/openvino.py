"""OpenVINO GenAI: EAGLE-3 and draft models; its own converter makes its graphs from transformers folders."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from distill.errors import UserError
from engines.base import Dtype, Engine, Method
from engines.environment import Environment
from engines.process import run_worker

WEIGHTS: dict[Dtype, str] = {"float32": "fp32", "float16": "fp16", "bfloat16": "fp32"}
"""How weights are stored; arithmetic is set when they are loaded."""
RUNTIME = "openvino_rt_info.json"
CONVERT_S = 3600


class OpenVino(Engine):
    """OpenVINO GenAI on the CPU, one prompt after the other; models are converted in its own environment."""

    environment: ClassVar[Environment] = Environment(
        name="openvino",
        steps=(
            # Its converter for EAGLE-3 imports the last two.
            (
                *("install", "torch==2.13.0", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0"),
                *("nncf==3.4.0", "diffusers==0.39.0", "einops==0.8.2"),
            ),
            # A build for GPUs, which a CPU build of torch cannot load; nothing here needs it.
            ("uninstall", "-y", "torchvision"),
        ),
        probe="import openvino_genai, optimum.exporters.openvino",
        size="1.6 GB",
    )
    formats: ClassVar[Mapping[Method, tuple[str, ...]]] = {
        "eagle3": ("openvino",),
        "draft_model": ("openvino", "transformers"),
    }

    def prepare_target(self, target: Path, dtype: Dtype) -> Path:
        """The target's graph, converted once."""
        return self.converted(target, WEIGHTS[dtype], lambda out: self._convert(target, out, dtype, tokenizer=True))

    def prepare_draft(self, draft: Path, method: Method, target: Path, dtype: Dtype, work: Path) -> Path:
        """The drafter's graph, with the layers it reads written into it; a graph is taken as it is."""
        if (draft / "openvino_model.xml").is_file():
            return draft
        if code := sorted(path.name for path in draft.glob("*.py")):
            raise UserError(f"engine openvino must be given a folder without code, got {code[0]} in {draft}; remove it")
        layers = None
        if method == "eagle3":
            try:
                layers = json.loads((draft / RUNTIME).read_text(encoding="utf-8"))["hidden_layers_list"]
            except (OSError, ValueError, KeyError) as error:
                raise UserError(
                    f"engine openvino must be given an EAGLE-3 folder with {RUNTIME}, which says what layers it reads, "
                    f"got {draft} without; export with format=openvino"
                ) from error
        out = work / "draft"
        out.mkdir()
        self._convert(draft, out, dtype, layers=layers)
        # Two models want equal tokenizers beside them, although ids go in and out; the converter makes one up.
        for path in out.glob("*tokenizer*"):
            path.unlink()
        for path in target.glob("*tokenizer*"):
            (out / path.name).symlink_to(path)
        return out

    def _convert(
        self, source: Path, out: Path, dtype: Dtype, *, layers: str | None = None, tokenizer: bool = False
    ) -> None:
        """Run the engine's converter."""
        script = Path(__file__).parent / "workers" / "openvino_convert.py"
        job = {
            "source": str(source),
            "out": str(out),
            "weights": WEIGHTS[dtype],
            "layers": layers,
            "tokenizer": tokenizer,
        }
        with tempfile.TemporaryDirectory() as work:
            run_worker(
                [str(self.environment.python), str(script)],
                job,
                name=self.name,
                work=Path(work),
                variables=self.variables,
                timeout_s=CONVERT_S,
                keep_log=self.environment.folder / "last-failure.log",
            )
