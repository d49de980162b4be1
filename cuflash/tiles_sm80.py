"""Tiles of the mma.sync kernels (sm_80 and later): one row per head dim and amount of shared memory.

Register use and spills of every row are checked by `tests/test_compile.py`; the speed of the alternatives stands in
`kernels_cu/TUNING.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .device import Device

SMEM_RESERVED = 1024  # bytes of each resident block that the hardware keeps for itself


@dataclass(frozen=True, slots=True)
class Tile:
    """Compile-time shape of one block. `head_dim_v` is 0 in kernels without v."""

    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    stages: int
    warps: int
    blocks_per_sm: int
    q_in_registers: bool = False
    max_slices: int = 1  # blocks that may share a query block, each with its own head_dim_v columns of v
    qk_unroll: int = 16  # steps of q kᵀ in one piece; fewer need fewer registers, and less time to compile
    flash2_only: bool = False  # the registers of flash1 and flashd do not fit

    def smem_bytes(self, itemsize: int) -> int:
        """Shared memory of one block; `SharedStorage` in the kernels asserts the same figure."""
        return itemsize * (
            self.block_q * self.head_dim + self.stages * self.block_k * (self.head_dim + self.head_dim_v)
        )


# Head dims in rising order; for one head dim the tile that wants the most shared memory first.
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


def choose(
    dtype: str, itemsize: int, head_dim: int, head_dim_v: int, algorithm: str, device: Device
) -> Tile | None:
    """The first row that covers the head dims, fits one block, and leaves room for all the blocks it was tuned for.

    Where no row of that head dim leaves that room, the last one that fits one block. None if nothing does.
    """
    fitting = [
        tile
        for tile in TILES[dtype]
        if head_dim <= tile.head_dim
        and head_dim_v <= tile.head_dim_v * tile.max_slices
        and tile.smem_bytes(itemsize) <= device.smem_per_block
        and (algorithm == "flash2" or not tile.flash2_only)
    ]
    if not fitting:
        return None
    same = [t for t in fitting if (t.head_dim, t.head_dim_v) == (fitting[0].head_dim, fitting[0].head_dim_v)]
    roomy = (
        t for t in same if t.blocks_per_sm * (t.smem_bytes(itemsize) + SMEM_RESERVED) <= device.smem_per_sm
    )
    return next(roomy, same[-1])
