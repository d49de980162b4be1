"""Masks of integers and floats beyond int32 and float32, in tests: what they show, from Python's exact numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

ROWS = 8
PLACES = np.arange(ROWS)
TIMES = 1.7e9 + 10.0 * PLACES + 0.1  # in seconds, of which float32 holds every 128th
DAYS = 1_700_000_000 + 43_200 * PLACES.astype(np.int32)
NANOSECONDS = 1_700_000_000_000_000_000 + 3 * PLACES
HASHES = 2**63 - 4 + PLACES.astype(np.uint64)
BITS = (2 ** (56 + PLACES.astype(np.uint64)) + np.uint64(5)).astype(np.uint64)
ENDS = np.array([2**31 - 1, -(2**31), 0, 3, 2**31 - 1, 5, -(2**31), 7], np.int32)
COUNTS = np.array([2**32 - 1, 0, 3, 4, 5, 2**32 - 6, 7, 2**31], np.uint32)
BYTES = np.array([255, 0, 1, 200, 7, 90, 255, 3], np.uint8)
HALVES = PLACES.astype(np.float16) / 2
FLAGS = PLACES % 3 == 0
SHIFTS = (5 * PLACES).astype(np.uint8)

# By name, functions of b, h, q_idx and k_idx.
MASKS: dict[str, Callable[..., Any]] = {
    "product of indices": lambda b, h, i, j: (i + 50_000) * 50_000 + j > 0,
    "flat index": lambda b, h, i, j: (i * 2**29 + j) % 7 < 3,
    "quotient of a negative number": lambda b, h, i, j: (-i * 2**30 - j) // 7 % 2 == 0,
    "shift": lambda b, h, i, j: ((i - 4) << 33) >> 32 < j - 3,
    "bits of a flat index": lambda b, h, i, j: ((i * 2**30 + j) ^ 2**32) & (2**32 + 1) != 1,
    "constant beyond int32": lambda b, h, i, j: i + 2**40 > j + 2**40,
    "power": lambda b, h, i, j: (i + 50_000) ** 2 > 2_500_000_000 + j * 2**17,
    "least integer": lambda b, h, i, j: abs(ENDS[i]) > -ENDS[j],
    "quotient of the least integer": lambda b, h, i, j: ENDS[i] // (2 * j - 3) > 0,
    "sum of captured integers": lambda b, h, i, j: ENDS[i] + i > ENDS[j],
    "product of captured integers": lambda b, h, i, j: ENDS[i] * ENDS[j] > 0,
    "unsigned difference": lambda b, h, i, j: COUNTS[i] - COUNTS[j] < 2,
    "bytes": lambda b, h, i, j: BYTES[i] * 300 * 40_000 - BYTES[j] > j,
    "nanoseconds": lambda b, h, i, j: NANOSECONDS[i] - NANOSECONDS[j] >= 5,
    "unsigned": lambda b, h, i, j: HASHES[j] <= HASHES[i],
    "unsigned and signed": lambda b, h, i, j: (HASHES[j] > i - 5) & (HASHES[i] != j - 3),
    "unsigned constant": lambda b, h, i, j: HASHES[j] < 2**63 + 1,
    "unsigned quotient": lambda b, h, i, j: (HASHES[i] // 3 > HASHES[j] // 3) | (HASHES[i] % 5 == j),
    "unsigned index": lambda b, h, i, j: BYTES[HASHES[i]] < 2 * j,
    "bits of unsigned": lambda b, h, i, j: (BITS[i] >> j * 9) & 1 != 0,
    "times": lambda b, h, i, j: TIMES[i] - TIMES[j] >= 5,
    "times and a constant": lambda b, h, i, j: TIMES[j] < 1_700_000_030.2,
    "times and a choice": lambda b, h, i, j: TIMES[j] < np.where(h == 0, 1_700_000_030.2, 0.0) + 0.1 * (i > 3),
    "times by the minute": lambda b, h, i, j: (TIMES[i] // 60 == TIMES[j] // 60) & (TIMES[i] % 60 > 2.5),
    "whole times": lambda b, h, i, j: math.floor(TIMES[i]) - math.ceil(TIMES[j]) == -1,
    "minimum of times": lambda b, h, i, j: min(TIMES[i], TIMES[j]) + 1 > max(TIMES[j], 1.7e9),
    "integer days": lambda b, h, i, j: np.floor(DAYS[i] / 86_400) == np.floor(DAYS[j] / 86_400),
    "index of times": lambda b, h, i, j: BYTES[int(TIMES[i] - 1.7e9) // 20] > j,
    "shift by bytes": lambda b, h, i, j: 1 << SHIFTS[j] > 3 * i << 24,
    "halves and flags": lambda b, h, i, j: (HALVES[i] + FLAGS[j] > j / 3) & ~FLAGS[i],
}


class _Exact:
    """An array whose elements are Python's numbers. An index outside of it reads its nearest element."""

    def __init__(self, array: Any) -> None:
        self.elements = array.tolist()

    def __getitem__(self, index: Any) -> Any:
        return self.elements[min(int(index), len(self.elements) - 1)]


def with_arrays(function: Callable[..., Any], put: Callable[[Any], Any]) -> Callable[..., Any]:
    """The same function, which refers to what `put` makes of each array."""
    names = {name: put(value) if isinstance(value, np.ndarray) else value for name, value in globals().items()}
    return type(function)(function.__code__, names)  # type: ignore[call-arg]


def exact(function: Callable[..., Any]) -> Any:
    """What a mask shows, (ROWS, ROWS), from Python's numbers."""
    plain = with_arrays(function, _Exact)
    return np.array([[bool(plain(0, 0, i, j)) for j in range(ROWS)] for i in range(ROWS)])
