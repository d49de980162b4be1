"""Tiles of the wgmma kernels (sm_90): a row for each head dim; more for few keys, many queries, softcap and dropout.

`tests/kernels/test_compile.py` checks that no row spills registers (no spills, L3). `kernels_cu/DESIGN.md` names the
runner-up of most tiles, and `EXPERIMENTS.csv` holds all measurements. Longer rings or key tiles gain nothing (L22).
"""

from __future__ import annotations

from dataclasses import replace

from .tile_shapes_sm90 import (
    GRADIENTS,
    WORK_SLOTS,
    ClusterBackwardTile,
    WarpgroupBackwardTile,
    WarpgroupDqDkvTile,
    WarpgroupTile,
)

# Order: ascending head dims; for equal head dims, rows for few keys under a mask or for softcap come first.
TILES = (
    WarpgroupTile(32, 32, 128, 128, 10, 2, 32, 1, max_keys=640),
    WarpgroupTile(32, 32, 192, 128, 8, 2, 32, 1, ping_pong=True, dropout=False),
    WarpgroupTile(48, 48, 128, 128, 10, 2, 48, 1, max_keys=640),
    WarpgroupTile(48, 48, 192, 128, 8, 2, 16, 1, ping_pong=True, dropout=False),
    WarpgroupTile(64, 64, 128, 128, 10, 2, 64, 1, max_keys=640),
    WarpgroupTile(64, 64, 192, 128, 8, 2, 16, 1, ping_pong=True, dropout=False),
    WarpgroupTile(96, 96, 128, 128, 5, 1, 96, 2, ping_pong=True, dropout=False),
    WarpgroupTile(128, 128, 128, 128, 5, 1, 128, 2, ping_pong=True, dropout=False),
    WarpgroupTile(192, 128, 128, 64, 6, 1, 192, 2, softcap=True),
    WarpgroupTile(192, 128, 128, 96, 4, 1, 192, 2, softcap=False),
    WarpgroupTile(192, 192, 128, 64, 5, 1, 192, 3),
    WarpgroupTile(256, 256, 128, 48, 5, 1, 0, 2, softcap=True),
    WarpgroupTile(256, 256, 128, 64, 4, 1, 64, 2, softcap=False),
)
# Tiles with mods, if the rows above spill registers with mods or are not for dropout. They are tried in this order:
# fewer columns of q in registers, then fewer keys.
MOD_TILES = (
    *(WarpgroupTile(dim, dim, 128, 128, 10, 2, q_columns, 1) for dim in (32, 48, 64) for q_columns in (dim, 0)),
    *(WarpgroupTile(dim, dim, 128, 64, 15, 2, 0, 1) for dim in (32, 48, 64)),
    WarpgroupTile(96, 96, 128, 128, 5, 1, 0, 2),
    WarpgroupTile(96, 96, 128, 64, 10, 1, 0, 2),
    WarpgroupTile(128, 128, 128, 128, 5, 1, 0, 2),
    WarpgroupTile(128, 128, 128, 64, 10, 1, 0, 2),
    WarpgroupTile(192, 128, 128, 64, 6, 1, 0, 2),
    WarpgroupTile(192, 128, 128, 48, 8, 1, 0, 2),
    WarpgroupTile(192, 192, 128, 64, 5, 1, 0, 3),
    WarpgroupTile(192, 192, 128, 48, 6, 1, 0, 3),
    WarpgroupTile(256, 256, 128, 64, 4, 1, 0, 2, softcap=False, dropout=True),
    WarpgroupTile(256, 256, 128, 48, 5, 1, 0, 2),
    WarpgroupTile(256, 256, 128, 32, 6, 1, 0, 2),
)

