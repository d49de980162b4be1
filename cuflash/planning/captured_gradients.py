"""Planner of the gradients of captured arrays: bias, sinks, and arrays that score_mod loads from.

For each load of an array in the scores, a kernel recomputes scores and their gradients and sums them by the load's
index (`Sums`). If thread blocks share a sum, each has a table in the workspace, and one more kernel adds the tables.
Without room for tables, sums are made by atomics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import UnsupportedError
from ..mods.graph.derivative import differentiate
from ..mods.graph.graph import Node
from ..mods.graph.linear import linear
from ..problem.array_spec import ArraySpec, packed_strides
from ..problem.dtypes import DTYPES
from ..problem.mod_spec import BIAS_AXES, ModSpec
from ..problem.operands import MOD_KINDS
from ..problem.problem import Problem
from ..problem.seqlen_info import PADDED_SLOT
from . import tiles_sm80
from .device import Device
from .mod_code import gradient_code, make_mod_code
from .plan import MAX_GRID, Launch, Part, Plan, blocks_of, make_variant
from .tile import FLOAT_BYTES
from .tiles_sm80 import DqTile
from .variant import PORTABLE_THREADS

MAX_AXES = 8  # most axes of an array with a gradient: lengths of arrays in `ModGradientParams`, common/params.cuh
MAX_PLACES = 2**31 - 1  # most elements of a table, which kernels index by 32 bits
MOST_TABLE_BYTES = 64 * 2**20  # most bytes of the tables of a term
MOST_WAVES = 4  # most waves of thread blocks that share steps
# So many lanes add the tables of one element, for at least so many tables and at most so many elements.
LANES, LANES_TABLES, LANES_ELEMENTS = 32, 8, 2**16
NUMBER_KINDS = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}  # NumberKind in common/gradient_sums.cuh
SINKS = "dsinks"


class NotDeterministicError(UnsupportedError):
    """A gradient of a captured array that is too large for a sum in fixed order; an unordered sum is possible."""


class Term(NamedTuple):
    """The gradient of scores by one load, and the load's index along each axis.

    axes: a name of BIAS_AXES, a constant, or None for an index that is computed for each score.
    """

    load: Node
    derivative: Node
    axes: tuple[str | int | None, ...]


@lru_cache(maxsize=64)
def terms_of(mod_spec: ModSpec) -> dict[int, tuple[Term, ...]]:
    """Returns the terms of captured arrays, by the array's index in `mod_spec.arrays`; no entry without terms."""
    terms: dict[int, tuple[Term, ...]] = {}
    for load, derivative in ({} if mod_spec.score is None else differentiate(mod_spec.score)).items():
        is_flat = derivative.op == "constant" and derivative.value == 0
        if load.op == "load" and not is_flat:
            term = Term(load, derivative, tuple(map(_axis, load.arguments)))
            terms[load.value] = (*terms.get(load.value, ()), term)
    return terms


def _axis(index: Node) -> str | int | None:
    form = linear(index)
    if not form.coefficients:
        return form.constant
    ((atom, factor), *more) = form.coefficients.items()
    is_plain = form.constant == 0 and factor == 1 and not more and atom.op == "input"
    return atom.value if is_plain and atom.value in BIAS_AXES else None


def is_affine(index: Node) -> bool:
    """Returns True if an index is a sum of multiples of b, h, q_idx, k_idx and the lengths."""
    return all(atom.op == "input" for atom in linear(index).coefficients)


class Sums(NamedTuple):
    """The sums of a term.

    separate_axes: axes of BIAS_AXES that index the array, with a sum for each index.
    gathered_axes: axes of the array whose index is computed for each score. With any, at most sequences and heads have
    separate sums.
    firsts, counts: first index and number of indices with sums, for each axis of the array.
    names: the axis of BIAS_AXES that indexes each axis of the array, or None.
    """

    separate_axes: tuple[str, ...]
    gathered_axes: tuple[int, ...]
    firsts: tuple[int, ...]
    counts: tuple[int, ...]
    names: tuple[str | None, ...]


