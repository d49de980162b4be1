"""Bands of masks: a band shows the same keys as its mask at every point, and masks that are bands are recognised."""

from __future__ import annotations

import time
from functools import partial, reduce

import numpy as np
import pytest
from expressions import H, K, Q, conditions, grid, of_integers, values
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.mods.analysis.intervals import Band, band
from cuflash.mods.graph.graph import Node, variable
from cuflash.mods.graph.operations import Type
from cuflash.mods.graph.simplify import build, constant, load

SETTINGS = settings(deadline=None, derandomize=True, max_examples=150)
GRID = grid() | {"seqlen_k": 67}
LENGTHS = GRID["seqlen_k"] - GRID["seqlen_q"]


def op(name: str, *arguments: Node | int) -> Node:
    return build(name, *(each if isinstance(each, Node) else constant(each) for each in arguments))


def all_of(*conditions: Node) -> Node:
    return reduce(partial(build, "bitwise_and"), conditions)


def check(mask: Node) -> Band | None:
    """Returns the band of a mask after a comparison with the mask at every query and key."""
    result = band(mask)
    if result is not None:
        distance = GRID["k_idx"] - GRID["q_idx"] - (LENGTHS if result.from_end else 0)
        lo, hi = (end if end is not None else default for end, default in ((result.lo, -1000), (result.hi, 1000)))
        is_inside = (distance >= lo) & (distance <= hi)
        np.testing.assert_array_equal(values(mask, GRID), np.broadcast_to(is_inside, values(mask, GRID).shape))
    return result


CAUSAL = op("less_equal", K, Q)
DISTANCE = op("subtract", Q, K)
FROM_END = op("subtract", op("add", Q, variable("seqlen_k")), variable("seqlen_q"))


def ends(compared: Node | int) -> st.SearchStrategy[Node]:
    names, numbers = st.sampled_from(["less", "less_equal"]), st.integers(-9, 9)
    return st.one_of(
        st.builds(lambda name, n: op(name, compared, op("add", K, n)), names, numbers),
        st.builds(lambda name, n: op(name, op("add", K, n), compared), names, numbers),
        st.builds(lambda name, n: op(name, op("absolute", op("subtract", compared, K)), n), names, numbers),
        st.builds(lambda n: op("less", op("floor_divide", op("subtract", K, compared), 4), n), numbers),
    )


def windows(compared: Node) -> st.SearchStrategy[Node]:
    return st.recursive(
        ends(compared),
        lambda below: st.one_of(
            st.builds(partial(op, "bitwise_and"), below, below),
            st.builds(partial(op, "bitwise_or"), below, below),
            st.builds(partial(op, "logical_not"), below),
            st.builds(partial(op, "where"), below, below, below),
        ),
        max_leaves=4,
    )


@SETTINGS
@given(st.one_of(windows(Q), windows(FROM_END), conditions()))
def test_bands_show_what_random_masks_show(mask: Node) -> None:
    check(mask)


@SETTINGS
@given(st.lists(ends(Q), min_size=1, max_size=4))
def test_windows_together_are_a_band(parts: list[Node]) -> None:
    mask = all_of(*parts)
    assert (check(mask) is None) == (mask is constant(False))


BANDS = {
    "causal": (CAUSAL, Band(None, 0, False)),
    "causal from the end": (op("less_equal", K, FROM_END), Band(None, 0, True)),
    "window": (all_of(CAUSAL, op("less", DISTANCE, 9)), Band(-8, 0, False)),
    "both sides": (op("less_equal", op("absolute", DISTANCE), 5), Band(-5, 5, False)),
    "not": (op("logical_not", op("bitwise_or", op("less", Q, K), op("less", 9, DISTANCE))), Band(-9, 0, False)),
    "blocks of distances": (op("equal", op("floor_divide", DISTANCE, 8), 1), Band(-15, -8, False)),
    "the nearer end": (op("less", op("maximum", DISTANCE, op("negative", DISTANCE)), 4), Band(-3, 3, False)),
    "two that touch": (
        op("bitwise_or", op("equal", K, Q), op("equal", op("add", K, 1), Q)),
        Band(-1, 0, False),
    ),
    "all": (constant(True), Band(None, None, True)),
}


@pytest.mark.parametrize("name", BANDS)
def test_masks_that_are_bands(name: str) -> None:
    mask, expected = BANDS[name]
    assert check(mask) == expected


OTHERS = {
    "documents by number": op("equal", load(1, Type.INT32, [constant(0), Q]), load(1, Type.INT32, [constant(0), K])),
    "every third key": op("equal", op("remainder", K, 3), 0),
    "chunks": op("equal", op("floor_divide", Q, 16), op("floor_divide", K, 16)),
    "left padding": op("less_equal", of_integers(constant(0), H), K),
    "of the row alone": all_of(CAUSAL, op("less", Q, 20)),
    "two with a hole": op("bitwise_or", op("less", DISTANCE, 3), op("less", 9, DISTANCE)),
    "fewer than an interval": all_of(CAUSAL, op("equal", op("remainder", DISTANCE, 2), 0)),
    "none": constant(False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_have_no_band(name: str) -> None:
    assert band(OTHERS[name]) is None


def is_between(index: Node, first: int, end: int) -> Node:
    return all_of(op("less", first - 1, index), op("less", index, end))


def test_masks_of_many_parts_take_seconds() -> None:
    firsts = range(0, 3000, 10)  # took minutes before the limit of parts
    documents = [all_of(is_between(Q, n, n + 10), is_between(K, n, n + 10)) for n in firsts]
    narrow = all_of(*(op("less", op("add", Q, op("remainder", K, 2 + n)), n) for n in firsts))
    begin = time.thread_time()  # CPU time of this thread: other processes may be busy
    for mask in (reduce(partial(build, "bitwise_or"), documents), all_of(narrow, op("less_equal", K, Q))):
        assert band(mask) is None
    assert time.thread_time() - begin < 20


def test_parts_with_many_users_are_counted_once() -> None:
    end = op("remainder", Q, 31)
    for n in range(60):  # 2^60 parts if shared parts were counted once per user
        end = op("minimum", *(op("maximum", end, op("remainder", op("multiply", Q, n + m), 37)) for m in (3, 5)))
    assert band(all_of(op("less_equal", K, end), op("less_equal", K, Q))) is None


def test_a_band_beside_many_parts_stays() -> None:
    wider = (op("less_equal", K, op("add", Q, n)) for n in range(3, 60))
    assert check(all_of(CAUSAL, *wider)) == Band(None, 0, False)
