"""The console of commands."""

from __future__ import annotations

from typing import NoReturn

from rich import console


class Console(console.Console):
    """Rich's console, but raising BrokenPipeError for a pipe that its reader has closed, as `print` does.

    Rich would end the process with exit code 1, which stands for a wrong output of a benchmark.
    """

    def on_broken_pipe(self) -> NoReturn:
        """Raises the error that rich handles."""
        raise
