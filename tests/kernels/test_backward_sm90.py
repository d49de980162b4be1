"""The sm90 backward kernels (wgmma and TMA): every tile, mask, layout and order of key blocks against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gradients import COMPUTED, DETERMINISTIC
from hopper import ON_HOPPER, one_call
from libraries import bits
from plans import planned_with

import cuflash
from cuflash.planning import backward as plan_backward
from cuflash.planning import backward_sm90, device, tile_shapes_sm90, tiles_sm90
from cuflash.planning.planner import plan as make_plan
from cuflash.testing.cases import Case, numpy_dtype
from cuflash.testing.gradients import BackwardArgs, backward, backward_args, check
from cuflash.testing.layouts import heads_first, host, identical, laid_out, odd_start, reversed_keys

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("new_memory_holds_nan")]
HALVES = [case for case in COMPUTED if case.dtype != "float32"]
FUSED = [tile for tile in tiles_sm90.BACKWARD if tile.softcap is not True]  # all gradients in one kernel
BY_ROWS = dict.fromkeys(  # a kernel for each gradient
    dims
    for tile in tiles_sm90.DQ_DKV
    if not tiles_sm90.choose_backward(*(dims := (tile.head_dim, tile.head_dim_v)), 1.0, False)
)


@pytest.fixture(
    params=[*FUSED, *tiles_sm90.CLUSTER_BACKWARD, *BY_ROWS],
    ids=lambda x: f"{x[0]}x{x[1]}" if isinstance(x, tuple) else f"d{x.head_dim}q{x.block_q}",
)
def dims(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Yields the head dims of a kernel, and lets the planner choose it for any number of queries."""
    if isinstance(request.param, tuple):
        with planned_with(tiles_sm90, CLUSTER_BACKWARD=()):
            yield request.param
        return
    if isinstance(request.param, tile_shapes_sm90.ClusterBackwardTile):
        yield request.param.head_dim, request.param.head_dim_v
        return
    shape = request.param.head_dim, request.param.block_q
    capped = [tile for tile in tiles_sm90.BACKWARD if tile.softcap and (tile.head_dim, tile.block_q) == shape]
    table = *capped, replace(request.param, min_queries=0)
    with planned_with(tiles_sm90, BACKWARD=table):
        yield request.param.head_dim, request.param.head_dim_v


def run(case: Case, inputs: BackwardArgs, *, hopper: bool = True, **more: Any) -> tuple[Any, ...]:
    """Returns gradients, and checks that an sm90 kernel runs, or not."""
    with one_call(hopper):
        return backward(case, inputs, **more)


def checked(cupy: Any, case: Case, **more: Any) -> tuple[BackwardArgs, tuple[Any, ...]]:
    """Returns the arrays of a call, and its gradients by an sm90 kernel, checked against float64."""
    inputs = backward_args(case, cupy)
    got = run(case, inputs, **more)
    check(case, inputs, got)
    return inputs, got


@pytest.mark.parametrize("case", HALVES, ids=lambda case: case.name)
def test_the_generic_kernels_agree_with_float64_too(cupy: Any, case: Case) -> None:
    inputs = backward_args(case, cupy)
    with planned_with(plan_backward, _reason_against=lambda *_: "the test asks for it"):
        for deterministic in (False, True):
            check(case, inputs, run(case, inputs, hopper=False, deterministic=deterministic))


@DETERMINISTIC
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_lengths_around_the_tiles(cupy: Any, dtype: str, dims: tuple[int, int], deterministic: bool) -> None:
    for length, other, causal in itertools.product((1, 63, 64, 65, 127, 128, 129, 257), (1, 200), (False, True)):
        for lengths in ((length, other), (other, length)):
            case = Case("length", 1, *lengths, 2, 2, *dims, dtype, causal=causal)
            checked(cupy, case, deterministic=deterministic)


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "below": {"causal": True, "diagonal_offset": -150},  # the first queries see no key, and no query sees the last keys
    "above": {"causal": True, "diagonal_offset": 300},
    "window": {"window_size": (130, 60)},
    "narrow": {"window_size": (3, 0), "diagonal_offset": 100},
    "left": {"window_size": (-1, 70), "diagonal_offset": 0},
    "right": {"window_size": (200, -1), "diagonal_offset": 20},
    "capped": {"causal": True, "softcap": 2.0},
}


