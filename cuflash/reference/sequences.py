"""Sequences of several lengths: each is a dense problem of its own, whose rows are gathered and put back.

Lengths and places are not trusted, here as on a GPU: a length is clamped to the rows that there are, and keys in a page
or row of the cache that is not there are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..problem.dtypes import DTYPES
from ..problem.mask import Mask
from ..problem.operands import INTEGERS, LSE_AXES, ROWS_K, Operand
from ..problem.problem import Problem
from .merge import merge_states
from .own_scores import OwnGradients, OwnScores, shared_with
from .tiles import Array

Named = Mapping[str, Array]
Results = Sequence[Array]


class One(NamedTuple):
    """A sequence: its row of the first axis and its rows of the second for q, and the same two of each of its keys.

    A key whose first index is -1 is not there.
    """

    batch_q: int
    queries: slice
    keys: tuple[Array, Array]

    def place(self, operand: Operand, keys: slice = slice(None)) -> tuple[Any, ...]:
        """The index of the sequence's part of an operand with all of its axes, or of some of its keys."""
        if operand.axes == LSE_AXES:
            return self.batch_q, slice(None), self.queries
        if operand.axes[:2] == ROWS_K[:2]:
            return self.keys[0][keys], self.keys[1][keys]
        return self.batch_q, self.queries

    def runs(self) -> list[slice]:
        """The keys that are there, as ranges; one empty range if there are none."""
        there = np.concatenate([[False], self.keys[0] >= 0, [False]])
        edges = np.flatnonzero(there[1:] != there[:-1])
        return [slice(begin, end) for begin, end in edges.reshape(-1, 2).tolist()] or [slice(0, 0)]


def run(
    problem: Problem,
    compute: Callable[..., Results],
    named: Named,
    out: Array | None,
    own: OwnScores | None = None,
    own_gradients: OwnGradients | None = None,
) -> list[Array]:
    """The results of a problem of several lengths, with all of their axes.

    compute: the dense function of the op. named: the inputs that are there. out: an array for the first result, where
    rows of no sequence, and those that are not used, are left alone; in new arrays they are 0, and -inf in lse. own and
    own_gradients: as in the dense functions.
    """
    assert problem.lengths is not None
    op = problem.op
    results = [_empty(problem, operand, named) for operand in op.outputs]
    if out is not None:
        results[0] = out
    arrays = [operand for operand in op.inputs if operand.dtype != INTEGERS and operand.name in named]
    for b, one in each(problem, named):
        mask, runs = problem.lengths.mask(_length(one.queries), len(one.keys[0])), one.runs()
        found = []
        for keys in runs:
            parts = [named[operand.name][one.place(operand, keys)][None] for operand in arrays]
            more: dict[str, Any] = {}
            if own is not None:
                more["own"] = replace(own, sinks=own.sinks if len(runs) == 1 else None, first_batch=b,
                                      first_key=keys.start, seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k)  # fmt: skip
            if own_gradients is not None:
                more["own_gradients"] = own_gradients
            found.append(compute(_alone(problem, mask, keys, len(runs) > 1), *parts, **more))
        merged = _merged(found)
        if own is not None and own.sinks is not None and len(runs) > 1:
            merged = _with_sinks(merged, own.sinks)
        for operand, result, part in zip(op.outputs, results, merged, strict=False):
            result[one.place(operand)] = part[0]
    return results


def each(problem: Problem, named: Named) -> Iterator[tuple[int, One]]:
    """The sequences that have queries, with their places in the batch; `named` has the arrays that tell lengths.

    why no others: they have no rows of results, and gradients of their keys are 0, so they cost no step of a loop.
    """
    rows_q = problem.shape(problem.op.operands[0])[1]
    counts = _all_used("q", problem.batch, rows_q, problem.seqlen_q, named)
    for b in np.flatnonzero(counts).tolist():
        row, begin, _ = rows_of(b, rows_q, named.get("cu_seqlens_q"))
        yield b, One(row, slice(begin, begin + int(counts[b])), _keys(b, problem, named))


