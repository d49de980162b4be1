"""The mask: its predicate against the contract, its tile ranges against the predicate, by brute force, and those of the
kernels, read from their header, against them.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import jit
from cuflash.errors import ProblemError
from cuflash.mask import Mask

SETTINGS = settings(deadline=None, derandomize=True, max_examples=300)

side = st.one_of(st.none(), st.integers(-1, 12))
arguments = st.fixed_dictionaries(
    {
        "causal": st.booleans(),
        "window_size": st.tuples(side, side),
        "diagonal_offset": st.one_of(st.none(), st.integers(-14, 14), st.sampled_from([-(10**12), 10**12])),
    }
)
length = st.integers(0, 9)


def visible_by_contract(
    seqlen_q: int, seqlen_k: int, causal: bool, window_size: tuple[int | None, int | None], diagonal_offset: int | None
) -> np.ndarray[Any, Any]:
    """semantics: key j is visible to query i iff i + off - left <= j <= i + off + right; causal is right = 0."""
    left, right = (None if side in (None, -1) else side for side in window_size)
    right = 0 if causal else right
    offset = seqlen_k - seqlen_q if diagonal_offset is None else diagonal_offset
    sees = np.zeros((seqlen_q, seqlen_k), dtype=bool)
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            after = left is None or i + offset - left <= j
            before = right is None or j <= i + offset + right
            sees[i, j] = after and before
    return sees


def predicate(mask: Mask) -> np.ndarray[Any, Any]:
    sees: np.ndarray[Any, Any] = mask.visible(np.arange(mask.seqlen_q), np.arange(mask.seqlen_k))
    return sees


def hull(flags: np.ndarray[Any, Any]) -> tuple[int, int]:
    """The half-open range from the first to the last True; (0, 0) if there is none."""
    where = np.flatnonzero(flags)
    return (int(where[0]), int(where[-1]) + 1) if len(where) else (0, 0)


@SETTINGS
@given(length, length, arguments)
def test_predicate_is_the_contract(seqlen_q: int, seqlen_k: int, given_arguments: dict[str, Any]) -> None:
    mask = Mask.of(seqlen_q, seqlen_k, **given_arguments)
    wanted = visible_by_contract(seqlen_q, seqlen_k, **given_arguments)
    np.testing.assert_array_equal(predicate(mask), wanted)
    assert mask.num_visible() == wanted.sum()
    if mask.is_full:
        assert wanted.all()


@SETTINGS
@given(length, length, arguments)
def test_ranges_are_those_of_the_predicate(seqlen_q: int, seqlen_k: int, given_arguments: dict[str, Any]) -> None:
    mask = Mask.of(seqlen_q, seqlen_k, **given_arguments)
    sees = predicate(mask)
    for begin in range(seqlen_q):
        for end in range(begin + 1, seqlen_q + 1):
            rows = sees[begin:end]
            assert mask.key_range(begin, end) == hull(rows.any(axis=0))
            assert rows.any(axis=0)[slice(*mask.key_range(begin, end))].all()  # a block's keys have no hole
            assert mask.full_range(begin, end) == hull(rows.all(axis=0))
    for begin in range(seqlen_k):
        for end in range(begin + 1, seqlen_k + 1):
            assert mask.row_range(begin, end) == hull(sees[:, begin:end].any(axis=1))
    assert mask.key_range(seqlen_q, seqlen_q) == mask.row_range(seqlen_k, seqlen_k) == (0, 0)


@cache
def expression(method: str) -> str:
    """What a method of `Mask` in mask.cuh returns: it is Python as it stands."""
    text = (jit.source_root() / "common" / "mask.cuh").read_text("utf-8")
    (found,) = re.findall(rf"\b{method}\([^)]*\) const {{\s*return {{([^;]*)}};", text)
    return f"({found})"


def of_the_kernels(method: str, mask: Mask, **arguments: int) -> Any:
    """The same as numbers."""
    names = {"seqlen_q": mask.seqlen_q, "seqlen_k": mask.seqlen_k, "lo": mask.lo, "hi": mask.hi, "min": min, "max": max}
    return eval(expression(method), {}, names | arguments)


def transposed(mask: Mask) -> Mask:
    """The mask of the backward kernel, whose rows are keys."""
    return Mask(*of_the_kernels("transposed", mask))


def kernel_range(method: str, mask: Mask, begin: int, end: int) -> tuple[int, int]:
    """A range of the kernels, which leave an empty one as it comes."""
    first, last = of_the_kernels(method, mask, row_begin=begin, row_end=end)
    return (first, last) if first < last else (0, 0)


@SETTINGS
@given(length, length, arguments)
def test_ranges_of_the_kernels_are_those_of_the_predicate_for_queries_and_transposed_for_keys(
    seqlen_q: int, seqlen_k: int, given_arguments: dict[str, Any]
) -> None:
    mask = Mask.of(seqlen_q, seqlen_k, **given_arguments)
    np.testing.assert_array_equal(predicate(transposed(mask)), predicate(mask).T)
    assert transposed(transposed(mask)) == mask
    for rows in (mask, transposed(mask)):
        sees = predicate(rows)
        for begin in range(rows.seqlen_q):
            for end in range(begin + 1, rows.seqlen_q + 1):
                assert kernel_range("key_range", rows, begin, end) == hull(sees[begin:end].any(axis=0))
                assert kernel_range("full_range", rows, begin, end) == hull(sees[begin:end].all(axis=0))
    for begin in range(seqlen_k):
        for end in range(begin + 1, seqlen_k + 1):
            assert kernel_range("key_range", transposed(mask), begin, end) == mask.row_range(begin, end)


@SETTINGS
@given(st.integers(1, 6), st.integers(1, 6), arguments, arguments)
def test_masks_that_hide_the_same_are_equal(
    seqlen_q: int, seqlen_k: int, one: dict[str, Any], other: dict[str, Any]
) -> None:
    a, b = Mask.of(seqlen_q, seqlen_k, **one), Mask.of(seqlen_q, seqlen_k, **other)
    same = np.array_equal(predicate(a), predicate(b))
    if predicate(a).any():  # masks that hide everything keep the side on which they do
        assert (a == b) == same
    elif a == b:
        assert same


@SETTINGS
@given(length, length, arguments)
def test_bounds_are_small(seqlen_q: int, seqlen_k: int, given_arguments: dict[str, Any]) -> None:
    mask = Mask.of(seqlen_q, seqlen_k, **given_arguments)
    assert -seqlen_q <= mask.lo <= mask.hi <= seqlen_k


def test_named_masks() -> None:
    assert Mask.of(5, 7).is_full
    assert Mask.of(5, 7, window_size=(None, None)) == Mask.of(5, 7, window_size=(-1, -1)) == Mask.of(5, 7)
    assert Mask.of(5, 7, causal=True) == Mask.of(5, 7, window_size=(-1, 0))
    assert Mask.of(5, 7, causal=True) == Mask.of(5, 7, causal=True, diagonal_offset=2)  # bottom-right aligned
    assert Mask.of(1, 7, causal=True).is_full  # decoding: the one query is the last
    assert not Mask.of(1, 7, causal=True, diagonal_offset=0).is_full
    assert Mask.of(5, 7, window_size=(np.int64(2), 1)) == Mask.of(5, 7, window_size=(2, 1))
    np.testing.assert_array_equal(
        predicate(Mask.of(3, 3, window_size=(1, 0))), [[True, False, False], [True, True, False], [False, True, True]]
    )


@pytest.mark.parametrize(
    "bad",
    [
        {"causal": 1},
        {"causal": None},
        {"causal": "yes"},
        {"window_size": 3},
        {"window_size": None},
        {"window_size": (1, 2, 3)},
        {"window_size": (1.0, 2)},
        {"window_size": (True, 2)},
        {"window_size": (-2, 0)},
        {"window_size": (0, -7)},
        {"window_size": "ab"},
        {"diagonal_offset": 1.5},
        {"diagonal_offset": True},
        {"diagonal_offset": "0"},
    ],
    ids=str,
)
def test_bad_arguments_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ProblemError, match=next(iter(bad))):
        Mask.of(4, 4, **bad)
