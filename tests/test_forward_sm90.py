"""The Hopper forward kernel (wgmma and TMA): every tile, mask, layout and schedule against float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import oracle
import pytest

import cuflash
from cuflash import device, launch, params, tiles_sm90
from cuflash.bench.cases import Case, numpy_dtype
from cuflash.errors import UnsupportedError
from cuflash.plan import plan as make_plan
from cuflash.tiles_sm90 import TILES, WarpgroupTile

Arrays = tuple[np.ndarray[Any, Any], ...]


def _is_hopper() -> bool:
    try:
        return device.query(0).capability == (9, 0)
    except UnsupportedError:
        return False


ON_HOPPER = [pytest.mark.gpu, pytest.mark.skipif(not _is_hopper(), reason="needs a GPU of sm_90")]
pytestmark = ON_HOPPER
ROWS = [row for row in TILES if row.softcap is not True]  # a row for capped scores goes with that for the others
every_tile = pytest.mark.parametrize("tile", ROWS, ids=lambda t: f"d{t.head_dim}x{t.head_dim_v}q{t.block_q}")
every_dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


@contextmanager
def only(tile: WarpgroupTile | None) -> Iterator[None]:
    """Plans know of this Hopper tile alone, so that short problems meet it, too; None leaves them as they are."""
    if tile is None:
        yield
        return
    with mock.patch.object(tiles_sm90, "TILES", alone(tile)):
        try:
            make_plan.cache_clear(), launch._launchers.clear()
            yield
        finally:
            make_plan.cache_clear(), launch._launchers.clear()


def alone(tile: WarpgroupTile) -> tuple[WarpgroupTile, ...]:
    """This tile and the one of its head dims for capped scores, for any number of keys."""
    dims = tile.head_dim, tile.head_dim_v
    rows = [row for row in TILES if row == tile or (row.softcap and (row.head_dim, row.head_dim_v) == dims)]
    return tuple(replace(row, max_keys=None) for row in rows)


def run(*arrays: Any, tile: WarpgroupTile | None = None, hopper: bool = True, out: Any = None, **more: Any) -> Any:
    """`(out, lse)` of NumPy or CuPy arrays, written over NaN by the kernel that is expected: the Hopper one or not."""
    import cupy

    q, k, v = map(cupy.asarray, arrays)
    if out is None:
        out = cupy.full((*q.shape[:-1], v.shape[-1]), cupy.nan, more.get("out_dtype") or q.dtype)
    launch_it, ran = launch.Kernels.launch, []

    def noted(kernels: launch.Kernels, pointers: tuple[int, ...], stream: int) -> None:
        ran.append(isinstance(kernels.parameters, params.WarpgroupParameters))
        launch_it(kernels, pointers, stream)

    with only(tile), mock.patch.object(launch.Kernels, "launch", noted):
        if hopper:
            variant = cuflash.plan(q, k, v, **more).variant
            assert variant is not None
            assert (variant.op, variant.source) == ("forward", "sm90/forward.cu")
            if tile is not None:
                assert variant.tile == next(row for row in alone(tile) if row.softcap in (None, variant.softcap))
        cupy.full(q.size // q.shape[-1], cupy.nan, "float32")  # memory that lse is likely to get
        got, lse = cuflash.forward(q, k, v, out=out, return_lse=True, **more)
    assert got is out
    assert ran == [hopper]
    return out, lse


def host(array: Any) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array.get())


def assert_same(one: Any, other: Any, where: Any = np.s_[:]) -> None:
    """Bitwise, in these places."""
    a, b = (np.ascontiguousarray(host(x)[where]) for x in (one, other))
    assert a.shape == b.shape
    differ = np.argwhere(a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}"))
    assert not len(differ), f"{len(differ)} of {a.size} numbers differ, the first at {tuple(map(int, differ[0]))}"


def assert_right(
    case: Case, arrays: Arrays, out: Any, lse: Any, *, rows: Any = None, wide: bool = False, ulps: float = 1.0
) -> None:
    """The tolerance rule against float64, of all rows or some; wide: the yardstick is float32, not 16 bits."""
    of = replace(case, dtype="float32") if wide else case
    small = tuple(x.astype("f4") for x in arrays) if wide else arrays
    with np.errstate(all="ignore"):
        exact, exact_lse = oracle.attention64(case, *arrays) if rows is None else some(None, case, arrays, rows)
        naive, naive_lse = oracle.naive(of, *small) if rows is None else some("naive", of, small, rows)
        norms = [np.linalg.norm(x.astype("f8"), axis=3) for x in arrays[:2]]
    largest = [float(norm[np.isfinite(norm)].max(initial=0.0)) for norm in norms]
    at = slice(None) if rows is None else rows
    # lse errs by units of the products that scores are sums of, whatever they come to: tensor cores truncate what they
    # add up, once in every 16 columns.
    lse_ulps = max(4.0, case.head_dim / 16)
    unit = 1.0 + case.problem().softmax_scale * largest[0] * largest[1]
    # Below the smallest normal number of float16 a unit in the last place does not shrink any more.
    least = 2.0**-14 if case.dtype == "float16" else 0.0
    oracle.assert_close("out", host(out)[:, at], exact, naive, ulps=ulps, unit=least)
    oracle.assert_close("lse", host(lse)[:, :, at], exact_lse, naive_lse, ulps=lse_ulps, unit=unit)


def some(kind: str | None, case: Case, arrays: Arrays, rows: list[int]) -> tuple[Any, Any]:
    """The oracle's `(out, lse)` of some rows, each a problem of its own with the keys that it sees."""
    results = []
    for row in rows:
        begin, end = case.problem().mask.key_range(row, row + 1)
        one = Case("row", case.batch, 1, end - begin, case.heads_q, case.heads_kv, case.head_dim, case.head_dim_v,
                   case.dtype, softmax_scale=case.softmax_scale, softcap=case.softcap)  # fmt: skip
        cut = arrays[0][:, row : row + 1], arrays[1][:, begin:end], arrays[2][:, begin:end]
        results.append((oracle.naive if kind == "naive" else oracle.attention64)(one, *cut))
    outs, lses = zip(*results, strict=True)
    return np.concatenate(outs, 1), np.concatenate(lses, 2)


