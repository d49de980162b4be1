"""Checks of single arrays: errors name the axes of the shapes that they print."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from refusals import refused

import cuflash
from cuflash.errors import ProblemError


def f4(*shape: int) -> Any:
    return np.zeros(shape, "f4")


Q, T = f4(2, 5, 4, 8), f4(64, 2, 8)
BOUNDS = np.array([0, 64], "i4")
PACKED = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS}
WRONG: list[tuple[Any, str]] = [
    (lambda: cuflash.forward(Q, Q, Q, out=f4(2, 5, 4, 6)), "(2, 5, 4, 8): (batch, seqlen_q, heads_q, head_dim_v)"),
    (lambda: cuflash.forward(Q, Q, Q, sinks=f4(3)), "(4,): (heads_q,)"),
    (lambda: cuflash.forward(Q, Q, Q, bias=f4(3, 5)), "(batch, heads_q, seqlen_q, seqlen_k) = (2, 4, 5, 5)"),
    (lambda: cuflash.forward(T, T, T, out=f4(60, 2, 8), **PACKED), "(64, 2, 8): (total_q, heads_q, head_dim_v)"),
    (lambda: cuflash.backward(Q, Q, Q, Q, Q, f4(2, 5, 4)), "(2, 4, 5): (batch, heads_q, seqlen_q)"),
    (lambda: cuflash.backward(Q, Q, Q, Q, Q, f4(2, 4, 5), grads_out=(None, f4(2, 4, 4, 8), None)),
     "(2, 5, 4, 8): (batch, seqlen_k, heads_kv, head_dim)"),
    (lambda: cuflash.merge_states([Q, Q], [f4(2, 4, 5), f4(2, 4, 6)]), "(2, 4, 5): (batch, heads_q, seqlen_q)"),
    (lambda: cuflash.append_kv(Q, Q.copy(), Q, Q[:, :3], np.zeros(2, "i4")),
     "(2, 5, 4, 8): (batch, seqlen_k, heads_kv, head_dim_v)"),
    (lambda: cuflash.triangle_attention(*[f4(1, 3, 2, 5, 8)] * 3, f4(1, 2, 4, 5)),
     "(1, 2, 5, 5): (batch, heads, seqlen_q, seqlen_k)"),
    (lambda: cuflash.forward(f4(2, 5, 0, 8), Q, Q), "(batch, seqlen, heads, head_dim)"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_shapes_in_errors_name_their_axes(number: int) -> None:
    call, text = WRONG[number]
    with refused(ProblemError, text):
        call()
