"""Memory layouts of arrays, and copies to host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np


def host(x: Any) -> Any:
    """Returns a NumPy or CuPy array in host memory."""
    return x.get() if hasattr(x, "get") else x


def identical(got: Any, expected: Any) -> bool:
    """Returns True if all arrays are equal bit by bit (NaN equals itself)."""
    return all(host(x).tobytes() == host(y).tobytes() for x, y in zip(got, expected, strict=True))


def laid_out(
    x: Any, axis_order: Any = range(4), steps: Any = (1,) * 4, before: Any = (0,) * 4, after: Any = None,
    fill: float = np.nan,
) -> Any:  # fmt: skip
    """Returns x, of NumPy or CuPy, in another memory layout with `fill` around x and between its elements.

    axis_order, steps: for each axis its order in memory, and its step. before, after: for each axis the number of extra
    elements before and after x; `after` defaults to `before`. If x has fewer axes, the last entries count.
    """
    sides = before[-x.ndim :], (after or before)[-x.ndim :]
    axes = list(zip(x.shape, steps[-x.ndim :], *sides, strict=True))
    order = np.argsort(axis_order[-x.ndim :])
    lengths = [begin + n * abs(step) + end for n, step, begin, end in axes]
    # np.full_like creates an array in the library of x.
    memory = np.full_like(x, fill, order="C", shape=tuple(lengths[axis] for axis in order))
    forwards = tuple(slice(begin, begin + n * abs(step), abs(step)) for n, step, begin, _ in axes)
    view = memory.transpose(np.argsort(order).tolist())[forwards]
    view = view[tuple(slice(None, None, -1 if step < 0 else 1) for step in steps[-x.ndim :])]
    view[...] = x
    return view


heads_first = partial(laid_out, axis_order=(0, 2, 1, 3))
fortran = partial(laid_out, axis_order=(3, 2, 1, 0))
reversed_keys = partial(laid_out, steps=(1, -1, 1, 1))
reversed_dim = partial(laid_out, steps=(1, 1, 1, -1))
every_second = partial(laid_out, steps=(1, 1, 1, 2))
wide_rows = partial(laid_out, before=(0, 0, 0, 8))  # rows begin at multiples of 16 bytes
odd_rows = partial(laid_out, after=(0, 0, 0, 1))
odd_start = partial(laid_out, before=(0, 0, 0, 1), after=(0, 0, 0, 15))  # with the strides of wide_rows
even_start = partial(laid_out, before=(0, 0, 0, 2), after=(0, 0, 0, 14))  # in 16 bits where 32 are aligned


def one_head_for_all(x: Any) -> Any:
    """Returns x with the memory of head 0 for all heads."""
    return np.broadcast_to(x[:, :, :1], x.shape)


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "dense": laid_out,
    "heads_first": heads_first,
    "reversed_keys": reversed_keys,
    "reversed_dim": reversed_dim,
    "every_second": every_second,
    "fortran": fortran,
    "odd_start": odd_start,
    "even_start": even_start,
    "one_head_for_all": one_head_for_all,
}
WRITABLE = tuple(name for name in LAYOUTS if name != "one_head_for_all")


def is_clean_beside(view: Any) -> bool:
    """Returns True if memory beside a view of `laid_out` still holds NaN. Overwrites the view with NaN."""
    view[...] = np.nan
    whole = view
    while whole.base is not None:
        whole = whole.base
    return bool(np.isnan(host(whole)).all())
