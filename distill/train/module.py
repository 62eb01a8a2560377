"""The LightningModule: glue only. What a step computes is ``step_loss``, usable without a Trainer.

The target is no submodule: it is in no checkpoint, no optimiser, never in training mode.
"""

import math
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distill import losses
from distill.drafters.base import Drafter
from distill.errors import UserError
from distill.losses import LossConfig, LossResult
from distill.metrics import runs_of_hits, simulated_sums
from distill.train.fsdp import shard_module, whole
from distill.train.schedule import OptimConfig, build_optimizer
from distill.types import Batch, TargetOutput


def step_loss(drafter: Drafter, batch: Batch, config: LossConfig) -> LossResult:
    """One micro step: target features, the drafter's predictions, the loss (a sum over positions / denominator)."""
    target, batch = drafter.target, drafter.rollout(batch)
    output = batch.features if batch.features is not None else target_features(drafter, batch)
    predictions = drafter.training_steps(batch, output)
    return losses.total(predictions, batch, output, target=target, vocab=drafter.vocab, config=config)


def target_features(drafter: Drafter, batch: Batch) -> TargetOutput:
    """Run the target on a batch, in its own precision."""
    target = drafter.target
    taps = drafter.taps(drafter.config, target.info)
    with torch.autocast(target.device.type, enabled=False):
        return target.forward(batch.ids_BL, positions_BL=batch.positions_BL, doc_BL=batch.doc_BL, taps=taps)


class Sums:
    """Running sums over micro batches; one vector, so that ranks are added up with one call.

    Args:
        depth: of the simulated chain where training knows one step only (``chained``).
    """

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth
        self.vector: Tensor | None = None
        self.starts = 0
        """Positions at which a draft could begin, in the last call of ``means``."""
        self.names: list[str] = []

    def add(self, result: LossResult, *, doc_BL: Tensor, tokens: float, denominator: float) -> None:
        """Add one micro batch; ``tokens`` is its share of the supervised tokens of its step (``denominator``)."""
        exact = torch.float32 if result.loss.device.type == "mps" else torch.float64
        hits_KBL, valid_KBL = result.hits_KBL, result.valid_KBL
        if self.depth > 1:
            hits_KBL, valid_KBL = runs_of_hits(hits_KBL, valid_KBL, doc_BL, self.depth)
        accepted, starts = simulated_sums(hits_KBL, valid_KBL)
        loss = result.loss.detach().to(exact) * denominator
        columns = {"acc": result.hits_K, "alpha": result.alpha_K}
        if result.top_KJ is not None:  # its first column is the accuracy, but for ties
            columns |= {f"top{j + 1}": result.top_KJ[:, j] for j in range(1, result.top_KJ.shape[1])}
        by_step = [f"{name}_{k}" for name in columns for k in range(len(result.count_K))]
        self.names = ["loss", "tau", *result.terms, *by_step]
        above = [loss, accepted, *(total for total, _ in result.terms.values())]
        below = [torch.full_like(loss, tokens), starts, *(count for _, count in result.terms.values())]
        counts = [result.count_K] * len(columns)
        new = torch.stack(
            [
                torch.cat([torch.stack([x.to(loss) for x in single]), *(x.to(loss) for x in stepwise)])
                for single, stepwise in ((above, columns.values()), (below, counts))
            ]
        )
        self.vector = new if self.vector is None else self.vector + new

    def means(self, prefix: str) -> dict[str, float]:
        """Return the means over everything added on all ranks, and start anew.

        They are loss, tau and supervised tokens, acc_k and alpha_k, the mean of every term that is no draft
        (``LossResult.terms``), and without gradients top2_k, ...: how often the target's choice is among the draft's
        likeliest two, ...
        """
        assert self.vector is not None, "nothing was added"
        vector, self.vector = self.vector, None
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(vector)
        above, below = vector.tolist()
        means = {name: a / max(b, 1) for name, a, b in zip(self.names, above, below, strict=True)}
        means["tau"] += 1
        self.starts = int(below[1])
        means["supervised_tokens"] = below[0]
        return {f"{prefix}/{name}": value for name, value in means.items()}


def chained(drafter: Drafter, depth: int) -> int:
    """Steps that the simulated chain adds to one trained step: ``depth`` where drafting repeats it, else 1."""
    return depth if drafter.steps == 1 and drafter.max_depth is None else 1


