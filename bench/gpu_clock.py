"""Timing for ``bench.gpu_check``: by CUDA events on a GPU, by the host's clock on a CPU."""

import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from statistics import median
from typing import TypeVar

import torch

K = TypeVar("K", bound=Hashable)


def interleaved(
    calls: Mapping[K, Callable[[], object]], device: torch.device, *, repeats: int, warmup: int = 2
) -> dict[K, float]:
    """Median seconds of each call, measured in turns so that drift favours none; by CUDA events on a GPU."""
    seconds: dict[K, list[float]] = {key: [] for key in calls}
    for index in range(warmup + repeats):
        for key, call in calls.items():
            took = timed(call, device)
            if index >= warmup:
                seconds[key].append(took)
    return {key: median(values) for key, values in seconds.items()}


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, everything it started on the device included."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3


def recorded(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The call as a CUDA graph: its kernels alone, without the host that launches them; the call itself on a CPU."""
    if device.type != "cuda":
        return call
    # Kernels must have been loaded and workspaces made before the capture, on another stream than the default one.
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, call: Callable[[], object]) -> None:
    """``call`` comes along because the graph reads the tensors it holds."""
    graph.replay()
