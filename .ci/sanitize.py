"""Runs every kernel once on small shapes, for compute-sanitizer: `compile` fills the cache, `run` calls the library.

A GPU gets those rows of the tile tables that suit its shared memory. The other rows are reached by telling the planner
of a smaller GPU, so one machine runs them all. Hopper also runs the generic kernels, where q is read backwards, which
its own kernels cannot do. Only Hopper runs its own kernels.
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
from cuflash.bench.cases import CASES, Case
from cuflash.errors import UnsupportedError
from cuflash.planning import device, tiles_sm80, tiles_sm90
from cuflash.planning.device import KNOWN, Device
from cuflash.planning.plan import Plan
from cuflash.planning.planner import plan
from cuflash.planning.variant import Variant
from cuflash.problem.array_spec import ArraySpec
from cuflash.problem.operands import APPEND_KV, merge_op
from cuflash.problem.options import Options
from cuflash.problem.problem import Problem
from cuflash.runtime import compiler, launch

ALGORITHMS = ("flash2", "flash1", "flashd")
BACKWARD = {"backward": False, "backward_deterministic": True}  # whether each is deterministic
BACKWARDS = ", q backwards"  # appended to flash2 and to keys of BACKWARD, for the kernels that take any strides
Call = tuple[Device, Case, str]  # the GPU, and an algorithm of forward or a key of BACKWARD, perhaps with BACKWARDS


def devices() -> list[Device]:
    """This GPU, and copies of it that claim the shared memory of smaller GPUs."""
    here = device.query(0)
    smaller = {(known.smem_per_block, known.smem_per_sm) for known in KNOWN.values()}
    return [here] + [
        replace(here, smem_per_block=block, smem_per_sm=whole)
        for block, whole in sorted(smaller, reverse=True)
        if whole < here.smem_per_sm
    ]


def tile_cases() -> Iterator[Case]:
    """For each pair of head dims in the tables an aligned causal case, and one of dims - 1, window, softcap and GQA."""
    for dtype, forward in tiles_sm80.TILES.items():
        pairs = [(tile.head_dim, tile.head_dim_v * tile.max_slices) for tile in forward]
        pairs += [(t.head_dim, t.head_dim_v) for t in (*tiles_sm80.BACKWARD[dtype], *tiles_sm80.DQ[dtype])]
        for d, dv in dict.fromkeys(pairs):
            yield Case(f"{dtype}_{d}_{dv}", 1, 131, 197, 1, 1, d, dv, dtype, causal=True)
            yield Case(f"{dtype}_{d - 1}_{dv - 1}", 1, 70, 150, 2, 1, d - 1, dv - 1, dtype, False, (90, 20), 60, 15.0)


def hopper_cases() -> Iterator[Case]:
    """For each row of Hopper's tables a causal case and one of window, softcap and GQA; then cases of further kinds."""
    for dtype, tile in itertools.product(("float16", "bfloat16"), tiles_sm90.TILES):
        rows = tiles_sm90.TILES[: tiles_sm90.TILES.index(tile)]
        dims = tile.head_dim, tile.head_dim_v
        least = max((row.max_keys or 0 for row in rows if (row.head_dim, row.head_dim_v) == dims), default=0)
        name = f"{dtype}_{tile.head_dim}_{tile.head_dim_v}_{least}"
        yield Case(name, 1, 200, least + 260, 1, 1, *dims, dtype, causal=True)
        yield Case(f"{name}_w", 1, 200, least + 260, 2, 1, *dims, dtype, False, (least + 90, 20), None, 15.0)
    rows = [(tile.head_dim, tile.head_dim_v) for tile in (*tiles_sm90.BACKWARD, *tiles_sm90.ROWS)]
    for dtype, dims in itertools.product(("float16", "bfloat16"), dict.fromkeys(rows)):
        shape, name = (2, 2, *dims, dtype), f"{dtype}_{dims[0]}_{dims[1]}_gradients"
        yield Case(name, 1, 200, 300, *shape, causal=True)
        yield Case(f"{name}_w", 1, 270, 300, *shape, False, (150, 20), 10, 15.0)
        if dims[0] > 128:  # enough tiles for the rings to wrap around
            yield Case(f"{name}_long", 1, 700, 150, *shape)
    for dtype, tile in itertools.product(("float16", "bfloat16"), tiles_sm90.BACKWARD):  # rows for many queries
        for capped in (0.0, 15.0) if tile.min_queries else ():
            shape = 1, tile.min_queries + 8, 200, 1, 1, tile.head_dim, tile.head_dim_v
            yield Case(f"{dtype}_{tile.min_queries}_queries", *shape, dtype, softcap=capped)
    for causal in (False, True):  # a block of threads takes several key blocks
        heads = device.query(0).num_sms
        yield Case(f"key_blocks_{causal}", 4, 300, 520, heads, heads, 64, 64, "bfloat16", causal=causal)
    for dim in (64, 128):  # a counter hands out the tiles
        yield Case(f"counted_{dim}", 2, 70, 130, device.query(0).num_sms, 1, dim, dim, "float16", causal=True)


