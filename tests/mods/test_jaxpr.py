"""Jaxprs: the graph of a jaxpr has the values of the traced function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from traces import POINTS, values_of

jax = pytest.importorskip("jax")
from jax import numpy as jnp

from cuflash.errors import ProblemError
from cuflash.mods.analysis.intervals import band
from cuflash.mods.tracing.jaxpr import graph_of_jaxpr
from cuflash.mods.tracing.trace import trace

SLOPES = jnp.asarray([0.5, 0.25, 0.125, 0.0625])
LIMITS = jnp.asarray([[3, 9, 20], [20, 5, 1]], jnp.int32)


def trace_jaxpr(function: Callable[..., Any], kind: str) -> Any:
    scores = [jnp.float32(0)] if kind == "score_mod" else []
    return graph_of_jaxpr(jax.make_jaxpr(function)(*scores, *[jnp.int32(0)] * 4), kind)


def check(function: Callable[..., Any], kind: str) -> Any:
    graph = trace_jaxpr(function, kind)
    indices = [jnp.asarray(POINTS[name], jnp.int32) for name in ("b", "h", "q_idx", "k_idx")]
    scores = [jnp.asarray(POINTS["score"], jnp.float32)] if kind == "score_mod" else []
    expected = np.asarray(jax.vmap(function)(*scores, *indices))
    tolerance = 0 if kind == "mask_mod" else 2e-5
    np.testing.assert_allclose(values_of(graph), expected, rtol=tolerance, atol=tolerance)
    return graph


@jax.jit
def remainder(x: Any, y: Any) -> Any:
    return x - y


MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 8),
    "chunks": lambda b, h, q, k: q // 8 == k // 8,
    "remainder": lambda b, h, q, k: (q - k) % 3 == 0,
    "limits": lambda b, h, q, k: k < LIMITS[b % 2, h % 3],
    "a row and then an element": lambda b, h, q, k: k < LIMITS[b % 2][h % 3],
    "a negative index": lambda b, h, q, k: k < LIMITS[-1, h % 3 - 3],
    "logic": lambda b, h, q, k: jnp.logical_or(jnp.logical_not(q < k), jnp.logical_xor(h == 0, b == 1)),
    "bits": lambda b, h, q, k: ((q ^ k) & 5) | (q >> 1) << 2 > ~k,
    "select": lambda b, h, q, k: jnp.where(h < 2, q > k, q < k),
    "cond": lambda b, h, q, k: jax.lax.cond(h < 2, lambda: q > k, lambda: q < k + b),
    "switch": lambda b, h, q, k: jax.lax.switch(h, [lambda x: x > k, lambda x: x < k, lambda x: x == k], q),
    "jit": jax.jit(lambda b, h, q, k: jax.jit(lambda x: x + 1)(q) > k),
    "a name of JAX": lambda b, h, q, k: remainder(q, 7) > k,
    "power": lambda b, h, q, k: (q % 5) ** 3 > k,
    "clip": lambda b, h, q, k: jnp.clip(q, 3, 20) > k,
    "max and min": lambda b, h, q, k: jnp.maximum(q, h) > jnp.minimum(k, 30),
}
SCORES: dict[str, Callable[..., Any]] = {
    "alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "softcap": lambda s, b, h, q, k: 20 * jnp.tanh(s / 20),
    "curves": lambda s, b, h, q, k: jax.nn.gelu(s) + jax.nn.silu(s) + jax.nn.sigmoid(s) + jax.nn.relu(s),
    "functions": lambda s, b, h, q, k: jnp.exp(-jnp.abs(s)) + jnp.log1p(s * s) + jnp.sin(s) * jnp.cos(q) + jnp.sign(s),
    "powers": lambda s, b, h, q, k: s**3 + jnp.square(s) + (jnp.abs(s) + 1) ** -2 + jnp.sqrt(s * s + 1) + 2.0**s,
    "rounding": lambda s, b, h, q, k: jnp.floor(s) + jnp.ceil(s) + jnp.round(s) + jnp.trunc(s),
    "casts": lambda s, b, h, q, k: s.astype(jnp.int32) + (q > k).astype(jnp.float32) + q / 3,
    "bfloat16": lambda s, b, h, q, k: s + SLOPES.astype(jnp.bfloat16)[h].astype(jnp.float32),
    "stop_gradient": lambda s, b, h, q, k: jax.lax.stop_gradient(s) + jnp.where(q < k, s, 0.0) + jnp.isfinite(s),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    check(MASKS[name], "mask_mod")


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    check(SCORES[name], "score_mod")


def test_arrays_are_constants_of_the_jaxpr() -> None:
    graph = trace_jaxpr(SCORES["alibi"], "score_mod")
    assert [(each.array is SLOPES, each.dtype, each.shape) for each in graph.arrays] == [(True, "float32", (4,))]
    twice = trace_jaxpr(lambda s, b, h, q, k: s + SLOPES[h] - SLOPES[q % 4], "score_mod")
    assert len(twice.arrays) == 1


@pytest.mark.parametrize("name", ["causal", "window"])
def test_bands_are_recognised(name: str) -> None:
    assert band(trace_jaxpr(MASKS[name], "mask_mod").root) is not None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda b, h, q, k: jax.lax.while_loop(lambda x: x > 3, lambda x: x - 1, q) < k, "jax.while of a traced value"),
        (lambda b, h, q, k: jnp.arctan2(q, k) < 1, "jax.atan2 of a traced value is not known"),
        (lambda b, h, q, k: jax.lax.dynamic_slice(LIMITS, (b, h), (1, 2)).sum() < q, "a slice of 2 elements of 3"),
        (lambda b, h, q, k: jax.lax.round(q / 3) < k, "takes halves away from zero"),
        (lambda b, h, q, k: jnp.take(SLOPES, q) < k, r"jax.numpy.take and .at\[\].get\(\) fill what is outside"),
        (lambda b, h, q, k: (q < k, True), "returned 2 values"),
        (lambda b, h, q, k: q - k, "returned a value of type int32"),
    ],
)
def test_unsupported_functions_are_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        trace_jaxpr(function, "mask_mod")


@pytest.mark.parametrize("name", ["uint8", "int32", "float32", "bfloat16"])
def test_dtypes_choose_a_branch_as_in_plain_jax(name: str) -> None:
    table = jnp.zeros(8, name)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        is_listed = table.dtype in (jnp.uint8, jnp.bfloat16) or jnp.int32 == table.dtype
        return j <= i if is_listed else j >= i

    trace(lambda b, h, i, j: jnp.int32(j) < np.int32(4) - i, "mask_mod")  # two classes
    expected = (lambda b, h, i, j: j >= i) if name == "float32" else (lambda b, h, i, j: j <= i)
    assert trace(mask_mod, "mask_mod").root is trace(expected, "mask_mod").root
