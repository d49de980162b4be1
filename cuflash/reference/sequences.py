"""Variable-length sequences: each one is computed as a dense problem, by gathering and scattering its rows.

Lengths and indices are not trusted, as on a GPU. Lengths are clamped to the existing rows, and keys in a missing page
or row of the cache are hidden. Calls validate lengths in host memory before (problem/integers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..problem.dtypes import DTYPES
from ..problem.mask import Mask
from ..problem.operands import INTEGERS, LSE_AXES, Operand
from ..problem.problem import Problem
from .merge import merge_states
from .mods import ModGradients, ModScores, shared_with
from .tiles import Array

Named = Mapping[str, Array]
Results = Sequence[Array]


class Rows(NamedTuple):
    """The rows of each sequence: index on the first axis, first index on the second axis, and number of rows.

    With pages, `first` has the pages of each sequence, (batch, max_pages). -1 is a missing row or page.
    """

    first: Array
    begins: Array
    counts: Array


class One(NamedTuple):
    """The rows of one sequence: indices on the first and second axis, for its queries and for each key.

    A key with first index -1 is missing. Sequences that see no key share one `One`, with two indices for each query.
    """

    batch_q: int | Array
    queries: slice | Array
    keys: tuple[Array, Array]

    @property
    def num_queries(self) -> int:
        """The number of queries."""
        rows = self.queries
        return int(rows.stop - rows.start) if isinstance(rows, slice) else len(rows)

    def place(self, operand: Operand, keys: slice = slice(None)) -> tuple[Any, ...]:
        """Returns the index of the sequence's rows, or of some of its keys, in an operand as in `_rows_first`."""
        if "rows_k" in operand.axes:
            return self.keys[0][keys], self.keys[1][keys]
        return self.batch_q, self.queries

    def runs(self) -> list[slice]:
        """Returns the ranges of existing keys; one empty range if there are none."""
        there = np.concatenate([[False], self.keys[0] >= 0, [False]])
        edges = np.flatnonzero(there[1:] != there[:-1])
        return [slice(begin, end) for begin, end in edges.reshape(-1, 2).tolist()] or [slice(0, 0)]


def run(
    problem: Problem,
    compute: Callable[..., Results],
    named: Named,
    out: Array | None,
    mod_scores: ModScores | None = None,
    mod_gradients: ModGradients | None = None,
) -> list[Array]:
    """Returns the results of a varlen problem, with all of their axes.

    compute: the dense function of the op. named: the given inputs. out: an array for the first result, whose unused
    rows are left unchanged. In new arrays unused rows are 0, and -inf in lse. mod_scores, mod_gradients: as in the
    dense functions.
    """
    assert problem.seqlen_info is not None
    op = problem.op
    results = [_empty(problem, operand, named) for operand in op.outputs]
    if out is not None:
        results[0] = out
    arrays = [operand for operand in op.inputs if operand.dtype != INTEGERS and operand.name in named]
    delta = arrays.pop() if op.delta == "takes" else None
    for b, one in each(problem, named):
        mask, runs = problem.seqlen_info.mask(one.num_queries, len(one.keys[0])), one.runs()
        per_sequence = []
        for keys in runs:
            parts = [_part(operand, named, one, keys) for operand in arrays]
            more: dict[str, Any] = {} if mod_gradients is None else {"mod_gradients": mod_gradients}
            if delta is not None:
                more["delta"] = _part(delta, named, one, keys)
            if mod_scores is not None:
                more["mod_scores"] = replace(
                    mod_scores,
                    sinks=mod_scores.sinks if len(runs) == 1 else None,
                    first_batch=b,
                    first_key=keys.start,
                    seqlen_q=mask.seqlen_q,
                    seqlen_k=mask.seqlen_k,
                )
            per_sequence.append(compute(_alone(problem, mask, keys, len(runs) > 1), *parts, **more))
        merged = _merged(per_sequence)
        if mod_scores is not None and mod_scores.sinks is not None and len(runs) > 1:
            merged = _with_sinks(merged, mod_scores.sinks)
        for operand, result, part in zip(op.outputs, results, merged, strict=False):
            _rows_first(operand, result)[one.place(operand)] = _rows_first(operand, part)[0]
    return results


def _part(operand: Operand, named: Named, one: One, keys: slice) -> Array:
    """Returns one sequence's rows of an input, or some of its keys, as a batch of one."""
    return _rows_first(operand, _rows_first(operand, named[operand.name])[one.place(operand, keys)][None])


def each(problem: Problem, named: Named) -> Iterator[tuple[int, One]]:
    """Yields the sequences with queries, and their indices in the batch. named: includes the arrays of lengths.

    Sequences that see no key come first, together as one without keys, as all of their rows have equal results.
    Sequences without queries are skipped: they have no rows of results, and gradients of their keys are 0.
    """
    rows_q = problem.shape(problem.op.operands[0])[1]
    queries = _used("q", rows_of("q", problem.batch, rows_q, named), problem.seqlen_q, named)
    keys = _keys(problem, named)
    has_keys = _any_visible(problem, queries, keys)
    rows_without_keys = np.flatnonzero((queries.counts > 0) & ~has_keys)
    if len(rows_without_keys):
        counts = queries.counts[rows_without_keys]
        first, begins, before = (
            np.repeat(x, counts)
            for x in (queries.first[rows_without_keys], queries.begins[rows_without_keys], np.cumsum(counts) - counts)
        )
        none = np.zeros(0, np.int64)
        yield int(rows_without_keys[0]), One(first, begins + np.arange(len(begins)) - before, (none, none))
    for b in np.flatnonzero(has_keys).tolist():
        begin = int(queries.begins[b])
        rows = slice(begin, begin + int(queries.counts[b]))
        yield b, One(int(queries.first[b]), rows, _keys_of(b, problem, keys))


