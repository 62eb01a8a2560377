"""Console script ``draftsmith``: hands the command line on to the entry that owns it."""

import importlib
import sys
from collections.abc import Sequence

import distill
from distill.errors import did_you_mean

COMMANDS: dict[str, tuple[str, str, list[str]]] = {
    "train": ("distill.train.main", "train a drafter (same as python train.py)", []),
    "data": ("serve_eval.__main__", "write the training data beforehand: whole, or a part per machine", ["task=data"]),
    "eval": ("serve_eval.__main__", "measure, show and verify decoding (same as python -m serve_eval)", []),
    "export": ("serve_eval.__main__", "write a run's drafter for the program that serves it", ["task=export"]),
    "inspect": ("serve_eval.__main__", "say what a drafter's folder holds, in any layout", ["task=inspect"]),
    "adopt": ("serve_eval.__main__", "read a public drafter in another program's layout", ["task=adopt"]),
    "check": ("serve_eval.__main__", "run a drafter in a real engine, acceptance beside ours", ["task=check"]),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatch ``draftsmith COMMAND ...``; returns the exit code."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("--help", "-h"):
        lines = [f"  {name:8}{text}" for name, (_, text, _) in COMMANDS.items()]
        print(
            "usage: draftsmith COMMAND [ARGUMENTS]\n\ncommands:",
            *lines,
            "\ndraftsmith COMMAND --help explains one",
            sep="\n",
        )
        return 0
    if command == "--version":
        print(distill.__version__)
        return 0
    if command not in COMMANDS:
        names = ", ".join(COMMANDS)
        print(
            f"error: command must be one of {names}, got {command!r}.{did_you_mean(command, COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    module, _, fixed = COMMANDS[command]
    if command in ("inspect", "adopt", "check") and rest and not rest[0].startswith("-") and "=" not in rest[0]:
        folder = rest[0].replace("\\", "\\\\").replace('"', '\\"')
        rest = [f'folder="{folder}"', *rest[1:]]
    return importlib.import_module(module).main([*fixed, *rest], program=f"draftsmith {command}")
