"""The call path of every op: validate, plan, allocate, launch. Calls of JAX under jit build a `CachedCall` themselves.

A `CachedCall` holds everything reusable between calls with equal shapes, strides, dtypes and options. A `LoadedPlan`
holds the kernels of its plan. A cache holds calls, and the `PackedParams` of pointers that came twice. So a repeated
call is two lookups, the outputs' allocation and the launches.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from threading import get_ident
from typing import Any

from .. import reference
from ..arrays.find import libraries_of
from ..arrays.library import GpuLibrary, Library, cupy_module
from ..arrays.operands import overlap_error, specs_of, views_of
from ..errors import UnsupportedError
from ..log import logger
from ..planning import device
from ..planning.plan import Launch, Plan
from ..planning.planner import plan
from ..problem.array_spec import share_memory
from ..problem.operands import Op
from ..problem.options import OptionsKey
from ..problem.problem import Problem
from ..problem.validate import ValidatedCall, overlap_ranges, validated
from . import compiler, cpu, device_memory
from .call_cache import RecentKeys, SecondChanceCache
from .driver import current_device, on_device, relaxed_capture
from .kernel_launch import EarlyLaunch, PlainLaunch, launches_early
from .structs import STRUCTS, ParamBuffer, ParamTemplate

CACHE_BYTES = 32 * 2**20  # of cached plans and packed parameters, per process
CALL_BYTES, LAUNCH_BYTES = 5 * 1024, 3 * 1024  # measured size of a CachedCall, and of each of its launches
PACKED_BYTES = 1024  # measured overhead of PackedParams, beside their bytes
RECENT_POINTERS = 8192  # pointer tuples that are remembered: at the second use, their packed parameters are cached

CALL_CACHE = SecondChanceCache(CACHE_BYTES)
_find = CALL_CACHE.get
_recent_keys = RecentKeys(RECENT_POINTERS)
_numbers = itertools.count()


class PackedParams:
    """Packed parameters of a plan's launches for one tuple of pointers, and the stream of their counters, if any."""

    __slots__ = ("buffers", "stream")

    def __init__(self, buffers: list[ParamBuffer]) -> None:
        self.buffers, self.stream = buffers, -1


