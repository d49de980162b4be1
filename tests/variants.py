"""Every kernel that plans can ask for: what is compiled, named and counted in tests."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

from cuflash.device import KNOWN, Device
from cuflash.errors import UnsupportedError
from cuflash.plan import ALGORITHM_CODES, Variant, merge_plan, plan
from cuflash.problem import ITEMSIZE, ArraySpec, Problem
from cuflash.tiles_sm80 import TILES

DTYPES = tuple(TILES)


def variant_of(op: str, dtype: str, head_dim: int, head_dim_v: int, device: Device, **arguments: str) -> Variant | None:
    """The variant that this device gets for a problem of these head dims; None where it has none."""
    if op == "merge":
        return merge_plan(dtype, (1, 8, 1, head_dim), device).variant
    q, v = (ArraySpec.dense((1, 8, 1, dim), dtype) for dim in (head_dim, head_dim_v))
    problem = Problem.of(q, q, v if op == "forward" else None, **arguments)  # type: ignore[arg-type]
    try:
        return plan(problem, op, device).variant
    except UnsupportedError:
        return None


@cache
def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant for `arch`, as a GPU with the shared memory of any known one gets it: all rows."""
    found: dict[Variant, None] = {}
    for known, dtype in product(KNOWN.values(), DTYPES):
        device = replace(KNOWN[arch], smem_per_block=known.smem_per_block, smem_per_sm=known.smem_per_sm)
        # Head dims at which the choice of a tile can change: those of a row, and the next one.
        dims = {t.head_dim for t in TILES[dtype]} | {t.head_dim_v * t.max_slices for t in TILES[dtype]}
        dims = {dim + step for dim in dims for step in (0, 1)} | {1}
        out_dtypes = (dtype, "float32") if ITEMSIZE[dtype] == 2 else (dtype,)
        made = [variant_of("merge", dtype, 64, 64, device)]
        for head_dim in sorted(dims):
            made.append(variant_of("lse", dtype, head_dim, 1, device))
            for head_dim_v, algorithm, out_dtype in product(sorted(dims), ALGORITHM_CODES, out_dtypes):
                arguments = {"algorithm": algorithm, "out_dtype": out_dtype}
                made.append(variant_of("forward", dtype, head_dim, head_dim_v, device, **arguments))
        found |= dict.fromkeys(variant for variant in made if variant is not None)
    return tuple(found)
