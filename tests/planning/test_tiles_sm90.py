"""Tables of the sm90 tiles: the row chosen at the edges of each row."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from cuflash.planning.device import DEVICES
from cuflash.planning.tile_shapes_sm90 import GRADIENTS
from cuflash.planning.tiles_sm90 import BACKWARD, DQ_DKV, MOD_TILES, TILES, choose, choose_backward, choose_dq_dkv

MANY = float("inf")
CAPPED = (False, True)
EVERY = [pytest.param(row, id=f"{type(row).__name__}-{n}") for n, row in enumerate((*TILES, *BACKWARD, *DQ_DKV))]


def chosen(row: Any, head_dim: int, head_dim_v: int, capped: bool, count: float | None = None) -> Any:
    """Returns the choice for these head dims from the row's table. count: keys or queries, by default the row's."""
    if row in TILES:
        return choose("forward", head_dim, head_dim_v, count or row.max_keys or MANY, capped)
    if row in BACKWARD:
        return choose_backward(head_dim, head_dim_v, row.min_queries if count is None else count, capped)
    tiles = choose_dq_dkv(head_dim, head_dim_v, capped)
    return tiles[GRADIENTS.index(row.gradient)] if tiles else None


@pytest.mark.parametrize("row", EVERY)
def test_a_row_is_chosen_up_to_its_head_dims_and_for_its_scores(row: Any) -> None:
    assert row.smem_bytes(2) <= DEVICES["sm_90"].smem_per_block
    for capped in CAPPED:
        for down in ((0, 0), (31, 0), (0, 31)):
            tile = chosen(row, row.head_dim - down[0], row.head_dim_v - down[1], capped)
            assert (tile is row) == (row.softcap in (None, capped))
        for dims in ((row.head_dim + 1, row.head_dim_v), (row.head_dim, row.head_dim_v + 1)):
            other = chosen(row, *dims, capped)
            assert other is not row
            assert other is None or (other.head_dim >= dims[0] and other.head_dim_v >= dims[1])


@pytest.mark.parametrize("capped", CAPPED)
def test_head_dims_up_to_the_last_row_have_tiles(capped: bool) -> None:
    for dims in product(range(1, 260, 3), range(1, 260, 3)):
        tiles_of_ops = (
            choose("forward", *dims, 100.0, capped),
            choose_backward(*dims, 0, capped),
            choose_dq_dkv(*dims, capped),
        )
        for most, tiles in zip((256, 128, 256), (tiles_of_ops[:1], tiles_of_ops[1:2], tiles_of_ops[2]), strict=True):
            assert (None in tiles or not tiles) == (max(dims) > most)
            for tile in tiles if max(dims) <= most else ():
                assert (tile.head_dim >= dims[0], tile.head_dim_v >= dims[1]) == (True, True)
                assert tile.softcap in (None, capped)
        assert [tile.gradient for tile in tiles_of_ops[2]] in ([], list(GRADIENTS))
        assert len({(tile.head_dim, tile.head_dim_v) for tile in tiles_of_ops[2]}) <= 1


@pytest.mark.parametrize("capped", CAPPED)
def test_a_row_for_few_keys_or_many_queries_is_chosen_up_to_its_limit(capped: bool) -> None:
    limits = [(row, row.max_keys, 0.5, 0.01) for row in TILES if row.max_keys is not None]
    limits += [(row, row.min_queries, 2.0**30, -0.01) for row in BACKWARD if row.min_queries]  # type: ignore[misc]
    assert {type(row) for row, *_ in limits} == {type(TILES[0]), type(BACKWARD[0])}
    for row, limit, within, step in limits:
        dims = row.head_dim, row.head_dim_v
        assert chosen(row, *dims, capped, within) is chosen(row, *dims, capped, limit) is row
        other = chosen(row, *dims, capped, limit + step)
        assert other is not row
        assert other is None or (other.head_dim, other.head_dim_v) == dims


@pytest.mark.parametrize("capped", CAPPED)
def test_lse_has_the_row_of_forward_for_many_keys_without_v(capped: bool) -> None:
    for head_dim in range(1, 257):
        row, forward = choose("lse", head_dim, 0, MANY, capped), choose("forward", head_dim, 1, MANY, capped)
        assert (row.head_dim_v, row.out_panels, row.ping_pong, row.max_keys) == (0, 0, False, None)
        assert choose("lse", head_dim, 0, 1.0, capped) == row  # for any number of keys
        assert head_dim <= row.head_dim == forward.head_dim
        assert (row.block_q, row.block_k, row.stages) == (forward.block_q, forward.block_k, forward.stages)
        assert row.smem_bytes(2) <= DEVICES["sm_90"].smem_per_block
    assert choose("lse", 257, 0, MANY, capped) is None


def test_no_tile_of_forward_reaches_farther_than_its_docstring_says() -> None:
    for row in (*TILES, *MOD_TILES):
        assert row.block_q <= 192
        assert row.block_k <= 128
