"""Ctrl-C during the imports of a command: ends the process with one line and without a traceback.

Importing this module, the first of the package, replaces Python's SIGINT handler if `cuflash` runs as a command; `main`
in `__main__.py` restores it. A handler is needed because no `try` surrounds the imports of the package, and because an
import may swallow or print a KeyboardInterrupt.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

INTERRUPTED = 130  # 128 + SIGINT: the exit code that shells report after Ctrl-C
STOPPED = "cuflash: stopped"


def is_command(command_line: list[str], arguments: list[str]) -> bool:
    """Returns True for `python -m cuflash` and for the script `cuflash`.

    command_line: all words, as in `sys.orig_argv`. arguments: the program's name or "-m", then its arguments, as in
    `sys.argv` while packages are imported.
    """
    if not 0 < len(arguments) < len(command_line):
        return False
    program = command_line[-len(arguments)]
    if arguments[0] == "-m":
        return program.removeprefix("-m") in ("cuflash", "cuflash.__main__")
    return program == arguments[0] and os.path.basename(program) in ("cuflash", "cuflash.exe")


def raises_error() -> None:
    """Restores Python's handler, so that Ctrl-C raises KeyboardInterrupt."""
    import signal

    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(*_: object) -> None:
    # os.write, because the signal may have interrupted a write to sys.stderr.
    with suppress(OSError):
        os.write(2, f"{STOPPED}\n".encode())
    os._exit(INTERRUPTED)


if is_command(sys.orig_argv, sys.argv):
    import signal  # imported for commands only

    # Checked because shells start background programs with SIGINT ignored, and that is kept.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
