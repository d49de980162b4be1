"""Hoists invariant expressions from the elements of a tile to its rows, and from rows to heads: three stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..graph.affine import from_linear
from ..graph.graph import INDEX_OFFSETS, MAX_INDEX, Node, node, post_order, variable
from ..graph.linear import LinearForm, linear
from ..graph.operations import COMPARISONS, DIVISIONS, ROUNDING, Type
from ..graph.simplify import build, cast, constant, has_inverse, is_exponential, rebuilt, transform

# The inputs of the three stages. A key is the first key of the tile plus a column. Kernels unroll their loops over
# columns, so the compiler sees a column as a constant.
STAGES = (("b", "h", "seqlen_q", "seqlen_k", "softmax_scale"), ("q_idx", "key_begin", "addend"), ("score", "column"))
FLOAT_INPUTS = ("score", "softmax_scale", "addend")
STAGE_NAMES = ("head", "row", "element")
MAX_COLUMN = 511
_STAGE_OF_INPUT = dict.fromkeys(INDEX_OFFSETS, 0) | {
    name: stage for stage, names in enumerate(STAGES) for name in names
}
_ELEMENT = frozenset(STAGES[2])

SCORE = variable("score")
# The factor of products q kᵀ. User functions do not read it: their score includes it.
SOFTMAX_SCALE = node("input", Type.FLOAT32, value="softmax_scale")
# A number that a kernel adds to the scores of a row, such as the negative maximum of its exponents. It costs nothing:
# a sum with it is expanded, and each other term is one fused multiplication and addition.
ADDEND = node("input", Type.FLOAT32, value="addend")
COLUMN = node("input", Type.INT32, value="column", range=(0, MAX_COLUMN))
# The range ends below MAX_INDEX, because the sum with a column is a key, whose range ends at MAX_INDEX.
KEY_BEGIN = node("input", Type.INT32, value="key_begin", range=(0, MAX_INDEX - MAX_COLUMN))
KEY = build("add", KEY_BEGIN, COLUMN)
_FLOAT_COLUMN = cast(COLUMN, Type.FLOAT32)

# Sums and products, which may wrap.
SUMS = {"add", "subtract", "multiply", "negative", "left_shift"}
# Operations that turn a small difference into a large one.
_SHARP = {*COMPARISONS, *ROUNDING, *DIVISIONS, "sign"}
# Operations whose divisor, argument or base must have the right sign if it is zero.
_OF_SIGNED_ZEROS = {"divide", "power", "rsqrt", *DIVISIONS}
# A sum: the row's part under the key None, and the factors of the element's nodes.
_Parts = dict[Node | None, Node]


def staged(roots: Sequence[Node]) -> list[Node]:
    """Rewrites roots: keys become `key_begin` + `column`, and elements share the values of their row."""
    return _with_sums(_with_columns(roots))


def stage_of(node: Node) -> int:
    """Returns the number of the first stage in which all inputs of a node are available."""
    return max((_STAGE_OF_INPUT[name] for name in node.inputs), default=0)


def _is_element(node: Node) -> bool:
    return not node.inputs.isdisjoint(_ELEMENT)


def _sharp(roots: Iterable[Node]) -> set[Node]:
    """Returns the floats whose last bit may matter, such as arguments of floor; they are computed as written."""
    sharp: set[Node] = set()
    for each in reversed(post_order(roots)):
        is_cut = each.op in _SHARP or (each.op == "cast" and each.type != Type.FLOAT32)
        if is_cut or each in sharp:
            sharp.update(argument for argument in each.arguments if argument.type.is_float)
    return sharp


def _signed(roots: Iterable[Node]) -> set[Node]:
    """Returns the floats whose zeros may need the right sign, such as divisors."""
    signed: set[Node] = set()
    for each in reversed(post_order(roots)):
        if not each.type.is_float:
            continue
        if each in signed:
            signed.update(each.arguments)
        elif each.op in _OF_SIGNED_ZEROS:
            signed.add(each.arguments[0 if each.op == "power" else -1])
    return signed


def _with_columns(roots: Sequence[Node]) -> list[Node]:
    """Rewrites keys as sums of the tile's first key and a column, and shares integers of a row."""
    sharp, signed = _sharp(roots), _signed(roots)

    def rule(x: Node, arguments: list[Node]) -> Node:
        if x.op == "input" and x.value == "k_idx":
            return KEY
        if x.op == "divide" and x.type == Type.FLOAT32 and x not in sharp:
            return _quotient(*arguments)
        if x.op == "power" and x.type == Type.FLOAT32:
            return _exact_power(*arguments) if x in sharp else _approximate(rebuilt(x, arguments))
        if x.op == "log10" and x.type == Type.FLOAT32 and x in sharp:
            return _exact_log10(*arguments)
        if x.op in COMPARISONS and arguments[0].type.is_integer:
            return _comparison(x.op, *arguments)
        if x.op == "cast" and x.type == Type.FLOAT32 and arguments[0].type.is_integer:
            return _to_float(arguments[0], x in signed)
        return _integer_sum(rebuilt(x, arguments))

    return transform(roots, rule)


