"""Handlers that XLA calls: attention on the buffers of a call frame, by kernels on a GPU and by NumPy on the CPU.

Operands and results follow the ops' order; arrays shaped like lse have an extra last axis of length 1. A call
lists its operands' names, in the op's order; names not listed are absent operands. An operand "kv" holds k and v as
halves of its last axis: XLA has no views, and would copy each half.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import threading
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...arrays.library import numpy_dtype
from ...errors import UnsupportedError
from ...mods.analysis.intervals import Band
from ...problem.array_spec import ArraySpec
from ...problem.dtypes import DTYPES, ITEMSIZE
from ...problem.index_offsets import NO_OFFSETS, IndexOffsets, check_index_offsets
from ...problem.mod_spec import ModSpec
from ...problem.operands import INTEGERS, LSE_AXES, MISSING_AXES, VARLEN_ARGS, VARLEN_OPS, Op, banded, mod_op
from ...problem.operands import OPS as PUBLIC
from ...problem.options import Options
from ...problem.problem import Problem
from ...problem.seqlen_info import MOST, OPEN
from ...problem.validate import ValidatedCall
from ...runtime import cpu, device_memory
from ...runtime.call import CALL_CACHE, CachedCall, LoadedPlan
from ...runtime.driver import on_device, relaxed_capture
from . import ffi
from .mod_attributes import Functions

FORWARD, BACKWARD = "cuflash_forward", "cuflash_backward"  # names of the targets in XLA
OPS = {FORWARD: PUBLIC["forward"], BACKWARD: PUBLIC["backward"]}
_LIKE_LSE = frozenset(x.name for op in OPS.values() for x in op.operands if x.axes == LSE_AXES)
_NAMES = {row.xla: name for name, row in DTYPES.items()} | dict(
    enumerate(("bool", "int8", "int16", INTEGERS, "int64", "uint8", "uint16", "uint32", "uint64"), 1)
)  # by XLA_FFI_DataType
_FORMAT_VERSION = 5
# Names of operands in exported programs that differ from the current ones.
_WRITTEN_NAMES = {"mask_tiles": "cells"}
_READ_NAMES = {name: today for today, name in _WRITTEN_NAMES.items()}
Shape = tuple[int, ...]


class CallOptions(NamedTuple):
    """The options of a call and the names of its operands.

    Query i of a sequence sees keys i + lo … i + hi; None for an open side. With `from_end` both count from the
    sequence's seqlen_k - seqlen_q (`mask_from_end` of kernels). They are normalised: masks that hide the same keys are
    equal. functions: mods. grads: the numbers of the arrays whose gradients are results.
    """

    lo: int | None
    hi: int | None
    softmax_scale: float
    softcap: float
    deterministic: bool = False
    names: tuple[str, ...] = ("q", "k", "v")
    from_end: bool = False
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    num_splits: int = 0
    split_size: int | None = None
    dropout_p: float = 0.0
    functions: Functions | None = None
    grads: tuple[int, ...] = ()
    index_offsets: IndexOffsets = check_index_offsets(NO_OFFSETS)  # as in validated options

    @classmethod
    def from_problem(cls, problem: Problem, names: tuple[str, ...]) -> CallOptions:
        """Returns the options of a problem with these operands."""
        options, varlen, mask = problem.options, problem.seqlen_info, problem.mask
        lo, hi, from_end = (mask.lo, mask.hi, False) if varlen is None else varlen.bounds
        if lo > hi != OPEN and not from_end:  # no key is visible, which no window expresses
            lo = hi = MOST if varlen else mask.seqlen_k
        return cls(
            lo=None if lo == OPEN and varlen else lo,
            hi=None if hi == OPEN and varlen else hi,
            softmax_scale=problem.softmax_scale,
            softcap=options.softcap,
            deterministic=options.deterministic,
            names=names,
            from_end=from_end,
            max_seqlen_q=problem.seqlen_q if varlen else None,
            max_seqlen_k=problem.seqlen_k if varlen else None,
            num_splits=options.num_splits,
            split_size=options.split_size,
            dropout_p=options.dropout_p,
            functions=None if problem.op.mod_spec is None else Functions.from_spec(problem.op.mod_spec),
            index_offsets=options.index_offsets,
        )

    @property
    def is_band(self) -> bool:
        """True if window_size cannot express lo and hi: both lie on one side of the diagonals."""
        lo, hi = self.lo, self.hi
        return self.from_end and ((lo is not None and lo > 0) or (hi is not None and hi < 0))

    def op(self, target: str) -> Op:
        """Returns the op of a target for these options."""
        mod_spec = None if self.functions is None else self.functions.mod_spec
        op = op_of(target, self.names, mod_spec, self.grads if target == BACKWARD else ())
        return banded(op, Band(self.lo, self.hi, True)) if self.is_band else op

    def options(self) -> Options:
        """Returns the `Options` of a call with these options."""
        lo, hi = (None, None) if self.is_band else (self.lo, self.hi)
        # A window contains its diagonal: if all sequences share the diagonal, it is one of the bounds.
        offset = None if self.from_end else hi if lo is None else lo
        base = offset or 0
        return Options(
            self.softmax_scale,
            window_size=(None if lo is None else base - lo, None if hi is None else hi - base),
            diagonal_offset=offset,
            softcap=self.softcap,
            deterministic=self.deterministic,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
            num_splits=self.num_splits,
            split_size=self.split_size,
            dropout_p=self.dropout_p,
            index_offsets=self.index_offsets,
        )


class CallSpec(NamedTuple):
    """A call without addresses. It is the call's attribute in XLA, and the cache key of its `LoadedCall`."""

    static: CallOptions
    shapes: tuple[Shape, ...] = ()  # by operand name; () on the CPU
    dtypes: tuple[str, ...] = ()
    workspace: int = 0  # floats of the call's workspace

    def encode(self) -> np.ndarray[Any, Any]:
        """Returns the spec as 64-bit numbers, for compilation caches and exported programs."""
        static = self.static._replace(names=tuple(_WRITTEN_NAMES.get(name, name) for name in self.static.names))
        text = json.dumps(self._replace(static=static), default=Functions.encoded).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        return np.frombuffer(bytearray(_FORMAT_VERSION.to_bytes(8, "little") + text), np.int64)

    @classmethod
    def decode(cls, attribute: bytes) -> CallSpec:
        """Returns the spec of an attribute; raises UnsupportedError for one that another cuflash version wrote."""
        if int.from_bytes(attribute[:8], "little") != _FORMAT_VERSION:
            raise UnsupportedError(
                "the program was lowered by another version of cuflash, whose options this one does not read; lower or "
                "export it again"
            )
        options, shapes, dtypes, workspace = json.loads(attribute[8:])
        static = CallOptions(*options)
        functions = None if static.functions is None else Functions.decoded(static.functions)  # type: ignore[arg-type]
        static = static._replace(
            names=tuple(_READ_NAMES.get(name, name) for name in static.names),
            functions=functions,
            grads=tuple(static.grads),
            index_offsets=tuple(static.index_offsets),
        )
        return cls(static, tuple(map(tuple, shapes)), tuple(dtypes), workspace)

    def problem(self, target: str, device: str) -> Problem:
        """Returns the problem of the call."""
        op = self.static.op(target)
        return Problem.from_specs(
            op, specs_of(op, self.static.names, self.shapes, self.dtypes, device), self.static.options()
        )


