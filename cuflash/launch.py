"""One way to launch: a `Launcher` holds what a call repeats (kernel, grid, packed parameters); a run writes pointers.

Launchers are cached by everything but the pointers, and parameters by those, so a repeated call is two dictionary hits,
the outputs' allocation and the launch.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from . import counters, device, jit, params
from .driver import current_device, on_device, relaxed_capture
from .errors import ProblemError
from .interop import GpuFramework
from .log import logger
from .plan import plan
from .problem import ITEMSIZE, Arguments, ArraySpec, Problem
from .tiles_sm90 import allows_tma
from .variant import Plan

MAX_LAUNCHERS = 4096  # of all threads; past that the cache starts anew
MAX_WRITTEN = 64  # sets of pointers of a launcher, such as the layers of a model; past that the oldest is overwritten


class Stream(NamedTuple):
    """What CuPy asks of a stream in a launch."""

    ptr: int


_stream = functools.lru_cache(Stream)  # why: to make one takes longer than to find it


class Kernels:
    """Loaded kernels of a plan with parameters of their own; for one thread at a time."""

    def __init__(self, plan: Plan, ordinal: int, parameters: params.Parameters) -> None:
        self._ordinal, self.parameters, self._parts = ordinal, parameters, plan.workspace
        self._counted = plan.counted and isinstance(parameters, params.WarpgroupParameters)
        self._written: dict[tuple[int, ...], tuple[Any, Any]] = {}  # by pointers: the argument of a launch, and its own
        self._launches = []
        with on_device(ordinal):
            for launch in plan.launches:
                if launch.num_blocks:
                    variant = launch.variant
                    shape = (launch.num_blocks, 1, 1), (variant.num_threads, 1, 1)
                    self._launches.append((jit.load(variant, ordinal), *shape, variant.smem_bytes))

    def launch(self, pointers: tuple[int, ...], stream: int) -> None:
        """In order, on this stream of the GPU. The driver copies the parameters before it returns.

        The pointers are in the order of the parameters, that of the workspace last where the plan has one.
        """
        if current_device() != self._ordinal:
            with on_device(self._ordinal):
                self._launch(pointers, stream)
        else:
            self._launch(pointers, stream)

    def _launch(self, pointers: tuple[int, ...], stream: int) -> None:
        arguments, parameters = self._written.get(pointers) or self._write(pointers)
        if self._counted:
            parameters.count_with(counters.counter(self._ordinal, stream))
        on = _stream(stream)
        for function, grid, block, smem_bytes in self._launches:
            function(grid, block, arguments, smem_bytes, on)

    def _write(self, pointers: tuple[int, ...]) -> tuple[Any, Any]:
        from cupy.cuda.function import CPointer

        written = self._written
        if len(written) >= MAX_WRITTEN:
            ready = written.pop(next(iter(written)))
        else:
            parameters = self.parameters.copy() if written else self.parameters
            ready = (CPointer(parameters.address),), parameters
        whole = pointers
        if self._parts:
            *operands, workspace = pointers
            whole = *operands, *(workspace + begin if begin >= 0 else 0 for begin in self._parts)
        ready[1].write(whole)
        written[pointers] = ready
        return ready


class Launcher:
    """One problem on one GPU: `run` reads q, k and v there and writes out and lse."""

    def __init__(self, problem: Problem, op: str, out_spec: ArraySpec, copies: list[bool], extents: list[int]) -> None:
        self.problem = problem
        assert problem.ordinal is not None
        self._op, self.ordinal = op, problem.ordinal
        self.out_shape, self.out_dtype, self.lse_shape = problem.out_shape, problem.out_dtype, problem.lse_shape
        self.copies = copies  # of q, k, v, out: whose last dimension has gaps, and which are copied once
        self._extents = extents  # of q, k, v, out: bytes from the first element that are surely its own
        out = out_spec.as_4d()
        self._out_strides = out.strides
        allowed = op == "lse" or allows_tma(out.shape, out.strides, ITEMSIZE[out.dtype])
        self.plan, self._kernels = self._prepared(aligned=allowed)
        self._needs_alignment = self.plan.variant is not None and self.plan.variant.of_warpgroups
        self._for_any: Kernels | None = None  # alignment, made when first needed

    def _prepared(self, aligned: bool) -> tuple[Plan, Kernels | None]:
        made = plan(self.problem, self._op, device.query(self.ordinal), aligned=aligned)
        log_plan(self._op, made)
        if not made.launches or 0 in self.lse_shape:
            return made, None
        parameters = params.forward_parameters(self.problem, made, self._out_strides)
        return made, Kernels(made, self.ordinal, parameters)

    def check_separate(self, inputs: tuple[int, ...], out: int) -> None:
        """`ProblemError` if the memory of `out` is seen to be that of an input, too."""
        for name, start, extent in zip("qkv", inputs, self._extents, strict=False):
            if out < start + extent and start < out + self._extents[3]:
                raise ProblemError(f"out shares memory with {name}, which is read while out is written; give another")

    def run(self, pointers: tuple[int, ...], stream: int) -> None:
        """Launches with the pointers of q, k, v, out and lse, 0 for what is not there; nothing where no row exists."""
        kernels = self._kernels
        if kernels is None:
            return
        if self._needs_alignment and (pointers[0] | pointers[1] | pointers[2] | pointers[3]) & 15:
            if self._for_any is None:
                with relaxed_capture():  # why: perhaps it was captured with other pointers before
                    _, self._for_any = self._prepared(aligned=False)
                assert self._for_any is not None
            kernels = self._for_any
        kernels.launch(pointers, stream)


_launchers: dict[Any, Any] = {}
Made = TypeVar("Made")


def launcher(framework: GpuFramework, op: str, arrays: tuple[Any, ...], out: Any, arguments: Arguments) -> Launcher:
    """The launcher of a call on GPU arrays; the arguments are judged when it is made, before anything runs."""
    key = call_key(framework, op, (*arrays, out), arguments)
    return kept(key, lambda: _prepare(framework, op, arrays, out, arguments))


def call_key(framework: GpuFramework, op: Hashable, arrays: tuple[Any, ...], arguments: Arguments) -> tuple[Any, ...]:
    """The key of a call with such arrays (some may be None) and arguments."""
    key = framework.key
    return op, arguments, arguments.types(), *[None if array is None else key(array) for array in arrays]


def kept(key: Hashable, make: Callable[[], Made]) -> Made:
    """What `make` gives, kept for calls of this thread with an equal key."""
    # why not threading.local: it forgets a thread that XLA or autograd began after each call of Python.
    key = threading.get_ident(), key
    try:
        found: Made | None = _launchers.get(key)
    except TypeError:  # an argument that cannot be hashed is judged anew each time
        return make()
    if found is None:
        found = make()
        if len(_launchers) >= MAX_LAUNCHERS:
            _launchers.clear()
        _launchers[key] = found
    return found


def dense(framework: GpuFramework, arrays: tuple[Any, ...], copies: list[bool]) -> tuple[Any, ...]:
    """The inputs, those that the kernels cannot read as they are copied."""
    return tuple(framework.dense(x) if copy else x for x, copy in zip(arrays, copies, strict=False))


def log_plan(op: str, plan: Plan) -> None:
    """One line of `CUFLASH_LOG`."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s: %s", op, str(plan).replace("\n", "; "))


