"""Consecutive documents in each sequence: by a mask_mod, by its block mask, and by a packed call.

A mask_mod needs no packing, and combines with any other mask. A block mask computes once, for all layers, the empty
tiles of 64 x 64 scores. If sequences have no padding, the packed call gives equal results. It runs with each installed
array library, on a GPU if there is one. It exits with 1 if the results differ.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from every_library import Library, libraries

import cuflash
from cuflash import mods

LENGTHS = (300, 17, 130, 65)  # of the documents
SEQLEN, HEADS, HEADS_KV, HEAD_DIM = sum(LENGTHS), 4, 2, 64


def main() -> int:
    """Compares the three ways, forward and backward, with each library."""
    rng = np.random.default_rng(0)
    shapes = ((1, SEQLEN, heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS))
    arrays = [rng.standard_normal(shape).astype("float16") for shape in shapes]
    return max([compared(library, arrays) for library in libraries()])


def compared(library: Library, arrays: list[Any]) -> int:
    """Compares the three ways with one library; returns 1 if they differ, else 0."""
    q, k, v, dout = (library.of_numpy(x) for x in arrays)
    offsets = library.of_numpy(np.cumsum((0, *LENGTHS), dtype="int32"))
    document = mods.document(offsets)
    # If the captured array changes, a new block mask is needed. Batch and heads of 1 serve all.
    block_mask = cuflash.create_block_mask(document, 1, 1, SEQLEN, SEQLEN, like=q)
    print(f"{library.name}: {block_mask}")

    ways: dict[str, dict[str, Any]] = {
        "mask_mod": {"mask_mod": document},
        "block_mask": {"block_mask": block_mask},
        "packed": {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets},
    }
    results = {}
    for name, way in ways.items():
        of_q, of_k, of_v, of_out = ((x[0] if name == "packed" else x) for x in (q, k, v, dout))
        out, lse = cuflash.forward(of_q, of_k, of_v, causal=True, return_lse=True, **way)
        gradients = cuflash.backward(of_out, of_q, of_k, of_v, out, lse, causal=True, **way)
        results[name] = [library.to_numpy(x).astype(float).reshape(-1) for x in (out, *gradients)]
    worst = 0.0
    for name in ("mask_mod", "block_mask"):
        pairs = zip(results[name], results["packed"], strict=True)
        error = max(float(abs(x - y).max() / abs(y).max()) for x, y in pairs)
        print(f"  {name}: differs from the packed call by {error:.1e}")
        worst = max(worst, error)
    return int(not worst < 4e-3)


if __name__ == "__main__":
    sys.exit(main())
