"""One training run, top to bottom.

The path of a step: ``run`` -> ``DraftModule.training_step`` -> ``drafter.training_steps`` -> ``losses.total``.
"""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch

from distill.config import build, to_dict
from distill.data import PreparedData, load_prepared
from distill.data.datamodule import DataModule
from distill.data.features import FeatureStore, open_features, prepare_features
from distill.data.together import prepare_together, write_share
from distill.decode.calibrate import calibrate
from distill.drafters.base import Drafter
from distill.errors import UserError
from distill.export import load_drafter, save_calibration, save_drafter, update_card
from distill.export.files import read_json, to_json
from distill.files import fresh_folder, swap_folder, write_atomic
from distill.metrics import tau
from distill.registry import drafter_class
from distill.target import Target, load_target
from distill.target.loading import choose_device, is_sharded, load_for_sharding
from distill.train import memory
from distill.train.callbacks import (
    DecodeSamples,
    EndOnSigterm,
    LogMetrics,
    ProgressBar,
    ShardTarget,
    Validate,
    console,
    say,
)
from distill.train.checkpoint import AtomicCheckpointIO, Checkpoints, find_best, find_last, settle
from distill.train.config import EvalConfig, TrackingConfig, TrainConfig, TrainerConfig
from distill.train.evaluate import decode
from distill.train.folder import RunFolder
from distill.train.measure import frozen_plan, precision
from distill.train.module import DraftModule
from distill.train.parallel import World, environment, left_behind_cleared, losses_explained, strategy
from distill.train.schedule import OptimConfig, Plan
from distill.train.tracking import Tracker, make_trackers
from distill.train.waiting import Beacon, Watcher
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
    config.trained_class()  # what cannot be trained is refused before anything is loaded
    world = World.detect(config.trainer)
    config = world.resolve(config)
    folder = RunFolder.choose(config, world)
    with losses_explained(world, config.trainer), left_behind_cleared():
        if not world.first:
            tell = partial(console.print, f"process {world.rank}:", markup=False, highlight=False, soft_wrap=True)
            watcher = Watcher(folder.path, timeout_s=config.trainer.timeout_s, say=tell)
            return _run(config, folder, world, watcher)
        with folder.opened(config, say=say), Beacon(folder.path, on=world.size > 1) as beacon:
            return _run(config, folder, world, beacon)


def _run(config: TrainConfig, folder: RunFolder, world: World, sign: Beacon | Watcher) -> RunResult:
    """The run as one process sees it; the first one holds the beacon."""
    if folder.finished:
        say(f"{folder.path} is finished; its drafter is in {folder.export}")
        return result_of(folder)
    if torch.cuda.is_available():
        torch.cuda.set_device(world.local_rank)

    target = frozen_target(config, world)
    config.check_target(target)  # what does not fit is refused before data are written
    told = {}
    if isinstance(sign, Watcher):
        write_share(
            config.data,
            target,
            data_folder(config, folder),
            rank=world.rank,
            world=writers(config, world),
            timeout_s=config.trainer.timeout_s,
        )
        told = sign.wait("training")
    data = prepared_data(config, target, folder, world, sign)
    drafter = new_drafter(config, target, data, folder)
    drafter.recompute_activations(config.trainer.activation_checkpointing)
    line = memory.announce(config, drafter, processes=world.size)
    if world.first:
        say(line)
    datamodule = DataModule(
        data,
        pack_len=config.data.pack_len,
        max_len=config.data.max_len,
        batch_size=config.trainer.batch_size,
        accumulate=config.trainer.accumulate,
        seed=config.data.seed,
        features=stored_features(config, target, data, folder, sign),
    )
    prompts = held_out_prompts(config, target, data, n=config.eval.n)
    plan = frozen_plan(config, folder, drafter, datamodule, prompts)

    if isinstance(sign, Beacon):
        last = find_last(folder.checkpoints, say=say)
        if last is not None:
            say(f"resuming {folder.path} after step {last.step} of {plan.max_steps}")
            settle(folder.checkpoints, best=last.best, keep=config.trainer.keep)  # a kill may have come before this
        trackers = make_trackers(config.tracking, folder.path, from_step=last.step if last else 0, say=say)
        start = None if last is None else last.path
        sign.tell("training", resume=start and start.name)
    else:
        trackers = [Tracker()]
        start = folder.checkpoints / told["resume"] if told["resume"] else None
    for tracker in trackers:
        tracker.log_hyperparams(to_dict(config))
    trainer = build_trainer(config, world, plan, folder, trackers, prompts, target)
    module = DraftModule(
        drafter, config.loss, optim=config.optim, max_steps=plan.max_steps, seed=config.seed, depth=config.eval.depth
    )
    with warnings.catch_warnings(), folder.shared():
        for message in LIGHTNING_NOISE:
            warnings.filterwarnings("ignore", message=message)
        trainer.fit(module, datamodule=datamodule, ckpt_path=None if start is None else str(start))

    if isinstance(sign, Watcher):
        sign.wait("exported", done=lambda: folder.finished)
        return result_of(folder)
    sign.tell("exporting")
    # A divided target cannot decode here: the other processes have left the training loop.
    watched = held_out_prompts(config, target, data, n=config.eval.calibrate)
    if is_sharded(target):
        prompts, watched = [], []
    export_best(config, folder, target, prompts, watched)
    for tracker in trackers:
        tracker.log_export(folder.export)
        tracker.close()
    return result_of(folder)