BACKWARD = (
    WarpgroupBackwardTile(32, 32, 128, key_blocks=4, k_steps=2, v_steps=2),
    WarpgroupBackwardTile(48, 48, 128, key_blocks=4, softcap=True),
    WarpgroupBackwardTile(48, 48, 128, key_blocks=4, k_steps=3, softcap=False),
    WarpgroupBackwardTile(64, 64, 128, key_blocks=4, softcap=True),
    WarpgroupBackwardTile(64, 64, 128, key_blocks=4, k_steps=2, softcap=False),
    WarpgroupBackwardTile(80, 80, 64, key_blocks=2, k_steps=5, v_steps=5),
    WarpgroupBackwardTile(96, 96, 64, key_blocks=2, k_steps=5, v_steps=6, varlen_k_steps=4),
    WarpgroupBackwardTile(128, 128, 80, min_queries=8192),
    WarpgroupBackwardTile(128, 128, 64, k_steps=4),
    WarpgroupBackwardTile(192, 128, 48, min_queries=1),
)
# Tiles with mods, if the rows above spill registers: these hold no columns of k in registers.
MOD_BACKWARD = (
    *(WarpgroupBackwardTile(dim, dim, 128, key_blocks=4) for dim in (32, 48, 64)),
    *(WarpgroupBackwardTile(dim, dim, 64, key_blocks=2) for dim in (80, 96)),
    WarpgroupBackwardTile(128, 128, 64),
)
CLUSTER_BACKWARD = (ClusterBackwardTile(256, 256),)
CLUSTER_DIMS = 192  # clusters are for larger head dims
# Larger head dims have a row for each gradient, as registers do not hold dk and dv of 128 keys beside tiles of 64 rows.
DQ_DKV = (
    *(WarpgroupDqDkvTile(gradient, 192, 128, 64, 3, 3) for gradient in ("dq", "dk")),
    WarpgroupDqDkvTile("dv", 192, 128, 64, 4, 4),
    *(WarpgroupDqDkvTile(gradient, 192, 192, 64, 3, 2) for gradient in ("dq", "dk")),
    WarpgroupDqDkvTile("dv", 192, 192, 64, 4, 3),
    *(WarpgroupDqDkvTile(gradient, 256, 256, 32, 3, 3, softcap=True) for gradient in ("dq", "dk")),
    *(WarpgroupDqDkvTile(gradient, 256, 256, 64, 2, 1, softcap=False) for gradient in ("dq", "dk")),
    WarpgroupDqDkvTile("dv", 256, 256, 64, 3, 2),
)

# Tiles of these kernels with mods, for each gradient in order of preference. The largest head dims have 32 columns:
# with 64, most functions spill.
MOD_DQ_DKV = (
    *(tile for tile in DQ_DKV if tile.head_dim < 256),
    *(WarpgroupDqDkvTile(gradient, 192, 128, 32, 3, 3) for gradient in GRADIENTS),
    *(WarpgroupDqDkvTile(gradient, 192, 192, 32, 3, 3) for gradient in GRADIENTS),
    *(WarpgroupDqDkvTile(gradient, 256, 256, 32, 3, 3) for gradient in ("dq", "dk")),
    WarpgroupDqDkvTile("dv", 256, 256, 64, 3, 2),
    WarpgroupDqDkvTile("dv", 256, 256, 32, 3, 3),
)


def choose(op: str, head_dim: int, head_dim_v: int, keys: float, softcap: bool) -> WarpgroupTile | None:
    """Returns the first row for the head dims and for queries that see `keys` keys on average, or None.

    Without a mask `keys` is inf, even for few keys, because all query blocks take equally long. lse takes the row for
    many keys, without v: its ring holds k alone.
    """
    if op == "lse":
        tile = choose("forward", head_dim, 1, float("inf"), softcap)
        return None if tile is None else replace(tile, head_dim_v=0, out_panels=0, ping_pong=False)
    tiles = (tile for tile in TILES if keys <= (tile.max_keys or keys))
    return next((tile for tile in tiles if _covers(tile, head_dim, head_dim_v, softcap)), None)


