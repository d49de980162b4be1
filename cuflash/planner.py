"""`cuflash.plan`: what a call would run, without running it."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from . import device as devices
from .device import Device
from .errors import ProblemError
from .interop import framework_of
from .mask import WindowSize
from .plan import plan as make_plan
from .problem import Arguments, ArraySpec, Problem
from .variant import Plan

OPS = ("forward", "lse", "backward")


def plan(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    op: str = "forward",
    deterministic: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
    algorithm: str = "flash2",
    out_dtype: str | None = None,
) -> Plan:
    """Kernels, tiles, grids and memory of a call; `print` it, or read its fields.

    q, k, v: arrays as in `forward`, or their shapes as tuples together with `dtype` ("float16", "bfloat16", "float32").
    op: "forward", "lse" (without v) or "backward" (plain or `deterministic`). device: "cpu", "cuda:0", or an
    architecture such as "sm_90", which needs no GPU; default: where the arrays are, and for shapes the first GPU, or
    the CPU where there is none.
    """
    if op not in OPS:
        raise ProblemError(f"op={op!r} is not known; give one of {', '.join(OPS)}")
    if op == "lse" and v is not None:
        raise ProblemError("op='lse' takes q and k alone; leave v=None")
    if op != "forward" and (algorithm != "flash2" or out_dtype is not None):
        raise ProblemError(f"op={op!r} takes neither algorithm nor out_dtype; leave them out")
    if not isinstance(deterministic, (bool, np.bool_)) or (deterministic and op != "backward"):
        raise ProblemError(f"deterministic={deterministic!r}, op={op!r}; give True or False, True only for backward")
    given = {"q": q, "k": k} | ({} if op == "lse" else {"v": v})
    arguments = Arguments(softmax_scale, causal, window_size, diagonal_offset, softcap, algorithm, out_dtype)
    specs = [_spec(name, operand, dtype) for name, operand in given.items()]
    problem = Problem.of_call(specs, arguments)
    return make_plan(problem, op, _device(device, problem, isinstance(q, tuple)), bool(deterministic))


def _spec(name: str, operand: Any, dtype: str | None) -> ArraySpec:
    if not isinstance(operand, tuple):
        spec = framework_of(name, operand).spec(name, operand)
        if dtype is not None:
            raise ProblemError(f"dtype={dtype!r} goes with shapes; {name} is an array and has its own")
        return spec
    if dtype is None:
        raise ProblemError(f"{name} is the shape {operand}; give dtype= too, such as dtype='bfloat16'")
    if not all(isinstance(length, Integral) and int(length) >= 0 for length in operand):
        raise ProblemError(f"{name} has shape {operand}; give lengths that are integers of 0 and more")
    return ArraySpec.dense(operand, dtype)


def _device(device: str | None, problem: Problem, shapes_only: bool) -> Device | None:
    if device is None:
        device = problem.device
        if shapes_only and devices.count():
            device = "cuda:0"
    return None if device == "cpu" else devices.of_name(device)