def lengths_of(problem: Problem, named: Named) -> list[tuple[int, int]]:
    """The used queries and keys of each sequence of a problem without q and k, as a block mask is."""
    assert problem.lengths is not None
    used_q = _all_used("q", problem.batch, problem.lengths.rows_q, problem.seqlen_q, named)
    used_k = _all_used("k", problem.batch, problem.lengths.rows_k, problem.seqlen_k, named)
    return list(zip(used_q.tolist(), used_k.tolist(), strict=True))


def _all_used(side: str, batch: int, rows: int, most: int, named: Named) -> Array:
    """How many queries ("q") or keys ("k") each sequence uses, of at most `most`; rows: those that there are."""
    counts = np.full(batch, rows)
    if (bounds := named.get(f"cu_seqlens_{side}")) is not None:
        counts = np.maximum(np.diff(np.clip(bounds.astype(np.int64), 0, rows)), 0)
    counts = np.minimum(counts, most)
    used = named.get(f"seqused_{side}")
    return counts if used is None else np.clip(used.astype(np.int64), 0, counts)


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _alone(problem: Problem, mask: Mask, keys: slice, is_merged: bool) -> Problem:
    """The dense problem of some keys of one sequence. Results that are to be merged are kept in float32 until then."""
    count, options = _length(keys), problem.options
    if count != mask.seqlen_k:
        mask = Mask(mask.seqlen_q, count, mask.lo - keys.start, mask.hi - keys.start)
    if is_merged and DTYPES[problem.dtype].itemsize == 2:
        options = options._replace(out_dtype="float32")
    return problem._replace(
        batch=1, seqlen_q=mask.seqlen_q, seqlen_k=count, mask=mask, options=options, lengths=None
    )


def _merged(found: list[Results]) -> Results:
    """The results over all keys, from those over parts of them."""
    if len(found) == 1:
        return found[0]
    lses = [results[-1] for results in found]
    nothing = np.zeros((*lses[0].swapaxes(1, 2).shape, 0), lses[0].dtype)
    outs = [results[0] if len(results) > 1 else nothing for results in found]
    return merge_states(outs, lses)[-len(found[0]) :]


def _with_sinks(results: Results, sinks: Array) -> Results:
    """Results of forward or lse, with sinks, which count once."""
    *outs, lse = results
    share, total = shared_with(sinks[:, None], lse)
    return [*[out * share.swapaxes(1, 2)[..., None] for out in outs], total]


def _empty(problem: Problem, operand: Operand, named: Named) -> Array:
    shape = problem.shape(operand)
    if operand.axes == LSE_AXES:
        return np.full(shape, -np.inf, DTYPES[problem.dtype].accumulator)
    wide = operand.dtype == "out" and problem.out_dtype != problem.dtype
    return np.zeros(shape, np.float32 if wide else named["q"].dtype)


def clamped(number: Any, most: int) -> int:
    """The nearest number from 0 to `most`."""
    return min(max(int(number), 0), most)


def _used(name: str, b: int, rows: int, named: Named) -> int:
    return clamped(named[name][b], rows) if name in named else rows


def rows_of(b: int, rows: int, bounds: Array | None) -> tuple[int, int, int]:
    """(row of the first axis, first row of the second, how many) of a sequence, used or not."""
    if bounds is None:
        return b, 0, rows
    ((begin, end),) = pairwise(clamped(bound, rows) for bound in bounds[b : b + 2])
    return 0, begin, max(end - begin, 0)


def _keys(b: int, problem: Problem, named: Named) -> tuple[Array, Array]:
    batch_k, rows_k = problem.shape(problem.op.operands[1])[:2]
    if (table := named.get("page_table")) is not None:
        rows = min(table.shape[1] * rows_k, problem.seqlen_k)
        positions = np.arange(_used("seqused_k", b, rows, named))
        pages = table[b, positions // rows_k]
        return np.where((pages >= 0) & (pages < batch_k), pages, -1), positions % rows_k
    row, begin, rows = rows_of(b, rows_k, named.get("cu_seqlens_k"))
    if (cached := named.get("cache_batch_idx")) is not None:
        row = int(cached[b]) if 0 <= cached[b] < batch_k else -1
    count = _used("seqused_k", b, min(rows, problem.seqlen_k), named)
    return np.full(count, row), np.arange(begin, begin + count)
