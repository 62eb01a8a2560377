"""A worker in a process of its own: a job goes in as JSON, an answer comes out, nothing stays behind.

The worker leads a process group that is killed with everything in it once the answer is there, after a timeout and
after Ctrl-C. It also ends when this process dies of whatever: its standard input, which nobody writes to, closes then.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distill.errors import UserError

TAIL = 400
"""Characters of a failed worker's last words that fit a message."""
RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Warning)\b")


def run_worker(
    command: Sequence[str],
    job: Mapping[str, Any],
    *,
    name: str,
    work: Path,
    variables: Mapping[str, str],
    timeout_s: float,
    keep_log: Path,
    complaint: str = "",
) -> dict[str, Any]:
    """Run ``command job.json answer.json`` and return the answer.

    Args:
        command: interpreter and script.
        job: what the worker is told.
        name: of the engine, for messages.
        work: folder for both files and the log.
        variables: environment variables that the user's own go before.
        timeout_s: seconds until it is stopped.
        keep_log: where the whole output goes when it fails.
        complaint: as for ``last_words``.

    Raises:
        UserError: it could not be started, failed, took too long or wrote no answer; with the last thing it said.
    """
    question, answer, log = work / "job.json", work / "answer.json", work / "log.txt"
    answer.unlink(missing_ok=True)
    question.write_text(json.dumps(job), encoding="utf-8")
    try:
        fault = _run([*command, str(question), str(answer)], log, _environment(variables), timeout_s)
    except OSError as error:
        raise UserError(f"engine {name} must be startable, got {error}; run python -m engines setup {name}") from error
    if not fault:
        try:
            content = json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            fault = "no readable answer"
        else:
            if isinstance(content, dict):
                return content
            fault = f"a {type(content).__name__} as answer"
    with contextlib.suppress(OSError):
        shutil.copyfile(log, keep_log)
    said = last_words(log.read_text(encoding="utf-8", errors="replace"), complaint)
    raise UserError(f"engine {name} must finish its job, got {fault}: {said}; the whole output is in {keep_log}")


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Ours, without what would mix two environments up."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON") and name not in ("VIRTUAL_ENV", "LD_PRELOAD")
    }
    return {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **variables, **inherited}


def _run(command: Sequence[str], log: Path, environment: Mapping[str, str], timeout_s: float) -> str:
    """Run to the end, output to ``log``; returns what went wrong, or an empty string."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=dict(environment), start_new_session=True
        )
        try:
            code = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return f"no end within {timeout_s:g} s"
        finally:
            # The group outlives its leader while anything in it does.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
    if code < 0:
        return f"an end by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
    return f"exit code {code}" if code else ""


def last_words(output: str, complaint: str = "") -> str:
    """The line of a program's output that says best why it failed.

    Args:
        output: everything it said.
        complaint: pattern of the lines in which an engine's own log tells of an error, its group being the error: the
            first one is the cause. Without such a line it is the last exception, else the last line.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if complaint and (found := next(filter(None, (re.match(complaint, line) for line in lines)), None)):
        return found[1][:TAIL]
    raised = [line for line in lines if RAISED.match(line)]
    return (raised or lines or ["it said nothing"])[-1][:TAIL]