class LoadedPlan:
    """The loaded kernels of a plan with their parameters; for one thread at a time."""

    __slots__ = (
        "_counters", "_kernels", "_number", "_templates", "ordinal", "plan", "shares_scratch", "tma_operands",
        "vector_loaded", "workspace",
    )  # fmt: skip

    def __init__(self, plan: Plan, ordinal: int) -> None:
        self.plan, self.ordinal, self._number = plan, ordinal, next(_numbers)
        launches = [launch for launch in plan.launches if launch.num_blocks]
        # Launches with equal parameters share a struct: Hopper's three backward kernels for dq, dk and dv.
        sharers: dict[tuple[object, ...], list[Launch]] = {}
        for launch in launches:
            sharers.setdefault(_struct_key(launch), []).append(launch)
        numbers = {key: number for number, key in enumerate(sharers)}
        firsts = [first for first, *_ in sharers.values()]
        self._templates = [ParamTemplate(plan.problem, launch, plan.workspace) for launch in firsts]
        # (index of the template, word of a counter address, number of counters).
        self._counters = [(number, *each) for number, launch in enumerate(firsts) for each in _counter_words(launch)]
        compiler.compile_together([launch.variant for launch in launches], ordinal)
        self._kernels = [(numbers[_struct_key(launch)], _load(launch, ordinal)) for launch in launches]
        self.workspace = (plan.workspace_bytes // 4,) if plan.workspace_bytes and plan.launches else ()  # its shape
        # Single launches alone share it: launches of two threads could interleave on the stream.
        self.shares_scratch = len(launches) == 1 and 0 < plan.workspace_bytes <= device_memory.SCRATCH_BYTES
        index = plan.problem.op.index
        # (index, alignment - 1) of operands: with a tensor map, one begins at a multiple of 16 bytes …
        self.tma_operands = tuple([(index[name], 15) for name in plan.tma_operands])
        # … and operands whose elements are loaded in pairs, at multiples of a pair's size.
        self.vector_loaded = tuple([(index[name], size - 1) for name, size in plan.vector_loaded.items()])

    def launch(self, pointers: tuple[int, ...], stream: int) -> bool:
        """Launches the kernels in order on this stream; returns False, and launches none, if a pointer is misaligned.

        pointers: of the op's operands in their order, then of the workspace if there is one. The driver copies the
        parameters before it returns.
        """
        if current_device() != self.ordinal:
            with on_device(self.ordinal):
                return self.launch(pointers, stream)
        key = self._number, pointers
        params, is_repeated = _find(key), True
        if params is None:
            if any([pointers[number] & bits for number, bits in self.tma_operands + self.vector_loaded]):
                return False
            params = PackedParams([template.pack(pointers) for template in self._templates])
            # Cached from the second use on: a KV cache that grows has new pointers in each call.
            is_repeated = _recent_keys.add(key)
            if is_repeated:
                CALL_CACHE.put(key, params, sum([PACKED_BYTES + len(buffer.memory) for buffer in params.buffers]))
        buffers = params.buffers
        # The default stream keeps its counters; another handle may stand for a new stream by now.
        if stream != params.stream or stream != device_memory.DEFAULT_STREAM:
            for number, word, count in self._counters:
                buffers[number].words[word] = device_memory.counter(self.ordinal, stream, count, word)
            params.stream = stream
        for number, start in self._kernels:
            start(buffers[number], stream)
        if not is_repeated:
            for buffer in buffers:
                buffer.free_list.append(buffer)
        return True


def _struct_key(launch: Launch) -> tuple[object, ...]:
    """Returns a key that is equal for launches with the same parameters."""
    variant = launch.variant
    return variant.params, variant.mod_code, id(launch.fields), *launch.tma_boxes.items(), *launch.aliases.items()


def _counter_words(launch: Launch) -> list[tuple[int, int]]:
    """Returns (word, number of counters) for each counter address in the launch's struct."""
    struct, counts = STRUCTS[launch.variant.params], {"counter": int(launch.takes_counter), "arrivals": launch.arrivals}
    fields = ((getattr(struct, name, None), count) for name, count in counts.items() if count)
    return [(field.offset // 8, count) for field, count in fields if field]


def _load(launch: Launch, ordinal: int) -> EarlyLaunch | PlainLaunch:
    """Loads the kernel of a launch."""
    variant = launch.variant
    kind = EarlyLaunch if variant.waits and launches_early() else PlainLaunch
    grid, block = (launch.num_blocks, 1, 1), (variant.num_threads, 1, 1)
    return kind(compiler.load(variant, ordinal), grid, block, variant.smem_bytes)


def _load_plan(problem: Problem, ordinal: int, misaligned: Sequence[str] = ()) -> LoadedPlan:
    # The driver encodes TMA descriptors only in a thread that has a context.
    with nullcontext() if current_device() == ordinal else on_device(ordinal):
        while True:
            avoided = compiler.unusable()
            new_plan = plan(problem, device.query(ordinal), misaligned, avoided)
            if logger.isEnabledFor(logging.DEBUG):
                _log(problem.op.name, new_plan)
            try:
                return LoadedPlan(new_plan, ordinal)
            except compiler.UnusableError as error:
                if error.variant in avoided:
                    raise  # planning chose the kernel again


class CachedCall:
    """Everything reusable between calls with equal shapes, strides, dtypes and options on one GPU."""

    def __init__(self, validated_call: ValidatedCall, library: GpuLibrary | None = None) -> None:
        problem, self.needs_copy, self._specs = validated_call
        ordinal = problem.ordinal
        assert ordinal is not None
        self.problem, self.ordinal, self.outputs = problem, ordinal, problem.outputs
        inputs = len(problem.op.inputs)
        self.ranges = overlap_ranges(validated_call)
        self.aligned_plan = _load_plan(problem, ordinal)
        self.plan = self.aligned_plan.plan
        # True where a call needs more than launches: copies of inputs, or results without a kernel.
        self.is_special = True in self.needs_copy[:inputs] or not self.plan.launches
        # True if the caller gives all outputs, and kernels write to them without a copy.
        self.writes_to_outs = True not in self.needs_copy[inputs:] and None not in self._specs[inputs:]
        self._unaligned_plans: dict[bool, LoadedPlan] = {}
        self.library = library  # None where the caller allocates the results, as XLA does
        self.allocators = [] if library is None else [library.allocator(*output, ordinal) for output in self.outputs]

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of the call in the cache."""
        return CALL_BYTES + LAUNCH_BYTES * len(self.plan.launches)

    def unaligned_plan(self, pointers: Sequence[int]) -> LoadedPlan:
        """Returns the kernels for misaligned operands, loaded at their first use."""
        aligned, names = self.aligned_plan, self.problem.op.names
        # One misaligned TMA operand counts for all of them: in the next call it may be another one. While all are
        # aligned the TMA kernels stay, which are faster.
        without_tma = any([pointers[number] & bits for number, bits in aligned.tma_operands])
        loaded_plan = self._unaligned_plans.get(without_tma)
        if loaded_plan is None:
            operands = aligned.tma_operands * without_tma + aligned.vector_loaded
            with relaxed_capture():  # a capture may be the first call with misaligned pointers
                loaded_plan = _load_plan(self.problem, self.ordinal, [names[number] for number, _ in operands])
            self._unaligned_plans[without_tma] = loaded_plan
        return loaded_plan

    def check_separate(self, pointers: Sequence[int]) -> None:
        """Raises ProblemError if an array that is written to overlaps another array."""
        for number, other, least, most in self.ranges:
            if least < (distance := pointers[other] - pointers[number]) < most:
                first, second = self._specs[number], self._specs[other]
                if first is not None and second is not None and share_memory(first, second, distance):
                    raise overlap_error(self.problem.op.names[number], self.problem.op.names[other])


def run(
    op: Op, arrays: tuple[Any, ...], options: OptionsKey, outputs: int | None = None, outs: tuple[Any, ...] = ()
) -> Any:
    """Runs a call and returns its results, in the library of its arrays; absent inputs are None.

    outputs: number of results to return (default all). outs: arrays for the first results, None for a new one.
    """
    operands = (*arrays, *outs) if outs else arrays
    library, on_gpu = libraries_of(op, operands)
    if not on_gpu:
        return library.on_host(cpu.run, op, library, operands, options.options)[:outputs]
    if not isinstance(library, GpuLibrary):
        return _run_through_cupy(op, library, arrays, options, outputs, outs)
    # By thread, as a cached call is written to. threading.local does not serve: threads of XLA and autograd lose its
    # values after each call of Python.
    key = get_ident(), op, options, library.key(operands)
    call = _find(key)
    if call is None:
        call = CachedCall(validated(op, specs_of(op, library, operands), options.options), library)
        if options.is_cacheable:  # other arguments are validated anew each time
            CALL_CACHE.put(key, call, call.num_bytes)
    if library.current_device() == call.ordinal:
        return _results(call, arrays, outputs, outs)
    with library.device(call.ordinal):
        return _results(call, arrays, outputs, outs)


def _results(call: CachedCall, arrays: tuple[Any, ...], outputs: int | None, outs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Allocates, launches and returns the results of `run`, on the current GPU."""
    library, allocators = call.library, call.allocators
    assert library is not None
    addresses = library.pointers
    inputs = addresses(arrays)
    if call.ranges:
        call.check_separate([*inputs, *addresses(outs)])
    if call.is_special:
        if not call.plan.launches:
            return _run_standard(library, call.problem, arrays, outs)[:outputs]
        arrays = tuple(
            library.with_packed_strides(x) if copy else x for x, copy in zip(arrays, call.needs_copy, strict=False)
        )
        inputs = addresses(arrays)
    count = len(allocators)
    num_results = count if outputs is None else min(outputs, count)
    results = [make() for make in allocators[len(outs) : num_results]]
    if outs:
        results[:0] = outs if call.writes_to_outs else _targets(call, library, outs)
    pointers = (*inputs, *addresses(results), *(0,) * (count - num_results))
    if not _launch(call.aligned_plan, library, pointers):
        _launch(call.unaligned_plan(pointers), library, pointers)
    if outs and not call.writes_to_outs:
        for number, out in enumerate(outs):
            if out is not None and results[number] is not out:
                library.copy(results[number], out)
                results[number] = out
    return tuple(results)


def _targets(call: CachedCall, library: GpuLibrary, outs: tuple[Any, ...]) -> list[Any]:
    """Returns arrays for kernels to write to: the caller's, copies of those that kernels cannot write, or new ones."""
    pairs = zip(outs, call.allocators, call.needs_copy[-len(outs) :], strict=False)
    # A copy, not a new array: rows outside all sequences keep their values.
    return [make() if out is None else library.with_packed_strides(out) if copy else out for out, make, copy in pairs]


def _launch(loaded_plan: LoadedPlan, library: GpuLibrary, pointers: tuple[int, ...]) -> bool:
    """Launches with a workspace if the kernels take one; returns False if nothing was launched."""
    stream = library.stream(loaded_plan.ordinal)
    if not loaded_plan.workspace:
        return loaded_plan.launch(pointers, stream)
    if (
        stream == device_memory.DEFAULT_STREAM
        and loaded_plan.shares_scratch
        and (address := device_memory.scratch(loaded_plan.ordinal))
    ):
        return loaded_plan.launch((*pointers, address), stream)
    workspace = library.allocator(loaded_plan.workspace, "float32", loaded_plan.ordinal)()
    return loaded_plan.launch((*pointers, *library.pointers([workspace])), stream)


def _run_through_cupy(
    op: Op, library: Library, arrays: tuple[Any, ...], options: OptionsKey, outputs: int | None, outs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Converts arrays to CuPy, runs the call, and converts the results back."""
    for operand, out in zip(op.outputs, outs, strict=False):
        if out is not None:
            library.check_writable(operand.name, out, " or None")
    for number in op.written:
        library.check_writable(op.names[number], arrays[number])
    inputs, targets = (tuple([None if x is None else library.to_cupy(x) for x in each]) for each in (arrays, outs))
    results = itertools.zip_longest(run(op, inputs, options, outputs, targets), outs)
    return tuple([library.from_cupy(x) if out is None else out for x, out in results])


def _run_standard(library: GpuLibrary, problem: Any, arrays: tuple[Any, ...], outs: tuple[Any, ...]) -> tuple[Any, Any]:
    """Runs algorithm="standard" on a GPU: whole matrices, through CuPy's matmul, on the caller's stream."""
    with library.cupy_stream(problem.ordinal):
        views = views_of(problem, [None if x is None else library.to_cupy(x) for x in arrays]).values()
        try:
            results = reference.forward(problem, *views, xp=cupy_module())
        except ImportError as error:
            raise UnsupportedError(
                "algorithm='standard' on a GPU multiplies through CuPy, which needs cuBLAS: pip install nvidia-cublas "
                "(nvidia-cublas-cu12 with CUDA 12), or take another algorithm"
            ) from error
        outputs = zip(results, problem.outputs, strict=True)
        result, lse = (library.from_cupy(x.reshape(shape)) for x, (shape, _) in outputs)
    if not outs:
        return result, lse
    library.copy(result, outs[0])
    return outs[0], lse


def _log(op: str, new_plan: Plan) -> None:
    """Writes a line of `CUFLASH_LOG` for a new plan, and one for each reason against Hopper's kernels."""
    logger.debug("%s: %s", op, str(new_plan).replace("\n", "; "))
    if new_plan.fallback is not None:
        _log_fallback(op, new_plan.fallback)


@functools.cache
def _log_fallback(op: str, cause: str) -> None:
    logger.debug("%s runs on the kernels for any GPU, and not on Hopper's own: %s", op, cause)
