"""Mods on a GPU: both families of kernels, against float64 and the tolerance rule.

A new function, or a new tile, takes seconds to compile: each test runs few of them on many shapes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from libraries import as_numpy, torch_of
from mod_table import SMALL as CASE
from mod_table import of_lengths
from plans import for_any_gpu

import cuflash
from cuflash.testing.cases import Case, numpy_dtype
from cuflash.testing.functions import FUNCTIONS, bias_of, everything
from cuflash.testing.layouts import heads_first, identical, laid_out, odd_rows, odd_start, one_head_for_all
from cuflash.testing.mod_oracle import OracleInputs, check, check_gradients
from cuflash.testing.mods import check_backward, check_forward, check_repeated, forward, make_oracle_mods

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan")]
# Around the edges of tiles of 64 and 128.
# Not (1, 1), as a bias that is broadcast along other axes compiles other code.
LENGTHS = ((1, 3), (63, 64), (64, 65), (127, 129), (128, 128), (129, 127), (65, 300), (300, 63), (257, 260))
FEW_LENGTHS = ((63, 65), (300, 300))


# Forward and lse.

WITH_LSE = ("alibi", "striped", "everything")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_agrees_with_float64_around_the_edges_of_tiles(cupy: Any, name: str) -> None:
    for lengths in LENGTHS:
        check_forward(FUNCTIONS[name], of_lengths(lengths), cupy.asarray, with_lse=name in WITH_LSE)


@pytest.mark.parametrize("name", ["alibi", "striped", "sinks", "everything"])
def test_the_kernels_for_any_gpu_agree_with_float64(cupy: Any, name: str) -> None:
    with for_any_gpu():
        for lengths in LENGTHS:
            check_forward(FUNCTIONS[name], of_lengths(lengths), cupy.asarray, with_lse=name == "everything")


@pytest.mark.parametrize("algorithm", ["flash1", "flashd"])
def test_other_algorithms_agree_with_float64(cupy: Any, algorithm: str) -> None:
    for lengths in LENGTHS:
        check_forward(everything, of_lengths(lengths), cupy.asarray, algorithm=algorithm)


# With keywords that apply before and after the mods.
WINDOWED = replace(CASE, softcap=3.0, window_size=(90, 40), diagonal_offset=20)
SHAPES = [
    replace(CASE, dtype="bfloat16", head_dim=d, head_dim_v=dv)
    for d, dv in ((64, 64), (32, 32), (96, 96), (128, 128), (192, 128), (256, 256))
]
SHAPES.append(replace(CASE, dtype="float32"))


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: f"{case.dtype}_{case.head_dim}_{case.head_dim_v}")
def test_forward_and_backward_agree_at_many_head_dims(cupy: Any, case: Case) -> None:
    for lengths in FEW_LENGTHS:
        check_forward(everything, of_lengths(lengths, case), cupy.asarray)
        check_backward(everything, of_lengths(lengths, case), cupy.asarray)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_cap_and_a_window_go_with_all_of_it(cupy: Any, dtype: str) -> None:
    for lengths in ((257, 300), (300, 129)):
        case = of_lengths(lengths, WINDOWED, dtype=dtype)
        check_forward(everything, case, cupy.asarray, with_lse=dtype == "float16")
        check_backward(everything, case, cupy.asarray)


@pytest.mark.parametrize("name", ["alibi", "document"])
def test_causal_calls_of_many_groups(cupy: Any, name: str) -> None:
    for heads, lengths in (((8, 1), (200, 333)), ((7, 7), (333, 333))):
        case = of_lengths(lengths, heads_q=heads[0], heads_kv=heads[1], causal=True)
        check_forward(FUNCTIONS[name], case, cupy.asarray)
        check_backward(FUNCTIONS[name], case, cupy.asarray)


def test_few_queries_over_many_keys_count_sinks_once(cupy: Any) -> None:
    for heads, causal in (((8, 1), True), ((4, 4), False)):
        case = of_lengths((3, 1500), heads_q=heads[0], heads_kv=heads[1], causal=causal)
        for splits in (1, 3, 0):
            check_forward(everything, case, cupy.asarray, num_splits=splits)


def test_forward_is_bitwise_repeatable(cupy: Any) -> None:
    first = check_forward(everything, CASE, cupy.asarray)
    arrays = [cupy.asarray(x) for x in CASE.arrays()]
    for _ in range(20):
        assert identical(forward(everything, CASE, cupy.asarray, arrays), first)


# Backward.

BACKWARD = ("alibi", "without_score", "least", "document", "striped", "everything")
DETERMINISTIC = ("alibi", "striped", "everything")


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_agrees_with_float64_around_the_edges_of_tiles(cupy: Any, name: str) -> None:
    for lengths in LENGTHS:
        check_backward(FUNCTIONS[name], of_lengths(lengths), cupy.asarray)
    check_backward(FUNCTIONS[name], CASE, cupy.asarray, dlse=False)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_backward_agrees_and_is_bitwise_repeatable(cupy: Any, name: str) -> None:
    for lengths in LENGTHS:
        check_repeated(FUNCTIONS[name], of_lengths(lengths), cupy.asarray)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["without_score", "everything"])
def test_backward_for_any_gpu_agrees_with_float64(cupy: Any, name: str, deterministic: bool) -> None:
    with for_any_gpu():
        for lengths in LENGTHS:
            check_backward(FUNCTIONS[name], of_lengths(lengths), cupy.asarray, deterministic=deterministic)


# Bias: its axes, dtypes and strides.


@pytest.mark.parametrize(("letters", "dtype"), [
    ("bhqk", "float32"), ("1hqk", "float16"), ("b1qk", "bool"), ("11qk", "bfloat16"), ("b11k", "bool"),
    ("bhq1", "float32"), ("hqk", "float32"), ("qk", "bool"), ("1h11", "float64"),
])  # fmt: skip
def test_a_bias_is_broadcast(cupy: Any, letters: str, dtype: str) -> None:
    for lengths in ((2, 3), (65, 300), (128, 128), (257, 63)):
        check_forward(bias_of(letters, dtype), of_lengths(lengths), cupy.asarray)


VIEWS = {
    "transposed": lambda x: laid_out(x, axis_order=(3, 1, 0, 2)),
    "odd": odd_rows,
    "odd_start": odd_start,
    "every_second": lambda x: laid_out(x, steps=(1, 2, 3, 2)),
    "backwards": lambda x: laid_out(x, steps=(-1, 1, -2, -1)),
}


def test_strides_of_a_bias_change_no_bit(cupy: Any) -> None:
    expected = check_forward(bias_of("bhqk"), CASE, cupy.asarray)
    arrays = [cupy.asarray(x) for x in CASE.arrays()]
    for view in VIEWS.values():
        assert identical(forward(bias_of("bhqk", view=view), CASE, cupy.asarray, arrays), expected)


def test_a_bias_of_whole_shape_may_have_strides_of_0(cupy: Any) -> None:
    whole = CASE.batch, CASE.heads_q, CASE.seqlen_q, CASE.seqlen_k

    def stretched(letters: str) -> Any:
        return bias_of(letters, view=lambda x: np.broadcast_to(x, whole))

    arrays = [cupy.asarray(x) for x in CASE.arrays()]
    for letters in ("1hqk", "bh1k", "b1q1"):
        inputs, oracle_mods = OracleInputs.dense(CASE, CASE.arrays()), make_oracle_mods(stretched(letters), CASE)
        check(inputs, oracle_mods, *forward(stretched(letters), CASE, cupy.asarray, arrays))


# Arrays of other layouts and libraries.


def test_layouts_of_q_k_and_v(cupy: Any) -> None:
    case = of_lengths((140, 150))
    arrays = [cupy.asarray(x) for x in case.arrays()]
    expected = check_forward(everything, case, cupy.asarray)
    assert identical(forward(everything, case, cupy.asarray, [heads_first(x) for x in arrays]), expected)
    for layout in (odd_rows, odd_start, lambda x: laid_out(x, steps=(1, -1, 1, 1))):  # layouts that TMA cannot address
        check(OracleInputs.dense(case, case.arrays()), make_oracle_mods(everything, case),
              *forward(everything, case, cupy.asarray, [layout(x) for x in arrays]))  # fmt: skip
    one = tuple(one_head_for_all(x) for x in case.arrays())
    check(OracleInputs.dense(case, one), make_oracle_mods(everything, case), *forward(everything, case, cupy.asarray,
          [one_head_for_all(x) for x in arrays]))  # fmt: skip


def test_tensors_of_torch(cupy: Any) -> None:
    torch = pytest.importorskip("torch")

    def put(x: Any) -> Any:
        return torch_of(np.asarray(x), "cuda")

    case = replace(CASE, dtype="bfloat16")
    arrays = case.arrays()
    out, lse = forward(everything, case, put, [put(x) for x in arrays])
    assert isinstance(out, torch.Tensor)
    outputs = (as_numpy(out).astype(numpy_dtype("bfloat16")), as_numpy(lse))
    check(OracleInputs.dense(case, arrays), make_oracle_mods(everything, case), *outputs)
    mod_kwargs, dout = everything(put, case), np.random.default_rng(7).standard_normal(case.out_shape())
    captured = mod_kwargs.pop("captured_grads")
    dout = dout.astype(numpy_dtype("bfloat16"))
    dq, dk, dv, grads = cuflash.backward(
        put(dout), *map(put, arrays), out, lse, **case.arguments(), **mod_kwargs, captured_grads=captured
    )
    for got, like in zip(grads, captured, strict=True):
        assert isinstance(got, torch.Tensor)
        assert (got.shape, got.dtype) == (like.shape, like.dtype)
    gradients = [as_numpy(x).astype(numpy_dtype("bfloat16")) for x in (dq, dk, dv)]
    inputs = OracleInputs.dense(case, arrays)
    check_gradients(inputs, make_oracle_mods(everything, case), dout, None, gradients, [as_numpy(x) for x in grads])
