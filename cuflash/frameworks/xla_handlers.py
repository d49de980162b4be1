"""What XLA calls: attention on the buffers of a call frame, by the kernels on a GPU and by NumPy on the CPU.

Operands and results are named as in `cuflash.backward`; lse and dlse have a last axis of length 1 more.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .. import counters, reference
from ..backward import NAMES, BackwardLauncher
from ..driver import on_device, relaxed_capture
from ..errors import UnsupportedError
from ..interop import as_4d, bfloat16
from ..launch import Launcher, kept
from ..mask import Mask
from ..problem import Arguments, ArraySpec, Problem
from . import xla_ffi

FORWARD, BACKWARD = "cuflash_forward", "cuflash_backward"  # the targets
_DTYPES = {10: "float16", 11: "float32", 12: "float64", 16: "bfloat16"}  # XLA_FFI_DataType
_CODES = {name: code for code, name in _DTYPES.items()}
_HEADER = struct.Struct("<3q2d4q")
_FORMAT_VERSION = 2
Shape = tuple[int, ...]


class Options(NamedTuple):
    """What a call says beside its arrays. The mask is the normalised one of its lengths."""

    lo: int
    hi: int
    softmax_scale: float
    softcap: float
    deterministic: bool = False

    @classmethod
    def of(cls, problem: Problem, deterministic: bool) -> Options:
        """Those of a problem."""
        return cls(problem.mask.lo, problem.mask.hi, problem.softmax_scale, problem.softcap, deterministic)

    def problem(self, specs: dict[str, ArraySpec]) -> Problem:
        """The problem of these arrays: q, k, v, or all of backward."""
        arguments = Arguments(self.softmax_scale, softcap=self.softcap)
        of_backward = "dout" in specs
        problem = (
            Problem.of_gradients(specs, arguments) if of_backward else Problem.of_call([*specs.values()], arguments)
        )
        return replace(problem, mask=Mask(problem.seqlen_q, problem.seqlen_k, self.lo, self.hi))


class Described(NamedTuple):
    """All that a call of a program says but addresses: its attribute, by which its launcher is found at once."""

    options: Options
    shapes: tuple[Shape, ...] = ()  # of the operands, in the order of NAMES, all of one rank; on the CPU the buffers'
    dtypes: tuple[str, ...] = ()
    workspace: int = 0  # floats that it has

    def encode(self) -> np.ndarray[Any, Any]:
        """As plain values, for it is kept in compilation caches and exported programs."""
        counts = self.workspace, len(self.shapes), len(self.shapes[0]) if self.shapes else 0
        head = np.frombuffer(_HEADER.pack(_FORMAT_VERSION, *self.options, *counts), np.int64)
        codes = [_CODES[dtype] for dtype in self.dtypes]
        return np.concatenate([head, np.array(codes, np.int64), np.array(self.shapes, np.int64).ravel()])

    @classmethod
    def decode(cls, attribute: bytes) -> Described:
        """`UnsupportedError` if another version of the library wrote it."""
        if int.from_bytes(attribute[:8], "little") != _FORMAT_VERSION:
            raise UnsupportedError(
                "the program was lowered by another version of cuflash, whose options this one does not read; lower or "
                "export it again"
            )
        _, lo, hi, softmax_scale, softcap, deterministic, workspace, count, rank = _HEADER.unpack_from(attribute)
        rest = np.frombuffer(attribute, np.int64, offset=_HEADER.size)
        shapes = tuple(map(tuple, rest[count:].reshape(count, rank).tolist()))
        options = Options(lo, hi, softmax_scale, softcap, bool(deterministic))
        return cls(options, shapes, tuple(_DTYPES[code] for code in rest[:count].tolist()), workspace)

    def specs(self, device: str) -> dict[str, ArraySpec]:
        """The operands as the library judges them."""
        specs = {}
        for name, shape, dtype in zip(NAMES, self.shapes, self.dtypes, strict=False):
            specs[name] = ArraySpec.dense(shape[:-1] if "lse" in name else shape, dtype, device, "jax")
        return specs


class Activity(contextlib.ContextDecorator):
    """Whether functions run, in whatever threads."""

    def __init__(self) -> None:
        self._lock, self._running, self._ended = threading.Lock(), 0, -math.inf

    def __enter__(self) -> None:
        with self._lock:
            self._running += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._running, self._ended = self._running - 1, time.monotonic()

    def wait(self, quiet: float) -> None:
        """Until none has run for so many seconds."""
        while self._running or time.monotonic() < self._ended + quiet:
            time.sleep(quiet / 10)


on_cpu = Activity()


@on_cpu
def forward_on_cpu(call: xla_ffi.Call) -> None:
    """q, k, v → out, lse."""
    operands, results = call.buffers()
    arrays = [_view(buffer) for buffer in operands]
    problem = _problem_on_cpu(call, operands)
    for buffer, result in zip(results, reference.forward(problem, *map(as_4d, arrays)), strict=True):
        target = _view(buffer)
        target[...] = result.reshape(target.shape)


@on_cpu
def backward_on_cpu(call: xla_ffi.Call) -> None:
    """q, k, v, dout, out, lse and perhaps dlse → dq, dk, dv."""
    operands, results = call.buffers()
    arrays = [_view(buffer) for buffer in operands]
    problem = _problem_on_cpu(call, operands)
    q, k, v, dout, out = map(as_4d, arrays[:5])
    lses = [x.reshape(problem.batch, problem.heads_q, problem.seqlen_q) for x in arrays[5:]]
    for buffer, result in zip(results, reference.backward(problem, dout, q, k, v, out, *lses), strict=True):
        target = _view(buffer)
        target[...] = result.reshape(target.shape)


def forward_on_cuda(call: xla_ffi.Call) -> None:
    """q, k, v → out, lse, on XLA's stream."""
    _launcher_of(FORWARD, call.attribute(), call.ordinal()).run(call.pointers(), call.stream())


