"""Oracle of every result: attention in float64, the same maths done naively, and the tolerance rule.

It is written straight from the contract, head by head with the whole score matrix in memory, and shares no code with
`cuflash.reference`. A problem is a `Problem` or a `Case`; arrays are 4-D (batch, seqlen, heads, dim). Returned `out` is
(b, sq, hq, dv), `lse` (b, hq, sq); gradients have the shapes of q, k and v.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..problem.problem import Problem
from .cases import Case, numpy_dtype

Array = np.ndarray[Any, Any]
# A float32 sum in another order differs by a few units, and for float64 the oracle is no more precise than the result.
ULPS = {"float16": 1, "bfloat16": 1, "float32": 4, "float64": 16}
FEW = 32  # rows or keys: with fewer, the naive computation may happen to have no errors


class MismatchError(AssertionError):
    """A result that violates the contract."""


def demand(holds: object, what: str) -> None:
    """Raises MismatchError with the text `what` unless `holds`. Unlike assert, it also works under `python -O`."""
    if not holds:
        raise MismatchError(what)


def attention64(
    problem: Problem | Case, q: Array, k: Array, v: Array, there: Array | None = None
) -> tuple[Array, Array]:
    """Returns `(out, lse)` in float64 of inputs of any precision. there: True for each existing key."""
    return _forward(_problem(problem), q, k, v, np.dtype(np.float64), None, there)


def naive(problem: Problem | Case, q: Array, k: Array, v: Array, there: Array | None = None) -> tuple[Array, Array]:
    """Returns `(out, lse)`, computed naively in the problem's precision: `out` in its out_dtype, `lse` in float32.

    16-bit: products in float32, scores rounded to 16 bits, softmax in float32, p rounded to 16 bits. `lse` uses the
    scores before rounding: as a float32 result, it is checked to float32 precision.
    """
    problem = _problem(problem)
    work, rounded = precision(problem)
    out, lse = _forward(problem, q, k, v, work, rounded, there)
    return out.astype(numpy_dtype(problem.out_dtype)), lse


def gradients64(
    problem: Problem | Case, dout: Array, q: Array, k: Array, v: Array, dlse: Array | None = None
) -> tuple[Array, Array, Array]:
    """Returns `(dq, dk, dv)` in float64 of `sum(dout * out) + sum(dlse * lse)`; dlse is (b, hq, sq)."""
    return _backward(_problem(problem), dout, q, k, v, dlse, np.dtype(np.float64), rounded=None)


def naive_gradients(
    problem: Problem | Case, dout: Array, q: Array, k: Array, v: Array, dlse: Array | None = None
) -> tuple[Array, Array, Array]:
    """Returns `(dq, dk, dv)`, computed naively in the problem's precision: 16-bit rounds s, p, out, dp and ds.

    float32: scores have errors as in kernels, as their weights scale all summands of the gradients.
    """
    problem = _problem(problem)
    work, rounded = precision(problem)
    dtype = numpy_dtype(problem.dtype)
    dq, dk, dv = _backward(problem, dout, q, k, v, dlse, work, rounded)
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype)


def assert_close(name: str, got: Any, exact: Array, naive: Array, *, ulps: float = 1.0, unit: float = 0.0) -> None:
    """Checks the tolerance rule: `max|got - exact| <= 2 max|naive - exact| + ulps * eps * max|exact|`.

    Positions of NaN, +inf and -inf must be equal in `got` and `exact`; then finite elements are compared. eps belongs
    to `got`'s dtype. The floor is `ulps` units in the last place of the largest number, or of `unit` if it is larger.
    A result may err by it even if the naive one happens to be exact.
    """
    got = np.asarray(got)
    demand(got.shape == exact.shape, f"{name}: shape {got.shape}, expected {exact.shape}")
    wide, reference = got.astype(np.float64), naive.astype(np.float64)
    for kind, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        differ = np.argwhere(test(wide) != test(exact))
        if len(differ):
            raise MismatchError(
                f"{name}: {kind} in {int(test(wide).sum())} places, expected in {int(test(exact).sum())}; "
                f"{len(differ)} differ, the first at {tuple(int(i) for i in differ[0])}"
            )
    finite = np.isfinite(exact)
    if not finite.any():
        return
    floor = ulps * eps(got.dtype) * max(unit, float(np.abs(exact[finite]).max()))
    off = np.abs(reference[finite] - exact[finite])
    bound = 2.0 * float(off[np.isfinite(off)].max(initial=0.0)) + floor
    error = np.abs(np.where(finite, wide, 0.0) - np.where(finite, exact, 0.0))
    worst = np.unravel_index(int(error.argmax()), error.shape)
    largest = float(error[worst])
    ratio = largest / bound if bound else np.inf
    demand(
        largest <= bound,
        f"{name}: error {largest:.3e} is over the bound {bound:.3e}, ratio {ratio:.2f}, at "
        f"{tuple(int(i) for i in worst)}: got {wide[worst]:.8g}, exact {exact[worst]:.8g}, "
        f"naive {reference[worst]:.8g}",
    )


def units_of(scale: float, q: Array, k: Array, v: Array, dtype: str) -> tuple[float, float]:
    """Returns the error units of out, of this dtype, and of lse: sums err by units of their summands.

    Summands of out are elements of v; summands of scores, and so of lse, are products of q and k.
    """
    return float(np.abs(v).max(initial=0.0)) * walk(scale, q, k, dtype), 1.0 + _largest_score(scale, q, k)


def _largest_score(scale: float, q: Array, k: Array) -> float:
    """Returns a bound on all scores, masked or not."""
    norms = [np.linalg.norm(x.astype("f8"), axis=3).max(initial=0.0) for x in (q, k)]
    return float(scale * norms[0] * norms[1])


def walk(scale: float, q: Array, k: Array, dtype: str) -> float:
    """Returns the error of a weight in units of the dtype: errors of a score's products add up as a random walk.

    16-bit: one unit, as the naive computation rounds scores afterwards, too.
    """
    return 1.0 + (_largest_score(scale, q, k) / q.shape[3] ** 0.5 if dtype == "float32" else 0.0)


def assert_units(name: str, got: Any, exact: Any, ulps: float, unit: float = 0.0) -> None:
    """Checks the tolerance rule for numbers that are known exactly: the floor alone, without a naive computation."""
    exact = np.broadcast_to(np.asarray(exact, np.float64), np.shape(got))
    assert_close(name, got, exact, exact, ulps=ulps, unit=unit)


def assert_attention(
    problem: Problem | Case, arrays: Any, out: Any, lse: Any = None, *, ulps: float | None = None
) -> None:
    """Checks out and lse of NumPy arrays q, k, v against float64 under the tolerance rule, unless they are None."""
    results = zip(("out", "lse"), (out, lse), attention64(problem, *arrays), naive(problem, *arrays), strict=True)
    for name, got, exact, near in results:
        if got is not None:
            assert_close(name, got, exact, near, ulps=ulps or ULPS[np.asarray(got).dtype.name])


def _problem(problem: Problem | Case) -> Problem:
    return problem.problem() if isinstance(problem, Case) else problem


def precision(problem: Problem) -> tuple[np.dtype[Any], np.dtype[Any] | None]:
    """Returns the dtype of sums, and the dtype to which intermediates are rounded (None for no rounding)."""
    if problem.dtype in ("float32", "float64"):
        return np.dtype(problem.dtype), None
    return np.dtype(np.float32), numpy_dtype(problem.dtype)


def _round(x: Array, rounded: np.dtype[Any] | None) -> Array:
    return x if rounded is None else x.astype(rounded).astype(x.dtype)


def eps(dtype: np.dtype[Any]) -> float:
    """Returns the distance from 1 to the next number of a dtype."""
    if dtype.name == "bfloat16":
        return 2.0**-7
    return float(np.finfo(dtype).eps)


def _visible(problem: Problem, there: Array | None = None) -> tuple[Array, Array, Array]:
    """Returns the mask (rows, keys) of the rows that see a key and the keys that a row sees, and both sets' indices.

    Keys that no row sees are left out, not weighted by 0, as 0 * NaN is NaN.
    """
    i, j = np.arange(problem.seqlen_q)[:, None], np.arange(problem.seqlen_k)[None, :]
    visible = (i + problem.mask.lo <= j) & (j <= i + problem.mask.hi)
    if there is not None:
        visible &= there
    rows, keys = np.flatnonzero(visible.any(axis=1)), np.flatnonzero(visible.any(axis=0))
    return visible[np.ix_(rows, keys)], rows, keys


def _softmax(
    problem: Problem, visible: Array, q: Array, k: Array, rounded: np.dtype[Any] | None, *, again: bool = False
) -> tuple[Array, Array, Array]:
    """Returns `(p, lse, slope)` of one head: p (rows, keys), lse (rows,), slope = d(capped score) / d(raw score).

    again: True for a backward pass, which recomputes p from lse.
    """
    s = (q @ k.T) * q.dtype.type(problem.softmax_scale)
    slope = np.ones_like(s)
    if problem.options.softcap:
        tanh = np.tanh(s / q.dtype.type(problem.options.softcap))
        s, slope = q.dtype.type(problem.options.softcap) * tanh, 1 - tanh * tanh
    lse = _sum_exp(s, visible)[2]
    s = _round(s, rounded)
    e, total, lse_of_rounded = _sum_exp(s, visible)
    if again and s.dtype == np.float32 and rounded is None:
        # Random errors, as scores of backward kernels differ from the scores behind lse, while NumPy's would be equal.
        norms = np.linalg.norm(q, axis=1)[:, None] * np.linalg.norm(k, axis=1) * problem.softmax_scale
        walks = np.random.default_rng(0).standard_normal(s.shape) * norms / q.shape[1] ** 0.5
        s = s + (ULPS["float32"] * eps(s.dtype) * walks).astype("f4") * slope
    p = np.where(visible, np.exp(s - lse_of_rounded[:, None]), 0) if again else e / total[:, None]
    return p, lse, slope


def _sum_exp(s: Array, visible: Array) -> tuple[Array, Array, Array]:
    """Returns `(exp(s - m), its row sums, lse)`; hidden keys are exactly 0, and every row sees at least one key."""
    s = np.where(visible, s, -np.inf)
    m = s.max(axis=1, initial=-np.inf)
    with np.errstate(invalid="ignore"):  # a visible score of NaN or +inf becomes NaN
        e = np.where(visible, np.exp(s - m[:, None]), 0)
        total = e.sum(axis=1)
        return e, total, m + np.log(total)


def _forward(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    work: np.dtype[Any],
    rounded: np.dtype[Any] | None,
    there: Array | None,
) -> tuple[Array, Array]:
    b, sq, hq = problem.batch, problem.seqlen_q, problem.heads_q
    out, lse = np.zeros((b, sq, hq, problem.head_dim_v), work), np.full((b, hq, sq), -np.inf, work)
    visible, rows, keys = _visible(problem, there)
    if not len(rows):
        return out, lse
    for n, h in np.ndindex(b, hq):
        qh, kh, vh = _head(problem, n, h, rows, keys, work, q, k, v)
        p, lse[n, h, rows], _ = _softmax(problem, visible, qh, kh, rounded)
        out[n, rows, h] = _round(p, rounded) @ vh
    return out, lse


def _backward(
    problem: Problem,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    dlse: Array | None,
    work: np.dtype[Any],
    rounded: np.dtype[Any] | None,
) -> tuple[Array, Array, Array]:
    dq, dk, dv = (np.zeros(x.shape, work) for x in (q, k, v))
    visible, rows, keys = _visible(problem)
    if not len(rows):
        return dq, dk, dv
    group = problem.heads_q // problem.heads_kv
    for n, h in np.ndindex(problem.batch, problem.heads_q):
        qh, kh, vh = _head(problem, n, h, rows, keys, work, q, k, v)
        doh = dout[n, rows, h].astype(work)
        p, _, slope = _softmax(problem, visible, qh, kh, rounded, again=True)
        p = _round(p, rounded)
        dp = _round(doh @ vh.T, rounded)
        delta = (doh * _round(p @ vh, rounded)).sum(axis=1)
        if dlse is not None:
            delta = delta - dlse[n, h, rows].astype(work)
        ds = _round(np.where(visible, p * (dp - delta[:, None]) * slope, 0), rounded) * work.type(problem.softmax_scale)
        dq[n, rows, h] = ds @ kh
        dk[n, keys, h // group] += ds.T @ qh
        dv[n, keys, h // group] += p.T @ doh
    return dq, dk, dv


def _head(
    problem: Problem, n: int, h: int, rows: Array, keys: Array, work: np.dtype[Any], q: Array, k: Array, v: Array
) -> tuple[Array, Array, Array]:
    kv = h // (problem.heads_q // problem.heads_kv)
    return q[n, rows, h].astype(work), k[n, keys, kv].astype(work), v[n, keys, kv].astype(work)
