"""One training run, top to bottom.

The path of a step: ``run`` -> ``DraftModule.training_step`` -> ``drafter.training_steps`` -> ``losses.total``.
"""

import logging
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from distill.config import build, to_dict
from distill.data import PreparedData, load_prepared, prepare
from distill.data.datamodule import DataModule
from distill.drafters.base import Drafter
from distill.export import load_drafter, save_drafter, update_card
from distill.export.files import read_json, swap_folder, to_json, write_atomic
from distill.metrics import tau
from distill.registry import drafter_class
from distill.target import Target, load_target
from distill.train.callbacks import DecodeSamples, LogMetrics, ProgressBar, Validate, say
from distill.train.checkpoint import AtomicCheckpointIO, Checkpoints, find_best, find_last
from distill.train.config import EvalConfig, TrackingConfig, TrainConfig, TrainerConfig
from distill.train.evaluate import decode
from distill.train.folder import RunFolder, local_rank
from distill.train.measure import frozen_plan, precision
from distill.train.module import DraftModule
from distill.train.schedule import OptimConfig, Plan
from distill.train.tracking import Tracker, make_trackers
from distill.vocab import DraftVocab, choose_vocab

__all__ = [
    "EvalConfig",
    "OptimConfig",
    "RunResult",
    "TrackingConfig",
    "TrainConfig",
    "TrainerConfig",
    "export_checkpoint",
    "run",
]


