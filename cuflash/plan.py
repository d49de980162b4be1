"""What would run: `Variant` (what is compiled), `Launch` (its grid) and `Plan` (launches, memory).

Pure functions of a `Problem`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from . import tiles_sm80, tiles_sm90
from .device import Device
from .errors import UnsupportedError
from .problem import ITEMSIZE, Problem
from .tiles_sm80 import BackwardTile, Tile
from .tiles_sm90 import WarpgroupTile

DTYPE_CODES = {"float16": 0, "bfloat16": 1, "float32": 2}
DTYPE_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
ALGORITHM_CODES = {"flash1": 1, "flash2": 2, "flashd": 3}
BACKWARD_OPS = ("delta", "backward", "backward_dkdv", "backward_dq", "convert")  # kernels with one parameter struct
PARAMS_BYTES = {"forward": 200, "lse": 200, "merge": 4016} | dict.fromkeys(BACKWARD_OPS, 408)
WARPGROUP_PARAMS_BYTES = 768
MAX_GRID = 2**31 - 1
PORTABLE_THREADS = 256
DELTA_ROWS = 32  # of a block of the delta kernel
ACC_ROWS = 16  # of a tile of the accumulators
ACC_OF_THREAD = 16  # elements that a thread of the convert kernel owns
# Heads whose key blocks start longest first under a mask; what they read and add to stays in L2 (kernels_cu/TUNING.md).
HEADS_TOGETHER = 16
L2_BYTES = 32 * 2**20  # of keys and values of heads whose query blocks start longest first on Hopper
WAVES = 2  # of blocks that a GPU needs to be filled evenly
STATS_ROWS = 128  # the largest block_q


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel: everything that changes its code, and nothing that comes with the data."""

    op: str
    source: str  # below kernels_cu/
    arch: str
    dtype: str
    out_dtype: str
    algorithm: str = "flash2"
    tile: Tile | BackwardTile | WarpgroupTile | None = None
    softcap: bool = False  # of warpgroups: scores are capped; other kernels look at their arguments

    @property
    def name(self) -> str:
        """Kernel symbol, cubin file, test id and benchmark row."""
        parts = [self.op, self.source.split("/")[0], DTYPE_SHORT[self.dtype]]
        if self.tile is not None:
            dims = f"d{self.tile.head_dim}"
            if self.tile.head_dim_v not in (0, self.tile.head_dim):
                dims += f"x{self.tile.head_dim_v}"
            parts += [dims, f"q{self.tile.block_q}", f"k{self.tile.block_k}", f"s{self.tile.stages}"]
        if self.algorithm != "flash2":
            parts.append(self.algorithm)
        if self.softcap:
            parts.append("softcap")
        if self.out_dtype != self.dtype:
            parts.append(f"out_{DTYPE_SHORT[self.out_dtype]}")
        return "_".join(parts)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block."""
        return 0 if self.tile is None else self.tile.smem_bytes(ITEMSIZE[self.dtype])

    @property
    def num_threads(self) -> int:
        """Threads of one block."""
        return PORTABLE_THREADS if self.tile is None else 32 * self.tile.warps

    @property
    def constants(self) -> dict[str, int | str]:
        """The macros that `common/config.cuh` reads, without their `CUFLASH_` prefix."""
        constants: dict[str, int | str] = {
            "KERNEL": self.name,
            "DTYPE": DTYPE_CODES[self.dtype],
            "OUT_DTYPE": DTYPE_CODES[self.out_dtype],
            "ALGORITHM": ALGORITHM_CODES[self.algorithm],
            "PARAMS_BYTES": PARAMS_BYTES[self.op],
            "SMEM_BYTES": self.smem_bytes,
            "WARPS": self.num_threads // 32,
        }
        if self.tile is not None:
            constants |= self.tile.constants
        if isinstance(self.tile, WarpgroupTile):
            constants |= {"SOFTCAP": int(self.softcap), "PARAMS_BYTES": WARPGROUP_PARAMS_BYTES}
        return constants


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel of a plan."""

    variant: Variant
    num_blocks: int  # the grid is one-dimensional

    def __str__(self) -> str:
        return (
            f"{self.num_blocks} blocks of {self.variant.num_threads} threads, "
            f"{self.variant.smem_bytes} bytes of shared memory each"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call would launch. Memory is in bytes; `workspace_bytes` is beyond inputs and outputs."""

    kernel: str  # the main one of `launches`, or what runs in its place
    device: str
    launches: tuple[Launch, ...]  # in order; none on the CPU, and where CuPy computes
    num_q_blocks: int
    num_slices: int
    out_bytes: int
    lse_bytes: int
    workspace_bytes: int
    flops: int
    heads_together: int = 1  # whose blocks start longest first; in backward kv heads, with their splits
    counted: bool = False  # Hopper: a counter in memory hands out the tiles
    num_splits: int = 1  # backward: blocks that share a key block, each with its own query heads of the group
    workspace: tuple[int, ...] = ()  # backward: where stats and the accumulators of dq, dk and dv begin; -1 for none

    @property
    def variant(self) -> Variant | None:
        """That of the main kernel; None without launches."""
        return next((launch.variant for launch in self.launches if launch.variant.name == self.kernel), None)

    def __str__(self) -> str:
        several = len(self.launches) > 1
        lines = [f"device     {self.device}"] if several else [f"kernel     {self.kernel}", f"device     {self.device}"]
        for launch in self.launches:
            if several:
                lines.append(f"kernel     {launch.variant.name}: {launch}")
            if (tile := launch.variant.tile) is not None:
                lines.append(
                    f"tile       {tile.block_q} queries x {tile.block_k} keys, head dims padded to "
                    f"({tile.head_dim}, {tile.head_dim_v}), {tile.stages} stage(s), {tile.warps} warps"
                )
            if not several:
                lines.append(f"launch     {launch}")
        lines += [
            f"memory     out {self.out_bytes} bytes, lse {self.lse_bytes} bytes, "
            f"workspace {self.workspace_bytes} bytes",
            f"work       {self.flops} FLOPs",
        ]
        return "\n".join(lines)


def compile_arch(family: str, device: Device) -> str:
    """What `-arch` a kernel of this family is compiled for."""
    return device.arch + ("a" if family == "sm90" else "")


@lru_cache(maxsize=4096)
def plan(problem: Problem, op: str, device: Device | None, deterministic: bool = False, aligned: bool = True) -> Plan:
    """The plan of `op` ("forward", "lse", "backward") on this device; None stands for NumPy on the CPU.

    aligned: every operand starts at a multiple of 16 bytes, and out is one that TMA can write.
    """
    if device is None:
        return _host_plan(problem, op)
    if problem.dtype not in tiles_sm80.TILES:
        raise UnsupportedError(
            f"{problem.dtype} has no GPU kernel; cast to float32, bfloat16 or float16, or pass NumPy arrays"
        )
    if op == "backward":
        return _backward_plan(problem, device, deterministic)
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
    _check_grid(problem, num_blocks)
    return _one_launch(problem, op, device, Launch(variant, num_blocks), num_q_blocks, num_slices)


def _warpgroup_tile(problem: Problem, op: str, device: Device) -> WarpgroupTile | None:
    """The tile of the Hopper kernels for this problem; None where they do not apply."""
    begin, end = problem.mask.key_range(0, problem.seqlen_q)
    if (
        device.capability != (9, 0)
        or ITEMSIZE[problem.dtype] != 2
        or problem.algorithm != "flash2"
        or begin == end
        or not all(map(tiles_sm90.allows_tma, problem.operand_shapes, problem.strides))
    ):
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
    _check_grid(problem, num_tiles)
    full, together = problem.mask.is_full, 1
    if not full:
        # why: blocks of other heads take the same queries at about the same time, and read the keys that these see.
        keys = min(problem.seqlen_k, problem.mask.hi - problem.mask.lo + tile.block_q)
        head_bytes = 2 * keys * (problem.head_dim + problem.head_dim_v) * problem.heads_kv
        while 2 * together <= heads and 2 * together * head_bytes <= L2_BYTES * problem.heads_q:
            together *= 2
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
        out_bytes=_out_bytes(problem, op),
        lse_bytes=4 * math.prod(problem.lse_shape),
        workspace_bytes=0,
        flops=problem.flops,
    )


def _check_grid(problem: Problem, num_blocks: int) -> None:
    if num_blocks > MAX_GRID:
        raise UnsupportedError(
            f"batch {problem.batch} x heads {problem.heads_q} x seqlens {problem.seqlen_q} and {problem.seqlen_k} "
            f"need {num_blocks} blocks; a launch has at most {MAX_GRID}. Split the batch into several calls."
        )


def _backward_plan(problem: Problem, device: Device, deterministic: bool) -> Plan:
    """delta, then dk and dv with dq added up in float32, then dq converted; or, without atomics, dq by itself."""
    dims = ITEMSIZE[problem.dtype], problem.head_dim, problem.head_dim_v, device
    tile = tiles_sm80.choose(tiles_sm80.BACKWARD[problem.dtype], *dims)
    dq_tile = tiles_sm80.choose(tiles_sm80.DQ[problem.dtype], *dims)
    if tile is None or dq_tile is None:
        raise UnsupportedError(
            f"head dims ({problem.head_dim}, {problem.head_dim_v}) in {problem.dtype} have no backward tile on "
            f"{device.name} ({device.arch}, {device.smem_per_block} bytes of shared memory a block); 1 to 256 are "
            "supported. Pass NumPy arrays (numpy.asarray, cupy.asnumpy, .cpu())."
        )

    def variant(op: str, source: str, tile: Tile | BackwardTile | None = None) -> Variant:
        out_dtype = problem.out_dtype if op == "delta" else problem.dtype
        return Variant(op, source, compile_arch("sm80", device), problem.dtype, out_dtype, tile=tile)

    heads, heads_kv = problem.batch * problem.heads_q, problem.batch * problem.heads_kv
    num_q_blocks = -(-problem.seqlen_q // (dq_tile if deterministic else tile).block_q)
    num_k_blocks = -(-problem.seqlen_k // tile.block_k) * heads_kv
    # why: not when deterministic, or dk and dv would depend on the batch and on the GPU.
    splits = 1 if deterministic else _num_splits(problem, num_k_blocks, device.num_sms * tile.blocks_per_sm)
    # The workspace in floats: stats, and the accumulators in whole tiles of rows.
    rows_q, rows_k = (-(-seqlen // ACC_ROWS) * ACC_ROWS for seqlen in (problem.seqlen_q, problem.seqlen_k))
    parts = [2 * heads * stats_rows(problem), 0 if deterministic else heads * rows_q * tile.head_dim]
    parts += [heads_kv * splits * rows_k * dim if splits > 1 else 0 for dim in (tile.head_dim, tile.head_dim_v)]
    threads = parts[1] // ACC_OF_THREAD + (parts[2] + parts[3]) // (splits * ACC_OF_THREAD)

    launches = [Launch(variant("delta", "portable/delta.cu"), heads * stats_rows(problem) // DELTA_ROWS)]
    if deterministic:
        launches += [
            Launch(variant("backward_dkdv", "sm80/backward.cu", replace(tile, with_dq=False)), num_k_blocks),
            Launch(variant("backward_dq", "sm80/backward_dq.cu", dq_tile), heads * num_q_blocks),
        ]
    else:
        launches += [
            Launch(variant("backward", "sm80/backward.cu", tile), num_k_blocks * splits),
            Launch(variant("convert", "portable/convert.cu"), -(-threads // PORTABLE_THREADS)),
        ]
    _check_grid(problem, max(launch.num_blocks for launch in launches))
    begins = [4 * sum(parts[:n]) for n in range(4)]
    return Plan(
        kernel=launches[1].variant.name,
        device=device.name,
        launches=tuple(launches),
        num_q_blocks=num_q_blocks,
        num_slices=1,
        out_bytes=_out_bytes(problem, "backward"),
        lse_bytes=0,
        workspace_bytes=4 * sum(parts),
        flops=flops(problem, "backward"),
        heads_together=1 if problem.mask.is_full else HEADS_TOGETHER,
        num_splits=splits,
        workspace=tuple(begin if part else -1 for begin, part in zip(begins, parts, strict=True)),
    )


def _num_splits(problem: Problem, num_k_blocks: int, resident: int) -> int:
    """Among how many blocks the query heads of a kv head are shared out: as many as fill the GPU some times over.

    A block of keys takes all heads of its group, so that dk and dv stay in registers; with few keys most of the GPU
    would idle. The accumulators this costs are those of few keys: they stay under twice WAVES waves of blocks.
    """
    group = problem.heads_q // problem.heads_kv
    wanted = min(group, -(-WAVES * resident // max(num_k_blocks, 1)))
    return -(-group // -(-group // wanted))  # each takes as many heads as any other, but perhaps the last


def stats_rows(problem: Problem) -> int:
    """Queries of a head in the workspace of backward, which holds whole tiles of every kernel."""
    return -(-problem.seqlen_q // STATS_ROWS) * STATS_ROWS


def _host_plan(problem: Problem, op: str) -> Plan:
    return Plan(
        kernel=f"reference_{op}_{problem.algorithm}",
        device="cpu",
        launches=(),
        num_q_blocks=0,
        num_slices=1,
        out_bytes=_out_bytes(problem, op),
        lse_bytes=0 if op == "backward" else (8 if problem.dtype == "float64" else 4) * math.prod(problem.lse_shape),
        workspace_bytes=0,
        flops=flops(problem, op),
    )


def _standard_plan(problem: Problem, op: str, device: Device) -> Plan:
    scores = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    return replace(_host_plan(problem, op), kernel="cupy_standard", device=device.name, workspace_bytes=2 * 4 * scores)


def flops(problem: Problem, op: str) -> int:
    """Of the products over the visible pairs; one that a kernel makes twice counts once."""
    # why: backward makes five products, of head_dim s, dq and dk, of head_dim_v dp and dv.
    if op != "backward":
        return problem.flops
    return problem.flops * (3 * problem.head_dim + 2 * problem.head_dim_v) // (problem.head_dim + problem.head_dim_v)


def _out_bytes(problem: Problem, op: str) -> int:
    if op == "lse":
        return 0
    if op == "backward":
        rows_q = problem.batch * problem.seqlen_q * problem.heads_q * problem.head_dim
        rows_k = problem.batch * problem.seqlen_k * problem.heads_kv * (problem.head_dim + problem.head_dim_v)
        return ITEMSIZE[problem.dtype] * (rows_q + rows_k)
    return ITEMSIZE[problem.out_dtype] * math.prod(problem.out_shape)
