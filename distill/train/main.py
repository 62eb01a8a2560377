"""Entry of training: ``python train.py`` and ``draftsmith train``. Compose, convert strictly, run."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.config import build, describe
from distill.entry import Job, help_page, launch, run_folder
from distill.registry import DRAFTERS, drafter_class

SUMMARY = """\
Train a drafter against a frozen target model, then export it for decoding.
Without arguments: SmolLM2-135M-Instruct writes its own training conversations and an EAGLE-3 drafter learns from
them. Everything a run makes lands in one folder, runs/<date>-<drafter>-<target> or run_dir=...; starting again with
the same run_dir resumes."""

EXAMPLES = (
    "python train.py",
    "python train.py debug=default                                # a minute on a laptop: is everything in place?",
    "python train.py drafter.ttt_steps=5 loss=kl optim.lr=3e-4 trainer.max_steps=500",
    "python train.py target=hub target.name=Qwen/Qwen3-0.6B data=prompts data.path=prompts.jsonl",
    "python train.py experiment=smollm2-eagle3",
    "python train.py -m optim.lr=1e-4,3e-4                        # a sweep: one folder per run",
    "python train.py run_dir=runs/mine                            # name the folder; again to resume",
)


def main(argv: Sequence[str] | None = None, *, program: str = "python train.py") -> int:
    """Run ``train`` on a command line; returns the exit code (0, 2 for a user error, 130 after Ctrl-C)."""
    return launch(train, config_name="train", help=lambda: help_text(program), argv=argv)


def train(values: dict[str, Any], job: Job) -> None:
    """Build the strict config, name the run's folder and run it."""
    from distill.train.run import run  # not needed to refuse a config or to print help

    config = train_config(values)
    folder = run_folder(config.run_dir, job, parts=(values["drafter"]["name"], Path(config.target.name).name))
    config.run_dir = str(folder)
    try:
        run(config)
    except KeyboardInterrupt:
        again = " ".join(shlex.quote(o) for o in job.overrides if not o.startswith("run_dir="))
        raise KeyboardInterrupt(f"resume with: python train.py {again} run_dir={shlex.quote(str(folder))}") from None


def train_config(values: dict[str, Any]) -> Any:
    """Convert composed values to ``TrainConfig``; the drafter's part is checked against the chosen drafter's Config."""
    from distill.train.run import TrainConfig

    return build(TrainConfig, values)


def help_text(program: str) -> str:
    """The text of ``--help``."""
    from distill.train.run import TrainConfig

    parts = {"drafter": drafter_class("eagle3").Config}
    page = help_page(
        summary=SUMMARY,
        usage=f"{program} [GROUP=NAME ...] [OPTION=VALUE ...] [-m]",
        config_name="train",
        options=describe(TrainConfig, parts=parts),
        examples=EXAMPLES,
    )
    return page.replace("python train.py", program)
