"""Tiles of the mma.sync kernels (sm_80 and later): one row for each head dim and amount of shared memory.

`tests/kernels/test_compile.py` checks that no row spills registers; some rows are slower for that (no spills, L3).
`kernels_cu/DESIGN.md` names the runner-up of each tile, and `EXPERIMENTS.csv` holds all measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from .device import Device
from .tile import FLOAT_BYTES, ROW_PADDING, macros, rounded_up

SMEM_RESERVED = 1024  # bytes that the hardware reserves for each resident block
SMEM_ALIGNMENT = 128  # bytes
# Fields of every tile of this family that become macros.
_FIELDS = "head_dim head_dim_v block_q block_k stages blocks_per_sm qk_unroll"


@dataclass(frozen=True, slots=True)
class _Shape:
    """Fields of every tile of this family."""

    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    stages: int
    warps: int
    blocks_per_sm: int


@dataclass(frozen=True, slots=True)
class Tile(_Shape):
    """Compile-time shape of one thread block. `head_dim_v` is 0 in kernels without v."""

    q_in_registers: bool = False
    max_slices: int = 1  # most thread blocks for a query block, each with other head_dim_v columns of v
    qk_unroll: int = 16  # unrolled steps of a product; fewer save registers and compile time (bounded unrolling, L8)
    flash2_only: bool = False  # flash1 and flashd would need too many registers

    def smem_bytes(self, itemsize: int) -> int:
        """Returns the shared memory of one block in bytes, as `SharedStorage` in the kernels asserts."""
        return itemsize * (
            self.block_q * self.head_dim + self.stages * self.block_k * (self.head_dim + self.head_dim_v)
        )

    @property
    def constants(self) -> dict[str, int]:
        """The tile's macros for `config.cuh`."""
        return macros(self, f"{_FIELDS} q_in_registers")


class DecodeTile(Tile):
    """The `Tile` of `sm80/decode.cu`: four warps split the keys of a tile, and reuse the ring's memory at the end."""

    def smem_bytes(self, itemsize: int) -> int:
        """Returns the shared memory of one block in bytes, as `SharedStorage` in the kernel asserts."""
        ring = itemsize * self.stages * self.block_k * (self.head_dim + self.head_dim_v)
        states = FLOAT_BYTES * self.warps * self.block_q * (self.head_dim_v + ROW_PADDING + 2)
        return itemsize * self.block_q * self.head_dim + rounded_up(max(ring, states), SMEM_ALIGNMENT)


