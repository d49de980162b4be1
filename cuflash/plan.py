"""What would run: `Variant` (what is compiled) and `Plan` (variant, grid, memory). Pure functions of a `Problem`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from . import tiles_sm80
from .device import Device
from .errors import UnsupportedError
from .problem import ITEMSIZE, Problem
from .tiles_sm80 import Tile

DTYPE_CODES = {"float16": 0, "bfloat16": 1, "float32": 2}
DTYPE_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
ALGORITHM_CODES = {"flash1": 1, "flash2": 2, "flashd": 3}
PARAMS_BYTES = {"forward": 200, "lse": 200, "merge": 4016}
MAX_GRID = 2**31 - 1
MERGE_THREADS = 256


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel: everything that changes its code, and nothing that comes with the data."""

    op: str
    source: str  # below kernels_cu/
    arch: str
    dtype: str
    out_dtype: str
    algorithm: str = "flash2"
    tile: Tile | None = None

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
        return MERGE_THREADS if self.tile is None else 32 * self.tile.warps

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
            constants |= {
                "HEAD_DIM": self.tile.head_dim,
                "HEAD_DIM_V": self.tile.head_dim_v,
                "BLOCK_Q": self.tile.block_q,
                "BLOCK_K": self.tile.block_k,
                "STAGES": self.tile.stages,
                "BLOCKS_PER_SM": self.tile.blocks_per_sm,
                "Q_IN_REGISTERS": int(self.tile.q_in_registers),
                "QK_UNROLL": self.tile.qk_unroll,
            }
        return constants


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call would launch. Memory is in bytes; `workspace_bytes` is beyond inputs and outputs."""

    kernel: str
    device: str
    variant: Variant | None
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    num_q_blocks: int
    num_slices: int
    out_bytes: int
    lse_bytes: int
    workspace_bytes: int
    flops: int

    def __str__(self) -> str:
        lines = [f"kernel     {self.kernel}", f"device     {self.device}"]
        if self.variant is not None and self.variant.tile is not None:
            tile = self.variant.tile
            lines += [
                f"tile       {tile.block_q} queries x {tile.block_k} keys, head dims padded to "
                f"({tile.head_dim}, {tile.head_dim_v}), {tile.stages} stage(s), {tile.warps} warps",
                f"launch     {math.prod(self.grid)} blocks of {math.prod(self.block)} threads, "
                f"{self.smem_bytes} bytes of shared memory each",
            ]
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
def plan(problem: Problem, op: str, device: Device | None) -> Plan:
    """The plan of `op` ("forward", "lse", "backward") on this device; None stands for NumPy on the CPU."""
    if device is None:
        return _host_plan(problem, op)
    if op == "backward":
        raise UnsupportedError(
            "backward has no GPU kernel in this version; pass NumPy arrays (numpy.asarray, cupy.asnumpy, .cpu())"
        )
    if problem.dtype not in tiles_sm80.TILES:
        raise UnsupportedError(
            f"{problem.dtype} has no GPU kernel; cast to float32, bfloat16 or float16, or pass NumPy arrays"
        )
    if problem.algorithm == "standard":
        return _standard_plan(problem, op, device)
    return _tiled_plan(problem, op, device)


def merge_plan(dtype: str, shape: tuple[int, int, int, int], device: Device) -> Plan:
    """The plan of `merge_states` over outs of this 4-D shape."""
    if dtype not in DTYPE_CODES:
        raise UnsupportedError(f"{dtype} has no GPU kernel; cast to float32, bfloat16 or float16, or pass NumPy arrays")
    arch = compile_arch("portable", device)
    variant = Variant(op="merge", source="portable/merge.cu", arch=arch, dtype=dtype, out_dtype=dtype)
    batch, seqlen, heads, head_dim_v = shape
    rows = batch * seqlen * heads
    num_blocks = -(-rows * -(-head_dim_v * ITEMSIZE[dtype] // 16) // MERGE_THREADS)
    if num_blocks > MAX_GRID:
        raise UnsupportedError(f"outs of shape {shape} need {num_blocks} blocks; a launch has at most {MAX_GRID}")
    return Plan(
        kernel=variant.name,
        device=device.name,
        variant=variant,
        grid=(num_blocks, 1, 1),
        block=(MERGE_THREADS, 1, 1),
        smem_bytes=0,
        num_q_blocks=0,
        num_slices=1,
        out_bytes=ITEMSIZE[dtype] * math.prod(shape),
        lse_bytes=4 * rows,
        workspace_bytes=0,
        flops=0,
    )


def _tiled_plan(problem: Problem, op: str, device: Device) -> Plan:
    itemsize = ITEMSIZE[problem.dtype]
    tile = tiles_sm80.choose(
        problem.dtype, itemsize, problem.head_dim, problem.head_dim_v, problem.algorithm, device
    )
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
    if num_blocks > MAX_GRID:
        raise UnsupportedError(
            f"batch {problem.batch} x heads {problem.heads_q} x seqlen_q {problem.seqlen_q} needs {num_blocks} blocks; "
            f"a launch has at most {MAX_GRID}. Split the batch into several calls."
        )
    return Plan(
        kernel=variant.name,
        device=device.name,
        variant=variant,
        grid=(num_blocks, 1, 1),
        block=(variant.num_threads, 1, 1),
        smem_bytes=variant.smem_bytes,
        num_q_blocks=num_q_blocks,
        num_slices=num_slices,
        out_bytes=_out_bytes(problem, op),
        lse_bytes=4 * math.prod(problem.lse_shape),
        workspace_bytes=0,
        flops=problem.flops,
    )


def _host_plan(problem: Problem, op: str) -> Plan:
    return Plan(
        kernel=f"reference_{op}_{problem.algorithm}",
        device="cpu",
        variant=None,
        grid=(1, 1, 1),
        block=(1, 1, 1),
        smem_bytes=0,
        num_q_blocks=0,
        num_slices=1,
        out_bytes=_out_bytes(problem, op),
        lse_bytes=(8 if problem.dtype == "float64" else 4) * math.prod(problem.lse_shape),
        workspace_bytes=0,
        flops=problem.flops,
    )


def _standard_plan(problem: Problem, op: str, device: Device) -> Plan:
    scores = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    return replace(
        _host_plan(problem, op), kernel="cupy_standard", device=device.name, workspace_bytes=2 * 4 * scores
    )


def _out_bytes(problem: Problem, op: str) -> int:
    if op == "lse":
        return 0
    if op == "backward":
        rows_q = problem.batch * problem.seqlen_q * problem.heads_q * problem.head_dim
        rows_k = problem.batch * problem.seqlen_k * problem.heads_kv * (problem.head_dim + problem.head_dim_v)
        return ITEMSIZE[problem.dtype] * (rows_q + rows_k)
    return ITEMSIZE[problem.out_dtype] * math.prod(problem.out_shape)
