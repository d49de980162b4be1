"""Programs for NVRTC in tests: every variant that plans can have, and conditions about values of the host."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from cuflash.errors import UnsupportedError
from cuflash.planning import tiles_sm90
from cuflash.planning.device import DEVICES, Device
from cuflash.planning.plan import Plan
from cuflash.planning.planner import plan
from cuflash.planning.tiles_sm80 import BACKWARD, DQ, TILES
from cuflash.planning.variant import ALGORITHM_CODES, Variant
from cuflash.problem.array_spec import ArraySpec
from cuflash.problem.dtypes import DTYPES as ROWS
from cuflash.problem.operands import APPEND_KV, OPS, VARLEN_OPS, DeltaRole, merge_op, summing
from cuflash.problem.options import Options
from cuflash.problem.problem import Problem
from cuflash.runtime import compiler

DTYPES = tuple(TILES)
# Numbers of keys on both sides of each limit at which the choice of an sm90 tile changes.
KEYS = (8, *sorted({tile.max_keys + 9 for tile in tiles_sm90.TILES if tile.max_keys is not None}))
# Arguments for which the tallest tile takes less time than tiles of 128 rows.
TALL = {"queries": 190, "group": 89, "keys": KEYS[-1] + 190}

# Arguments with which thread blocks of sm90 backward share the query heads of a key block.
SHARED_HEADS = {"group": 16, "queries": 512}
SHARED_ROWS = SHARED_HEADS | {"keys": 128 * 100}  # for backward_dq_dkv: almost a wave of key blocks


def plan_of(op: str, dtype: str, head_dim: int, head_dim_v: int, device: Device, deterministic: bool = False,
            *, aligned: bool = True, **more: Any) -> Plan | None:  # fmt: skip
    """Returns this device's plan of `problem_of` these arguments; None if it has no kernel."""
    problem = problem_of(op, dtype, head_dim, head_dim_v, deterministic, **more)
    try:
        return plan(problem, device, () if aligned else ("q",))
    except UnsupportedError:
        return None


@cache
def problem_of(
    op: str,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    deterministic: bool = False,
    *,
    queries: int = 8,
    keys: int = 8,
    group: int = 1,
    packed: bool = False,
    paged: bool = False,
    used: bool = False,
    shared: bool = False,
    splits: int = 0,
    accumulate: bool = False,
    delta: DeltaRole | None = None,
    **arguments: Any,
) -> Problem:
    """Returns a causal problem of these head dims and keys.

    group: query heads of the kv head. packed: True for packed rows. used: True to give seqused_k. paged: True to give
    seqused_k and a page_table. shared: True if thread blocks may split keys, as with `used`. splits: num_splits then,
    or 0. accumulate, delta: as of `summing`.
    """
    if op == "merge":
        return merge_of(dtype, head_dim)
    if op == "append_kv":
        return append_of(dtype, head_dim, head_dim_v)
    shapes = (queries, group, head_dim), (keys, 1, head_dim), (keys, 1, head_dim_v)
    specs = [ArraySpec.contiguous((1, *shape), dtype) for shape in shapes]
    if op == "backward":  # dout, then out in out_dtype
        specs += [specs[0]._replace(shape=(1, queries, group, head_dim_v)).with_packed_strides()] * 2
        specs[4] = specs[4]._replace(dtype=arguments.pop("out_dtype", None) or dtype)
    options = Options(**{"causal": True, "deterministic": deterministic} | arguments)
    if op == "forward":  # usually one split, as many keys of one head would be split among thread blocks
        options = options._replace(num_splits=splits if used or shared else 1)
    inputs: list[ArraySpec | None] = [*specs[:2]] if op == "lse" else [*specs]
    if packed or used or paged:
        bounds, one, table = (ArraySpec.contiguous(shape, "int32") for shape in ((2,), (1,), (1, 1)))
        for number, x in enumerate(inputs):
            if packed and x is not None and not (paged and number in (1, 2)):
                inputs[number] = x._replace(shape=x.shape[1:], strides=x.strides[1:])
        inputs += [None] * (len(OPS[op].inputs) - len(inputs))
        if op == "backward":
            inputs[5] = ArraySpec.contiguous((group, queries), "float32")
        inputs += [bounds if packed else None, bounds if packed and not paged else None, None]
        inputs += [one if used or paged else None, *([table] if paged else [])]
    plain = (VARLEN_OPS if packed or used or paged else OPS)[op]
    if delta == "takes":
        inputs += [None] * (len(plain.inputs) - len(inputs))
        inputs.append(ArraySpec.contiguous((group, queries) if packed else (1, group, queries), "float32"))
    return Problem.from_specs(summing(plain, accumulate, delta) if accumulate or delta else plain, inputs, options)


def merge_of(dtype: str, head_dim: int, count: int = 1, rows: int = 8) -> Problem:
    """Returns the problem of merging `count` states of one head."""
    out, lse = ArraySpec.contiguous((1, rows, 1, head_dim), dtype), ArraySpec.contiguous((1, 1, rows), "float32")
    return Problem.from_specs(merge_op(count), [out] * count + [lse] * count, Options())


