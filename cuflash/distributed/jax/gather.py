"""Scheme "gather" in JAX: each device fetches the keys that its rows see, by tables; then it computes its rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..layout import Layout
from ..lengths import with_length
from ..rectangles import Piece, Range, Window, needed_keys, pieces_of
from ..shapes import part_of_bias
from .call import Call, attend, packed


class _Tables(NamedTuple):
    """Tables of "gather" by rank: rows to send to each rank, fetched rows by key, and bounds of the pieces."""

    send: np.ndarray[Any, Any]
    keys: np.ndarray[Any, Any]
    bounds_q: np.ndarray[Any, Any]
    bounds_k: np.ndarray[Any, Any]


@functools.lru_cache(64)
def _tables(layout: Layout, window: Window) -> _Tables:
    ranks = range(layout.ranks)
    needed = [needed_keys(layout, rank, window) for rank in ranks]

    def shared(sender: int, receiver: int) -> list[Range]:
        """Returns the ranges of rows of the sequence that one rank sends to another."""
        pairs = ((span, keys) for span in layout.spans[sender] for keys in needed[receiver])
        cuts = ((max(span.begin, keys[0]), min(span.end, keys[1])) for span, keys in pairs)
        return [cut for cut in cuts if cut[0] < cut[1]]

    def rows_of(ranges: Sequence[Range]) -> Any:
        return np.concatenate([np.empty(0, np.int64), *(np.arange(*each) for each in ranges)])

    def padded(rows: list[Any], size: int, value: int = 0) -> Any:
        return np.stack([np.pad(row, (0, size - len(row)), constant_values=value) for row in rows]).astype(np.int32)

    sent = [[rows_of(shared(sender, receiver)) for receiver in ranks] for sender in ranks]
    slots = max(max(len(rows) for rows in each) for each in sent)
    local = [dict(zip(layout.indices(rank).tolist(), range(layout.num_rows(rank)), strict=True)) for rank in ranks]
    send = np.stack(
        [padded([np.array([local[s][row] for row in rows], np.int64) for rows in sent[s]], slots) for s in ranks]
    )
    keys, bounds_q, bounds_k = [], [], []
    for rank in ranks:
        slot_of = {row: s * slots + n for s in ranks for n, row in enumerate(sent[s][rank].tolist())}
        pieces = pieces_of(layout, rank, window)
        keys.append(np.array([slot_of[row] for row in rows_of([piece.keys for piece in pieces]).tolist()], np.int64))
        bounds_q.append(np.cumsum([0, *(piece.local[1] - piece.local[0] for piece in pieces)]))
        bounds_k.append(np.cumsum([0, *(piece.keys[1] - piece.keys[0] for piece in pieces)]))
    # Ranks with fewer pieces have empty ones at the end.
    count = max(map(len, bounds_q))
    bounds = ([np.pad(each, (0, count - len(each)), "edge") for each in side] for side in (bounds_q, bounds_k))
    return _Tables(send, padded(keys, max(map(len, keys))), *(np.stack(side).astype(np.int32) for side in bounds))


def by_gather(call: Call, q: Any, k: Any, v: Any, sinks: Any, mods: dict[str, Any]) -> tuple[Any, Any]:
    """Fetches the keys that this rank's rows see, by one all-to-all of padded slots; then computes its rows."""
    tables, axis = _tables(call.layout, call.window), call.axis_name
    send, keys, bounds_q, bounds_k = (jnp.asarray(table)[lax.axis_index(axis)] for table in tables)

    def fetched(x: Any) -> Any:
        slots = jnp.take(x, send.reshape(-1), 1)
        return jnp.take(lax.all_to_all(slots, axis, 1, 1, tiled=True), keys, 1)

    options = {} if sinks is None else {"sinks": sinks}
    if not mods and (call.window.is_open or call.window.right == 0):
        return packed(call, q, fetched(k), fetched(v), bounds_q, bounds_k, **options)
    # Index offsets and diagonals that do not end at the last keys are static: a branch for each rank.
    branches = [functools.partial(_by_pieces, call, rank, options | mods) for rank in range(call.layout.ranks)]
    out, lse = lax.switch(lax.axis_index(axis), branches, q, fetched(k), fetched(v))
    return out, lse


def _by_pieces(call: Call, rank: int, mods: dict[str, Any], q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Returns (out, lse) of a rank's rows, whose fetched keys follow each other by piece."""
    results, first = [], 0
    for piece in pieces_of(call.layout, rank, call.window) or [Piece((0, 0), (0, 0), 0, 0, True)]:
        rows, columns = slice(*piece.local), slice(*piece.keys)
        keys = slice(first, first + columns.stop - columns.start)
        first = keys.stop
        more = _with_length(mods, piece.seqlen)
        if "bias" in mods:
            more["bias"] = part_of_bias(mods["bias"], rows, columns)
        results.append(attend(q[:, rows], k[:, keys], v[:, keys], window_size=tuple(call.window), return_lse=True,
                                  diagonal_offset=piece.q_index - piece.k_index, index_offsets=piece.index_offsets,
                                  **more, **call.options))  # fmt: skip
    outs, lses = zip(*results, strict=True)
    return jnp.concatenate(outs, 1), jnp.concatenate(lses, 2)


def _with_length(mods: dict[str, Any], seqlen: int) -> dict[str, Any]:
    """Returns mods whose functions find the length of the document."""
    new = dict(mods)
    for name, x in mods.items():
        # Functions that take JAX's tracers alone raise errors of any type; they have no lengths.
        with contextlib.suppress(Exception):
            new |= with_length({name: x}, np.array(seqlen, np.int32))
    return new
