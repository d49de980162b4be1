"""Problems for tests: masks, memory layouts, problems that hypothesis draws, and a problem in parts of its keys."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st
from oracle import ULPS, Array

from cuflash import reference
from cuflash.bench.cases import Case


def dense(x: Array) -> Array:
    return x


def heads_first(x: Array) -> Array:
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def reversed_keys(x: Array) -> Array:
    return np.ascontiguousarray(x[:, ::-1])[:, ::-1]


def reversed_dim(x: Array) -> Array:
    return np.ascontiguousarray(x[..., ::-1])[..., ::-1]


def every_second(x: Array) -> Array:
    room = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)
    room[..., ::2] = x
    return room[..., ::2]


def fortran(x: Array) -> Array:
    return np.asfortranarray(x)


def one_head_for_all(x: Array) -> Array:
    return np.broadcast_to(x[:, :, :1], x.shape)


LAYOUTS = (dense, heads_first, reversed_keys, reversed_dim, every_second, fortran, one_head_for_all)
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
    """The problems over the keys between the cuts, with the diagonal where it lies among them, and their keys."""
    offset = case.seqlen_k - case.seqlen_q if case.diagonal_offset is None else case.diagonal_offset
    return [
        (replace(case, seqlen_k=end - begin, diagonal_offset=offset - begin), np.s_[:, begin:end])
        for begin, end in pairwise(cuts)
    ]


def parts_of(case: Case, cuts: list[int]) -> tuple[list[Array], list[Array]]:
    """`(outs, lses)` over the keys between the cuts."""
    q, k, v = case.arrays()
    results = [reference.forward(part.problem(), q, k[keys], v[keys]) for part, keys in parts(case, cuts)]
    return [out for out, _ in results], [lse for _, lse in results]


@st.composite
def problems(draw: st.DrawFn, longest: int, widest: int) -> Case:
    """A problem of any shape, mask and dtype; head dims are mostly small."""
    lengths = draw(st.integers(0, longest)), draw(st.integers(0, longest))
    heads_kv, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 7, 8]))
    width = st.one_of(st.integers(1, max(1, widest // 4)), st.integers(1, widest))
    # why: a handful of numbers has a handful of errors, and the naive computation may be lucky with all of them; so
    # small problems come in large batches.
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