LIGHTNING_NOISE = (
    ".*does not have many workers.*",  # batches are views of arrays in memory
    ".*no `validation_step`.*",  # validation is a callback, so that it also happens after the last step
    ".*isinstance\\(treespec, LeafSpec\\).*",
)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run leaves behind.

    Attributes:
        run_dir: its folder.
        export_dir: the exported drafter.
        metrics: figures of the exported drafter (``val/tau``, ``export/tau``, ...).
    """

    run_dir: Path
    export_dir: Path
    metrics: dict[str, float]


def run(config: TrainConfig) -> RunResult:
    """Train a drafter and export the best one; resumes an interrupted run, leaves a finished one alone.

    Raises:
        UserError: anything the user can fix.
    """
    folder = RunFolder.choose(config)
    if folder.rank(config) == 0:
        with folder.opened(config):
            return _run(config, folder, first=True)
    folder.wait()
    return _run(config, folder, first=False)


def _run(config: TrainConfig, folder: RunFolder, *, first: bool) -> RunResult:
    if folder.finished:
        say(f"{folder.path} is finished; its drafter is in {folder.export}")
        return result_of(folder)
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())

    target = load_target(config.target)
    kind: Any = drafter_class(config.drafter["name"])
    kind.taps(config.drafter_config(), target.info)  # what does not fit is refused before data are written
    data = prepared_data(config, target, folder, first=first)
    drafter = new_drafter(config, target, data, folder)
    datamodule = DataModule(
        data,
        pack_len=config.data.pack_len,
        max_len=config.data.max_len,
        batch_size=config.trainer.batch_size,
        accumulate=config.trainer.accumulate,
        seed=config.data.seed,
    )
    prompts = held_out_prompts(config, target, data)
    plan = frozen_plan(config, folder, drafter, datamodule, prompts)

    last = find_last(folder.checkpoints, say=say)
    if last is not None:
        say(f"resuming {folder.path} after step {last.step} of {plan.max_steps}")
    trackers = [Tracker()]
    if first:
        trackers = make_trackers(config.tracking, folder.path, from_step=last.step if last else 0, say=say)
    for tracker in trackers:
        tracker.log_hyperparams(to_dict(config))
    trainer = build_trainer(config, plan, folder, trackers, prompts, target)
    module = DraftModule(drafter, loss=config.loss, optim=config.optim, max_steps=plan.max_steps, seed=config.seed)
    with warnings.catch_warnings(), folder.shared():
        for message in LIGHTNING_NOISE:
            warnings.filterwarnings("ignore", message=message)
        trainer.fit(module, datamodule=datamodule, ckpt_path=None if last is None else str(last.path))

    if first:
        export_best(config, folder, drafter, prompts)
        for tracker in trackers:
            tracker.log_export(folder.export)
            tracker.close()
    trainer.strategy.barrier("export")
    return result_of(folder)


def prepared_data(config: TrainConfig, target: Target, folder: RunFolder, *, first: bool) -> PreparedData:
    """Write the training data, or read what the first process has written."""
    where = Path(config.data.folder) if config.data.folder else folder.path / "data"
    if not first:
        return load_prepared(where, config.data, vocab_size=target.info.vocab_size)
    data = prepare(config.data, target, where)
    folder.note_data(data.data_hash)
    say(
        f"data: {data.n_train} conversations to train on, {data.n_val} held out, "
        f"{data.stats['supervised_tokens']} supervised tokens"
    )
    return data


def new_drafter(config: TrainConfig, target: Target, data: PreparedData, folder: RunFolder) -> Drafter:
    """Choose the draft vocabulary from the supervised tokens and build the drafter with its first weights."""
    options, vocab = config.drafter_config(), None
    if config.drafter.get("draft_vocab_size") is not None:
        # A target smaller than the usual draft vocabulary keeps all of its tokens.
        options.draft_vocab_size = min(options.draft_vocab_size, target.info.vocab_size)
        counts = torch.from_numpy(data.counts("train"))
        vocab, report = choose_vocab(counts, options.draft_vocab_size, always=target.info.eos_ids)
        write_atomic(folder.vocab, to_json(asdict(report)))
        say(
            f"draft vocabulary: {report.size} of {target.info.vocab_size} tokens cover {report.coverage:.2%} of the "
            f"supervised text ({report.distinct} distinct)"
        )
    torch.manual_seed(config.seed)
    return drafter_class(config.drafter["name"])(options, target, vocab).to(target.device)


def held_out_prompts(config: TrainConfig, target: Target, data: PreparedData) -> list[list[int]]:
    """The beginnings of a few held-out conversations that leave room for an answer."""
    room = target.info.max_positions - config.eval.max_new_tokens
    prompts = []
    for conversation in data.conversations("val"):
        # Plain text is supervised from the start on; a quarter of it makes a prompt.
        prompt = conversation.prompt
        prompt = prompt if len(prompt) > 1 else conversation.ids[: max(1, len(conversation.ids) // 4)].tolist()
        if len(prompt) <= room:
            prompts.append(prompt)
    return prompts[: config.eval.n]


def build_trainer(
    config: TrainConfig,
    plan: Plan,
    folder: RunFolder,
    trackers: list[Tracker],
    prompts: Sequence[list[int]],
    target: Target,
) -> pl.Trainer:
    """A Trainer with our files, callbacks and trackers; its own ones are off."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    options = config.trainer
    callbacks: list[pl.Callback] = [
        LogMetrics(plan, every=options.log_every),
        Validate(plan, limit=options.val_batches),
        DecodeSamples(prompts, plan, config.eval),
        Checkpoints(folder.checkpoints, plan, keep=options.keep),
        ProgressBar(plan),
    ]
    return pl.Trainer(
        accelerator={"cuda": "gpu"}.get(target.device.type, target.device.type),
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=options.strategy,
        precision="bf16-mixed" if precision(config, target) == "bf16" else "32-true",
        max_steps=plan.max_steps,
        accumulate_grad_batches=options.accumulate,
        callbacks=callbacks,
        logger=trackers,
        plugins=[AtomicCheckpointIO()],
        limit_val_batches=0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def export_best(config: TrainConfig, folder: RunFolder, drafter: Drafter, prompts: Sequence[list[int]]) -> None:
    """Export the best checkpoint, load the files again and decode with them: what is measured is what is shipped."""
    best = find_best(folder.checkpoints)
    drafter.load_state_dict(drafter_weights(best.path))
    measured = {"step": best.step, **best.metrics}
    # Under another name until the figures are in: the export appears last, complete, and marks the run as finished.
    fresh = folder.path / ".export.tmp"
    shutil.rmtree(fresh, ignore_errors=True)
    save_drafter(drafter, fresh, provenance=read_json(folder.provenance), card=measured)
    if prompts:
        done = decode(load_drafter(fresh, drafter.target), prompts, config.eval)
        measured["export/tau"] = tau([record for generation in done for record in generation.steps])
        update_card(fresh, measured)
    swap_folder(fresh, folder.export)
    names = {"val/tau": "simulated", "export/tau": "decoded"}
    figures = ", ".join(f"{name} {measured[key]:.2f}" for key, name in names.items() if key in measured)
    say(f"exported step {best.step} to {folder.export}; tokens per target pass: {figures or 'not measured'}")


def export_checkpoint(run_dir: str | Path, out: str | Path) -> Path:
    """Export the best checkpoint so far of a run that is not finished, without its data.

    Args:
        run_dir: the run.
        out: a folder that does not exist yet.

    Raises:
        UserError: no run there, no checkpoint yet, or ``out`` is taken.
    """
    folder = RunFolder(Path(run_dir))
    config = build(TrainConfig, folder.read_config())
    best = find_best(folder.checkpoints)
    weights = drafter_weights(best.path)
    target = load_target(config.target)
    kept, options = weights.get("vocab.t2d"), config.drafter_config()
    vocab = None if kept is None else DraftVocab(kept.nonzero().flatten(), len(kept))
    if vocab is not None:
        options.draft_vocab_size = vocab.size
    drafter = drafter_class(config.drafter["name"])(options, target, vocab)
    drafter.load_state_dict(weights)
    card = {"step": best.step, **best.metrics}
    return save_drafter(drafter, out, provenance=read_json(folder.provenance), card=card)


def drafter_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The drafter's part of a training checkpoint."""
    state = AtomicCheckpointIO().load_checkpoint(checkpoint)["state_dict"]
    return {name.removeprefix("drafter."): value for name, value in state.items()}


def result_of(folder: RunFolder) -> RunResult:
    """The result of a finished run."""
    measured = read_json(folder.export / "provenance.json").get("measured", {})
    return RunResult(run_dir=folder.path, export_dir=folder.export, metrics=measured)
