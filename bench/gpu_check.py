"""``python -m bench.gpu_check``: what only a CUDA machine can show, in one script without network, under 8 minutes.

It needs PyTorch, transformers and lightning. First the checks (losslessness, parity of attention, losses, training
step and cache, compiled decoding), then figures on a random model of Llama-3.1-8B's shape with the machine's limits
beside them. Without a GPU the same script runs on the CPU with a tiny shape, which shows that it works and no more.

Parts run in a worker process. One that fails, hangs or takes the device down is reported and costs no other part:
the worker is ended and a new one goes on. The results are written after every part. Exit code 1 if a part failed.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from bench.gpu_parts import PARTS, Fault, Part, Skipped
from bench.gpu_report import line, summary, welcome

SCHEMA_VERSION = 1
START_LIMIT = 90.0
"""Seconds a worker may take to import PyTorch and find its device."""
Status = Literal["passed", "measured", "failed", "skipped"]


class StartError(RuntimeError):
    """No worker could be started; the message says why."""


@dataclass(kw_only=True)
class Outcome:
    """How one part went.

    Attributes:
        detail: what a check counted.
        figures: what a measurement measured, as plain values.
        broken: the worker cannot go on.
    """

    name: str
    kind: str
    status: Status
    seconds: float = 0.0
    note: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    figures: list[dict[str, Any]] = field(default_factory=list)
    broken: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything that fits, write the JSON, print the table; return the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.minutes <= 0:
        parser.error(f"--minutes must be above 0, got {options.minutes}")
    # Before any worker imports what reads them: nothing may wait for a network that is not there.
    os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="false")
    started = time.monotonic()
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "minutes": options.minutes,
        "seconds": 0.0,
        "complete": False,
        "machine": {},
        "parts": [],
    }

    def ready(machine: dict[str, Any]) -> None:
        if not report["machine"]:
            _say(welcome(machine))
        report["machine"] = machine

    def note(outcome: Outcome) -> None:
        report["parts"].append({k: v for k, v in asdict(outcome).items() if k != "broken"})
        report["seconds"] = round(time.monotonic() - started, 1)
        _write(options.out, report)
        _say(line(report["parts"][-1]))

    chosen = [part for part in PARTS if not options.only or part.name in options.only]
    start = partial(work, device=options.device, shape=options.shape)
    try:
        supervise(chosen, start, deadline=started + 60 * options.minutes, ready=ready, note=note)
    except StartError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    report["complete"] = True
    _write(options.out, report)
    _say(summary(report, options.out))
    return 1 if any(part["status"] == "failed" for part in report["parts"]) else 0


def _parser() -> argparse.ArgumentParser:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--device", default="auto", help="cuda, cuda:1, cpu; auto: cuda where there is one")
    parser.add_argument("--shape", default="auto", choices=("auto", "llama-3.1-8b", "tiny"), help="auto: tiny on a CPU")
    parser.add_argument("--minutes", type=float, default=8.0, help="no part is begun that would not end by then")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help="parts to run: " + ", ".join(names))
    return parser


# -- the supervisor: never imports PyTorch, so that nothing a part does can reach it


def supervise(
    parts: Sequence[Part],
    start: Callable[[Connection], None],
    *,
    deadline: float,
    ready: Callable[[dict[str, Any]], None],
    note: Callable[[Outcome], None],
) -> None:
    """Run the parts in a worker, a new one after a part that broke it.

    Args:
        parts: in order.
        start: what a worker process runs (``work``).
        deadline: on the monotonic clock.
        ready: called with what every new worker says of itself.
        note: called with every outcome, in order.

    Raises:
        StartError: the first worker did not start.
    """
    worker: _Worker | None = None
    broken = ""
    try:
        for index, part in enumerate(parts):
            left = deadline - time.monotonic()
            if broken or left < part.seconds:
                note(
                    _outcome(part, "skipped", note=broken or f"{part.seconds:.0f} s wanted, {max(left, 0):.0f} s left")
                )
                continue
            if worker is None:
                try:
                    worker = _Worker(start, min(START_LIMIT, left))
                except StartError as error:
                    if index == 0:
                        raise
                    broken = f"no new worker after the one before broke: {error}"
                    note(_outcome(part, "failed", note=broken))
                    continue
                ready(worker.machine)
            outcome = worker.run(part, deadline)
            note(outcome)
            if outcome.broken:
                worker.end()
                worker = None
    finally:
        if worker is not None:
            worker.end()


def _outcome(part: Part, status: Status, **others: Any) -> Outcome:
    return Outcome(name=part.name, kind=part.kind, status=status, **others)


class _SilentError(RuntimeError):
    """The worker gave no answer; the message says why."""


class _Worker:
    """A process that runs parts one by one on request.

    Raises:
        StartError: it does not answer within ``limit`` seconds, or says that it cannot work.
    """

    def __init__(self, start: Callable[[Connection], None], limit: float):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=start, args=(theirs,))
        self.process.start()
        theirs.close()
        try:
            self.machine: dict[str, Any] = self._answer(limit)
        except _SilentError as silence:
            self.end()
            raise StartError(f"the worker did not start: {silence}") from silence
        if "error" in self.machine:
            self.end()
            raise StartError(self.machine["error"])

    def run(self, part: Part, deadline: float) -> Outcome:
        """Run one part; it is ended when its patience or the time is up."""
        begun = time.monotonic()
        limit = min(part.limit, deadline - begun)
        try:
            self.pipe.send(part)
            outcome = self._answer(limit)
        except (_SilentError, OSError) as error:
            took = time.monotonic() - begun
            # A part that had its due time and did not end is at fault; one that began late is not.
            late = limit <= took < part.limit
            note = f"ended after {took:.0f} s, when the time was up" if late else str(error)
            return _outcome(part, "skipped" if late else "failed", note=note, seconds=round(took, 1), broken=True)
        return outcome

    def _answer(self, limit: float) -> Any:
        if not self.pipe.poll(max(limit, 0.0)):
            raise _SilentError(f"ended after {limit:.0f} s without an answer")
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            raise _SilentError(f"the worker died with exit code {self.process.exitcode}") from None

    def end(self) -> None:
        """Stop it for certain; one that waits for work goes by itself when the pipe closes."""
        self.pipe.close()
        self.process.join(0.5)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)


# -- the worker


def work(pipe: Connection, *, device: str, shape: str) -> None:
    """Resolve the device, then run the parts that come through the pipe until it closes."""
    try:
        from bench.gpu_setup import Setting  # here, because the supervisor reads this file, too

        setting = Setting.of(device, shape)
        machine = _describe(setting)
    except Exception as error:  # noqa: BLE001 - whatever it is, the supervisor has to say it
        pipe.send({"error": _sentence(error)})
        return
    pipe.send(machine)
    serve(pipe, setting)


def serve(pipe: Connection, setting: Any) -> None:
    """Run what comes through the pipe until it closes."""
    while True:
        try:
            part = pipe.recv()
        except EOFError:
            return
        pipe.send(run_part(part, setting))


def run_part(part: Part, setting: Any) -> Outcome:
    """Run one part in this process; whatever it raises becomes its outcome."""
    begun = time.monotonic()
    module, _, function = part.address.partition(":")
    outcome = _outcome(part, "passed" if part.kind == "check" else "measured")
    try:
        found = getattr(import_module(module), function)(setting)
        if part.kind == "check":
            outcome.detail = found
        else:
            outcome.figures = [asdict(figure) | {"met": figure.met} for figure in found]
    except Skipped as reason:
        outcome.status, outcome.note = "skipped", str(reason)
    except Fault as fault:
        outcome.status, outcome.note = "failed", str(fault)
    except Exception as error:  # noqa: BLE001 - one part's failure must not cost the others
        outcome.status, outcome.note = "failed", _sentence(error)
        outcome.detail = {"traceback": traceback.format_exc()}
    outcome.broken = outcome.status == "failed" and not setting.answers()
    if not outcome.broken:
        setting.clear()
    outcome.seconds = round(time.monotonic() - begun, 1)
    return outcome


def _sentence(error: BaseException) -> str:
    """Kind and first line of an error."""
    first = next((text.strip() for text in str(error).splitlines() if text.strip()), "")
    return f"{type(error).__name__}: {first}"


def _describe(setting: Any) -> dict[str, Any]:
    """What the results are measured on."""
    from distill.export import collect

    provenance = collect()
    return {**setting.describe(), **{key: provenance[key] for key in ("date", "git", "versions", "hardware")}}


def _write(path: Path, report: dict[str, Any]) -> None:
    """Whole or not at all: whoever ends this script finds what was done so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
