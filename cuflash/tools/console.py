"""The console of commands."""

from __future__ import annotations

from typing import NoReturn

from rich import console


class Console(console.Console):
    """Rich's console, but a pipe that its reader has closed raises BrokenPipeError, as for `print`.

    why: rich ends the process with exit code 1, which a benchmark has for a wrong output.
    """

    def on_broken_pipe(self) -> NoReturn:
        """Raises the error that rich handles."""
        raise
