"""Constants and functions that the tiles of both families share."""

from __future__ import annotations

from typing import Any

FLOAT_BYTES = 4
ROW_PADDING = 8  # floats between rows in shared memory. why: bank conflicts


def macros(tile: Any, fields: str, flags: str = "") -> dict[str, int]:
    """The macros of a tile, which the `config.cuh` of its family reads: these fields, and flags that are true."""
    names = [*fields.split(), *(flag for flag in flags.split() if getattr(tile, flag))]
    return {name.upper(): int(getattr(tile, name)) for name in names}


def rounded_up(length: int, step: int) -> int:
    """The least multiple of `step` that is not below a length."""
    return -(-length // step) * step
