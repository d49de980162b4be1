"""What is compiled (`Variant`), launched (`Launch`) and planned for a call (`Plan`), and what all plans share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import tiles_sm90
from .device import Device
from .errors import UnsupportedError
from .problem import ITEMSIZE, Problem
from .tiles_sm80 import BackwardTile, Tile
from .tiles_sm90 import GRADIENTS, WarpgroupBackwardTile, WarpgroupRowsTile, WarpgroupTile

DTYPE_CODES = {"float16": 0, "bfloat16": 1, "float32": 2}
DTYPE_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
ALGORITHM_CODES = {"flash1": 1, "flash2": 2, "flashd": 3}
BACKWARD_OPS = ("delta", "backward", "backward_dkdv", "backward_dq", "convert")  # kernels with one parameter struct
PARAMS_BYTES = {"forward": 200, "lse": 200, "merge": 4016} | dict.fromkeys(BACKWARD_OPS, 440)
WARPGROUP_PARAMS_BYTES = {"forward": 768, "lse": 768, "backward": 1344}
WARPGROUP_PARAMS_BYTES |= {f"backward_{gradient}": 1344 for gradient in GRADIENTS}
MAX_GRID = 2**31 - 1
PORTABLE_THREADS = 256


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel: everything that changes its code, and nothing that comes with the data."""

    op: str
    source: str  # below kernels_cu/
    arch: str
    dtype: str
    out_dtype: str
    algorithm: str = "flash2"
    tile: Tile | BackwardTile | WarpgroupTile | WarpgroupBackwardTile | WarpgroupRowsTile | None = None
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
    def of_warpgroups(self) -> bool:
        """Whether it is one of Hopper's own, which want operands that TMA can address."""
        return isinstance(self.tile, (WarpgroupTile, WarpgroupBackwardTile, WarpgroupRowsTile))

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
            "PARAMS_BYTES": (WARPGROUP_PARAMS_BYTES if self.of_warpgroups else PARAMS_BYTES)[self.op],
            "SMEM_BYTES": self.smem_bytes,
            "WARPS": self.num_threads // 32,
        }
        if self.tile is not None:
            constants |= self.tile.constants
        if self.of_warpgroups:
            constants["SOFTCAP"] = int(self.softcap)
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
class SharedKeys:
    """The key blocks, counted over batch and kv heads, that would not fill Hopper's multiprocessors once more."""

    whole_blocks: int  # of the grid, which take key blocks by themselves; the others share
    first: int
    count: int
    steps: int  # query tiles of a block


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
    num_k_blocks: int = 0  # backward
    stats_rows: int = 0  # backward: queries of a head in the workspace, in whole tiles
    key_blocks: int = 1  # backward: of a head that one block takes
    shared: SharedKeys | None = None  # backward: what the blocks share that are left when all others have run
    deterministic: bool = False  # backward
    workspace: tuple[int, ...] = ()  # backward: where stats, the accumulators of dq, dk, dv and the turns begin; or -1

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


def suits_warpgroups(problem: Problem, device: Device) -> bool:
    """Whether Hopper's own kernels apply, head dims aside: 16-bit operands that TMA can address, and keys to see."""
    begin, end = problem.mask.key_range(0, problem.seqlen_q)
    return (
        device.capability == (9, 0)
        and ITEMSIZE[problem.dtype] == 2
        and problem.algorithm == "flash2"
        and begin < end
        and all(map(tiles_sm90.allows_tma, problem.operand_shapes, problem.strides))
    )


def heads_together(head_bytes: int, most_bytes: int, most: int, least: int = 1) -> int:
    """The largest power of two, up to `most`, of heads that touch up to `most_bytes`; but `least` heads or more."""
    together = 1
    while 2 * together <= most and (2 * together * head_bytes <= most_bytes or together < least):
        together *= 2
    return together


def check_grid(problem: Problem, num_blocks: int) -> None:
    """`UnsupportedError` for more blocks than a launch has."""
    if num_blocks > MAX_GRID:
        raise UnsupportedError(
            f"batch {problem.batch} x heads {problem.heads_q} x seqlens {problem.seqlen_q} and {problem.seqlen_k} "
            f"need {num_blocks} blocks; a launch has at most {MAX_GRID}. Split the batch into several calls."
        )


def flops(problem: Problem, op: str) -> int:
    """Of the products over the visible pairs; one that a kernel makes twice counts once."""
    # why: backward makes five products, of head_dim s, dq and dk, of head_dim_v dp and dv.
    if op != "backward":
        return problem.flops
    return problem.flops * (3 * problem.head_dim + 2 * problem.head_dim_v) // (problem.head_dim + problem.head_dim_v)


def result_bytes(problem: Problem, op: str) -> int:
    """Of out, or of all gradients."""
    if op == "lse":
        return 0
    if op == "backward":
        rows_q = problem.batch * problem.seqlen_q * problem.heads_q * problem.head_dim
        rows_k = problem.batch * problem.seqlen_k * problem.heads_kv * (problem.head_dim + problem.head_dim_v)
        return ITEMSIZE[problem.dtype] * (rows_q + rows_k)
    return ITEMSIZE[problem.out_dtype] * math.prod(problem.out_shape)
