"""What the tiles of both families share."""

from __future__ import annotations

from typing import Any


def macros(tile: Any, fields: str) -> dict[str, int]:
    """The macros of a tile, which the `config.cuh` of its family reads: these fields, named in capitals."""
    return {field.upper(): int(getattr(tile, field)) for field in fields.split()}


def rounded_up(length: int, step: int) -> int:
    """The least multiple of `step` that is not below a length."""
    return -(-length // step) * step
