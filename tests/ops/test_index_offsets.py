"""Index offsets: a call on slices is the part of one call on the whole, in NumPy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import cuflash

BATCH, ROWS, HEADS, DIM = 2, 100, 4, 16
SEQUENCE, QUERY, HEAD = slice(1, 2), slice(13, 77), slice(1, 3)
KEY_BOUNDS = 0, 37, 64, 100
RNG = np.random.default_rng(0)
Q, K, V, DOUT = RNG.standard_normal((4, BATCH, ROWS, HEADS, DIM))
SLOPES, TABLE = RNG.standard_normal((BATCH, HEADS)), RNG.standard_normal((ROWS, ROWS))
IDS = np.arange(ROWS) // 30 % 2
BIAS = RNG.standard_normal((BATCH, HEADS, ROWS, ROWS))


def tilted(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return score + SLOPES[b, h] * (q_idx - k_idx) * 0.01 + TABLE[q_idx, k_idx]


def striped(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return (q_idx * 3 + k_idx + h + b) % 5 != 0


def window(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:  # a band, which is no part of a kernel
    return (k_idx <= q_idx + 40) & (q_idx - k_idx < 60)


CALLS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout_p": 0.3, "dropout_seed": 2**40 + 7},
    "score_mod": {"score_mod": tilted},
    "mask_mod": {"mask_mod": striped},
    "band": {"mask_mod": window},
    "segments": {"mask_mod": lambda b, h, q_idx, k_idx: IDS[q_idx] == IDS[k_idx]},
    "all": {"dropout_p": 0.3, "dropout_seed": 1, "score_mod": tilted, "mask_mod": striped, "bias": BIAS},
    "band and dropout": {"dropout_p": 0.3, "dropout_seed": 1, "mask_mod": window, "bias": BIAS},
}


def part(x: Any) -> Any:
    """Returns the part of an array (batch, rows, heads, dim) of queries."""
    return x[SEQUENCE, QUERY, HEAD]


def of_part(call: dict[str, Any], keys: slice) -> dict[str, Any]:
    """Returns the arguments of a call on the part and some keys."""
    bias = {"bias": call["bias"][SEQUENCE, HEAD, QUERY, keys]} if "bias" in call else {}
    return call | bias | {"index_offsets": (QUERY.start, keys.start, HEAD.start, SEQUENCE.start)}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_part_of_the_queries_has_their_results(call: dict[str, Any]) -> None:
    out, lse = cuflash.forward(Q, K, V, return_lse=True, **call)
    k, v = (x[SEQUENCE, :, HEAD] for x in (K, V))
    some, some_lse = cuflash.forward(part(Q), k, v, return_lse=True, **of_part(call, slice(0, ROWS)))
    np.testing.assert_allclose(some, part(out), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(some_lse, lse[SEQUENCE, HEAD, QUERY], rtol=1e-12)
    alone = {name: x for name, x in of_part(call, slice(0, ROWS)).items() if not name.startswith("dropout")}
    np.testing.assert_allclose(cuflash.lse(part(Q), k, **alone), some_lse, rtol=1e-12)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_gradients_of_parts_of_the_keys_add_up(call: dict[str, Any]) -> None:
    captured = (SLOPES, TABLE) if call.get("score_mod") is tilted else ()
    k, v = (x[SEQUENCE, :, HEAD] for x in (K, V))
    whole = of_part(call, slice(0, ROWS))
    out, lse = cuflash.forward(part(Q), k, v, return_lse=True, **whole)
    arrays = part(DOUT), part(Q)
    dq, dk, dv, grads = cuflash.backward(*arrays, k, v, out, lse, captured_grads=captured, **whole)
    sums = [np.zeros_like(x) for x in (dq, *grads)]
    for begin, end in pairwise(KEY_BOUNDS):
        keys = slice(begin, end)
        some_q, some_k, some_v, more = cuflash.backward(
            *arrays, k[:, keys], v[:, keys], out, lse, captured_grads=captured, **of_part(call, keys)
        )
        np.testing.assert_allclose(some_k, dk[:, keys], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(some_v, dv[:, keys], rtol=1e-9, atol=1e-9)
        sums = [total + x for total, x in zip(sums, (some_q, *more), strict=True)]
    for total, correct in zip(sums, (dq, *grads), strict=True):
        np.testing.assert_allclose(total, correct, rtol=1e-9, atol=1e-9)


def test_the_last_sequences_of_a_packed_call_are_a_call() -> None:
    bounds = np.array([0, 30, 55, 100], np.int32)
    q, k, v = (x[0] for x in (Q, K, V))
    call: dict[str, Any] = CALLS["dropout"] | {"mask_mod": lambda b, h, i, j: (i + j + b) % 4 != 0}
    out = cuflash.forward(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, **call)
    later = bounds[1:] - bounds[1]
    rest = (x[bounds[1] :] for x in (q, k, v))
    some = cuflash.forward(*rest, cu_seqlens_q=later, cu_seqlens_k=later, index_offsets=(0, 0, 0, 1), **call)
    np.testing.assert_allclose(some, out[bounds[1] :], rtol=1e-12, atol=1e-12)


def test_calls_without_functions_and_dropout_are_unchanged() -> None:
    for call in ({}, {"bias": BIAS}, {"causal": True, "sinks": np.zeros(HEADS)}):
        expected = cuflash.forward(Q, K, V, **call)  # type: ignore[arg-type]
        np.testing.assert_array_equal(cuflash.forward(Q, K, V, index_offsets=(3, 4), **call), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_all_offsets_share_kernels_and_zeros_are_none(arch: str, op: str) -> None:
    shape = 2, 300, 4, 64

    def variants(**call: Any) -> list[Any]:
        plan = cuflash.plan(shape, shape, shape, op=op, dtype="bfloat16", device=arch, **call)  # type: ignore[call-overload]
        return [launch.variant for launch in plan.launches]

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score + 0.01 * (q_idx - k_idx) + h

    for call in ({"dropout_p": 0.5}, {"score_mod": score_mod}, {"score_mod": score_mod, "dropout_p": 0.5}):
        some = variants(index_offsets=(5, 64), **call)
        assert some == variants(index_offsets=(0, 0, 9, 1), **call) != variants(**call)
        assert variants(index_offsets=(0, 0, 0, 0), **call) == variants(**call)
        assert (some == variants(index_offsets=(5, 63), **call)) == ("dropout_p" not in call)
