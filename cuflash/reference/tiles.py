"""Loop over tiles for all tiled algorithms: blocks of queries, and for each block its visible key tiles.

A tile of scores is `s = softmax_scale q kᵀ`, capped to `c tanh(s / c)`, then -inf where the mask hides the key. The
query heads of one kv head are folded into the rows of a block, so that each product is one matrix product. Sums are
float32 (float64 for float64 inputs); 16-bit inputs are cast tile by tile, so that only the outputs take memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..problem.dtypes import DTYPES
from ..problem.problem import Problem
from .mods import ModScores, ModTile

Array = NDArray[Any]
State = TypeVar("State")

# 512 x 512 float32 scores are 1 MiB and stay in cache from product to product; larger tiles were no faster.
BLOCK_ROWS = 512
BLOCK_K = 512


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries `begin … end - 1` of all query heads of one kv head.

    Row `i * group + g` belongs to query `begin + i` of the group's head g; `q` is (rows, head_dim).
    """

    batch_idx: int
    head_kv_idx: int
    group: int
    begin: int
    end: int
    q: Array

    @property
    def queries(self) -> slice:
        """The block's range of the seqlen_q axis."""
        return slice(self.begin, self.end)

    @property
    def heads(self) -> slice:
        """The block's range of the heads_q axis."""
        return slice(self.head_kv_idx * self.group, (self.head_kv_idx + 1) * self.group)

    def fold(self, x: Array, dtype: np.dtype[Any]) -> Array:
        """Returns the block's rows (rows, n), contiguous, of an array (batch, seqlen_q, heads_q, n)."""
        return np.ascontiguousarray(x[self.batch_idx, self.queries, self.heads], dtype).reshape(-1, x.shape[3])

    def fold_lse(self, x: Array, dtype: np.dtype[Any]) -> Array:
        """Returns the block's rows (rows,) of an array (batch, heads_q, seqlen_q)."""
        return np.ascontiguousarray(x[self.batch_idx, self.heads, self.queries].T, dtype).reshape(-1)

    def unfold(self, rows: Array) -> Array:
        """Returns rows (rows, …) as (end - begin, group, …)."""
        return rows.reshape(self.end - self.begin, self.group, *rows.shape[1:])


@dataclass(frozen=True, slots=True)
class Tile:
    """Keys `begin … end - 1` of a block of queries: k (keys, head_dim), v (keys, head_dim_v), s (rows, keys).

    `s` is scaled, capped and masked; an algorithm may overwrite it, as `exp_below` does. `masked` marks scores of -inf,
    or is None if it makes no difference: see `visible_product`.
    """

    begin: int
    end: int
    s: Array
    k: Array
    v: Array
    dtype: np.dtype[Any]
    mod_tile: ModTile | None = None
    masked: Array | None = None

    def times_v(self, p: Array) -> Array:
        """Returns `p v`, (rows, dv), of p (rows, keys), rounded to the inputs' dtype as for the tensor cores.

        NaN and infinities in v count as 0: `by_tiles` adds them at the end, as a later tile may scale a row by 0.
        """
        if self.mod_tile is not None:
            p = self.mod_tile.dropped(p)
        v = self.v if self.masked is None else finite(self.v)
        return (rounded(p, self.dtype) if v.size else p) @ v


OnTile = Callable[[QueryBlock, Tile, Any], None]


def accumulator(problem: Problem) -> np.dtype[Any]:
    """Returns the dtype of scores, sums and lse."""
    return np.dtype(DTYPES[problem.dtype].accumulator)


def no_results(problem: Problem, q: Any, v: Any, xp: Any = np) -> tuple[Any, Any]:
    """Returns (out, lse) of rows that see no key, in the array library of q and v: 0 and -inf."""
    out_dtype = q.dtype if problem.out_dtype == problem.dtype else xp.dtype(problem.out_dtype)
    out = xp.zeros((problem.batch, problem.seqlen_q, problem.heads_q, v.shape[3]), out_dtype)
    return out, xp.full((problem.batch, problem.heads_q, problem.seqlen_q), -xp.inf, accumulator(problem))


