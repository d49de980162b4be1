"""Few queries over many keys with mods on a GPU, where thread blocks split the keys.

Rows of a thread block belong to several heads, whose mods differ. All tests run sm90 kernels, on a GPU that has them,
and sm80 kernels.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from libraries import recorded
from mod_table import check_sequences, forward_sequences, launched, names_of

import cuflash
from cuflash.mods import seqlen_k, seqlen_q
from cuflash.planning import decoding
from cuflash.testing.functions import FUNCTIONS, Maker, alibi, bias_of, bounded, dropped, joined, sinks_of, softcap
from cuflash.testing.layouts import host, identical
from cuflash.testing.mods import bounds_case, without_grads
from cuflash.testing.sequences import Sequences, varlen_arrays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan", "any_gpu")]
LENGTHS = (2100, 0, 1, 127, 128, 129, 63, 65)
ROWS = Sequences("rows", (1,) * 8, LENGTHS, "rectangle", "rectangle", used_k=True, heads=(8, 2), causal=True)
CACHE = replace(ROWS, name="cache", place_k="cache")
PAGES = replace(ROWS, name="pages", place_q="packed", place_k="paged", page_size=64, bounded=True)
PACKED = replace(PAGES, name="packed", queries=(1, 2, 0, 3, 1, 8, 1, 1), place_k="packed")
# More rows than a warp has, some unused.
MANY_ROWS = replace(ROWS, name="many_rows", queries=(3,) * 8, heads=(16, 2), used_q=True, bounded=True,
                    spare_q=(1, 0, 2, 0, 0, 3, 1, 0))  # fmt: skip
KINDS = [ROWS, CACHE, PAGES, PACKED, MANY_ROWS]


def by_lengths(put: Any, case: Any) -> Any:
    """Builds a score_mod of the used lengths, which may exceed the visible keys."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score * (1.0 + 0.25 * b) + (k_idx * 1.0) / (seqlen_k() + seqlen_q())

    return {"score_mod": score_mod}


everything = joined(alibi, FUNCTIONS["prefix"], bias_of("bhqk"), sinks_of())
MAKERS: dict[str, Maker] = {
    "sinks": sinks_of(),
    "sinks of 16 bits": sinks_of("float16"),
    "alibi": alibi,
    "softcap": softcap,
    "table": bounded,
    "window": FUNCTIONS["global_window"],
    "striped": FUNCTIONS["striped"],
    "least": FUNCTIONS["least"],
    "bias": bias_of("bhqk"),
    "mask": bias_of("1hqk", "bool"),
    "lengths": by_lengths,
    "everything": everything,
}


def check_all(cupy: Any, case: Sequences, make: Maker, **more: Any) -> Any:
    """Checks a call with split keys against float64, and that it repeats bit by bit. Returns out and lse."""
    inputs = varlen_arrays(case)
    with launched() as plans:
        out, lse = check_sequences(cupy, inputs, make, **more)
    if max(case.queries) * case.heads[0] // case.heads[1] <= decoding.FEW_ROWS and more.get("num_splits") != 1:
        arguments = inputs.arguments(cupy)
        arrays = [arguments.pop(name) for name in "qkv"]
        plain = cuflash.plan(*arrays, **arguments, **more)
        *before, name = names_of(plans)  # without a decode kernel, mask tiles are computed first
        assert ("_decode" in name) == ("_decode" in plain.kernel)
        assert not before or "_decode" not in name
    unused = inputs.unused("q")
    assert not host(out).reshape(*unused.shape, -1)[unused].any()
    assert np.isneginf(host(lse).reshape(len(unused), -1, unused.shape[1]).swapaxes(1, 2)[unused]).all()
    assert identical(forward_sequences(cupy, inputs, make, **more), (out, lse))
    return out, lse


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_every_kind_of_cache(cupy: Any, case: Sequences, name: str) -> None:
    if case.name not in ("rows", "pages") and name not in ("sinks", "everything"):
        pytest.skip("kernels that other functions run on, too")
    check_all(cupy, case, MAKERS[name])


@pytest.mark.parametrize("dims", [(40, 72), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_head_dims_and_dtypes(cupy: Any, dims: tuple[int, int]) -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        for case in (replace(ROWS, softcap=3.0), MANY_ROWS):
            check_all(cupy, replace(case, dims=dims, dtype=dtype), everything)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 192), (256, 256)], ids=str)
