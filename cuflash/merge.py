"""`cuflash.merge_states`: partial attention over disjoint keys becomes attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import device, params, reference
from .errors import ProblemError, UnsupportedError
from .interop import Exchanged, Framework, GpuFramework, as_4d, cupy, frameworks_of
from .launch import Kernels
from .plan import merge_plan
from .problem import check_states


def merge_states(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """(out, lse) of attention over the union of disjoint key sets, from the state over each: FLASH-D's blend.

    outs: arrays (batch, seqlen, heads, head_dim_v), or one array of them along its first axis; lses: as many of
    (batch, heads, seqlen), float32 (float64 with float64 outs). Ranks without batch or heads as in `forward`. out has
    the dtype of outs; it is blended in float32 (float64). A state whose lse is -inf counts for nothing. What ring
    attention and split keys need; keep the states in float32 (`forward(..., out_dtype="float32")`) to round only once.

    Source: FLASH-D, arXiv 2505.14201.
    """
    outs, lses = _states("outs", outs), _states("lses", lses)
    names = (*(f"outs[{i}]" for i in range(len(outs))), *(f"lses[{i}]" for i in range(len(lses))))
    if not outs:
        check_states([], [])
    framework, on_gpu = frameworks_of(names, (*outs, *lses))
    if on_gpu and isinstance(framework, Exchanged):
        exchanged = [[framework.to_cupy(x) for x in states] for states in (outs, lses)]
        out, lse = _on_gpu(cupy(), *exchanged)
        return framework.from_cupy(out), framework.from_cupy(lse)
    if on_gpu:
        assert isinstance(framework, GpuFramework)
        return _on_gpu(framework, outs, lses)
    return _on_host(framework, outs, lses)


def _states(name: str, states: Any) -> list[Any]:
    try:
        return list(states)
    except TypeError:
        raise ProblemError(f"{name} is a {type(states).__name__}; give a sequence of arrays, one a state") from None


def _on_host(framework: Framework, outs: list[Any], lses: list[Any]) -> tuple[Any, Any]:
    specs = _specs(framework, outs, lses)
    b, s, h, _ = check_states(*specs)
    views = [as_4d(framework.to_numpy(x)) for x in outs]
    out, lse = reference.merge_states(views, [framework.to_numpy(x).reshape(b, h, s) for x in lses])
    out_shape, lse_shape = specs[0][0].shape, specs[1][0].shape
    return (
        framework.from_numpy(np.asarray(out).reshape(out_shape), like=outs[0]),
        framework.from_numpy(np.asarray(lse).reshape(lse_shape), like=lses[0]),
    )


def _on_gpu(framework: GpuFramework, outs: list[Any], lses: list[Any]) -> tuple[Any, Any]:
    specs = _specs(framework, outs, lses)
    shape = check_states(*specs)
    ordinal, dtype = framework.ordinal(outs[0]), specs[0][0].dtype
    plan = merge_plan(dtype, shape, device.query(ordinal))
    if len(outs) > params.MAX_MERGE_STATES:
        raise UnsupportedError(
            f"{len(outs)} states; one call merges at most {params.MAX_MERGE_STATES} on a GPU. Merge groups of them, "
            "then the results (in float32, to round only once)."
        )
    with framework.device(ordinal):
        outs, lses = [framework.dense(x) for x in outs], [framework.dense(x) for x in lses]
        out = framework.empty(specs[0][0].shape, dtype, ordinal)
        lse = framework.empty(specs[1][0].shape, "float32", ordinal)
        if 0 not in shape:
            pointer = framework.pointer
            parameters = params.merge_parameters(
                list(map(pointer, outs)), list(map(pointer, lses)), pointer(out), pointer(lse), shape, dtype
            )
            Kernels(plan, ordinal, parameters).launch((), framework.stream(ordinal))
    return out, lse


def _specs(framework: Framework, outs: list[Any], lses: list[Any]) -> tuple[list[Any], list[Any]]:
    return (
        [framework.spec(f"outs[{i}]", x) for i, x in enumerate(outs)],
        [framework.spec(f"lses[{i}]", x) for i, x in enumerate(lses)],
    )
