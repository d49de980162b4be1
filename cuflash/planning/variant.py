"""Variants: compiled kernels, with everything that changes their code."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from ..locks import Once
from ..problem.dtypes import DTYPES
from ..problem.operands import DeltaRole
from .mod_code import ModCode
from .tile_shapes_sm90 import ClusterBackwardTile, WarpgroupBackwardTile, WarpgroupDqDkvTile, WarpgroupTile
from .tiles_sm80 import BackwardTile, Tile

ALGORITHM_CODES = {"flash1": 1, "flash2": 2, "flashd": 3}
PORTABLE_THREADS = 256
# The parameter struct of each kernel, in `kernels_cu/common/params.cuh`.
PARAMS = {
    "sm80/forward.cu": "ForwardParams",
    "sm80/lse.cu": "ForwardParams",
    "sm80/decode.cu": "SplitParams",
    "sm80/backward.cu": "BackwardParams",
    "sm80/backward_dq.cu": "BackwardDqParams",
    "sm90/forward/forward.cu": "TiledForwardParams",
    "sm90/forward/lse.cu": "TiledForwardParams",
    "sm90/decode/decode.cu": "DecodeParams",
    "sm90/decode/narrow.cu": "DecodeParams",
    "sm90/backward/backward.cu": "TiledBackwardParams",
    "sm90/backward_cluster/backward_cluster.cu": "TiledBackwardParams",
    "sm90/backward_dq_dkv/backward_dq_dkv.cu": "TiledDqDkvParams",
    "sm80/backward_mods.cu": "ModGradientParams",
    "portable/delta.cu": "DeltaParams",
    "portable/convert.cu": "ConvertParams",
    "portable/block_mask.cu": "BlockMaskParams",
    "portable/tile_counts.cu": "TileCountsParams",
    "portable/merge.cu": "MergeParams",
    "portable/sinks_gradient.cu": "SinksGradientParams",
    "portable/sum_tables.cu": "SumTablesParams",
    "portable/append_kv.cu": "AppendParams",
}
# Kernels with another parameter struct for variable-length sequences, and for sums in float32 arrays of the call.
PARAMS_OF_VARLEN = {"sm90/forward/forward.cu": "VarlenForwardParams", "sm90/forward/lse.cu": "VarlenForwardParams"}
PARAMS_OF_SUMS = {
    "TiledForwardParams": "TiledForwardStateParams",
    "VarlenForwardParams": "VarlenForwardStateParams",
    "TiledBackwardParams": "TiledBackwardSumsParams",
}
# Kernels that wait on the device for earlier kernels of the stream; portable/delta.cu runs before the last three.
WAITING = {
    "sm90/decode/decode.cu",
    "sm90/decode/narrow.cu",
    "sm90/backward/backward.cu",
    "sm90/backward_cluster/backward_cluster.cu",
    "portable/tile_counts.cu",
}
AnyTile = Tile | BackwardTile | WarpgroupTile | WarpgroupBackwardTile | WarpgroupDqDkvTile | ClusterBackwardTile


@dataclass(frozen=True)
class Variant:
    """One compiled kernel: everything that changes its code, and nothing that depends on data."""

    op: str
    source: str  # below kernels_cu/
    arch: str
    dtype: str
    out_dtype: str
    algorithm: str = "flash2"
    tile: AnyTile | None = None
    softcap: bool = False  # True for softcapped scores in sm90 kernels; others read a parameter (registers, L10)
    is_varlen: bool = False  # True for variable-length sequences, whose lengths the device reads
    mod_code: ModCode | None = None
    lists_seqlens: bool = False  # delta only: True if it lists the lengths of sequences for kernels with mods
    accumulates: bool = False  # True if results are added to float32 arrays
    delta: DeltaRole | None = None  # delta only: the role of the caller's array

    def __hash__(self) -> int:
        return self._hash

    # Pickled without the cached hash: hashes of strings differ from process to process.
    def __reduce__(self) -> tuple[Any, ...]:
        return _interned, tuple(getattr(self, field.name) for field in fields(self))

    @property
    def waits(self) -> bool:
        """True if the kernel waits on the device for earlier kernels of the stream, and may be launched early."""
        return self.source in WAITING

    @Once
    def _hash(self) -> int:  # cached: each call with new lengths needs it, and hashing the tile takes most of the time
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @Once
    def name(self) -> str:
        """The name of the kernel's symbol, cubin file, test and benchmark row."""
        parts = [self.op, self.source.split("/")[0], DTYPES[self.dtype].short]
        if self.tile is not None:
            dims = f"d{self.tile.head_dim}"
            if self.tile.head_dim_v not in (0, self.tile.head_dim):
                dims += f"x{self.tile.head_dim_v}"
            parts += [dims, f"q{self.tile.block_q}", f"k{self.tile.block_k}", f"s{self.tile.stages}"]
        if self.algorithm != "flash2":
            parts.append(self.algorithm)
        if self.softcap:
            parts.append("softcap")
        if self.is_varlen:
            parts.append("decode" if "/decode" in self.source else "varlen")
        parts += [flag for flag in ("paged", "few", "single", "shares_heads") if getattr(self.tile, flag, False)]
        if self.lists_seqlens:
            parts.append("seqlens")
        if self.accumulates:
            parts.append("accumulates")
        if self.delta is not None:
            parts.append(f"{self.delta}_delta")
        if self.out_dtype != self.dtype:
            parts.append(f"out_{DTYPES[self.out_dtype].short}")
        if self.mod_code is not None:
            parts.append(f"mods_{self.mod_code.digest}")
        return "_".join(parts)

    @Once
    def params(self) -> str:
        """The name of its parameter struct."""
        if self.delta is not None:
            return "DeltaArrayParams"
        name = (self.is_varlen and PARAMS_OF_VARLEN.get(self.source)) or PARAMS[self.source]
        return PARAMS_OF_SUMS.get(name, name) if self.accumulates else name

    @property
    def of_warpgroups(self) -> bool:
        """True for an sm90 kernel."""
        return self.source.startswith("sm90/")

    @Once
    def smem_bytes(self) -> int:
        """The dynamic shared memory of one block, in bytes."""
        return 0 if self.tile is None else self.tile.smem_bytes(DTYPES[self.dtype].itemsize)

    @property
    def num_in_cluster(self) -> int:
        """The thread blocks of a cluster, which run at the same time; 1 without clusters."""
        return getattr(self.tile, "num_in_cluster", 1)

    @Once
    def num_threads(self) -> int:
        """The threads of one block."""
        return PORTABLE_THREADS if self.tile is None else 32 * self.tile.warps

    @property
    def constants(self) -> dict[str, int | str | None]:
        """The macros of the kernel's `config.cuh`, without their `CUFLASH_` prefix; the compiler adds PARAMS_BYTES."""
        constants: dict[str, int | str | None] = {
            "KERNEL": self.name,
            "DTYPE": DTYPES[self.dtype].cuda,
            "OUT_DTYPE": DTYPES[self.out_dtype].cuda,
            "SMEM_BYTES": self.smem_bytes,
            "WARPS": self.num_threads // 32,
        }
        if self.is_varlen:
            constants["VARLEN"] = 1
        if self.lists_seqlens:
            constants["LISTS_SEQLENS"] = 1
        if self.accumulates:
            constants["ACCUMULATES"] = 1
        if self.delta is not None:
            constants[f"{self.delta}_DELTA".upper()] = 1
        if self.mod_code is not None:
            constants |= self.mod_code.constants
        if self.tile is not None:
            constants |= self.tile.constants
            if self.of_warpgroups:
                constants["SOFTCAP"] = int(self.softcap)
            else:
                constants["ALGORITHM"] = ALGORITHM_CODES[self.algorithm]
        return constants


def _interned(*values: Any) -> Variant:
    """Returns this process's only variant with these fields, for pickle."""
    return variant_of(*values)


variant_of = cache(Variant)  # interned: looking up an object with a cached hash is faster than creating one