def frozen_target(config: TrainConfig, world: World) -> Target:
    """Load the target; one that is to be divided is divided when the processes have met (``ShardTarget``).

    Raises:
        UserError: what ``load_target`` raises, or nothing to divide among.
    """
    if config.target.shard == "none":
        return load_target(config.target)
    if world.size == 1:
        raise UserError(
            "target.shard=fsdp must have several processes to divide the target among, got one; leave it out, or give "
            "trainer.devices"
        )
    if config.trainer.max_time is not None:
        raise UserError(
            "trainer.max_time must be null with target.shard=fsdp, since one process alone cannot time a step, got "
            f"{config.trainer.max_time}; give trainer.max_steps or trainer.epochs"
        )
    target = load_for_sharding(config.target)
    if world.first:
        _ = target.fingerprint  # read while the weights are whole
        if config.data.source in ("self", "prompts"):
            say("target.shard=fsdp: answers that are still missing are written on the CPU; data=chat needs none")
    return target


def data_folder(config: TrainConfig, folder: RunFolder) -> Path:
    """Where the prepared data lie."""
    return Path(config.data.folder) if config.data.folder else folder.path / "data"


def writers(config: TrainConfig, world: World) -> int:
    """Processes that write data: all that exist by then, each with a whole target of its own."""
    # Lightning starts the others only when training begins.
    return 1 if world.launcher == "lightning" or config.target.shard != "none" else world.size


def prepared_data(
    config: TrainConfig, target: Target, folder: RunFolder, world: World, sign: Beacon | Watcher
) -> PreparedData:
    """Write the training data, together with the other processes, or read what was written."""
    where = data_folder(config, folder)
    if isinstance(sign, Watcher):
        return load_prepared(where, config.data, vocab_size=target.info.vocab_size)
    sign.tell("preparing data")
    data = prepare_together(
        config.data, target, where, world=writers(config, world), timeout_s=config.trainer.timeout_s
    )
    folder.note_data(data.data_hash)
    say(
        f"data: {data.n_train} conversations to train on, {data.n_val} held out, "
        f"{data.stats['supervised_tokens']} supervised tokens"
    )
    return data


def stored_features(
    config: TrainConfig, target: Target, data: PreparedData, folder: RunFolder, sign: Beacon | Watcher
) -> FeatureStore | None:
    """Write the target's features, or open what the first process has written; None where every step computes them."""
    if config.data.features == "online":
        return None
    where = Path(config.data.features_folder) if config.data.features_folder else folder.path / "features"
    taps = config.trained_class().taps(config.drafter_config(), target.info)
    if isinstance(sign, Watcher):
        return open_features(config.data, data, target, where, taps=taps)
    sign.tell("preparing features")
    return prepare_features(config.data, data, target, where, taps=taps, say=say)


def new_drafter(config: TrainConfig, target: Target, data: PreparedData, folder: RunFolder) -> Drafter:
    """Choose the draft vocabulary from the supervised tokens and build the drafter with its first weights."""
    options, vocab = config.drafter_config(), None
    if config.drafter.get("draft_vocab_size") is not None:
        # A target smaller than the usual draft vocabulary keeps all of its tokens.
        options.draft_vocab_size = min(options.draft_vocab_size, target.info.vocab_size)
        counts = torch.from_numpy(data.counts("train"))
        vocab, report = choose_vocab(counts, options.draft_vocab_size, always=target.info.eos_ids)
        if not folder.vocab.is_file():  # the first process has written it before the others come here
            write_atomic(folder.vocab, to_json(asdict(report)))
        say(
            f"draft vocabulary: {report.size} of {target.info.vocab_size} tokens cover {report.coverage:.2%} of the "
            f"supervised text ({report.distinct} distinct)"
        )
    torch.manual_seed(config.seed)
    return drafter_class(config.drafter["name"])(options, target, vocab).to(target.device)