def plans(gpu: Device, case: Case, how: str) -> list[Plan]:
    """The plans of the library calls that `call` makes."""
    op, backwards = how.removesuffix(BACKWARDS), how.endswith(BACKWARDS)
    if op in BACKWARD:
        problems = [case.problem("backward", deterministic=BACKWARD[op])]
    elif op == "flash2":
        problems = [case.problem(op) for op in ("forward", "lse")]
    else:
        problems = [case.problem(algorithm=op)]
    return [plan(problem, gpu, ("q",) if backwards else ()) for problem in problems]


def work() -> list[Call]:
    """All calls, without those of smaller GPUs that launch the same kernels as a larger one."""
    calls = [(device.query(0), case, how) for case in CASES for how in ("flash2", *BACKWARD)]
    calls += [(device.query(0), case, how) for case in hopper_cases() for how in ("flash2", *BACKWARD)]
    for gpu, case in itertools.product(devices(), tile_cases()):
        # why: float16 and bfloat16 differ in single instructions, so one of them stands for both with flashd.
        algorithms = ALGORITHMS[:2] if case.dtype == "float16" else ALGORITHMS
        generic = [op + BACKWARDS for op in ("flash2", *BACKWARD)]
        calls += [(gpu, case, how) for how in (*algorithms, *generic, *BACKWARD)]
    found: dict[tuple[Any, ...], Call] = {}
    for gpu, case, how in calls:
        with contextlib.suppress(UnsupportedError):  # the largest head dims fit neither the smallest GPUs nor backward
            variants = [launch.variant for made in plans(gpu, case, how) for launch in made.launches]
            found.setdefault((case, how.removesuffix(BACKWARDS), *variants), (gpu, case, how))
    return list(found.values())


def variants() -> list[Variant]:
    """All kernels that `run` launches, except a few of `merge_and_views` and `append`."""
    made = [made for call in work() for made in plans(*call)]
    lse = ArraySpec.dense((1, 1, 1), "float32")
    states = [[ArraySpec.dense((1, 1, 1, 64), dtype), lse] for dtype in tiles_sm80.TILES]
    made += [plan(Problem.of(merge_op(1), specs, Options()), device.query(0)) for specs in states]
    caches = [[row] * 4 + [ArraySpec.dense((1,), "int32")] for row, _ in states]
    made += [plan(Problem.of(APPEND_KV, specs, Options()), device.query(0)) for specs in caches]
    return list({launch.variant: None for each in made for launch in each.launches})


def unreached(wanted: list[Variant]) -> list[str]:
    """Rows of the tile tables that no call uses on this GPU."""
    reached = {(variant.dtype, variant.tile, variant.softcap) for variant in wanted}
    rows: list[tuple[str, Any, bool]] = []  # dtype, row, whether scores are capped
    for dtype in tiles_sm80.TILES:
        rows += [(dtype, row, False) for row in (*tiles_sm80.TILES[dtype], *tiles_sm80.DQ[dtype])]
        rows += [(dtype, replace(row, with_dq=dq), False) for row in tiles_sm80.BACKWARD[dtype] for dq in (True, False)]
        for row, capped in itertools.product(tiles_sm90.TILES if dtype != "float32" else (), (False, True)):
            rows += [(dtype, row, capped)] if row.softcap in (None, capped) else []
            rows.append((dtype, tiles_sm90.choose("lse", row.head_dim, 0, 0.0, capped), capped))
        gradients = (*tiles_sm90.BACKWARD, *tiles_sm90.ROWS) if dtype != "float32" else ()
        for gradient, capped in itertools.product(gradients, (False, True)):
            rows += [(dtype, gradient, capped)] if gradient.softcap in (None, capped) else []
    missing = [row for row in dict.fromkeys(rows) if row not in reached]
    return [f"{dtype} {row}{', capped' if capped else ''}" for dtype, row, capped in missing]


def run() -> None:
    """Makes all calls of `work`, then merges and appends, and reads every result."""
    cupy.cuda.set_allocator(None)  # why: the memory pool would hide what lies just past an array from memcheck
    query = device.query
    for count, (gpu, case, how) in enumerate(work()):
        device.query = lambda ordinal, gpu=gpu: gpu
        launch.KEPT.clear()
        call(case, how)
        if count % 20 == 0:
            print(f"{count}: {case.name} {how}", flush=True)
    device.query = query
    launch.KEPT.clear()
    merge_and_views()
    append()


