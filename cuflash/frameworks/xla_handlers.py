"""The handlers that XLA calls: attention on the buffers of a call frame, by kernels on a GPU and by NumPy on the CPU.

Operands and results are those of the ops, in the same order; lse and dlse have an extra last axis of length 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays.library import bfloat16
from ..errors import UnsupportedError
from ..problem.array_spec import ArraySpec
from ..problem.dtypes import DTYPES
from ..problem.mask import Mask
from ..problem.operands import BACKWARD as BACKWARD_OP
from ..problem.operands import FORWARD as FORWARD_OP
from ..problem.options import Options
from ..problem.problem import Problem
from ..runtime import counters, host
from ..runtime.driver import on_device, relaxed_capture
from ..runtime.launch import KEPT, Call, Judged, Prepared
from . import xla_ffi

FORWARD, BACKWARD = "cuflash_forward", "cuflash_backward"  # names of the targets in XLA
OPS = {FORWARD: FORWARD_OP, BACKWARD: BACKWARD_OP}
_NAMES = {row.xla: name for name, row in DTYPES.items()}
_HEADER = struct.Struct("<3q2d4q")
_FORMAT_VERSION = 2
Shape = tuple[int, ...]


class Static(NamedTuple):
    """The options of a call. `lo` and `hi` are its `Mask`, normalised for its lengths."""

    lo: int
    hi: int
    softmax_scale: float
    softcap: float
    deterministic: bool = False

    @classmethod
    def of(cls, problem: Problem) -> Static:
        """The options of a problem."""
        options = problem.options
        return cls(problem.mask.lo, problem.mask.hi, problem.softmax_scale, options.softcap, options.deterministic)

    def problem(self, target: str, specs: Sequence[ArraySpec]) -> Problem:
        """The problem with these options and arrays."""
        options = Options(self.softmax_scale, softcap=self.softcap, deterministic=self.deterministic)
        problem = Problem.of(OPS[target], specs, options)
        return problem._replace(mask=Mask(problem.seqlen_q, problem.seqlen_k, self.lo, self.hi))


class Described(NamedTuple):
    """All of a call but its addresses. It is the call's attribute in XLA, under which its prepared launch is kept."""

    static: Static
    shapes: tuple[Shape, ...] = ()  # of the inputs, in the op's order and all of one rank; none on the CPU
    dtypes: tuple[str, ...] = ()
    workspace: int = 0  # floats of the call's workspace

    def encode(self) -> np.ndarray[Any, Any]:
        """The description as 64-bit numbers, because JAX keeps it in compilation caches and exported programs."""
        counts = self.workspace, len(self.shapes), len(self.shapes[0]) if self.shapes else 0
        head = np.frombuffer(_HEADER.pack(_FORMAT_VERSION, *self.static, *counts), np.int64)
        codes = [DTYPES[dtype].xla for dtype in self.dtypes]
        return np.concatenate([head, np.array(codes, np.int64), np.array(self.shapes, np.int64).ravel()])

    @classmethod
    def decode(cls, attribute: bytes) -> Described:
        """The inverse of `encode`; raises UnsupportedError if another version of the library wrote the attribute."""
        if int.from_bytes(attribute[:8], "little") != _FORMAT_VERSION:
            raise UnsupportedError(
                "the program was lowered by another version of cuflash, whose options this one does not read; lower or "
                "export it again"
            )
        _, lo, hi, softmax_scale, softcap, deterministic, workspace, count, rank = _HEADER.unpack_from(attribute)
        rest = np.frombuffer(attribute, np.int64, offset=_HEADER.size)
        shapes = tuple(map(tuple, rest[count:].reshape(count, rank).tolist()))
        static = Static(lo, hi, softmax_scale, softcap, bool(deterministic))
        return cls(static, shapes, tuple(_NAMES[code] for code in rest[:count].tolist()), workspace)

    def problem(self, target: str, device: str) -> Problem:
        """The problem of the call."""
        specs = []
        for operand, shape, dtype in zip(OPS[target].inputs, self.shapes, self.dtypes, strict=False):
            specs.append(ArraySpec.dense(shape[:-1] if len(operand.axes) == 3 else shape, dtype, device, "jax"))
        return self.static.problem(target, specs)


