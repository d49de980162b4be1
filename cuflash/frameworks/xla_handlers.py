"""What XLA calls: attention on the buffers of a call frame, by the kernels on a GPU and by NumPy on the CPU.

Operands and results are named as in `cuflash.backward`; lse and dlse have a last axis of length 1 more.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .. import counters, reference
from ..backward import NAMES, BackwardLauncher
from ..driver import relaxed_capture
from ..errors import UnsupportedError
from ..interop import as_4d, bfloat16, cupy
from ..launch import MAX_LAUNCHERS, Launcher
from ..mask import Mask
from ..problem import Arguments, ArraySpec, Problem
from . import xla_ffi

FORWARD, BACKWARD = "cuflash_forward", "cuflash_backward"  # the targets
_DTYPES = {10: "float16", 11: "float32", 12: "float64", 16: "bfloat16"}  # XLA_FFI_DataType
_FORMAT = struct.Struct("<3q2dq")
_FORMAT_VERSION = 1


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

    def encode(self) -> np.ndarray[Any, Any]:
        """As the attribute of a call: plain values, for it is kept in compilation caches and exported programs."""
        return np.frombuffer(_FORMAT.pack(_FORMAT_VERSION, *self), np.int64)

    @classmethod
    def decode(cls, attribute: bytes) -> Options:
        """Those of an attribute; `UnsupportedError` if another version of the library wrote it."""
        if len(attribute) != _FORMAT.size or int.from_bytes(attribute[:8], "little") != _FORMAT_VERSION:
            raise UnsupportedError(
                "the program was lowered by another version of cuflash, whose options this one does not read; lower or "
                "export it again"
            )
        _, lo, hi, softmax_scale, softcap, deterministic = _FORMAT.unpack(attribute)
        return cls(lo, hi, softmax_scale, softcap, bool(deterministic))

    def problem(self, specs: dict[str, ArraySpec]) -> Problem:
        """The problem of these arrays: q, k, v, or all of backward."""
        arguments = Arguments(self.softmax_scale, softcap=self.softcap)
        of_backward = "dout" in specs
        problem = (
            Problem.of_gradients(specs, arguments) if of_backward else Problem.of_call([*specs.values()], arguments)
        )
        return replace(problem, mask=Mask(problem.seqlen_q, problem.seqlen_k, self.lo, self.hi))


def specs_of(shapes: Iterable[Sequence[int]], dtypes: Iterable[str], device: str) -> dict[str, ArraySpec]:
    """Operands as the library judges them, in the order of NAMES."""
    specs = {}
    for name, shape, dtype in zip(NAMES, shapes, dtypes, strict=False):
        specs[name] = ArraySpec.dense(tuple(shape)[: -1 if "lse" in name else None], dtype, device, "jax")
    return specs


def forward_on_cpu(call: xla_ffi.Call) -> None:
    """q, k, v → out, lse."""
    arrays = [_view(buffer) for buffer in call.operands]
    problem = _problem_on_cpu(call)
    for buffer, result in zip(call.results, reference.forward(problem, *map(as_4d, arrays)), strict=True):
        target = _view(buffer)
        target[...] = result.reshape(target.shape)


def backward_on_cpu(call: xla_ffi.Call) -> None:
    """q, k, v, dout, out, lse and perhaps dlse → dq, dk, dv."""
    arrays = [_view(buffer) for buffer in call.operands]
    problem = _problem_on_cpu(call)
    q, k, v, dout, out = map(as_4d, arrays[:5])
    lses = [x.reshape(problem.batch, problem.heads_q, problem.seqlen_q) for x in arrays[5:]]
    for buffer, result in zip(call.results, reference.backward(problem, dout, q, k, v, out, *lses), strict=True):
        target = _view(buffer)
        target[...] = result.reshape(target.shape)


def forward_on_cuda(call: xla_ffi.Call) -> None:
    """q, k, v → out, lse, on XLA's stream."""
    ordinal = call.ordinal()
    found = _launcher_of(call, FORWARD, ordinal)
    out, lse = (x.data or 0 for x in call.results)
    with cupy().device(ordinal):
        found.run(tuple(x.data or 0 for x in call.operands), out, lse, call.stream())


