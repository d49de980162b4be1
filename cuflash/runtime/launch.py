"""The one way from arrays to results: judge, plan, outputs, workspace, launches, for every op and every array library.

A `Call` holds what calls with arrays of equal shapes, strides, dtypes and options repeat; `Kernels` holds the loaded
kernels of a plan with their parameters. Both are kept, so a repeated call is two lookups, the outputs' allocation and
the launches.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from threading import get_ident
from typing import Any, NamedTuple

from .. import reference
from ..arrays.dlpack import DlpackLibrary
from ..arrays.find import libraries_of
from ..arrays.library import GpuLibrary, Library, as_4d, cupy_module
from ..errors import ProblemError, UnsupportedError
from ..log import logger
from ..planning import device
from ..planning.plan import Launch, Plan
from ..planning.planner import plan
from ..problem.array_spec import ArraySpec
from ..problem.operands import Op, Operand
from ..problem.options import Options
from ..problem.problem import Problem, States, judge
from . import compiler, counters, host
from .driver import current_device, on_device, relaxed_capture
from .kept import Kept, Seen
from .structs import Block, Parameters, size_of

KEPT_BYTES = 32 * 2**20  # of all that calls leave behind in a process
CALL_BYTES = 12 * 1024  # that a Call takes beside its parameters, as measured
READY_BYTES = 1024  # that the parameters for some pointers take beside their own bytes, as measured
SEEN = 8192  # pointers of calls, of which those that come again get parameters of their own

KEPT = Kept(KEPT_BYTES)
_kept = KEPT.get
_seen = Seen(SEEN)
_numbers = itertools.count()


class Stream(NamedTuple):
    """What CuPy asks of a stream in a launch."""

    ptr: int


_stream = functools.lru_cache(Stream)  # why: to make one takes longer than to find it


class Ready(NamedTuple):
    """Launches whose parameters are written."""

    launches: tuple[tuple[Any, ...], ...]  # function, grid, block, arguments, shared memory
    counted: Block | None  # the parameters that have a counter
    blocks: tuple[Block, ...]  # which own the memory of the arguments


class Kernels:
    """The loaded kernels of a plan with their parameters; for one thread at a time."""

    def __init__(self, problem: Problem | States, made: Plan, ordinal: int) -> None:
        self.plan, self._ordinal, self._number = made, ordinal, next(_numbers)
        self._loaded: list[tuple[Any, ...]] = []
        blocks: dict[tuple[str, int], Parameters] = {}
        self._of_launch: list[tuple[str, int]] = []
        self._counted: tuple[str, int] | None = None
        with nullcontext() if current_device() == ordinal else on_device(ordinal):
            for launch in made.launches:
                if not launch.num_blocks:
                    continue
                # why: launches that take the same struct share it: Hopper's three of one gradient each.
                key = launch.variant.params, id(launch.fields)
                if key not in blocks:
                    blocks[key] = Parameters(problem, launch, made.workspace)
                self._loaded.append(_loaded(launch, ordinal))
                self._of_launch.append(key)
                if launch.counted:
                    self._counted = key
        self._num_bytes = sum(size_of(name) for name, _ in blocks)
        self._blocks = blocks
        self._scratch = self._ready_for_last = self._ready(blocks)
        self._last: tuple[int, ...] = ()  # pointers of the last launch

    @property
    def num_bytes(self) -> int:
        """About what the parameters for some pointers take."""
        return READY_BYTES * len(self._blocks) + self._num_bytes

    def launch(self, pointers: tuple[int, ...], stream: int) -> None:
        """In order, on this stream of the GPU. The driver copies the parameters before it returns.

        The pointers are those of the op's operands in their order, then that of the workspace if there is one.
        """
        if current_device() != self._ordinal:
            with on_device(self._ordinal):
                self._launch(pointers, stream)
        else:
            self._launch(pointers, stream)

    def _launch(self, pointers: tuple[int, ...], stream: int) -> None:
        if pointers != self._last:
            key = self._number, pointers
            self._ready_for_last = _kept(key) or self._write(key)
            self._last = pointers
        launches, counted, _ = self._ready_for_last
        if counted is not None:
            counted.count_with(counters.counter(self._ordinal, stream))
        on = _stream(stream)
        for function, grid, block, arguments, smem_bytes in launches:
            function(grid, block, arguments, smem_bytes, on)

    def _write(self, key: tuple[int, tuple[int, ...]]) -> Ready:
        """Parameters for these pointers, kept from their second use on: those of a growing cache have no second."""
        self._last = ()  # why: what an error leaves half written must not be taken for the old
        for block in self._blocks.values():
            block.write(key[1])
        if not _seen.before(key):
            return self._scratch
        ready = self._ready({name: block.copy() for name, block in self._blocks.items()})
        KEPT.put(key, ready, self.num_bytes)
        return ready

    def _ready(self, blocks: Mapping[tuple[str, int], Block]) -> Ready:
        from cupy.cuda.function import CPointer

        arguments = {key: (CPointer(block.address),) for key, block in blocks.items()}
        launches = [
            (function, grid, block, arguments[key], smem_bytes)
            for (function, grid, block, smem_bytes), key in zip(self._loaded, self._of_launch, strict=True)
        ]
        return Ready(tuple(launches), blocks[self._counted] if self._counted else None, tuple(blocks.values()))


def _loaded(launch: Launch, ordinal: int) -> tuple[Any, ...]:
    variant = launch.variant
    grid, block = (launch.num_blocks, 1, 1), (variant.num_threads, 1, 1)
    return compiler.load(variant, ordinal), grid, block, variant.smem_bytes


class Prepared:
    """A plan with its kernels."""

    def __init__(self, problem: Problem | States, ordinal: int, misaligned: tuple[str, ...] = ()) -> None:
        self.plan = plan(problem, device.query(ordinal), misaligned)
        _log(problem.op, self.plan)
        floats = self.plan.workspace_bytes // 4
        self.workspace = (floats,) if floats and self.plan.launches else ()  # its shape
        self.kernels = Kernels(problem, self.plan, ordinal)
        names = problem.op.names
        self.boxed = [names.index(name) for name in self.plan.boxed]  # operands that must begin at 16 bytes


class Call:
    """All that calls on one GPU with such arrays and options repeat."""

    def __init__(self, judged: Judged) -> None:
        problem = self.problem = judged.problem
        assert problem.device.startswith("cuda:")
        self.ordinal = int(problem.device.removeprefix("cuda:"))
        self.copied, self._given = judged.copied, judged.given
        self.outputs = tuple(problem.outputs)
        self._prepared = Prepared(problem, self.ordinal)
        self.plan = self._prepared.plan
        # Whether inputs are copied, or nothing is launched.
        self.is_special = True in judged.copied[: len(problem.op.inputs)] or not self.plan.launches
        self._for_any: Prepared | None = None  # alignment, made when first needed

    @property
    def num_bytes(self) -> int:
        """About what is kept of it."""
        return CALL_BYTES + self._prepared.kernels.num_bytes

    def prepared(self, pointers: Sequence[int]) -> Prepared:
        """The kernels for operands at these addresses."""
        for number in self._prepared.boxed:
            if pointers[number] & 15:
                break
        else:
            return self._prepared
        if self._for_any is None:
            names = self.problem.op.names
            misaligned = tuple(names[number] for number in self._prepared.boxed if pointers[number] & 15)
            with relaxed_capture():  # why: perhaps it was captured with other pointers before
                self._for_any = Prepared(self.problem, self.ordinal, misaligned)
        return self._for_any

    def check_separate(self, inputs: Sequence[int], out: int) -> None:
        """`ProblemError` if the memory of the given output is seen to be that of an input, too."""
        names = self.problem.op.names
        *own, size_of_out = [0 if spec is None else spec.own_bytes for spec in self._given]
        for name, start, size in zip(names, inputs, own, strict=False):
            if out < start + size and start < out + size_of_out:
                raise ProblemError(
                    f"{names[len(own)]} shares memory with {name}, which is read while {names[len(own)]} is written; "
                    "give another"
                )


class Judged(NamedTuple):
    """A problem as kernels see it, and what was done about arrays that they cannot read."""

    problem: Problem | States
    copied: tuple[bool, ...] = ()  # of the operands: which are copied once
    given: Sequence[ArraySpec | None] = ()  # the operands as they are before that


def judged(op: Op, library: Library, arrays: Sequence[Any], options: Options) -> Judged:
    """Judges a call: inputs, then outputs that are given, each None where it is not there."""
    specs = [None if x is None else library.spec(o.name, x) for o, x in zip(op.operands, arrays, strict=False)]
    copied = tuple([x is not None and _is_copied(o, x) for o, x in zip(op.operands, specs, strict=False)])
    read = specs
    if True in copied:
        read = [x.densed() if x is not None and copy else x for x, copy in zip(specs, copied, strict=True)]
    return Judged(judge(op, read, options), copied, specs)


def _is_copied(operand: Operand, spec: ArraySpec) -> bool:
    return spec.has_gaps if operand.strided else not spec.is_dense


def run(op: Op, arrays: tuple[Any, ...], options: Options, *, outputs: int | None = None, out: Any = None) -> Any:
    """The results of a call, in the library of its arrays; inputs that are not there are None.

    outputs: how many results are wanted (default all). out: an array for the first result.
    """
    given = arrays if out is None else (*arrays, out)
    library, on_gpu = libraries_of(op, given)
    if not on_gpu:
        return host.run(op, library, arrays, out, options)[:outputs]
    if not isinstance(library, GpuLibrary):
        return _exchanged(op, library, arrays, out, options)[:outputs]
    key_of = library.key
    # why the thread: what is kept is written to. why not threading.local: it forgets a thread that XLA or autograd
    # began after each call of Python.
    key = get_ident(), op.name, options.key(), *[None if x is None else key_of(x) for x in given]
    try:
        call = _kept(key)
    except TypeError:  # an argument that cannot be hashed is judged anew each time
        call, key = None, ()
    if call is None:
        call = Call(judged(op, library, given, options))
        if key:
            KEPT.put(key, call, call.num_bytes)
    ordinal, pointer, empty = call.ordinal, library.pointer, library.empty
    with library.device(ordinal):
        if call.is_special:
            if not call.plan.launches:
                return _standard(library, call.problem, arrays, out)[:outputs]
            arrays = tuple(library.dense(x) if copy else x for x, copy in zip(arrays, call.copied, strict=False))
        pointers = [0 if x is None else pointer(x) for x in arrays]
        if out is not None:
            call.check_separate(pointers, pointer(out))
        wanted = call.outputs if outputs is None else call.outputs[:outputs]
        if out is None or call.copied[len(arrays)]:
            results = [empty(shape, dtype, ordinal) for shape, dtype in wanted]
        else:
            results = [out, *[empty(shape, dtype, ordinal) for shape, dtype in wanted[1:]]]
        pointers += map(pointer, results)
        if outputs is not None:
            pointers += [0] * (len(call.outputs) - outputs)
        prepared = call.prepared(pointers)
        if prepared.workspace:
            workspace = empty(prepared.workspace, "float32", ordinal)
            pointers.append(pointer(workspace))
        prepared.kernels.launch(tuple(pointers), library.stream(ordinal))
        if out is not None and results[0] is not out:
            library.copy(results[0], out)
            results[0] = out
    return tuple(results)


def _exchanged(op: Op, library: Library, arrays: tuple[Any, ...], out: Any, options: Options) -> tuple[Any, ...]:
    """All results of a call on arrays that cross over to CuPy and back."""
    assert isinstance(library, DlpackLibrary)
    if out is not None:
        raise ProblemError(f"out= is not offered for {library.name} arrays; leave out=None")
    exchanged = tuple(None if x is None else library.to_cupy(x) for x in arrays)
    return tuple(map(library.from_cupy, run(op, exchanged, options)))


def _standard(library: GpuLibrary, problem: Any, arrays: tuple[Any, ...], out: Any) -> tuple[Any, Any]:
    """algorithm="standard" on a GPU: whole matrices, through CuPy's matmul, on the caller's stream."""
    with library.cupy_stream(problem.ordinal):
        q, k, v = (as_4d(library.to_cupy(x)) for x in arrays)
        try:
            results = reference.standard.forward(problem, q, k, v, cupy_module())
        except ImportError as error:
            raise UnsupportedError(
                "algorithm='standard' on a GPU multiplies through CuPy, which needs cuBLAS: pip install nvidia-cublas "
                "(nvidia-cublas-cu12 with CUDA 12), or take another algorithm"
            ) from error
        shaped = zip(results, problem.outputs, strict=True)
        result, lse = (library.from_cupy(x.reshape(shape)) for x, (shape, _) in shaped)
    if out is not None:
        library.copy(result, out)
    return result if out is None else out, lse


def _log(op: Op, made: Plan) -> None:
    """A line of `CUFLASH_LOG` for every new plan, and one for each cause why Hopper's own kernels are not taken."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s: %s", op.name, str(made).replace("\n", "; "))
        if made.fallback is not None:
            _log_fallback(op.name, made.fallback)


@functools.cache
def _log_fallback(op: str, cause: str) -> None:
    logger.debug("%s runs on the kernels for any GPU, and not on Hopper's own: %s", op, cause)
