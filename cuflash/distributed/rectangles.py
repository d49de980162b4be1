"""Visible rectangles: which rows of one rank see which keys of another, as dense calls with a diagonal offset."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Any, NamedTuple

from .layout import Layout

Range = tuple[int, int]
KEY_STEP = 128  # multiple of the keys of all key tiles


class Window(NamedTuple):
    """Numbers of keys that a query sees left and right of its own position; None for an open side."""

    left: int | None = None
    right: int | None = None

    @property
    def is_open(self) -> bool:
        """True if every query sees all keys of its document."""
        return self.left is None and self.right is None


class Rectangle(NamedTuple):
    """A dense call: rows `q` of one rank over rows `k` of another, local ranges (begin, end).

    diagonal_offset: that of the window within the rectangle; None if every query sees every key. q_index, k_index: the
    positions of the first row and the first key in their document. document: the number of that document.
    """

    q: Range
    k: Range
    diagonal_offset: int | None
    q_index: int
    k_index: int
    document: int = 0

    def index_offsets(self, head: int) -> tuple[int, ...]:
        """Returns offsets to the indices of the whole problem: of query, key, head and sequence."""
        return self.q_index, self.k_index, head, self.document

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key, masked ones included."""
        return (self.q[1] - self.q[0]) * (self.k[1] - self.k[0])

    def mask(self, window: Window) -> dict[str, Any]:
        """Returns the keywords of the call's mask."""
        if self.diagonal_offset is None:
            return {}
        return {"window_size": tuple(window), "diagonal_offset": self.diagonal_offset}


def rectangles(layout: Layout, rank_q: int, rank_k: int, window: Window, merge: bool = True) -> list[Rectangle]:
    """Returns the rectangles of a rank's rows and another rank's keys that hold visible pairs.

    merge: joins full rectangles that lie side by side, which hides the positions within documents.
    """
    rects: list[Rectangle] = []
    others = layout.spans[rank_k]
    ends = [other.end for other in others]
    document, stop, joinable = -1, 0, 0
    for span in layout.spans[rank_q]:
        for begin, end, first in layout.pieces(span.begin, span.end):
            if first != document:
                document, stop, joinable = first, layout.end_of(first), len(rects)
            # Spans of this document alone: a layout by document has two of each document.
            for other in others[bisect_right(ends, document) :]:
                if other.begin >= stop:
                    break
                keys = max(other.begin, document), min(other.end, stop)
                if (cut := _cut((begin, end), keys, window)) is None:
                    continue
                (a, b), (c, d) = cut
                is_full = (window.left is None or b - 1 - window.left <= c) and (
                    window.right is None or d - 1 <= a + window.right
                )
                rows = a - span.begin + span.local, b - span.begin + span.local
                local_keys = c - other.begin + other.local, d - other.begin + other.local
                offset = None if is_full else a - c
                number = _number(layout, document)
                new = Rectangle(rows, local_keys, offset, a - document, c - document, number)
                if not merge or not _joined(rects, joinable, new):
                    rects.append(new)
    return rects


def _cut(rows: Range, keys: Range, window: Window) -> tuple[Range, Range] | None:
    """Cuts rows and keys to those with a visible partner; None if there are none."""
    (a, b), (c, d) = rows, keys
    if window.left is not None:
        c = max(c, a - window.left)
    if window.right is not None:
        d = min(d, b + window.right)
    if window.left is not None:
        b = min(b, d + window.left)
    if window.right is not None:
        a = max(a, c - window.right)
    return ((a, b), (c, d)) if a < b and c < d else None


def _joined(rects: list[Rectangle], first: int, new: Rectangle) -> bool:
    """Joins a full rectangle to one from index `first` on: with equal rows and the keys before its keys, or vice versa.

    Returns False if there is none.
    """
    if new.diagonal_offset is None:
        for number in range(first, len(rects)):
            old = rects[number]
            if old.diagonal_offset is None:
                if old.q == new.q and old.k[1] == new.k[0]:
                    rects[number] = old._replace(k=(old.k[0], new.k[1]))
                    return True
                if old.k == new.k and old.q[1] == new.q[0]:
                    rects[number] = old._replace(q=(old.q[0], new.q[1]))
                    return True
    return False