@lru_cache(maxsize=256)
def op_of(target: str, names: tuple[str, ...], mod_spec: ModSpec | None = None, grads: tuple[int, ...] = ()) -> Op:
    """Returns the op of a target: the varlen one if an operand is a varlen array, else the dense one.

    mod_spec and grads: as in `operands.mod_op`.
    """
    is_dense = set(VARLEN_ARGS).isdisjoint(names)
    plain = OPS[target] if is_dense else VARLEN_OPS[OPS[target].name]
    return plain if mod_spec is None else mod_op(plain, mod_spec, grads)


def is_like_lse(name: str) -> bool:
    """True if an operand has lse's axes, and so an extra axis in XLA."""
    return name in _LIKE_LSE


def axes_of(op: Op, name: str, rank_q: int, rank_k: int) -> list[str]:
    """Returns the axes of an operand in XLA, where q and k have these ranks."""
    axes = op.operands[op.index[name]].axes
    missing = MISSING_AXES[{"batch_q": rank_q, "batch_k": rank_k}.get(axes[0], 4)]
    return [axis for axis in axes if axis not in missing] + ["one"] * is_like_lse(name)


def halved(names: Sequence[str], shapes: Iterable[Shape]) -> dict[str, Shape]:
    """Returns the shapes of the operands by name, k and v instead of "kv"."""
    shapes_by_name: dict[str, Shape] = {}
    for name, shape in zip(names, shapes, strict=True):
        shapes_by_name |= dict.fromkeys("kv", (*shape[:-1], shape[-1] // 2)) if name == "kv" else {name: shape}
    return shapes_by_name


def specs_of(
    op: Op, names: Sequence[str], shapes: Sequence[Shape], dtypes: Sequence[str], device: str = "cpu"
) -> list[ArraySpec | None]:
    """Returns the specs of an op's inputs; None for inputs without a name in the call."""
    specs: dict[str, ArraySpec] = {}
    for name, shape, dtype in zip(names, shapes, dtypes, strict=True):
        spec = ArraySpec.contiguous(shape[:-1] if is_like_lse(name) else shape, dtype, device, "jax")
        parts = halved([name], [spec.shape])
        specs |= {part: spec._replace(shape=of_part) for part, of_part in parts.items()}
    return [specs.get(operand.name) for operand in op.inputs]


class Activity(contextlib.ContextDecorator):
    """Counts running calls of the functions that it decorates, over all threads."""

    def __init__(self) -> None:
        # A plain lock: XLA does not run in a forked child, and a lock of locks.py costs 1 µs a call.
        self._lock, self._running, self._ended = threading.Lock(), 0, -math.inf

    def __enter__(self) -> None:
        with self._lock:
            self._running += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._running, self._ended = self._running - 1, time.monotonic()

    def wait(self, quiet: float) -> None:
        """Waits until no call has run for `quiet` seconds."""
        while self._running or time.monotonic() < self._ended + quiet:
            time.sleep(quiet / 10)


on_cpu = Activity()


@on_cpu
def run_on_cpu(target: str, call: ffi.Call) -> None:
    """Runs the op of a target on the call's buffers."""
    operands, results = call.buffers()
    call_spec = CallSpec.decode(call.attribute())
    shapes, dtypes = tuple(x.shape for x in operands), tuple(_NAMES[x.dtype] for x in operands)
    problem = call_spec._replace(shapes=shapes, dtypes=dtypes).problem(target, "cpu")
    views = dict(zip(call_spec.static.names, map(_view, operands), strict=True))
    if (both := views.pop("kv", None)) is not None:
        views["k"], views["v"] = np.split(both, 2, axis=-1)
    arrays = [views.get(operand.name) for operand in problem.op.inputs]
    for buffer, result in zip(results, cpu.compute(problem, arrays), strict=True):
        view = _view(buffer)
        view[...] = result.reshape(view.shape)


def run_on_cuda(target: str, frame: ffi.Call) -> None:
    """Runs a target's op on the call's buffers, on XLA's stream; a workspace is an extra result."""
    loaded = _loaded(target, frame.attribute(), frame.ordinal())
    pointers = frame.pointers()
    if loaded.half:
        q, kv, *others = pointers
        pointers = (q, kv, kv + loaded.half, *others)
    for place in loaded.absent:
        pointers = (*pointers[:place], 0, *pointers[place:])
    stream = frame.stream()
    if not loaded.call.aligned_plan.launch(pointers, stream):
        unaligned_plan = loaded.call.unaligned_plan(pointers)
        loaded.check_workspace(unaligned_plan)
        unaligned_plan.launch(pointers, stream)


class LoadedCall(NamedTuple):
    """A thread's cached state for calls of a program with one attribute."""

    call: CachedCall
    absent: tuple[int, ...]  # positions of the op's inputs that the calls lack, ascending
    half: int  # bytes from k to v in an operand that holds both; else 0
    workspace_bytes: int  # of the program's workspace

    def check_workspace(self, needing: CachedCall | LoadedPlan) -> None:
        """Raises UnsupportedError if the program's workspace is smaller than these kernels need."""
        needed = needing.plan.workspace_bytes
        if self.workspace_bytes < needed:
            raise UnsupportedError(
                f"{needing.plan.problem.op.name} takes a workspace of {needed} bytes on this GPU, but the program was "
                f"lowered with one of {self.workspace_bytes}: lower or export it again in a process that sees this GPU"
            )


def load(target: str, call_spec: CallSpec, ordinals: Sequence[int]) -> int:
    """Compiles and loads the kernels of such calls on these GPUs; returns the floats of the largest workspace.

    A GPU that cannot run them is skipped as long as another one can; a call on that GPU raises the reason.
    """
    workspace, loaded, refused = 0, 0, None
    for ordinal in ordinals:
        try:
            call = _call(target, call_spec, ordinal)
        except UnsupportedError as error:
            refused = error
            continue
        loaded += 1
        workspace = max(workspace, call.plan.workspace_bytes // 4)
        for launch in call.plan.launches:
            for words in filter(None, (launch.takes_counter, launch.arrivals)):
                with on_device(ordinal):
                    device_memory.reserve_counter(ordinal, words)
    if refused is not None and not loaded:
        raise refused
    return workspace


def _loaded(target: str, attribute: bytes, ordinal: int) -> LoadedCall:
    """Returns this thread's cached state for calls with this attribute."""
    key = threading.get_ident(), target, ordinal, attribute
    loaded: LoadedCall | None = CALL_CACHE.get(key)
    if loaded is None:
        call_spec = CallSpec.decode(attribute)
        # Lowering loaded the kernels, unless it ran in another process (jax.export). Then the first call loads them,
        # and it may be captured.
        with relaxed_capture():
            call = _call(target, call_spec, ordinal)
        absent = tuple(place for place, _ in enumerate(call.problem.op.inputs) if call.problem.specs[place] is None)
        names, shapes = call_spec.static.names, call_spec.shapes
        half = shapes[1][-1] // 2 * ITEMSIZE[call_spec.dtypes[1]] if "kv" in names else 0
        loaded = LoadedCall(call, absent, half, 4 * call_spec.workspace)
        loaded.check_workspace(call)
        CALL_CACHE.put(key, loaded, call.num_bytes)
    return loaded


def _call(target: str, call_spec: CallSpec, ordinal: int) -> CachedCall:
    return CachedCall(ValidatedCall(call_spec.problem(target, f"cuda:{ordinal}")))


def _view(buffer: ffi.Buffer) -> np.ndarray[Any, Any]:
    """Returns a NumPy view of a buffer in host memory."""
    dtype, shape = numpy_dtype(_NAMES[buffer.dtype]), buffer.shape
    size = dtype.itemsize * math.prod(shape)
    if not size:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * size).from_address(buffer.data)
    return np.ndarray(shape, dtype, memory)
