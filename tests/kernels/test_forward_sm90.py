"""The Hopper forward kernel (wgmma and TMA): every tile, mask, layout and schedule against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
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
    every_dtype,
    every_tile,
    only,
    padded,
    run,
)
from libraries import host

import cuflash
from cuflash.bench.cases import Case, numpy_dtype
from cuflash.planning.tiles_sm90 import WarpgroupTile

pytestmark = ON_HOPPER


def check(case: Case, tile: WarpgroupTile | None = None) -> None:
    arrays = case.arrays()
    out, lse = run(*arrays, tile=tile, **case.arguments())
    assert_right(case, arrays, out, lse)


# (a, b, c, d): a block_q + b queries, c block_k + d keys
LENGTHS = [(0, 1, 0, 1), (0, 1, 2, -1), (1, -1, 1, -1), (1, 0, 1, 0), (1, 1, 2, 1), (0, 64, 1, 1), (0, 65, 0, 17),
           (2, 1, 1, 0), (3, 0, 6, 0), (0, 16, 5, 3)]  # fmt: skip


@every_tile
@every_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: "_".join(map(str, lengths)))
def test_lengths_around_the_edges_of_a_tile(tile: WarpgroupTile, dtype: str, causal: bool, lengths: Any) -> None:
    a, b, c, d = lengths
    queries, keys = a * tile.block_q + b, c * tile.block_k + d
    check(case_of(tile, dtype, queries, keys, heads=(3, 1), causal=causal), tile)


@every_tile
@every_dtype
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_caps(cupy: Any, tile: WarpgroupTile, dtype: str, mask: str) -> None:
    for queries, keys in ((2 * tile.block_q + 37, 3 * tile.block_k + 29), (3 * tile.block_q - 1, 2 * tile.block_k + 1)):
        case = case_of(tile, dtype, queries, keys, batch=1, **MASKS[mask])
        arrays = case.arrays()
        out, lse = run(*arrays, tile=tile, **case.arguments())
        assert_right(case, arrays, out, lse)
        q, k, _ = map(cupy.asarray, arrays)
        with only(tile):
            other = cuflash.lse(q, k, **case.arguments())
        assert_right(case, arrays, out, other)


@every_tile
@every_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_head_dims_and_keys_choose_the_tile(tile: WarpgroupTile, dtype: str, causal: bool) -> None:
    short = any(other.max_keys for other in ROWS if other.head_dim == tile.head_dim) and not tile.max_keys
    if tile.max_keys and not causal:
        pytest.skip("without a mask the other tile is taken")
    case = case_of(tile, dtype, 293, 2800 if short else 410, heads=(2, 1), causal=causal)
    made = cuflash.plan(*case.shapes(), dtype=dtype, device="sm_90", causal=causal)
    assert made.variant is not None
    assert made.variant.tile == tile
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


def permuted(*axes: int) -> Any:
    """Dense in memory in another order of axes, which is its own inverse."""
    import cupy

    return lambda array: cupy.asarray(np.ascontiguousarray(array.transpose(axes))).transpose(axes)


LAYOUTS = {
    "bhsd": lambda: permuted(0, 2, 1, 3),
    "sbhd": lambda: permuted(1, 0, 2, 3),
    "hsbd": lambda: permuted(2, 1, 0, 3),
    "padded": lambda: padded,
}


@every_tile
@every_dtype
def test_a_layout_changes_no_bit(cupy: Any, tile: WarpgroupTile, dtype: str) -> None:
    dims = tile.head_dim - 8, tile.head_dim_v - 8
    case = Case("", 2, tile.block_q + 5, 2 * tile.block_k + 9, 4, 2, *dims, dtype, causal=True)
    arrays = case.arrays()
    dense, lse = run(*arrays, tile=tile, causal=True)
    assert_right(case, arrays, dense, lse)
    for layout in LAYOUTS.values():
        views = tuple(map(layout(), arrays))
        target = layout()(np.full(dense.shape, np.nan, numpy_dtype(dtype)))
        for inputs, out in ((views, None), (arrays, target), (views, target)):
            if out is not None:
                out[...] = cupy.nan
            got, got_lse = run(*inputs, tile=tile, out=out, causal=True)
            assert_same(got, dense)
            assert_same(got_lse, lse)


@every_dtype
def test_a_packed_tensor_changes_no_bit(cupy: Any, dtype: str) -> None:
    case = Case("", 2, 300, 300, 3, 3, 128, 128, dtype, causal=True)
    arrays = case.arrays()
    packed = cupy.asarray(np.stack(arrays, 2))
    whole = run(*arrays, causal=True)
    for got, wanted in zip(run(*(packed[:, :, n] for n in range(3)), causal=True), whole, strict=True):
        assert_same(got, wanted)


@every_tile
@every_dtype
def test_float32_out_is_what_16_bits_are_rounded_from(tile: WarpgroupTile, dtype: str) -> None:
    case = replace(case_of(tile, dtype, tile.block_q + 5, 300, causal=True), head_dim_v=tile.head_dim_v - 8)
    arrays = case.arrays()
    narrow, lse = run(*arrays, tile=tile, causal=True)
    assert_right(case, arrays, narrow, lse)
    target = padded(np.full(narrow.shape, np.nan, "f4"), fill=7.0)
    wide, wide_lse = run(*arrays, tile=tile, out=target, out_dtype="float32", causal=True)
    np.testing.assert_array_equal(host(wide).astype(narrow.dtype).view("u2"), host(narrow).view("u2"))
    assert_same(wide_lse, lse)
    target[...] = 7.0
    assert (host(target.base) == 7.0).all()


@every_tile
def test_nothing_is_written_beside_out(tile: WarpgroupTile) -> None:
    case = case_of(tile, "float16", tile.block_q + 5, 70, heads=(2, 1), causal=True)
    case = replace(case, head_dim_v=tile.head_dim_v - 8)
    target = padded(np.full((2, case.seqlen_q, 2, case.head_dim_v), np.nan, "float16"), fill=7.0)
    run(*case.arrays(), tile=tile, out=target, causal=True)
    assert not np.isnan(host(target)).any()
    target[...] = 7.0
    assert (host(target.base) == 7.0).all()


def shifted(array: Any) -> Any:
    """Dense, 2 bytes past an aligned address."""
    import cupy

    return cupy.asarray(np.concatenate([array.ravel()[:1], array.ravel()]))[1:].reshape(array.shape)


def gappy(array: Any) -> Any:
    """Rows an odd number of elements apart."""
    import cupy

    return cupy.asarray(np.concatenate([array, array[..., :1]], -1))[..., :-1]


def backwards(array: Any) -> Any:
    """The last row first in memory."""
    import cupy

    return cupy.asarray(np.ascontiguousarray(array[:, ::-1]))[:, ::-1]


def repeated(array: Any) -> Any:
    """One batch element in the memory of all."""
    import cupy

    return cupy.broadcast_to(cupy.asarray(array[:1]), array.shape)


WAYS = {"shifted": shifted, "gappy": gappy, "backwards": backwards, "repeated": repeated}
ODD_OPERANDS = [(way, n) for way, n in itertools.product(WAYS, range(4)) if (way, n) != ("repeated", 3)]


@every_dtype
@pytest.mark.parametrize(("way", "operand"), ODD_OPERANDS, ids=[f"{w}_{'qkvo'[n]}" for w, n in ODD_OPERANDS])
def test_what_tma_cannot_address_runs_on_the_generic_kernel(way: str, operand: int, dtype: str) -> None:
    case = Case("", 2, 140, 150, 4, 2, 64, 72, dtype, causal=True)
    arrays = case.arrays()
    if way == "repeated":
        arrays[operand][:] = arrays[operand][:1]
    given = [*arrays, np.full((2, 140, 4, 72), np.nan, numpy_dtype(dtype))]
    given[operand] = WAYS[way](given[operand])
    target = given.pop() if operand == 3 else None
    out, lse = run(*given[:3], out=target, hopper=False, causal=True)
    assert_right(case, arrays, out, lse)
    if operand < 3 and way != "shifted":  # a plan is told neither of pointers nor of out
        import cupy

        variant = cuflash.plan(*map(cupy.asarray, given[:3]), causal=True).variant
        assert variant is not None
        assert variant.source == "sm80/forward.cu"


OTHERS: dict[str, dict[str, Any]] = {
    "flash1": {"algorithm": "flash1"},
    "flashd": {"algorithm": "flashd"},
    "sees_nothing": {"causal": True, "diagonal_offset": -1000},
    "odd_head_dim": {},
}


@every_dtype
@pytest.mark.parametrize("other", OTHERS)
def test_what_it_does_not_offer_runs_on_the_generic_kernel(other: str, dtype: str) -> None:
    case = Case("", 2, 140, 150, 4, 2, 65 if other == "odd_head_dim" else 64, 64, dtype)
    case = replace(case, causal="causal" in OTHERS[other], diagonal_offset=OTHERS[other].get("diagonal_offset"))
    arrays = case.arrays()
    variant = cuflash.plan(*case.shapes(), dtype=dtype, device="sm_90", **OTHERS[other]).variant
    assert variant is not None
    assert variant.source == "sm80/forward.cu"
    assert_right(case, arrays, *run(*arrays, hopper=False, **OTHERS[other]))


def test_one_call_follows_the_alignment_of_its_arrays() -> None:
    arrays = Case("", 2, 140, 150, 4, 2, 64, 64, "bfloat16").arrays()
    first, _ = run(*arrays)
    for _ in range(2):
        run(arrays[0], shifted(arrays[1]), arrays[2], hopper=False)
        assert_same(run(*arrays)[0], first)
