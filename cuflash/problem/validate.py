"""Validates a call by the specs of its arrays: the problem for kernels, and memory that may overlap."""

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
    """A validated problem, and the operands that must be copied first."""

    problem: Problem
    needs_copy: tuple[bool, ...] = ()  # for each operand, True if it must be copied first
    specs: Sequence[ArraySpec | None] = ()  # the operands before copies


def validated(op: Op, specs: Iterable[ArraySpec | None], options: Options) -> ValidatedCall:
    """Validates a call: inputs, then output arguments, each None if it is missing.

    specs: may be lazy, so that an error is about the first operand that has one.
    """
    all_specs, needs_copy = [], []
    for operand, spec in zip(op.operands, specs, strict=False):
        all_specs.append(spec)
        is_unread = spec is not None and (spec.last_dim_strided if operand.strided else not spec.has_packed_strides)
        needs_copy.append(is_unread and not operand.written and not operand.any_last_stride)
        if spec is not None and needs_copy[-1] and len(needs_copy) > len(op.inputs):
            check_output(operand.called, spec)  # the packed copy below hides its strides
    pairs = zip(all_specs, needs_copy, strict=True)
    read = [spec.with_packed_strides() if spec is not None and copy else spec for spec, copy in pairs]
    return ValidatedCall(Problem.from_specs(op, read, options), tuple(needs_copy), all_specs)


def overlap_ranges(call: ValidatedCall) -> list[tuple[int, int, int, int]]:
    """Returns (number of a written array, number of another one, least, most) for each pair of arrays.

    Their byte ranges overlap if the other pointer minus the first is more than `least` and less than `most`.
    """
    op, specs = call.problem.op, call.specs
    targets = (*op.written, *range(len(op.inputs), len(specs)))
    if not targets:
        return []  # spans would take 2 µs for each array of a new shape
    spans = [(0, 0) if spec is None else spec.span for spec in specs]
    ranges = []
    for number, (other, (other_begin, other_end)) in itertools.product(targets, enumerate(spans)):
        begin, end = spans[number]
        if end and other_end and (other > number or other not in targets):
            ranges.append((number, other, begin - other_end, end - other_begin))
    return ranges
