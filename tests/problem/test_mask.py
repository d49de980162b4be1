"""The mask: its predicate against the contract, its ranges against the predicate, and the kernels' mask against it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from variants import failed_conditions

from cuflash.problem.mask import Mask

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
    """Returns visible pairs: query i sees key j iff i + off - left <= j <= i + off + right; causal is right = 0."""
    left, right = (None if side in (None, -1) else side for side in window_size)
    right = 0 if causal else right
    offset = seqlen_k - seqlen_q if diagonal_offset is None else diagonal_offset
    visible_pairs = np.zeros((seqlen_q, seqlen_k), dtype=bool)
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            after = left is None or i + offset - left <= j
            before = right is None or j <= i + offset + right
            visible_pairs[i, j] = after and before
    return visible_pairs


def predicate(mask: Mask) -> np.ndarray[Any, Any]:
    visible_pairs: np.ndarray[Any, Any] = mask.visible(np.arange(mask.seqlen_q), np.arange(mask.seqlen_k))
    return visible_pairs


def hull(flags: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Returns the half-open range from the first to the last True; (0, 0) if there is none."""
    where = np.flatnonzero(flags)
    return (int(where[0]), int(where[-1]) + 1) if len(where) else (0, 0)


@SETTINGS
@given(length, length, arguments)
def test_predicate_is_the_contract(seqlen_q: int, seqlen_k: int, given_arguments: dict[str, Any]) -> None:
    mask = Mask.from_options(seqlen_q, seqlen_k, **given_arguments)
    expected = visible_by_contract(seqlen_q, seqlen_k, **given_arguments)
    np.testing.assert_array_equal(predicate(mask), expected)
    assert mask.num_visible() == expected.sum()
    if mask.is_full:
        assert expected.all()


@SETTINGS
@given(length, length, arguments)
def test_ranges_are_those_of_the_predicate(seqlen_q: int, seqlen_k: int, given_arguments: dict[str, Any]) -> None:
    mask = Mask.from_options(seqlen_q, seqlen_k, **given_arguments)
    visible_pairs = predicate(mask)
    for begin in range(seqlen_q):
        for end in range(begin + 1, seqlen_q + 1):
            rows = visible_pairs[begin:end]
            assert mask.key_range(begin, end) == hull(rows.any(axis=0))
            assert rows.any(axis=0)[slice(*mask.key_range(begin, end))].all()  # a block's keys have no hole
            assert mask.full_range(begin, end) == hull(rows.all(axis=0))
    for begin in range(seqlen_k):
        for end in range(begin + 1, seqlen_k + 1):
            assert mask.row_range(begin, end) == hull(visible_pairs[:, begin:end].any(axis=1))
    assert mask.key_range(seqlen_q, seqlen_q) == mask.row_range(seqlen_k, seqlen_k) == (0, 0)


PROGRAM = """
#include "common/mask.cuh"
__device__ constexpr bool is(Range range, int begin, int end) {
  return range.begin < range.end ? range.begin == begin && range.end == end : begin == end;
}
__device__ constexpr bool sees(Mask mask, const char* wanted) {
  for (int i = 0; i < mask.seqlen_q; ++i) {
    for (int j = 0; j < mask.seqlen_k; ++j) {
      if (mask.visible(i, j) != (*wanted++ == '1')) return false;
    }
  }
  return true;
}
"""


def conditions(mask: Mask, rng: np.random.Generator) -> Iterator[str]:
    """Yields C++ conditions about the kernels' mask: its predicate, its transpose and some of its ranges."""
    text = f"Mask({mask.seqlen_q}, {mask.seqlen_k}, {mask.lo}, {mask.hi})"
    visible_pairs = predicate(mask)
    for name, flags in (
        (text, visible_pairs),
        (f"{text}.transposed()", visible_pairs.T),
        (f"{text}.transposed().transposed()", visible_pairs),
    ):
        yield f'sees({name}, "{"".join(map(str, flags.ravel().astype(int)))}")'
        for _ in range(3 if flags.size else 0):
            begin, end = sorted(rng.choice(len(flags) + 1, 2, replace=False))
            rows = flags[begin:end]
            for method, keys in (("key_range", rows.any(axis=0)), ("full_range", rows.all(axis=0))):
                yield "is({}.{}({}, {}), {}, {})".format(name, method, begin, end, *hull(keys))


def test_the_mask_of_the_kernels_is_this_one() -> None:
    rng = np.random.default_rng(0)
    lines = [condition for mask in masks_for_kernels(rng) for condition in conditions(mask, rng)]
    assert len(lines) > 3000
    wrong = next(line.replace('"1', '"0') for line in lines if '"1' in line)
    assert failed_conditions(PROGRAM, [*lines, wrong]) == [wrong]


def masks_for_kernels(rng: np.random.Generator) -> Iterator[Mask]:
    """Yields masks of every kind: open and closed windows on either side, diagonals inside and far outside."""
    for _ in range(300):
        window = tuple(int(side) for side in rng.integers(-1, 10, 2))
        offset = (None, int(rng.integers(-12, 13)), -(10**12), 10**12)[rng.choice(4, p=(0.3, 0.6, 0.05, 0.05))]
        seqlen_q, seqlen_k = (int(n) for n in rng.integers(0, 10, 2))
        yield Mask.from_options(
            seqlen_q, seqlen_k, causal=bool(rng.integers(2)), window_size=window, diagonal_offset=offset
        )


@SETTINGS
@given(st.integers(1, 6), st.integers(1, 6), arguments, arguments)
def test_masks_that_hide_the_same_are_equal(
    seqlen_q: int, seqlen_k: int, one: dict[str, Any], other: dict[str, Any]
) -> None:
    a, b = Mask.from_options(seqlen_q, seqlen_k, **one), Mask.from_options(seqlen_q, seqlen_k, **other)
    same = np.array_equal(predicate(a), predicate(b))
    if predicate(a).any():  # masks that hide everything keep the side on which they do
        assert (a == b) == same
    elif a == b:
        assert same


@SETTINGS
@given(length, length, arguments)
def test_bounds_are_small(seqlen_q: int, seqlen_k: int, given_arguments: dict[str, Any]) -> None:
    mask = Mask.from_options(seqlen_q, seqlen_k, **given_arguments)
    assert -seqlen_q <= mask.lo <= mask.hi <= seqlen_k


def test_named_masks() -> None:
    assert Mask.from_options(5, 7).is_full
    assert (
        Mask.from_options(5, 7, window_size=(None, None))
        == Mask.from_options(5, 7, window_size=(-1, -1))
        == Mask.from_options(5, 7)
    )
    assert Mask.from_options(5, 7, causal=True) == Mask.from_options(5, 7, window_size=(-1, 0))
    assert Mask.from_options(5, 7, causal=True) == Mask.from_options(
        5, 7, causal=True, diagonal_offset=2
    )  # bottom-right aligned
    assert Mask.from_options(1, 7, causal=True).is_full  # decoding: the one query is the last
    assert not Mask.from_options(1, 7, causal=True, diagonal_offset=0).is_full
    assert Mask.from_options(5, 7, window_size=(np.int64(2), 1)) == Mask.from_options(5, 7, window_size=(2, 1))
    np.testing.assert_array_equal(
        predicate(Mask.from_options(3, 3, window_size=(1, 0))),
        [[True, False, False], [True, True, False], [False, True, True]],
    )
