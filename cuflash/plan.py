"""What would run: the plans of forward, lse and merges, and the way to all. Pure functions of a `Problem`."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from . import tiles_sm80, tiles_sm90
from .device import Device
from .errors import UnsupportedError
from .plan_backward import backward_plan
from .problem import ITEMSIZE, Problem
from .tiles_sm90 import WarpgroupTile
from .variant import (
    DTYPE_CODES,
    MAX_GRID,
    PORTABLE_THREADS,
    Launch,
    Plan,
    Variant,
    check_grid,
    compile_arch,
    flops,
    heads_together,
    result_bytes,
    suits_warpgroups,
)

L2_BYTES = 32 * 2**20  # of keys and values of heads whose query blocks start longest first on Hopper


@lru_cache(maxsize=4096)
def plan(problem: Problem, op: str, device: Device | None, deterministic: bool = False, aligned: bool = True) -> Plan:
    """The plan of `op` ("forward", "lse", "backward") on this device; None stands for NumPy on the CPU.

    aligned: every operand starts at a multiple of 16 bytes, and out (in backward dout) is one that TMA can address.
    """
    if device is None:
        return _host_plan(problem, op)
    if problem.dtype not in tiles_sm80.TILES:
        raise UnsupportedError(
            f"{problem.dtype} has no GPU kernel; cast to float32, bfloat16 or float16, or pass NumPy arrays"
        )
    if op == "backward":
        return backward_plan(problem, device, deterministic, aligned)
    if problem.algorithm == "standard":
        return _standard_plan(problem, op, device)
    if aligned and (tile := _warpgroup_tile(problem, op, device)) is not None:
        return _warpgroup_plan(problem, op, device, tile)
    return _tiled_plan(problem, op, device)


def merge_plan(dtype: str, shape: tuple[int, int, int, int], device: Device) -> Plan:
    """The plan of `merge_states` over outs of this 4-D shape."""
    if dtype not in DTYPE_CODES:
        raise UnsupportedError(f"{dtype} has no GPU kernel; cast to float32, bfloat16 or float16, or pass NumPy arrays")
    arch = compile_arch("portable", device)
    variant = Variant(op="merge", source="portable/merge.cu", arch=arch, dtype=dtype, out_dtype=dtype)
    batch, seqlen, heads, head_dim_v = shape
    rows = batch * seqlen * heads
    num_blocks = -(-rows * -(-head_dim_v * ITEMSIZE[dtype] // 16) // PORTABLE_THREADS)
    if num_blocks > MAX_GRID:
        raise UnsupportedError(f"outs of shape {shape} need {num_blocks} blocks; a launch has at most {MAX_GRID}")
    return Plan(
        kernel=variant.name,
        device=device.name,
        launches=(Launch(variant, num_blocks),),
        num_q_blocks=0,
        num_slices=1,
        out_bytes=ITEMSIZE[dtype] * math.prod(shape),
        lse_bytes=4 * rows,
        workspace_bytes=0,
        flops=0,
    )


def _tiled_plan(problem: Problem, op: str, device: Device) -> Plan:
    itemsize = ITEMSIZE[problem.dtype]
    rows = tiles_sm80.of_algorithm(problem.dtype, problem.algorithm)
    tile = tiles_sm80.choose(rows, itemsize, problem.head_dim, problem.head_dim_v, device)
    if tile is None:
        raise UnsupportedError(
            f"head dims ({problem.head_dim}, {problem.head_dim_v}) in {problem.dtype} have no tile on {device.name} "
            f"({device.arch}, {device.smem_per_block} bytes of shared memory a block); 1 to 256 always fit, up to 512 "
            "on sm_80, sm_90 and sm_100. Pass NumPy arrays, or algorithm='standard'."
        )
    if op == "lse":
        tile = replace(tile, head_dim_v=0, stages=2, max_slices=1, flash2_only=False)
    variant = Variant(
        op=op,
        source=f"sm80/{op}.cu",
        arch=compile_arch("sm80", device),
        dtype=problem.dtype,
        out_dtype=problem.dtype if op == "lse" else problem.out_dtype,
        algorithm=problem.algorithm if op == "forward" else "flash2",
        tile=tile,
    )
    num_q_blocks = -(-problem.seqlen_q // tile.block_q)
    num_slices = -(-problem.head_dim_v // tile.head_dim_v) if tile.head_dim_v else 1
    num_blocks = num_q_blocks * num_slices * problem.heads_q * problem.batch
    check_grid(problem, num_blocks)
    return _one_launch(problem, op, device, Launch(variant, num_blocks), num_q_blocks, num_slices)


def _warpgroup_tile(problem: Problem, op: str, device: Device) -> WarpgroupTile | None:
    """The tile of the Hopper kernels for this problem; None where they do not apply."""
    if not suits_warpgroups(problem, device):
        return None
    keys = math.inf if problem.mask.is_full else problem.mask.num_visible() / problem.seqlen_q
    return tiles_sm90.choose(op, problem.head_dim, problem.head_dim_v, keys, problem.softcap > 0.0)


def _warpgroup_plan(problem: Problem, op: str, device: Device, tile: WarpgroupTile) -> Plan:
    """As many blocks as there are multiprocessors, each with one query block after the other."""
    out_dtype = problem.dtype if op == "lse" else problem.out_dtype
    arch, capped = compile_arch("sm90", device), problem.softcap > 0.0
    variant = Variant(op, f"sm90/{op}.cu", arch, problem.dtype, out_dtype, tile=tile, softcap=capped)
    heads = problem.heads_q * problem.batch
    num_q_blocks = -(-problem.seqlen_q // tile.block_q)
    num_tiles = num_q_blocks * heads
    check_grid(problem, num_tiles)
    full, together = problem.mask.is_full, 1
    if not full:
        # why: blocks of other heads take the same queries at about the same time, and read the keys that these see.
        keys = min(problem.seqlen_k, problem.mask.hi - problem.mask.lo + tile.block_q)
        head_bytes = 2 * keys * (problem.head_dim + problem.head_dim_v) * problem.heads_kv
        together = heads_together(head_bytes, L2_BYTES * problem.heads_q, heads)
    launch = Launch(variant, min(num_tiles, device.num_sms))
    made = _one_launch(problem, op, device, launch, num_q_blocks)
    return replace(made, heads_together=together, counted=num_tiles > device.num_sms and not full)


def _one_launch(
    problem: Problem, op: str, device: Device, launch: Launch, num_q_blocks: int, num_slices: int = 1
) -> Plan:
    return Plan(
        kernel=launch.variant.name,
        device=device.name,
        launches=(launch,),
        num_q_blocks=num_q_blocks,
        num_slices=num_slices,
        out_bytes=result_bytes(problem, op),
        lse_bytes=4 * math.prod(problem.lse_shape),
        workspace_bytes=0,
        flops=problem.flops,
    )


def _host_plan(problem: Problem, op: str) -> Plan:
    return Plan(
        kernel=f"reference_{op}_{problem.algorithm}",
        device="cpu",
        launches=(),
        num_q_blocks=0,
        num_slices=1,
        out_bytes=result_bytes(problem, op),
        lse_bytes=0 if op == "backward" else (8 if problem.dtype == "float64" else 4) * math.prod(problem.lse_shape),
        workspace_bytes=0,
        flops=flops(problem, op),
    )


def _standard_plan(problem: Problem, op: str, device: Device) -> Plan:
    scores = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    return replace(_host_plan(problem, op), kernel="cupy_standard", device=device.name, workspace_bytes=2 * 4 * scores)