def sums_of(term: Term, shape: tuple[int, ...], lengths: Mapping[str, int]) -> Sums:
    """Returns the sums of a term for an array of this shape, where BIAS_AXES have these lengths."""
    if len(shape) > MAX_AXES:
        raise UnsupportedError(f"the gradient of an array of {len(shape)} axes; up to {MAX_AXES} are supported")
    names: list[str | None] = []
    for axis, extent in zip(term.axes, shape, strict=True):
        # Not for a shorter axis, as several indices are clamped to its last element.
        is_separate = isinstance(axis, str) and extent >= lengths[axis] and axis not in names
        names.append(axis if isinstance(axis, str) and is_separate else None)
    varying = [number for number, axis in enumerate(term.axes) if not isinstance(axis, int)]
    if any(names[number] is None for number in varying):
        names = [name if name in ("b", "h") else None for name in names]
    gathered_axes = tuple(number for number in varying if names[number] is None)
    firsts, counts = [], []
    for axis, name, extent in zip(term.axes, names, shape, strict=True):
        firsts.append(_clamped(axis, extent) if isinstance(axis, int) else 0)
        counts.append(1 if isinstance(axis, int) else extent if name is None else lengths[name])
    separate_axes = tuple(name for name in BIAS_AXES if name in names)
    return Sums(separate_axes, gathered_axes, tuple(firsts), tuple(counts), tuple(names))


def _clamped(index: int, extent: int) -> int:
    return min(max(index + extent if index < 0 else index, 0), extent - 1)


def with_captured_gradients(plan: Plan, problem: Problem, device: Device) -> Plan:
    """Returns the plan of backward, extended by launches for gradients of captured arrays, if there are any."""
    names = [operand.name for operand in problem.op.outputs if operand.dtype in MOD_KINDS]
    if not names:
        return plan
    gradients = _CapturedGradients(plan, problem, device)
    for name in names:
        if name == SINKS:
            gradients.add_sinks()
        else:
            gradients.add_array(name)
    return gradients.plan()


