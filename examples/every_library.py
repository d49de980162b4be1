"""A score_mod and a mask_mod on NumPy, CuPy, PyTorch and JAX arrays.

The functions take scalars, are traced once, and become part of the kernel; arrays that they refer to must belong to the
library of q. It runs with each installed library, on a GPU if cuflash and the library can use one, else on the CPU. It
exits with 1 if a result is wrong. Other examples of this kind import `libraries` from here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

import cuflash

SHAPE = BATCH, SEQLEN, HEADS, HEAD_DIM = 2, 200, 4, 64


class Library(NamedTuple):
    """An array library, with conversions from and to NumPy."""

    name: str
    of_numpy: Callable[[Any], Any]
    to_numpy: Callable[[Any], Any]


def libraries() -> Iterator[Library]:
    """Yields each installed array library."""
    try:
        has_gpu = cuflash.plan(SHAPE, SHAPE, SHAPE, dtype="float16").device != "cpu"
    except cuflash.UnsupportedError as error:
        print(error)
        has_gpu = False
    yield Library("NumPy on the CPU", np.asarray, np.asarray)
    if has_gpu:
        import cupy

        yield Library("CuPy on the GPU", cupy.asarray, cupy.asnumpy)
    if find_spec("torch"):
        import torch

        place = "cuda" if has_gpu and torch.cuda.is_available() else "cpu"
        name = f"PyTorch on the {'GPU' if place == 'cuda' else 'CPU'}"
        yield Library(name, lambda x: torch.tensor(x, device=place), lambda x: x.detach().cpu().numpy())
    if find_spec("jax"):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX reserves most of the GPU's memory
        import jax

        on_gpu = has_gpu and any(each.platform == "gpu" for each in jax.devices())
        device = jax.devices("gpu" if on_gpu else "cpu")[0]
        yield Library(f"JAX on the {'GPU' if on_gpu else 'CPU'}", lambda x: jax.device_put(x, device), np.asarray)


def near(strength: Any) -> Callable[..., Any]:
    """Returns a score_mod that lowers scores by distance, up to 50; each call reads `strength` (heads,)."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        distance = abs(q_idx - k_idx)
        if distance > 50:
            return score - 50 * strength[h]
        return score - distance * strength[h]

    return score_mod


def even_or_first(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    """Returns True for keys of even index, and for the first 16 keys of the batch's first sequence."""
    return (k_idx % 2 == 0) | ((b == 0) & (k_idx < 16))


def main() -> int:
    """Runs the call with each library and compares it with whole matrices in float64."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(SHAPE).astype("float16") for _ in range(3))
    strength = np.array([0.5, 0.25, 0.1, 0.0], "float32")

    b, h, i, j = np.ogrid[:BATCH, :HEADS, :SEQLEN, :SEQLEN]
    s = np.einsum("bihd,bjhd->bhij", q.astype(float), k.astype(float)) / np.sqrt(HEAD_DIM)
    s = np.where(even_or_first(b, h, i, j), s - np.minimum(abs(i - j), 50) * strength[h], -np.inf)
    p = np.exp(s - s.max(axis=3, keepdims=True))
    exact = np.einsum("bhij,bjhd->bihd", p / p.sum(axis=3, keepdims=True), v.astype(float))

    errors = []
    for library in libraries():
        arrays = [library.of_numpy(x) for x in (q, k, v)]
        out = cuflash.forward(*arrays, score_mod=near(library.of_numpy(strength)), mask_mod=even_or_first)
        errors.append(float(abs(library.to_numpy(out) - exact).max()))
        print(f"{library.name}: {type(out).__name__}, error {errors[-1]:.1e}")
    return int(not max(errors) < 4e-3)


if __name__ == "__main__":
    sys.exit(main())
