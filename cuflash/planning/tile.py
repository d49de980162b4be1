"""Constants and functions for the tiles of both families, sm80 and sm90."""

from __future__ import annotations

from typing import Any

FLOAT_BYTES = 4
ROW_PADDING = 8  # floats between rows in shared memory, against bank conflicts


def macros(tile: Any, fields: str, flags: str = "") -> dict[str, int]:
    """Returns the macros of a tile for its family's `config.cuh`: the named fields, and the flags that are true."""
    names = [*fields.split(), *(flag for flag in flags.split() if getattr(tile, flag))]
    return {name.upper(): int(getattr(tile, name)) for name in names}


def rounded_up(length: int, step: int) -> int:
    """Returns the least multiple of `step` that is at least `length`."""
    return -(-length // step) * step
