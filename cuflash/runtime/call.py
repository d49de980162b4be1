"""The single call path: validate, plan, allocate, launch; for every op and every array library.

A `Call` holds what calls with arrays of equal shapes, strides, dtypes and options repeat; `Kernels` holds the loaded
kernels of a plan with their parameters. Both are kept, so a repeated call is two lookups, the outputs' allocation and
the launches.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from threading import get_ident
from typing import Any

from .. import reference
from ..arrays.dlpack import DlpackLibrary
from ..arrays.find import libraries_of
from ..arrays.library import GpuLibrary, Library, cupy_module
from ..arrays.operands import overlap_error, refuse_to_write, specs_of, views_of
from ..errors import UnsupportedError
from ..log import logger
from ..planning import device
from ..planning.plan import Plan
from ..planning.planner import plan
from ..problem.array_spec import share_memory
from ..problem.operands import Op
from ..problem.options import OptionsKey
from ..problem.problem import Problem
from ..problem.validate import ValidatedCall, overlap_ranges, validated
from . import compiler, cpu, device_memory
from .call_cache import LruCache, RecentKeys
from .driver import current_device, on_device, relaxed_capture
from .kernel_launch import EarlyLaunch, PlainLaunch, launches_early
from .structs import STRUCTS, Block, Parameters

KEPT_BYTES = 32 * 2**20  # of all that calls leave behind in a process
CALL_BYTES, LAUNCH_BYTES = 5 * 1024, 3 * 1024  # that a Call takes, and each of its launches, as measured
READY_BYTES = 1024  # that parameters for some pointers take beside their own bytes, as measured
SEEN = 8192  # pointers of calls, of which those that come again get parameters of their own

CALL_CACHE = LruCache(KEPT_BYTES)
_kept = CALL_CACHE.get
_seen = RecentKeys(SEEN)
_numbers = itertools.count()


class Written:
    """The parameters of a plan's launches for some pointers, and the stream whose counters they hold, if any."""

    __slots__ = ("blocks", "stream")

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks, self.stream = blocks, -1


