"""What a training step will take, counted before it is run: a batch that cannot fit is refused, not tried.

Weights, gradients and AdamW's two moments are exact. Activations are counted from the shapes (``Drafter.kept_floats``
and the size of a chunk of the loss) at the moment when most is alive: after the forward pass of every step, while
the loss works on a chunk. ``bench`` holds the count against the measured peak.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from distill.divergence import WITH_LOG, WORKED_ON
from distill.drafters.base import Drafter
from distill.errors import UserError
from distill.losses import LossConfig, chunk_rows, piece_rows
from distill.train.config import TrainConfig
from distill.train.measure import precision

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes a training step holds at its peak.

    Attributes:
        target: the frozen weights.
        weights: the drafter's weights and buffers.
        gradients: as large as what is trained.
        optimizer: AdamW's two moments.
        activations: everything else: features, what autograd keeps, a chunk of logits.
    """

    target: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.target + self.weights + self.to_come

    @property
    def to_come(self) -> int:
        """What is not there yet when target and drafter are loaded."""
        return self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        names = ("target", "weights", "gradients", "optimizer", "activations")
        parts = ", ".join(f"{name} {getattr(self, name) / GIB:.2f}" for name in names)
        return f"{self.total / GIB:.2f} GiB ({parts})"


def estimate(
    drafter: Drafter,
    *,
    rows: int,
    length: int,
    loss: LossConfig,
    low: bool = False,
    share: float = 1.0,
    shards: int = 1,
    accumulate: bool = False,
) -> MemoryEstimate:
    """Count the memory of one micro step.

    Args:
        drafter: on its device, with ``recompute_activations`` set as it will be.
        rows: packed rows of the micro batch, B.
        length: tokens of a row, L.
        loss: which loss, in which chunks.
        low: bf16 autocast instead of the weights' precision.
        share: part of the positions that later steps count at; 1 is the most there can be.
        shards: processes that divide gradients and optimiser between them.
        accumulate: gradients of earlier micro steps are there, and those of the heads are made beside them.
    """
    trained = sum(_bytes(p) for p in drafter.parameters() if p.requires_grad)
    activations = _activations(drafter, tokens=rows * length, loss=loss, low=low, share=share)
    if accumulate:
        draft = drafter.vocab.size if drafter.vocab else drafter.target.info.vocab_size
        activations += sum(_bytes(p) for p in drafter.parameters() if p.requires_grad and p.shape[0] == draft)
    return MemoryEstimate(
        target=module_bytes(drafter.target.model),
        weights=module_bytes(drafter),
        gradients=trained // shards,
        optimizer=2 * trained // shards,
        activations=activations,
    )


def _activations(drafter: Drafter, *, tokens: int, loss: LossConfig, low: bool, share: float) -> int:
    target, info = drafter.target, drafter.target.info
    size = torch.finfo(target.dtype).bits // 8
    wide = 8 if next(drafter.parameters()).dtype == torch.float64 else 4
    number = 2 if low else wide
    width, taps = info.hidden_size, len(drafter.taps(drafter.config, info))
    features = tokens * width * size * (taps + 1)
    # The target's own forward: a residual, a norm and its copies, and the three wide tensors of one MLP.
    forward = tokens * (6 * width + 3 * info.intermediate_size) * size

    steps = drafter.steps
    kept = int(tokens * drafter.kept_floats(share)) * number
    if low:
        kept += tokens * steps * 3 * width * 4  # norms work in fp32 and keep what they read
    hidden_gradients = tokens * steps * width * number

    draft = drafter.vocab.size if drafter.vocab else info.vocab_size
    together = drafter.steps_per_head
    sizes = chunk_rows(loss, teacher_size=info.vocab_size, draft_size=draft, steps=together, device=target.device)
    many, few = (min(rows, math.ceil(share * tokens)) for rows in sizes)
    stays = many * draft * wide
    same = draft == info.vocab_size and size == wide  # what stays are the teacher's logits themselves
    teacher = many * info.vocab_size * size + (0 if same else stays)
    seen = 1 + (draft < info.vocab_size) + (loss.name in WITH_LOG)
    worked_on = WORKED_ON[loss.name] + (loss.hard > 0)
    piece = min(few, piece_rows(draft, target.device))
    student = stays + few * draft * (seen * wide + together * number) + piece * draft * worked_on * wide
    backward = tokens * share * drafter.backward_floats() * number
    return max(features + forward, features + kept + hidden_gradients + int(max(teacher, student, backward)))


def module_bytes(module: nn.Module) -> int:
    """Bytes of weights and buffers, shared ones once."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(_bytes(t) for t in tensors.values())


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def free_memory(device: torch.device) -> int | None:
    """Bytes a process can still take on ``device``, its container's limit included; None where that is unknown."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    found = []
    meminfo = Path("/proc/meminfo")
    if device.type == "cpu" and meminfo.is_file():
        match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="utf-8"))
        found += [int(match[1]) * 1024] if match else []
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if device.type == "cpu" and limit.is_file() and used.is_file():
        most = limit.read_text(encoding="utf-8").strip()
        found += [] if most == "max" else [int(most) - int(used.read_text(encoding="utf-8"))]
    return min(found, default=None)


def announce(config: TrainConfig, drafter: Drafter, *, processes: int) -> str:
    """Return the estimate of a configured run as one line to show.

    Raises:
        UserError: it cannot fit.
    """
    rows, length = config.trainer.batch_size, config.data.pack_len
    need = estimate(
        drafter,
        rows=rows,
        length=length,
        loss=config.loss,
        low=precision(config, drafter.target.device) == "bf16",
        shards=processes if config.trainer.strategy == "fsdp" else 1,
        accumulate=config.trainer.accumulate > 1,
    )
    return refuse_unless_it_fits(need, drafter, rows=rows, length=length)


def refuse_unless_it_fits(need: MemoryEstimate, drafter: Drafter, *, rows: int, length: int) -> str:
    """Return the estimate as one line to show.

    Raises:
        UserError: what is still to be allocated is more than is free.
    """
    device = drafter.target.device
    free, more = free_memory(device), ", or set trainer.activation_checkpointing=true" if drafter.recomputes else ""
    if free is not None and need.to_come > free:
        raise UserError(
            f"a training step of {rows} x {length} tokens must fit into the memory of {device}, got an "
            f"estimate of {need}, of which {need.to_come / GIB:.2f} GiB are still to come and {free / GIB:.2f} GiB "
            f"are free; lower trainer.batch_size or data.pack_len{more}"
        )
    room = "" if free is None else f"; {free / GIB:.2f} GiB free beside target and weights"
    return f"memory of a training step: about {need}{room}"