def lengths_of(problem: Problem, named: Named) -> list[tuple[int, int]]:
    """Returns the used queries and keys of each sequence, for a problem without q and k, such as a block mask."""
    assert problem.seqlen_info is not None
    info, batch = problem.seqlen_info, problem.batch
    queries = _used("q", rows_of("q", batch, info.rows_q, named), problem.seqlen_q, named)
    keys = _used("k", rows_of("k", batch, info.rows_k, named), problem.seqlen_k, named)
    return list(zip(queries.counts.tolist(), keys.counts.tolist(), strict=True))


def rows_of(side: str, batch: int, rows: int, named: Named) -> Rows:
    """Returns the rows of queries ("q") or keys ("k") of all sequences, used or not. rows: length of second axis."""
    if (bounds := named.get(f"cu_seqlens_{side}")) is None:
        return Rows(np.arange(batch), np.zeros(batch, np.int64), np.full(batch, rows))
    bounds = np.clip(bounds.astype(np.int64), 0, rows)
    return Rows(np.zeros(batch, np.int64), bounds[:-1], np.maximum(np.diff(bounds), 0))


def _used(side: str, rows: Rows, most: int, named: Named) -> Rows:
    """Returns the used rows, at most `most` for each sequence."""
    counts, used = np.minimum(rows.counts, most), named.get(f"seqused_{side}")
    return rows._replace(counts=counts if used is None else np.clip(used.astype(np.int64), 0, counts))


def _keys(problem: Problem, named: Named) -> Rows:
    batch_k, rows_k = problem.shape(problem.op.operands[1])[:2]
    rows = rows_of("k", problem.batch, rows_k, named)
    if (table := named.get("page_table")) is not None:
        rows = rows._replace(first=table, counts=np.full(problem.batch, table.shape[1] * rows_k))
    elif (cached := named.get("cache_batch_idx")) is not None:
        rows = rows._replace(first=cached)
    rows = rows._replace(first=np.where((rows.first >= 0) & (rows.first < batch_k), rows.first, -1))
    return _used("k", rows, problem.seqlen_k, named)


def _any_visible(problem: Problem, queries: Rows, keys: Rows) -> Array:
    """Returns True for each sequence with a query that may see a key that the mask shows and that is not missing."""
    assert problem.seqlen_info is not None
    # One mask for each distinct pair of lengths, as there may be a million sequences.
    most = problem.seqlen_k + 1
    pairs, number = np.unique(queries.counts * most + keys.counts, return_inverse=True)
    masks = [problem.seqlen_info.mask(*divmod(pair, most)) for pair in pairs.tolist()]
    shown = np.array([mask.num_visible() > 0 for mask in masks], bool)[number]
    there = np.any(keys.first >= 0, axis=tuple(range(1, keys.first.ndim)))
    visible: Array = shown & there
    return visible


def _keys_of(b: int, problem: Problem, keys: Rows) -> tuple[Array, Array]:
    """Returns the two indices of each key of a sequence."""
    numbers = np.arange(keys.counts[b])
    if keys.first.ndim == 2:
        page_size = problem.shape(problem.op.operands[1])[1]
        return keys.first[b, numbers // page_size], numbers % page_size
    return np.full(len(numbers), keys.first[b]), keys.begins[b] + numbers


def _alone(problem: Problem, mask: Mask, keys: slice, is_merged: bool) -> Problem:
    """Returns the dense problem of some keys of one sequence. Results to merge are float32 until they are merged."""
    count, options = keys.stop - keys.start, problem.options
    if count != mask.seqlen_k:
        mask = Mask(mask.seqlen_q, count, mask.lo - keys.start, mask.hi - keys.start)
    if is_merged and DTYPES[problem.dtype].itemsize == 2:
        options = options._replace(out_dtype="float32")
    return problem._replace(
        batch=1, seqlen_q=mask.seqlen_q, seqlen_k=count, mask=mask, options=options, seqlen_info=None
    )


def _merged(per_sequence: list[Results]) -> Results:
    """Returns the results over all keys, from the results over ranges of keys."""
    if len(per_sequence) == 1:
        return per_sequence[0]
    lses = [results[-1] for results in per_sequence]
    nothing = np.zeros((*lses[0].swapaxes(1, 2).shape, 0), lses[0].dtype)
    outs = [results[0] if len(results) > 1 else nothing for results in per_sequence]
    return merge_states(outs, lses)[-len(per_sequence[0]) :]


def _with_sinks(results: Results, sinks: Array) -> Results:
    """Returns results of forward or lse with sinks, which count once for all ranges of keys."""
    *outs, lse = results
    share, total = shared_with(sinks[:, None], lse)
    return [*[out * share.swapaxes(1, 2)[..., None] for out in outs], total]


def _rows_first(operand: Operand, x: Array) -> Array:
    """Returns an operand with its batch and row axes first: lse with axes swapped, others unchanged."""
    return x.swapaxes(1, 2) if operand.axes == LSE_AXES else x


def _empty(problem: Problem, operand: Operand, named: Named) -> Array:
    shape, accumulator = problem.shape(operand), DTYPES[problem.dtype].accumulator
    if operand.axes == LSE_AXES:
        return np.full(shape, 0 if operand.name == "delta" else -np.inf, accumulator)
    if problem.op.accumulates:
        return np.zeros(shape, accumulator)
    wide = operand.dtype == "out" and problem.out_dtype != problem.dtype
    return np.zeros(shape, np.float32 if wide else named["q"].dtype)
