"""Validation of `append_kv`: bad calls raise the right error, with its full text, and write nothing; its problem."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from libraries import Producer, jax_of, torch_of
from refusals import DTYPES, Row, check, rows, zeros

import cuflash
from cuflash import reference
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.problem.array_spec import ArraySpec
from cuflash.problem.checks import MAX_SEQLEN
from cuflash.problem.operands import APPEND_KV
from cuflash.problem.options import Options
from cuflash.problem.problem import LENGTHS, Problem
from cuflash.testing.appends import Arguments, drawn, expected, in_library
from cuflash.testing.layouts import identical

CACHE, PAGES = "(batch, capacity, heads, head_dim)", "(num_pages, page_size, heads, head_dim)"
NEW, WRITABLE = "(batch, seqlen, heads, head_dim)", "NumPy, CuPy or PyTorch"


def plain(changes: Arguments) -> Arguments:
    """Returns a call of three sequences in a cache of 33 keys.

    Shapes are k (3, 5, 2, 16), v (3, 5, 2, 8), q (3, 5, 4, 16) and rotary tables (60, 8).
    """
    return drawn(rotary_dim=16) | changes


def packed(changes: Arguments) -> Arguments:
    """Returns three sequences with 12 + 3 packed rows of k, v and q, and pages of 3 keys."""
    return drawn(place="pages of 3", new=(3, 0, 9), rotary_dim=16) | changes


def ints(*shape: int, dtype: str = "i4") -> Any:
    return np.zeros(shape, dtype)


def frozen(array: Any) -> Any:
    array.flags.writeable = False
    return array


def overlapping(name: str, other: str) -> Arguments:
    """Returns a call in which array `other` is a part of the memory of array `name`, which is no smaller."""
    call = plain({})
    call[other] = call[name].reshape(-1)[: call[other].size].reshape(call[other].shape)
    return call


PLAIN = rows(
    plain,
    # ranks and shapes
    ("cache_rank_3", {"k_cache": zeros(33, 2, 16)}, ("k_cache has shape (33, 2, 16)", "rank 3", CACHE)),
    ("v_cache_rank_5", {"v_cache": zeros(1, 3, 33, 2, 8)}, ("v_cache has shape", "rank 5", CACHE)),
    ("k_rank_3", {"k": zeros(5, 2, 16)}, ("k has shape (5, 2, 16)", "rank 3", NEW)),
    ("q_rank_2", {"q": zeros(5, 16)}, ("q has shape (5, 16)", "rank 2", NEW)),
    ("seqused_rank_2", {"seqused_k": ints(3, 1)}, ("seqused_k has shape (3, 1)", "(batch,)")),
    ("index_rank_0", {"cache_batch_idx": ints()}, ("cache_batch_idx has shape ()", "(batch,)")),
    ("cos_rank_3", {"rotary_cos": zeros(1, 60, 8)}, ("rotary_cos has shape (1, 60, 8)", "(positions, rotary_dim / 2)")),
    ("v_cache_rows", {"v_cache": zeros(3, 32, 2, 8)}, ("v_cache has shape (3, 32, 2, 8)", "needs (3, 33, 2, 8)")),
    ("v_cache_heads", {"v_cache": zeros(3, 33, 4, 8)}, ("v_cache has shape (3, 33, 4, 8)", "needs (3, 33, 2, 8)")),
    ("k_batch", {"k": zeros(2, 5, 2, 16)}, ("k has shape (2, 5, 2, 16)", "needs (3, 5, 2, 16)")),
    ("k_heads", {"k": zeros(3, 5, 4, 16)}, ("k has shape (3, 5, 4, 16)", "needs (3, 5, 2, 16)")),
    ("k_dim", {"k": zeros(3, 5, 2, 8)}, ("k has shape (3, 5, 2, 8)", "needs (3, 5, 2, 16)")),
    ("v_rows", {"v": zeros(3, 4, 2, 8)}, ("v has shape (3, 4, 2, 8)", "needs (3, 5, 2, 8)")),
    ("v_dim", {"v": zeros(3, 5, 2, 16)}, ("v has shape (3, 5, 2, 16)", "needs (3, 5, 2, 8)")),
    ("q_batch", {"q": zeros(2, 5, 4, 16)}, ("q has shape (2, 5, 4, 16)", "needs (3, 5, 4, 16)")),
    ("q_dim", {"q": zeros(3, 5, 4, 8)}, ("q has shape (3, 5, 4, 8)", "needs (3, 5, 4, 16)")),
    ("q_heads", {"q": zeros(3, 5, 3, 16)}, ("q has 3 heads", "k_cache has 2", "multiple of heads_kv")),
    ("q_no_heads", {"q": zeros(3, 5, 0, 16)}, ("q has 0 heads", "multiple of heads_kv")),
    ("no_heads", {"k_cache": zeros(3, 33, 0, 16)}, ("(3, 33, 0, 16)", "at least 1")),
    ("no_dim_v", {"v_cache": zeros(3, 33, 2, 0)}, ("(3, 33, 2, 0)", "at least 1")),
    ("rows_and_lengths", {"seqused_k": ints(4)}, ("3 rows", "4 sequences", "cache_batch_idx or page_table")),
    ("index_length", {"cache_batch_idx": ints(2)}, ("cache_batch_idx has shape (2,)", "needs (3,)")),
    # the rotation
    ("cos_alone", {"rotary_sin": None}, ("rotary_cos was given without rotary_sin", "both")),
    ("sin_alone", {"rotary_cos": None}, ("rotary_sin was given without rotary_cos", "both")),
    ("q_alone", {"rotary_cos": None, "rotary_sin": None}, ("q was given without rotary_cos", "q=None")),
    ("sin_shape", {"rotary_sin": zeros(59, 8)}, ("rotary_sin has shape (59, 8)", "needs (60, 8)")),
    ("too_wide", {n: zeros(60, 9) for n in ("rotary_cos", "rotary_sin")}, ("(60, 9)", "18", "head_dim is 16")),
    ("no_pairs", {n: zeros(60, 0) for n in ("rotary_cos", "rotary_sin")}, ("(60, 0)", "from 2 to head_dim")),
    ("same_number", {"q_same_position": 1}, ("q_same_position=1", "int", "True or False")),
    ("interleaved_none", {"rotary_interleaved": None}, ("rotary_interleaved=None", "NoneType", "True or False")),
    # dtypes, frameworks, other types than arrays
    ("all_int", {n: ints(3, 33, 2, 16) for n in ("k_cache", "v_cache")}, ("k_cache has dtype int32", DTYPES)),
    ("v_cache_half", {"v_cache": zeros(3, 33, 2, 8, dtype="f2")}, ("v_cache has dtype float16", "k_cache has float32")),
    ("k_double", {"k": zeros(3, 5, 2, 16, dtype="f8")}, ("k has dtype float64", "k_cache has float32", "cast")),
    ("q_half", {"q": zeros(3, 5, 4, 16, dtype="f2")}, ("q has dtype float16", "k_cache has float32", "cast")),
    ("lengths_int64", {"seqused_k": ints(3, dtype="i8")}, ("seqused_k has dtype int64", "needs int32")),
    ("lengths_none", {"seqused_k": None}, ("seqused_k is a NoneType",)),
    ("lengths_list", {"seqused_k": [0, 7, 20]}, ("seqused_k is a list",)),
    ("k_none", {"k": None}, ("k is a NoneType",)),
    ("index_int64", {"cache_batch_idx": ints(3, dtype="i8")}, ("cache_batch_idx has dtype int64", "needs int32")),
    ("cos_half", {"rotary_cos": zeros(60, 8, dtype="f2")}, ("rotary_cos has dtype float16", "float32")),
    ("sin_double", {"rotary_sin": zeros(60, 8, dtype="f8")}, ("rotary_sin has dtype float64", "float32")),
    ("k_producer", {"k": Producer(zeros(3, 5, 2, 16))}, ("k is a libraries", "k_cache is a numpy")),
    # arrays that cannot be written to
    ("read_only", {"k_cache": frozen(zeros(3, 33, 2, 16))}, ("k_cache is read-only", "writable")),
    ("v_read_only", {"v_cache": frozen(zeros(3, 33, 2, 8))}, ("v_cache is read-only", "writable")),
    ("gaps", {"k_cache": zeros(3, 33, 2, 32)[..., ::2]}, ("k_cache", "last dimension is not contiguous", "in place")),
    ("backwards", {"v_cache": zeros(3, 33, 2, 8)[..., ::-1]}, ("v_cache", "last dimension is not contiguous")),
    ("repeated", {"k_cache": np.broadcast_to(zeros(1, 33, 2, 16), (3, 33, 2, 16))}, ("k_cache", "rows share memory")),
    *((f"{other}_of_cache", overlapping("k_cache", other), ("k_cache", "shares memory with", other))
      for other in ("v_cache", "k", "v", "q", "rotary_cos")),
)  # fmt: skip
PACKED = rows(
    packed,
    ("k_rank_4", {"k": zeros(3, 5, 2, 16)}, ("k has shape (3, 5, 2, 16)", "rank 4", "(total_k, heads, head_dim)")),
    ("q_rank_4", {"q": zeros(3, 5, 4, 16)}, ("q has shape (3, 5, 4, 16)", "rank 4", "(total_q, heads, head_dim)")),
    ("cache_rank_3", {"k_cache": zeros(36, 2, 16)}, ("k_cache has shape (36, 2, 16)", PAGES)),
    ("v_rows", {"v": zeros(14, 2, 8)}, ("v has shape (14, 2, 8)", "needs (15, 2, 8)")),
    ("bounds", {"cu_seqlens_k": ints(3)}, ("cu_seqlens_k has shape (3,)", "needs (4,)")),
    ("bounds_q_rank", {"cu_seqlens_q": ints(2, 2)}, ("cu_seqlens_q has shape (2, 2)", "(batch + 1,)")),
    ("bounds_int64", {"cu_seqlens_q": ints(4, dtype="i8")}, ("cu_seqlens_q has dtype int64", "needs int32")),
    ("bounds_without_q", {"q": None}, ("cu_seqlens_q was given without q", "cu_seqlens_q=None")),
    ("table_rank", {"page_table": ints(33)}, ("page_table has shape (33,)", "(batch, max_pages)")),
    ("table_rows", {"page_table": ints(4, 11)}, ("page_table has shape (4, 11)", "needs (3, 11)")),
    ("two_places", {"cache_batch_idx": ints(3)}, ("page_table and cache_batch_idx", "one of them")),
    ("no_page_size", {"k_cache": zeros(9, 0, 2, 16)}, ("pages of 0 keys", PAGES)),
)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("row", [*PLAIN, *PACKED])
def test_append_kv_refuses(row: Row) -> None:
    check(cuflash.append_kv, row)


@pytest.mark.parametrize("make", [plain, packed])
def test_the_call_that_each_row_spoils_is_legal_and_computes(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuflash.append_kv(**make({}))
    monkeypatch.setitem(reference.RUN, "append_kv", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # proves that `nothing_runs` traps the work
        cuflash.append_kv(**make({}))


@pytest.mark.usefixtures("nothing_runs")
def test_arrays_that_do_not_change_are_refused() -> None:
    call = {name: x for name, x in plain({}).items() if isinstance(x, np.ndarray)}
    check(cuflash.append_kv, Row("producer", in_library(call, Producer), ("k_cache is a libraries array", WRITABLE)))
    with pytest.raises(ProblemError, match="k_cache is a jax array, which cannot be written to here; give a NumPy"):
        cuflash.append_kv(**in_library(call, lambda x: jax_of(x, "cpu")))


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_runs")
def test_arrays_on_a_gpu_that_do_not_change_or_overlap_are_refused(cupy: Any) -> None:
    call = {name: x for name, x in plain({}).items() if isinstance(x, np.ndarray)}
    on_gpu = in_library(call, cupy.asarray)
    with pytest.raises(ProblemError, match="k_cache is a libraries array, which cannot be written to here"):
        cuflash.append_kv(**in_library(on_gpu, lambda x: x) | {name: Producer(x) for name, x in on_gpu.items()})
    with pytest.raises(ProblemError, match="k_cache is a jax array, which cannot be written to here"):
        cuflash.append_kv(**in_library(call, lambda x: jax_of(x, "gpu")))
    pool = on_gpu["k_cache"].reshape(-1)
    for name in ("k", "v", "v_cache"):
        part = pool[: on_gpu[name].size].reshape(on_gpu[name].shape)
        with pytest.raises(ProblemError, match=f"k_cache, which is written to, shares memory with {name}"):
            cuflash.append_kv(**on_gpu | {name: part})
    with pytest.raises(ProblemError, match="last dimension is not contiguous"):
        cuflash.append_kv(**on_gpu | {"k_cache": cupy.zeros((3, 33, 2, 32), "f4")[..., ::2]})
    with pytest.raises(UnsupportedError, match="float64"):
        cuflash.append_kv(**in_library(drawn("float64"), cupy.asarray))


def test_tensors_that_require_grad_and_lazily_negated_caches_are_refused() -> None:
    torch = pytest.importorskip("torch")
    call = {name: torch_of(x, "cpu") for name, x in drawn("float32").items()}
    with pytest.raises(ProblemError, match="k requires grad"):
        cuflash.append_kv(**call | {"k": call["k"].requires_grad_()})
    with torch.no_grad():
        cuflash.append_kv(**call)
    call = {name: torch_of(x, "cpu") for name, x in drawn("float32", dims=(16, 1)).items()}
    negated = torch.view_as_complex(torch.zeros(3, 33, 2, 1, 2)).conj().imag
    with pytest.raises(ProblemError, match=r"v_cache is a view that is yet to be negated, .* to; give a plain tensor$"):
        cuflash.append_kv(**call | {"v_cache": negated})


def test_two_caches_may_lie_between_each_other() -> None:
    call = drawn(dims=(8, 8))
    expected_results = expected(call)
    both = np.concatenate([call["k_cache"], call["v_cache"]], axis=-1)
    cuflash.append_kv(both[..., :8], both[..., 8:], *(call[name] for name in ("k", "v", "seqused_k")))
    assert identical([np.ascontiguousarray(both[..., :8]), np.ascontiguousarray(both[..., 8:])], expected_results)


def specs_of(call: Arguments) -> dict[str, ArraySpec | None]:
    arrays = {operand.name: call.get(operand.name) for operand in APPEND_KV.inputs}
    return {name: x if x is None else ArraySpec.contiguous(x.shape, x.dtype.name) for name, x in arrays.items()}


@pytest.mark.parametrize(
    ("name", "shape", "seqlen"),
    [("k", (MAX_SEQLEN + 1, 2, 16), MAX_SEQLEN + 1), ("q", (2**30, 4, 16), 2**30),
     ("page_table", (3, MAX_SEQLEN // 3 + 1), 3 * (MAX_SEQLEN // 3) + 3)],
)  # fmt: skip
def test_positions_stay_within_32_bits(name: str, shape: tuple[int, ...], seqlen: int) -> None:
    specs: Any = specs_of(packed({}))
    specs[name] = ArraySpec.contiguous(shape, specs[name].dtype)
    operand = "k_cache" if name == "page_table" else name
    with pytest.raises(ProblemError, match=f"{operand} has seqlen {seqlen}, over the limit of {MAX_SEQLEN}"):
        Problem.from_specs(APPEND_KV, list(specs.values()), Options())


def test_the_problem_of_append_kv_has_its_lengths_and_results() -> None:
    specs = specs_of(packed({}))
    problem = Problem.from_specs(APPEND_KV, list(specs.values()), Options(q_same_position=True))
    assert problem[1:8] == (3, 15, 15, 4, 2, 16, 8)
    assert Problem._fields[1:8] == LENGTHS
    assert problem.outputs == (((15, 4, 16), "float32"),)
    assert (problem.flops, problem.options.q_same_position) == (0, True)
    assert problem.spec("q").shape == problem.spec("q_out").shape == (1, 15, 4, 16)
    assert problem.seqlen_info is not None
    assert problem.seqlen_info[:4] == (1, 15, 1, 15)
    problem = Problem.from_specs(APPEND_KV, list((specs | {"q": None, "cu_seqlens_q": None}).values()), Options())
    assert (problem.outputs, problem.heads_q, problem.seqlen_q) == ((), 0, 0)
    hash(problem)
