"""Attention of structure prediction: rows of a matrix of pairs share a learned bias.

`triangle_attention` is the forward call. `backward` returns the gradients, also of the bias: rows are the batch, the
bias is broadcast, and its gradient is already summed over rows. It runs with each installed array library, on a GPU if
there is one. It exits with 1 if a result is wrong.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from every_library import Library, libraries

import cuflash

ROWS, HEADS, SEQLEN, HEAD_DIM = 6, 4, 96, 32


def main() -> int:
    """Compares outputs and the gradient of the bias with whole matrices, for each library."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, ROWS, HEADS, SEQLEN, HEAD_DIM)).astype("float32") for _ in range(4))
    bias = rng.standard_normal((1, HEADS, SEQLEN, SEQLEN)).astype("float32")
    mask = rng.random((1, ROWS, SEQLEN)) < 0.8
    mask[0, 0] = False  # a row that sees no key: its outputs and gradients are 0
    exact = by_matrices(*(x[0].astype(float) for x in (q, k, v, dout, bias, mask)))
    arrays = [q, k, v, dout, bias, mask]
    return max([compared(library, arrays, exact) for library in libraries()])


def compared(library: Library, arrays: list[Any], exact: tuple[Any, Any]) -> int:
    """Compares one library with the exact results; returns 1 if a result is wrong, else 0."""
    q, k, v, dout, bias, mask = (library.of_numpy(x) for x in arrays)
    results = cuflash.triangle_attention(q, k, v, bias, mask)
    _dq, _dk, _dv, dbias = gradients(dout, q, k, v, bias, mask)
    pairs = zip((results[0], dbias[0]), exact, strict=True)
    errors = [float(abs(library.to_numpy(x) - y).max() / abs(y).max()) for x, y in pairs]
    print(f"{library.name}: errors of out {errors[0]:.1e}, dbias {errors[1]:.1e}")
    return int(not max(errors) < 1e-4)


def gradients(dout: Any, q: Any, k: Any, v: Any, bias: Any, mask: Any) -> tuple[Any, ...]:
    """Returns gradients of q, k, v and of the bias, which is summed over all rows of one matrix in float32."""
    dout, q, k, v = (x[0].swapaxes(1, 2) for x in (dout, q, k, v))  # (rows, seqlen, heads, head_dim), without a copy
    visible = mask[0]

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return visible[b, k_idx]

    call: dict[str, Any] = {"bias": bias, "mask_mod": mask_mod}
    out, lse = cuflash.forward(q, k, v, return_lse=True, **call)
    dq, dk, dv, (dbias,) = cuflash.backward(dout, q, k, v, out, lse, captured_grads=(bias,), **call)
    return *(x.swapaxes(1, 2)[None] for x in (dq, dk, dv)), dbias


def by_matrices(q: Any, k: Any, v: Any, dout: Any, bias: Any, mask: Any) -> tuple[Any, Any]:
    """Returns out and the gradient of the bias, written out in float64."""
    s = np.einsum("rhid,rhjd->rhij", q, k) / np.sqrt(HEAD_DIM) + bias
    p = np.exp(s - s.max(axis=3, keepdims=True)) * mask[:, None, None]
    p /= np.maximum(p.sum(axis=3, keepdims=True), 1e-30)
    out = np.einsum("rhij,rhjd->rhid", p, v)
    dp = np.einsum("rhid,rhjd->rhij", dout, v)
    ds = p * (dp - (dout * out).sum(axis=3, keepdims=True))
    return out, ds.sum(axis=0)


if __name__ == "__main__":
    sys.exit(main())
