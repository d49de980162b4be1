"""`cuflash.append_kv`: new keys and values go to the right positions, bit for bit, and nothing else changes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from integers import without_check_of_integers

import cuflash
from cuflash.reference import append
from cuflash.testing.appends import PLACES, ROTATIONS, Arguments, check, dense, drawn, expected, in_library
from cuflash.testing.layouts import (
    every_second,
    fortran,
    heads_first,
    identical,
    laid_out,
    odd_rows,
    odd_start,
    reversed_keys,
)

DTYPES = ("float16", "bfloat16", "float32")
COUNTS: dict[str, Arguments] = {
    "rectangle": {},
    "packed": {"new": (3, 0, 9), "queries": (1, 12, 0)},
    "packed keys": {"new": (3, 0, 9), "queries": 2},
    "packed queries": {"new": 4, "queries": (0, 5, 2)},
}


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_new_rows_go_behind_used_rows(dtype: str, place: str, rotation: str, xp: Any) -> None:
    check(drawn(dtype, place, **ROTATIONS[rotation]), xp)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("place", ["rows", "pages of 3"])
def test_packed_rows_belong_to_their_sequences(counts: str, place: str, rotation: str, xp: Any) -> None:
    check(drawn("float16", place, **COUNTS[counts] | ROTATIONS[rotation]), xp)


@pytest.mark.usefixtures("unchecked_integers")
def test_packed_rows_before_the_first_sequence_belong_to_none(xp: Any) -> None:
    check(drawn("float16", "pages of 3", first_row=1, **COUNTS["packed"] | ROTATIONS["halves"]), xp)


def test_one_row_of_many_sequences_is_found_by_its_sequence(xp: Any) -> None:
    counts = (0, 0, 1, 2, 0, 0, 0, 40, 1, 0, 3, 0)
    lengths = tuple(range(0, 36, 3))
    check(
        drawn("bfloat16", "pages of 16", lengths=lengths, new=counts, queries=counts[::-1], rotary_dim=8, capacity=64),
        xp,
    )


@pytest.mark.parametrize("dims", [(1, 1), (2, 3), (7, 64), (8, 8), (36, 20), (64, 512), (128, 128), (512, 33)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(dtype: str, dims: tuple[int, int], xp: Any) -> None:
    check(drawn(dtype, dims=dims), xp)
    rotated = sorted({2, dims[0] // 4 * 2, dims[0] // 2 * 2} - {0}) if dims[0] > 1 else []
    for rotary_dim in rotated:
        for wide in (False, True):
            for interleaved in (False, True):
                more = {"rotary_dim": rotary_dim, "wide": wide, "rotary_interleaved": interleaved}
                check(drawn(dtype, "pages of 3", dims=dims, **more), xp)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_float64_is_rotated_in_float64(interleaved: bool, wide: bool) -> None:
    check(drawn("float64", rotary_dim=16, wide=wide, rotary_interleaved=interleaved), np)


@pytest.mark.parametrize("same", [False, True])
def test_queries_stand_at_their_keys_or_all_at_the_first_of_them(same: bool, xp: Any) -> None:
    for counts in COUNTS.values():
        check(drawn(rotary_dim=16, q_same_position=same, **counts), xp)


@pytest.mark.parametrize("positions", [0, 1, 9, 24])
def test_rows_past_the_end_of_the_tables_are_not_rotated(positions: int, xp: Any) -> None:
    for rotation in ("halves", "pairs"):
        check(drawn("float16", positions=positions, **ROTATIONS[rotation]), xp)


@pytest.mark.usefixtures("unchecked_integers")
@pytest.mark.parametrize("place", PLACES)
def test_rows_past_the_capacity_are_not_written(place: str, xp: Any) -> None:
    lengths = (0, 14, 16, 17, 18, 19, 50)
    for counts in ({"new": 4}, {"new": 25}, {"new": (0, 3, 2, 1, 1, 4, 2), "queries": 3}):
        check(drawn("float16", place, lengths=lengths, capacity=18, positions=20, rotary_dim=8, **counts), xp)


WILD = (-(2**31), -7, -1, 2**31 - 1, 2**31 - 40)


@pytest.mark.usefixtures("unchecked_integers")
@pytest.mark.parametrize("name", ["seqused_k", "page_table", "cache_batch_idx"])
def test_numbers_of_the_device_are_not_trusted(name: str, xp: Any) -> None:
    place = {"page_table": "pages of 3", "cache_batch_idx": "indexed"}.get(name, "rows")
    for number, index in product((*WILD, None), range(3)):
        call = drawn("float16", place, new=6, **ROTATIONS["halves"])
        # Out of range, as in range two sequences would write to one page, in any order.
        past = 34 if name == "seqused_k" else len(call["k_cache"])
        call[name][index] = past if number is None else number
        check(call, xp)


@pytest.mark.usefixtures("unchecked_integers")
def test_bounds_outside_the_rows_are_clamped_to_them(xp: Any) -> None:
    for bounds in ([-5, 3, 8, 100], [2**31 - 1] * 4, [-(2**31)] * 4, [-9, -9, 4, 2**31 - 1], [5, 5, 5, 5]):
        call = drawn("float16", new=(3, 4, 5), **ROTATIONS["pairs"])
        check(call | {"cu_seqlens_k": np.array(bounds, "i4"), "cu_seqlens_q": np.array(bounds, "i4")}, xp)


@pytest.mark.usefixtures("unchecked_integers")
def test_bounds_in_no_order_write_inside_the_cache_alone(xp: Any) -> None:
    for bounds in ([9, 2, 11, 0], [4, -3, 2**31 - 1, 1], [12, 8, 4, 0]):
        call = in_library(drawn("float16", "pages of 3", new=(3, 4, 5), **ROTATIONS["halves"]), xp.asarray)
        around = {name: laid_out(call[name], before=(2, 0, 0, 0)) for name in ("k_cache", "v_cache")}
        bounds = xp.asarray(np.array(bounds, "i4"))
        cuflash.append_kv(**call | around | {"cu_seqlens_k": bounds, "cu_seqlens_q": bounds})
        for name, cache in around.items():
            assert bool(xp.isnan(cache.base[:2]).all()), name
            assert bool(xp.isnan(cache.base[-2:]).all()), name


def halves_of_one_row(k_cache: Any, v_cache: Any) -> tuple[Any, Any]:
    """Returns caches as serving stacks keep them: (pages, heads, page_size, k and v), viewed with the heads third."""
    both = np.concatenate([k_cache, v_cache], axis=-1).transpose(0, 2, 1, 3)
    view = both.copy().transpose(0, 2, 1, 3)
    return view[..., : k_cache.shape[-1]], view[..., k_cache.shape[-1] :]


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_that_are_halves_of_one_row(dtype: str, rotation: str, xp: Any) -> None:
    call = drawn(dtype, "pages of 16", dims=(16, 16), **ROTATIONS[rotation])
    expected_results = expected(call)
    arguments = in_library(call, xp.asarray)
    arguments["k_cache"], arguments["v_cache"] = halves_of_one_row(arguments["k_cache"], arguments["v_cache"])
    result = cuflash.append_kv(**arguments)
    got = arguments["k_cache"], arguments["v_cache"], *([] if result is None else [result])
    assert identical(map(dense, got), expected_results)


def strided_table(x: Any) -> Any:
    """Returns a page table whose rows lie apart, with missing pages between them."""
    return laid_out(x, before=(1, 2), fill=2**31 - 1)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("layout", [heads_first, odd_rows, odd_start, reversed_keys])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides_with_a_contiguous_last_dimension(dtype: str, layout: Any, rotation: str, xp: Any) -> None:
    call = drawn(dtype, "pages of 3", dims=(32, 24), **ROTATIONS[rotation])
    everything = dict.fromkeys(("k_cache", "v_cache", "k", "v", "q", "rotary_cos", "rotary_sin"), layout)
    check(call, xp, page_table=strided_table, **everything)
    for name in everything:
        check(call, xp, **{name: layout})


@pytest.mark.parametrize("layout", [every_second, fortran])
def test_arrays_that_are_read_may_have_gaps(layout: Any, xp: Any) -> None:
    call = drawn("float16", "pages of 3", **ROTATIONS["halves"])
    integers = {"seqused_k": lambda x: laid_out(x, steps=(2,), fill=7)}
    check(call, xp, **dict.fromkeys(("k", "v", "q", "rotary_cos", "rotary_sin"), layout), **integers)


def test_an_axis_of_length_1_may_have_any_stride(xp: Any) -> None:
    call = drawn("float16", lengths=(3,), heads=(1, 1), new=1)
    odd = xp.lib.stride_tricks.as_strided
    check(call, xp, **dict.fromkeys(("k_cache", "v_cache"), lambda x: odd(x, x.shape, (2, x.strides[1], 6, 2))))


@pytest.mark.parametrize(
    "sizes",
    [{"lengths": ()}, {"new": 0}, {"new": 0, "queries": 3}, {"new": 3, "queries": 0}, {"new": (0, 0, 0)},
     {"capacity": 0, "lengths": (0, 0), "new": 0}],
    ids=str,
)  # fmt: skip
def test_calls_without_new_rows_change_nothing(sizes: Arguments, xp: Any) -> None:
    for rotation in ("none", "halves"):
        check(drawn(**sizes | ROTATIONS[rotation]), xp)
    check(drawn(place="pages of 3", **sizes), xp)


@pytest.mark.usefixtures("unchecked_integers")
@pytest.mark.parametrize("why", ["nothing is new", "there is no room"])
def test_a_million_sequences_with_nothing_to_write_cost_no_loop_step(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last one has a new key and room for it."""
    placed, pages_of, count = [], append._pages, 10**6
    monkeypatch.setattr(append, "_pages", lambda b, *more: placed.append(b) or pages_of(b, *more))
    cache, is_last = np.zeros((count, 1, 1, 4), "f4"), np.arange(count) == count - 1
    if why == "nothing is new":
        rows, lengths = np.ones((1, 1, 4), "f4"), np.zeros(count, "i4")
        varlen_kwargs = {"cu_seqlens_k": np.cumsum([0, *is_last], dtype="i4")}
    else:
        rows, lengths, varlen_kwargs = np.ones_like(cache), (~is_last).astype("i4"), {}
    cuflash.append_kv(cache, cache.copy(), rows, rows, lengths, **varlen_kwargs)
    assert placed == [count - 1]
    assert (cache == is_last[:, None, None, None]).all()


