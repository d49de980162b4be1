"""Calls with mods, their results straight from the contract, and finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from plans import problem

from cuflash.problem.dropout import SHARES, share_kept
from cuflash.problem.problem import Problem
from cuflash.reference import dropout

BATCH, ROWS, KEYS, HEADS, HEADS_KV, DIM = 2, 21, 34, 4, 2, 8
RANDOM = np.random.default_rng(5)
Arrays = dict[str, Any]


def normal(*shape: int) -> Any:
    return RANDOM.standard_normal(shape)


SLOPES = np.array([0.5, 0.25, 0.125, 0.7])
TABLE = normal(HEADS, 9)
FACTOR = np.array(1.25)  # without axes
BIASES = {
    "whole": normal(BATCH, HEADS, ROWS, KEYS),
    "of heads": normal(1, HEADS, 1, KEYS),
    "of rows": normal(BATCH, 1, ROWS, 1),
    "one": normal(1, 1, 1, 1),
}


def tilted(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return score * (1.0 + 0.125 * b) - SLOPES[h] * abs(q_idx - k_idx)


def bounded(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return 2.0 * np.tanh(score / 2.0) + TABLE[h, (q_idx - k_idx) % 9]


def without_score(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return TABLE[h, k_idx % 9] * 1.0


def scaled(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return FACTOR * score


def striped(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return ((q_idx + k_idx + h) % 3 > 0) & (q_idx > 2 + b)


# By name, the mods and options of a call.
CALLS: dict[str, Arrays] = {
    "nothing": {},
    "score_mod": {"score_mod": tilted},
    "table": {"score_mod": bounded, "causal": True},
    "captured number": {"score_mod": scaled},
    "score_mod that asks for no score": {"score_mod": without_score},
    "cap first": {"score_mod": tilted, "softcap": 1.5},
    "mask_mod": {"mask_mod": striped},
    "mask_mod and window": {"mask_mod": striped, "window_size": (9, 4)},
    "sinks": {"sinks": np.array([0.3, -np.inf, 2.0, -1.0]), "mask_mod": striped},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 2**40 + 7},
    **{f"bias {name}": {"bias": bias} for name, bias in BIASES.items()},
    "bool bias": {"bias": normal(BATCH, 1, ROWS, KEYS) > -0.5},
    "all": {
        "score_mod": bounded, "mask_mod": striped, "bias": BIASES["of heads"], "sinks": SLOPES, "softcap": 3.0,
        "dropout_p": 0.2, "dropout_seed": 3, "window_size": (20, 20),
    },
}  # fmt: skip
# Arguments of mods; the others are options of a plain call.
MOD_ARGUMENTS = ("score_mod", "mask_mod", "bias", "sinks", "dropout_p", "dropout_seed")


def problem_of(call: Arrays, dtype: str = "float64") -> Problem:
    options = {name: value for name, value in call.items() if name not in MOD_ARGUMENTS}
    return problem(DIM, DIM, dims=(BATCH, ROWS, KEYS, HEADS, HEADS_KV), dtype=dtype, **options)


def arrays(dtype: str = "float64") -> tuple[Any, ...]:
    random = np.random.default_rng(1)
    shapes = (BATCH, ROWS, HEADS, DIM), (BATCH, KEYS, HEADS_KV, DIM), (BATCH, KEYS, HEADS_KV, DIM)
    return tuple(random.standard_normal(shape).astype(dtype) for shape in shapes)


def whole(call: Arrays, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Returns `(out, lse)` with whole matrices, in float64, straight from the contract."""
    plain = problem_of(call)
    k, v = (np.repeat(x, HEADS // HEADS_KV, axis=2) for x in (k, v))
    s = np.einsum("bihd,bjhd->bhij", q, k) * plain.softmax_scale
    if cap := call.get("softcap"):
        s = cap * np.tanh(s / cap)
    b, h, i, j = np.ogrid[:BATCH, :HEADS, :ROWS, :KEYS]
    if "score_mod" in call:
        s = np.broadcast_to(call["score_mod"](s, b, h, i, j), s.shape)
    bias = call.get("bias", 0.0)
    s = np.where(bias, s, -np.inf) if np.asarray(bias).dtype.kind == "b" else s + bias
    visible = plain.mask.visible(np.arange(ROWS), np.arange(KEYS))
    if "mask_mod" in call:
        visible = visible & call["mask_mod"](b, h, i, j)
    s = np.where(visible, s, -np.inf)
    sinks = np.broadcast_to(call.get("sinks", np.full(HEADS, -np.inf))[:, None, None], (BATCH, HEADS, ROWS, 1))
    with np.errstate(all="ignore"):
        most = np.maximum(s.max(axis=3, keepdims=True), sinks)
        lse = most + np.log(np.exp(s - most).sum(axis=3, keepdims=True) + np.exp(sinks - most))
        p = np.where(np.isneginf(most), 0, np.exp(s - lse))
    if drop := call.get("dropout_p"):
        share = share_kept(drop) / SHARES
        p = p * dropout.is_kept(call["dropout_seed"], drop, b, h, i, j) / share
    return np.einsum("bhij,bjhd->bihd", p, v), np.where(np.isneginf(most), -np.inf, lse)[..., 0]


def loss_of(call: Arrays, dout: Any, dlse: Any) -> Callable[..., float]:
    def loss(q: Any, k: Any, v: Any) -> float:
        out, lse = whole(call, q, k, v)
        return float((dout * out).sum() + (dlse * np.where(np.isneginf(lse), 0, lse)).sum())

    return loss


def slope(loss: Callable[[], float], x: Any, index: tuple[int, ...]) -> float:
    """Returns the finite difference of a loss by one element of x, which the loss reads."""
    before, step = x[index], 1e-5
    ends = []
    for x[index] in (before + step, before - step):
        ends.append(loss())
    x[index] = before
    return (ends[0] - ends[1]) / (2 * step)
