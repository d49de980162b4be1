"""Oracle of calls with mods: whole matrices in float64, the naive computation, and the tolerances.

Functions are traced, and their values and derivatives come from `cuflash.reference.evaluate` and `cuflash.mods`, which
have separate tests; everything else is written straight from the contract. As in `oracle`, the naive computation rounds
q kᵀ, p, dp and ds to the dtype of the inputs; results of score_mod stay in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..mods.graph.derivative import differentiate
from ..mods.graph.graph import Graph, Node, post_order, variable
from ..mods.graph.simplify import build, constant, rebuilt
from ..mods.tracing.trace import trace
from ..problem.dropout import SHARES, share_kept
from ..problem.problem import Problem
from ..reference import dropout
from ..reference.evaluate import evaluate, place_of
from .cases import Case, numpy_dtype
from .layouts import host
from .oracle import FEW, ULPS, Array, assert_close, eps, precision
from .sequences import Index, VarlenArrays

LEAST_SCORE = -1e37
SCORE = variable("score")


class OracleMods(NamedTuple):
    """The mods of a call, with all arrays as NumPy arrays. captured_grads: the arrays whose gradients are requested."""

    score_mod: Graph | None = None
    mask_mod: Graph | None = None
    bias: Array | None = None
    sinks: Array | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    captured_grads: tuple[Array, ...] = ()

    @classmethod
    def from_kwargs(cls, arguments: dict[str, Any]) -> OracleMods:
        """Returns the mods of a call on NumPy arrays, from its arguments."""
        names = [name for name in ("score_mod", "mask_mod") if arguments.get(name)]
        graphs: dict[str, Any] = {name: trace(arguments[name], name) for name in names}
        values: dict[str, Any] = {
            name: x for name, x in arguments.items() if name in cls._fields and name not in graphs
        }
        bias = values.get("bias")
        if bias is not None:
            values["bias"] = np.asarray(bias)[(None,) * (4 - np.ndim(bias))]
        if not isinstance(values.get("dropout_seed", 0), int):
            values["dropout_seed"] = int(np.asarray(values["dropout_seed"]).reshape(()))
        # Gradients are matched by identity, and the bias is now a new array with four axes.
        requested: Any = tuple(values.get("bias") if x is bias else x for x in values.pop("captured_grads", ()))
        return cls(**graphs, **values, captured_grads=requested)


@dataclass(frozen=True)
class OracleInputs:
    """A problem in NumPy with all axes.

    one: returns a sequence as a dense problem. queries, keys: the rows of each sequence. there: True for each existing
    key of a sequence.
    """

    one: Callable[[int], Case]
    q: Array
    k: Array
    v: Array
    queries: list[Index]
    keys: list[Index]
    there: list[Array]

    @classmethod
    def dense(cls, case: Case, arrays: tuple[Array, Array, Array]) -> OracleInputs:
        lengths = case.seqlen_q, case.seqlen_k
        queries, keys = ([(np.full(n, b), np.arange(n)) for b in range(case.batch)] for n in lengths)
        there = [np.ones(case.seqlen_k, bool)] * case.batch
        return cls(lambda number: case, *arrays, queries, keys, there)

    @classmethod
    def from_varlen(cls, inputs: VarlenArrays) -> OracleInputs:
        return cls(inputs.sequences.one, inputs.q, inputs.k, inputs.v, inputs.queries, inputs.keys, inputs.there)

    @property
    def case(self) -> Case:
        return self.one(0)


class OneSequence:
    """Attention of one sequence, computed in dtype `work`; intermediates are rounded to `rounded` unless it is None."""

    def __init__(self, inputs: OracleInputs, oracle_mods: OracleMods, number: int, work: Any, rounded: Any) -> None:
        self.problem, self.oracle_mods = inputs.one(number).problem(), oracle_mods
        self.work, self.rounded = np.dtype(work).type, rounded
        self.group = self.problem.heads_q // self.problem.heads_kv
        rows, keys = inputs.queries[number], inputs.keys[number]
        q, k, v = inputs.q[rows].astype(work), inputs.k[keys].astype(work), inputs.v[keys].astype(work)
        self.q = q.swapaxes(0, 1)
        self.k, self.v = (np.repeat(x.swapaxes(0, 1), self.group, axis=0) for x in (k, v))
        heads, m, n = self.problem.heads_q, len(q), len(k)
        self.indices: dict[str, Any] = {
            "b": number, "h": np.arange(heads)[:, None, None], "q_idx": np.arange(m)[:, None], "k_idx": np.arange(n),
            "seqlen_q": m, "seqlen_k": n,
        }  # fmt: skip
        with np.errstate(all="ignore"):
            self._scores(inputs.there[number])

    def round(self, x: Array) -> Array:
        return x if self.rounded is None else x.astype(self.rounded).astype(x.dtype)

    def values(self, graph: Graph, roots: Sequence[Node]) -> list[Array]:
        arrays = [np.asarray(host(each.array)) for each in graph.arrays]
        if self.rounded is not None:
            roots = [_with_short_tanh(root) for root in roots]
        evaluated = evaluate(roots, {**self.indices, "score": self.raw}, arrays, self.work)
        return [np.broadcast_to(x, self.raw.shape) for x in evaluated]

    def _scores(self, there: Array) -> None:
        """Computes the raw scores, the slope of the cap, the final scores s (-inf for hidden keys), lse, p and out."""
        self.cap_slope: Any = self.work(1)
        product = self.q @ self.k.swapaxes(1, 2) * self.work(self.problem.softmax_scale)
        s = self._final(self._raw(product), there)
        self.lse = _lse(s)
        if self.rounded is not None:
            s = self._final(self._raw(self.round(product)), there)
        self.s, sinks = s, self.oracle_mods.sinks
        self.of_keys = _lse(s)
        if sinks is not None:
            x = sinks.astype(self.work)[:, None]
            self.lse, self.of_keys = (np.logaddexp(each, x) for each in (self.lse, self.of_keys))
        self.p = np.where(np.isneginf(s), 0, np.exp(s - self.of_keys[..., None]))
        # Keys that no row sees are set to 0, as 0 * NaN is NaN.
        visible: Array = ~np.isneginf(s)
        of_group = visible.reshape(self.problem.heads_kv, self.group, *visible.shape[1:]).any(axis=(1, 2))
        values = np.repeat(of_group, self.group, axis=0)[..., None]
        self.k, self.v = np.where(values, self.k, 0), np.where(values, self.v, 0)
        self.q = np.where(visible.any(axis=2, keepdims=True), self.q, 0)
        self.scales: Any = self.work(1)
        if self.oracle_mods.dropout_p:
            seed, dropout_p = self.oracle_mods.dropout_seed, self.oracle_mods.dropout_p
            keep = dropout.is_kept(seed, dropout_p, *(self.indices[name] for name in ("b", "h", "q_idx", "k_idx")))
            self.scales = np.where(keep, SHARES / share_kept(dropout_p), 0).astype(self.work)
        self.out = self.round(self.p * self.scales) @ self.v

    def _raw(self, s: Array) -> Array:
        if self.problem.options.softcap:
            cap = self.work(self.problem.options.softcap)
            tanh = np.tanh(s / cap)
            s, self.cap_slope = cap * tanh, 1 - tanh * tanh
        self.raw = s
        return s

    def _final(self, s: Array, there: Array) -> Array:
        oracle_mods, i, j = self.oracle_mods, self.indices["q_idx"], self.indices["k_idx"]
        visible = there & (i + self.problem.mask.lo <= j) & (j <= i + self.problem.mask.hi)
        if oracle_mods.score_mod is not None:
            (s,) = self.values(oracle_mods.score_mod, [oracle_mods.score_mod.root])
        if oracle_mods.bias is not None:
            part = oracle_mods.bias[self._of_bias(oracle_mods.bias)]
            if part.dtype == bool:
                visible = visible & part
            else:
                s = s + part.astype(self.work)
        if oracle_mods.mask_mod is not None:
            visible = visible & self.values(oracle_mods.mask_mod, [oracle_mods.mask_mod.root])[0]
        return np.where(visible & ~(s <= LEAST_SCORE), s, -np.inf)

    def _of_bias(self, bias: Array) -> tuple[Any, ...]:
        names = ("b", "h", "q_idx", "k_idx")
        return tuple(self.indices[name] * (n > 1) for name, n in zip(names, bias.shape, strict=True))

    def gradients(self, dout: Array, dlse: Array | None) -> dict[str, Any]:
        """Returns gradients of q, k and v (rows, heads, dim), and of sinks; sets ds.

        dout is (rows, heads, dim_v), dlse (heads, rows).
        """
        with np.errstate(all="ignore"):
            dout = dout.astype(self.work).swapaxes(0, 1)
            p, dp = self.round(self.p * self.scales), self.round(dout @ self.v.swapaxes(1, 2)) * self.scales
            delta = (dout * self.round(self.out)).sum(axis=2) - (0 if dlse is None else dlse.astype(self.work))
            self.ds = np.where(self.p == 0, 0, self.p * (dp - delta[..., None]))
            self.size = np.where(self.p == 0, 0, self.p * (abs(dp) + abs(delta[..., None]) + (dlse is not None)))
            graph = self.oracle_mods.score_mod
            slope: Any = self.cap_slope
            if graph is not None:
                slope_by_score = differentiate(graph.root).get(SCORE)
                slope = slope * self.values(graph, [slope_by_score])[0] if slope_by_score is not None else self.raw * 0
            product = self.round(np.where(self.ds == 0, 0, self.ds * slope)) * self.work(self.problem.softmax_scale)
            self.steepest = float(np.abs(np.where(self.p == 0, 0, slope)).max(initial=0.0))
            dk, dv = product.swapaxes(1, 2) @ self.q, p.swapaxes(1, 2) @ dout
            grads = {"dq": (product @ self.k).swapaxes(0, 1)}
            for name, x in (("dk", dk), ("dv", dv)):
                of_group = x.reshape(self.problem.heads_kv, self.group, *x.shape[1:])
                grads[name] = of_group.sum(axis=1).swapaxes(0, 1)
            if self.oracle_mods.sinks is not None:
                share = np.exp(self.oracle_mods.sinks.astype(self.work)[:, None] - self.of_keys)
                grads["sinks"] = np.where(np.isneginf(self.oracle_mods.sinks)[:, None], 0, -share * delta).sum(axis=1)
        return grads

    def add(self, captured_grads: Sequence[Array], totals: list[Array], of_sinks: Any, sizes: list[Array]) -> None:
        """Adds the gradients of captured arrays to `totals`, and the magnitudes of their summands to `sizes`."""
        graph = self.oracle_mods.score_mod
        slopes = {} if graph is None else differentiate(graph.root)
        for x, total, size in zip(captured_grads, totals, sizes, strict=True):
            if x is self.oracle_mods.sinks:
                total += of_sinks
                size += abs(of_sinks)
            elif x is self.oracle_mods.bias:
                _add_at(total, self._of_bias(x), self.ds)
                _add_at(size, self._of_bias(x), self.size)
            else:
                assert graph is not None
                for load, slope in slopes.items():
                    if load.op == "load" and graph.arrays[load.value].array is x:
                        of_load, *indices = self.values(graph, [slope, *load.arguments])
                        indices = [place_of(index, n) for index, n in zip(indices, x.shape, strict=True)]
                        _add_at(total, tuple(indices), np.where(self.ds == 0, 0, self.ds * of_load))
                        _add_at(size, tuple(indices), np.where(self.size == 0, 0, self.size * abs(of_load)))


def _with_short_tanh(root: Node) -> Node:
    """Returns the node with tanh off by 2^-11, as in 16-bit kernels, except if all scores of a head share it."""
    replaced: dict[Node, Node] = {}
    for each in post_order([root]):
        new = rebuilt(each, [replaced[argument] for argument in each.arguments])
        is_short = each.op == "tanh" and not each.inputs.isdisjoint(("score", "q_idx", "k_idx"))
        replaced[each] = build("multiply", new, constant(1 + 2.0**-11)) if is_short else new
    return replaced[root]


def _lse(s: Array) -> Array:
    most = s.max(axis=2, initial=-np.inf)
    total = np.exp(np.where(np.isneginf(s), -np.inf, s - most[..., None])).sum(axis=2)
    return np.where(np.isneginf(most), -np.inf, most + np.log(total))


def _add_at(total: Array, indices: tuple[Any, ...], what: Array) -> None:
    if total.size:
        where: Any = tuple(np.broadcast_to(index, what.shape) for index in indices) or ...
        np.add.at(total, where, what if indices else what.sum())


def _precisions(problem: Problem) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    return (np.dtype("float64"), None), precision(problem)


def check(inputs: OracleInputs, oracle_mods: OracleMods, out: Any, lse: Any = None) -> None:
    """Checks out (first axis, second axis, heads, dim) and lse (first axis, heads, second axis); None skips one."""
    dtype, axes = inputs.case.dtype, inputs.q.shape[:3]
    outs = [np.zeros((*axes, inputs.v.shape[3])) for _ in range(2)]
    lses = [np.full(axes, -np.inf) for _ in range(2)]
    score = 0.0
    for number, rows in enumerate(inputs.queries):
        for (work, rounded), whole, lse_ in zip(_precisions(inputs.case.problem()), outs, lses, strict=True):
            one = OneSequence(inputs, oracle_mods, number, work, rounded)
            whole[rows], lse_[rows] = one.out.swapaxes(0, 1), one.lse.T
            for s in (one.raw, one.s):
                score = max(score, float(np.abs(s[np.isfinite(s)]).max(initial=0.0)))
    few = min(min((len(rows[0]) for rows in side), default=0) for side in (inputs.queries, inputs.keys)) < FEW
    if dtype in ("float32", "float64"):
        with np.errstate(invalid="ignore"):
            outs[1], lses[1] = (near + (near - exact) for exact, near in (outs, lses))
    largest = float(np.abs(np.where(np.isfinite(inputs.v), inputs.v, 0).astype("f8")).max(initial=0.0))
    # With few numbers, the naive computation may happen to have no errors.
    unit = largest * (1 + score / 8 if dtype == "float32" else 1) if few or dtype == "float32" else 2.0**-14
    ulps = max(4, ULPS[dtype]) if few else ULPS[dtype]
    if out is not None:
        assert_close("out", host(out).reshape(outs[0].shape), *outs, ulps=ulps, unit=unit)
    if lse is not None:
        exact, near = (x.swapaxes(1, 2) for x in lses)
        got, ulps = host(lse).reshape(exact.shape), max(8.0, inputs.q.shape[3] / 16)
        # At least 16 units: kernels for 16-bit inputs sum exponents beside a bias of 28 (sm90/forward/softmax.cuh).
        assert_close("lse", got, exact, near, ulps=ulps, unit=max(1 + score, 16.0 if dtype != "float32" else 0.0))


def check_gradients(
    inputs: OracleInputs,
    oracle_mods: OracleMods,
    dout: Array,
    dlse: Array | None,
    results: Sequence[Any],
    grads: Sequence[Any] = (),
) -> None:
    """Checks dq, dk, dv, and the gradients of `oracle_mods.captured_grads`, against float64.

    dout is (first axis, second axis, heads, dim), dlse (first axis, heads, second axis).
    """
    dtype, arrays = inputs.case.dtype, (inputs.q, inputs.k, inputs.v)
    oracle_mods = oracle_mods if grads else oracle_mods._replace(captured_grads=())
    wholes = [[np.zeros(x.shape) for x in arrays] for _ in range(2)]
    sums = [[np.zeros(x.shape) for x in oracle_mods.captured_grads] for _ in range(2)]
    sizes = [np.zeros(x.shape) for x in oracle_mods.captured_grads]
    steepest, few = 1.0, False
    for number, (rows, keys) in enumerate(zip(inputs.queries, inputs.keys, strict=True)):
        of_lse = None if dlse is None else dlse.swapaxes(1, 2)[rows].T
        few |= min(len(rows[0]), len(keys[0])) < FEW
        for (work, rounded), whole, totals in zip(_precisions(inputs.case.problem()), wholes, sums, strict=True):
            one = OneSequence(inputs, oracle_mods, number, work, rounded)
            got = one.gradients(dout[rows], of_lse)
            for result, name, section in zip(whole, ("dq", "dk", "dv"), (rows, keys, keys), strict=True):
                result[section] += got[name]
            is_exact = rounded is None and work == "float64"
            magnitudes = sizes if is_exact else [np.zeros(x.shape) for x in sizes]
            one.add(oracle_mods.captured_grads, totals, got.get("sinks"), magnitudes)
            steepest = max(steepest, one.steepest)
    wide = dtype in ("float32", "float64")
    # A sum of few numbers that cancel errs by units of the summands.
    clean = [np.where(np.isfinite(x), x, 0).astype("f8") for x in (dout, *arrays, 0 if dlse is None else dlse)]
    norms = [float(np.linalg.norm(x, axis=3).max(initial=0.0)) for x in (clean[0], clean[3])]
    largest = [float(np.abs(x).max(initial=0.0)) for x in clean]
    scale = inputs.case.problem().softmax_scale * steepest / (1 - oracle_mods.dropout_p)
    ds = norms[0] * norms[1] + largest[4]
    units = [scale * ds * largest[2], scale * ds * largest[1], largest[0]] if few or wide else [2.0**-14] * 3
    for name, x, exact, near, unit in zip(("dq", "dk", "dv"), results, *wholes, units, strict=True):
        if x is not None:
            near = near + (near - exact) if wide or oracle_mods.dropout_p else near
            assert_close(name, host(x).reshape(exact.shape), exact, near, ulps=2 * ULPS[dtype], unit=unit)
    rows_of_all = max(1, sum(len(rows[0]) for rows in inputs.queries) * inputs.q.shape[2])
    for number, (got, exact, near, size) in enumerate(zip(grads, *sums, sizes, strict=True)):
        unit = float(size.max(initial=0.0)) / max(1.0, rows_of_all**0.5 / 8)
        # In units of the inputs' dtype: out and p are rounded to it, whatever the gradient's dtype is.
        ulps = max(eps(numpy_dtype(dtype)) / eps(host(got).dtype), 1) * (8 if wide else 1)
        near = near + (near - exact)
        assert_close(f"gradient {number}", host(got).reshape(exact.shape), exact, near, ulps=ulps, unit=unit)
