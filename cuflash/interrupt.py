"""Ctrl-C before and after the work of a command: ends the process with one line, exit code 130 and no traceback.

Importing this module, the first of the package, replaces Python's SIGINT handler if `cuflash` runs as a command. `main`
in `__main__.py` restores Python's handler while it works, and sets this one again at its end. A handler is needed
because no `try` surrounds the imports of the package, and because an import may swallow or print a KeyboardInterrupt.
Python's start before that, about 10 ms, prints Python's message.
"""

# Not signal, which imports enum: until the handler is set, only modules that are already loaded are imported.
import _signal  # type: ignore[import-not-found]
import os
import sys

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
    """Sets Python's handler in the process of a command, so that Ctrl-C raises KeyboardInterrupt."""
    _replace(_stop, _signal.default_int_handler)


def ends_process() -> None:
    """Sets the handler by which Ctrl-C ends the process of a command; changes nothing in other processes."""
    if _IS_COMMAND:
        _replace(_signal.default_int_handler, _stop)


def _replace(old: object, new: object) -> None:
    # Only the old handler is replaced: shells start background programs with SIGINT ignored, and that is kept.
    if _signal.getsignal(_signal.SIGINT) is old:
        _signal.signal(_signal.SIGINT, new)


def _stop(*_: object) -> None:
    try:
        os.write(2, f"{STOPPED}\n".encode())  # the signal may have interrupted a write to sys.stderr
    finally:
        os._exit(INTERRUPTED)


_IS_COMMAND = is_command(sys.orig_argv, sys.argv)  # at import: later, `sys.argv` has the path of the command's file
ends_process()
