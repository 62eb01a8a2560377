"""The one place that runs Hydra: compose, hand plain values to a task, turn what users can fix into one sentence.

``train.py`` and ``python -m serve_eval`` share it, so both refuse bad input the same way: one line on stderr and
exit code 2. Bugs keep their traceback. Hydra itself writes nothing but a sweep's ``multirun.yaml``.
"""

import errno
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from distill.config import Option, config_dir, first_line, format_help, plain
from distill.errors import UserError, did_you_mean

# Hydra 1.4 warns about the argument that 1.3 asks for.
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)

FLAGS = {
    *("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--resolve", "--package", "-p", "--run", "-r"),
    *("--multirun", "-m", "--shell-completion", "-sc", "--config-path", "-cp", "--config-name", "-cn"),
    *("--config-dir", "-cd", "--experimental-rerun", "--info", "-i"),
}
"""What Hydra's own parser knows."""

UNKNOWN_KEY = re.compile(r"Could not override '([^'@]+)'\.\s*$", re.MULTILINE)

FOLDER = re.compile(r"\+*(run_dir|out|hydra\.sweep\.dir)=")
"""Overrides that name a folder; in a sweep every job gets its own inside."""

USER_ERRNO = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Which run of a sweep this is.

    Attributes:
        number: index in the sweep, None outside one.
        overrides: what the command line changed, as typed; for a job of a sweep, what this job was given.
        sweep_dir: folder of the sweep, None outside one.
    """

    number: int | None = None
    overrides: tuple[str, ...] = ()
    sweep_dir: Path | None = None


def launch(
    task: Callable[[dict[str, Any], Job], None],
    *,
    config_name: str,
    help: Callable[[list[str]], str],
    argv: Sequence[str] | None,
) -> int:
    """Compose ``configs/<config_name>.yaml`` with the command line and call ``task`` once, or once per sweep job.

    Args:
        task: gets the composed values as plain containers; it builds the strict config itself.
        config_name: root config.
        help: makes the text of ``--help``, given the overrides beside it.
        argv: arguments without the program name; None takes ``sys.argv``.

    Returns:
        Exit code: 0, 2 after a ``UserError`` (in a sweep the other jobs still run), 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Hydra's parser wants its own flag before the overrides.
    arguments.sort(key=lambda argument: argument not in ("-m", "--multirun"))
    failures: list[str] = []
    try:
        with _reporting(failures):
            if {"--help", "-h"} & set(arguments):
                overrides = [argument for argument in arguments if not argument.startswith("-")]
                sys.stdout.write(help(overrides) + "\n")
                return 0
            _check_flags(arguments)
            _run_hydra(_guarded(task, failures), config_name, arguments)
    except KeyboardInterrupt as error:
        sys.stderr.write("\ninterrupted" + (f"; {error}" if str(error) else "") + "\n")
        return 130
    return 2 if failures else 0


