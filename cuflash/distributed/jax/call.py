"""A call on all devices, and attention over packed sequences, which several schemes compute."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ...frameworks import jax as on_device
from ..layout import Layout
from ..rectangles import Window

attend: Any = on_device.attention  # overloads do not take keywords of a dict


class Call(NamedTuple):
    """One call: everything but its arrays. Hashable, as a static argument of a custom_vjp."""

    layout: Layout
    axis_name: str
    window: Window
    softmax_scale: float | None
    softcap: float

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of `attention` that all parts of the call share."""
        return {"softmax_scale": self.softmax_scale, "softcap": self.softcap}


def packed(call: Call, q: Any, k: Any, v: Any, bounds_q: Any, bounds_k: Any, **options: Any) -> tuple[Any, Any]:
    """Returns (out, lse) of packed sequences for every element of the batch."""
    window = call.window.left, call.window.right
    results = [
        attend(*(x[b] for x in (q, k, v)), cu_seqlens_q=bounds_q, cu_seqlens_k=bounds_k, window_size=window,
                        return_lse=True, **options, **call.options)
        for b in range(q.shape[0])
    ]  # fmt: skip
    outs, lses = zip(*results, strict=True)
    return jnp.stack(outs), jnp.stack(lses)