def choose_mod_tiles(
    op: str, head_dim: int, head_dim_v: int, keys: float, softcap: bool, drops: bool
) -> tuple[WarpgroupTile, ...]:
    """Returns the rows for mods, in order of preference; empty if there is none.

    drops: True with dropout, which needs registers that columns of q take in some rows.
    """
    head_dim_v = 1 if op == "lse" else head_dim_v
    first = choose("forward", head_dim, head_dim_v, float("inf") if op == "lse" else keys, softcap)
    if first is None:
        return ()
    dims = first.head_dim, first.head_dim_v
    rows = [first, *(row for row in MOD_TILES if (row.head_dim, row.head_dim_v) == dims)]
    rows_that_fit = [
        row for row in rows if row.dropout in (None, drops) and _covers(row, head_dim, head_dim_v, softcap)
    ]
    if op == "lse":
        # Each stage may hold another work tile, which needs a work slot: sm90/forward/storage.cuh.
        rows_that_fit = [
            replace(tile, head_dim_v=0, out_panels=0, ping_pong=False, stages=min(tile.stages, WORK_SLOTS - 7))
            for tile in rows_that_fit
        ]
    return tuple(rows_that_fit)


def choose_backward(head_dim: int, head_dim_v: int, queries: float, softcap: bool) -> WarpgroupBackwardTile | None:
    """Returns the first row for the head dims and for keys that `queries` queries see on average, or None."""
    tiles = (tile for tile in BACKWARD if queries >= tile.min_queries)
    return next((tile for tile in tiles if _covers(tile, head_dim, head_dim_v, softcap)), None)


def choose_mod_backward(
    head_dim: int, head_dim_v: int, queries: float, softcap: bool
) -> tuple[WarpgroupBackwardTile, ...]:
    """Returns the rows for the head dims and mods, in order of preference.

    queries: as of `choose_backward`; 0 if kernels may skip tiles that the mask_mod hides fully.
    """
    rows = (*(t for t in BACKWARD if t.min_queries <= queries), *MOD_BACKWARD)
    covers = [t for t in rows if _covers(t, head_dim, head_dim_v, softcap)]
    # Smaller head dims first: a tile for larger ones may need fewer registers, but takes up to 1.6 times as long.
    return tuple(sorted(covers, key=lambda t: (t.head_dim, t.head_dim_v)))


def choose_cluster(head_dim: int, head_dim_v: int) -> ClusterBackwardTile | None:
    """Returns the tile of clusters for the head dims, or None. Smaller ones than the tile's have kernels as fast."""
    covers = (t for t in CLUSTER_BACKWARD if head_dim <= t.head_dim and head_dim_v <= t.head_dim_v)
    return next((t for t in covers if max(head_dim, head_dim_v) > CLUSTER_DIMS), None)


def choose_dq_dkv(head_dim: int, head_dim_v: int, softcap: bool) -> tuple[WarpgroupDqDkvTile, ...]:
    """Returns the first row for the head dims for each gradient; empty if there is none."""
    covers = [t for t in DQ_DKV if _covers(t, head_dim, head_dim_v, softcap)]
    return tuple(next(t for t in covers if t.gradient == gradient) for gradient in GRADIENTS) if covers else ()


def choose_mod_dq_dkv(head_dim: int, head_dim_v: int, softcap: bool) -> tuple[tuple[WarpgroupDqDkvTile, ...], ...]:
    """Returns the tiles for mods, for each gradient in order of preference; empty if none fits."""
    covers = [t for t in MOD_DQ_DKV if _covers(t, head_dim, head_dim_v, softcap)]
    # Only tiles with the first one's head dims, as tiles for larger ones need no fewer registers.
    same = [t for t in covers if (t.head_dim, t.head_dim_v) == (covers[0].head_dim, covers[0].head_dim_v)]
    return tuple(tuple(t for t in same if t.gradient == gradient) for gradient in GRADIENTS) if same else ()


def _covers(
    tile: WarpgroupTile | WarpgroupBackwardTile | WarpgroupDqDkvTile, head_dim: int, head_dim_v: int, softcap: bool
) -> bool:
    return head_dim <= tile.head_dim and head_dim_v <= tile.head_dim_v and tile.softcap in (None, softcap)
