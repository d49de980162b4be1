"""Intervals of keys: no key that is seen lies outside of them, and what is said of them holds at every point."""

from __future__ import annotations

import time

import numpy as np
import pytest
from expressions import ARRAYS, LENGTH, B, H, K, Q, conditions, grid, number, of_integers, values
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


def of(op: str, *arguments: Node | int) -> Node:
    return build(op, *(each if isinstance(each, Node) else constant(each) for each in arguments))


def all_of(*conditions: Node) -> Node:
    result = conditions[0]
    for each in conditions[1:]:
        result = build("bitwise_and", result, each)
    return result


def check(mask: Node, found: RowInterval) -> None:
    """Compares with the mask at every query and key."""
    seen = values(mask, GRID, TABLES)
    first, last = (values(end, GRID, TABLES).astype(int) for end in (found.first, found.last))
    inside = (GRID["k_idx"] >= first) & (GRID["k_idx"] <= last)
    assert (inside | ~seen).all()
    if found.is_exact:
        assert (inside == seen).all()
    if found.is_monotone:
        assert (np.diff(first, axis=1) >= 0).all()
        assert (np.diff(last, axis=1) >= 0).all()
    assert "k_idx" not in found.first.inputs | found.last.inputs


@SETTINGS
@given(conditions())
def test_intervals_hold_what_random_masks_show(mask: Node) -> None:
    found = row_interval(mask)
    if found is not None:
        check(mask, found)


CAUSAL = of("less_equal", K, Q)
DISTANCE = of("subtract", Q, K)
DOCUMENT = load(3, Type.INT32, [Q])
EXACT = {
    "causal": CAUSAL,
    "window": all_of(CAUSAL, of("less", DISTANCE, 9)),
    "both sides": of("less_equal", of("absolute", DISTANCE), 5),
    "document by where it begins": all_of(of("less_equal", load(2, Type.INT32, [B, DOCUMENT]), K), CAUSAL),
    "prefix": of("bitwise_or", CAUSAL, of("less", K, of("maximum", of_integers(B, H), 0))),
    "chunks": of("equal", of("floor_divide", Q, 16), of("floor_divide", K, 16)),
    "chunks from an offset": of(
        "equal",
        of("floor_divide", of("subtract", K, of_integers(B, H)), 8),
        of("floor_divide", of("subtract", Q, of_integers(B, H)), 8),
    ),
    "left padding": of("less_equal", of_integers(B, H), K),
    "one key": of("equal", K, of("floor_divide", Q, 2)),
    "of the row alone": of("less", Q, 20),
    "lengths": of("less", K, variable("seqlen_k")),
    "not": of("logical_not", of("bitwise_or", of("less", Q, K), of("less", 9, DISTANCE))),
    "all": constant(True),
    "none": constant(False),
}


@pytest.mark.parametrize("name", EXACT)
def test_masks_that_are_intervals_are_found_exactly(name: str) -> None:
    found = row_interval(EXACT[name])
    assert found is not None
    assert found.is_exact
    check(EXACT[name], found)


@pytest.mark.parametrize("name", ["causal", "window", "both sides", "chunks", "left padding", "one key"])
def test_ends_that_never_fall_are_known(name: str) -> None:
    found = row_interval(EXACT[name])
    assert found is not None
    assert found.is_monotone


def test_of_an_unsorted_table_nothing_is_said_about_the_order_of_rows() -> None:
    found = row_interval(EXACT["document by where it begins"])
    assert found is not None
    assert not found.is_monotone


def test_an_interval_that_holds_more_than_the_mask_says_so() -> None:
    dilated = all_of(CAUSAL, of("equal", of("remainder", DISTANCE, 2), 0))
    found = row_interval(dilated)
    assert found is not None
    assert not found.is_exact
    check(dilated, found)
    assert found.last is Q
    ends = {end.value for end in (found.first, found.last) if end.op == "constant"}
    assert ends == {-OPEN}


@pytest.mark.parametrize(
    "mask",
    [
        of("equal", load(3, Type.INT32, [Q]), load(3, Type.INT32, [K])),
        of("equal", of("remainder", K, 3), 0),
        of("bitwise_or", of("equal", K, 3), of("less", 0, load(3, Type.INT32, [K]))),
    ],
    ids=["documents by number", "every third key", "one key or a table"],
)
def test_of_other_masks_nothing_is_said(mask: Node) -> None:
    assert row_interval(mask) is None


def within(index: Node, first: int, end: int) -> Node:
    return all_of(of("less", first - 1, index), of("less", index, end))


def test_masks_of_many_parts_are_judged_in_no_time() -> None:
    many: Node | None = None
    narrow: Node | None = None
    for first in range(0, 3000, 10):  # took minutes
        document = all_of(within(Q, first, first + 10), within(K, first, first + 10))
        above = of("less", of("add", Q, of("remainder", K, 2 + first)), first)
        many = document if many is None else build("bitwise_or", many, document)
        narrow = above if narrow is None else build("bitwise_and", narrow, above)
    started = time.perf_counter()
    assert many is not None
    assert narrow is not None
    for mask in (many, all_of(narrow, of("less_equal", K, Q))):
        if (found := row_interval(mask)) is not None:
            check(mask, found)
    assert time.perf_counter() - started < 20


def test_parts_that_are_shared_are_counted_in_no_time() -> None:
    end = of("remainder", Q, 31)
    for n in range(60):  # 2^60 parts, if each is counted as often as it is reached
        end = of("minimum", *(of("maximum", end, of("remainder", of("multiply", Q, n + m), 37)) for m in (3, 5)))
    mask = all_of(of("less_equal", K, end), of("less_equal", K, Q))
    found = row_interval(mask)
    assert found is not None
    assert not found.is_exact
    check(mask, found)


@pytest.mark.parametrize("parts", [MOST_PARTS, MOST_PARTS + 1, 3 * MOST_PARTS])
def test_of_many_bounds_some_are_kept(parts: int) -> None:
    ends = (of("remainder", of("multiply", Q, n + 3), 31) for n in range(parts))
    mask = all_of(*(of("less_equal", K, end) for end in ends))
    found = row_interval(mask)
    assert found is not None
    check(mask, found)
    assert found.is_exact == (parts <= MOST_PARTS)


def test_two_parts_with_a_hole_are_not_exact() -> None:
    mask = of("bitwise_or", of("less", K, 3), of("less", 9, K))
    found = row_interval(mask)
    assert found is None or not found.is_exact
    assert LENGTH > 9
    assert number(0) is constant(0)
