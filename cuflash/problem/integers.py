"""Checks the values of integers, lengths of sequences and positions of keys, where the host may read them.

Kernels clamp lengths and skip keys in missing pages or rows. That keeps memory safe, but wrong integers would silently
give rows of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ProblemError
from .operands import INTEGERS
from .problem import Problem
from .seqlen_info import OPEN

Values = np.ndarray[Any, Any]
MAX_SHOWN = 8  # elements of an array in an error


def integer_names(problem: Problem) -> list[str]:
    """Returns the names of a call's arrays of integers."""
    pairs = zip(problem.op.inputs, problem.specs, strict=False)
    return [operand.name for operand, spec in pairs if operand.dtype == INTEGERS and spec is not None]


def check_integers(problem: Problem, arrays: Mapping[str, Any]) -> None:
    """Validates the values of a call's integers. arrays: NumPy arrays by name; only arrays of integers are read.

    cu_seqlens begin at 0, never decrease and end within the rows. Beside seqused of that side, they may begin anywhere.
    seqused are at most the rows of the sequences. They may be anything for keys that no query or new key needs. Keys
    that a query may see, and keys that `append_kv` writes, lie in pages or rows that exist.
    """
    values = {name: np.asarray(arrays[name], np.int64) for name in integer_names(problem)}
    info = problem.seqlen_info
    if not values or info is None:
        return
    batch, cache = problem.batch, "k"
    is_append = problem.op.name == "append_kv"
    for side, rows in (("q", info.rows_q), ("k", info.rows_k)):
        if (bounds := values.get(f"cu_seqlens_{side}")) is not None:
            _check_bounds(side, bounds, rows, may_begin_late=f"seqused_{side}" in values and not is_append)
    queries, keys = (_room(side, batch, rows, values) for side, rows in (("q", info.rows_q), ("k", info.rows_k)))
    if is_append:
        cache, new = "k_cache", keys
        num_pages, page_size = problem.spec(cache).shape[:2]
        room = np.full(batch, _capacity(values, page_size))
        begins = _used("seqused_k", values["seqused_k"], room, queries + new > 0)
        ends = begins + new
        if (b := _first((ends > room) & (new > 0))) is not None:
            raise ProblemError(
                f"sequence {b} has {begins[b]} used keys and {new[b]} new ones, but its cache has room for {room[b]}; "
                "give a larger cache or more pages, or fewer new keys"
            )
    else:
        num_pages, page_size = info.batch_k, info.rows_k
        if "page_table" in values:
            keys = np.full(batch, _capacity(values, page_size))
        if "seqused_q" in values:
            queries = _used("seqused_q", values["seqused_q"], queries)
        if "seqused_k" in values:
            keys = _used("seqused_k", values["seqused_k"], keys, queries > 0)
        begins, ends = _seen(problem, np.minimum(queries, problem.seqlen_q), np.minimum(keys, problem.seqlen_k))
    _check_places(values, begins, ends, page_size, num_pages, cache)


def _first(is_bad: Values) -> int | None:
    """Returns the index of the first bad sequence, None if all are good."""
    numbers = np.flatnonzero(is_bad)
    return int(numbers[0]) if len(numbers) else None


def _text(values: Values) -> str:
    shown = ", ".join(map(str, values[:MAX_SHOWN].tolist()))
    return f"[{shown}{', …' if len(values) > MAX_SHOWN else ''}]"


def _check_bounds(side: str, bounds: Values, rows: int, may_begin_late: bool) -> None:
    name, falls = f"cu_seqlens_{side}", _first(np.diff(bounds) < 0)
    if bounds[0] < 0 or (bounds[0] > 0 and not may_begin_late):
        cause = f"begins with {bounds[0]}, not with 0"
    elif falls is not None:
        cause = f"decreases from {bounds[falls]} to {bounds[falls + 1]} at element {falls + 1}"
    elif bounds[-1] > rows:
        cause = f"ends with {bounds[-1]}, but {side} has {rows} rows"
    else:
        return
    hint = ""
    if bounds[0] > 0 and (bounds >= 0).all() and bounds.sum() <= rows:  # lengths in place of offsets
        hint = f" (of such lengths {_text(np.cumsum([0, *bounds]))})"
    raise ProblemError(
        f"{name} is {_text(bounds)}, which {cause}; give (batch + 1,) integers: 0, then the running sum of the lengths"
        f"{hint}"
    )


def _room(side: str, batch: int, rows: int, values: Mapping[str, Values]) -> Values:
    """Returns the number of rows of q, or of k, of each sequence, used or not."""
    bounds = values.get(f"cu_seqlens_{side}")
    return np.full(batch, rows) if bounds is None else np.diff(bounds)


def _capacity(values: Mapping[str, Values], page_size: int) -> int:
    return page_size * (values["page_table"].shape[1] if "page_table" in values else 1)


def _used(name: str, used: Values, room: Values, matters: Values | bool = True) -> Values:
    """Returns `used` if all lengths that matter are in range."""
    if (b := _first(((used < 0) | (used > room)) & matters)) is not None:
        raise ProblemError(f"{name}[{b}] is {used[b]}, but sequence {b} has {room[b]} rows; give 0 to {room[b]}")
    return used


def _seen(problem: Problem, queries: Values, keys: Values) -> tuple[Values, Values]:
    """Returns the first key of each sequence that causal and window_size show to a query, and the end of these keys."""
    assert problem.seqlen_info is not None
    first, last, from_end = problem.seqlen_info.bounds
    shift = keys - queries if from_end else np.zeros_like(keys)
    begins = np.zeros_like(keys) if first == OPEN else np.maximum(first + shift, 0)
    ends = keys if last == OPEN else np.minimum(keys, last + shift + queries)
    return begins, np.where(queries > 0, ends, 0)


def _check_places(
    values: Mapping[str, Values], begins: Values, ends: Values, page_size: int, num_pages: int, cache: str
) -> None:
    """Validates the pages, or rows of the cache, of the keys `begins … ends - 1` of each sequence."""
    is_read = begins < ends
    rows = values.get("cache_batch_idx")
    if rows is not None and (b := _first(is_read & ((rows < 0) | (rows >= num_pages)))) is not None:
        raise ProblemError(f"cache_batch_idx[{b}] is {rows[b]}, but {cache} has {num_pages} rows; give one of these")
    if (table := values.get("page_table")) is None:
        return
    numbers = np.arange(table.shape[1])
    is_used = (numbers >= (begins // page_size)[:, None]) & (numbers < -(-ends // page_size)[:, None])
    missing = np.argwhere(is_used & is_read[:, None] & ((table < 0) | (table >= num_pages)))
    if len(missing):
        b, number = missing[0].tolist()
        raise ProblemError(
            f"page_table[{b}, {number}] is {table[b, number]}, but {cache} has {num_pages} pages, and keys "
            f"{number * page_size} to {min((number + 1) * page_size, int(ends[b])) - 1} of sequence {b} lie there; "
            f"give one of these{', or seqused_k that leaves these keys out' if cache == 'k' else ''}"
        )
