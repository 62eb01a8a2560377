"""Training: speed and memory of an EAGLE-3 step beside a plain dense implementation, and how memory grows.

The speed of a step is that of forward and backward pass, target included. Activations are all tensors alive at the
peak that are neither weights nor their gradients, counted exactly (``bench.peak``).
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.dense_eagle3 import dense_loss
from bench.peak import Tracker
from bench.record import Measurement, Options
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.losses import LossConfig
from distill.target import Target, TargetConfig, load_target
from distill.target.tiny import tiny_target
from distill.train.memory import estimate
from distill.train.module import step_loss
from distill.types import Batch
from distill.vocab import choose_vocab

PART = "training"
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured: the full bench, or its quick form."""

    length: int = 2048
    steps: int = 7
    draft_vocab: int = 8192
    repeats: int = 3
    large_vocab: int = 49152
    vocab_length: int = 1024
    vocab_steps: int = 3
    lengths: tuple[int, ...] = (512, 2048, 8192)


QUICK = Sizes(
    length=96, steps=3, draft_vocab=40, repeats=1, large_vocab=96, vocab_length=64, vocab_steps=2, lengths=(64, 256)
)


def run(options: Options) -> list[Measurement]:
    """Measure everything; see the module."""
    sizes = QUICK if options.quick else Sizes()
    # In fp32, so that both implementations see the same target and must give the same loss.
    target = load_target(TargetConfig(name=options.target, dtype="float32", device="cpu", verify=False))
    return [
        *against_dense(target, sizes, seed=options.seed),
        vocabulary(target, sizes, seed=options.seed),
        linearity(sizes, seed=options.seed),
    ]


def against_dense(target: Target, sizes: Sizes, *, seed: int) -> list[Measurement]:
    """Ours and ``bench.dense_eagle3``: same weights, same batch, same loss."""
    drafter = make_drafter(target, sizes.draft_vocab, sizes.steps, seed=seed)
    batch = make_batch(target.info.vocab_size, sizes.length, seed=seed)
    share = float(batch.loss_mask_BL.float().mean())
    arms: dict[str, Callable[[], Tensor]] = {
        "ours": partial(our_loss, drafter, batch),
        "dense": partial(dense_loss, drafter, batch),
    }
    tracked = {name: activation_peak(drafter, arm) for name, arm in arms.items()}
    peaks = {name: peak for name, (peak, _) in tracked.items()}
    ours, dense = (tracked[name][1] for name in arms)
    if abs(ours - dense) > 1e-4 * abs(dense):  # summed over thousands of positions in fp32, in another order
        raise RuntimeError(f"both must compute the same loss, got {ours} and {dense}")
    seconds = measured(drafter, arms, repeats=sizes.repeats)
    count = estimate(drafter, rows=1, length=sizes.length, loss=LossConfig(), share=share).activations
    sizes_mib = {name: peak / MIB for name, peak in peaks.items()}
    setting = {
        "length": sizes.length,
        "steps": sizes.steps,
        "draft_vocab": sizes.draft_vocab,
        "supervised": round(share, 3),
        "seconds": seconds,
        "peak_mib": sizes_mib,
        "loss": ours,
    }
    note = f"{sizes.steps} steps, {sizes.length} tokens, {share:.0%} supervised, draft vocabulary {sizes.draft_vocab}"
    return [
        Measurement(
            part=PART,
            name="tokens/s over the dense implementation",
            value=seconds["dense"] / seconds["ours"],
            unit="x",
            bar=2.0,
            at_least=True,
            note=note,
            detail=setting,
        ),
        Measurement(part=PART, name="tokens/s", value=sizes.length / seconds["ours"], unit="tokens/s", note=note),
        Measurement(
            part=PART,
            name="activation peak of the dense implementation over ours",
            value=peaks["dense"] / peaks["ours"],
            unit="x",
            bar=3.0,
            at_least=True,
            note=note,
            detail=sizes_mib,
        ),
        Measurement(
            part=PART,
            name="memory estimate off the measured activation peak",
            value=100 * abs(count / peaks["ours"] - 1),
            unit="%",
            bar=25.0,
            at_least=False,
            note=f"estimated {count / MIB:.0f} MiB, measured {peaks['ours'] / MIB:.0f} MiB",
        ),
    ]


