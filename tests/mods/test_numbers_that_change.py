"""The warning for numbers that change: once for a function, and only where nothing but numbers is different."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from cuflash import mods
from cuflash.mods.tracing.numbers_that_change import MAX_FORMS, MOST
from cuflash.mods.tracing.trace import trace


def traced(make: Callable[[int], Any], numbers: Any, kind: str = "score_mod") -> list[str]:
    """What is warned of while functions of these numbers are traced."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number in numbers:
            trace(make(number), kind)
    return [str(each.message) for each in found if each.category is RuntimeWarning]


def scaled(factor: Any) -> Any:
    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * factor

    return score_mod


def test_it_comes_once_with_the_line_of_the_function_and_the_way_out() -> None:
    assert traced(lambda n: scaled(n + 0.5), range(MOST - 1)) == []
    (told,) = traced(lambda n: scaled(n + 0.5), range(3 * MOST))
    where = rf"score_mod scaled\.<locals>\.score_mod \({re.escape(__file__)}:\d+\) was traced with {MOST} different"
    assert re.match(where, told)
    assert "as an array without axes" in told
    assert traced(lambda n: scaled(n - 99.5), range(MOST)) == []
    values = np.linspace(0, 1, 2 * MOST, dtype=np.float32)
    assert len({trace(scaled(value), "score_mod").digest for value in (np.array(x) for x in values)}) == 1


def test_a_number_that_comes_back_counts_once() -> None:
    def capped(cap: float) -> Any:
        return lambda score, b, h, q, k: cap * np.tanh(score / cap)

    assert traced(lambda n: capped(n % (MOST - 1) + 2.0), range(9 * MOST)) == []


def test_other_functions_and_arrays_are_other_forms() -> None:
    parts = [lambda s, n=n: sum([s] * n, s) * 0.5 for n in range(1, 2 * MOST)]

    def of_parts(n: int) -> Any:
        return lambda score, b, h, q, k: parts[n](score) + n

    assert traced(of_parts, range(len(parts))) == []

    def of_ranks(n: int) -> Any:
        table = np.ones((2,) * (n % 7), np.float32 if n < 7 else np.float64)
        return lambda score, b, h, q, k: score * table[(h,) * (n % 7)]

    assert traced(of_ranks, range(14)) == []


def test_many_forms_are_not_kept_for_ever() -> None:
    def of_forms(n: int) -> Any:
        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            for _ in range(n // 2 % (MAX_FORMS + 8)):
                score = score * score
            return score + n

        return score_mod

    assert len(traced(of_forms, range(4 * MAX_FORMS))) == 0


def test_windows_are_no_part_of_a_kernel_and_chunks_are() -> None:
    assert traced(mods.sliding_window, range(3 * MOST), "mask_mod") == []
    assert len(traced(mods.chunked, range(2, 3 * MOST), "mask_mod")) == 1