def _number(layout: Layout, document: int) -> int:
    """Returns the number of the document, not an empty one, whose first row this is."""
    return bisect_right(layout.cu_seqlens, document) - 1


class Piece(NamedTuple):
    """Consecutive rows of a rank in one document, and the keys that they see.

    local: range of local rows. keys: range of rows of the whole sequence. q_index, k_index: positions of the first row
    and the first key in the document. ends_with_keys: True if the last row and the last key are the same. document,
    seqlen: the number and the length of the document.
    """

    local: Range
    keys: Range
    q_index: int
    k_index: int
    ends_with_keys: bool
    document: int = 0
    seqlen: int = 0

    @property
    def index_offsets(self) -> tuple[int, ...]:
        """Offsets to the indices of the whole problem: of query, key, head and sequence."""
        return self.q_index, self.k_index, 0, self.document


def pieces_of(layout: Layout, rank: int, window: Window) -> list[Piece]:
    """Returns the pieces of a rank's rows, in local order.

    Keys begin at a multiple of KEY_STEP from the document's first: key tiles, and so bits, are those of one GPU.
    """
    pieces = []
    for span in layout.spans[rank]:
        for begin, end, document in layout.pieces(span.begin, span.end):
            first, last = document, layout.end_of(document)
            if window.left is not None:
                first += max(begin - window.left - document, 0) // KEY_STEP * KEY_STEP
            if window.right is not None:
                last = min(last, end + window.right)
            local = begin - span.begin + span.local
            indices = begin - document, first - document
            of_document = _number(layout, document), layout.end_of(document) - document
            pieces.append(Piece((local, local + end - begin), (first, last), *indices, last == end, *of_document))
    return pieces


def needed_keys(layout: Layout, rank: int, window: Window) -> list[Range]:
    """Returns disjoint, ascending ranges of the rows of the whole sequence whose keys a rank's rows see."""
    needed: list[Range] = []
    for begin, end in sorted(piece.keys for piece in pieces_of(layout, rank, window)):
        if needed and begin <= needed[-1][1]:
            needed[-1] = needed[-1][0], max(needed[-1][1], end)
        else:
            needed.append((begin, end))
    return needed


def num_fetched(layout: Layout, rank: int, window: Window) -> int:
    """Returns the number of needed rows that other ranks hold."""
    spans = layout.spans[rank]
    begins = [span.begin for span in spans]

    def held(row: int) -> int:
        """Returns the number of this rank's rows before a row of the sequence."""
        if (number := bisect_right(begins, row) - 1) < 0:
            return 0
        span = spans[number]
        return span.local + min(row, span.end) - span.begin

    return sum(end - begin - held(end) + held(begin) for begin, end in needed_keys(layout, rank, window))


def visible_pairs(layout: Layout, rank: int, window: Window) -> int:
    """Returns the pairs of a row of a rank and a key that it sees."""
    return sum(
        _pairs(begin - document, end - document, layout.end_of(document) - document, window)
        for span in layout.spans[rank]
        for begin, end, document in layout.pieces(span.begin, span.end)
    )


def local_pairs(layout: Layout, rank: int, window: Window) -> int:
    """Returns the visible pairs among a rank's rows, for windows that only order decides."""
    return sum(_pairs(0, end - begin, end - begin, window) for begin, end in pairwise(layout.local_bounds(rank)))


def _pairs(begin: int, end: int, seqlen: int, window: Window) -> int:
    """Returns the pairs of queries `begin … end - 1` and visible keys of a document."""

    def keys(stop: int, most: int | None) -> int:
        """Returns the sum of min(x, most) over x < stop."""
        bounded = stop if most is None else min(stop, most)
        return bounded * (bounded - 1) // 2 + (stop - bounded) * bounded

    left = keys(end, window.left) - keys(begin, window.left)
    right = keys(seqlen - begin, window.right) - keys(seqlen - end, window.right)
    return left + right + end - begin
