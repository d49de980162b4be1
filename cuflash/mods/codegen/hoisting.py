"""Stages: what a head, a row and an element know of an expression graph, which is rewritten so that a row does most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..graph.affine import LinearForm, from_linear, linear
from ..graph.graph import MAX_INDEX, Node, node, post_order, variable
from ..graph.operations import COMPARISONS, ROUNDING, Type
from ..graph.simplify import build, cast, constant, has_inverse, rebuilt

# The inputs of the three functions. A key is the first key of the tile plus a column, which is a constant for the
# compiler because kernels unroll their loops over columns.
STAGES = (("b", "h", "seqlen_q", "seqlen_k", "softmax_scale"), ("q_idx", "key_begin", "addend"), ("score", "column"))
FLOAT_INPUTS = ("score", "softmax_scale", "addend")
STAGE_NAMES = ("head", "row", "element")
MAX_COLUMN = 511
_STAGE_OF_INPUT = {name: stage for stage, names in enumerate(STAGES) for name in names}
_ELEMENT = frozenset(STAGES[2])

SCORE = variable("score")
# What kernels multiply products q kᵀ by, which functions do not see: it is a part of the score that they are given.
SOFTMAX_SCALE = node("input", Type.FLOAT32, value="softmax_scale")
# What a kernel adds to the scores of a row, such as what it takes off all exponents. A sum with it is taken apart, so
# that it costs nothing: an element begins with it, and each of its terms is one multiplication and addition.
ADDEND = node("input", Type.FLOAT32, value="addend")
COLUMN = node("input", Type.INT32, value="column", range=(0, MAX_COLUMN))
# why not up to MAX_INDEX: their sum is a key, and what is known of keys must hold for it.
KEY_BEGIN = node("input", Type.INT32, value="key_begin", range=(0, MAX_INDEX - MAX_COLUMN))
KEY = build("add", KEY_BEGIN, COLUMN)
_FLOAT_COLUMN = cast(COLUMN, Type.FLOAT32)

DIVISIONS = ("floor_divide", "remainder", "truncated_divide", "truncated_remainder")
# Sums and products: what may wrap.
SUMS = {"add", "subtract", "multiply", "negative", "left_shift"}
# What makes a large difference of a small one.
_SHARP = {*COMPARISONS, *ROUNDING, *DIVISIONS, "sign"}
# A sum: its part that a row knows under None, and the factors of what only elements know.
_Parts = dict[Node | None, Node]


def staged(roots: Sequence[Node]) -> list[Node]:
    """Roots of the same values, whose keys are `key_begin` + `column`, and in which elements share what a row knows."""
    return _with_sums(_with_columns(roots))


def stage_of(node: Node) -> int:
    """The number of the first stage that knows all inputs of a node."""
    return max((_STAGE_OF_INPUT[name] for name in node.inputs), default=0)


def _is_element(node: Node) -> bool:
    return not node.inputs.isdisjoint(_ELEMENT)


def _sharp(roots: Iterable[Node]) -> set[Node]:
    """Floats whose last bit may decide something, such as what is rounded down: they are computed as written."""
    sharp: set[Node] = set()
    for each in reversed(post_order(roots)):
        is_cut = each.op in _SHARP or (each.op == "cast" and each.type != Type.FLOAT32)
        if is_cut or each in sharp:
            sharp.update(argument for argument in each.arguments if argument.type == Type.FLOAT32)
    return sharp


def _with_columns(roots: Sequence[Node]) -> list[Node]:
    """The roots with keys as sums of the tile's first key and a column, and with integers that a row shares."""
    new: dict[Node, Node] = {}
    sharp = _sharp(roots)
    for each in post_order(roots):
        arguments = [new[argument] for argument in each.arguments]
        if each.op == "input" and each.value == "k_idx":
            new[each] = KEY
        elif each.op == "divide" and each not in sharp:
            new[each] = _quotient(*arguments)
        elif each.op in COMPARISONS and arguments[0].type.is_integer:
            new[each] = _comparison(each.op, *arguments)
        elif each.op == "cast" and each.type == Type.FLOAT32 and arguments[0].type.is_integer:
            new[each] = _float_of(arguments[0])
        else:
            new[each] = _integer_sum(rebuilt(each, arguments))
    return [new[root] for root in roots]


def _quotient(x: Node, y: Node) -> Node:
    """x / y, by the inverse of y where an earlier stage than that of x knows y, because a division takes long."""
    is_known = has_inverse(y) if y.op == "constant" else stage_of(y) < stage_of(x)
    if not is_known:
        return build("divide", x, y)
    return build("multiply", x, build("divide", constant(1.0), y))


