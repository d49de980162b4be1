"""Persistent thread blocks of sm90 kernels: many work tiles in turn, in any order, beside other work."""

from __future__ import annotations

from typing import Any

import pytest
from hopper import MASKS, ON_HOPPER, assert_right, assert_same, case_of, check, every_kernel, every_tile, only, run

import cuflash
from cuflash.planning.tile_shapes_sm90 import WarpgroupTile
from cuflash.testing import oracle
from cuflash.testing.layouts import host

pytestmark = ON_HOPPER


@every_kernel
@pytest.mark.parametrize("mask", ["full", "causal", "causal_window", "offset_negative"])
def test_more_tiles_than_sms(tile: WarpgroupTile, dtype: str, mask: str) -> None:
    case = case_of(tile, dtype, tile.block_q + 30, 2 * tile.block_k - 5, heads=(24, 6), batch=6, **MASKS[mask])
    arrays = case.arrays()
    first = check(case, tile, arrays)
    for _ in range(3):  # the counter of tiles is zero again
        for got, expected in zip(run(*arrays, tile=tile, **case.arguments()), first, strict=True):
            assert_same(got, expected)


@every_tile
def test_many_query_blocks_of_one_key_each(cupy: Any, tile: WarpgroupTile) -> None:
    """More query blocks than a thread block has work slots; a row of out is v, and its lse is the score."""
    # 18 for each of 132 thread blocks.
    shapes = case_of(tile, "float16", 18 * tile.block_q, 1, heads=(44, 11), batch=3).shapes()
    q, k, v = (cupy.random.standard_normal(shape, "f4").astype("f2") for shape in shapes)
    out, lse = run(q, k, v, tile=tile)
    assert (out == cupy.repeat(v, 4, axis=2)).all()
    with only(tile):
        alone = cuflash.lse(q, k)
    for batch in range(3):
        terms = q[batch].astype("f8") * cupy.repeat(k, 4, axis=2)[batch] / tile.head_dim**0.5
        for got in (lse, alone):
            unit = float(cupy.abs(terms).sum(-1).max())
            oracle.assert_units("lse", host(got[batch]), host(terms.sum(-1).T), max(4.0, tile.head_dim / 16), unit)


@every_kernel
@pytest.mark.parametrize("half_tiles", [1, 2, 3, 5])
def test_windows_that_warpgroups_see_different_key_tiles_of(
    cupy: Any, tile: WarpgroupTile, dtype: str, half_tiles: int
) -> None:
    # 80 query blocks of one problem, 5 key tiles each, of all lengths, masked at one end, the other or both.
    for beyond in (-1, 20):
        window = half_tiles * tile.block_k // 2 + beyond
        mask: dict[str, Any] = {"causal": True, "window_size": (window, -1)}
        case = case_of(tile, dtype, 4 * tile.block_q + 37, 4 * tile.block_q + 107, heads=(1, 1), batch=1, **mask)
        arrays = case.arrays()
        out, lse = run(*(cupy.repeat(cupy.asarray(x), 80, 0) for x in arrays), tile=tile, **case.arguments())
        assert_right(case, arrays, out[:1], lse[:1])
        for got in (out.view("u2"), lse.view("u4")):
            assert (got == got[:1]).all()


@every_tile
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_1000_repeats_on_two_streams_beside_copies_are_bitwise_equal(cupy: Any, tile: WarpgroupTile, mask: str) -> None:
    case = case_of(tile, "bfloat16", 500, 500, heads=(16, 4), batch=4, **MASKS[mask])
    q, k, v = map(cupy.asarray, case.arrays())
    expected, expected_lse = run(q, k, v, tile=tile, **case.arguments())
    source, target = cupy.zeros((2, 2**27), "u1")
    copying, *streams = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    differ = [cupy.zeros(2, "i8") for _ in streams]
    cupy.cuda.Device().synchronize()
    with only(tile):
        for _ in range(500):
            target.data.copy_from_device_async(source.data, source.nbytes, copying)
            for stream, count in zip(streams, differ, strict=True):
                with stream:
                    out, lse = cuflash.forward(q, k, v, return_lse=True, **case.arguments())
                    count[0] += (out.view("u2") != expected.view("u2")).sum()
                    count[1] += (lse.view("u4") != expected_lse.view("u4")).sum()
    cupy.cuda.Device().synchronize()
    assert [host(count).tolist() for count in differ] == [[0, 0], [0, 0]]
