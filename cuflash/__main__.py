"""`python -m cuflash`, or `cuflash`, and one of its commands: `info`, `warmup`, `bench`, `accuracy` or `selftest`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from types import ModuleType
from typing import NamedTuple

from . import __version__
from .errors import ProblemError, UnsupportedError
from .interrupt import INTERRUPTED, STOPPED, ends_process, raises_error
from .tools import info, warmup
from .tools import selftest as selftest
from .tools.bench import accuracy
from .tools.bench import run as bench

UNREAD = 141  # as a shell counts a program that SIGPIPE has ended
GUIDE = """\
cuflash {version}: FlashAttention for every array library.

    import cuflash
    out = cuflash.forward(q, k, v, causal=True)     # CuPy, PyTorch, JAX or NumPy arrays

{commands}

python -m cuflash COMMAND --help tells the options of a command."""


class Command(NamedTuple):
    """A module with `add_options` and `main`, and what it does in a few words."""

    module: ModuleType
    help: str


COMMANDS = {
    "info": Command(info, "versions, GPUs and the kernel cache"),
    "warmup": Command(warmup, "compile kernels before they are called"),
    "bench": Command(bench, "time cuflash and its peers"),
    "accuracy": Command(accuracy, "errors of cuflash and its peers"),
    "selftest": Command(selftest, "check random calls on this machine"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command, or prints which there are; the exit code is 0 if all is well, 2 for bad usage.

    It is 1 if the benchmark or the self-test found a wrong output, an error is too large, a kernel did not compile, or
    this machine cannot run the command; 130 if Ctrl-C ended it; 141 if the reader of its output ended first, as `head`
    does.
    """
    try:
        try:
            return _until_interrupted(sys.argv[1:] if arguments is None else arguments)
        finally:
            print(end="", flush=True)  # why here: argparse passes over this error, and Python reports it at its end
    except BrokenPipeError:
        _drop_unread_output()
        return UNREAD


def _until_interrupted(arguments: list[str]) -> int:
    try:
        try:
            raises_error()
            return _run(arguments)
        finally:
            ends_process()  # why: Python's own end runs what packages have registered for it, and waits for threads
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return INTERRUPTED


def _drop_unread_output() -> None:
    """Replaces pipes that their readers have closed, as Python reports at its end what it cannot write."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="cuflash", description="FlashAttention for every array library.")
    parser.add_argument("--version", action="version", version=f"cuflash {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parsers = {}
    for name, command in COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=command.help, description=command.module.__doc__)
        command.module.add_options(parsers[name])
    options = parser.parse_args(arguments)
    options.typed = shlex.join(["cuflash", *arguments])
    if options.command is None:
        lines = (f"python -m cuflash {name:<10}{command.help}" for name, command in COMMANDS.items())
        print(GUIDE.format(version=__version__, commands="\n".join(lines)))
        return 0
    try:
        code: int = COMMANDS[options.command].module.main(options)
    except ProblemError as error:
        parsers[options.command].error(str(error))
    except UnsupportedError as error:
        print(f"cuflash: {error}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
