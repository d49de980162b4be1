"""Variable-length calls in validation: bad calls, equal problems, and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from refusals import Row, backward_with, check, forward_with, rows, zeros

import cuflash
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.problem.array_spec import ArraySpec
from cuflash.problem.operands import INTEGERS, VARLEN_ARGS, VARLEN_OPS
from cuflash.problem.options import Options
from cuflash.problem.problem import MAX_SEQLEN, Problem
from cuflash.problem.seqlen_info import SeqlenInfo


def ints(*shape: int, dtype: Any = np.int32) -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype)


# Legal calls of two sequences, by shapes.
PACKED = {"q": (5, 4, 8), "k": (7, 2, 8), "v": (7, 2, 6), "cu_seqlens_q": (3,), "cu_seqlens_k": (3,)}
OVER_CACHE = {"q": (5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 6), "cu_seqlens_q": (3,), "seqused_k": (2,)}
RECTANGLE = {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 6), "seqused_q": (2,), "seqused_k": (2,)}
CACHED = {"q": (2, 5, 4, 8), "k": (9, 7, 2, 8), "v": (9, 7, 2, 6), "cache_batch_idx": (2,), "seqused_k": (2,)}
PAGED = {"q": (2, 5, 4, 8), "k": (9, 16, 2, 8), "v": (9, 16, 2, 6), "page_table": (2, 3), "seqused_k": (2,)}
LEGAL = {"packed": PACKED, "cache": OVER_CACHE, "rectangle": RECTANGLE, "cached": CACHED, "paged": PAGED}


def arrays(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {name: ints(*shape) if name in VARLEN_ARGS else zeros(*shape) for name, shape in shapes.items()}


def refused(kind: str, *table: tuple[str, dict[str, Any], tuple[str, ...]]) -> Any:
    """Returns rows of bad calls: a shape stands for an array, and None removes an array of lengths."""

    def call(changes: dict[str, Any]) -> dict[str, Any]:
        shapes = {name: x for name, x in changes.items() if isinstance(x, tuple)}
        arguments = arrays(LEGAL[kind] | shapes) | {name: x for name, x in changes.items() if name not in shapes}
        return {name: x for name, x in arguments.items() if x is not None or name not in VARLEN_ARGS}

    return rows(call, *((f"{kind}_{name}", changes, words) for name, changes, words in table))


BOUNDS_SHAPE, ONE_EACH, TABLE = ("(batch + 1,) in int32",), ("(batch,) in int32",), ("(batch, max_pages) in int32",)
AGREE = "give all for the same (cu_seqlens have one number more)"
ROWS = [
    *refused(
        "packed",
        # ranks and shapes of arrays of lengths
        ("bounds_rank_2", {"cu_seqlens_q": (3, 1)}, ("cu_seqlens_q has shape (3, 1)", *BOUNDS_SHAPE)),
        ("bounds_rank_0", {"cu_seqlens_k": ()}, ("cu_seqlens_k has shape ()", *BOUNDS_SHAPE)),
        ("bounds_empty", {"cu_seqlens_q": (0,)}, ("cu_seqlens_q has shape (0,)", *BOUNDS_SHAPE)),
        ("used_rank_2", {"seqused_q": (2, 1)}, ("seqused_q has shape (2, 1)", *ONE_EACH)),
        ("used_rank_0", {"seqused_k": ()}, ("seqused_k has shape ()", *ONE_EACH)),
        # arrays that do not fit each other
        ("bounds_differ", {"cu_seqlens_k": (4,)}, ("cu_seqlens_k is for 3 sequences", "cu_seqlens_q for 2", AGREE)),
        ("used_q", {"seqused_q": (3,)}, ("seqused_q is for 3 sequences", "cu_seqlens_q for 2", AGREE)),
        ("used_k", {"seqused_k": (1,)}, ("seqused_k is for 1 sequences", "cu_seqlens_q for 2", AGREE)),
        ("pages", {"page_table": (2, 3)}, ("cu_seqlens_k and page_table place the same keys", "give seqused_k")),
        ("rows", {"cache_batch_idx": (2,)}, ("cu_seqlens_k and cache_batch_idx place the same", "give seqused_k")),
        # the ranks of q, k and v
        ("q_rank_4", {"q": (1, 5, 4, 8)}, ("q has shape (1, 5, 4, 8), rank 4", "(total_q, heads, head_dim)")),
        ("q_rank_2", {"q": (5, 8)}, ("q has shape (5, 8), rank 2", "(total_q, heads, head_dim)")),
        ("k_rank_4", {"k": (1, 7, 2, 8)}, ("k has shape (1, 7, 2, 8), rank 4", "(total_k, heads, head_dim)")),
        ("v_rank_4", {"v": (1, 7, 2, 6)}, ("v has shape (1, 7, 2, 6), rank 4", "(total_k, heads, head_dim)")),
        ("k_of_a_cache", {"cu_seqlens_k": None}, ("k has shape (7, 2, 8), rank 3", "with cu_seqlens_q give (batch, c")),
        ("q_alone", {"cu_seqlens_q": None}, ("q is for 1 sequences", "cu_seqlens_k for 2", AGREE)),
        # q, k and v as in dense calls
        ("v_total", {"v": (6, 2, 6)}, ("v has seqlen 6", "k has seqlen 7")),
        ("v_heads", {"v": (7, 4, 6)}, ("4 heads", "2 heads", "share both")),
        ("k_head_dim", {"k": (7, 2, 9)}, ("k has head_dim 9", "q has 8")),
        ("heads", {"q": (5, 3, 8)}, ("q has 3 heads and k has 2", "multiple of heads_kv")),
        ("out_shape", {"out": zeros(1, 5, 4, 6)}, ("out has shape (1, 5, 4, 6)", "needs (5, 4, 6)")),
        # options
        *((f"{name}_negative", {name: -1}, (f"{name}=-1 is negative", "or None"))
          for name in ("max_seqlen_q", "max_seqlen_k")),
        *((f"{name}_{type(value).__name__}", {name: value}, (f"{name}=", type(value).__name__, "give an integer"))
          for name in ("max_seqlen_q", "max_seqlen_k", "num_splits", "split_size")
          for value in (5.0, True, "5", [5], np.array([5]))),
        ("num_splits_none", {"num_splits": None}, ("num_splits=None is a NoneType", "give an integer")),
        ("num_splits_negative", {"num_splits": -1}, ("num_splits=-1 is negative", "or 0")),
        *((f"split_size_{size}", {"split_size": size}, (f"split_size={size};", "positive multiple of 128", "or None"))
          for size in (0, -128, 64, 129)),
        # other types than int32 arrays of the same library
        *((f"{name}_{dtype}", {name: ints(length, dtype=dtype)}, (f"{name} has dtype {dtype}", "needs int32"))
          for name, length in (("cu_seqlens_q", 3), ("cu_seqlens_k", 3), ("seqused_q", 2), ("seqused_k", 2))
          for dtype in ("int64", "uint32", "float32", "bool")),
        ("bounds_list", {"cu_seqlens_q": [0, 3, 5]}, ("cu_seqlens_q is a list", "NumPy")),
        ("used_number", {"seqused_k": 4}, ("seqused_k is an int", "NumPy")),
    ),
    *refused(
        "cache",
        ("batch", {"k": (3, 7, 2, 8), "v": (3, 7, 2, 6)}, ("k is for 3 sequences", "cu_seqlens_q for 2", AGREE)),
        ("v_batch", {"v": (3, 7, 2, 6)}, ("v is for 3 sequences", "cu_seqlens_q for 2", AGREE)),
        ("k_rank_3", {"k": (7, 2, 8), "v": (7, 2, 6)}, ("k has shape (7, 2, 8), rank 3", "(batch, capacity, heads, ")),
    ),
    *refused(
        "rectangle",
        ("k_rank_3", {"k": (7, 2, 8)}, ("k has shape (7, 2, 8), rank 3", "the rank of q, 4")),
        ("v_rank_2", {"v": (7, 6)}, ("v has shape (7, 6), rank 2", "the rank of q, 4")),
        ("rank_5", {n: (1, 1, 1, 1, 1) for n in "qkv"}, ("rank 5", "with seqused_q, seqused_k give (batch, seqlen, ")),
        ("rank_1", {n: (8,) for n in "qkv"}, ("q has shape (8,), rank 1", "(batch, seqlen, heads, head_dim)")),
        ("batch", {"k": (3, 7, 2, 8), "v": (3, 7, 2, 6)}, ("k is for 3 sequences", "seqused_q for 2", AGREE)),
        ("used", {"seqused_k": (3,)}, ("seqused_k is for 3 sequences", "seqused_q for 2", AGREE)),
        ("q_batch", {"q": (1, 5, 4, 8)}, ("q is for 1 sequences", "seqused_q for 2", AGREE)),
    ),
    *refused(
        "cached",
        ("both", {"page_table": (2, 3)}, ("page_table and cache_batch_idx place the same keys", "give one of them")),
        ("rank_2", {"cache_batch_idx": (2, 1)}, ("cache_batch_idx has shape (2, 1)", *ONE_EACH)),
        ("count", {"cache_batch_idx": (3,)}, ("cache_batch_idx is for 3 sequences", "seqused_k for 2", AGREE)),
        ("k_rank_3", {"k": (7, 2, 8), "v": (7, 2, 6)}, ("k has shape (7, 2, 8), rank 3", "(batch, capacity, heads, ")),
        ("v_rows", {"v": (8, 7, 2, 6)}, ("v has shape (8, 7, 2, 6)", "k (9, 7, 2, 8)", "alike but in head_dim")),
        ("int64", {"cache_batch_idx": ints(2, dtype="i8")}, ("cache_batch_idx has dtype int64", "needs int32")),
    ),
    *refused(
        "paged",
        ("rank_1", {"page_table": (6,)}, ("page_table has shape (6,)", *TABLE)),
        ("rank_3", {"page_table": (2, 3, 1)}, ("page_table has shape (2, 3, 1)", *TABLE)),
        ("count", {"page_table": (3, 3)}, ("page_table is for 3 sequences", "seqused_k for 2", AGREE)),
        ("k_rank_3", {"k": (16, 2, 8), "v": (16, 2, 6)}, ("k has shape (16, 2, 8), rank 3", "(num_pages, page_size, ")),
        ("of_no_keys", {"k": (9, 0, 2, 8), "v": (9, 0, 2, 6)}, ("pages of 0 keys", "(num_pages, page_size, ", ">= 1")),
        ("v_pages", {"v": (8, 16, 2, 6)}, ("v has shape (8, 16, 2, 6)", "k (9, 16, 2, 8)", "alike but in head_dim")),
        ("v_size", {"v": (9, 8, 2, 6)}, ("v has seqlen 8", "k has seqlen 16")),
        ("int64", {"page_table": ints(2, 3, dtype="i8")}, ("page_table has dtype int64", "needs int32")),
    ),
]  # fmt: skip
DENSE = rows(
    forward_with,
    ("max_seqlen_q", {"max_seqlen_q": 5}, ("max_seqlen_q=5", "no cu_seqlens, seqused, page_table", "leave it out")),
    ("max_seqlen_k", {"max_seqlen_k": 0}, ("max_seqlen_k=0", "is not varlen", "leave it out")),
    ("num_splits", {"num_splits": -2}, ("num_splits=-2 is negative",)),
    ("split_size", {"split_size": 100}, ("split_size=100", "positive multiple of 128")),
)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("row", [*ROWS, *DENSE])
def test_forward_refuses(row: Row) -> None:
    check(cuflash.forward, row)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("row", [row for row in ROWS if not row.id.split("_", 1)[1].startswith(("v_", "out_"))])
def test_lse_refuses_the_bad_arguments_of_forward_that_it_takes(row: Row) -> None:
    check(cuflash.lse, row._replace(arguments={name: x for name, x in row.arguments.items() if name != "v"}))


@pytest.mark.parametrize("kind", LEGAL)
def test_the_calls_that_the_rows_spoil_are_legal(kind: str) -> None:
    arguments = arrays(LEGAL[kind])
    bounds = {"max_seqlen_q": 5, "max_seqlen_k": 7}
    out, lse = cuflash.forward(**arguments, return_lse=True, num_splits=2, split_size=256, **bounds)
    assert out.shape == (*arguments["q"].shape[:-1], 6)
    assert lse.shape == ((4, 5) if arguments["q"].ndim == 3 else (2, 4, 5))
    assert cuflash.lse(**{name: x for name, x in arguments.items() if name != "v"}).shape == lse.shape
    cuflash.forward(**forward_with({"num_splits": 3, "split_size": 128}))  # a dense call takes these, too
    if kind not in ("cached", "paged"):
        gradients = cuflash.backward(out, out=out, lse=lse, **arguments)
        assert [x.shape for x in gradients] == [arguments[name].shape for name in "qkv"]


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse"])
def test_backward_refuses_arrays_that_do_not_have_the_rows_of_packed_q(name: str) -> None:
    out, lse = zeros(5, 4, 6), zeros(4, 5)
    arguments = arrays(PACKED) | {"dout": out, "out": out, "lse": lse, "dlse": lse}
    shape = arguments[name].shape
    words = f"{name} has shape {(1, *shape)}", f"needs {shape}"
    check(cuflash.backward, Row(name, arguments | {name: arguments[name][None]}, words))


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", ["page_table", "cache_batch_idx"])
def test_backward_has_no_gradients_of_cached_keys(name: str) -> None:
    arguments = backward_with({name: ints(2, 3) if name == "page_table" else ints(2)})
    for more in ({}, {"seqused_k": ints(2)}):
        with pytest.raises(UnsupportedError, match=rf"{name} was given, but cached keys have no gradients.*gather"):
            cuflash.backward(**arguments, **more)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", VARLEN_ARGS)
def test_lengths_of_another_library_are_refused(name: str) -> None:
    torch = pytest.importorskip("torch")
    kind = next(kind for kind, shapes in LEGAL.items() if name in shapes)
    arguments = arrays(LEGAL[kind])
    words = f"{name} is a torch array", "q is a numpy array", "one framework"
    check(cuflash.forward, Row(name, arguments | {name: torch.zeros(LEGAL[kind][name], dtype=torch.int32)}, words))


def problem(kind: str = "packed", changes: Mapping[str, tuple[int, ...]] | None = None, **options: Any) -> Problem:
    """Returns the problem of a legal call with some shapes changed."""
    op, shapes = VARLEN_OPS["forward"], LEGAL[kind] | (changes or {})
    dtypes = {name: INTEGERS if name in VARLEN_ARGS else "float16" for name in shapes}
    specs = [ArraySpec.contiguous(shapes[name], dtypes[name]) if name in shapes else None for name in op.names]
    return Problem.from_specs(op, specs, Options(**options))


@pytest.mark.parametrize("kind", LEGAL)
def test_calls_that_hide_the_same_keys_are_one_problem(kind: str) -> None:
    plain, causal = problem(kind), problem(kind, causal=True)
    assert plain == problem(kind, diagonal_offset=3) == problem(kind, window_size=(None, None))
    assert causal == problem(kind, window_size=(-1, 0)) == problem(kind, causal=True, window_size=(-1, 4))
    assert problem(kind, causal=True, window_size=(2, 9)) == problem(kind, window_size=(2, 0))
    for equal in (problem(kind, max_seqlen_q=5), problem(kind, max_seqlen_q=10**12, max_seqlen_k=10**12)):
        assert equal == plain
        assert hash(equal) == hash(plain)
    others = [problem(kind, **more) for more in (
        {"causal": True}, {"causal": True, "diagonal_offset": 0}, {"window_size": (2, -1)}, {"window_size": (-1, 2)},
        {"max_seqlen_q": 4}, {"max_seqlen_k": 4}, {"num_splits": 1}, {"split_size": 128}, {"softcap": 2.0},
    )]  # fmt: skip
    assert len({plain, *others}) == 1 + len(others)


def test_bounds_come_from_the_arrays_or_from_max_seqlen() -> None:
    lengths = {"packed": (5, 7), "cache": (5, 7), "rectangle": (5, 7), "cached": (5, 7), "paged": (5, 48)}
    for kind, (seqlen_q, seqlen_k) in lengths.items():
        unbounded = problem(kind)
        assert (unbounded.batch, unbounded.seqlen_q, unbounded.seqlen_k) == (2, seqlen_q, seqlen_k)
        bounded = problem(kind, max_seqlen_q=3, max_seqlen_k=6)
        assert (bounded.batch, bounded.seqlen_q, bounded.seqlen_k) == (2, 3, 6)
        assert bounded.outputs == unbounded.outputs
        more = problem(kind, max_seqlen_q=seqlen_q + 1, max_seqlen_k=seqlen_k + 1)
        assert (more.seqlen_q, more.seqlen_k) == (seqlen_q, seqlen_k)
        assert problem(kind, max_seqlen_q=0).seqlen_q == 0


def test_where_rows_lie_is_kept_and_masks_are_made_for_each_length() -> None:
    assert problem("packed").seqlen_info == SeqlenInfo(1, 5, 1, 7, True, True)
    assert problem("cache").seqlen_info == SeqlenInfo(1, 5, 2, 7, True)
    windowed = problem("paged", window_size=(4, 2), diagonal_offset=1).seqlen_info
    assert windowed == SeqlenInfo(2, 5, 9, 16, left=4, right=2, offset=1)
    varlen = problem("cached", causal=True).seqlen_info
    assert varlen == SeqlenInfo(2, 5, 9, 7, right=0)
    assert varlen is not None
    for seqlen_q, seqlen_k in ((1, 7), (5, 3), (0, 4), (5, 0)):
        visible = varlen.mask(seqlen_q, seqlen_k).visible(np.arange(seqlen_q), np.arange(seqlen_k))
        np.testing.assert_array_equal(visible, np.tri(seqlen_q, seqlen_k, seqlen_k - seqlen_q, bool))


def test_num_slots_covers_blocks_of_all_sequences_and_rows_around_them() -> None:
    assert SeqlenInfo(3, 130, 3, 64).num_slots("q", 3, 64) == 3 * 3
    rng = np.random.default_rng(0)
    for _ in range(200):
        batch, rows = int(rng.integers(0, 9)), int(rng.integers(0, 400))
        bounds = [0, *sorted(rng.integers(0, rows + 1, batch + 1).tolist()), rows]
        slots = [bound // 64 + part for part, bound in enumerate(bounds)]  # begins of the parts
        for (begin, end), (first, last) in zip(pairwise(slots), pairwise(bounds), strict=True):
            assert end - begin >= -(-(last - first) // 64)
        assert SeqlenInfo(1, 8, 1, rows, False, True).num_slots("k", batch, 64) == slots[-1]


def test_outputs_have_the_rows_of_q_wherever_the_keys_lie() -> None:
    for kind, out, lse in (("packed", (5, 4, 6), (4, 5)), ("cache", (5, 4, 6), (4, 5)),
                           ("paged", (2, 5, 4, 6), (2, 4, 5))):  # fmt: skip
        assert problem(kind).outputs == ((out, "float16"), (lse, "float32"))
    one = problem("paged", {"q": (5, 4, 8), "page_table": (1, 3), "seqused_k": (1,)})
    assert one.outputs == (((5, 4, 6), "float16"), ((4, 5), "float32"))
    empty = problem("packed", {"cu_seqlens_q": (1,), "cu_seqlens_k": (1,)})
    assert (empty.batch, empty.outputs[0][0]) == (0, (5, 4, 6))


def test_lengths_over_the_limit_of_the_kernels_are_refused() -> None:
    pages = MAX_SEQLEN // 16
    assert problem("paged", {"page_table": (2, pages)}).seqlen_k == pages * 16
    for kind, changes in (("paged", {"page_table": (2, pages + 1)}), ("packed", {"q": (MAX_SEQLEN + 1, 4, 8)})):
        with pytest.raises(ProblemError, match=f"is over the limit of {MAX_SEQLEN}"):
            problem(kind, changes)


@pytest.mark.parametrize("kind", LEGAL)
def test_a_plan_takes_shapes_or_arrays_of_lengths(kind: str) -> None:
    more = {"causal": True, "max_seqlen_q": 4, "max_seqlen_k": 6, "num_splits": 2, "split_size": 128}
    plan = cuflash.plan(**LEGAL[kind], dtype="float16", device="cpu", **more)
    assert (plan.device, plan.launches, plan.kernel) == ("cpu", (), "reference_forward_flash2")
    assert plan.problem == problem(kind, **more)
    halves = {name: x if name in VARLEN_ARGS else x.astype("f2") for name, x in arrays(LEGAL[kind]).items()}
    assert cuflash.plan(**halves, device="cpu", **more).problem == plan.problem
    shapes = {name: shape for name, shape in LEGAL[kind].items() if name != "v"}
    assert cuflash.plan(**shapes, op="lse", dtype="float16", device="cpu").kernel == "reference_lse_flash2"
    if kind in ("cached", "paged"):
        name = "page_table" if kind == "paged" else "cache_batch_idx"
        with pytest.raises(UnsupportedError, match=f"op='backward' takes no {name}"):
            cuflash.plan(**LEGAL[kind], op="backward", dtype="float16", device="cpu")
    else:
        assert cuflash.plan(**LEGAL[kind], op="backward", dtype="float16", device="cpu").problem.batch == 2


def test_a_plan_refuses_bad_arrays_as_the_call_does() -> None:
    for changes, words in (
        ({"cu_seqlens_q": (4,)}, "cu_seqlens_k is for 2 sequences, but cu_seqlens_q for 3"),
        ({"cu_seqlens_q": (3, 1)}, r"cu_seqlens_q has shape \(3, 1\)"),
        ({"max_seqlen_q": -1}, "max_seqlen_q=-1 is negative"),
        ({"cu_seqlens_q": (-3,)}, r"cu_seqlens_q has shape \(-3,\)"),
        ({"op": "backward", "num_splits": 2}, "op='backward' takes neither num_splits nor split_size"),
        ({"op": "backward", "split_size": 128}, "op='backward' takes neither num_splits nor split_size"),
    ):
        with pytest.raises(ProblemError, match=words):
            cuflash.plan(**PACKED | changes, dtype="float16", device="cpu")