@DETERMINISTIC
@pytest.mark.parametrize("mask", MASKS)
def test_many_blocks_under_every_mask(cupy: Any, mask: str, dims: tuple[int, int], deterministic: bool) -> None:
    for dtype, fewer in (("bfloat16", 0), ("float16", 24)):
        head_dim, head_dim_v = dims[0], dims[1] - fewer
        case = Case(mask, 1, 500, 600, 2, 2, head_dim, head_dim_v, dtype, **MASKS[mask])
        inputs, got = checked(cupy, case, deterministic=deterministic)
        begin, end = case.problem().mask.row_range(0, 600)
        assert not host(got[0])[:, np.r_[:begin, end:500]].any()
        if deterministic:
            assert identical(run(case, inputs, deterministic=True), got)


@pytest.mark.parametrize("dims", dict.fromkeys((tile.head_dim, tile.head_dim_v) for tile in FUSED), ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_blocks_that_take_several_key_blocks_give_the_same(cupy: Any, mask: str, dims: tuple[int, int]) -> None:
    case = Case(mask, 6, 300, 700, 2, 2, *dims, "bfloat16", **MASKS[mask])
    inputs = backward_args(case, cupy)
    _, dk, dv = run(case, inputs)
    table = tuple(replace(tile, key_blocks=4) for tile in tiles_sm90.BACKWARD)
    with planned_with(tiles_sm90, BACKWARD=table), planned_with(backward_sm90, SHORT_WAVES=0):
        assert make_plan(case.problem("backward"), device.query(0)).launches[1].fields["key_blocks"] > 1
        got = run(case, inputs)
        check(case, inputs, got)
        assert mask == "full" or identical(got[1:], (dk, dv))  # only dq is summed in another order


def check_in_many_orders(cupy: Any, case: Case, runs: int) -> None:
    """Checks gradients whose sums have no fixed order: the first, and the least and greatest of `runs` more."""
    inputs, first = checked(cupy, case)
    least = greatest = [x.astype("f4") for x in first]
    for _ in range(runs):
        got = [x.astype("f4") for x in run(case, inputs)]
        least, greatest = list(map(cupy.minimum, least, got)), list(map(cupy.maximum, greatest, got))
    for extremes in (least, greatest):
        check(case, inputs, tuple(host(x).astype(numpy_dtype(case.dtype)) for x in extremes))


def check_repeats(
    cupy: Any, case: Case, inputs: BackwardArgs, first: tuple[Any, ...], runs: int, which: slice, **more: Any
) -> None:
    """Checks that gradients repeat bit by bit under memory traffic. which: a slice of dq, dk and dv."""
    same, other = cupy.ones((), bool), cupy.cuda.Stream(non_blocking=True)
    source, target = cupy.zeros(1 << 26, "float32"), cupy.empty(1 << 26, "float32")
    for _ in range(runs):
        with other:
            target[...] = source
        for got, expected in zip(backward(case, inputs, **more)[which], first[which], strict=True):
            same &= (bits(got) == bits(expected)).all()
    assert bool(same)


SHARED = {
    "all": (1, 1000, 300, 2, 2),
    "one_key_block": (1, 4000, 100, 1, 1),
    "groups": (2, 700, 200, 6, 2),
    "after_a_wave": (1, 1300, 150 * 128 - 5, 1, 1),
    "after_two": (3, 400, 1500, 32, 8),
}


@pytest.mark.parametrize("dims", FUSED, indirect=True)
@pytest.mark.parametrize("shape", SHARED)
def test_blocks_that_share_key_blocks_add_up_dk_and_dv(cupy: Any, shape: str, dims: tuple[int, int]) -> None:
    case = Case(shape, *SHARED[shape], *dims, "bfloat16")
    assert make_plan(case.problem("backward"), device.query(0)).launches[1].fields["shared_keys"]
    check_in_many_orders(cupy, case, 100)


@pytest.mark.parametrize("dims", FUSED, indirect=True)
@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "full"])
def test_blocks_that_share_query_heads_add_up_dk_and_dv(cupy: Any, mask: str, dims: tuple[int, int]) -> None:
    for heads in ((8, 1), (6, 2)):
        case = Case(mask, 2, 1500, 600, *heads, *dims, "bfloat16", **MASKS[mask])
        assert make_plan(case.problem("backward"), device.query(0)).launches[1].fields["parts_log2"]
        check_in_many_orders(cupy, case, 50)


