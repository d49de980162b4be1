"""Calls of `cuflash.backward`: arrays, call, and check against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import cuflash

from ..problem.problem import Problem
from . import oracle
from .cases import Case, numpy_dtype
from .layouts import LAYOUTS, host, identical, is_clean_beside
from .oracle import ULPS, Array, demand


def upstream(case: Case, seed: int = 7) -> tuple[Array, Array]:
    """Returns `(dout, dlse)`: dout (b, sq, hq, dv) in the case's dtype, dlse (b, hq, sq) in the dtype of lse."""
    rng = np.random.default_rng(seed)
    dout = rng.standard_normal((case.batch, case.seqlen_q, case.heads_q, case.head_dim_v))
    dlse = rng.standard_normal((case.batch, case.heads_q, case.seqlen_q))
    return dout.astype(numpy_dtype(case.dtype)), dlse.astype("float64" if case.dtype == "float64" else "float32")


class BackwardArgs(NamedTuple):
    """The arrays of a call of backward."""

    dout: Any
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    dlse: Any = None

    def on(self, xp: Any) -> BackwardArgs:
        """Returns these arrays in another array library."""
        return BackwardArgs(*(None if x is None else xp.asarray(host(x)) for x in self))


def backward_args(case: Case, xp: Any, seed: int = 0, *, dlse: bool = True, **forward: Any) -> BackwardArgs:
    """Returns random arrays in xp, with out and lse from `forward`."""
    upstreams = [xp.asarray(x) for x in upstream(case, seed + 7)]
    q, k, v = (xp.asarray(x) for x in case.arrays(seed))
    out, lse = cuflash.forward(q, k, v, return_lse=True, **case.arguments(), **forward)
    return BackwardArgs(upstreams[0], q, k, v, out, lse, upstreams[1] if dlse else None)


def backward(case: Case, inputs: BackwardArgs, **more: Any) -> tuple[Any, ...]:
    """Calls backward and returns `(dq, dk, dv)`."""
    dout, q, k, v, out, lse, dlse = inputs
    return cuflash.backward(dout, q, k, v, out, lse, dlse=dlse, **case.arguments(), **more)


class Targets:
    """Output arrays for gradients of the arrays `like`, in layouts of these names; an empty name for none."""

    def __init__(self, names: Sequence[str], like: Sequence[Any]) -> None:
        pairs = zip(names, like, strict=True)
        self._arrays = [LAYOUTS[name](np.full_like(x, np.nan, order="C")) if name else None for name, x in pairs]
        self._keywords = {"grads_out": self._arrays} if any(names) else {}

    def check(self, backward: Callable[..., Any], check: Callable[[Any], None], *, repeats: bool) -> None:
        """Checks the gradients of `backward(grads_out=…)`, and that memory beside the arrays is unchanged.

        The argument is omitted if there are no arrays. repeats: also check that a second call repeats bit by bit.
        """
        grads = self._written(backward)
        check(grads)
        if repeats:
            first = [host(x).copy() for x in grads]
            demand(identical(self._written(backward), first), "deterministic gradients do not repeat")
        are_clean = all(x is None or is_clean_beside(x) for x in self._arrays)
        demand(are_clean, "backward wrote beside the elements of a gradient")

    def _written(self, backward: Callable[..., Any]) -> Any:
        for x in self._arrays:
            if x is not None:  # each time, as results of the call before would hide elements that this one skips
                x[...] = np.nan
        grads = backward(**self._keywords)
        are_these = all(x is None or x is y for x, y in zip(self._arrays, grads, strict=True))
        demand(are_these, "an array that was given for a gradient is not what was returned")
        return grads


def units_of(problem: Problem | Case, inputs: BackwardArgs) -> list[float]:
    """Returns the error units of dq, dk and dv: as sums may cancel, units of the summands, not of the sums.

    dv is a sum of dout. dq and dk are sums of k and q, whose weights err by units of dout · v and dlse. All are
    weighted by p, which errs as the scores do.
    """
    problem = problem.problem() if isinstance(problem, Case) else problem
    dout, q, k, v, dlse = map(host, (inputs.dout, inputs.q, inputs.k, inputs.v, inputs.dlse))
    largest = [float(np.abs(x).max(initial=0.0)) for x in (q, k, dout)]
    norms = [np.linalg.norm(x.astype("f8"), axis=3).max(initial=0.0) for x in (dout, v)]
    ds = norms[0] * norms[1] + (0.0 if dlse is None else np.abs(dlse).max(initial=0.0))
    weight = oracle.walk(problem.softmax_scale, q, k, problem.dtype)
    return [weight * x for x in (*(problem.softmax_scale * ds * x for x in (largest[1], largest[0])), largest[2])]


def check(problem: Problem | Case, inputs: BackwardArgs, got: tuple[Any, ...], *, ulps: float | None = None) -> None:
    """Checks dq, dk and dv against float64 under the tolerance rule; None for an omitted gradient.

    16-bit: kernels round p and ds, and the naive computation rounds s and dp, too, so the rule holds unchanged.
    float32: on a GPU every product is three TF32 products, so the limit is 4 times, not 2 times, the naive float32
    error. Its floor is in `units_of`, as a row that sees one key has ds = 0.
    """
    dout, q, k, v, dlse = map(host, (inputs.dout, inputs.q, inputs.k, inputs.v, inputs.dlse))
    problem = problem.problem() if isinstance(problem, Case) else problem
    exact = oracle.gradients64(problem, dout, q, k, v, dlse)
    naive = oracle.naive_gradients(problem, dout, q, k, v, dlse)
    units = [0.0, 0.0, 0.0]
    if problem.dtype in ("float32", "float64"):
        naive = tuple(near + (near - expected) for near, expected in zip(naive, exact, strict=True))
        units = units_of(problem, inputs)
    for name, x, like, expected, near, unit in zip(
        ("dq", "dk", "dv"), got, (q, k, v), exact, naive, units, strict=True
    ):
        if x is not None:
            demand(host(x).dtype == like.dtype, f"{name} is {host(x).dtype}, expected {like.dtype}")
            oracle.assert_close(name, host(x), expected, near, ulps=ulps or ULPS[problem.dtype], unit=unit)
