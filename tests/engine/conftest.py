"""Drafters for the engines, trained once for two minutes each and kept in the user's cache: about 15 minutes in all."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from distill.target.cache import cache_dir

OPTIONS = {
    "eagle3": ["drafter.ttt_steps=3", "drafter.draft_vocab_size=8192"],
    "eagle1": [],
    "medusa": ["drafter.heads=3"],
    "draft_model": [f"drafter.layers={[i for i in range(30) if i not in (12, 17, 22)]}".replace(" ", "")],
}
"""The draft model is the target without three of its layers, untrained: it accepts enough to be compared."""


class Trained(Mapping[str, Path]):
    """Native exports by drafter, trained when they are first asked for."""

    folder = cache_dir() / "engine-tests"

    def __getitem__(self, drafter: str) -> Path:
        run = self.folder / drafter
        if not (run / "export").is_dir():
            command = [
                *(sys.executable, "train.py", f"drafter={drafter}", f"run_dir={run}", *OPTIONS[drafter]),
                *(f"data.folder={self.folder / 'data'}", "data.n_conversations=200", "data.max_answer_tokens=128"),
                *("data.max_len=512", "data.pack_len=512", "data.slots=64", "trainer.batch_size=1"),
                *("trainer.max_time=2", "optim.lr=1e-3", "eval.n=2", "eval.calibrate=0"),
            ]
            if drafter == "draft_model":
                command += ["trainer.max_time=null", "trainer.max_steps=1", "optim.lr=1e-9"]
            done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
        return run / "export"

    def __iter__(self) -> Iterator[str]:
        return iter(OPTIONS)

    def __len__(self) -> int:
        return len(OPTIONS)


@pytest.fixture(scope="session")
def trained() -> Trained:
    """Drafters of SmolLM2."""
    return Trained()
