"""Gradients on a GPU against slopes of the GPU's forward, in float32, and their bits over a thousand repeats.

A slope is taken along a random direction of all elements of an array, by differences of the fourth order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.testing.layouts import host

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan")]
BATCH, ROWS, KEYS, HEADS, HEADS_KV, DIM = 2, 33, 40, 4, 2, 32
STEP, TOLERANCE = 2.0**-5, 2e-3
REPEATS = 1000


def normal(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


# By name: arrays with gradients, and a function that returns the keywords of a call with them.
CALLS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "captured": (
        (normal(HEADS), normal(HEADS, 9)),
        lambda slopes, table: {
            "score_mod": lambda score, b, h, q, k: score * (1.0 + slopes[h] / 8) + table[h, (q - k) % 9],
            "causal": True,
        },
    ),
    "a number": ((normal(),), lambda x: {"score_mod": lambda score, b, h, q, k: x * score}),
    "bias": ((normal(BATCH, HEADS, ROWS, KEYS),), lambda bias: {"bias": bias}),
    "bias of heads": ((normal(1, HEADS, 1, KEYS),), lambda bias: {"bias": bias, "softcap": 3.0}),
    "sinks": ((normal(HEADS),), lambda sinks: {"sinks": sinks, "window_size": (9, 9)}),
    "all": (
        (normal(HEADS), normal(1, 1, ROWS, KEYS), normal(HEADS) + 1),
        lambda slopes, bias, sinks: {
            "score_mod": lambda score, b, h, q, k: score - slopes[h] * abs(q - k) / 16,
            "mask_mod": lambda b, h, q, k: (q + k) % 3 > 0,
            "bias": bias,
            "sinks": sinks,
            "dropout_p": 0.2,
            "dropout_seed": 5,
        },
    ),
}


def operands(put: Any) -> tuple[Any, ...]:
    """Returns q, k, v, dout, and the weight of each lse in the loss."""
    shapes = [(BATCH, n, h, DIM) for n, h in ((ROWS, HEADS), (KEYS, HEADS_KV), (KEYS, HEADS_KV), (ROWS, HEADS))]
    random = np.random.default_rng(3)
    arrays = [random.standard_normal(shape).astype(np.float32) for shape in (*shapes, (BATCH, HEADS, ROWS))]
    return tuple(map(put, arrays))


def backward_of(cupy: Any, call: dict[str, Any], **more: Any) -> Any:
    """Returns a call of backward, after running its forward."""
    q, k, v, dout, dlse = operands(cupy.asarray)
    out, lse = cuflash.forward(q, k, v, return_lse=True, **call)
    return partial(cuflash.backward, dout, q, k, v, out, lse, dlse=dlse, **more, **call)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_slopes_of_the_forward(cupy: Any, name: str, deterministic: bool) -> None:
    arrays, make = CALLS[name]
    q, k, v, dout, dlse = operands(cupy.asarray)
    of_out, of_lse = (host(x).astype(np.float64) for x in (dout, dlse))

    def loss(*inputs: Any) -> float:
        out, lse = cuflash.forward(q, k, v, return_lse=True, **make(*map(cupy.asarray, inputs)))
        lse = host(lse).astype(np.float64)
        return float((of_out * host(out)).sum() + (of_lse * np.where(np.isneginf(lse), 0.0, lse)).sum())

    there = tuple(map(cupy.asarray, arrays))
    *_, gradients = backward_of(cupy, make(*there), captured_grads=there, deterministic=deterministic)()
    for index, (x, gradient) in enumerate(zip(arrays, gradients, strict=True)):
        direction = np.random.default_rng(index).standard_normal(x.shape).astype(np.float32)

        def along(steps: int, index: int = index, x: Any = x, direction: Any = direction) -> float:
            shifted = (x + np.float32(steps * STEP) * direction).astype(np.float32)
            return loss(*arrays[:index], shifted, *arrays[index + 1 :])

        slope = (8 * (along(1) - along(-1)) - (along(2) - along(-2))) / (12 * STEP)
        gradient = host(gradient).astype(np.float64)
        size = np.sqrt((gradient**2).sum() * (direction.astype(np.float64) ** 2).sum())
        assert abs((gradient * direction).sum() - slope) <= TOLERANCE * size


@pytest.mark.parametrize("name", ["captured", "all"])
def test_a_thousand_deterministic_repeats_are_the_same_bits(cupy: Any, name: str) -> None:
    arrays, make = CALLS[name]
    there = tuple(map(cupy.asarray, arrays))
    backward = backward_of(cupy, make(*there), captured_grads=there, deterministic=True)

    def bits() -> list[Any]:
        *gradients, captured = backward()
        return [x.view("u4") for x in (*gradients, *captured)]

    first, differ = bits(), cupy.zeros((), bool)
    for _ in range(REPEATS):
        for one, other in zip(bits(), first, strict=True):
            differ |= (one != other).any()
    assert not bool(differ)
