"""Calls of `append_kv` and their expected results, computed position by position and pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cuflash

from .cases import numpy_dtype
from .layouts import host, identical
from .oracle import Array, demand

Arguments = dict[str, Any]
WRITTEN = "k_cache", "v_cache"
PLACES = ("rows", "indexed", "pages of 1", "pages of 3", "pages of 16")
ROTATIONS: dict[str, Arguments] = {
    "none": {},
    "halves": {"rotary_dim": 12},
    "pairs": {"rotary_dim": 12, "rotary_interleaved": True},
    "wide": {"rotary_dim": 16, "wide": True},
}


def drawn(
    dtype: str = "float32",
    place: str = "rows",
    *,
    lengths: tuple[int, ...] = (0, 7, 20),
    new: int | tuple[int, ...] = 5,
    queries: int | tuple[int, ...] | None = None,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 8),
    capacity: int = 33,
    positions: int = 60,
    rotary_dim: int = 0,
    wide: bool = False,
    first_row: int = 0,
    **flags: Any,
) -> Arguments:
    """Returns NumPy arguments of a call, with caches full of NaN.

    new, queries: rows of each sequence; a tuple for packed rows. Queries exist only if rows are rotated, by default as
    many as new keys. first_row: packed rows before the first sequence, 0 to 3; host arrays must have none.
    """
    rng, batch, kind = np.random.default_rng(0), len(lengths), numpy_dtype(dtype)
    arguments: Arguments = {"seqused_k": np.array(lengths, "i4"), **flags}
    pool = batch, capacity
    if place == "indexed":
        pool = batch + 2, capacity
        arguments["cache_batch_idx"] = rng.permutation(pool[0])[:batch].astype("i4")
    elif place != "rows":
        page_size = int(place.removeprefix("pages of "))
        max_pages = -(-capacity // page_size)
        pool = batch * max_pages + 3, page_size
        arguments["page_table"] = rng.permutation(pool[0])[: batch * max_pages].reshape(batch, max_pages).astype("i4")
    for name, dim in zip(WRITTEN, dims, strict=True):
        arguments[name] = nothing((*pool, heads[1], dim), kind)

    def add(names: str, counts: int | tuple[int, ...], heads: int, dims: tuple[int, ...]) -> None:
        rows: tuple[int, ...] = (batch, counts) if isinstance(counts, int) else (sum(counts) + 3,)
        if not isinstance(counts, int):  # first_row rows before the first sequence, 3 - first_row after the last one
            arguments[f"cu_seqlens_{names[0]}"] = first_row + np.cumsum([0, *counts], dtype="i4")
        arguments.update(
            {x: rng.standard_normal((*rows, heads, d)).astype(kind) for x, d in zip(names, dims, strict=True)}
        )

    add("kv", new, heads[1], dims)
    if rotary_dim:
        add("q", new if queries is None else queries, heads[0], dims[:1])
        angles = rng.uniform(-3, 3, (positions, rotary_dim // 2))
        table = np.dtype("f4") if wide else kind
        arguments |= {"rotary_cos": np.cos(angles).astype(table), "rotary_sin": np.sin(angles).astype(table)}
    return arguments


def nothing(shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns an array of NaN with all bits set."""
    memory = np.full((*shape[:-1], shape[-1] * np.dtype(dtype).itemsize), 0xFF, "u1")
    return memory.view(dtype)


def expected(call: Arguments) -> tuple[Array, ...]:
    """Returns k_cache and v_cache after the call, and the call's result if there is a q."""
    k_cache, v_cache, k, v = (call[name].copy() for name in ("k_cache", "v_cache", "k", "v"))
    num_pages, page_size = k_cache.shape[:2]
    table, cached = call.get("page_table"), call.get("cache_batch_idx")
    capacity = page_size * (1 if table is None else table.shape[1])
    q_out: Any = np.zeros_like(call["q"]) if "q" in call else None
    for b, length in enumerate(call["seqused_k"].tolist()):
        used = min(max(length, 0), capacity)
        for i, row in enumerate(rows_of(call, "k", b)):
            position = used + i
            if position >= capacity:
                continue
            slot, offset = position // page_size, position % page_size
            page = table[b, slot] if table is not None else b if cached is None else cached[b]
            if 0 <= page < num_pages:
                k_cache[page, offset] = turned(k[row], position, call)
                v_cache[page, offset] = v[row]
        for i, row in enumerate(rows_of(call, "q", b) if q_out is not None else ()):
            position = used if call.get("q_same_position") else used + i
            q_out[row] = turned(call["q"][row], position, call)
    return (k_cache, v_cache) if q_out is None else (k_cache, v_cache, q_out)


def rows_of(call: Arguments, name: str, b: int) -> list[Any]:
    """Returns the indices of sequence b's rows of k (and v) or q."""
    rows, bounds = len(call[name]), call.get(f"cu_seqlens_{name}")
    if bounds is None:
        return [(b, i) for i in range(call[name].shape[1])]
    begin, end = (min(max(int(bound), 0), rows) for bound in bounds[b : b + 2])
    return list(range(begin, end))


def turned(heads: Array, position: int, call: Arguments) -> Array:
    """Returns one row of all heads, rotated at its position."""
    cos, sin = call.get("rotary_cos"), call.get("rotary_sin")
    if cos is None or sin is None or position >= len(cos):
        return heads
    wide = np.float64 if heads.dtype == np.float64 else np.float32
    out, pairs = heads.copy(), cos.shape[1]
    for j in range(pairs):
        first, second = (2 * j, 2 * j + 1) if call.get("rotary_interleaved") else (j, pairs + j)
        x, y = heads[:, first].astype(wide), heads[:, second].astype(wide)
        c, s = cos[position, j].astype(wide), sin[position, j].astype(wide)
        out[:, first] = (x * c - y * s).astype(heads.dtype)
        out[:, second] = (x * s + y * c).astype(heads.dtype)
    return out


def in_library(call: Arguments, make: Callable[[Array], Any], **layouts: Callable[[Any], Any]) -> Arguments:
    """Returns the call with its arrays in another library, and named arrays in another layout."""
    arguments = {name: make(x) if isinstance(x, np.ndarray) else x for name, x in call.items()}
    return arguments | {name: layout(arguments[name]) for name, layout in layouts.items() if name in arguments}


def check(call: Arguments, xp: Any, **layouts: Callable[[Any], Any]) -> None:
    """Calls `append_kv` and compares all bits of its results; its inputs must be unchanged."""
    arguments = in_library(call, xp.asarray, **layouts)
    before = {name: x.copy() for name, x in arguments.items() if hasattr(x, "copy")}
    results = expected(call)
    result = cuflash.append_kv(**arguments)
    demand((result is None) == ("q" not in call), "append_kv returns rows of q if, and only if, it is given some")
    got = arguments["k_cache"], arguments["v_cache"], *([] if result is None else [result])
    demand(identical(map(dense, got), results), "caches or rows of q differ from the expected ones, bit for bit")
    read = before.keys() - {"k_cache", "v_cache"}
    same = identical([dense(arguments[name]) for name in read], [dense(before[name]) for name in read])
    demand(same, "append_kv changed an array that it reads")


def dense(x: Any) -> Array:
    """Returns a contiguous array in host memory."""
    return np.ascontiguousarray(host(x))