def test_rows_and_positions_that_are_not_read_may_hold_anything(xp: Any) -> None:
    first_row = 0 if xp is np else 1  # bounds in host memory begin at 0
    call = drawn("float16", "pages of 3", new=(3, 0, 9), first_row=first_row, **ROTATIONS["halves"])
    call["k"][:first_row] = call["q"][:first_row] = np.nan  # rows of no sequence
    call["k"][-2:] = call["q"][-2:] = np.nan
    call["rotary_cos"][29:] = call["rotary_sin"][29:] = np.nan  # positions without rows
    check(call, xp)


@given(
    st.sampled_from(PLACES),
    st.lists(st.tuples(st.integers(-3, 30), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=6),
    st.booleans(),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.integers(0, 20),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_drawn_calls(
    place: str, rows: list[tuple[int, int, int]], packed: bool, dims: tuple[int, int], pairs: int, flags: Any
) -> None:
    lengths, new, queries = zip(*rows, strict=True)
    rotary_dim = 2 * min(pairs, dims[0] // 2)
    named = dict(zip(("wide", "q_same_position", "rotary_interleaved"), flags, strict=True))
    counts = {"new": new, "queries": queries} if packed else {"new": new[0], "queries": queries[0]}
    more: Arguments = {"lengths": lengths, "dims": dims, "rotary_dim": rotary_dim, "positions": 25, **counts, **named}
    with without_check_of_integers():
        check(drawn("float16", place, capacity=20, **more), np)


@pytest.mark.parametrize("place", PLACES)
def test_steps_of_decoding_leave_what_forward_attends_to(place: str) -> None:
    call = drawn("float32", place, lengths=(0, 0), new=1, capacity=12, dims=(16, 16))
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 12, 4, 16)).astype("f4")
    k, v = (rng.standard_normal((2, 12, 2, 16)).astype("f4") for _ in range(2))
    caches, lengths = (call["k_cache"], call["v_cache"]), call["seqused_k"]
    varlen_kwargs = {name: call[name] for name in ("page_table", "cache_batch_idx") if name in call}
    expected = cuflash.forward(q, k, v, causal=True)
    for step in range(12):
        now = np.s_[:, step : step + 1]
        assert cuflash.append_kv(*caches, k[now], v[now], lengths, **varlen_kwargs) is None
        lengths += 1
        out = cuflash.forward(q[now], *caches, causal=True, seqused_k=lengths, **varlen_kwargs)
        np.testing.assert_allclose(out, expected[now], rtol=1e-5, atol=1e-6)


def test_torch_on_the_cpu_is_written_to_in_place() -> None:
    torch = pytest.importorskip("torch")
    for dtype in ("float32", "float16"):
        call = drawn(dtype, "indexed", **ROTATIONS["halves"])
        arguments = in_library(call, torch.from_numpy)
        result = cuflash.append_kv(**arguments)
        assert type(result) is torch.Tensor
        assert identical([x.numpy() for x in (arguments["k_cache"], arguments["v_cache"], result)], expected(call))
