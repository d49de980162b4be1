"""Every kernel once on small shapes, for compute-sanitizer: `compile` fills the cache, `run` calls the library.

A GPU gets those rows of the tile tables that suit its shared memory. The other rows are reached by telling the planner
of a smaller GPU, so one machine runs them all.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import cupy

import cuflash
from cuflash import device, jit, launch, tiles_sm80
from cuflash.bench.cases import CASES, Case
from cuflash.device import KNOWN, Device
from cuflash.errors import UnsupportedError
from cuflash.plan import Variant, merge_plan, plan

ALGORITHMS = ("flash2", "flash1", "flashd")


def devices() -> list[Device]:
    """This GPU, and as if it had the shared memory of smaller ones."""
    here = device.query(0)
    smaller = {(known.smem_per_block, known.smem_per_sm) for known in KNOWN.values()}
    return [here] + [
        replace(here, smem_per_block=block, smem_per_sm=whole)
        for block, whole in sorted(smaller, reverse=True)
        if whole < here.smem_per_sm
    ]


def tile_cases() -> Iterator[Case]:
    """For each pair of head dims in the tables: aligned and causal, then one less with a window, softcap and GQA."""
    for dtype, tiles in tiles_sm80.TILES.items():
        for d, dv in dict.fromkeys((tile.head_dim, tile.head_dim_v * tile.max_slices) for tile in tiles):
            yield Case(f"{dtype}_{d}_{dv}", 1, 131, 197, 1, 1, d, dv, dtype, causal=True)
            yield Case(f"{dtype}_{d - 1}_{dv - 1}", 1, 70, 150, 2, 1, d - 1, dv - 1, dtype, False, (90, 20), 60, 15.0)


def work() -> list[tuple[Device, Case, str]]:
    """(device, case, algorithm) of every call; a device that gets the tile of a larger one adds nothing."""
    here = device.query(0)
    calls = [(here, case, "flash2") for case in CASES]
    seen = set()
    for gpu, case in itertools.product(devices(), tile_cases()):
        # why: float16 and bfloat16 differ in single instructions, so one of them stands for both with flashd.
        for algorithm in ALGORITHMS[:2] if case.dtype == "float16" else ALGORITHMS:
            with contextlib.suppress(UnsupportedError):  # the largest head dims do not fit the smallest GPUs
                key = case.name, plan(case.problem(algorithm), "forward", gpu).variant
                if key not in seen:
                    seen.add(key)
                    calls.append((gpu, case, algorithm))
    return calls


def variants() -> list[Variant]:
    """All that `run` launches, but for the few kernels of `merge_and_views`."""
    found = set()
    for gpu, case, algorithm in work():
        found |= {plan(case.problem(algorithm), op, gpu).variant for op in ("forward", "lse")}
    found |= {merge_plan(dtype, (1, 1, 1, 64), device.query(0)).variant for dtype in tiles_sm80.TILES}
    return [variant for variant in found if variant is not None]


def run() -> None:
    """Calls forward and lse for all of `work`, then merge, and reads every result."""
    cupy.cuda.set_allocator(None)  # why: the memory pool would hide what lies just past an array from memcheck
    query = device.query
    for count, (gpu, case, algorithm) in enumerate(work()):
        device.query = lambda ordinal, gpu=gpu: gpu
        launch._launchers.clear()
        q, k, v = (cupy.asarray(x) for x in case.arrays())
        options = case.arguments()
        check(case, *cuflash.forward(q, k, v, algorithm=algorithm, return_lse=True, **options))
        if algorithm == "flash2":
            check(case, cuflash.lse(q, k, **options))
        if count % 20 == 0:
            print(f"{count}: {case.name} {algorithm}", flush=True)
    device.query = query
    launch._launchers.clear()
    merge_and_views()


def merge_and_views() -> None:
    """Merging in each dtype and alignment, slices of keys, rows that are not aligned, and results in float32."""
    for dtype, head_dim in itertools.product(tiles_sm80.TILES, (64, 33)):
        case = Case("merge", 2, 65, 40, 3, 3, head_dim, head_dim, dtype)
        q, k, v = (cupy.asarray(x) for x in case.arrays())
        states = [cuflash.forward(q, k[:, part], v[:, part], return_lse=True) for part in (slice(17), slice(17, None))]
        check(case, *cuflash.merge_states(*zip(*states, strict=True)))
        wide = [cupy.asarray(x) for x in replace(case, head_dim=head_dim + 1, head_dim_v=head_dim + 1).arrays()]
        check(case, cuflash.forward(*(x[..., 1:] for x in wide), causal=True))
        if dtype != "float32":
            check(case, cuflash.forward(q, k, v, out_dtype="float32"))


def check(case: Case, *results: Any) -> None:
    """A result is read to its end, and is no NaN."""
    for result in results:
        host = cupy.asnumpy(result).astype("float32")
        assert not (host != host).any(), f"{case.name}: NaN"


def main() -> None:
    started = time.perf_counter()
    wanted = variants()
    reached = {(variant.dtype, variant.tile) for variant in wanted}
    for dtype, tiles in tiles_sm80.TILES.items():
        for tile in tiles:
            if (dtype, tile) not in reached:
                print(f"not reached on this GPU: {dtype} {tile}")
    if sys.argv[1:] == ["compile"]:
        with ThreadPoolExecutor() as pool:
            list(pool.map(jit.cubin_path, wanted))
    elif sys.argv[1:] == ["run"]:
        run()
    else:
        sys.exit("usage: sanitize.py compile|run")
    print(f"{sys.argv[1]}: {len(wanted)} kernels, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