def backward_on_cuda(call: xla_ffi.Call) -> None:
    """q, k, v, dout, out, lse and perhaps dlse → dq, dk, dv and a workspace, on XLA's stream."""
    ordinal, attribute = call.ordinal(), call.attribute()
    found = _launcher_of(BACKWARD, attribute, ordinal)
    q, k, v, dout, out, lse, *dlse, dq, dk, dv, workspace = call.pointers()
    if found.needs_alignment and (q | k | v | dout) & 15:
        found = _launcher_of(BACKWARD, attribute, ordinal, aligned=False)
    found.run((q, k, v, dout, out, dq, dk, dv, lse, dlse[0] if dlse else 0, workspace), call.stream())


def load(target: str, described: Described, ordinals: Sequence[int]) -> int:
    """Compiles and loads on these GPUs what such calls launch; floats of the largest workspace.

    GPUs that cannot run it do not matter as long as one can: a call there says so.
    """
    workspace, loaded, refused = 0, 0, None
    for ordinal in ordinals:
        try:
            found = _launcher(target, described, ordinal)
        except UnsupportedError as error:
            refused = error
            continue
        loaded += 1
        if isinstance(found, BackwardLauncher):
            workspace = max(workspace, *found.workspace)
        if found.plan.counted:
            with on_device(ordinal):
                counters.reserve(ordinal)
    if refused is not None and not loaded:
        raise refused
    return workspace


def _launcher_of(target: str, attribute: bytes, ordinal: int, aligned: bool = True) -> Any:
    """The launcher of calls with this attribute."""

    def make() -> Launcher | BackwardLauncher:
        described = Described.decode(attribute)
        # why: the kernels were loaded when the program was lowered, unless that was in another process (jax.export).
        # Then this may be the first call, and within a capture.
        with relaxed_capture():
            found = _launcher(target, described, ordinal, aligned)
        if isinstance(found, BackwardLauncher) and described.workspace < found.workspace[0]:
            raise UnsupportedError(
                f"backward takes a workspace of {4 * found.workspace[0]} bytes on this GPU, but the program was "
                f"lowered with one of {4 * described.workspace}: lower or export it again in a process that sees this "
                "GPU"
            )
        return found

    return kept((target, aligned, ordinal, attribute), make)


def _launcher(target: str, described: Described, ordinal: int, aligned: bool = True) -> Launcher | BackwardLauncher:
    specs, options = described.specs(f"cuda:{ordinal}"), described.options
    problem, copies = options.problem(specs), [False] * len(specs)
    if target == BACKWARD:
        return BackwardLauncher(problem, specs, copies, options.deterministic, aligned)
    out = ArraySpec.dense(problem.out_shape, problem.out_dtype)
    return Launcher(problem, "forward", out, copies, extents=[])


def _problem_on_cpu(call: xla_ffi.Call, operands: Sequence[xla_ffi.Buffer]) -> Problem:
    shapes, dtypes = tuple(x.shape for x in operands), tuple(_DTYPES[x.dtype] for x in operands)
    described = Described.decode(call.attribute())._replace(shapes=shapes, dtypes=dtypes)
    return described.options.problem(described.specs("cpu"))


def _view(buffer: xla_ffi.Buffer) -> np.ndarray[Any, Any]:
    """A buffer in host memory."""
    name, shape = _DTYPES[buffer.dtype], buffer.shape
    dtype = bfloat16() if name == "bfloat16" else np.dtype(name)
    size = dtype.itemsize * math.prod(shape)
    if not size:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * size).from_address(buffer.data)
    return np.ndarray(shape, dtype, memory)