class Kernels:
    """The loaded kernels of a plan with their parameters; for one thread at a time."""

    __slots__ = (
        "_counted",
        "_loaded",
        "_number",
        "_parameters",
        "ordinal",
        "plan",
        "shares_scratch",
        "tma_operands",
        "vector_loaded",
        "workspace",
    )  # fmt: skip

    def __init__(self, made: Plan, ordinal: int) -> None:
        self.plan, self.ordinal, self._number = made, ordinal, next(_numbers)
        self._loaded: list[tuple[int, EarlyLaunch | PlainLaunch]] = []  # of each: the number of its parameters
        self._parameters: list[Parameters] = []
        self._counted: list[tuple[int, int, int]] = []  # number of the parameters, word, and how many counters it is of
        numbers: dict[tuple[object, ...], int] = {}
        for launch in made.launches:
            if not launch.num_blocks:
                continue
            variant = launch.variant
            # why: launches that take the same struct share it: Hopper's three of one gradient each.
            struct = (
                variant.params,
                variant.mod_code,
                id(launch.fields),
                *launch.tma_boxes.items(),
                *launch.aliases.items(),
            )
            number = numbers.setdefault(struct, len(numbers))
            if number == len(self._parameters):
                self._parameters.append(Parameters(made.problem, launch, made.workspace))
                counts = {"counter": int(launch.counted), "arrivals": launch.arrivals}
                found = ((getattr(STRUCTS[variant.params], name, None), count) for name, count in counts.items())
                self._counted += [(number, field.offset // 8, count) for field, count in found if field and count]
            grid, block = (launch.num_blocks, 1, 1), (variant.num_threads, 1, 1)
            launched = EarlyLaunch if variant.waits and launches_early() else PlainLaunch
            kernel = compiler.load(variant, ordinal)
            self._loaded.append((number, launched(kernel, grid, block, variant.smem_bytes)))
        self.workspace = (made.workspace_bytes // 4,) if made.workspace_bytes and made.launches else ()  # its shape
        # why one launch: of several, those of two threads could take turns on the stream.
        self.shares_scratch = len(self._loaded) == 1 and 0 < made.workspace_bytes <= device_memory.SCRATCH_BYTES
        index = made.problem.op.index
        # The operands that must begin at a multiple of so many bytes, less one: those that the copy engine moves …
        self.tma_operands = tuple([(index[name], 15) for name in made.tma_operands])
        # … and those of which two elements are loaded together.
        self.vector_loaded = tuple([(index[name], size - 1) for name, size in made.vector_loaded.items()])

    def launch(self, pointers: tuple[int, ...], stream: int) -> bool:
        """In order, on this stream of the GPU. False, and nothing is launched, if an operand's address forbids it.

        The pointers are those of the op's operands in their order, then that of the workspace if there is one. The
        driver copies the parameters before it returns.
        """
        if current_device() != self.ordinal:
            with on_device(self.ordinal):
                return self.launch(pointers, stream)
        key = self._number, pointers
        written, again = _kept(key), True
        if written is None:
            if any([pointers[number] & bits for number, bits in self.tma_operands + self.vector_loaded]):
                return False
            written = Written([_written(parameters, pointers) for parameters in self._parameters])
            # why: parameters are kept from their second use on, and those of a growing cache have no second.
            again = _seen.before(key)
            if again:
                CALL_CACHE.put(key, written, sum([READY_BYTES + len(block.memory) for block in written.blocks]))
        blocks = written.blocks
        # why not of the default stream: it has the same counters each time.
        if stream != written.stream or stream != device_memory.DEFAULT_STREAM:
            for number, word, count in self._counted:
                blocks[number].words[word] = device_memory.counter(self.ordinal, stream, count, word)
            written.stream = stream
        for number, start in self._loaded:
            start(blocks[number], stream)
        if not again:
            for parameters, written in zip(self._parameters, blocks, strict=True):
                _free[parameters.size].append(written)
        return True


_free: defaultdict[int, list[Block]] = defaultdict(list)  # memory of launches that have ended, by its size


def _written(parameters: Parameters, pointers: tuple[int, ...]) -> Block:
    """The parameters for these pointers."""
    try:
        block = _free[parameters.size].pop()
    except IndexError:
        from cupy.cuda.function import CPointer

        block = Block(parameters.size)
        block.arguments = (CPointer(block.address),)
    parameters.write(block, pointers)
    return block


def _kernels(problem: Problem, ordinal: int, misaligned: Sequence[str] = ()) -> Kernels:
    # why a context: the driver makes TMA descriptors in no thread without one
    with nullcontext() if current_device() == ordinal else on_device(ordinal):
        while True:
            # why not asked for in plain calls: planning is a part of the time of each new shape.
            spilled = frozenset() if problem.op.mod_spec is None else compiler.spilled()
            made = plan(problem, device.query(ordinal), misaligned, spilled)
            if logger.isEnabledFor(logging.DEBUG):
                _log(problem.op.name, made)
            try:
                return Kernels(made, ordinal)
            except compiler.SpilledError as error:
                if error.variant in spilled:
                    raise  # why: planning does not avoid it


class Call:
    """All that calls on one GPU with such arrays and options repeat."""

    def __init__(self, validated_call: ValidatedCall, library: GpuLibrary | None = None) -> None:
        problem, self.needs_copy, self._specs = validated_call
        ordinal = problem.ordinal
        assert ordinal is not None
        self.problem, self.ordinal, self.outputs = problem, ordinal, problem.outputs
        inputs = len(problem.op.inputs)
        self.ranges = overlap_ranges(validated_call)
        self.aligned = _kernels(problem, ordinal)
        self.plan = self.aligned.plan
        # Whether inputs are copied, or nothing is launched.
        self.is_special = True in self.needs_copy[:inputs] or not self.plan.launches
        # Whether kernels write to all outputs that are given just as they are.
        self.writes_to_given = True not in self.needs_copy[inputs:] and None not in self._specs[inputs:]
        self._for_any: dict[bool, Kernels] = {}
        self.library = library  # None where the results are there already
        self.allocators = [] if library is None else [library.allocator(*output, ordinal) for output in self.outputs]

    @property
    def num_bytes(self) -> int:
        """About what is kept of it."""
        return CALL_BYTES + LAUNCH_BYTES * len(self.plan.launches)

    def for_any(self, pointers: Sequence[int]) -> Kernels:
        """The kernels for operands that begin where these do, made when they are first needed."""
        first, names = self.aligned, self.problem.op.names
        # why all: in the next call, another operand may be misaligned. why not if all that the copy engine moves are
        # where they must be: kernels without it are slower.
        tma_operands = any([pointers[number] & bits for number, bits in first.tma_operands])
        found = self._for_any.get(tma_operands)
        if found is None:
            misaligned = [names[number] for number, _ in first.tma_operands * tma_operands + first.vector_loaded]
            with relaxed_capture():  # why: perhaps it was captured with other pointers before
                found = self._for_any[tma_operands] = _kernels(self.problem, self.ordinal, misaligned)
        return found

    def check_separate(self, pointers: Sequence[int]) -> None:
        """`ProblemError` if memory that is written to is that of another array, too."""
        for number, other, least, most in self.ranges:
            if least < (distance := pointers[other] - pointers[number]) < most:
                first, second = self._specs[number], self._specs[other]
                if first is not None and second is not None and share_memory(first, second, distance):
                    raise overlap_error(self.problem.op.names[number], self.problem.op.names[other])


def run(
    op: Op, arrays: tuple[Any, ...], asked: OptionsKey, outputs: int | None = None, outs: tuple[Any, ...] = ()
) -> Any:
    """The results of a call, in the library of its arrays; inputs that are not there are None.

    outputs: how many results are wanted (default all). outs: arrays for the first results, None for a new one.
    """
    given = (*arrays, *outs) if outs else arrays
    library, on_gpu = libraries_of(op, given)
    if not on_gpu:
        return cpu.run(op, library, given, asked.options)[:outputs]
    if not isinstance(library, GpuLibrary):
        return _exchanged(op, library, arrays, outs, asked)[:outputs]
    # why the thread: what is kept is written to. why not threading.local: it forgets a thread that XLA or autograd
    # began after each call of Python.
    key = get_ident(), op, asked, library.key(given)
    call = _kept(key)
    if call is None:
        call = Call(validated(op, specs_of(op, library, given), asked.options), library)
        if asked.is_cacheable:  # other arguments are judged anew each time
            CALL_CACHE.put(key, call, call.num_bytes)
    if library.current_device() == call.ordinal:
        return _results(call, arrays, outputs, outs)
    with library.device(call.ordinal):
        return _results(call, arrays, outputs, outs)


def _results(call: Call, arrays: tuple[Any, ...], outputs: int | None, outs: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `run` returns, on the current GPU."""
    library, allocators = call.library, call.allocators
    assert library is not None
    addresses = library.pointers
    inputs = addresses(arrays)
    if call.ranges:
        call.check_separate([*inputs, *addresses(outs)])
    if call.is_special:
        if not call.plan.launches:
            return _standard(library, call.problem, arrays, outs)[:outputs]
        pairs = zip(arrays, call.needs_copy, strict=False)
        arrays = tuple(library.with_packed_strides(x) if copy else x for x, copy in pairs)
        inputs = addresses(arrays)
    count = len(allocators)
    wanted = count if outputs is None else min(outputs, count)
    results = [make() for make in allocators[len(outs) : wanted]]
    if outs:
        results[:0] = outs if call.writes_to_given else _targets(call, library, outs)
    pointers = (*inputs, *addresses(results), *(0,) * (count - wanted))
    if not _launched(call.aligned, library, pointers):
        _launched(call.for_any(pointers), library, pointers)
    if outs and not call.writes_to_given:
        for number, out in enumerate(outs):
            if out is not None and results[number] is not out:
                library.copy(results[number], out)
                results[number] = out
    return tuple(results)


def _targets(call: Call, library: GpuLibrary, outs: tuple[Any, ...]) -> list[Any]:
    """What kernels write to for these results: what is given, or a copy where they cannot, or a new array."""
    pairs = zip(outs, call.allocators, call.needs_copy[-len(outs) :], strict=False)
    # why a copy, and no new array: rows of no sequence keep what they hold.
    return [make() if out is None else library.with_packed_strides(out) if copy else out for out, make, copy in pairs]


def _launched(kernels: Kernels, library: GpuLibrary, pointers: tuple[int, ...]) -> bool:
    """Launches with a workspace if the kernels take one; False where nothing was launched."""
    stream = library.stream(kernels.ordinal)
    if not kernels.workspace:
        return kernels.launch(pointers, stream)
    if (
        stream == device_memory.DEFAULT_STREAM
        and kernels.shares_scratch
        and (shared := device_memory.scratch(kernels.ordinal))
    ):
        return kernels.launch((*pointers, shared), stream)
    workspace = library.empty(kernels.workspace, "float32", kernels.ordinal)
    return kernels.launch((*pointers, *library.pointers([workspace])), stream)


def _exchanged(
    op: Op, library: Library, arrays: tuple[Any, ...], outs: tuple[Any, ...], asked: OptionsKey
) -> tuple[Any, ...]:
    """All results of a call on arrays that cross over to CuPy and back."""
    assert isinstance(library, DlpackLibrary)
    for operand, out in zip(op.outputs, outs, strict=False):
        if out is not None:
            refuse_to_write(operand.name, library, " or None")
    if op.written:
        refuse_to_write(op.names[op.written[0]], library)
    exchanged = tuple(None if x is None else library.to_cupy(x) for x in arrays)
    return tuple(map(library.from_cupy, run(op, exchanged, asked)))


def _standard(library: GpuLibrary, problem: Any, arrays: tuple[Any, ...], outs: tuple[Any, ...]) -> tuple[Any, Any]:
    """algorithm="standard" on a GPU: whole matrices, through CuPy's matmul, on the caller's stream."""
    with library.cupy_stream(problem.ordinal):
        views = views_of(problem, [None if x is None else library.to_cupy(x) for x in arrays]).values()
        try:
            results = reference.forward(problem, *views, xp=cupy_module())
        except ImportError as error:
            raise UnsupportedError(
                "algorithm='standard' on a GPU multiplies through CuPy, which needs cuBLAS: pip install nvidia-cublas "
                "(nvidia-cublas-cu12 with CUDA 12), or take another algorithm"
            ) from error
        shaped = zip(results, problem.outputs, strict=True)
        result, lse = (library.from_cupy(x.reshape(shape)) for x, (shape, _) in shaped)
    if not outs:
        return result, lse
    library.copy(result, outs[0])
    return outs[0], lse


def _log(op: str, made: Plan) -> None:
    """A line of `CUFLASH_LOG` for every new plan, and one for each cause why Hopper's own kernels are not taken."""
    logger.debug("%s: %s", op, str(made).replace("\n", "; "))
    if made.fallback is not None:
        _log_fallback(op, made.fallback)


@functools.cache
def _log_fallback(op: str, cause: str) -> None:
    logger.debug("%s runs on the kernels for any GPU, and not on Hopper's own: %s", op, cause)
