"""Variable-length sequences on a GPU, at the tiles of Hopper's kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plans import planned_with

import cuflash
from cuflash.planning import backward_sm90
from cuflash.testing.layouts import identical
from cuflash.testing.sequences import Sequences, check, check_gradients, gradients, varlen_arrays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan")]
# Heads are not grouped: with few keys, the query heads of a group are split, and over head dim 128 the kernels for any
# GPU run.
MANY = tuple(n * 37 % 150 for n in range(270))  # more sequences than a thread block has threads
FALLING = tuple(900 - 17 * n for n in range(50))  # more blocks of rows than a GPU has SMs
PACKED = Sequences("gpu", (700, 0, 1, 130, 65), (1000, 9, 0, 127, 129), heads=(2, 2), causal=True)
CASES = [
    PACKED,
    replace(PACKED, name="full", causal=False, gaps=(200, 300)),
    replace(PACKED, name="used", used_q=True, used_k=True, spare_q=(9, 3, 0, 2, 200), spare_k=(1, 130, 4, 0, 7)),
    replace(PACKED, name="rectangle", place_q="rectangle", place_k="rectangle", used_q=True, used_k=True),
    replace(PACKED, name="groups", heads=(9, 1)),
    replace(PACKED, name="window", causal=False, window_size=(150, 20), diagonal_offset=100, softcap=5.0),
    replace(PACKED, name="window_of_one", causal=False, window_size=(0, 0), gaps=(0, 0)),
    replace(PACKED, name="offset_negative", diagonal_offset=-300),
    replace(PACKED, name="many", queries=MANY, keys=MANY, causal=False),
    replace(PACKED, name="falling", queries=FALLING, keys=FALLING, heads=(4, 2)),
]


DIMS = [
    (32, 32),
    (48, 48),
    (64, 64),
    (40, 56),
    (80, 80),
    (96, 96),
    (128, 128),
    (192, 128),
    (192, 64),
    (192, 192),
    (256, 256),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dims", DIMS)
def test_gradients_agree_with_float64_at_several_tiles(
    cupy: Any, dims: tuple[int, int], case: Sequences, deterministic: bool
) -> None:
    args = varlen_arrays(replace(case, dims=dims))
    # One key block for each thread block, and as many as its tile allows.
    for waves in (backward_sm90.SHORT_WAVES, 0):
        with planned_with(backward_sm90, SHORT_WAVES=waves):
            results = gradients(args, cupy, deterministic=deterministic)
            check_gradients(args, results)
            if deterministic:
                assert identical(gradients(args, cupy, deterministic=True), results)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
def test_gradients_end_where_cu_seqlens_fall(cupy: Any, dims: tuple[int, int], deterministic: bool) -> None:
    args = varlen_arrays(replace(PACKED, dims=dims)).filled(0.5)
    rows_q, rows_k = (args.varlen_kwargs[f"cu_seqlens_{side}"][-1] for side in "qk")
    for more in (
        {"cu_seqlens_q": [0, rows_q, 0, rows_q, 0, rows_q]},
        {"cu_seqlens_k": [0, rows_k, 0, rows_k, 9, rows_k]},
        {"cu_seqlens_q": [rows_q, 0, rows_q, 5, 300, 0], "cu_seqlens_k": [rows_k, 5, rows_k, 0, 200, 9]},
    ):
        wild = args.with_varlen(**more)
        assert [x.shape for x in gradients(wild, cupy, deterministic=deterministic, unused=0.0)]


UNEQUAL = {
    "many": (tuple(n * 37 % 400 for n in range(90)), (1, 1)),
    "few": ((700, 0, 1, 1300, 65, 2000, 129), (2, 2)),
    "in_pairs": (tuple(900 - 7 * n for n in range(50)), (2, 1)),
    "of_one": ((3000,), (1, 1)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
@pytest.mark.parametrize("unequal", UNEQUAL)
def test_forward_agrees_with_float64_for_many_or_unequal_sequences(
    cupy: Any, unequal: str, dims: tuple[int, int], causal: bool
) -> None:
    lengths, heads = UNEQUAL[unequal]
    case = Sequences(unequal, lengths, lengths, heads=heads, dims=dims, dtype="bfloat16", causal=causal)
    args = varlen_arrays(case)
    arguments = args.arguments(cupy)
    results = cuflash.forward(**arguments, return_lse=True)
    check(args, *results)
    assert identical(cuflash.forward(**arguments, return_lse=True), results)
    del arguments["v"]
    check(args, None, cuflash.lse(**arguments))
