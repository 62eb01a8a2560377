"""Entry of measuring and showing: ``python -m serve_eval task=NAME`` and ``draftsmith eval``.

A task is a file in ``configs/task/`` and a module here with a ``Config`` dataclass and ``run(config)``.
"""

import importlib
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

from distill.config import build, describe, flatten
from distill.entry import Job, choices, compose_values, config_groups, help_page, launch, run_folder
from distill.errors import UserError, did_you_mean

SUMMARY = """\
Decode with a trained drafter: measure it, watch it, prove that it changes nothing.
The options below are those of task={task}; `task=NAME --help` shows another task's. checkpoint=DIR takes a run's
folder or the export inside it."""

EXAMPLES = (
    "python -m serve_eval task=bench checkpoint=runs/demo prompts=mtbench,humaneval tree=dynamic limit=20",
    "python -m serve_eval task=bench checkpoint=runs/demo temperature=0.7 top_p=0.9",
    "python -m serve_eval task=generate checkpoint=runs/demo \"prompt='Why is the sky blue?'\"",
    "python -m serve_eval task=show-mask data=chat data.path=conversations.jsonl",
    "python -m serve_eval task=bench --help",
)


def main(argv: Sequence[str] | None = None, *, program: str = "python -m serve_eval") -> int:
    """Run a task on a command line; returns the exit code (0, 2 for a user error, 130 after Ctrl-C)."""
    return launch(run_task, config_name="eval", help=partial(help_text, program=program), argv=argv)


def run_task(values: dict[str, Any], job: Job) -> None:
    """Build the task's strict config and run it; in a sweep every job gets its own output folder."""
    name = values.pop("task")
    module = task_module(name)
    config = build(module.Config, values)
    if job.number is not None and hasattr(config, "out"):
        config.out = str(run_folder(config.out, job, parts=(name,)))
    module.run(config)


def task_module(name: str) -> ModuleType:
    """The module of a task.

    Raises:
        UserError: unknown name; the message lists the choices.
    """
    names = choices("task")
    if name not in names:
        raise UserError(f"task must be one of {', '.join(names)}, got {name!r}.{did_you_mean(str(name), names)}")
    return importlib.import_module(f"serve_eval.{name.replace('-', '_')}")


def help_text(overrides: Sequence[str] = (), *, program: str = "python -m serve_eval") -> str:
    """The text of ``--help``, for the task that ``overrides`` choose."""
    values = compose_values("eval", [override for override in overrides if override.startswith("task=")])
    page = help_page(
        summary=SUMMARY.format(task=values["task"]),
        usage=f"{program} task=NAME [OPTION=VALUE ...]",
        groups=["task", *config_groups(f"task/{values['task']}")],
        options=describe(task_module(values["task"]).Config),
        defaults=flatten(values),
        examples=EXAMPLES,
    )
    return page.replace("python -m serve_eval", program)


if __name__ == "__main__":
    raise SystemExit(main())
