"""Whether an output is attention at all: sampled rows against float64, and the whole output against ours."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arrays import NumpyArrays
from .cases import Case

# Error of a row over the row, Euclidean norm. Rounding p and out to a 16-bit dtype of unit roundoff u costs about
# 0.7 u; 4 u leaves room for other orders of summation, yet a float32 result by plain TF32 (3e-4) would not pass.
MAX_ERROR = {"bfloat16": 4 * 2.0**-8, "float16": 4 * 2.0**-11, "float32": 1e-4, "float64": 1e-12}


class Sample(NamedTuple):
    """Rows of one head and their exact outputs."""

    batch: int
    head: int
    rows: NDArray[np.int64]
    exact: NDArray[np.float64]  # (len(rows), head_dim_v)


def sample(arrays: NumpyArrays, case: Case, q: Any, k: Any, v: Any, seed: int = 0) -> list[Sample]:
    """A few rows of two heads, the last row of each among them, computed in float64."""
    rng = np.random.default_rng(seed)
    problem, group = case.problem(), case.heads_q // case.heads_kv
    samples = []
    for batch, head in {(0, 0), (case.batch - 1, case.heads_q - 1)}:
        rows = np.unique(np.append(rng.integers(0, case.seqlen_q, 6), case.seqlen_q - 1))
        keys, values = (arrays.head(x, batch, head // group) for x in (k, v))
        s = arrays.head(q, batch, head)[rows] @ keys.T * problem.softmax_scale
        s = np.where(problem.mask.visible(rows, np.arange(case.seqlen_k)), s, -np.inf)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        samples.append(Sample(batch, head, rows, p @ values / p.sum(axis=1, keepdims=True)))
    return samples


def error(arrays: NumpyArrays, out: Any, samples: list[Sample]) -> float:
    """The largest relative error of a sampled row; NaN where an output has one."""
    errors = []
    for batch, head, rows, exact in samples:
        difference = arrays.head(out, batch, head)[rows] - exact
        errors.append(np.linalg.norm(difference, axis=1) / np.linalg.norm(exact, axis=1))
    return float(np.concatenate(errors).max())
