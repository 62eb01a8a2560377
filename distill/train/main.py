"""Entry of training: ``python train.py`` and ``draftsmith train``. Compose, convert strictly, run."""

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distill.config import build, describe, flatten
from distill.entry import Job, compose_values, config_groups, help_page, launch, run_folder
from distill.registry import DRAFTERS, drafter_class
from distill.train.config import TrainConfig
from distill.train.folder import check_named
from distill.train.parallel import World

SUMMARY = """\
Train a drafter against a frozen target model and export it for decoding.
Without arguments, SmolLM2-135M-Instruct writes its own training conversations and an EAGLE-3 drafter learns from
them. Everything a run makes lands in one folder, runs/<date>-<drafter>-<target> or run_dir=DIR; the same run_dir
again resumes it."""

EXAMPLES = (
    "python train.py",
    "python train.py debug=default                      # everything tiny: is the installation in order?",
    "python train.py drafter=eagle3 drafter.ttt_steps=5 loss=kl optim.lr=3e-4 trainer.max_steps=500",
    "python train.py target=hub target.name=Qwen/Qwen3-0.6B data=prompts data.path=prompts.jsonl",
    "python train.py experiment=smollm2-eagle3          # a file in configs/experiment/",
    "python train.py -m optim.lr=1e-4,3e-4              # a sweep: one folder per run",
    "python train.py run_dir=runs/mine                  # name the folder; again to resume",
    "torchrun --nproc-per-node 8 train.py run_dir=runs/mine   # eight GPUs; see docs/multi-gpu.md",
)


def main(argv: Sequence[str] | None = None, *, program: str = "python train.py") -> int:
    """Run ``train`` on a command line; returns the exit code (0, 2 for a user error, 130 after Ctrl-C)."""
    return launch(
        partial(train, program=program),
        config_name="train",
        help=partial(help_text, program=program),
        argv=argv,
    )


def train(values: dict[str, Any], job: Job, *, program: str = "python train.py") -> None:
    """Build the strict config, name the run's folder and run it."""
    config = train_config(values)
    check_named(config, World.detect(config.trainer))
    folder = run_folder(config.run_dir, job, parts=(config.drafter["name"], Path(config.target.name).name))
    config.run_dir = str(folder)

    from distill.train.run import run  # Lightning takes seconds to import; a typo is refused before that

    try:
        run(config)
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        # Lightning turns Ctrl-C into exit(1).
        given = [override for override in job.overrides if not override.startswith("run_dir=")]
        again = shlex.join([*program.split(), *given, f"run_dir={folder}"])
        raise KeyboardInterrupt(f"resume with: {again}") from None


def train_config(values: Mapping[str, Any]) -> TrainConfig:
    """Convert composed values strictly; the drafter's part is checked by the Config of the drafter it names."""
    return build(TrainConfig, values, parts=drafter_part(values))


def drafter_part(values: Mapping[str, Any]) -> dict[str, type]:
    """The options behind ``drafter``, for help and suggestions: those of the drafter ``values`` name."""
    drafter = values.get("drafter")
    name = drafter.get("name") if isinstance(drafter, Mapping) else None
    chosen: Any = drafter_class(name if isinstance(name, str) and name in DRAFTERS else next(iter(DRAFTERS)))
    return {"drafter": chosen.Config}


def help_text(overrides: Sequence[str] = (), *, program: str = "python train.py") -> str:
    """The text of ``--help``, for the drafter that ``overrides`` choose."""
    values = compose_values("train", [override for override in overrides if override.startswith("drafter=")])
    page = help_page(
        summary=SUMMARY,
        usage=f"{program} [GROUP=NAME ...] [OPTION=VALUE ...] [-m]",
        groups=config_groups("train"),
        options=describe(TrainConfig, parts=drafter_part(values)),
        defaults=flatten(values),
        examples=EXAMPLES,
    )
    return page.replace("python train.py", program)


if __name__ == "__main__":
    raise SystemExit(main(program="python -m distill.train.main"))
