"""Calls with mods, checked against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import cuflash

from .cases import Case, numpy_dtype
from .functions import Arguments, Maker, Put
from .layouts import host, identical
from .mod_oracle import OracleInputs, OracleMods, check, check_gradients
from .oracle import demand
from .sequences import VarlenArrays, check_unused, upstream


def make_oracle_mods(make: Maker, case: Case) -> OracleMods:
    """Returns the oracle's mods for a call."""
    return OracleMods.from_kwargs(make(lambda x: x, case))


def without_grads(arguments: Arguments) -> Arguments:
    """Returns the arguments of `forward`: all but captured_grads."""
    return {name: x for name, x in arguments.items() if name != "captured_grads"}


def lse_arguments(arguments: Arguments) -> Arguments:
    """Returns the arguments of `lse`, from the arguments of `forward`."""
    return {name: x for name, x in arguments.items() if name != "v" and not name.startswith("dropout")}


def forward(make: Maker, case: Case, put: Put, arrays: Sequence[Any], **more: Any) -> Any:
    """Returns `(out, lse)` of a dense call."""
    (q, k, v), mod_kwargs = arrays, without_grads(make(put, case))
    return cuflash.forward(q, k, v, return_lse=True, **case.arguments(), **mod_kwargs, **more)


def check_forward(make: Maker, case: Case, put: Put, *, with_lse: bool = False, seed: int = 0, **more: Any) -> Any:
    """Checks a dense call against float64, and `cuflash.lse` if `with_lse`. Returns out and lse."""
    arrays = case.arrays(seed)
    there = [put(x) for x in arrays]
    results = forward(make, case, put, there, **more)
    inputs, oracle_mods = OracleInputs.dense(case, arrays), make_oracle_mods(make, case)
    check(inputs, oracle_mods, *results)
    if with_lse:
        keywords = lse_arguments(without_grads(make(put, case)))
        check(inputs, oracle_mods, None, cuflash.lse(there[0], there[1], **case.arguments(), **keywords))
    return results


def check_backward(
    make: Maker, case: Case, put: Put, *, grads: bool = False, dlse: bool = True, seed: int = 0, checked: bool = True,
    **more: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Checks gradients of a dense call against float64 if `checked`. Returns all gradients in one tuple."""
    arrays, random = case.arrays(seed), np.random.default_rng(seed + 7)
    dout = random.standard_normal(case.out_shape()).astype(numpy_dtype(case.dtype))
    of_lse = random.standard_normal((case.batch, case.heads_q, case.seqlen_q)).astype(np.float32) if dlse else None
    q, k, v = there = [put(x) for x in arrays]
    mod_kwargs = make(put, case)
    captured_grads = mod_kwargs.pop("captured_grads", ())
    out, lse = cuflash.forward(q, k, v, return_lse=True, **case.arguments(), **mod_kwargs)
    more |= {"captured_grads": captured_grads} if grads else {}
    more |= {"dlse": None if of_lse is None else put(of_lse), **case.arguments(), **mod_kwargs}
    dq, dk, dv, *rest = cuflash.backward(put(dout), q, k, v, out, lse, **more)
    of_arrays = rest[0] if rest else ()
    for got, like in zip((dq, dk, dv, *of_arrays), (*there, *captured_grads), strict=False):
        kind, expected_kind = (tuple(got.shape), got.dtype), (tuple(like.shape), like.dtype)
        demand(kind == expected_kind, f"a gradient is {kind}, expected {expected_kind}")
    if checked:
        check_gradients(
            OracleInputs.dense(case, arrays), make_oracle_mods(make, case), dout, of_lse, (dq, dk, dv), of_arrays
        )
    return dq, dk, dv, *of_arrays


def check_repeated(make: Maker, case: Case, put: Put, **more: Any) -> None:
    """Checks deterministic gradients against float64, and that a second call repeats them bit by bit."""
    first = check_backward(make, case, put, deterministic=True, **more)
    again = check_backward(make, case, put, deterministic=True, checked=False, **more)
    demand(identical(again, first), "deterministic gradients do not repeat")


def bounds_case(arrays: VarlenArrays) -> Case:
    """Returns a case with the batch and the longest lengths of variable-length sequences, for makers of mods."""
    problem = arrays.sequences
    max_q, max_k = (max(lengths, default=0) for lengths in (problem.queries, problem.keys))
    return Case(problem.name, len(problem.queries), max_q, max_k, *problem.heads, *problem.dims, problem.dtype)


def check_of_lengths(make: Maker, inputs: VarlenArrays, xp: Any, deterministic: Sequence[bool] = (False, True)) -> None:
    """Checks calls on variable-length sequences against float64, with gradients if the call has them."""
    case, arguments = bounds_case(inputs), inputs.arguments(xp)
    mod_kwargs = without_grads(make(xp.asarray, case))
    whole, of_numpy = OracleInputs.from_varlen(inputs), make_oracle_mods(make, case)
    out, lse = cuflash.forward(**arguments, return_lse=True, **mod_kwargs)
    check(whole, of_numpy, out, lse)
    check_unused(inputs, "q", out)
    unused = inputs.unused("q")
    lse_of_rows = host(lse).reshape(len(unused), case.heads_q, unused.shape[1]).swapaxes(1, 2)
    demand(np.isneginf(lse_of_rows[unused]).all(), "lse of rows that no sequence uses is not -inf")
    check(whole, of_numpy, None, cuflash.lse(**lse_arguments(arguments | mod_kwargs)))
    if not inputs.sequences.has_gradients:
        return
    dout, dlse = (xp.asarray(x) for x in upstream(inputs))
    state = {"out": out, "lse": lse, "dlse": dlse.reshape(lse.shape), **arguments, **mod_kwargs}
    for fixed in deterministic:
        grads = cuflash.backward(dout.reshape(out.shape), **state, deterministic=fixed)
        check_gradients(whole, of_numpy, *upstream(inputs), grads)
        for x, side in zip(grads, "qkk", strict=True):
            check_unused(inputs, side, x)
