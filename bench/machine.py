"""What this machine can do at most, measured on the spot: memory bandwidth and matrix rate.

The limits that stand beside other figures are the best rate any of these kernels reached, so that a share of the
limit is never flattered by a slow probe.
"""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.record import Measurement, Options

K = TypeVar("K", bound=Hashable)
MIB = 1 << 20
SHAPES = ((2048, 576, 1536), (2048, 2048, 2048))
"""(tokens, in, out) of a product: SmolLM2's feed-forward at the training length, and one that flatters the hardware."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates with the threads of this process.

    Attributes:
        read: bytes/s summing a large fp32 array.
        copy: bytes/s copying it, read and written bytes both counted.
        weights: bytes/s of bf16 weight matrices multiplied by one token.
        flops: FLOP/s per dtype name and shape; a multiplication and an addition count as two.
    """

    read: float
    copy: float
    weights: float
    flops: dict[str, dict[tuple[int, int, int], float]]

    @property
    def bandwidth(self) -> float:
        """Highest rate seen, bytes/s."""
        return max(self.read, self.copy, self.weights)

    def matrix_rate(self, dtype: torch.dtype) -> float:
        """Highest rate seen for float32 or bfloat16, FLOP/s."""
        return max(self.flops[str(dtype).removeprefix("torch.")].values())


@cache
def measure(options: Options) -> Machine:
    """Measure once per process; medians of interleaved repeats, about ten seconds (``quick``: one)."""
    size, repeats = (64 * MIB, 3) if options.quick else (512 * MIB, 9)
    generator = torch.Generator().manual_seed(options.seed)
    source, sink = torch.ones(size // 4), torch.empty(size // 4)
    width = 1024
    weights_NWW = torch.randn(size // 2 // width**2, width, width, generator=generator).bfloat16()
    token_1W = torch.randn(1, width, generator=generator).bfloat16()

    def read_weights() -> None:
        for weight_WW in weights_NWW:
            F.linear(token_1W, weight_WW)

    def product(dtype: torch.dtype, shape: tuple[int, int, int]) -> Callable[[], Tensor]:
        x = torch.randn(shape[0], shape[1], generator=generator).to(dtype)
        weight = torch.randn(shape[2], shape[1], generator=generator).to(dtype)
        return lambda: F.linear(x, weight)

    dtypes = (torch.float32, torch.bfloat16)
    probes: dict[Hashable, Callable[[], object]] = {
        "read": source.sum,
        "copy": lambda: sink.copy_(source),
        "weights": read_weights,
    }
    probes |= {(dtype, shape): product(dtype, shape) for dtype in dtypes for shape in SHAPES}
    with torch.inference_mode():
        seconds = interleaved(probes, repeats)
    return Machine(
        read=size / median(seconds["read"]),
        copy=2 * size / median(seconds["copy"]),
        weights=weights_NWW.numel() * 2 / median(seconds["weights"]),
        flops={
            str(dtype).removeprefix("torch."): {
                (m, k, n): 2 * m * k * n / median(seconds[dtype, (m, k, n)]) for m, k, n in SHAPES
            }
            for dtype in dtypes
        },
    )


def interleaved(calls: Mapping[K, Callable[[], object]], repeats: int) -> dict[K, list[float]]:
    """Time every call ``repeats`` times in turns, after one unmeasured run of each; seconds."""
    seconds: dict[K, list[float]] = {key: [] for key in calls}
    for index in range(repeats + 1):
        for key, call in calls.items():
            start = time.perf_counter()
            call()
            if index:
                seconds[key].append(time.perf_counter() - start)
    return seconds


def run(options: Options) -> list[Measurement]:
    """The machine's own rates."""
    machine = measure(options)
    threads = f"{options.threads} thread{'s' if options.threads != 1 else ''}"
    rows = [
        ("memory read", machine.read, "GB/s", f"sum of a large fp32 array, {threads}"),
        ("memory copy", machine.copy, "GB/s", "read and written bytes both counted"),
        ("bf16 weights read", machine.weights, "GB/s", "1024 x 1024 matrices times one token"),
    ]
    for dtype, rates in machine.flops.items():
        for shape, rate in rates.items():
            rows.append((f"{dtype} product {'x'.join(map(str, shape))}", rate, "GFLOP/s", "tokens x in x out"))
    return [
        Measurement(part="machine", name=name, value=rate / 1e9, unit=unit, note=note)
        for name, rate, unit, note in rows
    ]