def case_of(tile: WarpgroupTile, dtype: str, seqlen_q: int, seqlen_k: int, **more: Any) -> Case:
    """A problem with the head dims of a tile."""
    heads, batch = more.pop("heads", (8, 2)), more.pop("batch", 2)
    return Case("", batch, seqlen_q, seqlen_k, *heads, tile.head_dim, tile.head_dim_v, dtype, **more)


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


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "left": {"window_size": (70, -1)},
    "right": {"window_size": (-1, 40)},
    "both": {"window_size": (90, 33)},
    "one_key": {"window_size": (0, 0)},
    "causal_window": {"causal": True, "window_size": (150, -1)},
    "offset": {"causal": True, "diagonal_offset": 37},
    "offset_negative": {"causal": True, "diagonal_offset": -150},
    "offset_far": {"causal": True, "diagonal_offset": 10**12},
    "offset_odd": {"window_size": (61, 7), "diagonal_offset": -45},
    "top_left": {"causal": True, "diagonal_offset": 0},
    "last_rows_blind": {"window_size": (20, -1), "diagonal_offset": 100},
    "band_past_the_end": {"window_size": (5, 5), "diagonal_offset": 100},
    "softcap": {"causal": True, "softcap": 20.0},
    "softcap_full": {"softcap": 2.0, "softmax_scale": 0.3},
}


@every_tile
@every_dtype
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_caps(tile: WarpgroupTile, dtype: str, mask: str) -> None:
    import cupy

    for queries, keys in ((2 * tile.block_q + 37, 3 * tile.block_k + 29), (3 * tile.block_q - 1, 2 * tile.block_k + 1)):
        case = case_of(tile, dtype, queries, keys, batch=1, **MASKS[mask])
        arrays = case.arrays()
        out, lse = run(*arrays, tile=tile, **case.arguments())
        assert_right(case, arrays, out, lse)
        q, k, _ = map(cupy.asarray, arrays)
        with only(tile):
            other = cuflash.lse(q, k, **case.arguments())
        np.testing.assert_allclose(host(other), host(lse), rtol=1e-5, atol=1e-5)


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


def padded(array: Any, fill: float = math.nan) -> Any:
    """In the middle of a larger array; 16-byte aligned, as TMA needs it."""
    import cupy

    b, s, h, d = array.shape
    part = np.s_[:b, 3 : 3 + s, 1 : 1 + h, 8 : 8 + d]
    whole = np.full((b + 1, s + 5, h + 2, -(-d // 8) * 8 + 24), fill, array.dtype)
    whole[part] = array
    return cupy.asarray(whole)[part]


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
def test_a_layout_changes_no_bit(tile: WarpgroupTile, dtype: str) -> None:
    import cupy

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
def test_a_packed_tensor_changes_no_bit(dtype: str) -> None:
    import cupy

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