class Activity(contextlib.ContextDecorator):
    """Tells whether any of the functions that it decorates runs, in whatever thread."""

    def __init__(self) -> None:
        self._lock, self._running, self._ended = threading.Lock(), 0, -math.inf

    def __enter__(self) -> None:
        with self._lock:
            self._running += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._running, self._ended = self._running - 1, time.monotonic()

    def wait(self, quiet: float) -> None:
        """Waits until none of them has run for `quiet` seconds."""
        while self._running or time.monotonic() < self._ended + quiet:
            time.sleep(quiet / 10)


on_cpu = Activity()


@on_cpu
def run_on_cpu(target: str, call: xla_ffi.Call) -> None:
    """Runs the op of a target on the call's buffers."""
    operands, results = call.buffers()
    described = Described.decode(call.attribute())
    shapes, dtypes = tuple(x.shape for x in operands), tuple(_NAMES[x.dtype] for x in operands)
    problem = described._replace(shapes=shapes, dtypes=dtypes).problem(target, "cpu")
    for buffer, result in zip(results, host.compute(problem, [*map(_view, operands)]), strict=True):
        made = _view(buffer)
        made[...] = result.reshape(made.shape)


def run_on_cuda(target: str, call: xla_ffi.Call) -> None:
    """Runs a target's op on the call's buffers, on XLA's stream; backward has its workspace as an extra result."""
    attribute = call.attribute()
    found = _call_of(target, attribute, call.ordinal())
    pointers = call.pointers()
    if target == BACKWARD and len(pointers) == _WITHOUT_DLSE:
        pointers = (*pointers[:6], 0, *pointers[6:])
    prepared = found.prepared(pointers)
    if prepared.plan is not found.plan:
        _check_workspace(Described.decode(attribute), prepared)
    prepared.kernels.launch(pointers, call.stream())


_WITHOUT_DLSE = len(BACKWARD_OP.operands)  # pointers of backward: one fewer without dlse, one more for the workspace


def load(target: str, described: Described, ordinals: Sequence[int]) -> int:
    """Compiles and loads what such calls launch on these GPUs; returns the floats of the largest workspace.

    A GPU that cannot run them is passed over as long as another one can; a call on that GPU raises the reason.
    """
    workspace, loaded, refused = 0, 0, None
    for ordinal in ordinals:
        try:
            found = _call(target, described, ordinal)
        except UnsupportedError as error:
            refused = error
            continue
        loaded += 1
        workspace = max(workspace, found.plan.workspace_bytes // 4)
        if any(launch.counted for launch in found.plan.launches):
            with on_device(ordinal):
                counters.reserve(ordinal)
    if refused is not None and not loaded:
        raise refused
    return workspace


def _call_of(target: str, attribute: bytes, ordinal: int) -> Call:
    """The launch that this thread keeps for calls with this attribute."""
    key = threading.get_ident(), target, ordinal, attribute
    found: Call | None = KEPT.get(key)
    if found is None:
        described = Described.decode(attribute)
        # why: the kernels were loaded when the program was lowered, unless another process did that (jax.export).
        # Then they are loaded in the first call, which may be captured.
        with relaxed_capture():
            found = _call(target, described, ordinal)
        _check_workspace(described, found)
        KEPT.put(key, found, found.num_bytes)
    return found


def _call(target: str, described: Described, ordinal: int) -> Call:
    return Call(Judged(described.problem(target, f"cuda:{ordinal}")))


def _check_workspace(described: Described, found: Call | Prepared) -> None:
    """Raises UnsupportedError if the program's workspace is smaller than these kernels need."""
    needed, there = found.plan.workspace_bytes, 4 * described.workspace
    if there < needed:
        raise UnsupportedError(
            f"backward takes a workspace of {needed} bytes on this GPU, but the program was lowered with one of "
            f"{there}: lower or export it again in a process that sees this GPU"
        )


def _view(buffer: xla_ffi.Buffer) -> np.ndarray[Any, Any]:
    """A NumPy view of a buffer in host memory."""
    name, shape = _NAMES[buffer.dtype], buffer.shape
    dtype = bfloat16() if name == "bfloat16" else np.dtype(name)
    size = dtype.itemsize * math.prod(shape)
    if not size:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * size).from_address(buffer.data)
    return np.ndarray(shape, dtype, memory)
