"""The call path of `attention`: validates arrays and options once for equal calls, and binds the primitive."""

from __future__ import annotations

import functools
from typing import Any

import jax

from ...errors import ProblemError
from ...problem.integers import check_integers
from ...problem.operands import VARLEN_ARGS, Op
from ...problem.options import Options
from ...problem.problem import Problem
from . import autograd
from .arguments import arrays_of, is_on_host
from .handlers import FORWARD, CallOptions, Shape, op_of, specs_of
from .primitives import check_not_reduced


def run(named: dict[str, Any], options: Options, with_lse: bool, op: Op | None = None) -> Any:
    """Returns the result of a call of operands by name, in the op's order. op: None for a plain call."""
    arrays = arrays_of(**named)
    static = static_of(tuple(named), arrays, options, op)
    if len(named) > 3:
        _check_values(named, arrays, options, op)
    return autograd.attention(static, with_lse, *_varying_alike(static.names, arrays))


def static_of(names: tuple[str, ...], arrays: tuple[Any, ...], options: Options, op: Op | None = None) -> CallOptions:
    """Validates a call; returns all of it but its arrays."""
    call_key = names, tuple(x.shape for x in arrays), tuple(x.dtype for x in arrays), options.key(), op
    try:
        try:
            return _validated(*call_key)
        except ProblemError:
            raise
        except (TypeError, ValueError):  # an unhashable argument: no cached result
            return _validated.__wrapped__(*call_key)
    except ProblemError as error:
        axes = jax.sharding.get_abstract_mesh().manual_axes
        if not axes:
            raise
        raise ProblemError(f"{error}. The shapes are of one shard, over {', '.join(map(str, axes))}") from None


@functools.lru_cache(maxsize=4096)
def _validated(
    names: tuple[str, ...],
    shapes: tuple[Shape, ...],
    dtypes: tuple[Any, ...],
    options: tuple[Any, ...],
    op: Op | None,
) -> CallOptions:
    """Returns the options of a validated call. options: `Options.key()`, which keeps 1 and True apart."""
    return CallOptions.from_problem(_problem(names, shapes, dtypes, options[0], op), names)


def _problem(
    names: tuple[str, ...], shapes: tuple[Shape, ...], dtypes: tuple[Any, ...], options: Options, op: Op | None
) -> Problem:
    op = op or op_of(FORWARD, names)
    return Problem.from_specs(op, specs_of(op, names, shapes, [*map(str, dtypes)]), options)


def _check_values(named: dict[str, Any], arrays: tuple[Any, ...], options: Options, op: Op | None) -> None:
    """Validates lengths, pages and rows of a cache if all of them have values that the host may read.

    The handler on the CPU validates them too, but its errors are XLA's, and have no names of the caller.
    """
    integers = [x for name, x in named.items() if name in VARLEN_ARGS]
    if integers and all(map(is_on_host, integers)):
        shapes, dtypes = tuple(x.shape for x in arrays), tuple(x.dtype for x in arrays)
        check_integers(_problem(tuple(named), shapes, dtypes, options, op), named)


def _varying_alike(names: tuple[str, ...], arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Marks arrays under shard_map as varying over the same mesh axes; JAX sums gradients over the added axes."""
    types = [jax.typeof(x) for x in arrays]
    # JAX up to 0.9 calls the axes `vma`.
    varying = [frozenset(t.vma if hasattr(t, "vma") else t.manual_axis_type.varying) for t in types]
    axes = frozenset().union(*varying)
    alike = tuple(
        x if varies == axes else jax.lax.pcast(x, tuple(sorted(axes - varies)), to="varying")
        for x, varies in zip(arrays, varying, strict=True)
    )
    for name, x in zip(names, alike, strict=True):
        check_not_reduced(name, x)
    return alike