def _form(x: Node) -> tuple[LinearForm, int] | None:
    """What an integer is without its multiple of the column, and that factor; None if nothing is gained."""
    if not _is_element(x) or _may_wrap(x):
        return None
    form = linear(x)
    factor = form.coefficients.get(COLUMN, 0)
    rest = LinearForm(form.constant, {atom: n for atom, n in form.coefficients.items() if atom is not COLUMN})
    return None if factor == 0 or any(map(_is_element, rest.coefficients)) else (rest, factor)


def _may_wrap(x: Node) -> bool:
    """Whether a sum below may wrap, in which case its terms may not be exchanged."""
    return any(each.op in SUMS and each.type.is_integer and each.range == each.type.limits for each in post_order([x]))


def _integer_sum(x: Node) -> Node:
    """A sum of a part of the row and a multiple of the column, if x is one."""
    if not x.type.is_integer or x.op not in SUMS or (parts := _form(x)) is None:
        return x
    rest, factor = from_linear(parts[0]), parts[1]
    if rest.type > x.type:
        return x
    columns = build("multiply", cast(COLUMN, x.type), constant(abs(factor), x.type))
    return build("add" if factor > 0 else "subtract", cast(rest, x.type), columns)


def _comparison(op: str, x: Node, y: Node) -> Node:
    """A comparison of something that the row knows with a multiple of the column, if it can be written so."""
    # why in int64: the difference of two integers that do not wrap may wrap.
    parts = _form(build("subtract", cast(x, Type.INT64), cast(y, Type.INT64)))
    if parts is None or _may_wrap(x) or _may_wrap(y):
        return build(op, x, y)
    rest, factor = parts
    own = from_linear(rest * (-1 if factor > 0 else 1))
    columns = build("multiply", COLUMN, constant(abs(factor)))
    if own.type != Type.INT32 or columns.range == Type.INT32.limits:
        return build(op, x, y)
    return build(op, columns, own) if factor > 0 else build(op, own, columns)


def _float_of(x: Node) -> Node:
    """float(x) as the sum of two floats, of which the row makes one and the compiler the other.

    It is exact below 2^24, and it costs no conversion.
    """
    parts = _form(x)
    if parts is None or abs(parts[1]) * MAX_COLUMN >= 2**24:
        return cast(x, Type.FLOAT32)
    rest = cast(from_linear(parts[0]), Type.FLOAT32)
    columns = build("multiply", _FLOAT_COLUMN, constant(float(parts[1])))
    return columns if rest is constant(0.0) else build("add", rest, columns)


def _with_sums(roots: Sequence[Node]) -> list[Node]:
    """The roots with floats that depend linearly on the column as two multiplications and additions in one each."""
    new: dict[Node, Node] = {}
    parts: dict[Node, _Parts | None] = {}
    sharp = _sharp(roots)
    for each in post_order(roots):
        parts[each] = found = _parts(each, parts, each in sharp)
        if found is not None and (_has_addend(found) or _is_of_column(found) or _is_multiple(each, found)):
            new[each] = _sum_of(found, new)
        else:
            new[each] = rebuilt(each, [new[argument] for argument in each.arguments])
    return [new[root] for root in roots]


def _has_addend(parts: _Parts) -> bool:
    return None in parts and "addend" in parts[None].inputs


def _is_multiple(x: Node, parts: _Parts) -> bool:
    """Whether a product is something of an element times factors, which earlier stages multiply."""
    return x.op == "multiply" and len(parts) == 1 and parts.keys().isdisjoint({None, x})


def _is_of_column(parts: _Parts) -> bool:
    """Whether a sum is one of multiples of the column, perhaps of the score, and of nothing else of an element."""
    return _FLOAT_COLUMN in parts and parts.keys() <= {None, SCORE, _FLOAT_COLUMN}


def _parts(x: Node, parts: dict[Node, _Parts | None], is_sharp: bool) -> _Parts | None:
    """The parts of a float, whose terms may be exchanged if it is a sum; None for what is no float."""
    if x.type != Type.FLOAT32:
        return None
    if not _is_element(x):
        return {None: x}
    itself: _Parts = {x: constant(1.0)}
    if is_sharp or x.op not in ("add", "subtract", "negative", "multiply"):
        return itself
    found = [parts[argument] for argument in x.arguments]
    first, last = found[0], found[-1]
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
    """The sum of parts, of new nodes. why the column last: it then adds to what is already a sum of two registers."""
    total = parts.get(None)
    atoms = [each for each in parts if each not in (None, SCORE, _FLOAT_COLUMN)]
    for each in (SCORE, *atoms, _FLOAT_COLUMN):
        if each in parts:
            term = build("multiply", new.get(each, each), parts[each])
            total = term if total is None else build("add", total, term)
    assert total is not None
    return total
