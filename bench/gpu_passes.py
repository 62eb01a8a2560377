"""Measurements of ``bench.gpu_check``: the machine's limits, and passes of the target and the drafter by themselves.

Passes are timed as CUDA graphs, that is without the host that launches them; a few with it, which is called eager.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.gpu_clock import interleaved, recorded
from bench.gpu_setup import Setting, figure
from bench.record import Measurement
from distill.attention import tree_mask
from distill.drafters.base import Drafter
from distill.kv_cache import KVCache
from distill.target import Target
from distill.types import Frontier, TargetOutput
from serve_eval.arms import PeakMemory

DEPTH = 5
"""Drafted tokens of the chain whose acceptance is forced: tau 1 to 6."""


def rates(setting: Setting) -> list[Measurement]:
    """Bandwidth and matrix rate; later limits use the best kernel, so that a share never flatters."""
    size, side = setting.shape.copy_bytes, setting.shape.matrix
    source = torch.ones(size // 2, dtype=torch.bfloat16, device=setting.device)
    sink = torch.empty_like(source)
    weights = torch.randn(size // 4 // side, side, device=setting.device).bfloat16()
    token = torch.randn(1, side, device=setting.device).bfloat16()
    left, right = torch.randn(2, side, side, device=setting.device).bfloat16()
    with torch.inference_mode():
        seconds = interleaved(
            {
                "memory copy": lambda: sink.copy_(source),
                "weights times one token": lambda: F.linear(token, weights),
                "bf16 product": lambda: left @ right,
            },
            setting.device,
            repeats=2 * setting.shape.repeats + 1,
        )
    copied = 2 * size / seconds["memory copy"]
    read = 2 * weights.numel() / seconds["weights times one token"]
    flops = 2 * side**3 / seconds["bf16 product"]
    setting.known |= {"bandwidth": max(copied, read), "flops": flops}
    found = [
        ("memory copy", copied / 1e9, "GB/s", "read and written bytes both counted"),
        ("weights times one token", read / 1e9, "GB/s", f"bf16, {tuple(weights.shape)}"),
        ("bf16 product", flops / 1e12, "TFLOP/s", f"{side} cubed"),
    ]
    return [figure("machine", name, value, unit, note=note) for name, value, unit, note in found]


# -- passes


def verify_cost(setting: Setting) -> list[Measurement]:
    """v(T): a pass of the target over T tokens behind a context, head and choice included."""
    shape, target = setting.shape, setting.model.target
    memory = PeakMemory(setting.device)
    memory.start()
    cache, ids_1L = _filled(setting, target)
    calls = {width: partial(_pass, target, cache, ids_1L[:, :width]) for width in shape.widths}
    with torch.inference_mode():
        plain = {width: calls[width] for width in (1, shape.widths[-1])}
        eager = interleaved(plain, setting.device, repeats=shape.repeats)
        graphs = {width: recorded(call, setting.device) for width, call in calls.items()}
        seconds = interleaved(graphs, setting.device, repeats=shape.repeats)
    peak = memory.stop()
    setting.known["pass_s eager"] = seconds
    least = {width: _least_pass_s(setting, width) for width in shape.widths}
    single = least[1]
    found = [
        figure(
            "verify",
            "one pass, one token",
            seconds[1] * 1e3,
            "ms",
            limit=None if single is None else single * 1e3,
            limit_name="bandwidth",
            note=f"behind {shape.context} tokens; eager {eager[1] * 1e3:.2f} ms",
            detail={"eager_s": eager, "graph_s": seconds, "peak_bytes": peak},
        )
    ]
    found += [
        figure(
            "verify",
            f"v({width})",
            seconds[width] / seconds[1],
            "passes",
            limit=None if single is None or (wide := least[width]) is None else wide / single,
            limit_name="roofline",
            note=f"{seconds[width] * 1e3:.2f} ms",
        )
        for width in shape.widths
        if width > 1
    ]
    return found


def verify_cost_fast(setting: Setting) -> list[Measurement]:
    """The same as the fast engine runs it, host included; what it records by itself is replayed here, too."""
    shape, widths = setting.shape, setting.shape.widths
    model = setting.model.target.fast
    cache, ids_1L = _filled(setting, model)
    calls = {width: partial(_pass, model, cache, ids_1L[:, :width]) for width in widths}
    with torch.inference_mode():
        seconds = interleaved(calls, setting.device, repeats=shape.repeats, warmup=3)
    setting.known["pass_s fast"] = seconds
    single = _least_pass_s(setting, 1)
    found = [
        figure(
            "verify",
            "one pass, one token, fast",
            seconds[1] * 1e3,
            "ms",
            limit=None if single is None else single * 1e3,
            limit_name="bandwidth",
            note="not fused: " + model.reason if model.reason else "",
            detail={"seconds": seconds},
        )
    ]
    for width in widths[1:]:
        note = f"{seconds[width] * 1e3:.2f} ms"
        found.append(figure("verify", f"v({width}), fast", seconds[width] / seconds[1], "passes", note=note))
    return found


@torch.inference_mode()
def _filled(setting: Setting, model: Any) -> tuple[KVCache, Tensor]:
    """A cache holding the context, and ids to run behind it."""
    shape = setting.shape
    cache = model.new_cache(1, shape.context + max(shape.widths))
    ids = setting.model.prompt(shape.context + max(shape.widths))
    ids_1L = torch.tensor([ids], device=setting.device)
    _pass(model, cache, ids_1L[:, : shape.context])
    cache.advance(torch.tensor([shape.context], device=setting.device), longest=shape.context)
    return cache, ids_1L[:, shape.context :]


def _pass(model: Any, cache: KVCache, ids_BN: Tensor) -> Tensor:
    """A chain below the committed tokens, mask and choice included, nothing read by the host.

    ``model`` is a ``Target`` or its ``fast`` twin.
    """
    count = ids_BN.shape[1]
    depths_BN = torch.arange(count, device=ids_BN.device)[None]
    mask = tree_mask(
        lengths_B=cache.lengths_B,
        ancestors_BNM=torch.ones(1, count, count, dtype=torch.bool, device=ids_BN.device).tril(),
        depths_BM=depths_BN,
        view=cache.begin(count),
        window=model.info.sliding_window,
    )
    output = model.forward(ids_BN, positions_BL=cache.lengths_B[:, None] + depths_BN, mask=mask, cache=cache)
    return model.logits(output.last_BLD).argmax(-1)


def read_bytes(target: Target, context: int) -> int:
    """Bytes a pass must read: every weight but the embedding table, and the keys and values of the context."""
    weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
    table = target.model.get_input_embeddings().weight
    info = target.info
    row = 2 * info.n_layers * info.n_kv_heads * info.head_dim * table.element_size()
    return weights - table.numel() * table.element_size() + context * row


def _least_pass_s(setting: Setting, width: int) -> float | None:
    """Seconds by the roofline; None where this worker has not measured the machine."""
    if "bandwidth" not in setting.known:
        return None
    read = read_bytes(setting.model.target, setting.shape.context)
    return max(read / setting.known["bandwidth"], width * read / setting.known["flops"])  # 2 FLOP per 2-byte weight


def draft_cost(setting: Setting) -> list[Measurement]:
    """EAGLE-3's step for one node and its intake of committed tokens, in units of a one-token pass of the target."""
    shape, drafter = setting.shape, setting.drafter
    device, info = setting.device, setting.model.target.info
    taken = DEPTH + 1
    with torch.inference_mode():
        state = drafter.new_state(1, shape.context + 64)
        ids_1L = torch.tensor([setting.model.prompt(shape.context)], device=device)
        features = {
            k: torch.randn(1, shape.context, info.hidden_size, device=device).bfloat16() for k in _taps(drafter)
        }
        next_B, longest = ids_1L[:, 0], shape.context

        def extend(length: int) -> None:
            output = TargetOutput(
                last_BLD=next(iter(features.values()))[:, :length], taps={k: x[:, :length] for k, x in features.items()}
            )
            n_B = torch.full_like(next_B, length)
            drafter.extend(state, ids_1L[:, :length], next_B, output, n_B, longest=longest)

        extend(shape.context)
        # Recorded passes go on reading what they read first, so it must outlive what replaces it.
        lengths_B, last_B1D = state.cache.lengths_B, state.last_B1D
        first = Frontier(
            tokens_BF=ids_1L[:, :1], depth=0, parent_BF=torch.zeros_like(ids_1L[:, :1]), ancestors_BFM=_seen(1, device)
        )
        second = Frontier(
            tokens_BF=ids_1L[:, :1], depth=1, parent_BF=torch.zeros_like(ids_1L[:, :1]), ancestors_BFM=_seen(2, device)
        )

        def take() -> None:
            extend(taken)
            state.cache.lengths_B, state.last_B1D = lengths_B, last_B1D  # as if it had never happened

        def draft() -> None:
            drafter.rollback(state)
            drafter.step(state, first)
            drafter.step(state, second)

        def root() -> None:
            drafter.rollback(state)
            drafter.step(state, first)

        calls = {"root": root, "two": draft, "take": take}
        eager = interleaved(calls, device, repeats=shape.repeats)
        graphs = {name: recorded(call, device) for name, call in calls.items()}
        seconds = interleaved(graphs, device, repeats=2 * shape.repeats)
    step_s = max(seconds["two"] - seconds["root"], 0.0)
    chain_s = seconds["root"] + (DEPTH - 1) * step_s + seconds["take"]
    setting.known["draft_s"] = chain_s
    weights = sum(p.numel() * p.element_size() for p in drafter.parameters())
    bandwidth = setting.known.get("bandwidth")
    single = setting.known.get("pass_s eager", {}).get(1)
    found = [
        figure(
            "draft",
            "one drafted token",
            step_s * 1e3,
            "ms",
            limit=weights / bandwidth * 1e3 if bandwidth else None,
            limit_name="bandwidth",
            note=f"eager {(eager['two'] - eager['root']) * 1e3:.2f} ms",
            detail={"eager_s": eager, "graph_s": seconds},
        ),
        figure("draft", f"taking in {taken} tokens", seconds["take"] * 1e3, "ms"),
    ]
    if single:
        note = f"{DEPTH} steps and taking in {taken} tokens"
        found.append(figure("draft", f"a chain of {DEPTH}", chain_s / single, "passes", note=note))
    return found


def _taps(drafter: Drafter) -> tuple[int, ...]:
    return drafter.taps(drafter.config, drafter.target.info)


def _seen(count: int, device: torch.device) -> Tensor:
    return torch.ones(1, 1, count, dtype=torch.bool, device=device)