@dataclass(frozen=True, slots=True)
class BackwardTile(_Shape):
    """Compile-time shape of a thread block with `block_k` keys, which loops over tiles of `block_q` queries.

    `warps * warp_keys / block_k` warps form a group: they share `warp_keys` keys, and each takes `piece_q` queries of a
    tile.
    """

    warp_keys: int
    piece_q: int
    qk_unroll: int = 16
    shared_weights: bool = False  # p and ds alternate in one buffer: less shared memory, two more barriers a tile
    with_dq: bool = True
    max_slices: ClassVar[int] = 1  # as in `Tile`
    q_in_registers: ClassVar[bool] = False  # as in `Tile`

    @property
    def group(self) -> int:
        """The number of warps that share the same keys (32 rows or keys a warp where registers allow it, L26)."""
        return self.warps * self.warp_keys // self.block_k

    def smem_bytes(self, itemsize: int) -> int:
        """Returns the shared memory of one block in bytes, as `SharedStorage` in the kernel asserts."""
        rows = self.block_k + self.stages * self.block_q
        weights = (2 if self.group > 1 and not self.shared_weights else 1) * self.block_k * self.block_q
        stats = -(-self.stages * self.block_q * 8 // 128) * 128
        return itemsize * (rows * (self.head_dim + self.head_dim_v) + weights) + stats

    @property
    def constants(self) -> dict[str, int]:
        """The tile's macros for `config.cuh`."""
        return macros(self, f"{_FIELDS} q_in_registers warp_keys piece_q with_dq shared_weights")


class DqTile(Tile):
    """The `Tile` of the kernel for dq alone, which holds dout beside q."""

    def smem_bytes(self, itemsize: int) -> int:
        """Returns the shared memory of one block in bytes, as `SharedStorage` in the kernel asserts."""
        rows = self.block_q + self.stages * self.block_k
        return itemsize * rows * (self.head_dim + self.head_dim_v)


# Order of all tables: ascending head dims; for equal head dims, descending shared memory.
TILES_16BIT = (
    Tile(32, 32, 128, 64, 2, 4, 3, True),
    Tile(64, 64, 128, 128, 2, 4, 2, qk_unroll=1, flash2_only=True),
    Tile(64, 64, 128, 128, 1, 4, 2, qk_unroll=1, flash2_only=True),
    Tile(64, 64, 128, 64, 2, 4, 2),
    Tile(96, 96, 128, 64, 2, 4, 2),
    Tile(96, 96, 64, 64, 1, 4, 2),
    Tile(128, 128, 128, 48, 2, 4, 2),
    Tile(128, 128, 64, 64, 1, 4, 2),
    Tile(192, 128, 64, 64, 1, 4, 3),
    Tile(192, 192, 64, 96, 1, 4, 2, flash2_only=True),
    Tile(192, 192, 64, 64, 1, 4, 2),
    Tile(256, 256, 64, 64, 1, 4, 2),
    Tile(512, 256, 64, 32, 1, 4, 1, max_slices=2),
    Tile(512, 256, 32, 32, 1, 2, 1, max_slices=2),
)
TILES_32BIT = (
    Tile(32, 32, 128, 32, 2, 4, 2),
    Tile(64, 64, 128, 32, 2, 4, 2),
    Tile(96, 96, 128, 32, 2, 8, 1, qk_unroll=4),
    Tile(128, 128, 128, 32, 2, 8, 1, qk_unroll=4),
    Tile(128, 128, 64, 32, 1, 4, 1, qk_unroll=4),
    Tile(192, 128, 128, 32, 1, 8, 1, max_slices=2, qk_unroll=4),
    Tile(192, 128, 64, 32, 1, 4, 1, max_slices=2, qk_unroll=4),
    Tile(256, 128, 64, 32, 1, 4, 2, max_slices=2, qk_unroll=4),
    Tile(256, 128, 32, 32, 1, 2, 1, max_slices=2, qk_unroll=4),
    Tile(512, 128, 32, 16, 1, 2, 2, max_slices=4, qk_unroll=4),
)
TILES = {"float16": TILES_16BIT, "bfloat16": TILES_16BIT, "float32": TILES_32BIT}

BACKWARD_16BIT = (
    BackwardTile(32, 32, 64, 128, 2, 4, 2, 32, 32),
    BackwardTile(64, 64, 64, 128, 2, 4, 2, 32, 32, 2),
    BackwardTile(64, 64, 64, 64, 1, 4, 3, 16, 32),
    BackwardTile(96, 96, 64, 64, 1, 4, 2, 32, 32),
    BackwardTile(128, 128, 64, 64, 1, 4, 2, 32, 32, 4),
    BackwardTile(192, 192, 64, 64, 2, 8, 1, 32, 16),
    BackwardTile(192, 192, 64, 32, 1, 4, 1, 16, 32),
    BackwardTile(256, 256, 64, 64, 1, 8, 1, 32, 16),
    BackwardTile(256, 256, 32, 32, 1, 4, 1, 16, 16),
)
BACKWARD_32BIT = (
    BackwardTile(32, 32, 32, 64, 2, 4, 3, 16, 32),
    BackwardTile(64, 64, 64, 64, 1, 4, 2, 32, 32, 4),
    BackwardTile(96, 96, 32, 64, 1, 4, 2, 32, 16, 4),
    BackwardTile(128, 128, 32, 64, 1, 4, 2, 32, 16, 2),
    BackwardTile(128, 128, 32, 32, 1, 4, 1, 16, 16, 4),
    BackwardTile(192, 192, 32, 32, 1, 4, 1, 16, 16, 4),
    BackwardTile(192, 192, 32, 16, 1, 2, 1, 16, 16, 4),
    BackwardTile(256, 256, 32, 64, 1, 8, 1, 16, 16, 2),
    BackwardTile(256, 256, 32, 32, 1, 4, 1, 16, 16, 2),
    BackwardTile(256, 256, 32, 16, 1, 2, 1, 16, 16, 2, shared_weights=True),
)
BACKWARD = {"float16": BACKWARD_16BIT, "bfloat16": BACKWARD_16BIT, "float32": BACKWARD_32BIT}

DQ_16BIT = (
    DqTile(32, 32, 128, 64, 2, 4, 2),
    DqTile(64, 64, 128, 64, 2, 4, 2, qk_unroll=1),
    DqTile(64, 64, 64, 64, 1, 4, 2),
    DqTile(96, 96, 64, 64, 2, 4, 2),
    DqTile(128, 128, 64, 64, 2, 4, 2),
    DqTile(128, 128, 64, 64, 1, 4, 2),
    DqTile(192, 192, 64, 32, 2, 4, 1),
    DqTile(256, 256, 64, 32, 2, 4, 1),
    DqTile(256, 256, 64, 32, 1, 4, 1),
)
DQ_32BIT = (
    DqTile(32, 32, 64, 32, 2, 4, 2),
    DqTile(64, 64, 64, 32, 2, 4, 2),
    DqTile(96, 96, 64, 32, 1, 4, 2, qk_unroll=4),
    DqTile(128, 128, 64, 32, 1, 4, 1, qk_unroll=4),
    DqTile(192, 192, 32, 16, 1, 2, 1, qk_unroll=4),
    DqTile(256, 256, 32, 16, 1, 2, 1, qk_unroll=4),
)
DQ = {"float16": DQ_16BIT, "bfloat16": DQ_16BIT, "float32": DQ_32BIT}

# Tiles for gradients of captured arrays.
MODS_16BIT = (
    DqTile(32, 32, 64, 64, 1, 4, 3),
    DqTile(64, 64, 64, 64, 1, 4, 3),
    DqTile(96, 96, 64, 64, 1, 4, 2),
    DqTile(128, 128, 64, 64, 1, 4, 2),
    DqTile(192, 192, 64, 32, 1, 4, 2),
    DqTile(256, 256, 64, 32, 1, 4, 1),
)
MODS_32BIT = (
    DqTile(32, 32, 64, 32, 1, 4, 3),
    DqTile(64, 64, 64, 32, 1, 4, 2),
    DqTile(96, 96, 64, 32, 1, 4, 2, qk_unroll=4),
    DqTile(128, 128, 64, 32, 1, 4, 1, qk_unroll=4),
    DqTile(192, 192, 32, 16, 1, 2, 1, qk_unroll=4),
    DqTile(256, 256, 32, 16, 1, 2, 1, qk_unroll=4),
)
MODS = {"float16": MODS_16BIT, "bfloat16": MODS_16BIT, "float32": MODS_32BIT}

# Tiles of decode.cu. Head dims without a row run in forward.cu.
DECODE_16BIT = (
    DecodeTile(32, 32, 16, 128, 2, 4, 4),
    DecodeTile(64, 64, 16, 128, 2, 4, 2),
    DecodeTile(96, 96, 16, 64, 2, 4, 2),
    DecodeTile(128, 128, 16, 64, 2, 4, 2),
    DecodeTile(192, 128, 16, 64, 2, 4, 1),
    DecodeTile(192, 192, 16, 64, 2, 4, 1),
    DecodeTile(256, 256, 16, 64, 2, 4, 1),
)
DECODE_32BIT = (
    DecodeTile(32, 32, 16, 64, 2, 4, 3),
    DecodeTile(64, 64, 16, 64, 2, 4, 2),
    DecodeTile(96, 96, 16, 64, 2, 4, 1, qk_unroll=4),
    DecodeTile(128, 128, 16, 64, 2, 4, 1, qk_unroll=4),
)
DECODE = {"float16": DECODE_16BIT, "bfloat16": DECODE_16BIT, "float32": DECODE_32BIT}

# Changes of rows for mods, whose functions and dropout need registers, too.
_WITH_MODS: dict[Tile | BackwardTile, dict[str, Any]] = {
    Tile(128, 128, 128, 48, 2, 4, 2): {"block_q": 64, "block_k": 64},
    BackwardTile(64, 64, 64, 128, 2, 4, 2, 32, 32, 2): {"piece_q": 16},
    BackwardTile(128, 128, 64, 64, 1, 4, 2, 32, 32, 4): {"warp_keys": 16, "qk_unroll": 16},
    DqTile(64, 64, 128, 64, 2, 4, 2, qk_unroll=1): {"block_k": 32, "qk_unroll": 16},
}

AnyTile = TypeVar("AnyTile", Tile, BackwardTile, DqTile, DecodeTile)


def of_algorithm(dtype: str, algorithm: str, has_mods: bool = False) -> list[Tile]:
    """Returns the rows of forward for an algorithm. has_mods: as in `rows_of`."""
    has_room = algorithm == "flash2" and not has_mods
    return rows_of([tile for tile in TILES[dtype] if has_room or not tile.flash2_only], has_mods)


def rows_of(rows: Sequence[AnyTile], has_mods: bool) -> list[AnyTile]:
    """Returns the rows of a table, changed for mods if `has_mods`."""
    return [replace(row, **_WITH_MODS.get(row, {})) for row in rows] if has_mods else list(rows)


def choose(tiles: Sequence[AnyTile], itemsize: int, head_dim: int, head_dim_v: int, device: Device) -> AnyTile | None:
    """Returns the first row that covers the head dims and fits an SM `blocks_per_sm` times, as it was tuned.

    If no row of these padded head dims fits so often, it is the last of them that fits once; None if none fits.
    """
    fitting = [
        tile
        for tile in tiles
        if head_dim <= tile.head_dim
        and head_dim_v <= tile.head_dim_v * tile.max_slices
        and tile.smem_bytes(itemsize) <= device.smem_per_block
    ]
    if not fitting:
        return None
    same = [t for t in fitting if (t.head_dim, t.head_dim_v) == (fitting[0].head_dim, fitting[0].head_dim_v)]
    roomy = (t for t in same if t.blocks_per_sm * (t.smem_bytes(itemsize) + SMEM_RESERVED) <= device.smem_per_sm)
    return next(roomy, same[-1])
