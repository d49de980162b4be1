"""Mask of causal and window_size. `kernels_cu/common/mask.cuh` mirrors this file, and a test compares the two."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..mods.analysis.intervals import Band
from .options import WindowSize


class Mask(NamedTuple):
    """A band of visible keys: query i sees key j iff `i + lo <= j <= i + hi` and j is a key.

    Bounds are normalised: a side that hides nothing is `-seqlen_q` on the left and `seqlen_k` on the right. So all
    masks that hide nothing are equal, and both bounds fit 32 bits if the lengths do.
    """

    seqlen_q: int
    seqlen_k: int
    lo: int
    hi: int

    @classmethod
    def from_options(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        causal: bool = False,
        window_size: WindowSize = (None, None),
        diagonal_offset: int | None = None,
    ) -> Mask:
        """Returns the mask of validated options. Without `diagonal_offset` the diagonal is bottom-right aligned."""
        left, right = window_size
        if causal:
            right = 0
        offset = seqlen_k - seqlen_q if diagonal_offset is None else diagonal_offset
        lo = None if left is None or left == -1 else offset - left
        return cls.between(seqlen_q, seqlen_k, lo, None if right is None or right == -1 else offset + right)

    @classmethod
    def between(cls, seqlen_q: int, seqlen_k: int, lo: int | None, hi: int | None) -> Mask:
        """Returns the mask with these bounds; None is open."""
        lo, hi = -seqlen_q if lo is None else lo, seqlen_k if hi is None else hi
        # A bound that hides nothing becomes the open one, and a far bound is clamped to where it hides all.
        lo = -seqlen_q if lo <= 1 - seqlen_q else min(lo, seqlen_k)
        hi = seqlen_k if hi >= seqlen_k - 1 else max(hi, -seqlen_q)
        return cls(seqlen_q, seqlen_k, lo, hi)

    def within(self, band: Band) -> Mask:
        """Returns the intersection of this mask with a band."""
        offset = self.seqlen_k - self.seqlen_q if band.from_end else 0
        lo = self.lo if band.lo is None else max(self.lo, offset + band.lo)
        hi = self.hi if band.hi is None else min(self.hi, offset + band.hi)
        return Mask.between(self.seqlen_q, self.seqlen_k, lo, hi)

    @property
    def is_full(self) -> bool:
        """True if every query sees every key."""
        return self.lo == -self.seqlen_q and self.hi == self.seqlen_k

    def visible(self, rows: Any, keys: Any) -> Any:
        """Returns a bool array (len(rows), len(keys)), True for visible pairs of query and key indices, in any array
        library.
        """
        first = rows[:, None] + self.lo
        last = rows[:, None] + self.hi
        return (keys >= first) & (keys <= last)

    def key_range(self, row_begin: int, row_end: int) -> tuple[int, int]:
        """Returns the half-open range of keys that any query of `row_begin … row_end - 1` sees; (0, 0) if none."""
        begin = max(0, row_begin + self.lo)
        end = min(self.seqlen_k, row_end + self.hi)
        return (begin, end) if self.lo <= self.hi and row_begin < row_end and begin < end else (0, 0)

    def full_range(self, row_begin: int, row_end: int) -> tuple[int, int]:
        """Returns the half-open range of keys that all these queries see; (0, 0) if none. Its tiles need no masking."""
        begin = max(0, row_end - 1 + self.lo)
        end = min(self.seqlen_k, row_begin + self.hi + 1)
        return (begin, end) if begin < end else (0, 0)

    def row_range(self, key_begin: int, key_end: int) -> tuple[int, int]:
        """Returns the half-open range of queries that see any key of `key_begin … key_end - 1`; (0, 0) if none."""
        begin = max(0, key_begin - self.hi)
        end = min(self.seqlen_q, key_end - self.lo)
        return (begin, end) if self.lo <= self.hi and key_begin < key_end and begin < end else (0, 0)

    def num_visible(self) -> int:
        """Returns the number of visible pairs of query and key, for counting FLOPs."""
        if self.is_full:
            return self.seqlen_q * self.seqlen_k
        if self.lo > self.hi:
            return 0
        return self._num_up_to(self.hi) - self._num_up_to(self.lo - 1)

    def _num_up_to(self, hi: int) -> int:
        # Sum of min(max(i + hi + 1, 0), seqlen_k) over the queries i: rows that grow by one, then rows that see all.
        first = min(max(-hi, 0), self.seqlen_q)  # first row that sees a key
        whole = min(max(self.seqlen_k - 1 - hi, first), self.seqlen_q)  # first row that sees all
        n = whole - first
        return n * (first + hi + 1) + n * (n - 1) // 2 + (self.seqlen_q - whole) * self.seqlen_k
