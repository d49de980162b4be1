"""Scheme "ring" in JAX: keys travel from device to device; in backward once more, with their gradients behind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...frameworks.jax.call import static_of
from ...frameworks.jax.primitives import backward
from ...problem.options import Options
from ..layout import Layout
from ..rectangles import Rectangle, Window, rectangles
from .call import Call, attend


def _branches(layout: Layout, step: int, window: Window) -> tuple[list[list[Rectangle]], Any]:
    """Returns the different lists of rectangles of a step of the ring, and which of them each rank has."""
    lists = [rectangles(layout, rank, (rank - step) % layout.ranks, window) for rank in range(layout.ranks)]
    lists = [[part._replace(q_index=0, k_index=0, document=0) for part in parts] for parts in lists]
    different: list[list[Rectangle]] = []
    for parts in lists:
        if parts not in different:
            different.append(parts)
    return different, np.array([different.index(parts) for parts in lists], np.int32)


def _shifted(call: Call, arrays: Any) -> Any:
    ranks = call.layout.ranks
    to_next = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    return jax.tree.map(lambda x: lax.ppermute(x, call.axis_name, to_next), arrays)


def _at_step(call: Call, step: int, run: Callable[[list[Rectangle]], Callable[..., Any]], *arrays: Any) -> Any:
    """Runs a step of the ring with this rank's rectangles."""
    different, choice = _branches(call.layout, step, call.window)
    branches = [run(parts) for parts in different]
    if len(branches) == 1:
        return branches[0](*arrays)
    return lax.switch(jnp.asarray(choice)[lax.axis_index(call.axis_name)], branches, *arrays)


def _merged(state: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Blends two states (out, lse) in the accumulator's dtype; -inf has no weight."""
    lse = jnp.logaddexp(state[1], other[1])
    finite = jnp.where(jnp.isneginf(lse), 0, lse)

    def weighted(out: Any, part: Any) -> Any:
        return out.astype(lse.dtype) * jnp.exp(part - finite).swapaxes(1, 2)[..., None]

    return weighted(*state) + weighted(*other), lse


def _updated(x: Any, rows: slice, axis: int, new: Any) -> Any:
    """Returns x with other rows. x.at[].set() is a scatter, which in a branch ends XLA's compiler of jaxlib 0.11.2."""
    return lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), rows.start, axis)


def _ring_states(call: Call, q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    # A sink is the lse of a state whose out is 0.
    first = jnp.full(q.shape[2], -jnp.inf, wide) if sinks is None else sinks.astype(wide)
    lse = jnp.broadcast_to(first[:, None], (q.shape[0], q.shape[2], q.shape[1]))
    state = jnp.zeros((*q.shape[:3], v.shape[3]), wide), lse
    keys = k, v

    def run(parts: list[Rectangle]) -> Callable[..., Any]:
        def branch(state: Any, q: Any, keys: Any) -> Any:
            out, lse = state
            for part in parts:
                rows, (ks, vs) = slice(*part.q), (x[:, slice(*part.k)] for x in keys)
                one = attend(q[:, rows], ks, vs, return_lse=True, **part.mask(call.window), **call.options)
                some = _merged((out[:, rows], lse[..., rows]), one)
                out, lse = _updated(out, rows, 1, some[0]), _updated(lse, rows, 2, some[1])
            return out, lse

        return branch

    for step in range(call.layout.ranks):
        arriving = _shifted(call, keys) if step < call.layout.ranks - 1 else keys
        state = _at_step(call, step, run, state, q, keys)
        keys = arriving
    return state[0].astype(q.dtype), state[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_call(call: Call, q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
    return _ring_states(call, q, k, v, sinks)


def _ring_and_keep(call: Call, q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
    out, lse = _ring_states(call, q, k, v, sinks)
    return (out, lse), (q, k, v, sinks, out, lse)


def _ring_gradients(call: Call, residuals: tuple[Any, ...], cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    """Sends keys round the ring again, and the sums of their gradients behind them; memory does not grow with ranks."""
    q, k, v, sinks, out, lse = residuals
    dout, dlse = cotangents
    wide, ranks = lse.dtype, call.layout.ranks

    def run(parts: list[Rectangle]) -> Callable[..., Any]:
        def branch(sums: Any, keys: Any) -> Any:
            dq, dk, dv = sums
            for part in parts:
                rows, columns = slice(*part.q), slice(*part.k)
                some_k, some_v = (x[:, columns] for x in keys)
                grads = _gradients(call, part, q[:, rows], some_k, some_v, dout[:, rows], out[:, rows],
                                   lse[..., rows], dlse[..., rows])  # fmt: skip
                dq = _updated(dq, rows, 1, dq[:, rows] + grads[0].astype(wide))
                dk, dv = (
                    _updated(x, columns, 1, x[:, columns] + grad.astype(wide))
                    for x, grad in ((dk, grads[1]), (dv, grads[2]))
                )
            return dq, dk, dv

        return branch

    keys, sums = (k, v), tuple(jnp.zeros(x.shape, wide) for x in (q, k, v))
    for step in range(ranks):
        arriving = _shifted(call, keys) if step < ranks - 1 else keys
        dq, *key_sums = _at_step(call, step, run, sums, keys)
        sums = dq, *_shifted(call, tuple(key_sums))
        keys = arriving
    grads = [x.astype(y.dtype) for x, y in zip(sums, (q, k, v), strict=True)]
    if sinks is None:
        return *grads, None
    score_gradient = dlse - (dout.astype(wide) * out.astype(wide)).sum(-1).swapaxes(1, 2)
    weights = jnp.exp(sinks.astype(wide)[:, None] - lse)
    return *grads, (weights * score_gradient).sum((0, 2)).astype(sinks.dtype)


def _gradients(
    call: Call, part: Rectangle, q: Any, k: Any, v: Any, dout: Any, out: Any, lse: Any, dlse: Any
) -> tuple[Any, ...]:
    """Returns dq, dk and dv of a rectangle, by the lse over all keys."""
    options = Options(call.softmax_scale, softcap=call.softcap, **part.mask(call.window))
    static = static_of(("q", "k", "v"), (q, k, v), options)
    named = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse[..., None], "dlse": dlse[..., None]}
    dq, dk, dv = backward.bind(*named.values(), static=static._replace(names=tuple(named)))
    return dq, dk, dv


_ring_call.defvjp(_ring_and_keep, _ring_gradients)


def by_ring(call: Call, q: Any, k: Any, v: Any, sinks: Any, mods: dict[str, Any]) -> tuple[Any, Any]:
    """Returns (out, lse) of this device's rows. mods: empty, as a ring has none."""
    out, lse = _ring_call(call, q, k, v, sinks)
    return out, lse
