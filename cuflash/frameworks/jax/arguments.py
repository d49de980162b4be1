"""Arguments of the functions of JAX that cuflash takes the place of, checked and in terms of `attention`."""

from __future__ import annotations

from typing import Any

from ...errors import ProblemError, UnsupportedError
from ...mods.tracing.operand import is_integer
from ...problem.operands import INTEGERS
from .handlers import Shape
from .primitives import checked_array


def integers(name: str, array: Any, shape: Shape) -> Any:
    """An int32 array of this shape."""
    if array.shape != shape or array.dtype != INTEGERS:
        raise ProblemError(f"{name} is {array.dtype} of shape {array.shape}; give {INTEGERS} of shape {shape}")
    return array


def bias_or_mask(name: str, array: Any, lengths: Shape) -> Any:
    """A bias of floats, or a mask of bools, which may be broadcast to these lengths, or None."""
    if array is None:
        return None
    array = checked_array(name, array)
    shape, is_mask = lengths[len(lengths) - array.ndim :], name == "mask"
    fits = array.ndim in (3, 4) and all(n in (1, most) for n, most in zip(array.shape, shape, strict=True))
    if not fits or (array.dtype == bool) != is_mask:
        raise ProblemError(
            f"{name} is {array.dtype} of shape {array.shape}; give {'bools' if is_mask else 'floats'} of shape "
            f"(B, N, T, S) = {lengths}, of which any may be 1, or without B"
        )
    return array


def window_of(local_window_size: Any) -> tuple[Any, Any]:
    """Keys on the left and on the right, None for an open side. why not -1: jax.nn ends before the diagonal then."""
    window = local_window_size
    try:
        left, right = (window, window) if window is None or is_integer(window) else window
    except (TypeError, ValueError):
        left = right = window
    for side in (left, right):
        if side is not None and not is_integer(side):
            raise ProblemError(
                f"local_window_size={window!r} is neither a number of keys nor a pair of them, (left, right); give "
                "integers >= 0, or None for open"
            )
        if side is not None and side < 0:
            raise UnsupportedError(f"local_window_size={window!r}: give numbers of keys >= 0, or None for open")
    return left, right


def arrays_of(**named: Any) -> tuple[Any, ...]:
    """The checked operands as JAX arrays or tracers."""
    return tuple([checked_array(name, array) for name, array in named.items()])
