"""Killed with ``kill -9`` and resumed, again and again: bit for bit the run that was left alone."""

import os
import random
import sys
from functools import partial

import processes
import pytest
import torch

from distill.train.checkpoint import find_last

LIVES = 20
"""Kills of one process that the issue asks for, at least."""

OPTIONS = {"max_steps": 24, "checkpoint_every": 1, "val_every": 4, "decode_every": 8, "log_every": 3, "timeout_s": 8}


def at_event(rank, *, who, folder, number):
    """Die at the ``number``-th time that process ``who`` changes a file of the run."""
    left = number

    def hook(event, args):
        nonlocal left
        writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
        if not (writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir")):
            return
        if str(args[0]).startswith(folder) and ".first.json" not in str(args[0]):
            left -= 1
            if left == 0:
                processes.die()

    if rank == who:
        sys.addaudithook(hook)


def at_step(rank, *, who, number):
    """Die in the ``number``-th step of this life: behind its backward, before its update."""
    from distill.train.module import DraftModule

    plain, left = DraftModule.configure_gradient_clipping, [number]

    def clip(self, *args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            processes.die()
        plain(self, *args, **kwargs)

    if rank == who:
        DraftModule.configure_gradient_clipping = clip


def in_checkpoint(rank, *, who, number):
    """Die in the middle of the ``number``-th checkpoint of this life, half of it written."""
    import io

    from distill.train import checkpoint

    plain, left = torch.save, [number]

    def save(state, file):
        left[0] -= 1
        if left[0] > 0:
            plain(state, file)
            return
        whole = io.BytesIO()
        plain(state, whole)
        file.write(whole.getvalue()[: whole.tell() // 2])
        file.flush()
        os.fsync(file.fileno())
        processes.die()

    if rank == who:
        checkpoint.torch = type("torch", (), {"save": staticmethod(save), "load": staticmethod(torch.load)})


def death(rng, folder, world):
    """Some way to die, after a random while."""
    who = rng.randrange(world)
    kind = rng.choice(["event", "step", "checkpoint"])
    if kind == "step":
        return who, partial(at_step, who=who, number=rng.randint(1, 4))
    if kind == "checkpoint":
        return 0, partial(in_checkpoint, who=0, number=rng.randint(1, 3))
    return 0, partial(at_event, who=0, folder=str(folder), number=rng.randint(1, 30))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def assert_identical(whole, torn):
    a, b = processes.checkpoint(whole), processes.checkpoint(torn)
    assert a["global_step"] == b["global_step"] >= 2
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert same(a[part], b[part]), part
    assert processes.metrics(whole) == processes.metrics(torn)
    for name in ("logs/samples.jsonl", "export/model.safetensors"):
        assert (whole / name).read_bytes() == (torn / name).read_bytes(), name
    assert not list(torn.rglob("*.tmp"))
    assert not (torn / ".first.json").exists()


def lives(run_dir, options, *, world, rng, scratch, most):
    """Live and die until ``most`` kills, then to the end; returns how many kills there were and what survivors said."""
    kills, said, last = 0, [], 0
    while not (run_dir / "export").exists():
        who, ending = death(rng, run_dir, world) if kills < most else (None, None)
        life = processes.Group(
            processes.train, str(run_dir), options, ending, world=world, folder=scratch / f"life-{kills}"
        )
        codes = life.join()
        if who is None or codes == [0] * world:
            assert codes == [0] * world, life.said
            continue
        kills += 1
        assert codes[who] == -9, life.said
        for rank in set(range(world)) - {who}:
            assert codes[rank] == processes.USER_ERROR, life.said[rank]
            said.append(life.said[rank])
        damaged = []
        found = find_last(run_dir / "checkpoints", say=damaged.append)
        assert not damaged
        assert (found.step if found else 0) >= last, "a good checkpoint was lost"
        last = found.step if found else 0
    return kills, said


@pytest.mark.slow
def test_one_process_killed_twenty_times(tmp_path):
    processes.together(processes.train, str(tmp_path / "whole"), OPTIONS, world=1, folder=tmp_path / "log")
    kills = 0
    for seed in range(10):  # a run that ends by luck is followed by another one
        torn = tmp_path / f"torn-{seed}"
        rng = random.Random(seed)
        kills += lives(torn, OPTIONS, world=1, rng=rng, scratch=tmp_path / f"logs-{seed}", most=LIVES - kills)[0]
        assert_identical(tmp_path / "whole", torn)
        if kills >= LIVES:
            return
    pytest.fail(f"only {kills} kills")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_killed(tmp_path, strategy):
    """Whichever of the two is killed, the other ends with a sentence; together they resume bit for bit."""
    options = {**OPTIONS, "strategy": strategy, "batch_size": 1, "accumulate": 2, "max_steps": 12}
    processes.together(processes.train, str(tmp_path / "whole"), options, world=2, folder=tmp_path / "log")
    kills, said = lives(tmp_path / "torn", options, world=2, rng=random.Random(1), scratch=tmp_path / "logs", most=5)
    assert kills == len(said) == 5
    assert_identical(tmp_path / "whole", tmp_path / "torn")
    lost = ("must reach the other 1, got", "must give a sign of life")
    assert all(any(sentence in text for sentence in lost) for text in said), said


@pytest.mark.slow
@pytest.mark.parametrize("again", [{"accumulate": 2}, {"batch_size": 2}, {"strategy": "fsdp"}])
def test_resumed_with_another_split_of_the_same_rows(tmp_path, again):
    """Begun by two processes, resumed by one or with another strategy: the same steps, equal to rounding."""
    options = {"max_steps": 8, "checkpoint_every": 1, "val_every": 4, "log_every": 1, "timeout_s": 20}
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    processes.together(processes.train, str(whole), options | {"batch_size": 2}, world=1, folder=tmp_path / "log")
    options |= {"batch_size": 1}
    ending = partial(at_step, who=0, number=4)  # after an odd number of micro batches
    life = processes.Group(processes.train, str(torn), options, ending, world=2, folder=tmp_path / "life")
    assert life.join()[0] == -9
    resumed = processes.together(
        processes.train, str(torn), options | again, world=1 + ("strategy" in again), folder=tmp_path / "again"
    )
    assert "equal to rounding from here on, not bit for bit" in " ".join(resumed.said[0].split())
    assert f"{next(iter(again))} was " in resumed.said[0]

    a, b = processes.checkpoint(whole), processes.checkpoint(torn)
    assert a["global_step"] == b["global_step"] == 8
    for name, value in a["state_dict"].items():
        torch.testing.assert_close(b["state_dict"][name], value, rtol=1e-4, atol=1e-5)
    rows = processes.metrics(whole), processes.metrics(torn)
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]]
    for one, two in zip(*rows, strict=True):
        for key in ("train/loss", "train/supervised_tokens", "optim/lr", "optim/grad_norm", "val/tau"):
            assert one[key] == two[key] or float(one[key]) == pytest.approx(float(two[key]), rel=1e-4), key


@pytest.mark.slow
def test_killed_at_every_moment_of_the_export(tmp_path):
    """The export is whole or not there, and the run is resumed to the same one."""
    options = {**OPTIONS, "max_steps": 2, "val_every": 2}
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    processes.together(processes.train, str(whole), options, world=1, folder=tmp_path / "log")
    wanted = (whole / "export" / "model.safetensors").read_bytes()
    for number in range(1, 40):
        die = partial(_in_export, folder=str(torn), number=number)
        life = processes.Group(processes.train, str(torn), options, die, world=1, folder=tmp_path / f"life-{number}")
        codes = life.join()
        if (torn / "export").exists():
            assert sorted(p.name for p in (torn / "export").iterdir()) == sorted(
                p.name for p in (whole / "export").iterdir()
            )
            assert (torn / "export" / "model.safetensors").read_bytes() == wanted
            break
        assert codes == [-9], life.said
    assert number > 10


def _in_export(rank, *, folder, number):
    from distill.train import run

    plain = run.export_best

    def export(*args):
        at_event(rank, who=rank, folder=folder, number=number)
        plain(*args)

    run.export_best = export
