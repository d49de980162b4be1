"""The sm90 forward kernel in tests: single tiles, calls that must run on it, and their check."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mod_table import launched
from plans import planned_with

import cuflash
from cuflash.errors import UnsupportedError
from cuflash.planning import decoding, device, tiles_sm90
from cuflash.planning.tile_shapes_sm90 import WarpgroupTile
from cuflash.planning.tiles_sm90 import TILES
from cuflash.testing import oracle
from cuflash.testing.cases import Case
from cuflash.testing.layouts import host, laid_out

Arrays = tuple[np.ndarray[Any, Any], ...]


def _is_hopper() -> bool:
    try:
        return device.query(0).capability == (9, 0)
    except UnsupportedError:
        return False


ON_HOPPER = [pytest.mark.gpu, pytest.mark.skipif(not _is_hopper(), reason="needs a GPU of sm_90")]
ROWS = [row for row in TILES if row.softcap is not True]  # `alone` adds the row for softcap
every_tile = pytest.mark.parametrize("tile", ROWS, ids=lambda t: f"d{t.head_dim}x{t.head_dim_v}q{t.block_q}")
every_dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def every_kernel(test: Any) -> Any:
    """Runs a test on every tile in every dtype."""
    return every_tile(every_dtype(test))


def only(tile: WarpgroupTile | None) -> AbstractContextManager[None]:
    """Returns a context in which plans have only this sm90 tile, also for short problems; None changes nothing."""
    return planned_with(tiles_sm90, TILES=alone(tile)) if tile else nullcontext()


def alone(tile: WarpgroupTile) -> tuple[WarpgroupTile, ...]:
    """Returns this tile and the tile of its head dims for softcap, for any number of keys."""
    dims = tile.head_dim, tile.head_dim_v
    rows = [row for row in TILES if row == tile or (row.softcap and (row.head_dim, row.head_dim_v) == dims)]
    return tuple(replace(row, max_keys=None) for row in rows)


@contextmanager
def one_call(hopper: bool) -> Iterator[None]:
    """Checks that exactly one call runs inside, with an sm90 kernel if `hopper`, else without."""
    with launched() as ran:
        yield
    assert [plan.variant.of_warpgroups for plan in ran] == [hopper]


def run(*arrays: Any, tile: WarpgroupTile | None = None, hopper: bool = True, out: Any = None, **more: Any) -> Any:
    """Returns `(out, lse)` of NumPy or CuPy arrays, written over NaN by an sm90 kernel if `hopper`, else by another."""
    import cupy

    q, k, v = map(cupy.asarray, arrays)
    if out is None:
        out = cupy.full((*q.shape[:-1], v.shape[-1]), cupy.nan, more.get("out_dtype") or q.dtype)
    # Tests of forward.cu: GAIN keeps few queries over many keys from decode.cu.
    with only(tile), planned_with(decoding, GAIN=math.inf), one_call(hopper):
        if hopper:
            variant = cuflash.plan(q, k, v, **more).variant
            assert variant is not None
            assert (variant.op, variant.source) == ("forward", "sm90/forward/forward.cu")
            if tile is not None:
                assert variant.tile == next(row for row in alone(tile) if row.softcap in (None, variant.softcap))
        cupy.full(q.size // q.shape[-1], cupy.nan, "float32")  # memory that lse is likely to get
        got, lse = cuflash.forward(q, k, v, out=out, return_lse=True, **more)
    assert got is out
    return out, lse


def assert_same(one: Any, other: Any, where: Any = np.s_[:]) -> None:
    """Checks that two arrays are equal bit by bit at these indices."""
    a, b = (np.ascontiguousarray(host(x)[where]) for x in (one, other))
    assert a.shape == b.shape
    differ = np.argwhere(a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}"))
    assert not len(differ), f"{len(differ)} of {a.size} numbers differ, the first at {tuple(map(int, differ[0]))}"


def assert_right(
    case: Case, arrays: Arrays, out: Any, lse: Any, *, rows: Any = None, wide: bool = False, ulps: float = 1.0
) -> None:
    """Checks the tolerance rule against float64, for all rows or some. wide: the naive computation is in float32."""
    naive_case = replace(case, dtype="float32") if wide else case
    small = tuple(x.astype("f4") for x in arrays) if wide else arrays
    with np.errstate(all="ignore"):
        exact, exact_lse = oracle.attention64(case, *arrays) if rows is None else some(None, case, arrays, rows)
        naive, naive_lse = oracle.naive(naive_case, *small) if rows is None else some("naive", naive_case, small, rows)
        norms = [np.linalg.norm(x.astype("f8"), axis=3) for x in arrays[:2]]
    largest = [float(norm[np.isfinite(norm)].max(initial=0.0)) for norm in norms]
    index = slice(None) if rows is None else rows
    # lse errs by units of the products that scores are sums of, whatever their sum: tensor cores truncate sums once in
    # every 16 columns.
    lse_ulps = max(4.0, case.head_dim / 16)
    unit = 1.0 + case.problem().softmax_scale * largest[0] * largest[1]
    # Below the smallest normal number of float16, a unit in the last place is constant.
    least = 2.0**-14 if case.dtype == "float16" else 0.0
    oracle.assert_close("out", host(out)[:, index], exact, naive, ulps=ulps, unit=least)
    oracle.assert_close("lse", host(lse)[:, :, index], exact_lse, naive_lse, ulps=lse_ulps, unit=unit)


def check(case: Case, tile: WarpgroupTile | None = None, arrays: Arrays | None = None, **rule: Any) -> tuple[Any, Any]:
    """Runs a case, perhaps with other arrays, and checks it against float64. rule: arguments of `assert_right`."""
    arrays = arrays or case.arrays()
    out, lse = run(*arrays, tile=tile, **case.arguments())
    assert_right(case, arrays, out, lse, **rule)
    return out, lse


def some(kind: str | None, case: Case, arrays: Arrays, rows: list[int]) -> tuple[Any, Any]:
    """Returns the oracle's `(out, lse)` of some rows, each computed as a problem with the keys that it sees."""
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
    """Returns a problem with the head dims of a tile."""
    heads, batch = more.pop("heads", (8, 2)), more.pop("batch", 2)
    return Case("", batch, seqlen_q, seqlen_k, *heads, tile.head_dim, tile.head_dim_v, dtype, **more)


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


def padded(array: Any, fill: float = math.nan) -> Any:
    """Returns a copy inside a larger CuPy array, 16-byte aligned as TMA needs it."""
    import cupy

    return laid_out(cupy.asarray(array), before=(0, 3, 1, 8), after=(1, 2, 1, 16 + -array.shape[3] % 8), fill=fill)
