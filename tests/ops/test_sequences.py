"""Variable-length sequences in `forward`, `lse` and `backward`, on NumPy and on a GPU, against float64.

Unused rows hold NaN, so that a read of them shows. New memory on a GPU holds NaN, too.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from libraries import GPU_MAKERS, MAKERS, as_numpy
from plans import for_any_gpu

import cuflash
from cuflash.testing import oracle
from cuflash.testing.cases import numpy_dtype
from cuflash.testing.layouts import host, identical, laid_out
from cuflash.testing.sequences import (
    FAR,
    KERNEL_DIMS,
    LAYOUTS,
    TILED,
    Sequences,
    VarlenArrays,
    check,
    check_gradients,
    drawn,
    gradients,
    upstream,
    varlen_arrays,
)

pytestmark = pytest.mark.usefixtures("new_memory_holds_nan")
RAGGED, OTHERS = (5, 0, 1, 17, 30), (9, 3, 0, 17, 31)
CAUSAL: dict[str, Any] = {"causal": True}
PACKED = Sequences("packed", RAGGED, OTHERS, **CAUSAL)
USED = Sequences("packed_used", RAGGED, OTHERS, used_q=True, used_k=True, spare_q=(1, 4, 0, 2, 0),
                 spare_k=(0, 3, 2, 0, 1), **CAUSAL)  # fmt: skip
RECTANGLE = Sequences("rectangle", (9, 2, 0), (4, 11, 3), "rectangle", "rectangle", True, True, **CAUSAL)
DECODING = Sequences("decoding", (1,) * 4, (20, 7, 0, 33), "rectangle", "rectangle", used_k=True, heads=(8, 1))
CACHE = Sequences("cache_rows", (2,) * 4, (12, 30, 0, 7), "rectangle", "cache", used_k=True, **CAUSAL)
PAGED = Sequences("paged", (3, 1, 0, 20, 4), (40, 17, 5, 64, 0), "packed", "paged", used_k=True, **CAUSAL)
CASES = [
    PACKED,
    USED,
    RECTANGLE,
    DECODING,
    CACHE,
    *(replace(PAGED, name=f"paged_{size}", page_size=size) for size in (1, 3, 16, 64)),
    Sequences("documents", RAGGED, RAGGED, gaps=(0, 0), dtype="bfloat16", bounded=True, **CAUSAL),
    Sequences("packed_full", RAGGED, OTHERS, heads=(2, 2), dtype="float32"),
    Sequences("packed_used_q", RAGGED, OTHERS, used_q=True, spare_q=(1, 4, 0, 2, 3)),
    Sequences("packed_used_k", RAGGED, OTHERS, used_k=True, spare_k=(2, 0, 6, 1, 3), dtype="bfloat16", **CAUSAL),
    Sequences("packed_over_cache", (3, 1, 0, 4), (20, 7, 5, 40), "packed", "rectangle", used_k=True, **CAUSAL),
    Sequences("packed_over_whole_cache", (3, 1, 0, 4), (20,) * 4, "packed", "rectangle", dtype="float32", **CAUSAL),
    Sequences("rectangle_over_packed", (6,) * 3, (4, 0, 15), "rectangle", "packed", **CAUSAL),
    Sequences("rectangle_used_q", (9, 2, 0), (11,) * 3, "rectangle", "rectangle", used_q=True, spare_q=(2, 0, 5)),
    Sequences("rectangle_used_k", (9,) * 3, (4, 11, 3), "rectangle", "rectangle", used_k=True, **CAUSAL),
    Sequences("whole_cache_rows", (2,) * 3, (19,) * 3, "rectangle", "cache", dtype="bfloat16"),
    Sequences("packed_over_cache_rows", (2, 5, 0), (9, 3, 19), "packed", "cache", used_k=True, bounded=True),
    Sequences("whole_pages", (2,) * 3, (12,) * 3, "rectangle", "paged", page_size=3, **CAUSAL),
    Sequences("packed_over_whole_pages", (2, 0, 7), (32,) * 3, "packed", "paged", dtype="bfloat16", **CAUSAL),
    replace(PAGED, name="paged_used_q", used_q=True, spare_q=(1, 2, 0, 3, 0), heads=(7, 1), bounded=True),
    replace(PAGED, name="paged_window", window_size=(9, -1)),
    replace(PAGED, name="paged_dims", dims=(40, 72), dtype="float32", softcap=3.0),
    replace(PACKED, name="window", causal=False, window_size=(4, 2)),
    replace(PACKED, name="window_of_one", causal=False, window_size=(0, 0), dtype="bfloat16"),
    replace(PACKED, name="offset_0", diagonal_offset=0),
    replace(USED, name="offset_negative", diagonal_offset=-5, dtype="float32"),
    replace(CACHE, name="offset_large", diagonal_offset=1000),
    replace(RECTANGLE, name="offset_window", causal=False, window_size=(2, 1), diagonal_offset=3),
    replace(PACKED, name="nothing_is_seen", diagonal_offset=-1000),
    replace(USED, name="softcap", softcap=2.0, softmax_scale=0.5),
    replace(PACKED, name="dims", dims=(64, 128), dtype="bfloat16"),
    replace(USED, name="odd_dims", dims=(33, 40), dtype="float32"),
    Sequences("one_sequence", (21,), (13,), **CAUSAL),
    Sequences("no_sequence", (), ()),
    Sequences("no_sequence_over_pages", (), (), "rectangle", "paged", used_k=True),
    Sequences("no_queries", (0, 0), (5, 9)),
    Sequences("no_keys", (5, 9), (0, 0), used_k=True, spare_k=(3, 0)),
    Sequences("no_rows", (0, 0), (0, 0), gaps=(0, 0)),
]
WITH_GRADIENTS = [case for case in CASES if case.has_gradients]
EVERY_KIND = [PACKED, USED, RECTANGLE, CACHE, PAGED]
DETERMINISTIC = pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "deterministic"])


def each(cases: list[Sequences]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def forward(args: VarlenArrays, xp: Any, layout: str = "dense", **more: Any) -> Any:
    return cuflash.forward(**args.arguments(xp, layout) | more, return_lse=True)


def lse_of(args: VarlenArrays, xp: Any, **more: Any) -> Any:
    return cuflash.lse(**{name: x for name, x in args.arguments(xp).items() if name != "v"} | more)


@each(CASES)
def test_forward_and_lse_agree_with_float64_and_repeat_bitwise(case: Sequences, xp: Any) -> None:
    args = varlen_arrays(case)
    out, lse = results = forward(args, xp)
    assert type(out) is type(lse) is xp.ndarray
    assert (out.dtype, lse.dtype) == (numpy_dtype(case.dtype), np.float32)
    check(args, out, lse)
    check(args, None, lse_of(args, xp))
    assert identical(forward(args, xp), results)


@pytest.mark.usefixtures("unchecked_integers")
@each([PACKED, USED, replace(PAGED, used_q=True, spare_q=(1, 2, 0, 3, 0))])
def test_rows_before_the_first_sequence_belong_to_none(case: Sequences, xp: Any) -> None:
    args = varlen_arrays(replace(case, gaps=(2, 3)))
    check(args, *forward(args, xp))
    check(args, None, lse_of(args, xp))
    if case.has_gradients:
        check_gradients(args, gradients(args, xp, deterministic=True))


@DETERMINISTIC
@each(WITH_GRADIENTS)
def test_gradients_agree_with_float64(case: Sequences, deterministic: bool, xp: Any) -> None:
    args = varlen_arrays(case)
    for dlse in (True, False):
        check_gradients(args, gradients(args, xp, dlse=dlse, deterministic=deterministic), dlse=dlse)


@pytest.mark.drawn(150)
def test_forward_agrees_with_float64_on_drawn_problems(seed: int, xp: Any) -> None:
    args = varlen_arrays(drawn(seed), seed)
    check(args, *forward(args, xp))
    check(args, None, lse_of(args, xp))


@pytest.mark.drawn(80)
def test_gradients_agree_with_float64_on_drawn_problems(seed: int, xp: Any) -> None:
    args = varlen_arrays(drawn(seed, gradients=True), seed)
    check_gradients(args, gradients(args, xp, deterministic=seed % 2 == 0))


@pytest.mark.gpu
@pytest.mark.drawn(150)
def test_gpu_agrees_with_float64_at_lengths_around_tiles(cupy: Any, seed: int) -> None:
    args, other = (varlen_arrays(drawn(seed, TILED, KERNEL_DIMS, gradients=grads), seed) for grads in (False, True))
    for kernels in (nullcontext, for_any_gpu):
        with kernels():
            check(args, *forward(args, cupy))
            check(args, None, lse_of(args, cupy))
            check_gradients(other, gradients(other, cupy, deterministic=seed % 2 == 0))


@pytest.mark.gpu
@DETERMINISTIC
@each([PACKED, USED, RECTANGLE])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gpu_every_length_around_a_tile_has_neighbours(
    cupy: Any, dtype: str, case: Sequences, deterministic: bool
) -> None:
    lengths = (127, 0, 129, 64, 1, 63, 128, 65)
    spare = {"spare_q": lengths[::-1], "spare_k": lengths} if case.used_q else {}
    args = varlen_arrays(replace(case, queries=lengths, keys=lengths[::-1], dims=(128, 128), dtype=dtype, **spare))
    for kernels in (nullcontext, for_any_gpu):
        with kernels():
            check(args, *forward(args, cupy))
            check_gradients(args, gradients(args, cupy, deterministic=deterministic))


def test_float64_is_computed_in_float64() -> None:
    for seed in range(20):
        args = varlen_arrays(replace(drawn(seed), dtype="float64"), seed)
        check(args, *forward(args, np))
        args = varlen_arrays(replace(drawn(seed, gradients=True), dtype="float64"), seed)
        check_gradients(args, gradients(args, np))


@each(EVERY_KIND)
def test_unused_rows_change_nothing_whatever_they_hold(case: Sequences, xp: Any) -> None:
    args = varlen_arrays(case)
    assert args.unused("k").any()
    clean = forward(args.filled(0.0), xp)
    for poison in (np.nan, np.inf):
        assert identical(forward(args.filled(poison), xp), clean)
    if case.has_gradients:
        clean = gradients(args.filled(0.0), xp, unused=0.0, deterministic=True)
        for poison in (np.nan, np.inf):
            assert identical(gradients(args.filled(poison), xp, unused=poison, deterministic=True), clean)


@each([PACKED, USED, RECTANGLE, replace(PAGED, used_q=True, spare_q=(1, 2, 0, 3, 0))])
@pytest.mark.parametrize("layout", ["dense", "heads_first", "gaps", "reversed"])
def test_an_out_argument_keeps_its_values_in_rows_of_no_sequence(case: Sequences, layout: str, xp: Any) -> None:
    args = varlen_arrays(case)
    expected, wanted_lse = forward(args, xp)
    (out,) = LAYOUTS[layout](xp.full(expected.shape, 7.0, expected.dtype))
    got, lse = forward(args, xp, out=out)
    assert got is out
    unused = args.unused("q").reshape(expected.shape[:-2])
    assert unused.any()
    assert bool((host(out)[unused] == 7.0).all())
    if layout == "reversed":  # other kernels compute it on Hopper
        out[xp.asarray(unused)] = 0.0
        check(args, out, lse)
    else:
        assert identical([host(out)[~unused]], [host(expected)[~unused]])
        assert identical([lse], [wanted_lse])
    assert np.isneginf(host(lse).swapaxes(-1, -2)[unused]).all()


def test_lse_has_the_axes_of_q_with_the_heads_before_the_rows(xp: Any) -> None:
    for case, shape in ((PACKED, (4, 56)), (RECTANGLE, (3, 4, 9)), (PAGED, (4, 31))):
        args = varlen_arrays(case)
        assert forward(args, xp)[1].shape == lse_of(args, xp).shape == shape
    rng, used = np.random.default_rng(0), xp.asarray(np.array([7], np.int32))
    q, k, v = (rng.standard_normal((n, 1, 16)).astype("f2") for n in (9, 11, 11))
    arrays = [xp.asarray(x) for x in (q, k, v)]
    expected = cuflash.forward(arrays[0], arrays[1][:7], arrays[2][:7], causal=True, return_lse=True)
    for cut, shape in ((np.s_[:], (1, 9)), (np.s_[:, 0], (9,)), (np.s_[None], (1, 1, 9))):
        out, lse = cuflash.forward(*(x[cut] for x in arrays), causal=True, seqused_k=used, return_lse=True)
        assert (out.shape, lse.shape) == (q[cut].shape, shape)
        for got, dense in ((out, expected[0]), (lse, expected[1])):
            np.testing.assert_allclose(host(got).ravel(), host(dense).ravel(), rtol=2e-3, atol=2e-3)


@each(CASES)
def test_each_sequence_equals_a_dense_call_of_it(case: Sequences, xp: Any) -> None:
    args = varlen_arrays(case)
    out, lse = (host(x) for x in forward(args, xp))
    if "cu_seqlens_q" in args.varlen_kwargs:
        out, lse = out[None], lse[None]
    lse = lse.swapaxes(1, 2)
    for queries, keys in zip(args.queries, args.keys, strict=True):
        arrays = [xp.asarray(x[rows][None]) for x, rows in zip(args[1:4], (queries, keys, keys), strict=True)]
        dense = [host(x) for x in cuflash.forward(*arrays, return_lse=True, **case.options())]
        for got, expected in ((out[queries], dense[0][0]), (lse[queries], dense[1][0].T)):
            if xp is np:
                np.testing.assert_array_equal(got, expected)
            else:  # other tiles and splits add up in another order
                exact = expected.astype("f8")
                oracle.assert_close("dense", got, exact, exact, ulps=8, unit=4.0)


@each([replace(case, heads=heads) for case in (RECTANGLE, CACHE, PAGED) for heads in ((4, 2), (3, 1))])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_of_any_strides_give_the_results_of_dense_arrays(case: Sequences, layout: str, xp: Any) -> None:
    args = varlen_arrays(replace(case, dims=(40, 64)))
    got = forward(args, xp, layout)
    check(args, *got)
    if xp is np:
        assert identical(got, forward(args, xp))


@each(EVERY_KIND)
def test_integers_of_any_strides_are_read_where_they_are(case: Sequences, xp: Any) -> None:
    args = varlen_arrays(case)
    for how in ({"steps": (1, 1, 2, 1), "before": (0, 0, 1, 3)}, {"steps": (1, 1, -1, 2), "before": (0, 0, 0, 1)}):
        varlen_kwargs = {name: laid_out(xp.asarray(x), fill=FAR, **how) for name, x in args.varlen_kwargs.items()}
        check(args, *forward(args, xp, **varlen_kwargs))


@pytest.mark.usefixtures("unchecked_integers")
@pytest.mark.parametrize("place_q", ["packed", "rectangle"])
@pytest.mark.parametrize("place_k", ["packed", "rectangle", "cache", "paged"])
def test_used_lengths_that_are_negative_or_past_the_end_are_clamped(place_q: str, place_k: str, xp: Any) -> None:
    case = Sequences("clamped", (0, 6, 2), (0, 16, 3), place_q, place_k, True, True, (4, 0, 1), (4, 0, 2), **CAUSAL)
    args = varlen_arrays(case)
    for low, more in ((-1, 1), (-FAR - 1, FAR - 16)):
        wild = args.with_varlen(seqused_q=[low, 6 + more, 2], seqused_k=[low, 16 + more, 3])
        check(wild, *forward(wild, xp))
        if case.has_gradients:
            check_gradients(wild, gradients(wild, xp, deterministic=True))


@pytest.mark.usefixtures("unchecked_integers")
def test_packed_offsets_outside_the_arrays_are_clamped(xp: Any) -> None:
    args = varlen_arrays(Sequences("outside", (0, 5, 7, 0), (4, 0, 8, 0), gaps=(0, 0), **CAUSAL))
    for low, high in ((-3, 1), (-FAR - 1, FAR - 12)):
        wild = args.with_varlen(cu_seqlens_q=[low, low, 5, 12 + high, 12 + high], cu_seqlens_k=[low, 4, 4, 12, FAR])
        check(wild, *forward(wild, xp))
        check_gradients(wild, gradients(wild, xp, deterministic=True))


@pytest.mark.usefixtures("unchecked_integers")
@pytest.mark.drawn(60)
def test_any_integers_read_and_write_nothing_outside_the_arrays(seed: int, xp: Any) -> None:
    has_gradients = seed % 3 == 0
    args = varlen_arrays(drawn(seed, gradients=has_gradients), seed).filled(0.5)
    rng = np.random.default_rng(seed)
    kinds = np.array([-FAR - 1, -70_000, -1, *range(12), 40, 70_000, FAR - 1, FAR])
    wild = args.with_varlen(**{name: rng.choice(kinds, x.shape) for name, x in args.varlen_kwargs.items()})
    arguments = wild.arguments(xp, "heads_first")  # NaN surrounds the arrays
    shape = (*arguments["q"].shape[:-1], args.sequences.dims[1])
    memory = xp.full(np.prod(shape, dtype=int) + 2048, 7.0, arguments["q"].dtype)
    before = [x.tobytes() for x in (*wild[1:4], *wild.varlen_kwargs.values())]
    cuflash.forward(**arguments, out=memory[1024:-1024].reshape(shape))
    assert np.isfinite(host(memory).astype("f4")).all()
    assert bool((memory[:1024] == 7.0).all() & (memory[-1024:] == 7.0).all())
    assert [
        np.ascontiguousarray(host(arguments[name])).tobytes() for name in ("q", "k", "v", *wild.varlen_kwargs)
    ] == before
    if has_gradients:  # gradients are undefined for sequences that share rows
        shapes = [x.shape for x in gradients(wild, xp, unused=0.0)]
        assert shapes == [arguments[name].shape for name in "qkv"]


@pytest.mark.usefixtures("unchecked_integers")
@pytest.mark.parametrize("mask", [{}, CAUSAL, {"window_size": (20, 3)}, {**CAUSAL, "diagonal_offset": 9}], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_missing_page_hides_its_keys_and_moves_no_others(
    dtype: str, page_size: int, mask: dict[str, Any], xp: Any
) -> None:
    case = replace(PAGED, causal=False, page_size=page_size, dtype=dtype)
    for seed in range(3):
        args = varlen_arrays(replace(case, **mask), seed).without_pages(seed)
        assert not all(there.all() for there in args.there)
        check(args, *forward(args, xp))
        check(args, None, lse_of(args, xp))


@pytest.mark.usefixtures("unchecked_integers")
def test_a_pool_without_pages_shows_no_key(xp: Any) -> None:
    args = varlen_arrays(PAGED)
    args = args._replace(k=args.k[:0], v=args.v[:0])
    out, lse = (host(x) for x in forward(args, xp))
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.usefixtures("unchecked_integers")
def test_a_missing_cache_row_only_hides_keys_from_its_own_sequence(xp: Any) -> None:
    args = varlen_arrays(CACHE)
    rows = args.varlen_kwargs["cache_batch_idx"]
    for wrong in (-1, len(args.k), FAR, -FAR - 1):
        there = [np.full(12, False), args.there[1], args.there[2], args.there[3]]
        wild = args.with_varlen(cache_batch_idx=[wrong, *rows[1:]])._replace(there=there)
        out, lse = forward(wild, xp)
        assert not host(out)[0].any()
        assert np.isneginf(host(lse)[0]).all()
        check(wild, out, lse)


BOUNDED = [
    Sequences("packed", (6, 6, 2), (12, 4, 12), "packed", "packed", True, True, (0, 3, 0), (5, 0, 2)),
    Sequences("rectangle", (6,) * 3, (12,) * 3, "rectangle", "rectangle", True, True, (3,) * 3, (5,) * 3),
    Sequences("cache", (6,) * 3, (12,) * 3, "packed", "cache", True, True, (3, 0, 1), (5,) * 3),
    Sequences("paged", (6,) * 3, (20,) * 3, "rectangle", "paged", True, True, (3,) * 3, (28,) * 3),
]


@each(BOUNDED)
def test_rows_past_a_bound_that_is_too_small_count_as_unused(case: Sequences, xp: Any) -> None:
    for is_causal in (False, True):
        args = varlen_arrays(replace(case, bounded=True, causal=is_causal))
        for name in ("seqused_q", "seqused_k"):
            only = args.with_varlen(**{name: None})  # the bound alone gives the used length
            check(only, *forward(only, xp))
            if case.has_gradients:
                check_gradients(only, gradients(only, xp, deterministic=True))


@pytest.mark.parametrize("more", [{"num_splits": 1}, {"num_splits": 4}, {"split_size": 128},
                                  {"num_splits": 3, "split_size": 256}], ids=str)  # fmt: skip
@each([
    Sequences("decoding", (1,) * 4, (300, 129, 0, 5), "rectangle", "paged", used_k=True, heads=(8, 2), **CAUSAL),
    Sequences("packed", (2, 17, 0, 3), (300, 129, 0, 5), softcap=4.0, dtype="bfloat16"),
])  # fmt: skip
def test_keys_in_splits_give_the_same_numbers(case: Sequences, more: dict[str, Any], xp: Any) -> None:
    args = varlen_arrays(case)
    check(args, *forward(args, xp, **more))
    check(args, None, lse_of(args, xp, **more))


@pytest.mark.usefixtures("unchecked_integers")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_out_dtype_keeps_what_16_bits_would_round(dtype: str, xp: Any) -> None:
    args = varlen_arrays(replace(PAGED, dtype=dtype)).without_pages(0)
    wide, narrow = (forward(args, xp, out_dtype=name)[0] for name in ("float32", None))
    assert (wide.dtype, narrow.dtype) == (np.float32, numpy_dtype(dtype))
    assert bool((wide.astype(narrow.dtype) == narrow).all())
    assert bool((wide != narrow.astype(np.float32)).any())


@pytest.mark.parametrize("name", ["torch", "jax"])
@each(EVERY_KIND)
def test_arrays_of_other_libraries_give_the_same(case: Sequences, name: str) -> None:
    same_as_in(MAKERS[name], np, case)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "jax"])
@each(EVERY_KIND)
def test_gpu_arrays_of_other_libraries_give_the_same(cupy: Any, case: Sequences, name: str) -> None:
    same_as_in(GPU_MAKERS[name], cupy, case)


def same_as_in(make: Any, xp: Any, case: Sequences) -> None:
    for dtype in ("bfloat16", "float32"):
        args = varlen_arrays(replace(case, dtype=dtype))
        ours = args.arguments(xp)
        out, lse = expected = forward(args, xp)
        theirs = {name: make(host(x)) if isinstance(x, xp.ndarray) else x for name, x in ours.items()}
        got = cuflash.forward(**theirs, return_lse=True)
        assert all(type(x) is type(theirs["q"]) for x in got)
        assert identical(map(as_numpy, got), map(as_numpy, expected))
        if case.has_gradients:
            state = host(upstream(args)[0]).reshape(out.shape), host(out), host(lse)
            results = [
                cuflash.backward(dout, out=out, lse=lse, deterministic=True, **arguments)
                for (dout, out, lse), arguments in ((map(xp.asarray, state), ours), (map(make, state), theirs))
            ]
            assert identical(map(as_numpy, results[1]), map(as_numpy, results[0]))
