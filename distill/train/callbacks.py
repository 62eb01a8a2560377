"""What happens between steps: logging, validation, real decoding, the progress bar.

Their order in the Trainer is the order within a step: log, validate, decode, checkpoint.
"""

import math
import signal
import threading
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.distributed.device_mesh import init_device_mesh

from distill.errors import UserError
from distill.metrics import accept_by_depth, tau
from distill.target import Target
from distill.target.loading import is_sharded, shard_target
from distill.train.config import EvalConfig
from distill.train.evaluate import decode, validate
from distill.train.fsdp import whole_weights
from distill.train.schedule import Plan
from distill.train.tracking import Sample, Tracker
from distill.types import Batch

console = Console(stderr=True)

STARTS, PATIENCE = "train/starts", 50
"""Positions at which a draft began, over the run; after so many steps without any there will be none."""
SPENT = ("train/tokens", "train/minutes")
"""What training took: supervised tokens, passes counted, and the time of its steps."""


@rank_zero_only
def say(text: str) -> None:
    """Show one line, above the progress bar where there is one; one process speaks for all."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class AfterStep(Callback):
    """A callback with one more hook: ``after_step``, called per optimiser step instead of per micro batch."""

    _seen = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Start counting where training starts, which is not 0 in a resumed run."""
        self._seen = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Call ``after_step`` if this micro batch completed an optimiser step."""
        if trainer.global_step != self._seen:
            self._seen = trainer.global_step
            self.after_step(trainer, pl_module, trainer.global_step)

    def after_step(self, trainer: pl.Trainer, module: Any, step: int) -> None:
        """Do what has to be done after optimiser step ``step`` (from 1)."""


def publish(trainer: pl.Trainer, module: Any, metrics: dict[str, float], step: int) -> None:
    """Hand metrics to every tracker, and keep the newest ones in ``module.metrics``."""
    # NaN stands for "nothing to count", as at a depth no draft reached.
    metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
    module.metrics.update(metrics)
    if trainer.is_global_zero:
        for tracker in trainer.loggers:
            tracker.log_metrics(metrics, step)


class LogMetrics(AfterStep):
    """Logs means over the steps since the last time.

    Validation, decoding and checkpoints end such a window, too: the throughput leaves them out, and a resumed
    run logs what an uninterrupted one logs. What training took so far is added up in the module's ``metrics``, which
    travel with every checkpoint.
    """

    def __init__(self, plan: Plan, *, every: int):
        self.plan, self.every = plan, every
        self.tokens, self.since = 0, 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Batch, batch_idx: int) -> None:
        """Count tokens, padding left out."""
        if self.tokens == 0:
            self.since = time.perf_counter()
        self.tokens += int((batch.doc_BL >= 0).sum())

    def after_step(self, trainer: pl.Trainer, module: Any, step: int) -> None:
        """Log if it is time."""
        plan = self.plan
        events = (self.every, plan.val_every, plan.decode_every, plan.checkpoint_every)
        if not any(plan.due(every, step) for every in events):
            return
        seconds = max(time.perf_counter() - self.since, 1e-9)
        speed = self.tokens * trainer.world_size / seconds
        means = module.sums.means("train")
        module.metrics[STARTS] = module.metrics.get(STARTS, 0.0) + module.sums.starts
        if not module.metrics[STARTS] and (step >= PATIENCE or step == plan.max_steps):
            raise UserError(
                f"the data must have positions where {module.drafter.name} can begin to draft, got none in {step} "
                "steps: answers need at least two tokens; look at them with python -m serve_eval task=show-mask"
            )
        metrics = means | module.step_info | {"speed/tokens_per_s": speed}
        for name, value in zip(SPENT, (metrics["train/supervised_tokens"], seconds / 60), strict=True):
            module.metrics[name] = module.metrics.get(name, 0.0) + value
        publish(trainer, module, metrics, step)
        self.tokens = 0


class Validate(AfterStep):
    """Measures the drafter on held-out batches.

    Args:
        plan: when.
        limit: batches at most.
    """

    def __init__(self, plan: Plan, *, limit: int):
        self.plan, self.limit = plan, limit

    def after_step(self, trainer: pl.Trainer, module: Any, step: int) -> None:
        """Validate if it is time."""
        if not self.plan.due(self.plan.val_every, step):
            return
        with whole_weights(module), trainer.precision_plugin.val_step_context():
            batches = islice(trainer.datamodule.val_dataloader(), self.limit)  # type: ignore[attr-defined]
            drafter, loss = module.drafter, module.loss_config
            metrics = validate(drafter, batches, loss, depth=module.depth, world=trainer.world_size)
        if metrics:
            module.validated[step] = metrics["val/tau"]
            publish(trainer, module, metrics, step)


class DecodeSamples(AfterStep):
    """Decodes a few held-out prompts for real and logs their acceptance length beside the simulated one.

    Args:
        prompts: token ids.
        plan: when.
        config: how far and how deep.
    """

    def __init__(self, prompts: Sequence[list[int]], plan: Plan, config: EvalConfig):
        self.prompts, self.plan, self.config = prompts, plan, config

    def after_step(self, trainer: pl.Trainer, module: Any, step: int) -> None:
        """Decode if it is time; on one rank, unless the target needs all of them for a forward."""
        target = module.drafter.target
        if not self.prompts or not self.plan.due(self.plan.decode_every, step):
            return
        with whole_weights(module):
            if not (trainer.is_global_zero or is_sharded(target)):
                return
            done = decode(module.drafter, self.prompts, self.config)
        steps = [record for generation in done for record in generation.steps]
        metrics = {"decode/tau": tau(steps)}
        metrics |= {f"decode/accept_{d}": rate for d, rate in enumerate(accept_by_depth(steps), 1)}
        publish(trainer, module, metrics, step)
        if target.tokenizer is None:
            return
        samples = [
            Sample(prompt=target.decode(prompt), answer=target.decode(generation.ids), tau=tau(generation.steps))
            for prompt, generation in zip(self.prompts, done, strict=True)
        ]
        for tracker in trainer.loggers:
            if isinstance(tracker, Tracker):
                tracker.log_samples(samples, step)
        say(f"step {step}: decoding accepts {metrics['decode/tau']:.2f} tokens per pass; {samples[0].answer[:200]!r}")


class ShardTarget(Callback):
    """Divides the target over the processes as soon as they have met.

    Args:
        target: loaded by ``load_for_sharding``.
        check: compare with the model's own logits and masks afterwards.
    """

    def __init__(self, target: Target, *, check: bool):
        self.target, self.check = target, check

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Divide it."""
        device = trainer.strategy.root_device
        mesh = init_device_mesh(device.type, (trainer.world_size,))
        shard_target(self.target, mesh=mesh, device=device, check=self.check)