def _quotient(x: Node, y: Node) -> Node:
    """Returns x / y; multiplies by the inverse of y if an earlier stage computes it, because a division takes long."""
    if has_inverse(y) if y.op == "constant" else stage_of(y) < stage_of(x):
        return build("multiply", x, build("divide", constant(1.0), y))
    return build("divide", x, y)


def _exact_power(base: Node, exponent: Node) -> Node:
    """Returns a float32 power that is computed in float64 and rounded once: it is exact if float32 holds the power.

    Powers in float32 may be off by several units in the last place, so that 10.0 ** j == 1000.0 may be false.
    """
    return cast(build("power", cast(base, Type.FLOAT64), cast(exponent, Type.FLOAT64)), Type.FLOAT32)


def _exact_log10(x: Node) -> Node:
    """Returns a logarithm that is exact for the powers of ten that float32 holds; log10f may be off by two units.

    In float64, it would take 23 s to compile on a tile of Hopper.
    """
    result = build("log10", x)
    for exponent in range(11):
        is_power = build("equal", x, constant(10.0**exponent))
        result = build("where", is_power, constant(float(exponent)), result)
    return result


def _approximate(x: Node) -> Node:
    """Returns a power of a constant as a faster exponential; other nodes unchanged."""
    if not is_exponential(x):
        return x
    base, exponent = x.arguments
    return build("exp2", build("multiply", exponent, constant(math.log2(base.value))))


def _form(x: Node) -> tuple[LinearForm, int] | None:
    """Returns an integer without its multiple of the column, and the column's factor; None if it is no such sum."""
    if not _is_element(x) or _may_wrap(x):
        return None
    form = linear(x)
    factor = form.coefficients.get(COLUMN, 0)
    rest = form - LinearForm(0, {COLUMN: factor})
    return None if factor == 0 or any(map(_is_element, rest.coefficients)) else (rest, factor)


def _may_wrap(x: Node) -> bool:
    """True if a sum below may wrap, so its terms must not be exchanged."""
    return any(each.op in SUMS and each.type.is_integer and each.range == each.type.limits for each in post_order([x]))


def _integer_sum(x: Node) -> Node:
    """Returns x as the sum of a row value and a multiple of the column, if it is such a sum."""
    if not x.type.is_integer or x.op not in SUMS or (parts := _form(x)) is None:
        return x
    rest, factor = from_linear(parts[0]), parts[1]
    if rest.type > x.type:
        return x
    columns = build("multiply", cast(COLUMN, x.type), constant(abs(factor), x.type))
    return build("add" if factor > 0 else "subtract", cast(rest, x.type), columns)


def _comparison(op: str, x: Node, y: Node) -> Node:
    """Returns a comparison of a row value with a multiple of the column, if the comparison has this form."""
    # Computed in int64, because the difference of two integers that do not wrap may wrap.
    parts = _form(build("subtract", cast(x, Type.INT64), cast(y, Type.INT64)))
    if parts is None or _may_wrap(x) or _may_wrap(y):
        return build(op, x, y)
    rest, factor = parts
    limit = from_linear(rest * (-1 if factor > 0 else 1))
    columns = build("multiply", COLUMN, constant(abs(factor)))
    if columns.type != Type.INT32 or (limit.type != Type.INT32 and not _is_of_indices(x, y, limit)):
        return build(op, x, y)
    if limit.type != Type.INT32:  # no multiple of the column reaches the ends of int32
        least, greatest = (constant(end) for end in Type.INT32.limits)
        limit = cast(build("minimum", build("maximum", limit, least), greatest), Type.INT32)
    return build(op, columns, limit) if factor > 0 else build(op, limit, columns)


