"""Fixing the length of a run before its first step, by measuring where ``trainer.max_time`` asks for it."""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from distill.data import Batches
from distill.data.datamodule import DataModule
from distill.drafters.base import Drafter
from distill.target import Target
from distill.train.callbacks import say
from distill.train.checkpoint import AtomicCheckpointIO
from distill.train.config import TrainConfig, parse_minutes
from distill.train.evaluate import decode, validate
from distill.train.folder import RunFolder
from distill.train.module import step_loss
from distill.train.schedule import Plan, build_optimizer, make_plan


def frozen_plan(
    config: TrainConfig,
    folder: RunFolder,
    drafter: Drafter,
    datamodule: DataModule,
    prompts: Sequence[list[int]],
) -> Plan:
    """Return the run's plan: the one it was begun with, else a new one, measured if ``max_time`` is set."""
    plan = Plan.load(folder.plan)
    if plan is not None:
        return plan
    options = config.trainer
    batches = datamodule.batches(world=options.world)
    limit, steps = parse_minutes(options.max_time), options.max_steps
    if limit is None and steps is None:
        steps = max(1, math.ceil(options.epochs * batches.steps_per_epoch))
    plan = make_plan(
        max_steps=steps,
        max_seconds=limit,
        every={
            "val": options.val_every,
            "checkpoint": options.checkpoint_every,
            "decode": options.decode_every,
        },
        seconds={} if limit is None else measure(config, folder, drafter, batches, prompts),
    )
    plan.save(folder.plan)
    speed = f" ({plan.seconds['step']:.3g} s each, measured)" if plan.seconds else ""
    epochs = plan.max_steps / batches.steps_per_epoch
    say(f"training: {plan.max_steps} steps{speed}, {epochs:.2g} passes over the data")
    return plan


def measure(
    config: TrainConfig, folder: RunFolder, drafter: Drafter, batches: Batches, prompts: Sequence[list[int]]
) -> dict[str, float]:
    """Time real steps, validation, a checkpoint and decoding; the drafter is put back exactly as it was."""
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    micro_batches = [batch.to(drafter.target.device) for batch in batches.step(0)]
    held_out = batches.validation()[: config.trainer.val_batches]
    optimizer, _ = build_optimizer(drafter, config.optim, max_steps=1)

    def step() -> None:
        for batch in micro_batches:
            with autocast(config, drafter.target):
                result = step_loss(drafter, batch, config.loss)
            result.loss.backward()
        float(nn.utils.clip_grad_norm_(drafter.parameters(), 1.0))  # reading it waits for the device
        optimizer.step()
        optimizer.zero_grad()

    def checkpoint() -> None:
        state = {"weights": drafter.state_dict(), "optimizer": optimizer.state_dict()}
        AtomicCheckpointIO().save_checkpoint(state, folder.checkpoints / "measured")

    def val() -> None:
        with autocast(config, drafter.target):
            validate(drafter, held_out, config.loss)

    say("measuring how long a step takes")
    seconds = {
        "step": timed(step),
        "val": timed(val, warmup=0, repeats=1),
        "checkpoint": timed(checkpoint, warmup=0, repeats=1),
        "decode": timed(lambda: decode(drafter, prompts, config.eval), warmup=0, repeats=1),
    }
    (folder.checkpoints / "measured").unlink()
    drafter.load_state_dict(before)
    return seconds


def precision(config: TrainConfig, device: torch.device) -> str:
    """Resolve ``trainer.precision``: bf16 or fp32."""
    on_gpu = device.type == "cuda"
    return {"auto": "bf16" if on_gpu else "fp32"}.get(config.trainer.precision, config.trainer.precision)


def autocast(config: TrainConfig, target: Target) -> torch.autocast:
    """The precision context the Trainer uses, for use without it."""
    bf16 = precision(config, target.device) == "bf16"
    return torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=bf16)


def timed(action: Callable[[], object], *, warmup: int = 1, repeats: int = 3) -> float:
    """Return the median seconds of ``repeats`` calls after ``warmup`` calls that do not count."""
    times = []
    for i in range(warmup + repeats):
        start = time.perf_counter()
        action()
        if i >= warmup:
            times.append(time.perf_counter() - start)
    return statistics.median(times)
