"""Problems for tests: masks, memory layouts, problems drawn by hypothesis, and problems over ranges of keys."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from cuflash import reference
from cuflash.testing.cases import Case
from cuflash.testing.oracle import ULPS, Array


def need_memory(cupy: Any, gib: int) -> None:
    """Skips the test if the GPU has less than `gib` GiB of free memory."""
    cupy.get_default_memory_pool().free_all_blocks()
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < gib << 30:
        pytest.skip(f"needs {gib} GiB of free GPU memory, has {free >> 30}")


def far_apart(cupy: Any, x: Any, axis: int) -> Any:
    """Returns x, of one batch element and head, in new memory where its last rows begin past 2³¹ elements."""
    step = 2**31 // (x.shape[axis] - 20) // 8 * 8
    assert (x.shape[axis] - 1) * step > 2**31
    memory = cupy.zeros(step * x.shape[axis], x.dtype)
    strides = [0] * x.ndim
    strides[-1] = x.itemsize
    strides[axis] = step * x.itemsize
    far = cupy.lib.stride_tricks.as_strided(memory, x.shape, strides)
    far[...] = x
    return far


side = st.one_of(st.just(-1), st.integers(0, 12))
cases = st.builds(
    lambda batch, lengths, heads_kv, group, dims, dtype, causal, window, offset, softcap, scale: Case(
        "drawn", batch, *lengths, heads_kv * group, heads_kv, *dims, dtype, causal, window, offset, softcap, scale
    ),
    batch=st.integers(0, 2),
    lengths=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    heads_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    dtype=st.sampled_from(list(ULPS)),
    causal=st.booleans(),
    window=st.tuples(side, side),
    offset=st.one_of(st.none(), st.integers(-25, 25)),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    scale=st.sampled_from([None, 0.3, 1.0, 4.0]),
)
MASKED = [
    {"causal": True},
    {"causal": True, "diagonal_offset": -7},
    {"window_size": (3, 2)},
    {"window_size": (2, -1), "diagonal_offset": 9},
    {"causal": True, "window_size": (4, -1), "diagonal_offset": 3},
]


def parts(case: Case, cuts: list[int]) -> list[tuple[Case, Any]]:
    """Returns the problems over the keys between the cuts, with shifted diagonals, and the indices of their keys."""
    offset = case.seqlen_k - case.seqlen_q if case.diagonal_offset is None else case.diagonal_offset
    return [
        (replace(case, seqlen_k=end - begin, diagonal_offset=offset - begin), np.s_[:, begin:end])
        for begin, end in pairwise(cuts)
    ]


def parts_of(case: Case, cuts: list[int]) -> tuple[list[Array], list[Array]]:
    """Returns `(outs, lses)` over the keys between the cuts."""
    q, k, v = case.arrays()
    results = [reference.forward(part.problem(), q, k[keys], v[keys]) for part, keys in parts(case, cuts)]
    return [out for out, _ in results], [lse for _, lse in results]


@st.composite
def problems(draw: st.DrawFn, longest: int, widest: int, step: int = 1) -> Case:
    """Draws a problem of any shape, mask and dtype; head dims are multiples of `step` and mostly small."""
    lengths = draw(st.integers(0, longest)), draw(st.integers(0, longest))
    heads_kv, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 7, 8]))
    width = st.one_of(st.integers(1, max(1, widest // 4 // step)), st.integers(1, widest // step)).map(step.__mul__)
    # Small problems have large batches: with few numbers, the naive computation may happen to have no errors.
    few = max(1, min(lengths[0] * group, lengths[1]) * heads_kv)
    window = st.integers(-1, 3 * longest // 4)
    head_dims = draw(st.tuples(width, width) | width.map(lambda dim: (dim, dim)))
    return Case(
        "random",
        max(draw(st.integers(0, 2)), -(-48 // few)) if 0 not in lengths else draw(st.integers(0, 2)),
        *lengths,
        heads_kv * group,
        heads_kv,
        *head_dims,
        draw(st.sampled_from(["float16", "bfloat16", "float32"])),
        causal=draw(st.booleans()),
        window_size=(draw(window), draw(window)),
        diagonal_offset=draw(st.none() | st.integers(-longest - longest // 4, longest + longest // 4)),
        softcap=draw(st.sampled_from([0.0, 0.0, 5.0, 50.0])),
        softmax_scale=draw(st.none() | st.floats(0.1, 2.0).map(lambda scale: scale / head_dims[0] ** 0.5)),
    )
