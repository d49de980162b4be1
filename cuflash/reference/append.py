"""Appends new keys and values to a cache in place, and rotates keys and queries (RoPE).

Rotary position embedding: RoFormer (Su et al., arXiv 2104.09864), equation 34. Each pair (x, y) of a row at position p
is rotated by an angle, with cos and sin from row p of a table.

    x' = x cos − y sin        y' = x sin + y cos

Pair j of a row is (row[j], row[rotary_dim / 2 + j]), or (row[2 j], row[2 j + 1]) if pairs are interleaved. Other
elements of a row, and rows at positions beyond the table, stay unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..problem.problem import Problem
from .sequences import rows_of
from .tiles import Array

Named = Mapping[str, Array]


def append_kv(problem: Problem, named: Named) -> list[Array]:
    """Writes new rows to k_cache and v_cache, and returns a list of the rotated q, empty without q.

    Lengths and indices are not trusted, as on a GPU. Lengths are clamped to the capacity, and rows without a slot in
    the cache are not written. Calls validate lengths in host memory before. Rows of q of no sequence become 0.
    """
    k_cache, v_cache, k, v = (named[name] for name in ("k_cache", "v_cache", "k", "v"))
    q = named.get("q")
    page_size, table = k_cache.shape[1], named.get("page_table")
    capacity = page_size * (1 if table is None else table.shape[1])
    out = None if q is None else np.zeros(q.shape, q.dtype)
    used = np.clip(named["seqused_k"].astype(np.int64), 0, capacity)
    fresh = rows_of("k", problem.batch, k.shape[1], named)
    fresh = fresh._replace(counts=np.minimum(fresh.counts, capacity - used))
    queries = rows_of("q", problem.batch, 0 if q is None else q.shape[1], named)
    # Sequences with nothing to write or to rotate are skipped.
    for b in np.flatnonzero(fresh.counts + queries.counts).tolist():
        numbers = np.arange(fresh.counts[b])
        positions = used[b] + numbers
        pages = _pages(b, positions // max(page_size, 1), named)
        there = (pages >= 0) & (pages < len(k_cache))
        to, new = (pages[there], positions[there] % max(page_size, 1)), fresh.begins[b] + numbers[there]
        k_cache[to] = _rotated(problem, k[fresh.first[b], new], positions[there], named)
        v_cache[to] = v[fresh.first[b], new]
        if q is not None and out is not None:
            begin, count = queries.begins[b], queries.counts[b]
            positions = used[b] + np.arange(count) * (not problem.options.q_same_position)
            rows = queries.first[b], slice(begin, begin + count)
            out[rows] = _rotated(problem, q[rows], positions, named)
    return [] if out is None else [out]


def _pages(b: int, slots: Array, named: Named) -> Array:
    """Returns the cache pages at these indices of sequence b's page table; without a table, its row of the cache."""
    if (table := named.get("page_table")) is not None:
        return np.asarray(table[b, slots])
    cached = named.get("cache_batch_idx")
    return np.full(len(slots), b if cached is None else cached[b])


def _rotated(problem: Problem, rows: Array, positions: Array, named: Named) -> Array:
    """Returns rows (n, heads, head_dim) rotated at their positions, in float32 or float64, and rounded once."""
    if "rotary_cos" not in named:
        return rows
    dtype: Any = np.float64 if rows.dtype == np.float64 else np.float32
    rotated, out = positions < len(named["rotary_cos"]), rows.copy()
    cos, sin = (np.asarray(named[name][positions[rotated], None], dtype) for name in ("rotary_cos", "rotary_sin"))
    half = cos.shape[-1]
    first, second = slice(half), slice(half, 2 * half)
    if problem.options.rotary_interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    x, y = (np.asarray(rows[rotated][..., columns], dtype) for columns in (first, second))
    with np.errstate(all="ignore"):
        out[rotated, :, first] = (x * cos - y * sin).astype(rows.dtype)
        out[rotated, :, second] = (x * sin + y * cos).astype(rows.dtype)
    return out
