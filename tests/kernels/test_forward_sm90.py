"""The sm90 forward kernel (wgmma and TMA): every tile, mask, layout and schedule against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hopper import (
    MASKS,
    ON_HOPPER,
    ROWS,
    assert_right,
    assert_same,
    case_of,
    check,
    every_dtype,
    every_kernel,
    only,
    padded,
    run,
)
from libraries import poisoned

import cuflash
from cuflash.planning.tile_shapes_sm90 import WarpgroupTile
from cuflash.testing.cases import Case, numpy_dtype
from cuflash.testing.layouts import heads_first, host, laid_out, odd_rows, odd_start, reversed_keys, wide_rows

pytestmark = ON_HOPPER


# (a, b, c, d): a block_q + b queries, c block_k + d keys
LENGTHS = [(0, 1, 0, 1), (0, 1, 2, -1), (1, -1, 1, -1), (1, 0, 1, 0), (1, 1, 2, 1), (0, 64, 1, 1), (0, 65, 0, 17),
           (2, 1, 1, 0), (3, 0, 6, 0), (0, 16, 5, 3)]  # fmt: skip


@every_kernel
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: "_".join(map(str, lengths)))
def test_lengths_around_the_edges_of_a_tile(tile: WarpgroupTile, dtype: str, causal: bool, lengths: Any) -> None:
    a, b, c, d = lengths
    queries, keys = a * tile.block_q + b, c * tile.block_k + d
    check(case_of(tile, dtype, queries, keys, heads=(3, 1), causal=causal), tile)


@every_kernel
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_caps(cupy: Any, tile: WarpgroupTile, dtype: str, mask: str) -> None:
    for queries, keys in ((2 * tile.block_q + 37, 3 * tile.block_k + 29), (3 * tile.block_q - 1, 2 * tile.block_k + 1)):
        case = case_of(tile, dtype, queries, keys, batch=1, **MASKS[mask])
        arrays = case.arrays()
        out, _ = check(case, tile, arrays)
        q, k, _ = map(cupy.asarray, arrays)
        with only(tile):
            other = cuflash.lse(q, k, **case.arguments())
        assert_right(case, arrays, out, other)


@every_kernel
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_head_dims_and_keys_choose_the_tile(tile: WarpgroupTile, dtype: str, causal: bool) -> None:
    is_tall = any(other.max_keys for other in ROWS if other.head_dim == tile.head_dim) and not tile.max_keys
    shape = (tile.block_q - 2, 2800, (90, 45)) if is_tall else (293, 410, (2, 1))
    case = case_of(tile, dtype, *shape[:2], heads=shape[2], causal=causal)
    plan = cuflash.plan(*case.shapes(), dtype=dtype, device="sm_90", causal=causal, num_splits=1)
    assert plan.variant is not None
    assert plan.variant.tile == tile
    check(case)


HEAD_DIMS = [(8, 8), (40, 64), (72, 72), (80, 80), (112, 112), (136, 136), (200, 200), (72, 136), (200, 80), (136, 72),
             (24, 120), (192, 136), (248, 256)]  # fmt: skip


@every_dtype
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=lambda dims: f"{dims[0]}x{dims[1]}")
def test_head_dims_that_are_no_tiles(dims: tuple[int, int], dtype: str) -> None:
    for heads, causal in (((4, 1), True), ((2, 2), False)):
        check(Case("", 2, 150, 203, *heads, *dims, dtype, causal=causal))


@pytest.mark.parametrize("rank", [2, 3])
def test_fewer_axes_run_on_it_too(rank: int) -> None:
    case = Case("", 1, 200, 150, 1, 1, 64, 64, "bfloat16", causal=True)
    arrays = case.arrays()
    whole, whole_lse = run(*arrays, causal=True)
    cut = {3: np.s_[0], 2: np.s_[0, :, 0]}[rank]
    out, lse = run(*(x[cut] for x in arrays), causal=True)
    assert_same(out, whole[cut])
    assert_same(lse.reshape(whole_lse.shape), whole_lse)


LAYOUTS = heads_first, partial(laid_out, axis_order=(1, 0, 2, 3)), partial(laid_out, axis_order=(2, 1, 0, 3)), padded


@every_kernel
def test_a_layout_changes_no_bit(cupy: Any, tile: WarpgroupTile, dtype: str) -> None:
    dims = tile.head_dim - 8, tile.head_dim_v - 8
    case = Case("", 2, tile.block_q + 5, 2 * tile.block_k + 9, 4, 2, *dims, dtype, causal=True)
    arrays = case.arrays()
    dense, lse = check(case, tile, arrays)
    for layout in LAYOUTS:
        views = tuple(layout(cupy.asarray(x)) for x in arrays)
        target = layout(poisoned(dense.shape, dense.dtype))
        for inputs, out in ((views, None), (arrays, target), (views, target)):
            if out is not None:
                out[...] = cupy.nan
            got, got_lse = run(*inputs, tile=tile, out=out, causal=True)
            assert_same(got, dense)
            assert_same(got_lse, lse)


@every_kernel
def test_float32_out_rounds_to_the_16_bit_out_and_writes_nothing_beside(tile: WarpgroupTile, dtype: str) -> None:
    case = replace(case_of(tile, dtype, tile.block_q + 5, 300, causal=True), head_dim_v=tile.head_dim_v - 8)
    arrays = case.arrays()
    narrow, lse = check(case, tile, arrays)
    for out_dtype in (dtype, "float32"):
        target = padded(np.full(narrow.shape, np.nan, numpy_dtype(out_dtype)), fill=7.0)
        out, lse_beside = run(*arrays, tile=tile, out=target, out_dtype=out_dtype, causal=True)
        np.testing.assert_array_equal(host(out).astype(narrow.dtype).view("u2"), host(narrow).view("u2"))
        assert_same(lse_beside, lse)
        target[...] = 7.0
        assert (host(target.base) == 7.0).all()


WAYS = {"odd_start": odd_start, "odd_rows": odd_rows, "reversed_keys": reversed_keys}
WAYS["repeated"] = lambda x: np.broadcast_to(x[:1], x.shape)  # one batch element in the memory of all
ODD_OPERANDS = [(way, n) for way, n in itertools.product(WAYS, range(4)) if (way, n) != ("repeated", 3)]


@every_dtype
@pytest.mark.parametrize(("way", "operand"), ODD_OPERANDS, ids=[f"{w}_{'qkvo'[n]}" for w, n in ODD_OPERANDS])
def test_what_tma_cannot_address_runs_on_the_generic_kernel(cupy: Any, way: str, operand: int, dtype: str) -> None:
    case = Case("", 2, 140, 150, 4, 2, 64, 72, dtype, causal=True)
    arrays = case.arrays()
    if way == "repeated":
        arrays[operand][:] = arrays[operand][:1]
    operands = [*arrays, np.full((2, 140, 4, 72), np.nan, numpy_dtype(dtype))]
    operands[operand] = WAYS[way](cupy.asarray(operands[operand]))
    target = operands.pop() if operand == 3 else None
    out, lse = run(*operands[:3], out=target, hopper=False, causal=True)
    assert_right(case, arrays, out, lse)
    if operand < 3 and way != "odd_start":  # a plan depends on neither pointers nor out
        variant = cuflash.plan(*map(cupy.asarray, operands[:3]), causal=True).variant
        assert variant is not None
        assert variant.source == "sm80/forward.cu"


def test_one_call_follows_the_alignment_of_its_arrays(cupy: Any) -> None:
    q, k, v = map(cupy.asarray, Case("", 2, 140, 150, 4, 2, 64, 64, "bfloat16").arrays())
    even, odd = wide_rows(k), odd_start(k)
    assert even.strides == odd.strides
    first, _ = run(q, even, v)
    for _ in range(2):
        run(q, odd, v, hopper=False)
        assert_same(run(q, even, v)[0], first)