def held_out_prompts(config: TrainConfig, target: Target, data: PreparedData, *, n: int) -> list[list[int]]:
    """The beginnings of a few held-out conversations that leave room for an answer."""
    room = target.info.max_positions - config.eval.max_new_tokens
    prompts = []
    for conversation in data.conversations("val"):
        # Plain text is supervised from the start on; a quarter of it makes a prompt.
        prompt = conversation.prompt
        prompt = prompt if len(prompt) > 1 else conversation.ids[: max(1, len(conversation.ids) // 4)].tolist()
        if len(prompt) <= room:
            prompts.append(prompt)
    return prompts[:n]


def build_trainer(
    config: TrainConfig,
    world: World,
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
        EndOnSigterm(),
    ]
    device = target.device
    if config.target.shard != "none":
        device = choose_device(config.target.device)
        callbacks.append(ShardTarget(target, check=config.target.verify))
    return pl.Trainer(
        accelerator={"cuda": "gpu"}.get(device.type, device.type),
        devices=world.devices,
        num_nodes=world.num_nodes,
        strategy=strategy(options, world),
        precision="bf16-mixed" if precision(config, device) == "bf16" else "32-true",
        max_steps=plan.max_steps,
        accumulate_grad_batches=options.accumulate,
        callbacks=callbacks,
        logger=trackers,
        plugins=[AtomicCheckpointIO(), environment(world)],
        default_root_dir=folder.path,
        limit_val_batches=0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def export_best(
    config: TrainConfig,
    folder: RunFolder,
    target: Target,
    prompts: Sequence[list[int]],
    watched: Sequence[list[int]] = (),
) -> None:
    """Export the best checkpoint, load the files again and decode with them: what is measured is what is shipped.

    Args:
        config: of the run.
        folder: where its checkpoints are.
        target: the target.
        prompts: decoded with the export.
        watched: what its calibration is measured on.
    """
    best = find_best(folder.checkpoints)
    drafter = trained_drafter(config, best.path, target)
    measured = {"step": best.step, **best.metrics}
    # Under another name until the figures are in: the export appears last, complete, and marks the run as finished.
    with fresh_folder(folder.export, what="export folder") as scratch:
        fresh = save_drafter(drafter, scratch / "export", provenance=read_json(folder.provenance), card=measured)
        if prompts:
            done = decode(load_drafter(fresh, target), prompts, config.eval)
            measured["export/tau"] = tau([record for generation in done for record in generation.steps])
            update_card(fresh, measured)
        if watched:
            say("measuring how often its choices are the target's")
            choices = calibrate(load_drafter(fresh, target), watched, max_new_tokens=config.eval.max_new_tokens)
            if choices.greedy.count_D and choices.coupled.count_D:
                save_calibration(fresh, choices)
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
    target = load_target(replace(config.target, shard="none"))
    drafter = trained_drafter(config, best.path, target)
    return save_drafter(drafter, out, provenance=read_json(folder.provenance), card={"step": best.step, **best.metrics})


def trained_drafter(config: TrainConfig, checkpoint: Path, target: Target) -> Drafter:
    """The drafter of a training checkpoint, with the draft vocabulary that is in there."""
    state = AtomicCheckpointIO().load_checkpoint(checkpoint)["state_dict"]
    weights = {name.removeprefix("drafter."): value for name, value in state.items()}
    kept, options = weights.get("vocab.t2d"), config.drafter_config()
    vocab = None if kept is None else DraftVocab(kept.nonzero().flatten(), len(kept))
    if vocab is not None:
        options.draft_vocab_size = vocab.size
    drafter = drafter_class(config.drafter["name"])(options, target, vocab)
    drafter.load_state_dict(weights)
    return drafter.to(target.device)


def result_of(folder: RunFolder) -> RunResult:
    """The result of a finished run."""
    measured = read_json(folder.export / "provenance.json").get("measured", {})
    return RunResult(run_dir=folder.path, export_dir=folder.export, metrics=measured)
