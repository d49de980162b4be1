"""Kernels with scores and masks of the caller's own, in tests: those of some functions, as plans ask for them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from own_table import SMALL, alibi, document, everything, joined, relative_position, softcap, without_grads

import cuflash
from cuflash.planning.variant import Variant

# Each with the head dims that it is compiled for: ALiBi costs least, and a mask has cells.
CALLS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "alibi": (alibi, (64, 128, 256)),
    "softcap": (softcap, (64,)),
    "relative_position": (relative_position, (64,)),
    "document": (document, (128,)),
    "everything": (joined(everything), (64,)),
}
OPS: dict[str, dict[str, Any]] = {
    "forward": {},
    "lse": {},
    "backward": {},
    "deterministic": {"op": "backward", "deterministic": True},
}


@cache
def own_variants(arch: str, on_any_gpu: bool = False) -> tuple[Variant, ...]:
    """What calls of these functions launch on this GPU, or as on any GPU, where strides forbid Hopper's kernels."""
    found: dict[Variant, None] = {}
    for (name, (make, dims)), (op, more) in product(CALLS.items(), OPS.items()):
        for dim in dims[: 1 if on_any_gpu else None]:
            of = replace(SMALL, head_dim=dim, head_dim_v=dim, causal=name == "alibi")
            q, k, v = of.arrays()
            arguments, call = make(np.asarray, of), {"op": op, **more}
            grads = arguments.get("captured_grads", ())
            arguments = without_grads(arguments) | of.arguments()
            if call["op"] == "backward" and grads:
                call["captured_grads"] = grads
            arrays = (q[:, ::-1] if on_any_gpu else q, k, *(() if op == "lse" else (v,)))
            made = cuflash.plan(*arrays, **arguments, **call, device=arch)
            found |= dict.fromkeys(launch.variant for launch in made.launches)
    return tuple(variant for variant in found if variant.own is not None or variant.op in MORE)


# Kernels without functions that only such calls launch.
MORE = ("sum_tables", "sinks_gradient", "seen_counts")