class _CapturedGradients:
    """A builder of launches and workspace parts that extend a plan."""

    def __init__(self, plan: Plan, problem: Problem, device: Device) -> None:
        self.backward_plan, self.problem, self.device = plan, problem, device
        self.launches = list(plan.launches)
        self.parts, self.end = dict(plan.workspace), plan.workspace_bytes
        delta = next(launch for launch in plan.launches if launch.variant.op == "delta")
        self.stats = {name: delta.fields[name] for name in ("stats_rows", "stats_step", "stats_delta")}
        # From the plan, as the launch of delta may have key lengths only.
        self.has_queries = "stats" in plan.workspace and problem.seqlen_q > 0

    def plan(self) -> Plan:
        """Returns the extended plan."""
        if (most := max(launch.num_blocks for launch in self.launches)) > MAX_GRID:
            raise UnsupportedError(
                f"gradients of captured arrays need {most} blocks; a launch has at most {MAX_GRID}. Split the "
                "batch into several calls."
            )
        return self.backward_plan._replace(
            launches=tuple(self.launches), workspace_bytes=self.end, workspace=self.parts
        )

    def _part(self, name: str, floats: int) -> str:
        """Adds a part to the workspace and returns its name."""
        self.parts[name] = Part(self.end, FLOAT_BYTES * floats)
        self.end += FLOAT_BYTES * floats
        return name

    def add_sinks(self) -> None:
        """Adds the gradient of the sinks."""
        problem, varlen, heads = self.problem, self.problem.seqlen_info, self.problem.heads_q
        if varlen is None:
            num_slots = problem.batch * blocks_of(problem.seqlen_q, PADDED_SLOT)
        else:
            num_slots = varlen.num_slots("q", problem.batch, PADDED_SLOT)
        parts, tables = 0, None
        if self.has_queries and num_slots:
            parts = max(1, min(blocks_of(num_slots, PORTABLE_THREADS // 32), 2 * self.device.num_sms // heads))
            slots_each = blocks_of(num_slots, parts)
            parts = blocks_of(num_slots, slots_each)
            tables, code = self._part("sinks_tables", parts * heads), make_mod_code(problem)
            variant = make_variant(problem, self.device, "sinks_gradient", "portable/sinks_gradient.cu", mod_code=code)
            fields = self.stats | {"num_slots": num_slots, "slots_each": slots_each}
            self.launches.append(Launch(variant, parts * heads, fields, aliases={"tables": tables}))
        sums = Sums(("h",), (), (0,), (heads,), ("h",))
        self._add_tables(SINKS, sums, (1,), tables, parts, heads)

    def add_array(self, name: str) -> None:
        """Adds the gradient of a captured array, which is zero if scores do not load from it."""
        problem, result = self.problem, _spec(self.problem, name)
        mod_spec = problem.op.mod_spec
        assert mod_spec is not None
        number = next(position for position, each in enumerate(mod_spec.arrays) if f"d{each.name}" == name)
        terms = terms_of(mod_spec).get(number, ()) if self.has_queries and problem.seqlen_k > 0 else ()
        if 0 in result.shape:
            return
        if not terms:
            self._add_tables(name, Sums((), (), (), (), ()), (), None, 0, 0)
            return
        dims = DTYPES[problem.dtype].itemsize, problem.head_dim, problem.head_dim_v, self.device
        tile = tiles_sm80.choose(tiles_sm80.MODS[problem.dtype], *dims)
        if tile is None:
            raise UnsupportedError(
                f"gradients of captured arrays at head dims ({problem.head_dim}, {problem.head_dim_v}) in "
                f"{problem.dtype} on {self.device.name}; 1 to 256 are supported"
            )
        total = self._part(f"{name}_total", math.prod(result.shape)) if len(terms) > 1 else None
        for position, term in enumerate(terms):
            self._add_term(name, term, tile, total, position, len(terms))

    def _add_term(self, name: str, term: Term, tile: DqTile, total: str | None, position: int, count: int) -> None:
        """Adds term `position` of `count`. total: the workspace part in which terms are summed, or None."""
        problem, result = self.problem, _spec(self.problem, name)
        lengths = {"b": problem.batch, "h": problem.heads_q, "q_idx": problem.seqlen_q, "k_idx": problem.seqlen_k}
        sums = sums_of(term, result.shape, lengths)
        extents = [result.shape[axis] for axis in sums.gathered_axes]
        entries = math.prod(extents)
        if entries > MAX_PLACES:
            raise UnsupportedError(
                f"{name}, the gradient of an array of shape {result.shape}: it is loaded at computed indices, whose "
                f"sums have {entries} places; {MAX_PLACES} are supported. Leave it out of captured_grads (in PyTorch: "
                "detach it), load from several smaller arrays, or index it by b, h, q_idx or k_idx alone"
            )
        in_tables = [lengths[axis] for axis in sums.separate_axes] + ([entries] if extents else [])
        size = math.prod(in_tables)
        *steps_apart, _ = (*packed_strides(tuple(in_tables)), 1) if not extents else packed_strides(tuple(in_tables))
        step_of = dict(zip(sums.separate_axes, steps_apart, strict=True))
        within = dict(zip(sums.gathered_axes, packed_strides(tuple(extents)), strict=True))
        strides = tuple(within.get(axis, step_of.get(each or "", 0)) for axis, each in enumerate(sums.names))

        tiles = {"q": blocks_of(problem.seqlen_q, tile.block_q), "k": blocks_of(problem.seqlen_k, tile.block_k)}
        counts = {"b": problem.batch, "h": problem.heads_q, "q_idx": tiles["q"], "k_idx": tiles["k"]}
        blocks = math.prod(counts[axis] for axis in sums.separate_axes)
        num_steps = math.prod(counts[axis] for axis in ("b", "h", "q_idx") if axis not in sums.separate_axes)
        if num_steps > MAX_GRID or blocks > MAX_GRID:
            raise UnsupportedError(
                f"{name} is summed over more than {MAX_GRID} blocks of queries; split the batch into several calls, or "
                "pass max_seqlen_q and max_seqlen_k if sequences have lengths of their own"
            )
        tables_each = tile.warps if extents else 1
        room = MOST_TABLE_BYTES // (FLOAT_BYTES * size * tables_each)
        resident = self.device.num_sms * tile.blocks_per_sm
        is_even = problem.seqlen_info is None and problem.mask.is_full
        parts = _parts(blocks, num_steps, resident, room, is_even)
        affine = all(is_affine(term.load.arguments[axis]) for axis in sums.gathered_axes)
        lacks_room = bool(extents) and (room < 1 or (not affine and blocks * parts < resident // 4 and parts >= room))
        atomic = lacks_room and not problem.options.deterministic
        if extents and room < 1 and not atomic:
            raise NotDeterministicError(
                f"deterministic=True, but the sums of {name} take {FLOAT_BYTES * size * tables_each} bytes, which is "
                f"over {MOST_TABLE_BYTES}; pass deterministic=False, or a smaller array"
            )
        if atomic:
            parts = _parts(blocks, num_steps, resident, num_steps, is_even)
        num_tables = 1 if atomic else parts * tables_each
        by_axis = zip(strides, result.strides, result.shape, strict=True)
        is_whole = sums.counts == result.shape and all(index == step or extent == 1 for index, step, extent in by_axis)
        is_direct = not extents and parts == count == 1 and is_whole
        tables = None if is_direct else self._part(f"{name}_{position}_tables", size * num_tables)
        if atomic:
            assert tables is not None
            self._zero(tables, size)

        arguments = tuple(term.load.arguments[axis] for axis in sums.gathered_axes)
        stays = set(sums.separate_axes) == {"h", "q_idx", "k_idx"} and problem.seqlen_info is None and not extents
        code = gradient_code(problem, term.derivative, arguments, stays)
        variant = make_variant(problem, self.device, "backward_mods", "sm80/backward_mods.cu", tile, code)
        fields = self.stats | {
            "num_q_tiles": tiles["q"],
            "num_k_tiles": tiles["k"],
            "by_sequence": int("b" in sums.separate_axes),
            "by_head": int("h" in sums.separate_axes),
            "by_query": int("q_idx" in sums.separate_axes),
            "by_key": int("k_idx" in sums.separate_axes),
            "num_steps": num_steps,
            "parts": parts,
            "adds_atomically": int(atomic),
            "table_places": entries if extents else 0,
            "result_kind": NUMBER_KINDS[result.dtype],
            **_numbered("extents", extents),
            **_numbered("strides", within.values()),
        }
        aliases = {"result": name} if tables is None else {"tables": tables}
        self.launches.append(Launch(variant, blocks * parts, fields, aliases=aliases))
        if tables is not None:
            self._add_tables(name, sums, strides, tables, num_tables, size, total, position, count)

    def _add_tables(
        self,
        name: str,
        sums: Sums,
        strides: tuple[int, ...],
        tables: str | None,
        num_tables: int,
        size: int,
        total: str | None = None,
        position: int = 0,
        count: int = 1,
    ) -> None:
        """Adds the launch that sums the tables of a term; without tables it sets the result to zero."""
        result = _spec(self.problem, name)
        elements = math.prod(result.shape)
        if not elements:
            return
        lanes = LANES if num_tables >= LANES_TABLES and elements <= LANES_ELEMENTS else 1
        fields = {
            "num_elements": elements,
            "table_step": size,
            "rank": len(result.shape) if num_tables else 0,
            "num_tables": num_tables,
            "lanes": lanes,
            "adds": int(position > 0),
            "result_kind": NUMBER_KINDS[result.dtype],
            **_numbered("strides", strides),
        }
        if num_tables:
            fields |= _numbered("extents", result.shape)
            fields |= _numbered("firsts", sums.firsts) | _numbered("counts", sums.counts)
        aliases = {"result": name} if position == count - 1 else {}
        aliases |= {} if tables is None else {"tables": tables}
        aliases |= {} if total is None else {"total": total}
        self._add_sum(elements * lanes, fields, aliases)

    def _zero(self, part: str, floats: int) -> None:
        """Adds the launch that sets a workspace part to zero."""
        fields = {"num_elements": floats, "lanes": 1, "result_kind": NUMBER_KINDS["float32"]}
        self._add_sum(floats, fields, {"result": part})

    def _add_sum(self, threads: int, fields: dict[str, int], aliases: dict[str, str]) -> None:
        variant = make_variant(self.problem, self.device, "sum_tables", "portable/sum_tables.cu", is_varlen=False)
        self.launches.append(Launch(variant, blocks_of(threads, PORTABLE_THREADS), fields, aliases=aliases))


def _spec(problem: Problem, name: str) -> ArraySpec:
    spec = problem.specs[problem.op.index[name]]
    assert spec is not None
    return spec


def _numbered(name: str, values: Any) -> dict[str, int]:
    return {f"{name}[{i}]": value for i, value in enumerate(values)}


def _parts(blocks: int, num_steps: int, resident: int, room: int, is_even: bool) -> int:
    """Returns the number of thread blocks that share the steps of a sum, for the earliest end of the last block.

    is_even: True if all steps take equally long; else the number is the largest possible. room: most tables.
    """
    most = max(1, min(num_steps, MOST_WAVES * resident // max(blocks, 1), room))
    if not is_even:
        return most

    def steps(parts: int) -> int:
        return blocks_of(blocks * parts, resident) * blocks_of(num_steps, parts)

    return min(range(1, most + 1), key=lambda parts: (steps(parts), parts))
