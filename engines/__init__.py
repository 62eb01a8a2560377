"""Real engines: an exported drafter runs in the program that is going to serve it, which counts what it accepts itself.

Every engine has an environment of its own (``python -m engines setup NAME``), since they pin versions of the same
libraries against each other. ``docs/engines.md`` says how to add one.
"""

import importlib

from distill.errors import UserError, did_you_mean
from engines.base import Engine, EngineResult, Method

ENGINES: dict[str, str] = {
    "vllm": "engines.vllm:Vllm",
    "llama_cpp": "engines.llama_cpp:LlamaCpp",
    "openvino": "engines.openvino:OpenVino",
}

__all__ = ["ENGINES", "Engine", "EngineResult", "Method", "engine"]


def engine(name: str) -> Engine:
    """Return the engine called ``name``.

    Raises:
        UserError: unknown name; the message lists the choices.
    """
    if name not in ENGINES:
        raise UserError(
            f"engine must be one of {', '.join(sorted(ENGINES))}, got {name!r}.{did_you_mean(name, ENGINES)}"
        )
    module, _, cls = ENGINES[name].partition(":")
    return getattr(importlib.import_module(module), cls)()