def rounded(x: Array, dtype: np.dtype[Any]) -> Array:
    """Returns `x` rounded to the precision of `dtype`, in x's dtype; `dtype` is float16, bfloat16 or x's dtype."""
    if dtype == x.dtype:
        return x
    if dtype == np.float16:
        # NumPy takes 85 ns to cast a number that becomes an inexact subnormal, and 3 ns for others. Adding 0.75, whose
        # last bit is 2⁻²⁴, rounds such numbers to multiples of 2⁻²⁴ first, and these are exact.
        x = np.where(np.abs(x) < 2.0**-14, (x + 0.75) - 0.75, x)
    return x.astype(dtype).astype(x.dtype)


def exp_below(s: Array, m: Array) -> Array:
    """Returns `exp(s - m)`, one m for each row, written over s. A row with m = -inf sees no key and gives 0."""
    np.subtract(s, np.where(np.isneginf(m), 0, m)[:, None], out=s)
    return np.exp(s, out=s)


def visible_product(weights: Array, x: Array, masked: Array | None) -> Array:
    """Returns `weights @ x`, (…, rows, keys) @ (…, keys, n), where hidden pairs add nothing, even for NaN in x.

    masked: True for hidden pairs, whose weights are 0, or None if x is finite. Pairs with a score of -inf are hidden,
    by a mask or by value. Visible NaN and infinities count as if their weight were above 0.
    """
    return weights @ x if masked is None else weights @ finite(x) + visible_not_finite(x, masked)


def finite(x: Array) -> Array:
    """Returns a copy of `x` with 0 for NaN and infinities; x may be the caller's memory."""
    return np.where(np.isfinite(x), x, x.dtype.type(0))


def visible_not_finite(x: Array, masked: Array) -> Array:
    """Returns for each row the sum of the visible NaN and infinities of x, (…, keys, n)."""
    out = np.zeros((*masked.shape[:-1], x.shape[-1]), x.dtype)
    for value, is_it in ((np.nan, np.isnan), (np.inf, np.isposinf), (-np.inf, np.isneginf)):
        if (mask := is_it(x)).any():
            any_visible = (~masked).astype(x.dtype) @ mask.astype(x.dtype) > 0
            np.add(out, value, out=out, where=any_visible)
    return out