def _prepare(framework: GpuFramework, op: str, arrays: tuple[Any, ...], out: Any, arguments: Arguments) -> Launcher:
    specs = [framework.spec(name, array) for name, array in zip("qkv", arrays, strict=False)]
    copies = [has_gaps(spec) for spec in specs]
    read = [densed(spec) if copy else spec for spec, copy in zip(specs, copies, strict=True)]
    problem = Problem.of_call(read, arguments)
    out_spec = ArraySpec.dense(problem.out_shape, problem.out_dtype)
    if out is not None:
        given = framework.spec("out", out)
        problem.check_out(given)
        specs.append(given)
        copies.append(has_gaps(given))
        out_spec = out_spec if copies[-1] else given
    return Launcher(problem, op, out_spec, copies, [_extent(spec) for spec in specs])


def has_gaps(spec: ArraySpec) -> bool:
    """Whether the last dimension is not contiguous: the kernels cannot read such an operand, so it is copied."""
    return len(spec.shape) > 1 and spec.shape[-1] > 1 and spec.strides[-1] != 1


def _extent(spec: ArraySpec) -> int:
    # A view with gaps is only known to own its first element: what lies between may be another array's.
    whole = spec.strides == densed(spec).strides
    return math.prod(spec.shape) * ITEMSIZE[spec.dtype] if whole else min(1, math.prod(spec.shape))


def densed(spec: ArraySpec) -> ArraySpec:
    """What a contiguous copy is."""
    return ArraySpec.dense(spec.shape, spec.dtype, spec.device, spec.framework)
