"""Validation of a call by the specs of its arrays: the problem that kernels see, and memory that may overlap."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .array_spec import ArraySpec
from .checks import check_output
from .operands import Op
from .options import Options
from .problem import Problem


class ValidatedCall(NamedTuple):
    """A problem as kernels see it, and the operands of its call, some of which kernels cannot read as they are."""

    problem: Problem
    needs_copy: tuple[bool, ...] = ()  # of the operands: which are copied once
    specs: Sequence[ArraySpec | None] = ()  # the operands before that


def validated(op: Op, specs: Iterable[ArraySpec | None], options: Options) -> ValidatedCall:
    """Validates a call: inputs, then outputs that the caller gives, each None where it is not there.

    specs: may be lazy, so that an error is that of the first operand which has one.
    """
    all_specs, needs_copy = [], []
    for operand, spec in zip(op.operands, specs, strict=False):
        all_specs.append(spec)
        is_unread = spec is not None and (spec.last_dim_strided if operand.strided else not spec.has_packed_strides)
        needs_copy.append(is_unread and not operand.written and not operand.any_last_stride)
        if spec is not None and needs_copy[-1] and len(needs_copy) > len(op.inputs):
            check_output(operand.called, spec)  # why here: the problem sees the copy
    pairs = zip(all_specs, needs_copy, strict=True)
    read = [spec.with_packed_strides() if spec is not None and copy else spec for spec, copy in pairs]
    return ValidatedCall(Problem.from_specs(op, read, options), tuple(needs_copy), all_specs)


def overlap_ranges(call: ValidatedCall) -> list[tuple[int, int, int, int]]:
    """Returns (number of an array that is written to, number of another one, least, most) for each pair of arrays.

    Where their pointers are further apart than `least` and less far than `most`, they lie in one range of memory.
    """
    op, specs = call.problem.op, call.specs
    targets = (*op.written, *range(len(op.inputs), len(specs)))
    if not targets:
        return []  # why: spans would take 2 µs an array of each new shape
    spans = [(0, 0) if spec is None else spec.span for spec in specs]
    ranges = []
    for number, (other, (other_begin, other_end)) in itertools.product(targets, enumerate(spans)):
        begin, end = spans[number]
        if end and other_end and (other > number or other not in targets):
            ranges.append((number, other, begin - other_end, end - other_begin))
    return ranges
