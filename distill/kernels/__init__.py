"""The small CPU kernels of the fast engine, compiled at first use where the machine can run and build them.

Nothing depends on them: without AVX-512 BF16, without g++, or with ``DRAFTSMITH_KERNELS=0`` the caller uses oneDNN.
The library is kept in the user's cache under a hash of source, compiler and flags.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import threading
from pathlib import Path

import torch

from distill.errors import UserError
from distill.files import sync, write_atomic

FOLDER = Path(__file__).parent
SOURCES = (FOLDER / "skinny.cpp", FOLDER / "tree.cpp")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=c++17")


_ONE_AT_A_TIME = threading.Lock()


class UnavailableError(Exception):
    """Why the kernels cannot be used here, for reports."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be had (``why_not`` says why)."""
    try:
        return _library()
    except UnavailableError:
        return None


@functools.cache
def why_not() -> str | None:
    """Say why ``load`` gives None; None when it does not."""
    try:
        _library()
    except UnavailableError as reason:
        return str(reason)
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    if os.environ.get("DRAFTSMITH_KERNELS") == "0":
        raise UnavailableError("switched off by DRAFTSMITH_KERNELS=0")
    if not torch.cpu._is_avx512_bf16_supported():
        raise UnavailableError("a CPU without AVX-512 BF16")
    compiler = shutil.which("g++")
    if compiler is None:
        raise UnavailableError("no g++ to compile them with")
    openmp = _loaded_openmp()
    try:
        # The symbols of PyTorch's own OpenMP runtime: a second runtime would have a second pool of spinning threads.
        ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        with _ONE_AT_A_TIME:
            library = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError, UserError) as error:
        raise UnavailableError(f"a build that failed ({error})") from error
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.draftsmith_linear.argtypes = [pointer] * 5 + [integer] * 3
    library.draftsmith_linear.restype = None
    library.draftsmith_rms_norm.argtypes = [pointer] * 3 + [integer] * 2 + [ctypes.c_float]
    library.draftsmith_rms_norm.restype = None
    library.draftsmith_attend.argtypes = [pointer] * 6 + [ctypes.c_float]
    library.draftsmith_attend.restype = None
    library.draftsmith_silu_mul.argtypes = [pointer] * 2 + [integer] * 2
    library.draftsmith_silu_mul.restype = None
    library.draftsmith_rotate_write.argtypes = [pointer] * 7
    library.draftsmith_rotate_write.restype = None
    library.draftsmith_hash.argtypes = [ctypes.c_int32] * 2 + [pointer, integer]
    library.draftsmith_hash.restype = None
    library.draftsmith_best.argtypes = [pointer, integer, pointer, integer, ctypes.c_float, ctypes.c_float, pointer]
    library.draftsmith_best.restype = None
    library.draftsmith_take.argtypes = [pointer, pointer, integer, integer, pointer, pointer, pointer]
    library.draftsmith_take.restype = None
    library.draftsmith_level.argtypes = [pointer, pointer, integer, integer, pointer, pointer]
    library.draftsmith_level.restype = None
    library.draftsmith_rerank.argtypes = [pointer] * 4
    library.draftsmith_rerank.restype = None
    library.draftsmith_geometry.argtypes = [pointer] * 3 + [integer] * 2
    library.draftsmith_geometry.restype = None
    return library


def _loaded_openmp() -> Path:
    """The OpenMP runtime this process already uses."""
    try:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        mapped = set()
    for path in sorted(mapped):
        if Path(path).name.startswith(("libgomp", "libiomp5")):
            return Path(path)
    raise UnavailableError("a PyTorch without a GNU-compatible OpenMP runtime")


def _build(compiler: str) -> Path:
    """Compile once; many processes may do it at the same time."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    # -march=native means what this CPU can do, and a cache folder may be shared between machines.
    cpu = subprocess.run([compiler, "-march=native", "-Q", "--help=target"], capture_output=True, text=True, check=True)
    texts = [path.read_text() for path in (*SOURCES, FOLDER / "vectors.h")]
    key = hashlib.sha256("\0".join([*texts, version, cpu.stdout, *FLAGS]).encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "draftsmith" / "kernels"
    built, digest = folder / f"skinny-{key}.so", folder / f"skinny-{key}.sha256"
    # A torn file would not fail to load but kill the process, page by page, as it runs.
    if built.is_file() and digest.is_file() and digest.read_text() == hashlib.sha256(built.read_bytes()).hexdigest():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    *objects, whole = (folder / f".skinny-{key}.{os.getpid()}.{end}" for end in (*(s.stem for s in SOURCES), "so"))
    try:
        steps = (
            *([compiler, *FLAGS, "-c", str(s), "-o", str(o)] for s, o in zip(SOURCES, objects, strict=True)),
            # Without -fopenmp: the runtime's symbols come from the one that is loaded.
            [compiler, "-shared", *map(str, objects), "-o", str(whole)],
        )
        for step in steps:
            subprocess.run(step, capture_output=True, check=True, timeout=120)
        sync(whole)
        made = hashlib.sha256(whole.read_bytes()).hexdigest()
        whole.replace(built)
        write_atomic(digest, made)
    finally:
        for part in (*objects, whole):
            part.unlink(missing_ok=True)
    return built
