"""Ctrl-C around the work of a command: it ends the process with a line and exit code 130, and without a traceback.

Where `cuflash` is imported by its command, the import of this module, which is the first, replaces Python's handler of
the signal, until `main` in `__main__.py` takes over; when that ends, the handler is set again. why a handler: no code
of ours is around the imports of the package, and an import may swallow or print a KeyboardInterrupt. What comes before,
some 10 ms, is Python's start, whose message is Python's.
"""

# why not signal: it imports enum, and until the handler is set nothing is imported that is not there already.
import _signal  # type: ignore[import-not-found]
import os
import sys

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
    """Lets Ctrl-C raise KeyboardInterrupt, as it does in any program of Python."""
    _replace(_stop, _signal.default_int_handler)


def ends_process() -> None:
    """Lets Ctrl-C end the process of a command; other processes are left alone."""
    if _IS_COMMAND:
        _replace(_signal.default_int_handler, _stop)


def _replace(old: object, new: object) -> None:
    # why only the old one: a shell lets programs in the background ignore Ctrl-C.
    if _signal.getsignal(_signal.SIGINT) is old:
        _signal.signal(_signal.SIGINT, new)


def _stop(*_: object) -> None:
    try:
        os.write(2, f"{STOPPED}\n".encode())  # why not sys.stderr: the signal may have come while it was written to
    finally:
        os._exit(INTERRUPTED)


_IS_COMMAND = is_command(sys.orig_argv, sys.argv)  # why here: later, `sys.argv` names the file of the command
ends_process()