def backward_on_cuda(call: xla_ffi.Call) -> None:
    """q, k, v, dout, out, lse and perhaps dlse → dq, dk, dv and a workspace, on XLA's stream."""
    ordinal = call.ordinal()
    found = _launcher_of(call, BACKWARD, ordinal)
    q, k, v, dout, out, lse, *dlse = (x.data or 0 for x in call.operands)
    if found.needs_alignment and any(pointer & 15 for pointer in (q, k, v, dout)):
        found = _launcher_of(call, BACKWARD, ordinal, aligned=False)
    *gradients, workspace = (x.data or 0 for x in call.results)
    given = math.prod(xla_ffi.shape(call.results[-1]))
    if given < found.workspace[0]:
        raise UnsupportedError(
            f"backward takes a workspace of {4 * found.workspace[0]} bytes on this GPU, but the program was lowered "
            f"with one of {4 * given}: lower or export it again in a process that sees this GPU"
        )
    with cupy().device(ordinal):
        found.run((q, k, v, dout, out, *gradients), lse, dlse[0] if dlse else 0, workspace, call.stream())


def load(target: str, options: Options, specs: dict[str, ArraySpec], ordinals: Sequence[int]) -> int:
    """Compiles and loads on these GPUs what calls of such operands launch; floats of the largest workspace.

    GPUs that cannot run it do not matter as long as one can: a call there says so.
    """
    workspace, loaded, refused = 0, 0, None
    for ordinal in ordinals:
        on_gpu = {name: spec._replace(device=f"cuda:{ordinal}") for name, spec in specs.items()}
        try:
            found = _launcher(target, options, on_gpu)
        except UnsupportedError as error:
            refused = error
            continue
        loaded += 1
        if isinstance(found, BackwardLauncher):
            workspace = max(workspace, *found.workspace)
        if found.plan.counted:
            with cupy().device(ordinal):
                counters.reserve(ordinal)
    if refused is not None and not loaded:
        raise refused
    return workspace


_launchers: dict[Any, Any] = {}


def _launcher_of(call: xla_ffi.Call, target: str, ordinal: int, aligned: bool = True) -> Any:
    """The launcher of such calls, of this thread's own: what it packs is not to be shared."""
    q, k, v = call.operands[:3]
    shapes, attribute = tuple(map(xla_ffi.shape, (q, k, v))), call.attribute()
    key = target, aligned, ordinal, threading.get_ident(), len(call.operands), q.dtype, shapes, attribute
    found = _launchers.get(key)
    if found is None:
        specs = _specs(call, f"cuda:{ordinal}")
        # why: the kernels were loaded when the program was lowered, unless that was in another process (jax.export).
        # Then this may be the first call, and within a capture.
        with relaxed_capture():
            found = _launcher(target, Options.decode(attribute), specs, aligned)
        if len(_launchers) >= MAX_LAUNCHERS:
            _launchers.clear()
        _launchers[key] = found
    return found


def _launcher(
    target: str, options: Options, specs: dict[str, ArraySpec], aligned: bool = True
) -> Launcher | BackwardLauncher:
    problem = options.problem(specs)
    copies = [False] * len(specs)
    if target == BACKWARD:
        return BackwardLauncher(problem, specs, copies, options.deterministic, aligned)
    out = ArraySpec.dense(problem.out_shape, problem.out_dtype)
    return Launcher(problem, "forward", out, copies, extents=[])


def _problem_on_cpu(call: xla_ffi.Call) -> Problem:
    return Options.decode(call.attribute()).problem(_specs(call, "cpu"))


def _specs(call: xla_ffi.Call, device: str) -> dict[str, ArraySpec]:
    dtypes = (_DTYPES.get(x.dtype, f"number {x.dtype} of XLA") for x in call.operands)
    return specs_of(map(xla_ffi.shape, call.operands), dtypes, device)


def _view(buffer: Any) -> np.ndarray[Any, Any]:
    """A buffer in host memory."""
    name, shape = _DTYPES[buffer.dtype], xla_ffi.shape(buffer)
    dtype = bfloat16() if name == "bfloat16" else np.dtype(name)
    size = dtype.itemsize * math.prod(shape)
    if not size:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * size).from_address(buffer.data)
    return np.ndarray(shape, dtype, memory)
