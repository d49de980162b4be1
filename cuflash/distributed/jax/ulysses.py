"""Scheme "ulysses" in JAX: each device computes whole heads over the whole sequence."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..choice import kv_copies
from ..shapes import heads_of_bias
from .call import Call, attend, packed


def by_ulysses(call: Call, q: Any, k: Any, v: Any, sinks: Any, mods: dict[str, Any]) -> tuple[Any, Any]:
    """Sends heads for rows, computes whole heads, and sends rows for heads."""
    layout, axis, ranks, heads_q, heads_kv = call.layout, call.axis_name, call.layout.ranks, q.shape[2], k.shape[2]
    if (copies := kv_copies(heads_q, heads_kv, ranks)) > 1:
        k, v = (jnp.repeat(x, copies, 2) for x in (k, v))
    order = layout.order
    back = np.argsort(order)
    q, k, v = (jnp.take(lax.all_to_all(x, axis, 2, 1, tiled=True), back, 1) for x in (q, k, v))
    first = lax.axis_index(axis) * (heads_q // ranks)
    options: dict[str, Any] = {}
    if sinks is not None:
        options["sinks"] = lax.dynamic_slice_in_dim(sinks, first, heads_q // ranks)

    def of_heads(head: int, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        more = options | mods | {"index_offsets": (0, 0, head)}
        if "bias" in mods:
            more["bias"] = heads_of_bias(mods["bias"], slice(head, head + heads_q // ranks))
        if layout.is_packed:
            bounds = np.array(layout.cu_seqlens, np.int32)
            return packed(call, q, k, v, bounds, bounds, **more)
        window = call.window.left, call.window.right
        out, lse = attend(q, k, v, window_size=window, return_lse=True, **more, **call.options)
        return out, lse

    if mods:  # index offsets are static: a branch for each rank
        branches = [functools.partial(of_heads, rank * (heads_q // ranks)) for rank in range(ranks)]
        out, lse = lax.switch(lax.axis_index(axis), branches, q, k, v)
    else:
        out, lse = of_heads(0, q, k, v)
    out = lax.all_to_all(jnp.take(out, order, 1), axis, 1, 2, tiled=True)
    return out, lax.all_to_all(jnp.take(lse, order, 2), axis, 2, 1, tiled=True)