@pytest.mark.parametrize("dims", tiles_sm90.CLUSTER_BACKWARD, indirect=True)
@pytest.mark.parametrize("mask", MASKS)
def test_clusters_add_up_dq_in_any_order_and_repeat_dk_and_dv(cupy: Any, mask: str, dims: tuple[int, int]) -> None:
    for shape in ((1, 1000, 300, 2, 2), (1, 4000, 100, 1, 1), (1, 150, 20 * 128 - 5, 6, 2), (9, 700, 1500, 32, 8)):
        case = Case(mask, *shape, *dims, "bfloat16", **MASKS[mask])
        plan = make_plan(case.problem("backward"), device.query(0))
        if plan.fallback is None:  # else grouped heads have too few keys
            assert plan.launches[1].variant.num_in_cluster == 2
            check_in_many_orders(cupy, case, 10)
    inputs, first = checked(cupy, case)
    check_repeats(cupy, case, inputs, first, 100, slice(1, 3))


@pytest.mark.parametrize("dims", BY_ROWS, indirect=True)
@pytest.mark.parametrize("mask", ["causal", "window"])
def test_dq_dkv_blocks_that_share_query_heads_repeat_bit_by_bit(cupy: Any, mask: str, dims: tuple[int, int]) -> None:
    for heads in ((5, 1), (6, 2)):
        batch = -(-device.query(0).num_sms // (2 * 3 * heads[1]))  # half a wave of key blocks
        case = Case(mask, batch, 900, 260, *heads, *dims, "bfloat16", **MASKS[mask])
        launches = make_plan(case.problem("backward"), device.query(0)).launches
        assert all(each.variant.tile.shares_heads for each in launches[2:])
        inputs, first = checked(cupy, case)
        for _ in range(50):
            assert identical(run(case, inputs), first)


@pytest.mark.parametrize("lengths", [(4096, 4096), (300, 5000, 1200, 1692), (1, 8191)])
@pytest.mark.parametrize(("head_dim", "heads"), [(128, (64, 8)), (96, (24, 4)), (64, (64, 8))])
def test_blocks_that_share_varlen_key_blocks_add_up_dk_and_dv(
    cupy: Any, head_dim: int, heads: tuple[int, int], lengths: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    drawn = (rng.standard_normal((sum(lengths), count, head_dim), "float32") for count in (*heads, heads[1], heads[0]))
    q, k, v, dout = (cupy.asarray(x).astype("float16") for x in drawn)
    bounds = np.cumsum((0, *lengths), dtype="int32")
    packed: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cupy.asarray(bounds)) | {"causal": True}
    packed |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(lengths))
    assert cuflash.plan(q, k, v, **packed, op="backward").launches[0].fields["least_parts"] > 1
    out, lse = cuflash.forward(q, k, v, **packed, return_lse=True)
    alone = []
    for part in map(slice, bounds, bounds[1:]):
        arrays = [x[None, part] for x in (dout, q, k, v, out)]
        alone.append(cuflash.backward(*arrays, lse[None, :, part], causal=True, deterministic=True))
    expected = [cupy.concatenate(parts, axis=1)[0].astype("float32") for parts in zip(*alone, strict=True)]
    for _ in range(5):
        for got, right in zip(cuflash.backward(dout, q, k, v, out, lse, **packed), expected, strict=True):
            assert float(abs(got - right).max()) < 1e-2 * float(abs(right).max())


@DETERMINISTIC
def test_groups_of_heads_share_keys(cupy: Any, dims: tuple[int, int], deterministic: bool) -> None:
    case = Case("group", 17, 150, 520, 6, 2, *dims, "bfloat16", window_size=(300, 100))  # fills the GPU
    checked(cupy, case, deterministic=deterministic)


