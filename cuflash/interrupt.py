"""Ctrl-C before a command runs: while its imports do, it ends the process with a line, and without a traceback.

Where `cuflash` is imported by its command, the import of this module, which is the first, replaces Python's handler of
the signal, until `main` in `__main__.py` takes over. why a handler: no code of ours is around the imports of the
package, and an import may swallow or print a KeyboardInterrupt.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

INTERRUPTED = 130  # as a shell counts a program that Ctrl-C has ended
STOPPED = "cuflash: stopped"


def is_command(command_line: list[str], arguments: list[str]) -> bool:
    """Returns True for `python -m cuflash` and for the script `cuflash`.

    command_line: all words, as in `sys.orig_argv`. arguments: those of the program, with its name or "-m" first, as in
    `sys.argv` while packages are imported.
    """
    if not 0 < len(arguments) < len(command_line):
        return False
    program = command_line[-len(arguments)]
    if arguments[0] == "-m":
        return program.removeprefix("-m") in ("cuflash", "cuflash.__main__")
    return program == arguments[0] and os.path.basename(program) in ("cuflash", "cuflash.exe")


def raises_error() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt again, as it does in any program of Python."""
    import signal

    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(*_: object) -> None:
    # why not sys.stderr: the signal may have come while it was being written to.
    with suppress(OSError):
        os.write(2, f"{STOPPED}\n".encode())
    os._exit(INTERRUPTED)


if is_command(sys.orig_argv, sys.argv):
    import signal  # why here: other processes need none of it

    # why asked: a shell lets programs in the background ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
