"""Tiles of the wgmma kernels (sm_90): one row per head dim, or two: few keys under a mask, capped scores.

Registers of every row are checked by `tests/test_compile.py`; the speed of the alternatives stands in
`kernels_cu/TUNING.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

PANEL_BYTES = 128  # a row of a panel in shared memory
PANEL_COLUMNS = PANEL_BYTES // 2  # of operands
TILE_SLOTS = 16  # descriptions of tiles in shared memory, of 32 bytes
GROUP_ROWS = 64  # queries of a warpgroup
OUT_ROWS = 16  # of out that a warp stores at a time


@dataclass(frozen=True, slots=True)
class WarpgroupTile:
    """Compile-time shape of one block: a warpgroup that copies, and one for every 64 queries.

    `head_dim_v` is 0 without v. `stages` counts tiles of k or v in one ring, `q_stages` those of q. `q_columns`: of
    q, from the first on, that stay in registers; `out_panels`: of a warp's rows of out that are on their way at a time.
    """

    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    stages: int
    q_stages: int
    q_columns: int
    out_panels: int
    ping_pong: bool = False
    max_keys: int | None = None  # for queries that see no more keys than this on average, under a mask
    softcap: bool | None = None  # for scores that are capped, or for those that are not

    @property
    def warps(self) -> int:
        """Of one block."""
        return 4 * (self.block_q // GROUP_ROWS + 1)

    def smem_bytes(self, itemsize: int) -> int:
        """Shared memory of one block; `SharedStorage` in the kernels asserts the same figure."""
        q_panels, v_panels = (-(-dim // PANEL_COLUMNS) for dim in (self.head_dim, self.head_dim_v))
        tiles = self.q_stages * q_panels * self.block_q + self.stages * max(q_panels, v_panels) * self.block_k
        out = max(self.block_q // OUT_ROWS * 16, self.out_panels * self.block_q * PANEL_BYTES)
        barriers = 8 * (TILE_SLOTS + 2 * self.q_stages * (self.block_q // GROUP_ROWS) + 2 * self.stages)
        return _rounded(tiles * PANEL_BYTES + out + _rounded(barriers, 16) + 32 * TILE_SLOTS, 1024)

    @property
    def constants(self) -> dict[str, int]:
        """The macros of `common/config.cuh` that are this tile's."""
        return {
            "HEAD_DIM": self.head_dim,
            "HEAD_DIM_V": self.head_dim_v,
            "BLOCK_Q": self.block_q,
            "BLOCK_K": self.block_k,
            "STAGES": self.stages,
            "Q_STAGES": self.q_stages,
            "Q_COLUMNS": self.q_columns,
            "OUT_PANELS": self.out_panels,
            "PING_PONG": int(self.ping_pong),
        }


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to


# Head dims in rising order; for one head dim the tile for fewer keys under a mask, or for capped scores, first.
TILES = (
    WarpgroupTile(64, 64, 128, 128, 10, 2, 64, 1, max_keys=640),
    WarpgroupTile(64, 64, 192, 128, 8, 2, 16, 1, ping_pong=True),
    WarpgroupTile(96, 96, 128, 128, 5, 1, 96, 2),
    WarpgroupTile(128, 128, 128, 128, 5, 1, 128, 2),
    WarpgroupTile(192, 128, 128, 64, 6, 1, 192, 2, softcap=True),
    WarpgroupTile(192, 128, 128, 96, 4, 1, 192, 2, softcap=False),
    WarpgroupTile(192, 192, 128, 64, 5, 1, 192, 3),
    WarpgroupTile(256, 256, 128, 48, 5, 1, 0, 2, softcap=True),
    WarpgroupTile(256, 256, 128, 64, 4, 1, 64, 2, softcap=False),
)


def choose(op: str, head_dim: int, head_dim_v: int, keys: float, softcap: bool) -> WarpgroupTile | None:
    """The first row that covers the head dims and queries which see this many keys on average; None if none does.

    Without a mask `keys` is inf: that many keys or few, all query blocks are alike.

    That of lse is the row for many keys, without v: its ring holds k alone.
    """
    if op == "lse":
        tile = choose("forward", head_dim, 1, float("inf"), softcap)
        return None if tile is None else replace(tile, head_dim_v=0, out_panels=0, ping_pong=False)
    for tile in TILES:
        covers = head_dim <= tile.head_dim and head_dim_v <= tile.head_dim_v and tile.softcap in (None, softcap)
        if covers and keys <= (tile.max_keys or keys):
            return tile
    return None


def allows_tma(shape: Sequence[int], strides: Sequence[int], itemsize: int = 2) -> bool:
    """Whether TMA can address a 4-D operand with these strides (in elements, the last one 1)."""
    steps = [itemsize * stride for length, stride in zip(shape[:3], strides, strict=False) if length > 1]
    return all(0 < step < 2**40 and step % 16 == 0 for step in steps)
