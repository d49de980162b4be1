"""Masks by integers and floats beyond int32 and float32, and their exact values from Python's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

ROWS = 8
PLACES = np.arange(ROWS)
# All pairs of rows and columns.
GRID: dict[str, Any] = {
    **dict.fromkeys(("b", "h"), np.zeros(ROWS * ROWS, int)),
    **dict.fromkeys(("seqlen_q", "seqlen_k"), np.full(ROWS * ROWS, ROWS)),
    "q_idx": np.repeat(PLACES, ROWS),
    "k_idx": np.tile(PLACES, ROWS),
    "score": np.zeros(ROWS * ROWS, np.float32),
}
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
SECONDS = (10.1 * PLACES).astype(np.float32)
MINUTES = SECONDS + np.float32(60)
SHIFTS = (5 * PLACES).astype(np.uint8)
TICKS = 1_700_000_000_000_000_000 + 10_000_000_000 * PLACES
NOW = np.float64(1_700_000_030.2)
BEGIN = np.float64(1_700_000_000.1)
LIMIT = np.float64(SECONDS[3]) + np.float64(1e-9)
MINUTE = np.float64(60.0)

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
    "remainder of the least integer": lambda b, h, i, j: ENDS[i] % -(j + 1) == 0,
    "quotient by minus one": lambda b, h, i, j: ENDS[i] // -(2 * j + 1) > 2**30,
    "powers of ten": lambda b, h, i, j: (10.0**i == 1000.0) | (10.0**j >= 10.0 ** (i + 1) * 0.1),
    "powers of an index": lambda b, h, i, j: (j + 0.5) ** (i - 2.0) <= 7.5,
    "rounded to 16 bits": lambda b, h, i, j: float(np.float16(MINUTES[i] * 0.1)) >= float(np.float16(MINUTES[j] * 0.1)),
    "logarithms of ten": lambda b, h, i, j: np.log10(10.0**i) == j,
    "logarithms up to a bound": lambda b, h, i, j: np.log10(10.0**j) <= i * 1.0,
    "sign of a zero quotient": lambda b, h, i, j: np.divide(1.0, np.floor_divide(-1.0 * i, 3.5 - j)) > 0,
    "sign of a negative zero": lambda b, h, i, j: np.divide(1.0, np.sign(-1.0 * (i - j))) > 0,
    "16 bits beside a number": lambda b, h, i, j: (np.float16(i * 0.1) == 0.3) | (np.float16(j * 0.1) >= 0.7),
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
    "times from an index": lambda b, h, i, j: 1.7e9 + 10.0 * j + 0.1 >= TIMES[i],
    "times from a quotient": lambda b, h, i, j: 1.7e9 + j / 3 < TIMES[i] - 0.3,
    "float32 and NumPy's number": lambda b, h, i, j: (SECONDS[j] < LIMIT) | (SECONDS[i] + NOW > TIMES[j] + 30),
    "float32 and NumPy's short number": lambda b, h, i, j: SECONDS[i] + MINUTE <= MINUTES[j],
    "float32 and a sum with NumPy's number": lambda b, h, i, j: SECONDS[i] - SECONDS[j] > NOW - TIMES[j],
    "index and NumPy's number": lambda b, h, i, j: j * MINUTE + NOW > TIMES[i] + 40,
    "index and a number": lambda b, h, i, j: j + 1e-9 > i,
    "product of an index and a number": lambda b, h, i, j: i * 0.1 * 3 > j * 0.3,
    "quotient and a number": lambda b, h, i, j: (i / 3 > 0.33333333) & (float(j) / 3 != 0.33333333),
    "rounded product": lambda b, h, i, j: math.floor(i * 0.3 + 0.1) == int(j * 0.1 * 3 + 1e-9),
    "index of a product": lambda b, h, i, j: BYTES[int(i * 0.7 + 0.3)] > j * 0.99999999,
    "index below a number": lambda b, h, i, j: (j > 2.9999999999) & (i - 5 <= -1.0000000001) | (i == 6.0000000001),
    "large index below a number": lambda b, h, i, j: (i + 2**29 < 2.0**29 + j) & (i + 2**29 != 2.0**29 + 3),
    "nanoseconds and numbers": lambda b, h, i, j: (NANOSECONDS[j] > 1.7e18) & (NANOSECONDS[i] <= 1.7e18 + 256),
    "unsigned and numbers": lambda b, h, i, j: (HASHES[j] >= 2.0**63) & (HASHES[i] != 2.0**63) & (HASHES[i] < 1e30),
    "beyond all integers": lambda b, h, i, j: (NANOSECONDS[j] > -1e30) & (i != 2.0**64) & ~(HASHES[j] >= 2.0**64),
    "integers and numbers": lambda b, h, i, j: DAYS[i] * 0.25 - 0.125 > DAYS[j] * 0.25,
    "shift by bytes": lambda b, h, i, j: 1 << SHIFTS[j] > 3 * i << 24,
    "halves and flags": lambda b, h, i, j: (HALVES[i] + FLAGS[j] > j / 3) & ~FLAGS[i],
}

# Functions of the score, b, h, q_idx and k_idx, which all add 0.1 for each key behind the query.
DIFFERENCES: dict[str, Callable[..., Any]] = {
    "difference": lambda score, b, h, i, j: score + 0.01 * (TIMES[j] - TIMES[i]),
    "negative": lambda score, b, h, i, j: score + 0.01 * (-TIMES[i] + TIMES[j]),
    "sum with a negative": lambda score, b, h, i, j: score + 0.01 * (TIMES[j] + (-TIMES[i])),
    "from an offset": lambda score, b, h, i, j: score + 0.01 * ((TIMES[j] - 5.0) - TIMES[i] + 5),
    "from the score": lambda score, b, h, i, j: score + 0.01 * TIMES[j] - TIMES[i] / 100,
    "to the score": lambda score, b, h, i, j: 0.01 * TIMES[j] - (TIMES[i] * 0.01 - score),
    "of large offsets": lambda score, b, h, i, j: score + 0.01 * (TIMES[j] - 1.7e9) - 0.01 * (TIMES[i] - 1.7e9),
    "from a number": lambda score, b, h, i, j: score + 0.01 * TIMES[j] - 17_000_000.001 - 0.1 * i,
    "from an index": lambda score, b, h, i, j: score + 0.01 * (TIMES[j] - (1.7e9 + 10.0 * i + 0.1)),
    "from a number of NumPy": lambda score, b, h, i, j: score + 0.01 * TIMES[j] - 0.01 * BEGIN - 0.1 * i,
    "from a chosen number": lambda score, b, h, i, j: (
        score + 0.01 * TIMES[j] - np.where(h < 9, 0.01 * BEGIN, 0.0) - 0.1 * i
    ),
    "from a product": lambda score, b, h, i, j: score + 0.01 * TIMES[j] - (i * 0 + 1) * 0.01 * BEGIN - 0.1 * i,
    "of integers": lambda score, b, h, i, j: score + 1e-11 * (TICKS[j] - TICKS[i]),
    "of cast integers": lambda score, b, h, i, j: score + 1e-11 * (float(TICKS[j]) - TICKS[i].astype("float64")),
    "of quotients": lambda score, b, h, i, j: score + 0.01 * (TICKS[j] / 1e9 - TICKS[i] / 1e9),
    "of days": lambda score, b, h, i, j: score + (DAYS[j] / 86_400 - DAYS[i] / 86_400) / 5,
}


class _Exact:
    """An array of Python's numbers. An index past its end reads the last element."""

    def __init__(self, array: Any) -> None:
        self.elements = array.tolist()

    def __getitem__(self, index: Any) -> Any:
        return self.elements[min(int(index), len(self.elements) - 1)]


def with_arrays(function: Callable[..., Any], put: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns the function with `put(array)` in place of each array that it refers to."""
    names = {name: put(value) if isinstance(value, np.ndarray) else value for name, value in globals().items()}
    return type(function)(function.__code__, names)  # type: ignore[call-arg]


def exact(function: Callable[..., Any]) -> Any:
    """Returns the values of a mask, (ROWS, ROWS), from Python's numbers."""
    plain = with_arrays(function, _Exact)
    with np.errstate(all="ignore"):
        return np.array([[bool(plain(0, 0, i, j)) for j in range(ROWS)] for i in range(ROWS)])
