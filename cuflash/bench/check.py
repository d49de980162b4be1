"""Checks results: sampled rows against float64, and the whole result against one that is already known to be right."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..problem.problem import Problem
from .arrays import Inputs, NumpyArrays
from .cases import Case

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

OUTPUTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}
# The largest |error| / |row| of a row in the Euclidean norm. Rounding p and out to a 16-bit dtype of unit roundoff u
# costs about 0.7 u, in gradients up to 1.2 u; 4 u also allows other orders of summation. A float32 result that was
# computed in plain TF32 (3e-4) does not pass.
MAX_ERROR = {"bfloat16": 4 * 2.0**-8, "float16": 4 * 2.0**-11, "float32": 1e-4, "float64": 1e-12}
CHUNK = 1 << 23  # float64 scores of a head in memory at once: 64 MiB


class Sample(NamedTuple):
    """Rows of one head of an output, and their exact values."""

    output: str
    batch: int
    head: int
    rows: Indices
    exact: Array  # (len(rows), head_dim or head_dim_v)


def outputs(op: str, result: Any) -> dict[str, Any]:
    """The outputs of an op by name."""
    return dict(zip(OUTPUTS[op], result if isinstance(result, tuple) else (result,), strict=True))


def sample(arrays: NumpyArrays, op: str, case: Case, inputs: Inputs, seed: int = 0) -> list[Sample]:
    """Exact values of a few rows of two heads in every output; heads_kv of the case must equal heads_q."""
    rng = np.random.default_rng(seed)
    samples = []
    for batch, head in {(0, 0), (case.batch - 1, case.heads_q - 1)}:
        of_head = [arrays.head(x, batch, head) for x in inputs]
        exact = (_out if op == "forward" else _gradients)(case.problem(), rng, *of_head)
        samples += [Sample(name, batch, head, rows, values) for name, (rows, values) in exact.items()]
    return samples


def error(arrays: NumpyArrays, found: dict[str, Any], samples: list[Sample]) -> tuple[str, float]:
    """The output with the largest relative error of a sampled row, and that error; NaN counts as the largest."""
    largest = dict.fromkeys(found, 0.0)
    for output, batch, head, rows, exact in samples:
        difference = np.linalg.norm(arrays.head(found[output], batch, head)[rows] - exact, axis=1)
        largest[output] = float(np.maximum(largest[output], (difference / np.linalg.norm(exact, axis=1)).max()))
    return _worst(largest)


def distance(arrays: NumpyArrays, found: dict[str, Any], reference: dict[str, Any]) -> tuple[str, float]:
    """The output with the largest |found - reference| / |reference| in the Euclidean norm, and that distance."""
    return _worst({output: arrays.distance(found[output], reference[output]) for output in found})


def _worst(errors: dict[str, float]) -> tuple[str, float]:
    output = max(errors, key=lambda output: np.nan_to_num(errors[output], nan=np.inf))
    return output, errors[output]


def _out(problem: Problem, rng: np.random.Generator, q: Array, k: Array, v: Array) -> dict[str, tuple[Indices, Array]]:
    rows = np.unique(np.append(rng.integers(0, problem.seqlen_q, 6), problem.seqlen_q - 1))
    return {"out": (rows, _weights(problem, q, k, rows) @ v)}


def _gradients(
    problem: Problem, rng: np.random.Generator, q: Array, k: Array, v: Array, dout: Array
) -> dict[str, tuple[Indices, Array]]:
    """Sampled rows of dq, dk and dv. dq needs the query's row of weights; dk and dv need a column, and so all rows.

    why late queries and early keys: under a causal mask the others see few keys or queries, and their gradients may
    cancel to nearly nothing, so that any rounding looks large beside them.
    """
    seqlen_q, seqlen_k, scale = problem.seqlen_q, problem.seqlen_k, problem.softmax_scale
    rows = np.unique(np.append(rng.integers(seqlen_q // 2, seqlen_q, 6), seqlen_q - 1))
    keys = np.unique(np.append(rng.integers(0, -(-seqlen_k // 2), 6), 0))
    p, dp = _weights(problem, q, k, rows), dout[rows] @ v.T
    dq = p * (dp - (p * dp).sum(axis=1, keepdims=True)) @ k * scale
    dk, dv = np.zeros((len(keys), problem.head_dim)), np.zeros((len(keys), problem.head_dim_v))
    step = max(1, CHUNK // seqlen_k)
    for begin in range(0, seqlen_q, step):
        chunk = np.arange(begin, min(begin + step, seqlen_q))
        p = _weights(problem, q, k, chunk)
        delta = (dout[chunk] * (p @ v)).sum(axis=1, keepdims=True)
        p = p[:, keys]
        dv += p.T @ dout[chunk]
        dk += (p * (dout[chunk] @ v[keys].T - delta)).T @ q[chunk] * scale
    return {"dq": (rows, dq), "dk": (keys, dk), "dv": (keys, dv)}


def _weights(problem: Problem, q: Array, k: Array, rows: Indices) -> Array:
    """Softmax weights of these rows, which ascend; keys that none of them can see get 0 and are not computed."""
    p = np.zeros((len(rows), problem.seqlen_k))
    begin, end = problem.mask.key_range(int(rows[0]), int(rows[-1]) + 1)
    s = p[:, begin:end]
    np.matmul(q[rows] * problem.softmax_scale, k[begin:end].T, out=s)
    s[~problem.mask.visible(rows, np.arange(begin, end))] = -np.inf
    s -= s.max(axis=1, keepdims=True)
    np.exp(s, out=s)
    s /= s.sum(axis=1, keepdims=True)
    return p