class EndOnSigterm(Callback):
    """Ends the process at once when a scheduler or launcher asks for it; the last checkpoint is what a resume needs.

    Lightning's own handler first talks to the other processes, and one of them may be why this one has to end.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Take the place of Lightning's handler, which is there by now and which it puts away itself."""

        def end(*_: object) -> None:
            if trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(signal.SIGTERM)
            say("ended by SIGTERM; the same command with the same run_dir resumes the run")
            raise SystemExit(128 + signal.SIGTERM)

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, end)


class ProgressBar(AfterStep):
    """A bar with time left on a terminal, one line every ``seconds`` otherwise."""

    def __init__(self, plan: Plan, *, seconds: float = 15.0):
        self.plan, self.seconds = plan, seconds
        self.bar: Progress | None = None
        self.begin = self.shown = 0.0
        self.first = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Open the bar where the run stands."""
        super().on_train_start(trainer, pl_module)
        self.begin = self.shown = time.monotonic()
        self.first = trainer.global_step
        if not trainer.is_global_zero or not console.is_terminal:
            return
        columns = (BarColumn(bar_width=16), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, TextColumn("{task.fields[figures]}"), console=console)
        self.task = self.bar.add_task("", total=self.plan.max_steps, completed=self.first, figures="")
        self.bar.start()

    def after_step(self, trainer: pl.Trainer, module: Any, step: int) -> None:
        """Show where training stands."""
        shown = SHOWN if self.bar is None else SHOWN[:4]  # what fits beside a bar in 80 columns
        figures = "  ".join(f"{label} {module.metrics[name]:.4g}" for name, label in shown if name in module.metrics)
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update(self.task, completed=step, figures=figures)
        elif trainer.is_global_zero and (now - self.shown > self.seconds or step == self.plan.max_steps):
            self.shown = now
            left = (now - self.begin) / (step - self.first) * (self.plan.max_steps - step)
            say(f"step {step}/{self.plan.max_steps}  {figures}  {left / 60:.1f} min left")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Close the bar, so that the message stands alone."""
        self.on_train_end(trainer, pl_module)


SHOWN = (
    ("train/loss", "loss"),
    ("train/tau", "tau"),
    ("val/tau", "val"),
    ("decode/tau", "decoded"),
    ("speed/tokens_per_s", "tok/s"),
)
