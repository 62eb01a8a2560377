"""Install engines and say which are: ``python -m engines setup vllm``, ``python -m engines list``."""

import argparse
import sys
from collections.abc import Sequence

from distill.errors import UserError
from engines import ENGINES, engine


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0, 2 for what the user can fix, 130 after Ctrl-C)."""
    parser = argparse.ArgumentParser(prog="python -m engines", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="what is installed, and which drafters each engine takes")
    setup = commands.add_parser("setup", help="install engines, each in an environment of its own")
    setup.add_argument("names", nargs="+", metavar="NAME", help=f"{', '.join(ENGINES)} or all")
    options = parser.parse_args(argv)
    try:
        if options.command == "list":
            show()
        else:
            install(list(ENGINES) if options.names == ["all"] else options.names)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; the same command starts over\n")
        return 130
    return 0


def show() -> None:
    """One line per engine."""
    for name in ENGINES:
        one = engine(name)
        environment, methods = one.environment, ", ".join(one.formats)
        sys.stdout.write(f"{name:10} {environment.state():9} {environment.folder}  takes {methods}\n")


def install(names: Sequence[str]) -> None:
    """Set engines up; those that are there take no time.

    Raises:
        UserError: an unknown name (before anything is done), or one that cannot be installed.
    """

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")

    for one in [engine(name) for name in names]:
        done = one.environment.setup(say)
        say(f"{one.name}: {'installed' if done else 'already'} in {one.environment.folder}")


if __name__ == "__main__":
    raise SystemExit(main())
