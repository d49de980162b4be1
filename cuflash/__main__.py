"""`python -m cuflash` and one of its commands: `info`, `warmup`, `bench`, `accuracy` or `selftest`."""

from __future__ import annotations

import argparse
import sys

from . import __version__, info, warmup
from .bench import accuracy
from .bench import run as bench
from .errors import ProblemError, UnsupportedError
from .selftest import run as selftest


def main(arguments: list[str] | None = None) -> int:
    """Runs a subcommand; the exit code is 0 if all is well, 2 for bad usage.

    It is 1 if the benchmark or the self-test found a wrong output, an error is too large, a kernel did not compile, or
    this machine cannot run the command.
    """
    parser = argparse.ArgumentParser(prog="cuflash", description="FlashAttention for every array library.")
    parser.add_argument("--version", action="version", version=f"cuflash {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("info", help="versions, GPUs and the kernel cache", description=info.__doc__)
    warmup.add_options(
        commands.add_parser("warmup", help="compile kernels before they are called", description=warmup.__doc__)
    )
    bench.add_options(commands.add_parser("bench", help="time cuflash and its peers", description=bench.__doc__))
    accuracy.add_options(
        commands.add_parser("accuracy", help="errors of cuflash and its peers", description=accuracy.__doc__)
    )
    selftest.add_options(
        commands.add_parser("selftest", help="check random calls on this machine", description=selftest.__doc__)
    )
    options = parser.parse_args(arguments)
    if options.command == "info":
        print(info.text())
        return 0
    try:
        run = {"warmup": warmup.main, "bench": bench.main, "accuracy": accuracy.main, "selftest": selftest.main}
        return run[options.command](options)
    except ProblemError as error:
        parser.error(str(error))
    except UnsupportedError as error:
        print(f"cuflash: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
