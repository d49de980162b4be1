"""Arguments of JAX's functions that cuflash replaces, validated and in terms of `attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from ...errors import REFUSALS, ProblemError, UnsupportedError
from ...mods.tracing.operand import is_integer
from ...problem.foreign import renamed
from ...problem.operands import INTEGERS
from ...problem.options import Options
from .handlers import Shape
from .primitives import checked_array

Call = TypeVar("Call", bound=Callable[..., Any])
_SCALES = ("softmax_scale", "scale", "sm_scale")
# Keywords that choose kernels, of all functions of this package.
STATIC = frozenset((*Options._fields, *_SCALES, "return_lse", "is_causal", "local_window_size", "return_residual",
                    "implementation", "sliding_window", "soft_cap", "mask_value", "k_scale", "v_scale"))  # fmt: skip

# Argument names in errors of `attention`, and their names in its callers.
NAMES = {
    "dot_product_attention": {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale", "causal": "is_causal",
                              "seqused_q": "query_seq_lengths", "seqused_k": "key_value_seq_lengths",
                              "window_size": "local_window_size"},
    "ragged_paged_attention": {"kv": "kv_pages", "k": "kv_pages", "v": "kv_pages", "softmax_scale": "sm_scale",
                               "softcap": "soft_cap", "window_size": "sliding_window", "cu_seqlens_q": "cu_q_lens",
                               "seqused_k": "kv_lens", "page_table": "page_indices"},
}  # fmt: skip


def static_keywords(function: Call) -> Call:
    """Decorates a function: its error for a traced keyword that must be static says how to make it static.

    Other errors have the names of the function's arguments.
    """

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except REFUSALS as error:  # only failed calls look for tracers, which takes time
            traced = {name: x for name, x in keywords.items() if name in STATIC and _is_traced(x)}
            if not traced and function.__name__ not in NAMES:
                raise
            if not traced:
                raise renamed(error, NAMES[function.__name__]) from error.__cause__
            names, called = tuple(traced), function.__name__
            scale = ", or multiply q by it, which may be traced" if names[0] in _SCALES else ""
            raise ProblemError(
                f"{names[0]}={traced[names[0]]!r} is traced, but kernels are chosen by its value before anything runs; "
                f"make it static, by jax.jit({called}, static_argnames={names}) or, ahead of any transformation, by "
                f"functools.partial({called}, {names[0]}=value){scale}"
            ) from error

    return checked  # type: ignore[return-value]


def _is_traced(value: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value))


def is_on_host(array: Any) -> bool:
    """True if the host may read an array's values: a NumPy array, or a JAX array on the CPU that is not traced."""
    if isinstance(array, jax.core.Tracer):
        return False
    return isinstance(array, np.ndarray) or (array.platform() == "cpu" and array.is_fully_addressable)


def integers(name: str, array: Any, shape: Shape, axes: str) -> Any:
    """Returns the array if it is int32 of this shape. axes: the names of its axes."""
    if array.shape != shape or array.dtype != INTEGERS:
        raise ProblemError(f"{name} is {array.dtype} of shape {array.shape}; give {INTEGERS} of shape {shape}: {axes}")
    return array


def bias_or_mask(name: str, array: Any, lengths: Shape) -> Any:
    """Returns a bias of floats or a mask of bools, broadcastable to these lengths, or None."""
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
    """Returns the numbers of keys on the left and on the right; None for an open side.

    Negative numbers are refused: in jax.nn the window then ends before the diagonal.
    """
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
    """Returns the validated operands as JAX arrays or tracers."""
    return tuple([checked_array(name, array) for name, array in named.items()])
