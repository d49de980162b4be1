"""Intervals of keys: no visible key lies outside of them, and their properties hold at every point."""

from __future__ import annotations

import time
from functools import partial, reduce

import numpy as np
import pytest
from expressions import ARRAYS, B, H, K, Q, conditions, grid, of_integers, values
from hypothesis import given, settings

from cuflash.mods.analysis.intervals import MOST_PARTS, OPEN, RowInterval, row_interval
from cuflash.mods.graph.graph import Node, variable
from cuflash.mods.graph.operations import Type
from cuflash.mods.graph.simplify import build, constant, load

SETTINGS = settings(deadline=None, derandomize=True, max_examples=150)
GRID = grid()
BEGINS = np.array([[0, 7, 31], [0, 0, 12]], np.int32)  # a sorted table: where documents begin
ROWS = np.repeat(np.arange(3), 20).astype(np.int32)  # the document of a query
TABLES = (*ARRAYS, BEGINS, ROWS)


def op(name: str, *arguments: Node | int) -> Node:
    return build(name, *(each if isinstance(each, Node) else constant(each) for each in arguments))


def all_of(*conditions: Node) -> Node:
    return reduce(partial(build, "bitwise_and"), conditions)


def check(mask: Node, is_exact: bool | None = None) -> RowInterval:
    """Returns the interval of a mask after a comparison with the mask at every query and key."""
    interval = row_interval(mask)
    assert interval is not None
    is_visible = values(mask, GRID, TABLES)
    first, last = (values(end, GRID, TABLES).astype(int) for end in (interval.first, interval.last))
    is_inside = (GRID["k_idx"] >= first) & (GRID["k_idx"] <= last)
    assert (is_inside | ~is_visible).all()
    if interval.is_exact:
        assert (is_inside == is_visible).all()
    if interval.is_monotone:
        assert (np.diff(first, axis=1) >= 0).all()
        assert (np.diff(last, axis=1) >= 0).all()
    assert "k_idx" not in interval.first.inputs | interval.last.inputs
    assert is_exact in (None, interval.is_exact)
    return interval


@SETTINGS
@given(conditions())
def test_intervals_hold_all_visible_keys_of_random_masks(mask: Node) -> None:
    if row_interval(mask) is not None:
        check(mask)


CAUSAL = op("less_equal", K, Q)
DISTANCE = op("subtract", Q, K)
DOCUMENT = load(3, Type.INT32, [Q])
EXACT = {
    "causal": CAUSAL,
    "window": all_of(CAUSAL, op("less", DISTANCE, 9)),
    "both sides": op("less_equal", op("absolute", DISTANCE), 5),
    "document by where it begins": all_of(op("less_equal", load(2, Type.INT32, [B, DOCUMENT]), K), CAUSAL),
    "prefix": op("bitwise_or", CAUSAL, op("less", K, op("maximum", of_integers(B, H), 0))),
    "chunks": op("equal", op("floor_divide", Q, 16), op("floor_divide", K, 16)),
    "chunks from an offset": op(
        "equal",
        op("floor_divide", op("subtract", K, of_integers(B, H)), 8),
        op("floor_divide", op("subtract", Q, of_integers(B, H)), 8),
    ),
    "left padding": op("less_equal", of_integers(B, H), K),
    "one key": op("equal", K, op("floor_divide", Q, 2)),
    "of the row alone": op("less", Q, 20),
    "a choice of the row": op("where", op("less", Q, 20), op("less", 10, Q), op("less", 30, Q)),
    "an end past another": all_of(op("less_equal", K, op("maximum", Q, of_integers(B, H))), CAUSAL),
    "lengths": op("less", K, variable("seqlen_k")),
    "not": op("logical_not", op("bitwise_or", op("less", Q, K), op("less", 9, DISTANCE))),
    "all": constant(True),
    "none": constant(False),
}


MONOTONE = ("causal", "window", "both sides", "chunks", "left padding", "one key")
UNSORTED = ("document by where it begins",)


@pytest.mark.parametrize("name", EXACT)
def test_masks_that_are_intervals_are_exact(name: str) -> None:
    interval = check(EXACT[name], is_exact=True)
    if name in MONOTONE + UNSORTED:
        assert interval.is_monotone == (name in MONOTONE)


def test_an_interval_that_holds_more_than_the_mask_is_not_exact() -> None:
    interval = check(all_of(CAUSAL, op("equal", op("remainder", DISTANCE, 2), 0)), is_exact=False)
    assert interval.last is Q
    assert {end.value for end in (interval.first, interval.last) if end.op == "constant"} == {-OPEN}


@pytest.mark.parametrize(
    "mask",
    [
        op("equal", load(3, Type.INT32, [Q]), load(3, Type.INT32, [K])),
        op("equal", op("remainder", K, 3), 0),
        op("bitwise_or", op("equal", K, 3), op("less", 0, load(3, Type.INT32, [K]))),
    ],
    ids=["documents by number", "every third key", "one key or a table"],
)
def test_other_masks_have_no_interval(mask: Node) -> None:
    assert row_interval(mask) is None


def is_between(index: Node, first: int, end: int) -> Node:
    return all_of(op("less", first - 1, index), op("less", index, end))


def test_masks_of_many_parts_take_seconds() -> None:
    firsts = range(0, 3000, 10)  # took minutes
    documents = [all_of(is_between(Q, n, n + 10), is_between(K, n, n + 10)) for n in firsts]
    narrow = all_of(*(op("less", op("add", Q, op("remainder", K, 2 + n)), n) for n in firsts))
    begin = time.thread_time()  # why not the time of day: other processes may be busy
    for mask in (reduce(partial(build, "bitwise_or"), documents), all_of(narrow, op("less_equal", K, Q))):
        if row_interval(mask) is not None:
            check(mask)
    assert time.thread_time() - begin < 20


def test_parts_with_many_users_are_counted_once() -> None:
    end = op("remainder", Q, 31)
    for n in range(60):  # 2^60 parts, if each is counted as often as it is reached
        end = op("minimum", *(op("maximum", end, op("remainder", op("multiply", Q, n + m), 37)) for m in (3, 5)))
    check(all_of(op("less_equal", K, end), op("less_equal", K, Q)), is_exact=False)


@pytest.mark.parametrize("parts", [MOST_PARTS, MOST_PARTS + 1, 3 * MOST_PARTS])
def test_an_interval_has_at_most_so_many_parts(parts: int) -> None:
    ends = (op("remainder", op("multiply", Q, n + 3), 31) for n in range(parts))
    check(all_of(*(op("less_equal", K, end) for end in ends)), is_exact=parts <= MOST_PARTS)


def test_two_parts_with_a_hole_are_not_exact() -> None:
    interval = row_interval(op("bitwise_or", op("less", K, 3), op("less", 9, K)))
    assert interval is None or not interval.is_exact
