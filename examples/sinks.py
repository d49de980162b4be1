"""Attention of gpt-oss: grouped heads, a window of 128 keys, and a learned sink for each head.

A sink is one more logit in the softmax of its head, without a value. It takes a fraction of the weights, so that the
weights of the keys sum to less than 1. It runs with each installed array library, on a GPU if there is one. It exits
with 1 if a result or the gradient of the sinks is wrong.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from every_library import Library, libraries

import cuflash

BATCH, SEQLEN, HEADS, HEADS_KV, HEAD_DIM = 1, 300, 8, 1, 64
WINDOW = 128  # keys that a query sees, including the key at its position


def main() -> int:
    """Compares outputs, lse and the gradient of the sinks with whole matrices, for each library."""
    rng = np.random.default_rng(0)
    shapes = ((BATCH, SEQLEN, heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS))
    arrays = [rng.standard_normal(shape).astype("float16") for shape in shapes]
    sinks = rng.normal(2.0, 1.0, HEADS).astype("float32")
    exact = by_matrices(*(x.astype(float) for x in (*arrays, sinks)))
    return max([compared(library, arrays, sinks, exact) for library in libraries()])


def compared(library: Library, arrays: list[Any], host_sinks: Any, exact: tuple[Any, ...]) -> int:
    """Compares one library with the exact results; returns 1 if a result is wrong, else 0."""
    q, k, v, dout = (library.of_numpy(x) for x in arrays)
    sinks = library.of_numpy(host_sinks)
    call: dict[str, Any] = {"causal": True, "window_size": (WINDOW - 1, 0), "sinks": sinks}
    out, lse = cuflash.forward(q, k, v, return_lse=True, **call)
    _dq, _dk, _dv, (dsinks,) = cuflash.backward(dout, q, k, v, out, lse, captured_grads=(sinks,), **call)
    results = (library.to_numpy(x) for x in (out, lse, dsinks))
    errors = [float(abs(x - y).max() / abs(y).max()) for x, y in zip(results, exact, strict=True)]
    print(f"{library.name}: errors of out {errors[0]:.1e}, lse {errors[1]:.1e}, dsinks {errors[2]:.1e}")
    return int(not max(errors) < 4e-3)


def by_matrices(q: Any, k: Any, v: Any, dout: Any, sinks: Any) -> tuple[Any, Any, Any]:
    """Returns out, lse and the gradient of the sinks, written out in float64."""
    k, v = (np.repeat(x, HEADS // HEADS_KV, axis=2) for x in (k, v))
    s = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(HEAD_DIM)
    i, j = np.ogrid[:SEQLEN, :SEQLEN]
    s = np.where((i - WINDOW < j) & (j <= i), s, -np.inf)
    column = np.broadcast_to(sinks[:, None, None], (BATCH, HEADS, SEQLEN, 1))
    with_sink = np.concatenate([s, column], axis=3)
    largest = with_sink.max(axis=3, keepdims=True)
    p = np.exp(with_sink - largest)
    total = p.sum(axis=3, keepdims=True)
    p /= total
    out = np.einsum("bhij,bjhd->bihd", p[..., :-1], v)
    # A sink has no value: its gradient comes only from the weight that it takes from the keys.
    delta = (dout * out).sum(axis=3).swapaxes(1, 2)
    return out, (largest + np.log(total))[..., 0], -(p[..., -1] * delta).sum(axis=(0, 2))


if __name__ == "__main__":
    sys.exit(main())