def spans(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields the range `begin … end - 1`, cut at the multiples of `size`."""
    for start in range(begin - begin % size, end, size):
        yield max(begin, start), min(end, start + size)


def kv_heads(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Returns an iterator of (batch_idx, head_kv_idx) over kv heads, empty if no query sees a key."""
    begin, end = problem.mask.row_range(0, problem.seqlen_k)
    return iter(np.ndindex(problem.batch, problem.heads_kv) if begin < end else ())


def query_blocks(
    problem: Problem, q: Array, batch_idx: int, head_kv_idx: int, block_q: int | None = None
) -> Iterator[QueryBlock]:
    """Yields the query blocks of one kv head, without rows that see no key."""
    group = problem.heads_q // problem.heads_kv
    dtype = accumulator(problem)
    for begin, end in spans(*problem.mask.row_range(0, problem.seqlen_k), block_q or max(16, BLOCK_ROWS // group)):
        rows = q[batch_idx, begin:end, head_kv_idx * group : (head_kv_idx + 1) * group]
        rows = np.ascontiguousarray(rows, dtype).reshape(-1, problem.head_dim)
        yield QueryBlock(batch_idx, head_kv_idx, group, begin, end, rows)


def key_tiles(
    problem: Problem,
    block: QueryBlock,
    k: Array,
    v: Array,
    block_k: int | None = None,
    mod_scores: ModScores | None = None,
    rows_are_finite: bool = True,
) -> Iterator[Tile]:
    """Yields the tiles that at least one query of the block sees. All other keys are hidden from the block.

    rows_are_finite: True if the block's other factors, beside k and v, are finite.
    """
    mask, dtype = problem.mask, accumulator(problem)
    full_begin, full_end = mask.full_range(block.begin, block.end)
    for begin, end in spans(*mask.key_range(block.begin, block.end), block_k or BLOCK_K):
        index = block.batch_idx, block.heads, block.queries, slice(begin, end)
        if mod_scores is not None and mod_scores.sees_none(*index):
            continue
        k_tile = np.ascontiguousarray(k[block.batch_idx, begin:end, block.head_kv_idx], dtype)
        v_tile = np.ascontiguousarray(v[block.batch_idx, begin:end, block.head_kv_idx], dtype)
        s = block.q @ k_tile.T
        s *= problem.softmax_scale
        if problem.options.softcap:
            s /= problem.options.softcap
            np.tanh(s, out=s)
            s *= problem.options.softcap
        mod_tile = None
        if mod_scores is not None:
            mod_tile = mod_scores.change(mod_scores.indices(problem, *index), block.unfold(s))
        if begin < full_begin or full_end < end:
            visible = mask.visible(np.arange(block.begin, block.end), np.arange(begin, end))
            np.copyto(block.unfold(s), -np.inf, where=~visible[:, None, :])
        # In all tiles, as the NaN and infinities of a row must not depend on the tile boundaries.
        is_finite = rows_are_finite and all(np.isfinite(x).all() for x in (k_tile, v_tile))
        masked = None if is_finite else np.isneginf(s)
        yield Tile(begin, end, s, k_tile, v_tile, k.dtype, mod_tile, masked)


def by_tiles(
    start: Callable[[int, int, np.dtype[Any]], State],
    update: Callable[[State, Tile], State],
    finish: Callable[[State], tuple[Array, Array]],
) -> Callable[..., tuple[Array, Array]]:
    """Returns the forward pass of an online algorithm, built from its first state, its step and its result.

    `start(rows, head_dim_v, dtype)` returns the first state, `update(state, tile)` the next one, and `finish(state)`
    returns o (rows, head_dim_v) and lse (rows,).
    """

    def forward(
        problem: Problem,
        q: Array,
        k: Array,
        v: Array,
        *,
        block_q: int | None = None,
        block_k: int | None = None,
        on_tile: OnTile | None = None,
        mod_scores: ModScores | None = None,
    ) -> tuple[Array, Array]:
        """Returns `(out, lse)`: out (b, sq, hq, dv) in out_dtype, lse (b, hq, sq).

        `on_tile(block, tile, state)` is called with every tile after its update.
        """
        dtype = accumulator(problem)
        out, lse = no_results(problem, q, v)
        if mod_scores is not None and mod_scores.sinks is not None:
            lse[...] = mod_scores.sinks[:, None]
        with np.errstate(all="ignore"):  # visible NaN and inf reach the result without a warning
            for batch_idx, head_kv_idx in kv_heads(problem):
                for block in query_blocks(problem, q, batch_idx, head_kv_idx, block_q):
                    state, not_finite = start(len(block.q), v.shape[3], dtype), None
                    for tile in key_tiles(problem, block, k, v, block_k, mod_scores):
                        if tile.masked is not None:
                            of_tile = visible_not_finite(tile.v, tile.masked)
                            not_finite = of_tile if not_finite is None else not_finite + of_tile
                        state = update(state, tile)
                        if on_tile is not None:
                            on_tile(block, tile, state)
                    o_rows, lse_rows = finish(state)
                    if not_finite is not None:
                        o_rows = o_rows + not_finite
                    if mod_scores is not None:
                        o_rows, lse_rows = mod_scores.with_sinks(block.heads, o_rows, lse_rows)
                    out[batch_idx, block.queries, block.heads] = block.unfold(o_rows)
                    lse[batch_idx, block.heads, block.queries] = block.unfold(lse_rows).T
        return out, lse

    return forward
