"""One way to launch: a `Launcher` holds what a call repeats (kernel, grid, packed parameters); a run writes pointers.

Launchers are cached by everything but the pointers, so a repeated call is one dictionary hit, the outputs' allocation,
the pointers and the launch.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
from typing import Any, NamedTuple

from . import device, jit, params
from .errors import ProblemError
from .interop import GpuFramework, cupy
from .log import logger
from .plan import Plan, plan
from .problem import ITEMSIZE, Arguments, ArraySpec, Problem

MAX_LAUNCHERS = 4096  # of all threads; past that the cache starts anew


class Stream(NamedTuple):
    """What CuPy asks of a stream in a launch."""

    ptr: int


class Kernel:
    """A loaded kernel with its launch shape and a parameter buffer of its own; for one thread at a time."""

    def __init__(self, plan: Plan, ordinal: int, packed: bytes) -> None:
        assert plan.variant is not None
        with cupy().device(ordinal):
            self._function = jit.load(plan.variant, ordinal)
        from cupy.cuda.function import CPointer

        self._shape = plan.grid, plan.block
        self._smem_bytes = plan.smem_bytes
        self.buffer = ctypes.create_string_buffer(packed, len(packed))
        self._arguments = (CPointer(ctypes.addressof(self.buffer)),)

    def launch(self, stream: int) -> None:
        """On the current device. The driver copies the parameters before this returns."""
        self._function(*self._shape, self._arguments, self._smem_bytes, Stream(stream))


class Launcher:
    """One problem on one GPU: `run` reads q, k and v there and writes out and lse."""

    def __init__(
        self, problem: Problem, op: str, out_strides: tuple[int, ...], copies: list[bool], extents: list[int]
    ) -> None:
        self.problem = problem
        assert problem.ordinal is not None
        self.ordinal = problem.ordinal
        self.plan = plan(problem, op, device.query(self.ordinal))
        self.out_shape, self.out_dtype, self.lse_shape = problem.out_shape, problem.out_dtype, problem.lse_shape
        self.copies = copies  # of q, k, v, out: whose last dimension has gaps, and which are copied once
        self._extents = extents  # of q, k, v, out: bytes from the first element that are surely its own
        # Bits of a pointer that forbid 16-byte accesses: the low four, or any where the strides forbid them already.
        vectors = [params.allows_vectors(strides, problem.dtype) for strides in problem.strides]
        vectors += [True] * (3 - len(vectors)) + [params.allows_vectors(out_strides, problem.out_dtype)]
        self._misaligned = [15 if allowed else -1 for allowed in vectors]
        self._kernel: Kernel | None = None
        if self.plan.variant is not None and 0 not in self.lse_shape:
            self._kernel = Kernel(self.plan, self.ordinal, params.pack_forward(problem, self.plan, out_strides))
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s: %s", op, str(self.plan).replace("\n", "; "))

    def dense(self, framework: GpuFramework, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs, those with gaps in the last dimension copied."""
        return tuple(framework.dense(x) if copy else x for x, copy in zip(arrays, self.copies, strict=False))

    def check_separate(self, inputs: tuple[int, ...], out: int) -> None:
        """`ProblemError` if the memory of `out` is seen to be that of an input, too."""
        for name, start, extent in zip("qkv", inputs, self._extents, strict=False):
            if out < start + extent and start < out + self._extents[3]:
                raise ProblemError(f"out shares memory with {name}, which is read while out is written; give another")

    def run(self, inputs: tuple[int, ...], out: int, lse: int, stream: int) -> None:
        """Launches with these pointers (q, k, v first) on the current device; nothing to do where no row exists."""
        if self._kernel is None:
            return
        q, k, v = inputs
        at_q, at_k, at_v, at_out = self._misaligned
        aligned = (not q & at_q) | (not k & at_k) << 1 | (not v & at_v) << 2 | (not out & at_out) << 3
        params.write_pointers(self._kernel.buffer, (q, k, v, out, lse), aligned)
        self._kernel.launch(stream)


_launchers: dict[Any, Launcher] = {}


def launcher(framework: GpuFramework, op: str, arrays: tuple[Any, ...], out: Any, arguments: Arguments) -> Launcher:
    """The launcher of a call on GPU arrays; the arguments are judged when it is made, before anything runs."""
    key = framework.key
    try:
        # why: the types, because 1 and True are equal, but not both are a causal or a scale.
        types = type(arguments.causal), type(arguments.softmax_scale)
        cache_key = (op, threading.get_ident(), *map(key, arrays), out is not None and key(out), arguments, types)
        found = _launchers.get(cache_key)
    except TypeError:  # an argument that cannot be hashed is judged anew each time
        return _prepare(framework, op, arrays, out, arguments)
    if found is None:
        found = _prepare(framework, op, arrays, out, arguments)
        if len(_launchers) >= MAX_LAUNCHERS:
            _launchers.clear()
        _launchers[cache_key] = found
    return found


def _prepare(framework: GpuFramework, op: str, arrays: tuple[Any, ...], out: Any, arguments: Arguments) -> Launcher:
    specs = [framework.spec(name, array) for name, array in zip("qkv", arrays, strict=False)]
    copies = [_has_gaps(spec) for spec in specs]
    dense = [_densed(spec) if copy else spec for spec, copy in zip(specs, copies, strict=True)]
    problem = Problem.of_call(dense, arguments)
    out_spec = ArraySpec.dense(problem.out_shape, problem.out_dtype)
    if out is not None:
        given = framework.spec("out", out)
        problem.check_out(given)
        specs.append(given)
        copies.append(_has_gaps(given))
        out_spec = out_spec if copies[-1] else given
    return Launcher(problem, op, out_spec.as_4d().strides, copies, [_extent(spec) for spec in specs])


def _has_gaps(spec: ArraySpec) -> bool:
    return len(spec.shape) > 1 and spec.shape[-1] > 1 and spec.strides[-1] != 1


def _extent(spec: ArraySpec) -> int:
    # A view with gaps is only known to own its first element: what lies between may be another array's.
    dense = spec.strides == _densed(spec).strides
    return math.prod(spec.shape) * ITEMSIZE[spec.dtype] if dense else min(1, math.prod(spec.shape))


def _densed(spec: ArraySpec) -> ArraySpec:
    return ArraySpec.dense(spec.shape, spec.dtype, spec.device, spec.framework)
