"""Measurement of ``bench.gpu_check``: one EAGLE-3 training step."""

import torch
from torch import Tensor

from bench.gpu_clock import interleaved
from bench.gpu_parts import Fault
from bench.gpu_setup import Setting, figure, random_eagle3
from bench.record import Measurement
from distill.losses import LossConfig
from distill.train.module import step_loss
from distill.types import Batch
from serve_eval.arms import PeakMemory

GIB = 1 << 30


def training(setting: Setting) -> list[Measurement]:
    """One EAGLE-3 step on one packed row: target, drafted steps, loss, backward, AdamW; bf16 autocast."""
    shape, target, device = setting.shape, setting.model.target, setting.device
    memory = PeakMemory(device)
    drafter = random_eagle3(target, setting.model.kept_W, ttt_steps=shape.ttt_steps)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4)
    batch = _row(setting)
    losses: list[Tensor] = []

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = step_loss(drafter, batch, LossConfig()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    memory.start()
    seconds = interleaved({"step": step}, device, repeats=min(shape.repeats, 3), warmup=1)["step"]
    peak = memory.stop()
    if not all(bool(loss.isfinite()) for loss in losses):
        raise Fault(f"the loss must stay finite, got {[float(loss) for loss in losses]}")
    info = target.info
    head = info.hidden_size * info.vocab_size
    body = sum(p.numel() for p in target.model.parameters()) - 2 * head
    drafted = sum(p.numel() for p in drafter.layers.parameters()) + drafter.lm_head.weight.numel()
    flops = 2 * (body + head) + 6 * shape.ttt_steps * drafted
    limit = setting.known["flops"] / flops if "flops" in setting.known else None
    weights = sum(p.numel() * 4 for p in drafter.parameters())
    return [
        figure(
            "training",
            "tokens/s",
            shape.train_length / seconds,
            "tokens/s",
            limit=limit,
            limit_name="matrix rate",
            note=f"L = {shape.train_length}, {shape.ttt_steps} steps, {seconds * 1e3:.0f} ms",
            detail={"loss": [float(loss) for loss in losses], "flops_per_token": flops},
        ),
        figure(
            "training",
            "peak memory",
            float("nan") if peak is None else peak / GIB,
            "GiB",
            note=f"beside the target; weights, gradients and AdamW take {4 * weights / GIB:.2f}",
        ),
    ]


def _row(setting: Setting) -> Batch:
    """Four documents, every token written by the target."""
    length, device = setting.shape.train_length, setting.device
    ids_1L = torch.tensor([setting.model.prompt(length)], device=device)
    place_1L = torch.arange(length, device=device)[None]
    quarter = length // 4
    return Batch(
        ids_BL=ids_1L,
        loss_mask_BL=torch.ones_like(ids_1L, dtype=torch.bool),
        positions_BL=place_1L % quarter,
        doc_BL=place_1L // quarter,
        denominator=float(length),
    )
