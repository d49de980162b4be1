"""Checks of results: sampled rows against float64, and whole results against one that has been checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...testing.arrays import Inputs, NumpyArrays
from ...testing.cases import Case
from .mods import ModCase

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

OUTPUTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}
# The largest |error| / |row| of a row in the Euclidean norm. Rounding p and out to a 16-bit dtype of unit roundoff u
# costs about 0.7 u, in gradients up to 1.2 u; 4 u also allows other orders of summation. A float32 result computed in
# plain TF32 (3e-4) does not pass.
MAX_ERROR = {"bfloat16": 4 * 2.0**-8, "float16": 4 * 2.0**-11, "float32": 1e-4, "float64": 1e-12}
LEAST_NORM = 0.1  # fraction of the norm of the largest sampled row
CHUNK = 1 << 23  # float64 scores of a head in memory at once: 64 MiB


class Sample(NamedTuple):
    """Rows of one head of an output, and their exact values."""

    output: str
    batch: int
    head: int
    rows: Indices
    exact: Array  # (len(rows), head_dim or head_dim_v)


def outputs(op: str, result: Any) -> dict[str, Any]:
    """Returns the outputs of an op by name."""
    return dict(zip(OUTPUTS[op], result if isinstance(result, tuple) else (result,), strict=True))


def sample(arrays: NumpyArrays, op: str, case: Case, inputs: Inputs, seed: int = 0) -> list[Sample]:
    """Computes exact values of a few rows of two heads in every output; heads of k and v stand for their groups."""
    rng = np.random.default_rng(seed)
    exact, group = Exact(arrays, case), case.heads_q // case.heads_kv
    samples = []
    q, every_k, every_v, *dout = inputs
    for batch, head in {(0, 0), (case.batch - 1, case.heads_kv - 1)}:
        k, v = (arrays.head(x, batch, head) for x in (every_k, every_v))
        first = head * group
        if op == "forward":
            rows, values = _out(exact, rng, first, arrays.head(q, batch, first), k, v)
            samples.append(Sample("out", batch, first, rows, arrays.host(values)))
            continue
        heads = range(first, first + group)
        of_group = [(arrays.head(q, batch, n), arrays.head(dout[0], batch, n)) for n in heads]
        rows, values = _dq(exact, rng, first, *of_group[0], k, v)
        samples.append(Sample("dq", batch, first, rows, arrays.host(values)))
        keys, dk, dv = _dkdv(exact, rng, first, of_group, k, v)
        samples += [Sample(name, batch, head, keys, arrays.host(x)) for name, x in (("dk", dk), ("dv", dv))]
    return samples


def error(arrays: NumpyArrays, outputs: dict[str, Any], samples: list[Sample]) -> tuple[str, float]:
    """Returns the output with the largest relative error of a sampled row, and the error; NaN counts as largest."""
    largest = dict.fromkeys(outputs, 0.0)
    for output, batch, head, rows, exact in samples:
        difference = np.linalg.norm(arrays.host(arrays.head(outputs[output], batch, head))[rows] - exact, axis=1)
        norms = np.linalg.norm(exact, axis=1)
        # Gradients of rows with few visible keys may cancel to nearly 0, beside which any rounding looks large.
        norms = np.maximum(norms, LEAST_NORM * norms.max())
        largest[output] = float(np.maximum(largest[output], (difference / norms).max()))
    return _worst(largest)


def distance(arrays: NumpyArrays, outputs: dict[str, Any], reference: dict[str, Any]) -> tuple[str, float]:
    """Returns the output with the largest |output - reference| / |reference| (Euclidean norm), and this distance."""
    return _worst({output: arrays.distance(outputs[output], reference[output]) for output in outputs})


def _worst(errors: dict[str, float]) -> tuple[str, float]:
    output = max(errors, key=lambda output: np.nan_to_num(errors[output], nan=np.inf))
    return output, errors[output]


class Exact:
    """A problem in float64, with its score_mod or mask_mod if any, computed by the library of `arrays`."""

    def __init__(self, arrays: NumpyArrays, case: Case) -> None:
        def put(x: NDArray[Any]) -> Any:
            return arrays.constant(x.astype(np.float64) if x.dtype.kind == "f" else x)

        self.put, self.xp, self.problem = arrays.constant, arrays.xp, case.problem()
        self.functions = case.functions(put) if isinstance(case, ModCase) else None

    def weights(self, head: int, q: Any, k: Any, rows: Indices) -> tuple[Any, Any, slice]:
        """Returns softmax weights of ascending rows, slopes of their capped scores (1 without a cap), and a slice.

        The slice of keys holds all keys that the rows see.
        """
        xp, problem = self.xp, self.problem
        part = slice(*problem.mask.key_range(int(rows[0]), int(rows[-1]) + 1))
        i, j = self.put(rows), self.put(np.arange(part.start, part.stop))
        s, slope = q[i] * problem.softmax_scale @ k[part].T, 1.0
        if cap := problem.options.softcap:
            s = xp.tanh(s / cap)
            slope = 1.0 - s * s
            s = s * cap
        visible = problem.mask.visible(i, j)
        if self.functions is not None:
            if self.functions.score_mod is not None:
                s = self.functions.score_mod(s, 0, head, i[:, None], j)
            visible = visible & self.functions.mask_mod(0, head, i[:, None], j)
        s = xp.where(visible, s, -xp.inf)
        p = xp.exp(s - xp.amax(s, axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        return p, slope, part


def _some(rng: np.random.Generator, begin: int, end: int, always: int) -> Indices:
    """Draws a few numbers from a range; returns them with `always`, sorted."""
    return np.unique(np.append(rng.integers(begin, end, 6), always))


def _out(exact: Exact, rng: np.random.Generator, head: int, q: Any, k: Any, v: Any) -> tuple[Indices, Any]:
    end = exact.problem.seqlen_q
    rows = _some(rng, 0, end, end - 1)
    p, _, part = exact.weights(head, q, k, rows)
    return rows, p @ v[part]


def _dq(exact: Exact, rng: np.random.Generator, head: int, q: Any, dout: Any, k: Any, v: Any) -> tuple[Indices, Any]:
    end = exact.problem.seqlen_q
    rows = _some(rng, end // 2, end, end - 1)  # late rows, as early ones see few keys under a causal mask
    p, slope, part = exact.weights(head, q, k, rows)
    dp = dout[exact.put(rows)] @ v[part].T
    return rows, p * (dp - (p * dp).sum(axis=1, keepdims=True)) * slope @ k[part] * exact.problem.softmax_scale


def _dkdv(
    exact: Exact, rng: np.random.Generator, first: int, of_group: list[tuple[Any, Any]], k: Any, v: Any
) -> tuple[Indices, Any, Any]:
    """Computes dk and dv of early keys, which many queries see. Each needs a column of weights, and so all rows."""
    problem = exact.problem
    seqlen_q, seqlen_k = problem.seqlen_q, problem.seqlen_k
    keys = _some(rng, 0, -(-seqlen_k // 2), 0)
    placed = exact.put(keys)
    dk, dv = exact.xp.zeros_like(k[placed]), exact.xp.zeros_like(v[placed])
    step = max(1, CHUNK // seqlen_k)
    for head, (q, dout) in enumerate(of_group, first):
        for begin in range(0, seqlen_q, step):
            chunk = slice(begin, min(begin + step, seqlen_q))
            p, slope, part = exact.weights(head, q, k, np.arange(chunk.start, chunk.stop))
            delta = (dout[chunk] * (p @ v[part])).sum(axis=1, keepdims=True)
            inside = (keys >= part.start) & (keys < part.stop)
            if not inside.any():
                continue
            here, columns = exact.put(np.flatnonzero(inside)), exact.put(keys[inside] - part.start)
            p, slope = p[:, columns], slope if isinstance(slope, float) else slope[:, columns]
            dv[here] += p.T @ dout[chunk]
            ds = p * (dout[chunk] @ v[placed[here]].T - delta) * slope
            dk[here] += ds.T @ q[chunk] * problem.softmax_scale
    return keys, dk, dv