def call(case: Case, how: str) -> None:
    """Calls forward and lse, or backward for the loss |out|² / 2, to which cases with a window add |lse|² / 2."""
    q, k, v = (cupy.asarray(x) for x in case.arrays())
    options = case.arguments()
    op = how.removesuffix(BACKWARDS)
    if how != op:
        q = q[:, ::-1]
    if op not in BACKWARD:
        check(case, *cuflash.forward(q, k, v, algorithm=op, return_lse=True, **options))
        if op == "flash2":
            check(case, cuflash.lse(q, k, **options))
        return
    out, lse = cuflash.forward(q, k, v, return_lse=True, **options)
    dlse = None if case.window_size == (-1, -1) else lse.copy()
    more = options | {"dlse": dlse, "deterministic": BACKWARD[op]}
    check(case, *cuflash.backward(out.copy(), q, k, v, out, lse, **more))


def merge_and_views() -> None:
    """Merges in each dtype and alignment; calls forward on slices of keys, on unaligned rows and with float32 out."""
    for dtype, head_dim in itertools.product(tiles_sm80.TILES, (64, 33)):
        case = Case("merge", 2, 65, 40, 3, 3, head_dim, head_dim, dtype)
        q, k, v = (cupy.asarray(x) for x in case.arrays())
        states = [cuflash.forward(q, k[:, part], v[:, part], return_lse=True) for part in (slice(17), slice(17, None))]
        check(case, *cuflash.merge_states(*zip(*states, strict=True)))
        wide = [cupy.asarray(x) for x in replace(case, head_dim=head_dim + 1, head_dim_v=head_dim + 1).arrays()]
        check(case, cuflash.forward(*(x[..., 1:] for x in wide), causal=True))
        if dtype != "float32":
            out, lse = cuflash.forward(q, k, v, return_lse=True, out_dtype="float32")
            check(case, out, *cuflash.backward(q.copy(), q, k, v, out, lse))


def append() -> None:
    """Appends in each dtype, place, rotation and alignment, with lengths and pages that are not in the cache."""
    ways = itertools.product(tiles_sm80.TILES, (64, 33), ("rows", "pages", "packed"), (False, True))
    for dtype, head_dim, place, interleaved in ways:
        case = Case("append", 3, 5, 40, 4, 2, head_dim, head_dim, dtype)
        q, k_cache, v_cache = (cupy.asarray(x) for x in case.arrays())
        k, v, lengths = q[:, :, :2], q[:, :, 2:], cupy.asarray([-3, 37, 2**31 - 1], "int32")
        cos = cupy.ones((41, 16), "float32" if interleaved else q.dtype)
        told = {"q": q, "rotary_cos": cos, "rotary_sin": cos, "rotary_interleaved": interleaved}
        if place == "pages":
            k_cache, v_cache = (x.reshape(-1, 8, 2, head_dim) for x in (k_cache, v_cache))
            told["page_table"] = cupy.asarray([[0, 1, 2, 3, 4], [15, -1, 14, 13, 12], [99] * 5], "int32")
        if place == "packed":
            bounds = cupy.asarray([-1, 4, 9, 99], "int32")
            q, k, v = (cupy.ascontiguousarray(x).reshape(15, -1, head_dim) for x in (q, k, v))
            told |= {"q": q, "cu_seqlens_k": bounds, "cu_seqlens_q": bounds}
        check(case, cuflash.append_kv(k_cache, v_cache, k, v, lengths, **told), k_cache, v_cache)


def check(case: Case, *results: Any) -> None:
    """Reads all of each result, and asserts that it holds no NaN."""
    for result in results:
        host = cupy.asnumpy(result).astype("float32")
        assert not (host != host).any(), f"{case.name}: NaN"


def main() -> None:
    started = time.perf_counter()
    wanted = variants()
    missing = unreached(wanted)
    for row in missing:
        print(f"not reached on this GPU: {row}")
    if missing and device.query(0).arch == "sm_90":
        sys.exit("Hopper, with the most shared memory and kernels of its own, reaches all: add a case")
    if sys.argv[1:] == ["compile"]:
        with ThreadPoolExecutor() as pool:
            list(pool.map(compiler.cubin_path, wanted))
    elif sys.argv[1:] == ["run"]:
        run()
    else:
        sys.exit("usage: sanitize.py compile|run")
    print(f"{sys.argv[1]}: {len(wanted)} kernels, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
