"""The real command line, killed with -9 at random moments, ends with what an undisturbed one gives."""

import csv
import os
import random
import signal
import time

import pytest
from crash_tools import names, noted, untimed
from tracer import forked

from distill.data.store import read_manifest
from distill.export import copy_export
from distill.train import main as train_main
from distill.train.checkpoint import find_last

KILLS = 2


def command(folder):
    """A small run that writes its own data, with the shipped configs."""
    return [
        *("debug=default", "data.n_conversations=12", "data.shard_size=3", "data.slots=4"),
        *("trainer.checkpoint_every=1", f"run_dir={folder / 'run'}"),
    ]


def train(folder):
    assert train_main.main(command(folder)) == 0


def outcome(folder):
    run = folder / "run"
    with (run / "logs" / "metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if not k.startswith("speed/")} for row in csv.DictReader(file)]
    manifest = read_manifest(run / "data")
    return {
        "names": names(run),
        "data": [(path.name, path.read_bytes()) for path in sorted((run / "data").glob("*.safetensors"))],
        "counts": (manifest.conversations, manifest.tokens, manifest.left_out, manifest.stopped, manifest.data_hash),
        "weights": (run / "export" / "model.safetensors").read_bytes(),
        "measured": untimed(run / "export" / "provenance.json")["measured"],
        "index": untimed(run / "checkpoints" / "index.json"),
        "rows": rows,
    }


@pytest.mark.slow
def test_killed_at_random_it_ends_as_if_it_had_not_been(tmp_path):
    import distill.train.run  # noqa: F401 - loaded once, here: the children are for the work

    def ended(folder):
        _, status = os.waitpid(forked(lambda: train(folder)), 0)
        return os.waitstatus_to_exitcode(status)

    begin = time.monotonic()
    assert ended(tmp_path / "whole") == 0
    seconds = time.monotonic() - begin
    moments = [random.SystemRandom().uniform(0.1, 0.9) * seconds for _ in range(KILLS)]
    with noted(f"killed after {moments} of {seconds} seconds"):
        for moment in moments:
            child = forked(lambda: train(tmp_path / "torn"))
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            run = tmp_path / "torn" / "run"
            find_last(run / "checkpoints", say=pytest.fail)
            if (run / "export").exists():
                copy_export(run, tmp_path / "copy", overwrite=True)  # refuses one that is not whole
        assert ended(tmp_path / "torn") == 0
        whole, torn = outcome(tmp_path / "whole"), outcome(tmp_path / "torn")
        for part, value in whole.items():
            assert torn[part] == value, part
