"""Who the processes are, by the launcher's variables; waiting by file, without a collective."""

import json
import threading
import time

import pytest
import train_tools as tools

from distill.errors import UserError
from distill.train.config import TrainerConfig
from distill.train.folder import RunFolder
from distill.train.parallel import World, losses_explained, strategy
from distill.train.run import run
from distill.train.waiting import NAME, Beacon, Watcher

TORCHRUN = {
    **{"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "5", "LOCAL_RANK": "1"},
    "GROUP_RANK": "1",
}
SLURM = {
    **{"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4", "SLURM_PROCID": "5"},
    **{"SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "train"},
}
PLAIN = {"LOCAL_RANK": "1", "NODE_RANK": "1"}


@pytest.mark.parametrize(
    "env, options, launcher",
    [
        (TORCHRUN, {}, "torchrun"),
        (TORCHRUN, {"devices": 4, "num_nodes": 2}, "torchrun"),
        (SLURM, {}, "slurm"),
        (SLURM | TORCHRUN, {}, "torchrun"),  # torchrun inside a SLURM job
        (PLAIN, {"devices": 4, "num_nodes": 2}, "lightning"),
        (PLAIN | {"WORLD_SIZE": "8"}, {"devices": 4, "num_nodes": 2}, "lightning"),
    ],
)
def test_the_launcher_decides(env, options, launcher):
    world = World.detect(TrainerConfig(**options), env)
    assert world == World(rank=5, local_rank=1, devices=4, num_nodes=2, launcher=launcher)
    assert (world.size, world.first, world.must_agree) == (8, False, True)


@pytest.mark.parametrize(
    "env", [{}, {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, SLURM | {"SLURM_JOB_NAME": "interactive"}]
)
def test_one_process_is_alone_whatever_surrounds_it(env):
    assert World.detect(TrainerConfig(), env) == World()
    assert World.detect(TrainerConfig(devices=2), env) == World(devices=2)  # the first one starts the second


@pytest.mark.parametrize(
    "env, options, sentence",
    [
        (TORCHRUN, {"devices": 2}, r"trainer.devices must be 4, which is what torchrun started, or null, got 2"),
        (SLURM, {"num_nodes": 1}, r"trainer.num_nodes must be 2, which is what slurm started, or null, got 1"),
        (TORCHRUN | {"WORLD_SIZE": "7"}, {}, r"equally many processes on every machine, got 7 in all and 4 here"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, {}, r"started by srun, got a job of 8 tasks"),
        (
            {k: v for k, v in SLURM.items() if k != "SLURM_NTASKS_PER_NODE"},
            {},
            r"8 tasks on 2 nodes with --ntasks-per-node=nothing; give --nodes and --ntasks-per-node",
        ),
        (SLURM | {"SLURM_NTASKS": "7"}, {}, r"equally many tasks per node, got 7 tasks on 2 nodes"),
        (PLAIN | {"WORLD_SIZE": "4"}, {"devices": 2}, r"must be the number of processes, got 2 x 1 and WORLD_SIZE=4"),
    ],
)
def test_contradictions_are_refused(env, options, sentence):
    with pytest.raises(UserError, match=sentence):
        World.detect(TrainerConfig(**options), env)


def test_a_name_is_needed_where_processes_cannot_ask():
    config = tools.config("x")
    config.run_dir = None
    with pytest.raises(UserError, match=r"run_dir must be given when torchrun starts 8 processes, got none"):
        RunFolder.choose(config, World.detect(TrainerConfig(), TORCHRUN))


def test_nothing_to_divide_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="trainer.strategy=fsdp must have several processes"):
        strategy(TrainerConfig(strategy="fsdp"), World())
    tools.in_memory(monkeypatch)
    config = tools.config(tmp_path / "run")
    config.target.shard = "fsdp"
    with pytest.raises(UserError, match="target.shard=fsdp must have several processes"):
        run(config)
    assert not (tmp_path / "run").exists()


def test_only_the_transport_is_explained():
    two = World(devices=2)
    with pytest.raises(UserError, match=r"process 0 must reach the other 1, got: .*gloo.*timeout_s=600 s"):  # noqa: SIM117
        with losses_explained(two, TrainerConfig()):
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    for world, error in ((two, RuntimeError("shapes do not fit")), (World(), RuntimeError("gloo"))):
        with pytest.raises(RuntimeError), losses_explained(world, TrainerConfig()):
            raise error


# ------------------------------------------------------------------------------------------------------ waiting
def watcher(folder, **options):
    return Watcher(folder, **{"timeout_s": 5.0, "say": lambda _: None, "poll": 0.01, **options})


def test_what_a_dead_run_left_means_nothing(tmp_path):
    (tmp_path / NAME).write_text(json.dumps({"process": "old", "stage": "training", "resume": "old", "beat": 7}))
    watching, told = watcher(tmp_path), {}
    thread = threading.Thread(target=lambda: told.update(watching.wait("training")))
    thread.start()
    time.sleep(0.1)
    assert not told
    with Beacon(tmp_path, on=True, every=0.01) as beacon:
        beacon.tell("training", resume="new")
        thread.join(5)
    assert told["resume"] == "new"
    assert not (tmp_path / NAME).exists()


def test_a_watcher_that_comes_late_is_told(tmp_path):
    with Beacon(tmp_path, on=True, every=0.01) as beacon:
        beacon.tell("training", resume=None)
        assert watcher(tmp_path).wait("training")["resume"] is None


def test_the_end_of_the_first_process_ends_the_waiting(tmp_path):
    beacon = Beacon(tmp_path, on=True, every=0.01)
    watching, ended = watcher(tmp_path), []

    def wait():
        try:
            watching.wait("training")
        except UserError as error:
            ended.append(str(error))

    thread = threading.Thread(target=wait)
    with beacon:
        beacon.tell("preparing data")
        thread.start()
        time.sleep(0.1)
    thread.join(5)
    assert "must get to 'training', got its end while it was 'preparing data'" in ended[0]


def test_silence_ends_the_waiting_and_the_wait_is_told(tmp_path):
    said = []
    (tmp_path / NAME).write_text(json.dumps({"process": "old", "stage": "training", "beat": 7}))
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"sign of life in .*first.json within trainer.timeout_s=0.2 s, got none"):
        watcher(tmp_path, timeout_s=0.2, say_every=0.05, say=said.append).wait("training")
    assert time.monotonic() - begin < 2
    assert said[0] == "waiting for the first process (not heard of yet)"


def test_no_wait_for_what_is_done(tmp_path):
    assert watcher(tmp_path).wait("exported", done=lambda: True) == {}


def test_one_process_writes_no_signs(tmp_path):
    with Beacon(tmp_path, on=False) as beacon:
        beacon.tell("training")
        assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------ resuming
def test_another_split_of_the_same_rows_is_allowed_and_told(tmp_path):
    folder, said = RunFolder(tmp_path / "run"), []
    folder.open(World(devices=2).resolve(tools.config(tmp_path / "run", batch_size=2, accumulate=2)))
    folder.open(World().resolve(tools.config(tmp_path / "run", batch_size=4, accumulate=2)), say=said.append)
    assert said == [
        "resuming with trainer.batch_size was 2, is now 4; trainer.devices was 2, is now 1: "
        "equal to rounding from here on, not bit for bit"
    ]
    assert len(json.loads(folder.provenance.read_text())["resumed_with"][0]["options"]) == 2


def test_another_number_of_rows_is_refused(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open(World(devices=2).resolve(tools.config(tmp_path / "run", batch_size=2)))
    with pytest.raises(
        UserError,
        match=r"\(trainer.devices was 2, is now 3; rows per step \(.*\) were 4, are 6\); repeat its options",
    ):
        folder.open(World(devices=3).resolve(tools.config(tmp_path / "run", batch_size=2)))
