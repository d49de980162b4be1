"""Variable-length sequences: the layout that arrays of lengths describe, and its fit with q, k and v.

The lengths themselves are in the memory of the device. Planning never reads them, and only uses their bounds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ..errors import ProblemError
from ..mods.analysis.intervals import Band
from .array_spec import ArraySpec
from .mask import Mask
from .operands import INTEGERS
from .options import Options

PACKED = "(total_{}, heads, head_dim)"
PAGES, CACHE = "(num_pages, page_size, heads, head_dim)", "(batch, capacity, heads, head_dim)"
_BOUNDS, _ONE_EACH = "(batch + 1,)", "(batch,)"
VARLEN_LAYOUTS = {
    "cu_seqlens_q": _BOUNDS,
    "cu_seqlens_k": _BOUNDS,
    "seqused_q": _ONE_EACH,
    "seqused_k": _ONE_EACH,
    "page_table": "(batch, max_pages)",
    "cache_batch_idx": _ONE_EACH,
}
OPEN, MOST = -(2**31), 2**30 - 1  # the open bound, and the largest: its sum with any length fits 32 bits
PADDED_SLOT = 128  # rows of a slot of workspace beside the operands: kPaddedSlot in kernels_cu/common/varlen.cuh
Specs = Mapping[str, ArraySpec]


class SeqlenInfo(NamedTuple):
    """Layout of the sequences of a problem: the first two axes of q, and of k and v, all as 4-D arrays.

    Query i of a sequence sees its key j iff i + offset - left <= j <= i + offset + right. None is open; an offset of
    None is seqlen_k - seqlen_q of the sequence.
    """

    batch_q: int
    rows_q: int
    batch_k: int
    rows_k: int
    is_packed_q: bool = False
    is_packed_k: bool = False
    left: int | None = None
    right: int | None = None
    offset: int | None = None
    zero_unused_rows: bool = True  # True if unused rows, and rows of no sequence, become 0 in results

    @classmethod
    def from_layout(cls, layout: Mapping[str, Any], options: Options, zero_unused_rows: bool) -> SeqlenInfo:
        """Returns the info from a layout of `varlen_layout` and validated options."""
        left, right = options.window_size
        right = 0 if options.causal else right
        offset = None if left is right is None else options.diagonal_offset
        names = "batch_q", "rows_q", "batch_k", "rows_k", "is_packed_q", "is_packed_k"
        axes = {name: layout[name] for name in names}
        return cls(**axes, left=left, right=right, offset=offset, zero_unused_rows=zero_unused_rows)

    def num_slots(self, side: str, batch: int, size: int) -> int:
        """Returns the most blocks of `size` rows, of q or k, of all sequences: `RowSlots` in common/varlen.cuh."""
        rows, is_packed = (self.rows_q, self.is_packed_q) if side == "q" else (self.rows_k, self.is_packed_k)
        return rows // size + batch + 2 if is_packed else batch * -(-rows // size)

    def mean_rows(self, side: str, batch: int) -> int:
        """Returns the mean number of rows of q or k per sequence, used or not; for pages, the rows of a page."""
        rows, is_packed = (self.rows_q, self.is_packed_q) if side == "q" else (self.rows_k, self.is_packed_k)
        return rows // max(batch, 1) if is_packed else rows

    def mask(self, seqlen_q: int, seqlen_k: int) -> Mask:
        """Returns the mask of a sequence of these lengths."""
        offset = seqlen_k - seqlen_q if self.offset is None else self.offset
        left, right = self.left, self.right
        first, last = None if left is None else offset - left, None if right is None else offset + right
        return Mask.between(seqlen_q, seqlen_k, first, last)

    def within(self, band: Band) -> SeqlenInfo:
        """Returns the info with a band that hides more keys. Without a mask of its own, it takes the band's diagonal
        offset.
        """
        if band.is_open:
            return self
        if self.left is self.right is None:
            offset = None if band.from_end else 0
            return self._replace(left=None if band.lo is None else -band.lo, right=band.hi, offset=offset)
        assert band.from_end == (self.offset is None)
        offset, left, right = self.offset or 0, self.left, self.right
        if band.lo is not None:
            left = offset - band.lo if left is None else min(left, offset - band.lo)
        if band.hi is not None:
            right = band.hi - offset if right is None else min(right, band.hi - offset)
        return self._replace(left=left, right=right)

    @property
    def bounds(self) -> tuple[int, int, bool]:
        """The first and the last key that query 0 sees, and True if both count from seqlen_k - seqlen_q of a sequence.

        An open bound is OPEN; other bounds are clamped to values that hide, or show, the same keys.
        """
        offset = self.offset or 0
        first = OPEN if self.left is None else min(max(offset - self.left, -MOST), MOST)
        last = OPEN if self.right is None else min(max(offset + self.right, -MOST), MOST)
        return first, last, self.offset is None


def rank_of(layout: str) -> int:
    """Returns the rank of an array of a layout, such as 1 of "(batch,)"."""
    return layout.count(",") + (layout[-2] != ",")


def varlen_layout(named: Specs, varlen_specs: Specs) -> dict[str, Any]:
    """Returns the lengths of all axes but heads and head dims, from q, k, perhaps v, and the arrays of lengths.

    `seqlen_q` and `seqlen_k` bound the lengths of one sequence.
    """
    _check_together(varlen_specs)
    _check_ranks(named, varlen_specs)
    q, k = named["q"].as_4d().shape, named["k"].as_4d().shape
    is_paged = "page_table" in varlen_specs
    if is_paged and k[1] < 1:
        raise ProblemError(f"k has shape {named['k'].shape}: pages of {k[1]} keys; give {PAGES} with page_size >= 1")
    batch = _batch(named, varlen_specs)
    max_pages = varlen_specs["page_table"].shape[1] if is_paged else 0
    return {
        "batch": batch,
        "seqlen_q": q[1],
        "seqlen_k": max_pages * k[1] if is_paged else k[1],
        "batch_q": q[0],
        "rows_q": q[1],
        "batch_k": k[0],
        "rows_k": k[1],
        "is_packed_q": "cu_seqlens_q" in varlen_specs,
        "is_packed_k": "cu_seqlens_k" in varlen_specs,
        "bounds": batch + 1,
        "max_pages": max_pages,
    }


def bounded(lengths: Mapping[str, int], options: Options) -> dict[str, int]:
    """Returns the lengths of a problem, clamped to max_seqlen_q and max_seqlen_k."""
    bounds = {"seqlen_q": options.max_seqlen_q, "seqlen_k": options.max_seqlen_k}
    limits = {name: min(lengths[name], bound) for name, bound in bounds.items() if bound is not None}
    return {**lengths, **limits}


def check_unbounded(options: Options) -> None:
    """Raises ProblemError for options that bound lengths, in a call without arrays of lengths."""
    for name in ("max_seqlen_q", "max_seqlen_k"):
        if (bound := getattr(options, name)) is not None:
            raise ProblemError(
                f"{name}={bound}, but the call is not varlen (no cu_seqlens, seqused, page_table or cache_batch_idx); "
                "leave it out"
            )


def _check_together(varlen_specs: Specs) -> None:
    pairs = (("cu_seqlens_k", "page_table"), ("cu_seqlens_k", "cache_batch_idx"), ("page_table", "cache_batch_idx"))
    for first, second in pairs:
        if first in varlen_specs and second in varlen_specs:
            hint = "give seqused_k for the lengths of cached keys" if first == "cu_seqlens_k" else "give one of them"
            raise ProblemError(f"{first} and {second} place the same keys; {hint}")
    for name, spec in varlen_specs.items():
        layout = VARLEN_LAYOUTS[name]
        if len(spec.shape) != rank_of(layout) or (layout == _BOUNDS and spec.shape[0] < 1):
            raise ProblemError(f"{name} has shape {spec.shape}; give {layout} in {INTEGERS}")


def _check_ranks(named: Specs, varlen_specs: Specs) -> None:
    rank_q = len(named["q"].shape)
    elsewhere = {"page_table", "cache_batch_idx", "cu_seqlens_q"} & set(varlen_specs)
    for name, spec in named.items():
        side, rank = "q" if name == "q" else "k", len(spec.shape)
        if f"cu_seqlens_{side}" in varlen_specs:
            is_legal, layout = rank == 3, PACKED.format(side)
        elif side == "k" and elsewhere:
            is_legal, layout = rank == 4, PAGES if "page_table" in varlen_specs else CACHE
        elif side == "k" and rank_q != rank:
            is_legal, layout = False, f"the rank of q, {rank_q}"
        else:
            is_legal, layout = 2 <= rank <= 4, "(batch, seqlen, heads, head_dim)"
        if not is_legal:
            packed = packed_hint(side, rank, varlen_specs)
            raise ProblemError(
                f"{name} has shape {spec.shape}, rank {rank}; with {', '.join(varlen_specs)} give {layout}{packed}"
            )


def packed_hint(side: str, rank: int, names: Collection[str]) -> str:
    """Returns the end of an error for a q, or k, with the rank of packed rows but no cu_seqlens, which it suggests."""
    other = "q" if side == "k" else "k"
    if rank != 3 or f"cu_seqlens_{side}" in names or "page_table" in names:
        return ""
    partner = f", as cu_seqlens_{other} was given" if f"cu_seqlens_{other}" in names else ""
    return f"; or, if its rows are packed, {PACKED.format(side)} with cu_seqlens_{side}{partner}"


def _batch(named: Specs, varlen_specs: Specs) -> int:
    """Returns the number of sequences, on which all arrays with that axis must agree."""
    counts = {}
    for name, spec in varlen_specs.items():
        counts[name] = spec.shape[0] - (VARLEN_LAYOUTS[name] == _BOUNDS)
    if "cu_seqlens_q" not in varlen_specs:
        counts["q"] = named["q"].as_4d().shape[0]
    if not {"cu_seqlens_k", "page_table", "cache_batch_idx"} & set(varlen_specs):
        counts |= {name: spec.as_4d().shape[0] for name, spec in named.items() if name != "q"}
    (first, batch), *others = counts.items()
    for name, other in others:
        if other != batch:
            sides = {"q": "q", "k": "k", "v": "k"}
            hints = [packed_hint(sides[x], len(named[x].shape), varlen_specs) for x in (first, name) if x in sides]
            raise ProblemError(
                f"{name} is for {other} sequences, but {first} for {batch}; give all for the same (cu_seqlens have one "
                f"number more){next(filter(None, hints), '')}"
            )
    return batch