def test_functions_that_spill_with_many_rows_run_on_other_tiles(cupy: Any, dims: tuple[int, int]) -> None:
    case = replace(PAGES, name="spill", queries=(3,) * 8, heads=(16, 2), dims=dims, dtype="bfloat16")
    check_all(cupy, case, FUNCTIONS["everything"])


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (8, 1), (16, 1), (33, 11), (48, 1), (96, 1)], ids=str)
def test_heads_and_queries_are_rows_of_a_block(cupy: Any, heads: tuple[int, int]) -> None:
    for queries in (1, 2, 3, 5, 8):
        for case in (ROWS, replace(PAGES, page_size=16)):
            check_all(cupy, replace(case, queries=(queries,) * 8, heads=heads), everything)


@pytest.mark.parametrize("page_size", [1, 16, 64, 96, 256])
def test_pages_of_any_size_and_pages_that_are_not_there(cupy: Any, page_size: int) -> None:
    check_all(cupy, replace(PAGES, page_size=page_size), everything)
    check_sequences(cupy, varlen_arrays(replace(PAGES, page_size=page_size)).without_pages(seed=1), everything)


@pytest.mark.parametrize(
    "mask",
    [{"causal": False}, {"window_size": (700, 0)}, {"causal": False, "window_size": (130, 5)}, {"diagonal_offset": 300},
     {"diagonal_offset": -5, "softcap": 3.0}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["sinks", "lengths", "everything"])
def test_masks_of_the_call_hide_keys_as_well(cupy: Any, name: str, mask: dict[str, Any]) -> None:
    for case in (replace(ROWS, queries=(3,) * 8, heads=(4, 2)), MANY_ROWS, PAGES):
        check_all(cupy, replace(case, **mask), MAKERS[name])


@pytest.mark.parametrize("num_splits", [1, 2, 7, 1000])
def test_any_number_of_splits(cupy: Any, num_splits: int) -> None:
    for case in (ROWS, MANY_ROWS, replace(PAGES, window_size=(900, -1))):
        for name in ("sinks", "everything"):
            check_all(cupy, case, MAKERS[name], num_splits=num_splits)


def test_sequences_that_are_all_alike(cupy: Any) -> None:
    shapes, slopes = ((1, 2, 8, 64), (1, 5000, 2, 64)), cupy.asarray(np.linspace(0.1, 0.8, 8, dtype=np.float32))
    q, k, v = (cupy.asarray(x) for x in drawn_arrays(*shapes, shapes[1]))
    mod_kwargs = {"score_mod": lambda score, b, h, q_idx, k_idx: score - slopes[h] * (k_idx % 7), "sinks": slopes}
    with launched() as plans:
        dense = cuflash.forward(q, k, v, causal=True, return_lse=True, **mod_kwargs)
    assert "_decode" in names_of(plans)[0]
    used = cupy.full(1, 5000, "int32")
    assert identical(cuflash.forward(q, k, v, seqused_k=used, causal=True, return_lse=True, **mod_kwargs), dense)


def drawn_arrays(*shapes: tuple[int, ...]) -> list[Any]:
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(np.float16) for shape in shapes]


