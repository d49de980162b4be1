"""`python -m cuflash`, or `cuflash`, and one of its commands: `info`, `warmup`, `bench`, `accuracy` or `selftest`."""

from __future__ import annotations

import argparse
import contextlib
import errno
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

UNREAD = 141  # 128 + SIGPIPE: the exit code that shells report if the reader of a pipe has ended
_FULL = errno.ENOSPC, errno.EDQUOT
GUIDE = """\
cuflash {version}: FlashAttention for every array library.

    import cuflash
    out = cuflash.forward(q, k, v, causal=True)     # CuPy, PyTorch, JAX or NumPy arrays

{commands}

python -m cuflash COMMAND --help lists the options of a command."""


class Command(NamedTuple):
    """A module with `add_options` and `main`, and its one-line description."""

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
    """Runs a command, or prints the list of commands; returns the exit code.

    0: success. 1: a wrong output, an error above its limit, a kernel that did not compile, a full disk, or a command
    that this machine cannot run. 2: bad usage. 130: ended by Ctrl-C. 141: the reader of the output ended first, as
    `head` does.
    """
    try:
        try:
            return _until_interrupted(sys.argv[1:] if arguments is None else arguments)
        finally:
            print(end="", flush=True)  # raises OSError here: argparse ignores it, and Python reports it at exit
    except BrokenPipeError:
        _drop_unwritten_output()
        return UNREAD
    except OSError as error:
        if error.errno not in _FULL:
            raise
        with contextlib.suppress(OSError):  # stderr may be on the full disk, too
            print(f"cuflash: cannot write {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
        _drop_unwritten_output()
        return 1


def _until_interrupted(arguments: list[str]) -> int:
    try:
        try:
            raises_error()
            return _run(arguments)
        finally:
            ends_process()  # covers Python's exit, which runs the exit functions of packages and waits for threads
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return INTERRUPTED


def _drop_unwritten_output() -> None:
    """Replaces streams that cannot be written by os.devnull, as Python reports failed writes at exit."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
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