def append_of(
    dtype: str,
    head_dim: int = 64,
    head_dim_v: int = 64,
    *,
    rows: int = 1,
    queries: int = 0,
    pairs: int = 0,
    page_size: int = 0,
    wide: bool = False,
    **flags: bool,
) -> Problem:
    """Returns the problem of `rows` new rows for each of two sequences, in a cache of 40 keys or in pages."""
    pool = (9, page_size) if page_size else (2, 40)
    shapes = {"k_cache": (*pool, 2, head_dim), "v_cache": (*pool, 2, head_dim_v), "k": (2, rows, 2, head_dim),
              "v": (2, rows, 2, head_dim_v), "q": (2, queries, 4, head_dim)}  # fmt: skip
    specs = {name: ArraySpec.contiguous(shape, dtype) for name, shape in shapes.items() if name != "q" or queries}
    specs["seqused_k"] = ArraySpec.contiguous((2,), "int32")
    if page_size:
        specs["page_table"] = ArraySpec.contiguous((2, 5), "int32")
    if pairs:
        specs["rotary_cos"] = specs["rotary_sin"] = ArraySpec.contiguous((50, pairs), "float32" if wide else dtype)
    options = Options(**flags)
    return Problem.from_specs(APPEND_KV, [specs.get(operand.name) for operand in APPEND_KV.inputs], options)


def is_hopper(device: Device) -> bool:
    """Returns True if the device runs sm90 kernels and has the shared memory that they need."""
    return device.capability == (9, 0) and device.smem_per_block >= DEVICES["sm_90"].smem_per_block


def ways(device: Device, of_hopper: bool, op: str = "forward") -> list[dict[str, Any]]:
    """Returns arguments of calls that may have different kernels: sm90 kernels if `of_hopper`, else sm80 kernels."""
    packed = {"packed": True}
    few = [{"used": True}] if op == "forward" else []
    if not of_hopper:
        return [way | ({"aligned": False} if is_hopper(device) else {}) for way in ({}, packed, *few)]
    lengths: list[dict[str, Any]] = [*({"keys": keys} for keys in KEYS), TALL]
    if op == "backward":
        long = [tile.min_queries for tile in tiles_sm90.BACKWARD if tile.min_queries]
        lengths = [{"queries": queries, "causal": False} for queries in long]
        lengths += [SHARED_HEADS | {"queries": queries + 8, "diagonal_offset": 4} for queries in long]
        lengths += [{}, SHARED_HEADS, SHARED_ROWS]
    capped = [{"softcap": cap} for cap in (0.0, 30.0)]
    several = [packed | cap for cap in capped]
    if op != "backward":  # more queries than decode kernels take
        pages = {"paged": False}, {"paged": True}
        several_splits, many_rows = {"used": True, "splits": 2}, {"used": True, "queries": 16, "group": 4}
        decoding = *few, several_splits, many_rows, packed | {"shared": True}
        several += [way | cap | page for way, cap, page in product(decoding, capped, pages) if op == "forward"]
        shapes = {}, {"queries": 300, "keys": 300}, {"queries": 300, "keys": 2000}
        several += [packed | cap | shape | page for cap, shape, page in product(capped, shapes, pages)]
    return [*several, *(length | cap for length, cap in product(lengths, capped))]


def variant_of(op: str, *arguments: Any, **more: Any) -> Variant:
    """Returns the variant of `op` in the plan of its call; delta, convert and backward_* belong to backward."""
    of_backward = op in ("delta", "convert") or op.startswith("backward")
    call, fixed = ("backward", (False, True)) if of_backward else (op, (False,))
    plans = [plan_of(call, *arguments, deterministic=deterministic, **more) for deterministic in fixed]
    launches = [launch for each in plans if each is not None for launch in each.launches]
    return next(launch.variant for launch in launches if launch.variant.op == op)


def limits(dtype: str, of_hopper: bool) -> list[int]:
    """Returns the largest head dims of each tile."""
    of_any_gpu = *TILES[dtype], *BACKWARD[dtype], *DQ[dtype]
    rows = (*tiles_sm90.TILES, *tiles_sm90.BACKWARD, *tiles_sm90.DQ_DKV) if of_hopper else of_any_gpu
    dims = {row.head_dim for row in rows} | {row.head_dim_v for row in rows}
    if not of_hopper:
        dims |= {row.head_dim_v * row.max_slices for row in TILES[dtype]}
    return sorted(dims)


def edges(dtype: str, of_hopper: bool) -> list[int]:
    """Returns head dims at which the choice of a tile can change: 1, the head dims of each row, and these plus 1."""
    return sorted({dim + step for dim in limits(dtype, of_hopper) for step in (0, 1)} | {1})


def head_dims(dtype: str, of_hopper: bool) -> list[tuple[int, int]]:
    """Returns pairs of head dims that have every tile.

    A tile is chosen by upper limits of both head dims, so pairs of limits have all tiles of even head dims. Odd ones
    are misaligned: each edge stands for those of its range.
    """
    pairs = product(limits(dtype, of_hopper), repeat=2)
    return list(dict.fromkeys([*pairs, *((dim, dim) for dim in edges(dtype, of_hopper))]))