@pytest.mark.parametrize("name", ["sinks", "joined"])
@pytest.mark.parametrize("queries", [1, 4])
def test_a_row_has_the_same_bits_split_or_not(cupy: Any, queries: int, name: str) -> None:
    """All but one of 8 splits have missing pages only. A call with the keys of that one split has one split."""
    num_splits, page_size, keys = 8, 64, 4096
    make = sinks_of() if name == "sinks" else joined(sinks_of(), bounded, bias_of("1hqk", "bool"))
    case = Sequences("split", (queries,) * 2, (keys,) * 2, "rectangle", "paged", page_size=page_size, used_k=True,
                     heads=(8, 1))  # fmt: skip
    inputs = varlen_arrays(case)
    table = inputs.varlen_kwargs["page_table"].copy()
    table[:, keys // num_splits // page_size :] = -1
    split = forward_sequences(cupy, inputs.with_varlen(page_table=table), make, num_splits=num_splits)
    few = np.full(2, keys // num_splits, np.int32)
    whole = forward_sequences(cupy, inputs.with_varlen(page_table=table, seqused_k=few), make, num_splits=num_splits)
    assert identical(split, whole)
    assert bool((host(whole[1]) > -np.inf).any())


def test_a_sink_of_minus_inf_is_ignored_and_others_count_once(cupy: Any) -> None:
    for case in (ROWS, MANY_ROWS, PAGES):
        inputs = varlen_arrays(case)
        heads = case.heads[0]
        plain = [host(x).astype("f8") for x in cuflash.forward(**inputs.arguments(cupy), return_lse=True)]
        none = cupy.full(heads, -np.inf, "float32")
        arguments = {**inputs.arguments(cupy), "return_lse": True}
        assert identical(cuflash.forward(**arguments, sinks=none), cuflash.forward(**arguments))
        for size in (-200.0, 0.0, 5.0, 300.0):
            sinks = np.linspace(size, size + 3, heads, dtype=np.float32)
            out, lse = (host(x) for x in cuflash.forward(**arguments, sinks=cupy.asarray(sinks)))
            unused = inputs.unused("q")  # (first axis, second axis)
            of_rows = plain[1].reshape(len(unused), heads, -1)
            expected_lse = np.where(unused[:, None], -np.inf, np.logaddexp(of_rows, sinks[:, None].astype("f8")))
            np.testing.assert_allclose(lse.reshape(expected_lse.shape), expected_lse, rtol=1e-5, atol=1e-5)
            with np.errstate(invalid="ignore"):
                share = np.where(np.isneginf(expected_lse), 0.0, np.exp(of_rows - expected_lse)).swapaxes(1, 2)
            got = out.astype("f8").reshape(*share.shape, -1)
            expected = plain[0].reshape(got.shape) * share[..., None]
            np.testing.assert_allclose(got, expected, rtol=3e-3, atol=1e-3)


def test_weights_that_are_dropped_run_unsplit(cupy: Any) -> None:
    with launched() as plans:
        check_sequences(cupy, varlen_arrays(ROWS), joined(sinks_of(), dropped))
    assert "_decode" not in names_of(plans)[0]


def test_a_graph_reads_lengths_and_arrays_anew(cupy: Any) -> None:
    inputs = varlen_arrays(PAGES)
    arguments, mod_kwargs = inputs.arguments(cupy), without_grads(everything(cupy.asarray, bounds_case(inputs)))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        call = partial(cuflash.forward, **arguments, **mod_kwargs, return_lse=True)
        graph, (out, lse) = recorded(stream, call)
        arguments["seqused_k"][...] = cupy.asarray(np.minimum(np.array(LENGTHS) // 2 + 1, LENGTHS).astype(np.int32))
        for name in ("bias", "sinks"):
            mod_kwargs[name] *= 0.5
        out[...], lse[...] = 0.0, 0.0
        graph.launch()
        stream.synchronize()
        assert identical((out, lse), call())


# A kernel that lets the next kernel begin, waits, and then writes numbers.
LATE = r"""
extern "C" __global__ void late(float* numbers, int count, float number, long long cycles) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const long long begin = clock64();
  while (clock64() - begin < cycles) {}
  for (int i = threadIdx.x; i < count; i += blockDim.x) numbers[i] = number + i;
}"""


@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("batch", [1, 40])
def test_numbers_that_a_kernel_ahead_writes_last_are_those_that_count(cupy: Any, batch: int, queries: int) -> None:
    late, heads = cupy.RawKernel(LATE, "late"), 8
    sinks, slopes, table = (cupy.zeros(n, "float32") for n in (heads, heads, 4096))
    q, k, v = (cupy.asarray(x) for x in drawn_arrays((batch, queries, heads, 64), *[(batch, 3000, 1, 64)] * 2))
    used = cupy.full(batch, 3000, "int32")

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score * slopes[h] + table[k_idx]

    for numbers in (sinks, slopes, table):
        for x in (sinks, slopes, table):
            x[...] = 0.25
        call = {"seqused_k": used, "score_mod": score_mod, "sinks": sinks, "return_lse": True}
        numbers[...] = cupy.arange(len(numbers), dtype="float32") * 1.0 - 3.0
        right = cuflash.forward(q, k, v, **call)
        for cycles in (0, 3000, 60_000):
            numbers[...] = 50.0
            cupy.cuda.get_current_stream().synchronize()
            late((1,), (256,), (numbers, np.int32(len(numbers)), np.float32(-3.0), np.int64(cycles)))
            assert identical(cuflash.forward(q, k, v, **call), right)
