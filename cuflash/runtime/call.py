"""The call path of every op: validate, plan, allocate, launch. Calls of JAX under jit build a `CachedCall` themselves.

A `CachedCall` holds all that calls with arrays of equal shapes, strides, dtypes and options repeat. A `LoadedPlan`
holds the kernels of its plan. A cache holds calls, and the `PackedParams` of pointers that came twice, so that a
repeated call is two lookups, the outputs' allocation and the launches.
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

CACHE_BYTES = 32 * 2**20  # of plans and packed parameters of calls, in a process
CALL_BYTES, LAUNCH_BYTES = 5 * 1024, 3 * 1024  # that a CachedCall takes, and each of its launches, as measured
PACKED_BYTES = 1024  # that PackedParams take beside their own bytes, as measured
RECENT_POINTERS = 8192  # pointer tuples seen once: seen again, their packed parameters are cached

CALL_CACHE = SecondChanceCache(CACHE_BYTES)
_find = CALL_CACHE.get
_recent_keys = RecentKeys(RECENT_POINTERS)
_numbers = itertools.count()


class PackedParams:
    """Parameters of a plan's launches for some pointers, and the stream whose counters they hold, if any."""

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
        # why: launches that take the same struct share it: Hopper's three backward kernels for dq, dk and dv.
        sharers: dict[tuple[object, ...], list[Launch]] = {}
        for launch in launches:
            sharers.setdefault(_struct_key(launch), []).append(launch)
        numbers = {key: number for number, key in enumerate(sharers)}
        firsts = [first for first, *_ in sharers.values()]
        self._templates = [ParamTemplate(plan.problem, launch, plan.workspace) for launch in firsts]
        # Number of the template, word, and how many counters its address is of.
        self._counters = [(number, *each) for number, launch in enumerate(firsts) for each in _counter_words(launch)]
        self._kernels = [(numbers[_struct_key(launch)], _load(launch, ordinal)) for launch in launches]
        self.workspace = (plan.workspace_bytes // 4,) if plan.workspace_bytes and plan.launches else ()  # its shape
        # why one launch: several of two threads could interleave on the stream.
        self.shares_scratch = len(launches) == 1 and 0 < plan.workspace_bytes <= device_memory.SCRATCH_BYTES
        index = plan.problem.op.index
        # The operands that must begin at a multiple of so many bytes, less one: those of tensor maps …
        self.tma_operands = tuple([(index[name], 15) for name in plan.tma_operands])
        # … and those of which two elements are loaded together.
        self.vector_loaded = tuple([(index[name], size - 1) for name, size in plan.vector_loaded.items()])

    def launch(self, pointers: tuple[int, ...], stream: int) -> bool:
        """Launches in order, on this stream of the GPU. False, and nothing is launched, if an address forbids it.

        The pointers are those of the op's operands in their order, then that of the workspace if there is one. The
        driver copies the parameters before it returns.
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
            # why from their second use on: a KV cache that grows has new pointers in each call.
            is_repeated = _recent_keys.add(key)
            if is_repeated:
                CALL_CACHE.put(key, params, sum([PACKED_BYTES + len(buffer.memory) for buffer in params.buffers]))
        buffers = params.buffers
        # why not of the default stream: it has the same counters each time.
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
    """Returns a key that launches share which take the same parameters."""
    variant = launch.variant
    return variant.params, variant.mod_code, id(launch.fields), *launch.tma_boxes.items(), *launch.aliases.items()


def _counter_words(launch: Launch) -> list[tuple[int, int]]:
    """Returns the words of the launch's struct that hold addresses of counters, and how many counters each is of."""
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
    # why a context: the driver makes TMA descriptors in no thread without one
    with nullcontext() if current_device() == ordinal else on_device(ordinal):
        while True:
            # why not in plain calls: planning is a part of the time of each new shape.
            spilled = frozenset() if problem.op.mod_spec is None else compiler.spilled()
            new_plan = plan(problem, device.query(ordinal), misaligned, spilled)
            if logger.isEnabledFor(logging.DEBUG):
                _log(problem.op.name, new_plan)
            try:
                return LoadedPlan(new_plan, ordinal)
            except compiler.SpilledError as error:
                if error.variant in spilled:
                    raise  # why: planning does not avoid it


class CachedCall:
    """All that calls on one GPU with such arrays and options repeat."""

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
        # Whether the caller gives all outputs, and kernels write to them just as they are.
        self.writes_to_outs = True not in self.needs_copy[inputs:] and None not in self._specs[inputs:]
        self._unaligned_plans: dict[bool, LoadedPlan] = {}
        self.library = library  # None where the results are there already
        self.allocators = [] if library is None else [library.allocator(*output, ordinal) for output in self.outputs]

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in the cache, about."""
        return CALL_BYTES + LAUNCH_BYTES * len(self.plan.launches)

    def unaligned_plan(self, pointers: Sequence[int]) -> LoadedPlan:
        """Returns the kernels for operands that begin where these do, loaded when they are first needed."""
        aligned, names = self.aligned_plan, self.problem.op.names
        # All operands that TMA moves count as misaligned once one is: in the next call it may be another one. While
        # none is, the TMA kernels stay, as those without it are slower.
        without_tma = any([pointers[number] & bits for number, bits in aligned.tma_operands])
        loaded_plan = self._unaligned_plans.get(without_tma)
        if loaded_plan is None:
            operands = aligned.tma_operands * without_tma + aligned.vector_loaded
            with relaxed_capture():  # why: perhaps it was captured with other pointers before
                loaded_plan = _load_plan(self.problem, self.ordinal, [names[number] for number, _ in operands])
            self._unaligned_plans[without_tma] = loaded_plan
        return loaded_plan

    def check_separate(self, pointers: Sequence[int]) -> None:
        """Raises ProblemError if memory that is written to is that of another array, too."""
        for number, other, least, most in self.ranges:
            if least < (distance := pointers[other] - pointers[number]) < most:
                first, second = self._specs[number], self._specs[other]
                if first is not None and second is not None and share_memory(first, second, distance):
                    raise overlap_error(self.problem.op.names[number], self.problem.op.names[other])


def run(
    op: Op, arrays: tuple[Any, ...], options: OptionsKey, outputs: int | None = None, outs: tuple[Any, ...] = ()
) -> Any:
    """Returns the results of a call, in the library of its arrays; inputs that are not there are None.

    outputs: how many results to return (default all). outs: arrays for the first results, None for a new one.
    """
    operands = (*arrays, *outs) if outs else arrays
    library, on_gpu = libraries_of(op, operands)
    if not on_gpu:
        return cpu.run(op, library, operands, options.options)[:outputs]
    if not isinstance(library, GpuLibrary):
        return _run_through_cupy(op, library, arrays, options, outputs, outs)
    # why the thread: a cached call is written to. why not threading.local: it forgets a thread that XLA or autograd
    # began after each call of Python.
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
    """Returns the results of `run`, on the current GPU."""
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
    """Returns arrays that kernels write to for these results: the caller's, a copy where they cannot, or a new one."""
    pairs = zip(outs, call.allocators, call.needs_copy[-len(outs) :], strict=False)
    # why a copy, and no new array: rows of no sequence keep what they hold.
    return [make() if out is None else library.with_packed_strides(out) if copy else out for out, make, copy in pairs]


def _launch(loaded_plan: LoadedPlan, library: GpuLibrary, pointers: tuple[int, ...]) -> bool:
    """Launches with a workspace if the kernels take one; False where nothing was launched."""
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
    """Returns the results of `run`, of arrays that cross over to CuPy and back."""
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
    """Writes a line of `CUFLASH_LOG` for a new plan, and one for each cause why Hopper's kernels are not taken."""
    logger.debug("%s: %s", op, str(new_plan).replace("\n", "; "))
    if new_plan.fallback is not None:
        _log_fallback(op, new_plan.fallback)


@functools.cache
def _log_fallback(op: str, cause: str) -> None:
    logger.debug("%s runs on the kernels for any GPU, and not on Hopper's own: %s", op, cause)