@DETERMINISTIC
def test_a_head_does_not_depend_on_the_others(cupy: Any, deterministic: bool) -> None:
    case = Case("heads", 3, 333, 500, 14, 14, 64, 64, "float16", causal=True)  # more than start together
    inputs = backward_args(case, cupy)
    got = run(case, inputs, deterministic=deterministic)
    alone = BackwardArgs(*(x[1:2] for x in inputs))
    for x, y, name in zip(run(case, alone, deterministic=deterministic), got, ("dq", "dk", "dv"), strict=True):
        if deterministic or name != "dq":
            assert (bits(x) == bits(y[1:2])).all()


@DETERMINISTIC
def test_invisible_nan_changes_nothing(cupy: Any, dims: tuple[int, int], deterministic: bool) -> None:
    case = Case("nan", 2, 300, 400, 2, 2, *dims, "bfloat16", window_size=(100, 0), diagonal_offset=-50)
    inputs = backward_args(case, cupy)
    expected = run(case, inputs, deterministic=deterministic)
    rows, keys = case.problem().mask.row_range(0, 400), case.problem().mask.key_range(0, 300)
    assert rows == (50, 300)
    assert keys == (0, 250)

    def poisoned(x: Any, begin: int, end: int) -> Any:  # in x, and in the memory around
        view = laid_out(x, before=(0, 40, 1, 0), after=(0, 30, 1, 8))
        view[:, :begin] = view[:, end:] = cupy.nan
        return view

    bad = BackwardArgs(
        poisoned(inputs.dout, *rows), poisoned(inputs.q, *rows), poisoned(inputs.k, *keys), poisoned(inputs.v, *keys),
        poisoned(inputs.out, *rows), *inputs[5:],
    )  # fmt: skip
    got = run(case, bad, deterministic=deterministic)
    assert identical(got[1:], expected[1:])
    assert identical(got[:1], expected[:1]) or not deterministic
    check(case, inputs, got)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_operands_that_tma_cannot_read_are_read_all_the_same(cupy: Any, name: str) -> None:
    case = Case("views", 2, 150, 200, 2, 2, 64, 64, "float16", causal=True)
    inputs = backward_args(case, cupy)
    expected = run(case, inputs, deterministic=True)
    x = getattr(inputs, name)
    assert identical(run(case, inputs._replace(**{name: heads_first(x)}), deterministic=True), expected)
    for view in (odd_start(x), reversed_keys(x)):
        check(case, inputs, run(case, inputs._replace(**{name: view}), hopper=False, deterministic=True))
    assert identical(run(case, inputs, deterministic=True), expected)


def test_deterministic_backward_repeats_under_memory_traffic(cupy: Any, dims: tuple[int, int]) -> None:
    case = Case("repeats", 2, 1000, 1100, 5, 5, *dims, "bfloat16", causal=True)
    inputs = backward_args(case, cupy)
    first = run(case, inputs, deterministic=True)
    check_repeats(cupy, case, inputs, first, 1000, slice(3), deterministic=True)


def test_work_on_several_streams_at_once_is_right(cupy: Any) -> None:
    case = Case("streams", 4, 500, 500, 8, 8, 128, 128, "bfloat16", causal=True)
    inputs = backward_args(case, cupy)
    expected = run(case, inputs, deterministic=True)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    cupy.cuda.Device().synchronize()
    results = []
    for _ in range(10):
        for stream in streams:
            with stream:
                results.append(backward(case, inputs, deterministic=True))
    cupy.cuda.Device().synchronize()
    assert all(identical(got, expected) for got in results)


def test_scores_of_ten_thousand_stay_finite(cupy: Any) -> None:
    case = Case("large", 1, 200, 300, 2, 2, 64, 64, "bfloat16", causal=True, softmax_scale=1.0)
    inputs = backward_args(case, cupy)
    q, k = ((x.astype("f4") * 40).astype(x.dtype) for x in (inputs.q, inputs.k))
    assert float(cupy.abs(cupy.einsum("bqhd,bkhd->bhqk", q.astype("f4"), k.astype("f4"))).max()) > 1e4
    out, lse = cuflash.forward(q, k, inputs.v, return_lse=True, **case.arguments())
    got = run(case, inputs._replace(q=q, k=k, out=out, lse=lse))
    assert all(np.isfinite(host(x).astype("f4")).all() for x in got)
