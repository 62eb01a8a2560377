"""``python -m bench``: run the parts one after the other, print a table, keep the figures.

Exit code 0 when every part ran (bars met or not), 1 when one failed, 2 for wrong arguments, 130 when interrupted.
"""

import argparse
import importlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from bench.history import RESULTS, PartResult, Run, begin, read_history, save, unfinished
from bench.record import Options
from bench.table import history_table, print_run
from distill.errors import UserError, did_you_mean

PARTS = ("machine", "decoding", "trees", "draft_chain", "training", "methods", "features", "writing", "peers")
"""Modules of this package with ``run(options) -> list[Measurement]``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit code."""
    arguments = _parser().parse_args(argv)
    console, progress = Console(), Console(stderr=True)
    try:
        if arguments.history:
            return _show_history(arguments.out or RESULTS, console)
        run = _prepare(arguments)
    except UserError as error:
        progress.print(f"error: {error}", style="red", highlight=False, markup=False)
        return 2
    folder = arguments.out or (None if arguments.quick else RESULTS)
    torch.set_num_threads(run.options.threads)
    try:
        for name in run.wanted[len(run.parts) :]:
            progress.print(f"{name} ...", highlight=False)
            run.parts.append(run_part(name, run.options))
            path = save(run, folder) if folder else None
    except KeyboardInterrupt:
        print_run(run, console)
        kept = "; the parts above are kept, and --resume goes on from there" if folder else ""
        progress.print(f"interrupted{kept}", style="yellow")
        return 130
    print_run(run, console)
    if folder:
        console.print(str(path), highlight=False)
    return 1 if any(part.error for part in run.parts) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description="Measure speed and memory, with the limits beside.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default all")
    parser.add_argument("--quick", action="store_true", help="tiny shapes in seconds; nothing is kept without --out")
    parser.add_argument("--target", help="target model; default smollm2, with --quick tiny")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--engine", default="fast", choices=("fast", "eager"), help="what decoding runs on")
    parser.add_argument("--out", type=Path, help="folder of the results; default bench/results")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run of the same commit")
    parser.add_argument("--history", action="store_true", help="show how each figure moved over the last runs")
    return parser


def _prepare(arguments: argparse.Namespace) -> Run:
    """Check the arguments; a new run, or the interrupted one that they ask to go on with."""
    parts = arguments.parts or PARTS
    for part in parts:
        if part not in PARTS:
            raise UserError(f"a part must be one of {', '.join(PARTS)}, got {part!r}.{did_you_mean(part, PARTS)}")
    if arguments.threads < 1:
        raise UserError(f"--threads must be at least 1, got {arguments.threads}")
    options = Options(
        target=arguments.target or ("tiny" if arguments.quick else "smollm2"),
        threads=arguments.threads,
        quick=arguments.quick,
        engine=arguments.engine,
    )
    chosen = [part for part in PARTS if part in parts]
    found = unfinished(arguments.out or RESULTS, options, chosen) if arguments.resume else None
    if arguments.resume and found is None:
        raise UserError("--resume needs an interrupted run of the same parts, options and commit; got none, drop it")
    return found or begin(options, chosen)


def run_part(name: str, options: Options) -> PartResult:
    """Run one part; whatever it raises becomes part of the result, so that the others still run."""
    start, load, error = time.monotonic(), list(os.getloadavg()), None
    measurements = []
    try:
        measurements = importlib.import_module(f"bench.{name}").run(options)
    except Exception as failure:  # noqa: BLE001 - a broken part must not hide the others
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    seconds = time.monotonic() - start
    return PartResult(name=name, seconds=seconds, load=load, measurements=measurements, error=error)


def _show_history(folder: Path, console: Console) -> int:
    lines = read_history(folder)
    if not lines:
        raise UserError(f"{folder} must hold a history, got none; run make bench first")
    console.print(history_table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
