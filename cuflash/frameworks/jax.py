"""Attention for JAX: `attention` works eagerly and under jit, grad, vmap, scan, checkpoint and shard_map.

    from cuflash.frameworks.jax import attention
    gradient = jax.jit(jax.grad(lambda q, k, v: attention(q, k, v, causal=True).sum()))

`dot_product_attention` is the same function with the name and the arguments of the one in `jax.nn`.
"""

from __future__ import annotations

import functools
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ProblemError, UnsupportedError
from ..problem.array_spec import ArraySpec
from ..problem.operands import FORWARD
from ..problem.options import Options, WindowSize, check_flag, check_scale
from ..problem.problem import Problem
from .xla_handlers import Shape, Static
from .xla_primitives import backward, check_not_reduced, check_numbers, check_whole, forward


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """`cuflash.forward` as a JAX function with gradients: it returns out, or (out, lse) with return_lse.

    q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v (batch, seqlen_k, heads_kv,
    head_dim_v), or without batch, or without batch and heads; float16, bfloat16 or float32 (float64 on the CPU, if JAX
    has it enabled). out (batch, seqlen_q, heads_q, head_dim_v) has q's dtype, lse (batch, heads_q, seqlen_q) is float32
    (float64 for float64). The mask and scale arguments are those of `cuflash.forward` and static.

    Gradients are those of `cuflash.backward`, also through lse; `deterministic=True` makes them bitwise repeatable.
    They can be taken once, in reverse mode. To use several devices, call this in `jax.shard_map`, with q, k and v split
    alike over batch or heads; under jit alone each device would gather whole arrays. On the CPU it runs in NumPy.

    Raises ProblemError, UnsupportedError and CompileError as `cuflash.forward` does, while the call is traced or
    lowered. A program that `jax.export` wrote runs only in a process that has imported this module.
    """
    arrays = _arrays(q=q, k=k, v=v)
    options = Options(softmax_scale, causal, window_size, diagonal_offset, softcap, deterministic=deterministic)
    with_lse = check_flag("return_lse", return_lse)
    return _attention(_static(arrays, options), with_lse, *_varying_alike(arrays))


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention` on cuflash: query (B, T, N, H), key and value (B, S, K, H), or all without B.

    is_causal and local_window_size, which is (left, right) or one number for both, are aligned top-left, as in jax.nn.
    return_residual gives (out, lse): lse is (B, T, N) in query's dtype, and no gradient flows through it. A query that
    sees no key has out 0, where jax.nn gives the mean of value.

    Raises UnsupportedError for bias, mask, sequence lengths and implementation; other errors are those of `attention`.
    """
    ways = {
        "bias": (bias, "leave it out"),
        "mask": (mask, "say it by is_causal and local_window_size"),
        "query_seq_lengths": (query_seq_lengths, "cut query to its length"),
        "key_value_seq_lengths": (key_value_seq_lengths, "cut key and value to their length"),
        "implementation": (implementation, "leave it None, as there is one alone"),
    }
    for name, (given, way) in ways.items():
        if given is not None:
            raise UnsupportedError(f"cuflash has no {name}; {way}, or call jax.nn.dot_product_attention")
    arrays = _arrays(query=query, key=key, value=value)
    if arrays[0].ndim not in (3, 4):
        raise ProblemError(f"query has shape {arrays[0].shape}; give (B, T, N, H) or (T, N, H)")
    if scale is not None:
        check_scale("scale", scale)
    check_flag("is_causal", is_causal)
    with_lse = check_flag("return_residual", return_residual)
    out = attention(
        *arrays,
        softmax_scale=scale,
        causal=is_causal,
        window_size=_window(local_window_size),
        diagonal_offset=0,
        return_lse=with_lse,
    )
    if not with_lse:
        return out
    out, lse = out
    return out, jax.lax.stop_gradient(jnp.swapaxes(lse, -1, -2).astype(out.dtype))


def _window(local_window_size: Any) -> tuple[Any, Any]:
    """Keys on the left and on the right, None for an open side. why not -1: jax.nn ends before the diagonal then."""
    given = local_window_size
    try:
        left, right = (given, given) if given is None or isinstance(given, Integral) else given
    except (TypeError, ValueError):
        left = right = given
    for side in (left, right):
        if side is not None and (isinstance(side, bool) or not isinstance(side, Integral)):
            raise ProblemError(
                f"local_window_size={given!r} is neither a number of keys nor a pair of them, (left, right); give "
                "integers >= 0, or None for open"
            )
        if side is not None and side < 0:
            raise UnsupportedError(f"local_window_size={given!r}: give numbers of keys >= 0, or None for open")
    return left, right


def _arrays(**named: Any) -> tuple[Any, ...]:
    """The checked operands as JAX arrays or tracers; NumPy arrays are put on JAX's device."""
    arrays = []
    for name, array in named.items():
        if not isinstance(array, (jax.Array, np.ndarray)):
            raise ProblemError(f"{name} is a {type(array).__name__}; give a JAX or NumPy array")
        if isinstance(array, np.ndarray):
            array = jnp.asarray(array)
        check_numbers(name, array.shape)
        check_whole(name, array)
        arrays.append(array)
    return tuple(arrays)


def _static(arrays: tuple[Any, ...], options: Options) -> Static:
    """Checks a call; returns everything but its arrays."""
    asked = tuple(x.shape for x in arrays), tuple(x.dtype for x in arrays), options.key()
    try:
        try:
            return _judged(*asked)
        except TypeError:  # an argument cannot be hashed, so that the result cannot be cached
            return _judged.__wrapped__(*asked)
    except ProblemError as error:
        axes = jax.sharding.get_abstract_mesh().manual_axes
        if not axes:
            raise
        raise ProblemError(f"{error}. The shapes are of one shard, over {', '.join(map(str, axes))}") from None


@functools.lru_cache(maxsize=4096)
def _judged(shapes: tuple[Shape, ...], dtypes: tuple[Any, ...], options: tuple[Any, ...]) -> Static:
    """`options` is `Options.key()`, which begins with the options and keeps 1 and True apart."""
    specs = [ArraySpec.dense(shape, str(dtype), library="jax") for shape, dtype in zip(shapes, dtypes, strict=True)]
    return Static.of(Problem.of(FORWARD, specs, options[0]))


def _varying_alike(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Under shard_map, marks all arrays as varying over the same mesh axes; JAX sums gradients over the added axes."""
    types = [jax.typeof(x) for x in arrays]
    # why: JAX up to 0.9 calls the axes `vma`.
    varying = [frozenset(t.vma if hasattr(t, "vma") else t.manual_axis_type.varying) for t in types]
    axes = frozenset().union(*varying)
    alike = tuple(
        x if own == axes else jax.lax.pcast(x, tuple(sorted(axes - own)), to="varying")
        for x, own in zip(arrays, varying, strict=True)
    )
    for name, x in zip("qkv", alike, strict=True):
        check_not_reduced(name, x)
    return alike


# The function with gradients. Inside it lse has an extra last axis of length 1, so that all arrays have one rank.


def _call(static: Static, with_lse: bool, q: Any, k: Any, v: Any) -> Any:
    return _call_and_keep(static, with_lse, q, k, v)[0]


def _call_and_keep(static: Static, with_lse: bool, q: Any, k: Any, v: Any) -> tuple[Any, tuple[Any, ...]]:
    out, lse = forward.bind(q, k, v, static=static)
    return (out, lse[..., 0]) if with_lse else out, (q, k, v, out, lse)


def _gradients(static: Static, with_lse: bool, kept: tuple[Any, ...], given: Any) -> tuple[Any, ...]:
    q, k, v, out, lse = kept
    named = {"q": q, "k": k, "v": v, "dout": given[0] if with_lse else given, "out": out, "lse": lse}
    if with_lse:
        named["dlse"] = given[1][..., None]
    return tuple(backward.bind(*named.values(), static=static._replace(names=tuple(named))))


_with_gradients = jax.custom_vjp(_call, nondiff_argnums=(0, 1))
_with_gradients.defvjp(_call_and_keep, _gradients)
# why jit: an eager call of a custom_vjp takes 180 µs, a call of a jitted function that is already traced takes 8 µs.
_attention = jax.jit(_with_gradients, static_argnums=(0, 1))
