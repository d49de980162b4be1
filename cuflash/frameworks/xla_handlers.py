"""The handlers that XLA calls: attention on the buffers of a call frame, by kernels on a GPU and by NumPy on the CPU.

Operands and results are those of the ops, in the same order; what is like lse has an extra last axis of length 1. A
call names its operands, so that an optional one takes its place among the op's by its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays.library import numpy_dtype
from ..errors import UnsupportedError
from ..problem.array_spec import ArraySpec
from ..problem.dtypes import DTYPES
from ..problem.mask import Mask
from ..problem.operands import LSE_AXES, Op
from ..problem.operands import OPS as PUBLIC
from ..problem.options import Options
from ..problem.problem import Problem
from ..runtime import counters, host
from ..runtime.driver import on_device, relaxed_capture
from ..runtime.launch import KEPT, Call, Judged, Kernels
from . import xla_ffi

FORWARD, BACKWARD = "cuflash_forward", "cuflash_backward"  # names of the targets in XLA
OPS = {FORWARD: PUBLIC["forward"], BACKWARD: PUBLIC["backward"]}
_NAMES = {row.xla: name for name, row in DTYPES.items()}
_HEADER = struct.Struct("<3q2d4q")
_FORMAT_VERSION = 3
Shape = tuple[int, ...]


class Static(NamedTuple):
    """The options of a call and the names of its operands. `lo` and `hi` are its `Mask`, normalised for its lengths."""

    lo: int
    hi: int
    softmax_scale: float
    softcap: float
    deterministic: bool = False
    names: tuple[str, ...] = ("q", "k", "v")

    @classmethod
    def of(cls, problem: Problem) -> Static:
        """The options of a problem."""
        options = problem.options
        return cls(problem.mask.lo, problem.mask.hi, problem.softmax_scale, options.softcap, options.deterministic)


class Described(NamedTuple):
    """All of a call but its addresses. It is the call's attribute in XLA, under which its prepared launch is kept."""

    static: Static
    shapes: tuple[Shape, ...] = ()  # of the named operands, all of one rank; none on the CPU
    dtypes: tuple[str, ...] = ()
    workspace: int = 0  # floats of the call's workspace

    def encode(self) -> np.ndarray[Any, Any]:
        """The description as 64-bit numbers, because JAX keeps it in compilation caches and exported programs."""
        counts = self.workspace, len(self.shapes), len(self.shapes[0]) if self.shapes else 0
        *options, names = self.static
        head = _HEADER.pack(_FORMAT_VERSION, *options, *counts)
        codes = [DTYPES[dtype].xla for dtype in self.dtypes]
        tail = " ".join(names).encode()
        tail = tail.ljust(-(-len(tail) // 8) * 8)
        numbers = np.array([*codes, *itertools.chain(*self.shapes)], np.int64)
        return np.frombuffer(bytearray(head + numbers.tobytes() + tail), np.int64)

    @classmethod
    def decode(cls, attribute: bytes) -> Described:
        """The inverse of `encode`; raises UnsupportedError if another version of the library wrote the attribute."""
        if int.from_bytes(attribute[:8], "little") != _FORMAT_VERSION:
            raise UnsupportedError(
                "the program was lowered by another version of cuflash, whose options this one does not read; lower or "
                "export it again"
            )
        _, lo, hi, softmax_scale, softcap, deterministic, workspace, count, rank = _HEADER.unpack_from(attribute)
        numbers = np.frombuffer(attribute, np.int64, count * (1 + rank), _HEADER.size)
        shapes = tuple(map(tuple, numbers[count:].reshape(count, rank).tolist()))
        names = tuple(attribute[_HEADER.size + numbers.nbytes :].decode().split())
        static = Static(lo, hi, softmax_scale, softcap, bool(deterministic), names)
        return cls(static, shapes, tuple(_NAMES[code] for code in numbers[:count].tolist()), workspace)

    def problem(self, target: str, device: str) -> Problem:
        """The problem of the call."""
        op, static, specs = OPS[target], self.static, {}
        for name, shape, dtype in zip(static.names, self.shapes, self.dtypes, strict=True):
            specs[name] = ArraySpec.dense(shape[:-1] if is_like_lse(op, name) else shape, dtype, device, "jax")
        options = Options(static.softmax_scale, softcap=static.softcap, deterministic=static.deterministic)
        problem = Problem.of(op, [specs.get(operand.name) for operand in op.inputs], options)
        return problem._replace(mask=Mask(problem.seqlen_q, problem.seqlen_k, static.lo, static.hi))


def is_like_lse(op: Op, name: str) -> bool:
    """Whether an operand has the axes of lse, and so an extra one in XLA."""
    return op.operands[op.index[name]].axes == LSE_AXES


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
    views = dict(zip(described.static.names, map(_view, operands), strict=True))
    arrays = [views.get(operand.name) for operand in problem.op.inputs]
    for buffer, result in zip(results, host.compute(problem, arrays), strict=True):
        made = _view(buffer)
        made[...] = result.reshape(made.shape)


def run_on_cuda(target: str, call: xla_ffi.Call) -> None:
    """Runs a target's op on the call's buffers, on XLA's stream; backward has its workspace as an extra result."""
    found = _lowered(target, call.attribute(), call.ordinal())
    pointers = call.pointers()
    for place in found.absent:
        pointers = (*pointers[:place], 0, *pointers[place:])
    stream = call.stream()
    if not found.call.aligned.launch(pointers, stream):
        kernels = found.call.for_any()
        found.check_workspace(kernels)
        kernels.launch(pointers, stream)


class Lowered(NamedTuple):
    """What a thread keeps for the calls of a program with one attribute."""

    call: Call
    absent: tuple[int, ...]  # places of the op's inputs that the calls do not have, rising
    workspace_bytes: int  # that the program gives

    def check_workspace(self, needing: Call | Kernels) -> None:
        """Raises UnsupportedError if the program's workspace is smaller than these kernels need."""
        needed = needing.plan.workspace_bytes
        if self.workspace_bytes < needed:
            raise UnsupportedError(
                f"backward takes a workspace of {needed} bytes on this GPU, but the program was lowered with one of "
                f"{self.workspace_bytes}: lower or export it again in a process that sees this GPU"
            )


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


def _lowered(target: str, attribute: bytes, ordinal: int) -> Lowered:
    """What this thread keeps for calls with this attribute."""
    key = threading.get_ident(), target, ordinal, attribute
    found: Lowered | None = KEPT.get(key)
    if found is None:
        described = Described.decode(attribute)
        # why: the kernels were loaded when the program was lowered, unless another process did that (jax.export).
        # Then they are loaded in the first call, which may be captured.
        with relaxed_capture():
            call = _call(target, described, ordinal)
        names = described.static.names
        absent = tuple(place for place, operand in enumerate(OPS[target].inputs) if operand.name not in names)
        found = Lowered(call, absent, 4 * described.workspace)
        found.check_workspace(call)
        KEPT.put(key, found, call.num_bytes)
    return found


def _call(target: str, described: Described, ordinal: int) -> Call:
    return Call(Judged(described.problem(target, f"cuda:{ordinal}")))


def _view(buffer: xla_ffi.Buffer) -> np.ndarray[Any, Any]:
    """A NumPy view of a buffer in host memory."""
    dtype, shape = numpy_dtype(_NAMES[buffer.dtype]), buffer.shape
    size = dtype.itemsize * math.prod(shape)
    if not size:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * size).from_address(buffer.data)
    return np.ndarray(shape, dtype, memory)