def compose_values(config_name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Compose a shipped config without running anything (help text, tests, notebooks, one task inside another).

    Raises:
        UserError: what ``launch`` would say.
    """
    # Hydra refuses to compose while an application of its own runs; it is put aside and back.
    running, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        with initialize_config_dir(str(config_dir()), job_name=config_name, **VERSION_BASE):
            return plain(compose(config_name, overrides=list(overrides)))
    except UserError:
        raise
    except COMPOSE_ERRORS as error:
        raise UserError(_sentence(error)) from error
    finally:
        GlobalHydra.instance().hydra = running


def help_page(
    *,
    summary: str,
    usage: str,
    groups: Sequence[str],
    options: Sequence[Option],
    defaults: Mapping[str, Any],
    examples: Sequence[str],
) -> str:
    """Our own ``--help``: usage, config groups with their choices, every option explained, examples.

    ``defaults`` (dotted names, from the composed YAML) come before those of the dataclasses.
    """
    shown = [option._replace(default=defaults.get(option.path, option.default)) for option in options]
    sections = [
        summary,
        f"usage: {usage}",
        "groups (GROUP=NAME takes the file configs/GROUP/NAME.yaml):\n\n" + "\n".join(map(_group_help, groups)),
        "options (name=default, what it does, what it takes):\n\n" + format_help(shown),
        "flags:\n"
        "  -m, --multirun               run every combination of comma-separated values, each in its own folder\n"
        "  --cfg job                    print the composed configuration and stop\n"
        "  -cd, --config-dir DIR        find more config files in DIR",
        "examples:\n" + "\n".join(f"  {example}" for example in examples),
    ]
    return "\n\n".join(sections)


def config_groups(*names: str) -> list[str]:
    """The config groups in the defaults lists of these config files, in order."""
    texts = [(config_dir() / f"{name}.yaml").read_text(encoding="utf-8") for name in names]
    found = re.findall(r"^ *- +/?(\w+):", "\n".join(texts), re.MULTILINE)
    return [group for group in dict.fromkeys(found) if group != "hydra"]


def _group_help(group: str) -> str:
    """One line per choice of a group: its name and the first words of its file."""
    lines = []
    for name in choices(group):
        text = (config_dir() / group / f"{name}.yaml").read_text(encoding="utf-8")
        comment = re.search(r"^# (?!@package)(.+)", text, re.MULTILINE)
        lines.append(f"  {group + '=' + name:28}{comment[1] if comment else ''}".rstrip())
    return "\n".join(lines)


def choices(group: str) -> list[str]:
    """The names a config group offers, for help texts."""
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


def slug(text: str, *, limit: int = 80) -> str:
    """A file name made of ``text``: only letters, digits and ``._=,-``; cut at ``limit`` characters."""
    return re.sub(r"[^\w.=,-]+", "-", text).strip("-.")[:limit] or "run"


def run_folder(run_dir: str | None, job: Job, *, parts: Sequence[str]) -> Path:
    """Choose the folder of one run, so that no two runs share one.

    ``run_dir`` is taken as it is (an existing run there is resumed). Without it a new
    ``runs/<date_time>-<parts>`` is named. A job of a sweep gets its own folder inside: ``<number>-<overrides>``.
    """
    if job.number is not None:
        base = Path(run_dir) if run_dir else job.sweep_dir or Path("runs")
        return base / slug("-".join([str(job.number), *(o.lstrip("+~") for o in job.overrides if not FOLDER.match(o))]))
    if run_dir:
        return Path(run_dir)
    return new_folder(*parts)


def new_folder(*parts: str) -> Path:
    """A folder under ``runs/`` that does not exist yet, named by the time and ``parts``."""
    name = slug("-".join([datetime.now().strftime("%Y-%m-%d_%H-%M-%S"), *parts]))
    candidates = (Path("runs") / (name if i == 1 else f"{name}-{i}") for i in itertools.count(1))
    return next(folder for folder in candidates if not folder.exists())


@contextmanager
def _reporting(failures: list[str]) -> Iterator[None]:
    """Turn what the user can fix into one line on stderr, noted in ``failures``; let bugs through."""
    try:
        yield
    except UserError as error:
        sentence = str(error)
    except OSError as error:
        if error.errno not in USER_ERRNO:
            raise
        sentence = f"{error.filename or 'a file'} cannot be written: {error.strerror}"
    else:
        return
    failures.append(sentence)
    sys.stderr.write(f"error: {' '.join(sentence.split())}\n")


def _guarded(task: Callable[[dict[str, Any], Job], None], failures: list[str]) -> Callable[[Any], None]:
    """What Hydra calls per job: errors are reported here, before Hydra can add lines of its own."""

    def guarded(config: Any) -> None:
        job = _job()
        if job.number is not None:  # what provenance notes, and what Lightning starts for further devices
            sys.argv = [sys.argv[0], *job.overrides]
        with _reporting(failures):
            task(plain(config), job)

    return guarded


def _job() -> Job:
    state = HydraConfig.get()
    overrides = tuple(plain(state.overrides.task, resolve=False))  # text that may hold ${...}
    if state.mode != RunMode.MULTIRUN:
        return Job(overrides=overrides)
    return Job(number=int(state.job.num), overrides=overrides, sweep_dir=Path(state.sweep.dir))


def _run_hydra(task: Callable[[Any], None], config_name: str, arguments: list[str]) -> None:
    """Run Hydra's own main; overrides it refuses but the strict config can judge are reworded and tried again."""
    started = False

    def noted(config: Any) -> None:
        nonlocal started
        started = True
        task(config)

    entry = hydra.main(config_path=str(config_dir()), config_name=config_name, **VERSION_BASE)(noted)
    saved_argv, saved_mode = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise instead of printing and exiting
    try:
        with _sweep_folder(arguments) as extra:
            for _ in range(len(arguments) + 1):
                sys.argv = [saved_argv[0], *arguments, *extra]
                try:
                    return entry()
                except COMPOSE_ERRORS as error:
                    if started:
                        raise
                    arguments = _reworded(arguments, error)
    finally:
        sys.argv = saved_argv
        os.environ.pop("HYDRA_FULL_ERROR")
        if saved_mode is not None:
            os.environ["HYDRA_FULL_ERROR"] = saved_mode


@contextmanager
def _sweep_folder(arguments: list[str]) -> Iterator[list[str]]:
    """Name the folder of a sweep: ``run_dir`` where one is given. It goes again if no job wrote anything there."""
    if {"-m", "--multirun", "hydra.mode=MULTIRUN"}.isdisjoint(arguments):
        yield []
        return
    given = [a.partition("=")[2] for a in arguments if FOLDER.match(a) and "," not in a]
    folder = Path(given[-1].strip("'\"")) if given else new_folder("sweep")
    try:
        yield [f"hydra.sweep.dir='{folder}'"]
    finally:
        if folder.is_dir() and [path.name for path in folder.iterdir()] == ["multirun.yaml"]:
            (folder / "multirun.yaml").unlink()
            folder.rmdir()


def _reworded(arguments: list[str], error: Exception) -> list[str]:
    """Return arguments worth another try, or raise the one sentence that ``error`` comes to.

    An unknown key goes in again as ``+key=value``, so that the strict conversion names the nearest option. A value that
    Hydra's grammar cannot read, or several without ``-m``, go in as quoted text: right for sentences and for lists.
    """
    unknown = UNKNOWN_KEY.match(str(error))
    several = re.match(r"Ambiguous value for argument '(.*)'$", str(error), re.MULTILINE)
    unread = several[1] if several else getattr(error, "override", None)
    again = list(arguments)
    for i, argument in enumerate(arguments):
        key, equals, value = argument.partition("=")
        if unknown and key == unknown[1] and not key.startswith("hydra."):
            again[i] = f"+{argument}"
        elif equals and argument == unread and value[:1] not in "[{'\"":
            again[i] = f"{key}='{value.replace(chr(39), chr(92) + chr(39))}'"
    if again == arguments or not {"--cfg", "-c"}.isdisjoint(arguments):
        raise UserError(_sentence(error)) from error
    return again


def _sentence(error: Exception) -> str:
    """What a Hydra or OmegaConf error means for the user."""
    text = first_line(error)
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group} must be one of {', '.join(error.options)}, got {name!r}.{did_you_mean(name, error.options)}"
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if isinstance(error, yaml.MarkedYAMLError) and mark is not None:
        return f"{mark.name} must be YAML, got a fault in line {mark.line + 1} ({error.problem}); correct that line"
    override = getattr(error, "override", None)
    if override is not None and "=" not in override:
        return f"the command line takes name=value, got {override!r}; see --help"
    if override is not None:
        return f"override {override!r} cannot be read ({text}); quote values with special characters"
    if unknown := UNKNOWN_KEY.match(str(error)):
        return f"unknown option {unknown[1]!r}; see --help"
    if twice := re.match(r"Multiple values for ([\w/]+)\.", text):
        return f"{twice[1]} is given twice; write {twice[1]}=NAME once, without a plus"
    return f"the configuration cannot be composed: {text}"


def _check_flags(arguments: list[str]) -> None:
    for argument in arguments:
        flag = argument.partition("=")[0]
        if argument.startswith("-") and flag not in FLAGS:
            fix = f"write {argument.lstrip('-')}" if "=" in argument else "options are written name=value"
            raise UserError(f"unknown flag {flag!r}; {fix}, without dashes (see --help)")
