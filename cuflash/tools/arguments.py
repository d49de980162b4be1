"""Parsers of command-line options, which check values before a command starts."""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path

_REFUSALS = OSError, ValueError  # raised by file systems, and by Python for a name with a zero byte


def names(choices: Iterable[str], text: str) -> tuple[str, ...]:
    """Parses names from `choices`, such as "flash2,flashd"."""
    parts = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in parts if name not in choices]:
        raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))}: give some of {', '.join(choices)}")
    return parts


def integers(text: str) -> tuple[int, ...]:
    """Parses numbers such as "64,128" or "1k,16k", where k is 1024."""
    try:
        numbers = tuple(int(part.removesuffix("k")) * (1024 if part.endswith("k") else 1) for part in text.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers above 0 such as 64,128 or 1k,16k")
    return tuple(dict.fromkeys(numbers))


def numbers(count: int, text: str) -> tuple[float, ...]:
    """Parses so many numbers above 0, such as "300,50"."""
    try:
        values = tuple(map(float, text.split(",")))
    except ValueError:
        values = ()
    if len(values) != count or not all(0 < value < math.inf for value in values):
        several = "a number above 0" if count == 1 else f"{count} numbers above 0, with commas between them"
        raise argparse.ArgumentTypeError(f"{text!r}: give {several}")
    return values


def count(text: str, least: int = 1) -> int:
    """Parses a whole number of at least `least`."""
    if not text.isdecimal() or int(text) < least:
        accepted = "above 0" if least == 1 else f"from {least} on"
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number {accepted}")
    return int(text)


def existing(text: str) -> Path:
    """Parses the path of an existing file."""
    path, reason = Path(text), ""
    try:
        if path.is_file():
            return path
    except _REFUSALS as error:
        reason = f" ({_reason(error)})"
    raise argparse.ArgumentTypeError(f"{text!r}: there is no such file{reason}; give the name of one that is there")


def folder(text: str) -> Path:
    """Parses the path of a writable folder, and creates a missing one."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except _REFUSALS as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written to: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def output(text: str) -> Path:
    """Parses the path of a file that can be written."""
    path = Path(text)
    try:
        target = path.resolve()
        if target.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is a folder: give the name of a file")
        if not target.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no folder {target.parent}")
        # Opened, as a file system may refuse in spite of the file's mode. Pipes and devices are left alone.
        if target.is_file():
            target.open("ab").close()
        elif not target.exists():
            with contextlib.suppress(FileExistsError):  # several processes of torchrun parse one name
                target.open("xb").close()
                target.unlink(missing_ok=True)
    except _REFUSALS as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {_reason(error)}") from error
    return path
