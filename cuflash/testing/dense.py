"""Dense trials: calls whose sequences have one length, their gradients, and merges of parts of the keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import cuflash

from . import oracle
from .cases import Case, numpy_dtype
from .draw import DTYPES, Draw
from .gradients import BackwardArgs, Targets, backward, upstream
from .gradients import check as check_gradients
from .layouts import LAYOUTS, WRITABLE, host, identical, is_clean_beside
from .oracle import FEW, ULPS, Array, demand


def check(case: Case, arrays: list[Array], out: Any, *lses: Any, **options: Any) -> None:
    """Checks out, and lse of one or more calls, against float64."""
    problem = case.problem(**options)
    exact, naive = oracle.attention64(problem, *arrays), oracle.naive(problem, *arrays)
    q, k, v = arrays
    unit, unit_of_lse = oracle.units_of(problem.softmax_scale, q, k, v, host(out).dtype.name)
    needs_units = min(case.seqlen_q, case.seqlen_k) < FEW or case.dtype == "float32"
    unit, ulps = (unit, 4.0) if needs_units else (0.0, 2.0 * ULPS[case.dtype])
    oracle.assert_close("out", host(out), exact[0], naive[0], ulps=ulps, unit=unit)
    for lse in lses:
        oracle.assert_close("lse", host(lse), exact[1], naive[1], ulps=4, unit=unit_of_lse)


@dataclass(frozen=True, slots=True)
class Dense:
    """A trial of one problem: forward twice, lse, and gradients unless `backward` is None.

    layouts: of q, k, v and dout. out, grads_out: layouts of the caller's arrays for out, and for dq, dk and dv; "" for
    none.
    """

    case: Case
    seed: int
    layouts: tuple[str, str, str, str]
    out: str
    grads_out: tuple[str, str, str]
    forward: dict[str, Any] = field(default_factory=dict)
    backward: dict[str, Any] | None = None

    @classmethod
    def drawn(cls, family: Draw, draw: Draw) -> Dense:
        dtype, dims = family.one_of(*DTYPES), family.dims()
        algorithm = family.one_of("flash2", "flash2", "flash2", "flash1", "flashd", "standard")
        names = tuple(LAYOUTS) if draw.chance(0.5) else ("dense",)
        splits = {"num_splits": draw.one_of(1, 2, 5)}, {"split_size": draw.one_of(128, 256)}
        forward = {"algorithm": algorithm} | draw.one_of({}, {}, *splits)
        if family.chance(0.2):
            forward["out_dtype"] = "float32"
        backward = {"deterministic": draw.chance(0.5)} if family.chance(0.6) and max(dims) <= 256 else None
        return cls(
            draw.case("dense", dtype, dims, **draw.mask()),
            draw.seed(),
            (draw.one_of(*names), draw.one_of(*names), draw.one_of(*names), draw.one_of(*names)),
            draw.one_of("", *WRITABLE),
            draw.grads_out(),
            forward,
            backward,
        )

    def run(self, xp: Any) -> None:
        """Makes the calls in this array library, and raises MismatchError if one is wrong."""
        case, arguments = self.case, self.case.arguments() | self.forward
        *names, of_dout = (LAYOUTS[name] for name in self.layouts)
        arrays = [layout(xp.asarray(x)) for layout, x in zip(names, case.arrays(self.seed), strict=True)]
        before, (q, k, v) = [host(x).copy() for x in arrays], arrays
        dtype = numpy_dtype(self.forward.get("out_dtype", case.dtype))
        target = LAYOUTS[self.out](xp.full(case.out_shape(), xp.nan, dtype)) if self.out else None
        arguments |= {"return_lse": True, "out": target}  # both calls use `target`: kernels depend on its layout
        out, lse = cuflash.forward(q, k, v, **arguments)
        first = [host(x).copy() for x in (out, lse)]
        demand(target is None or out is target, "the array that was given for out is not what was returned")
        options = {"out_dtype": self.forward["out_dtype"]} if "out_dtype" in self.forward else {}
        demand(identical(arrays, before), "forward changed an array that it reads")
        splits = {name: x for name, x in self.forward.items() if name in ("num_splits", "split_size")}
        check(case, before, out, lse, cuflash.lse(q, k, **case.arguments(), **splits), **options)
        demand(identical(cuflash.forward(q, k, v, **arguments), first), "forward does not repeat")
        if self.backward is not None:
            dout, dlse = (xp.asarray(x) for x in upstream(case, self.seed + 1))
            self._check_gradients(BackwardArgs(of_dout(dout), q, k, v, out, lse, dlse), before, self.backward)
            demand(identical(arrays, before), "backward changed an array that it reads")
        demand(target is None or is_clean_beside(target), "forward wrote beside the elements of out")

    def _check_gradients(self, inputs: BackwardArgs, before: list[Array], arguments: dict[str, Any]) -> None:
        targets, (q, k, v) = Targets(self.grads_out, (inputs.q, inputs.k, inputs.v)), before
        call = partial(backward, self.case, inputs, **arguments)
        # Twice the units: among so many problems, some have larger errors than the problems of a table.
        ulps = 2 * ULPS[self.case.dtype]
        check_grads = partial(check_gradients, self.case, inputs._replace(q=q, k=k, v=v), ulps=ulps)
        targets.check(call, check_grads, repeats=arguments["deterministic"])


@dataclass(frozen=True, slots=True)
class Merge:
    """A trial of attention over ranges of the keys, merged and compared with attention over all keys."""

    case: Case
    seed: int
    cuts: tuple[int, ...]

    @classmethod
    def drawn(cls, family: Draw, draw: Draw) -> Merge:
        case = draw.case("merge", family.one_of(*DTYPES), family.dims())
        count = draw.one_of(1, 2, 3, 9)
        return cls(case, draw.seed(), tuple(sorted(draw.random.integers(0, case.seqlen_k + 1, count).tolist())))

    def run(self, xp: Any) -> None:
        """Makes the calls in this array library, and raises MismatchError if one is wrong."""
        arrays = self.case.arrays(self.seed)
        q, k, v = (xp.asarray(x) for x in arrays)
        parts = [(k[:, a:b], v[:, a:b]) for a, b in pairwise((0, *self.cuts, self.case.seqlen_k))]
        states = [cuflash.forward(q, *part, return_lse=True) for part in parts]
        out, lse = cuflash.merge_states([out for out, _ in states], [lse for _, lse in states])
        check(self.case, list(arrays), out, lse)
