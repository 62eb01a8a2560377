"""Training Medusa and EAGLE-1 beside a straightforward loop with full logits (``bench.dense_methods``)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.dense_methods import eagle1_loss, medusa_loss
from bench.record import Measurement, Options
from bench.training import MIB, activation_peak, make_batch, measured, our_loss
from distill.drafters.eagle1 import Eagle1, Eagle1Config
from distill.drafters.medusa import Medusa, MedusaConfig
from distill.target import Target, TargetConfig, load_target

PART = "methods"


def run(options: Options) -> list[Measurement]:
    """Measure both."""
    target = load_target(TargetConfig(name=options.target, dtype="float32", device="cpu", verify=False))
    length, repeats = (96, 1) if options.quick else (1024, 3)
    torch.manual_seed(options.seed)
    medusa = Medusa(MedusaConfig(), target)
    for parameter in medusa.parameters():  # zeros would make the heads equal, and their work too easy
        parameter.data.add_(0.01 * torch.randn_like(parameter))
    eagle1 = Eagle1(Eagle1Config(noise=0.0), target)
    return [
        *beside("Medusa", medusa, medusa_loss, target, length, repeats, bar=1.5, seed=options.seed),
        *beside("EAGLE-1", eagle1, eagle1_loss, target, length, repeats, bar=1.0, seed=options.seed),
    ]


def beside(
    name: str,
    drafter: Any,
    plain: Callable[[Any, Any], Tensor],
    target: Target,
    length: int,
    repeats: int,
    *,
    bar: float,
    seed: int,
) -> list[Measurement]:
    """Speed and activation peak of a micro step, ours over the plain loop's; both must give the same loss."""
    batch = make_batch(target.info.vocab_size, length, seed=seed)
    arms: dict[str, Callable[[], Tensor]] = {
        "ours": partial(our_loss, drafter, batch),
        "plain": partial(plain, drafter, batch),
    }
    tracked = {arm: activation_peak(drafter, loss) for arm, loss in arms.items()}
    ours, theirs = (tracked[arm][1] for arm in arms)
    if abs(ours - theirs) > 1e-4 * abs(theirs):  # fp32 sums in another order
        raise RuntimeError(f"both must compute the same loss of {name}, got {ours} and {theirs}")
    seconds = measured(drafter, arms, repeats=repeats)
    peaks = {arm: peak / MIB for arm, (peak, _) in tracked.items()}
    note = f"{length} tokens, {float(batch.loss_mask_BL.float().mean()):.0%} supervised, fp32"
    detail = {"seconds": seconds, "peak_mib": peaks, "loss": ours, "length": length}
    return [
        Measurement(
            part=PART,
            name=f"{name} training tokens/s over a loop with full logits",
            value=seconds["plain"] / seconds["ours"],
            unit="x",
            bar=bar,
            at_least=True,
            note=note,
            detail=detail,
        ),
        Measurement(
            part=PART,
            name=f"{name} activation peak of that loop over ours",
            value=peaks["plain"] / peaks["ours"],
            unit="x",
            bar=1.0,
            at_least=True,
            note=f"{peaks['plain']:.0f} and {peaks['ours']:.0f} MiB",
            detail=detail,
        ),
    ]