class DraftModule(pl.LightningModule):
    """Trains a drafter with automatic optimisation.

    Args:
        drafter: what is trained.
        loss: which loss.
        optim: optimiser and schedule.
        max_steps: the frozen number of optimiser steps.
        seed: keys the randomness of each step.
        depth: of the simulated chain of a drafter that trains on one step.
    """

    def __init__(
        self, drafter: Drafter, loss: LossConfig, *, optim: OptimConfig, max_steps: int, seed: int = 0, depth: int = 5
    ):
        super().__init__()
        self.drafter = drafter
        self.loss_config, self.optim_config, self.max_steps, self.seed = loss, optim, max_steps, seed
        self.depth = depth
        self.sums = Sums(chained(drafter, depth))
        self.step_info: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        """Newest value of everything that was logged."""
        self.validated: dict[int, float] = {}
        """Step -> simulated acceptance length on held-out data."""
        self._step_losses: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one micro batch, scaled so that the gradient is the one of the whole step at once.

        The loss is a sum divided by the whole step's supervised tokens. Lightning then divides by the number of
        micro batches and DDP averages over ranks; both are undone here.
        """
        micro = self.trainer.accumulate_grad_batches
        # A function of where we are, so a resumed run draws what the uninterrupted one drew.
        place = (self.trainer.global_step * micro + batch_idx % micro) * self.trainer.world_size
        torch.manual_seed((self.seed * 2**40 + place + self.trainer.global_rank) % 2**63)
        self.drafter.on_step(self.trainer.global_step, self.max_steps)
        result = step_loss(self.drafter, batch, self.loss_config)
        parts = micro * self.trainer.world_size
        self.sums.add(result, doc_BL=batch.doc_BL, tokens=batch.denominator / parts, denominator=batch.denominator)
        self._step_losses.append((result.loss.detach(), batch.doc_BL))
        return result.loss * parts

    def configure_model(self) -> None:
        """Divide the weights where ``trainer.strategy=fsdp`` asks for it."""
        if self.device_mesh is not None:
            shard_module(self, self.device_mesh["data_parallel"], step="training_step")

    def configure_optimizers(self) -> Any:
        """AdamW with its schedule, stepped once per optimiser step."""
        optimizer, schedule = build_optimizer(self.drafter, self.optim_config, max_steps=self.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clip, note the norm, and stop before a step that would spoil the weights."""
        norm = float(whole(nn.utils.clip_grad_norm_(self.drafter.parameters(), self.optim_config.clip or float("inf"))))
        self._refuse_nonfinite(norm)
        self.step_info = {"optim/grad_norm": norm, "optim/lr": optimizer.param_groups[0]["lr"]}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The newest figures travel along: the best checkpoint is described by them."""
        checkpoint["metrics"] = dict(self.metrics)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take them up again, and count micro batches as if all had been cut as they are now."""
        self.metrics = checkpoint["metrics"]
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        seen = checkpoint["global_step"] * self.trainer.accumulate_grad_batches
        for counts in (progress["total"], progress["current"]):
            counts.update(dict.fromkeys(counts, seen))

    def _refuse_nonfinite(self, norm: float) -> None:
        step_losses, self._step_losses = self._step_losses, []
        bad = [micro for micro, (loss, _) in enumerate(step_losses) if not math.isfinite(loss)]
        if not bad and math.isfinite(norm):
            return
        what = f"{float(step_losses[bad[0]][0])}" if bad else f"a gradient norm of {norm}"
        micros = bad or range(len(step_losses))
        rows = ", ".join(name for micro in micros for name in self._row_names(micro, step_losses[micro][1]))
        raise UserError(
            f"the loss must be finite, got {what} at step {self.trainer.global_step + 1}, {rows}; checkpoints "
            "written before stay: start a new run with a lower optim.lr, trainer.precision=fp32 or smaller weights of "
            "the drafter's losses"
        )

    def _row_names(self, micro: int, doc_BL: Tensor) -> list[str]:
        """Rows by their number in the data order (``Batches``), and the documents in each."""
        world, rows = self.trainer.world_size, len(doc_BL)
        begin = (self.trainer.global_step * self.trainer.accumulate_grad_batches + micro) * rows * world
        numbers = range(begin + self.trainer.global_rank, begin + rows * world, world)
        return [f"row {i} (documents 0-{int(doc.max())})" for i, doc in zip(numbers, doc_BL, strict=True)]
