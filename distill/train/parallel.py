"""Several processes: who started them, how they share a step, and what is said when one of them is lost.

    one process per device; rows of a step are divided, weights are the same everywhere (DDP) or in pieces (FSDP2)

The launcher's environment is the truth about ranks: torchrun and SLURM decide how many processes there are, and
``trainer.devices`` and ``trainer.num_nodes`` may repeat it, not contradict it.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from distill.config import first_line
from distill.errors import UserError
from distill.train.config import TrainConfig, TrainerConfig

Launcher = Literal["lightning", "torchrun", "slurm"]


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a run, known before any of them talks to another.

    Attributes:
        rank: number of this process among all.
        local_rank: number of this process on its machine.
        devices: processes per machine.
        num_nodes: machines.
        launcher: who starts the processes; ``lightning`` means that the first one starts the others of its machine.
    """

    rank: int = 0
    local_rank: int = 0
    devices: int = 1
    num_nodes: int = 1
    launcher: Launcher = "lightning"

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.devices * self.num_nodes

    @property
    def first(self) -> bool:
        """Whether this process prepares, logs and exports."""
        return self.rank == 0

    @property
    def must_agree(self) -> bool:
        """Whether processes exist that cannot ask the first one which folder it has chosen."""
        return self.size > 1 and (self.launcher != "lightning" or self.num_nodes > 1)

    @classmethod
    def detect(cls, options: TrainerConfig, env: Mapping[str, str] = os.environ) -> "World":
        """Read the launcher's variables.

        Raises:
            UserError: they contradict each other or ``options``, or the processes were not started by the launcher.
        """
        if "TORCHELASTIC_RUN_ID" in env:
            world = _torchrun(env)
        elif int(env.get("SLURM_NTASKS", "1")) > 1 and env.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
            world = _slurm(env)
        else:
            return _own(options, env)
        for name in ("devices", "num_nodes"):
            given, found = getattr(options, name), getattr(world, name)
            if given not in (None, found):
                raise UserError(
                    f"trainer.{name} must be {found}, which is what {world.launcher} started, or null, got {given}; "
                    "leave it out"
                )
        return world

    def resolve(self, config: TrainConfig) -> TrainConfig:
        """Return ``config`` with the number of processes in it, so that a run's record has it."""
        return replace(config, trainer=replace(config.trainer, devices=self.devices, num_nodes=self.num_nodes))


def _torchrun(env: Mapping[str, str]) -> World:
    size, local = int(env["WORLD_SIZE"]), int(env["LOCAL_WORLD_SIZE"])
    if size % local:
        raise UserError(
            f"torchrun must start equally many processes on every machine, got {size} in all and {local} here; "
            "give the same --nproc-per-node everywhere"
        )
    rank, local_rank = int(env["RANK"]), int(env["LOCAL_RANK"])
    return World(rank=rank, local_rank=local_rank, devices=local, num_nodes=size // local, launcher="torchrun")


def _slurm(env: Mapping[str, str]) -> World:
    tasks, nodes = int(env["SLURM_NTASKS"]), int(env.get("SLURM_NNODES", "1"))
    if "SLURM_STEP_ID" not in env:
        raise UserError(
            f"the processes of a SLURM job must be started by srun, got a job of {tasks} tasks without it; write srun "
            "in front of the command"
        )
    per_node = env.get("SLURM_NTASKS_PER_NODE", "")
    if per_node != str(tasks // nodes) or tasks % nodes:
        raise UserError(
            f"SLURM must start equally many tasks per node, got {tasks} tasks on {nodes} nodes with --ntasks-per-node="
            f"{per_node or 'nothing'}; give --nodes and --ntasks-per-node, not --ntasks"
        )
    return World(
        rank=int(env["SLURM_PROCID"]),
        local_rank=int(env["SLURM_LOCALID"]),
        devices=tasks // nodes,
        num_nodes=nodes,
        launcher="slurm",
    )


def _own(options: TrainerConfig, env: Mapping[str, str]) -> World:
    devices, nodes = options.devices or 1, options.num_nodes or 1
    if "LOCAL_RANK" in env and int(env.get("WORLD_SIZE", devices * nodes)) != devices * nodes:
        raise UserError(
            f"trainer.devices x trainer.num_nodes must be the number of processes, got {devices} x {nodes} and "
            f"WORLD_SIZE={env['WORLD_SIZE']} in the environment; give both options, or start with torchrun or srun"
        )
    local_rank = int(env.get("LOCAL_RANK", "0"))
    node = int(env.get("NODE_RANK", "0"))
    return World(rank=node * devices + local_rank, local_rank=local_rank, devices=devices, num_nodes=nodes)


# ------------------------------------------------------------------------------------------------------ Lightning
def environment(world: World) -> Any:
    """Lightning's view of the launcher; chosen here, so that it cannot see another one than ``World.detect``."""
    from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

    if world.launcher == "torchrun":
        return TorchElasticEnvironment()
    # Its own requeueing writes checkpoints outside the run folder; ours are there already when a job is requeued.
    return SLURMEnvironment(auto_requeue=False) if world.launcher == "slurm" else LightningEnvironment()


def strategy(options: TrainerConfig, world: World) -> Any:
    """Lightning's strategy for ``trainer.strategy``; a collective gives up after ``trainer.timeout_s``.

    Raises:
        UserError: fsdp with nothing to divide.
    """
    from lightning.pytorch.strategies import DDPStrategy

    from distill.train.fsdp import FSDP2Strategy

    timeout = timedelta(seconds=options.timeout_s)
    if options.strategy == "fsdp":
        if world.size == 1:
            raise UserError(
                "trainer.strategy=fsdp must have several processes to divide the weights among, got one; leave it out, "
                "or give trainer.devices"
            )
        return FSDP2Strategy(world.size, timeout=timeout)
    return DDPStrategy(timeout=timeout) if world.size > 1 or options.strategy == "ddp" else "auto"


@contextmanager
def left_behind_cleared() -> Iterator[None]:
    """Take away what a run of several processes leaves in this one, so that a sweep's next run starts them anew."""
    names = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
        if dist.is_available() and dist.is_initialized():  # after a failure it may wait for a process that is gone
            dist.destroy_process_group()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ------------------------------------------------------------------------------------------------------ failures
@contextmanager
def losses_explained(world: World, options: TrainerConfig) -> Iterator[None]:
    """Turn the error of a collective into a sentence: another process has ended, or has not answered in time.

    Raises:
        UserError: in place of such an error; any other one passes.
    """
    try:
        yield
    except RuntimeError as error:
        if world.size == 1 or not _of_transport(error):
            raise
        raise UserError(
            f"process {world.rank} must reach the other {world.size - 1}, got: {first_line(error)}; one of them has "
            f"ended, or has not answered for trainer.timeout_s={options.timeout_s:g} s; its own message says why, and "
            "the same command resumes the run"
        ) from error


def _of_transport(error: RuntimeError) -> bool:
    known = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    return isinstance(error, known) or "gloo" in str(error)