def _is_of_indices(x: Node, y: Node, limit: Node) -> bool:
    """True if two integers are int64 only because of multiples of indices and lengths."""
    is_wide = Type.INT64 in (x.type, y.type) and not _may_wrap(limit)
    return is_wide and all(each.op != "load" for each in post_order([x, y]))


def _to_float(x: Node, is_signed: bool) -> Node:
    """Returns float(x) as the sum of a float of the row and a float that the compiler folds to a constant.

    It is exact below 2^24, and it costs no conversion. is_signed: a zero must be 0.0, and not -0.0.
    """
    if x.op in ("absolute", "negative") and x.bounds[0] > x.type.limits[0]:
        # The operation costs nothing for floats, but a negation returns -0.0 for 0. None that may wrap is exchanged.
        argument = _to_float(x.arguments[0], is_signed)
        return build("subtract", constant(0.0), argument) if x.op == "negative" and is_signed else build(x.op, argument)
    parts = _form(x)
    if parts is None or abs(parts[1]) * MAX_COLUMN >= 2**24:
        return cast(x, Type.FLOAT32)
    rest = cast(from_linear(parts[0]), Type.FLOAT32)
    columns = build("multiply", _FLOAT_COLUMN, constant(float(parts[1])))
    return columns if rest is constant(0.0) else build("add", rest, columns)


def _with_sums(roots: Sequence[Node]) -> list[Node]:
    """Rewrites floats that depend linearly on the column as fused multiplications and additions."""
    new: dict[Node, Node] = {}
    parts: dict[Node, _Parts | None] = {}
    sharp = _sharp(roots)
    for each in post_order(roots):
        parts[each] = terms = _parts(each, parts, each in sharp)
        if terms is not None and (_has_addend(terms) or _is_of_column(terms) or _is_multiple(each, terms)):
            new[each] = _sum_of(terms, new)
        else:
            new[each] = rebuilt(each, [new[argument] for argument in each.arguments])
    return [new[root] for root in roots]


def _has_addend(parts: _Parts) -> bool:
    return None in parts and "addend" in parts[None].inputs


def _is_multiple(x: Node, parts: _Parts) -> bool:
    """True if a product is one node of an element times factors of earlier stages, which are multiplied there."""
    return x.op == "multiply" and len(parts) == 1 and parts.keys().isdisjoint({None, x})


def _is_of_column(parts: _Parts) -> bool:
    """True if a sum has a multiple of the column, and no other part of an element except a multiple of the score."""
    return _FLOAT_COLUMN in parts and parts.keys() <= {None, SCORE, _FLOAT_COLUMN}


def _parts(x: Node, parts: dict[Node, _Parts | None], is_sharp: bool) -> _Parts | None:
    """Returns the parts of a float, with terms that may be exchanged if it is a sum; None for other types."""
    if x.type != Type.FLOAT32:
        return None
    if not _is_element(x):
        return {None: x}
    itself: _Parts = {x: constant(1.0)}
    if is_sharp or x.op not in ("add", "subtract", "negative", "multiply"):
        return itself
    first, last = parts[x.arguments[0]], parts[x.arguments[-1]]
    assert first is not None
    assert last is not None
    if x.op == "multiply":
        factor, sum_ = (first, last) if first.keys() == {None} else (last, first)
        if factor.keys() != {None}:
            return itself
        return {key: build("multiply", value, factor[None]) for key, value in sum_.items()}
    if x.op in ("subtract", "negative"):
        last = {key: build("negative", value) for key, value in last.items()}
    if x.op == "negative":
        return last
    return first | {key: build("add", first[key], value) if key in first else value for key, value in last.items()}


def _sum_of(parts: _Parts, new: dict[Node, Node]) -> Node:
    """Returns the sum of parts, of new nodes. The column comes last, so the other terms are already a sum."""
    total = parts.get(None)
    atoms = [each for each in parts if each not in (None, SCORE, _FLOAT_COLUMN)]
    for each in (SCORE, *atoms, _FLOAT_COLUMN):
        if each in parts:
            term = build("multiply", new.get(each, each), parts[each])
            total = term if total is None else build("add", total, term)
    assert total is not None
    return total