def vocabulary(target: Target, sizes: Sizes, *, seed: int) -> Measurement:
    """How the activation peak grows from a pruned draft vocabulary to the full one."""
    batch = make_batch(target.info.vocab_size, sizes.vocab_length, seed=seed)
    peaks = {}
    for size in (sizes.draft_vocab, min(sizes.large_vocab, target.info.vocab_size)):
        drafter = make_drafter(target, size, sizes.vocab_steps, seed=seed)
        peaks[size], _ = activation_peak(drafter, partial(our_loss, drafter, batch))
    small, large = sorted(peaks)
    return Measurement(
        part=PART,
        name="activation peak, full draft vocabulary over pruned",
        value=peaks[large] / peaks[small],
        unit="x",
        bar=1.5,
        at_least=False,
        note=f"{large} against {small}: {peaks[large] / MIB:.0f} and {peaks[small] / MIB:.0f} MiB",
    )


def linearity(sizes: Sizes, *, seed: int) -> Measurement:
    """Peak per token of one long document, on a narrow random target (the shape of the growth is the same)."""
    target = tiny_target(vocab_size=512, hidden=64, layers=4, max_position_embeddings=2 * max(sizes.lengths))
    drafter = make_drafter(target, 256, sizes.steps, seed=seed)
    peaks = {}
    for length in sizes.lengths:
        batch = make_batch(512, length, seed=seed, longest=length)
        peaks[length], _ = activation_peak(drafter, partial(our_loss, drafter, batch))
    short, long = min(peaks), max(peaks)
    return Measurement(
        part=PART,
        name="activation peak per token, longest over shortest row",
        value=peaks[long] / peaks[short] * short / long,
        unit="x",
        bar=1.25,
        at_least=False,
        note=", ".join(f"{length}: {peak / MIB:.1f} MiB" for length, peak in peaks.items()),
    )


def our_loss(drafter: Eagle3, batch: Batch) -> Tensor:
    """The loss of one micro step, as the trainer computes it."""
    return step_loss(drafter, batch, LossConfig()).loss


def make_drafter(target: Target, draft_vocab: int, steps: int, *, seed: int) -> Eagle3:
    """An untrained EAGLE-3 drafter with a random draft vocabulary."""
    torch.manual_seed(seed)
    vocab, _ = choose_vocab(torch.rand(target.info.vocab_size), min(draft_vocab, target.info.vocab_size))
    return Eagle3(Eagle3Config(draft_vocab_size=vocab.size, ttt_steps=steps), target, vocab)


def make_batch(vocab: int, length: int, *, seed: int, longest: int = 512, prompt: float = 0.25) -> Batch:
    """One row of random documents of ``longest`` tokens, of each of which the last three quarters are supervised."""
    generator = torch.Generator().manual_seed(seed)
    longest = min(longest, length)
    at_L = torch.arange(length)
    mask_L = at_L % longest >= prompt * longest
    return Batch(
        ids_BL=torch.randint(0, vocab, (1, length), generator=generator),
        loss_mask_BL=mask_L[None],
        positions_BL=(at_L % longest)[None],
        doc_BL=(at_L // longest)[None],
        denominator=float(mask_L.sum()),
    )


def activation_peak(drafter: Eagle3, loss: Callable[[], Tensor]) -> tuple[int, float]:
    """Return the peak in bytes of one step without the gradients of the weights, and the loss."""
    drafter.zero_grad()
    with Tracker() as tracker:
        value = loss()
        value.backward()
    return tracker.peak(without=[p.grad for p in drafter.parameters() if p.grad is not None]), float(value.detach())


def measured(drafter: Eagle3, arms: dict[str, Callable[[], Tensor]], *, repeats: int) -> dict[str, float]:
    """Return the median seconds of a step of each arm, the arms taking turns."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            drafter.zero_grad()
            start = time.perf_counter()
            arm().backward()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}
