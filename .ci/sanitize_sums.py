"""Calls of sanitize.py that add to float32 arrays: two parts of the keys, whose second backward takes delta."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import cuflash
from cuflash.planning import tiles_sm80, tiles_sm90
from cuflash.testing.cases import Case

CUTS = 0, 170, 340  # of the keys
MANY_QUERIES = max(tile.min_queries for tile in tiles_sm90.BACKWARD) + 8
BOUNDS = {"cu_seqlens_q": (0, 20, 20, 65), "cu_seqlens_k": (0, 100, 130, 170)}  # packed sequences are one part


def sums(xp: Any, deterministic: bool, turned: Callable[[Any], Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields names and calls; each returns all sums. xp: the array library. turned: changes the strides of q."""
    ways = [*itertools.product(tiles_sm80.TILES, (48, 64, 128, 256, 33), (False, True), (65,))]
    ways += [(dtype, 128, False, MANY_QUERIES) for dtype in ("float16", "bfloat16")]
    for dtype, dim, packed, queries in ways:
        if dtype != "float32" or dim <= 128:
            arguments = _arguments(xp, dtype, dim, packed, queries, turned)
            name = f"sums {dtype} {dim}{' packed' * packed} {queries}"
            yield f"{name} forward", partial(_forward, xp, *arguments)
            yield f"{name} backward", partial(_backward, xp, *arguments, deterministic)


def _arguments(
    xp: Any, dtype: str, dim: int, packed: bool, queries: int, turned: Callable[[Any], Any]
) -> tuple[Any, ...]:
    """Returns q, k, v; the keywords of each part of the keys; and float32 arrays for out, lse, dq, dk and dv."""
    heads = (1, 1) if queries == MANY_QUERIES else (4, 2)
    case = Case("sums", 1, queries, 340, *heads, dim, dim, dtype)
    q, k, v = (xp.asarray(x) for x in case.arrays())
    floats = [xp.empty(x.shape, "float32") for x in (q, q, k, v)]
    floats.insert(1, xp.empty((1, heads[0], queries), "float32"))
    q = turned(q)
    if packed:
        q, k, v, *floats = (x[0] for x in (q, k, v, *floats))
        keywords = {name: xp.asarray(np.array(bounds, np.int32)) for name, bounds in BOUNDS.items()}
        return (q, k, v), [((slice(None),), keywords)], floats
    parts = [slice(a, b) for a, b in itertools.pairwise(CUTS)]
    return (q, k, v), [((slice(None), part), {}) for part in parts], floats


def _forward(xp: Any, arrays: Any, parts: Any, floats: Any) -> tuple[Any, ...]:
    (q, k, v), (out, lse, *_) = arrays, floats
    out[...], lse[...] = 0.0, -xp.inf
    for place, keywords in parts:
        cuflash.forward(q, k[place], v[place], out=out, lse=lse, accumulate=True, **keywords)
    return out, lse


def _backward(xp: Any, arrays: Any, parts: Any, floats: Any, deterministic: bool) -> tuple[Any, ...]:
    (q, k, v), (out, lse, *sums) = arrays, floats
    _forward(xp, arrays, parts, floats)
    narrow = out.astype(q.dtype)
    for x in sums:
        x[...] = 0.0
    more: dict[str, Any] = {"return_delta": True}
    for place, keywords in parts:
        targets = sums[0], sums[1][place], sums[2][place]
        results = cuflash.backward(narrow, q, k[place], v[place], narrow, lse, grads_out=targets, accumulate=True,
                                   deterministic=deterministic, **keywords, **more)  # fmt: skip
        more = {"delta": results[3]} if len(results) == 4 else more
    return (*sums, more["delta"])