@cache
def variants(arch: str) -> tuple[Variant, ...]:
    """Returns every variant for `arch`, for GPUs with the shared memory of any known one, so that all rows occur."""
    distinct: dict[Variant, None] = {}
    sizes = dict.fromkeys((gpu.smem_per_block, gpu.smem_per_sm) for gpu in DEVICES.values())
    for (block, whole), dtype in product(sizes, DTYPES):
        device = replace(DEVICES[arch], smem_per_block=block, smem_per_sm=whole)
        out_dtypes = (dtype, "float32") if ROWS[dtype].itemsize == 2 else (dtype,)
        plans = [plan_of(op, dtype, 64, 64, device) for op in ("merge", "append_kv")]
        algorithms = product((name for name in ALGORITHM_CODES if name != "flash2"), (False, True))
        others = [{"algorithm": algorithm, "packed": packed} for algorithm, packed in algorithms]
        for of_hopper in (False, True) if ROWS[dtype].itemsize == 2 and is_hopper(device) else (False,):
            forward, backward = ways(device, of_hopper), ways(device, of_hopper, "backward")
            pairs = head_dims(dtype, of_hopper)
            dims = dict.fromkeys(dim for dim, _ in pairs)
            plans += [plan_of("lse", dtype, dim, 1, device, **way) for dim, way in product(dims, forward)]
            for (dim, dim_v), out_dtype in product(pairs, out_dtypes):
                call = dtype, dim, dim_v, device
                for way in [*forward, *(others if not of_hopper else ())]:
                    plans.append(plan_of("forward", *call, out_dtype=out_dtype, **way))
                for deterministic, way in product((False, True), backward):
                    plans.append(plan_of("backward", *call, deterministic, out_dtype=out_dtype, **way))
            if arch == "sm_90":  # sm80 kernels, too: other architectures differ in the stores alone
                plans += sums(dtype, dims, device, of_hopper)
        distinct |= dict.fromkeys(launch.variant for each in plans if each is not None for launch in each.launches)
    return tuple(distinct)


def sums(dtype: str, dims: list[int], device: Device, of_hopper: bool) -> list[Plan | None]:
    """Returns plans of calls that add to float32 arrays, or take or return delta. dims: head dims."""
    aligned: dict[str, Any] = {"aligned": of_hopper or not is_hopper(device)}
    pairs = [*((dim, dim) for dim in dims if dim in (64, 128, 256 if of_hopper else 192))]
    pairs += [(32, 32), (96, 96), (192, 128)] if of_hopper else []
    plans = []
    for (dim, dim_v), packed in product(pairs, (False, True)):
        call = dtype, dim, dim_v, device
        plans.append(plan_of("forward", *call, accumulate=True, packed=packed, **aligned))
        for deterministic in (False, True):
            plans.append(plan_of("backward", *call, deterministic, accumulate=True, packed=packed, **aligned))
    if of_hopper and 128 in dims:
        long = {"queries": max(tile.min_queries for tile in tiles_sm90.BACKWARD), "causal": False}
        plans.append(plan_of("backward", dtype, 128, 128, device, accumulate=True, **long))
    roles: tuple[DeltaRole, ...] = "takes", "returns"
    for role, accumulate, packed in product(roles, (False, True), (False, True)):
        more = {"delta": role, "accumulate": accumulate, "packed": packed, **aligned}
        plans.append(plan_of("backward", dtype, 64, 64, device, **more))
    return plans


def failed_conditions(program: str, conditions: Iterable[str]) -> list[str]:
    """Returns the conditions on functions and structs of kernels_cu that fail as static_assert below the program."""
    nvrtc, lines = pytest.importorskip("cupy").cuda.nvrtc, program.splitlines()
    try:
        options = compiler.options(plan(merge_of("float16", 64), DEVICES["sm_80"]).launches[0].variant)
    except UnsupportedError as error:
        pytest.skip(f"needs NVRTC: {error}")
    lines += [f'static_assert({condition}, "");' for condition in conditions]
    compiled = nvrtc.createProgram("\n".join(lines), "conditions.cu", (), ())
    try:
        nvrtc.compileProgram(compiled, (*options, f"-I{compiler.source_root()}"))
        return []
    except nvrtc.NVRTCError:
        log = nvrtc.getProgramLog(compiled)
        numbers = re.findall(r"conditions\.cu\((\d+)\): error: static assertion failed", log)
        assert len(numbers) == log.count("): error") > 0, log[:2000]
        return [lines[int(number) - 1].removeprefix("static_assert(").removesuffix(', "");') for number in numbers]
    finally:
        nvrtc.destroyProgram(compiled)


def sampled(variants: list[Any], seed: str | None) -> list[Any]:
    """Returns one in 16 of the variants, at least one, determined by the seed; all variants without a seed."""
    return variants if seed is None else random.Random(seed).sample(variants, -(-len(variants) // 16))
