"""Which keys a row may see, from its mask alone: an interval, where the mask is known to be one or to lie in one.

It is taken that sums of integers in the mask do not wrap. Sums that are made here are int64 where int32 may wrap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..graph.affine import LinearForm, from_linear, linear
from ..graph.graph import Node, post_order, variable
from ..graph.operations import BITS, COMPARISONS, Type
from ..graph.simplify import build, cast, constant

# An end that hides nothing: all keys lie between -OPEN and OPEN.
OPEN = 2**30
# An end may be the least or the greatest of so many parts; where there are more, less is said. why: each is compared
# with each, so that a mask written out for a hundred documents took half a minute.
MOST_PARTS = 16
# Larger factors are left alone, so that int64 holds the sums.
MAX_FACTOR = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RowInterval:
    """A row sees no key but those of first <= k_idx <= last, and none if first > last.

    first, last: int32 nodes that do not depend on k_idx; an end that hides nothing is -OPEN or OPEN.
    is_exact: the row sees all of these keys. is_monotone: neither end falls when q_idx rises.
    """

    first: Node
    last: Node
    is_exact: bool
    is_monotone: bool


class _Span(NamedTuple):
    """The same while it is made; None is an end that hides nothing.

    condition: where the span is one of the row alone, what must hold for the row to see all keys instead of none.
    """

    first: Node | None = None
    last: Node | None = None
    is_exact: bool = True
    condition: Node | None = None


def row_interval(mask: Node) -> RowInterval | None:
    """The interval of keys that a row may see; None if nothing is known."""
    span = _span_of_mask(mask)
    if span is None or (span.first is None and span.last is None and not span.is_exact):
        return None
    # why one more on the side where there are no keys: the ends of an empty interval then stay in their order.
    first = _clamped(span.first or constant(-OPEN), -OPEN, OPEN + 1)
    last = _clamped(span.last or constant(OPEN), -OPEN - 1, OPEN)
    return RowInterval(first, last, span.is_exact, _never_falls(first) and _never_falls(last))


class Band(NamedTuple):
    """A query sees exactly the keys with q_idx + lo <= k_idx <= q_idx + hi, where None is open.

    from_end: whether both count from seqlen_k - seqlen_q, beside which the last query stands.
    """

    lo: int | None
    hi: int | None
    from_end: bool

    @property
    def is_open(self) -> bool:
        """Whether a query sees every key."""
        return self.lo is self.hi is None


@lru_cache(maxsize=64)
def band(mask: Node) -> Band | None:
    """What the mask is if the keyword arguments of a plain call could say it, else None."""
    if mask.op == "constant" and mask.value:
        return Band(None, None, True)
    span = _span_of_mask(mask)
    if span is None or not span.is_exact:
        return None
    ends = [None if end is None else _diagonal(end) for end in (span.first, span.last)]
    known = [end for end in ends if end is not None]
    if len(known) < (span.first is not None) + (span.last is not None) or len({end[1] for end in known}) > 1:
        return None
    lo, hi = (None if end is None else end[0] for end in ends)
    return Band(lo, hi, not known or known[0][1])


def _diagonal(end: Node) -> tuple[int, bool] | None:
    """(n, whether it counts from the end) of an end that is q_idx + n, or q_idx + seqlen_k - seqlen_q + n."""
    form = linear(end)
    if abs(form.constant) > OPEN:
        return None
    from_start = {variable("q_idx"): 1}
    from_end = {**from_start, variable("seqlen_k"): 1, variable("seqlen_q"): -1}
    return (form.constant, form.coefficients == from_end) if form.coefficients in (from_start, from_end) else None


def _span_of_mask(mask: Node) -> _Span | None:
    mask = cast(mask, Type.BOOL)
    spans: dict[tuple[Node, bool], _Span | None] = {}
    for each in post_order([mask]):
        if each.type == Type.BOOL:
            for is_true in (True, False):
                spans[each, is_true] = _span(each, is_true, spans)
    return spans[mask, True]


def _clamped(end: Node, least: int, greatest: int) -> Node:
    """An end as int32."""
    if end.type == Type.INT32:
        return end
    return cast(build("minimum", build("maximum", end, constant(least)), constant(greatest)), Type.INT32)


def _span(node: Node, is_true: bool, spans: dict[tuple[Node, bool], _Span | None]) -> _Span | None:
    """The keys for which a condition is true, or false, from those of the conditions below it."""
    if "k_idx" not in node.inputs:
        return _span_of_row(node if is_true else build("logical_not", node))
    arguments = node.arguments
    if node.op == "logical_not":
        return spans[arguments[0], not is_true]
    if node.op == "alike":
        return spans[arguments[0], is_true]
    if node.op in ("bitwise_and", "bitwise_or"):
        parts = [spans[each, is_true] for each in arguments]
        return _both(*parts) if (node.op == "bitwise_and") == is_true else _either(*parts)
    if node.op == "where":
        condition, x, y = arguments
        return _chosen(spans[condition, True], spans[condition, False], spans[x, is_true], spans[y, is_true])
    if node.op in COMPARISONS and arguments[0].type.is_integer:
        return _span_of_comparison(node, is_true)
    return None


def _span_of_row(condition: Node) -> _Span:
    """All keys where a condition of the row holds, and none elsewhere."""
    # why one end: with both, an end falls whenever the condition changes.
    if _never_falls(condition) or not _never_rises(condition):
        return _Span(last=build("where", condition, constant(OPEN), constant(-OPEN - 1)), condition=condition)
    return _Span(first=build("where", condition, constant(-OPEN), constant(OPEN + 1)), condition=condition)


def _span_of_comparison(node: Node, is_true: bool) -> _Span | None:
    difference = linear(node.arguments[1]) - linear(node.arguments[0])
    if node.op in ("less", "less_equal"):
        positive = difference if is_true else difference * -1
        return _span_where_positive(positive - 1 if (node.op == "less") == is_true else positive)
    if (node.op == "equal") == is_true:
        return _both(_span_where_positive(difference), _span_where_positive(difference * -1))
    return _either(_span_where_positive(difference - 1), _span_where_positive(difference * -1 - 1))


def _span_where_positive(form: LinearForm) -> _Span | None:
    """The keys for which form >= 0."""
    if any(abs(factor) > MAX_FACTOR for factor in (form.constant, *form.coefficients.values())):
        return None
    atoms = [atom for atom in form.coefficients if "k_idx" in atom.inputs]
    if not atoms:
        return _span_of_row(build("less_equal", constant(0), from_linear(form)))
    if len(atoms) > 1:
        return None
    atom = atoms[0]
    factor = form.coefficients[atom]
    bound = _quotient(form - LinearForm(0, {atom: factor}), abs(factor))
    return _span_of_atom(atom, 1 if factor > 0 else -1, bound)


def _span_of_atom(atom: Node, sign: int, bound: LinearForm) -> _Span | None:
    """The keys for which sign × atom + bound >= 0, where only the atom depends on the key."""
    if atom is variable("k_idx"):
        end = from_linear(bound * -sign)
        return _Span(first=end) if sign > 0 else _Span(last=end)
    if (divisor := _divisor(atom)) is not None:
        # why: x // n >= a means x >= n * a, and x // n <= a means x <= n * a + n - 1.
        inside = linear(atom.arguments[0]) * sign + bound * divisor
        return _span_where_positive(inside if sign > 0 else inside + (divisor - 1))
    if atom.op == "absolute" and sign < 0:
        inside = linear(atom.arguments[0])
        return _both(_span_where_positive(bound - inside), _span_where_positive(bound + inside))
    if atom.op in ("minimum", "maximum", "fmin", "fmax"):
        parts = [_span_where_positive(linear(each) * sign + bound) for each in atom.arguments]
        return _both(*parts) if (atom.op in ("minimum", "fmin")) == (sign > 0) else _either(*parts)
    return None


def _divisor(atom: Node) -> int | None:
    """The number n >= 1 if the atom is a floor division by it."""
    if len(atom.arguments) != 2 or atom.arguments[1].op != "constant":
        return None
    x, number = atom.arguments[0], atom.arguments[1].value
    if atom.op == "right_shift":
        return 2**number if 0 <= number < 31 else None
    is_floor = atom.op == "floor_divide" or (atom.op == "truncated_divide" and x.bounds[0] >= 0)
    return number if is_floor and number >= 1 else None


def _quotient(form: LinearForm, divisor: int) -> LinearForm:
    """form // divisor; coefficients that the divisor divides are divided by themselves."""
    whole = LinearForm(
        form.constant // divisor, {atom: n // divisor for atom, n in form.coefficients.items() if n % divisor == 0}
    )
    rest = form - whole * divisor
    return whole + linear(build("floor_divide", from_linear(rest), constant(divisor)))


def _both(*parts: _Span | None) -> _Span | None:
    """The keys in both of two spans."""
    x, y = parts
    if x is None or y is None:
        known = x or y
        return known and _Span(known.first, known.last, is_exact=False)
    first, last = _extreme("maximum", x.first, y.first), _extreme("minimum", x.last, y.last)
    if _has_many_parts(first) or _has_many_parts(last):
        return _Span(x.first, x.last, is_exact=False)
    return _Span(first, last, x.is_exact and y.is_exact)


def _has_many_parts(end: Node | None) -> bool:
    """Whether an end is the least or the greatest of more than MOST_PARTS numbers."""
    left, count = [] if end is None else [end], 0
    while left and count <= MOST_PARTS:  # why no further: parts that are shared may make up endless many
        node = left.pop()
        if node.op in ("minimum", "maximum"):
            left += node.arguments
        else:
            count += 1
    return count > MOST_PARTS


def _extreme(op: str, x: Node | None, y: Node | None) -> Node | None:
    """The end that hides more keys; None if both hide nothing."""
    if x is None or y is None:
        return x or y
    if _is_at_least(x, y):
        return x if op == "maximum" else y
    if _is_at_least(y, x):
        return y if op == "maximum" else x
    return build(op, x, y)


def _either(*parts: _Span | None) -> _Span | None:
    """A span of the keys in one of two."""
    x, y = parts
    if x is None or y is None:
        return None
    if x.condition is not None:
        return _where(x.condition, _Span(), y)
    if y.condition is not None:
        return _where(y.condition, _Span(), x)
    if _is_empty(x) or _is_empty(y):
        return y if _is_empty(x) else x
    first = None if x.first is None or y.first is None else _extreme("minimum", x.first, y.first)
    last = None if x.last is None or y.last is None else _extreme("maximum", x.last, y.last)
    if _has_many_parts(first) or _has_many_parts(last):
        return None
    # why these have no hole: both begin or both end nowhere, or each begins at the latest right after the other.
    # The last holds also where one of them is empty.
    is_whole = x.first is y.first is None or x.last is y.last is None or (_touches(x, y) and _touches(y, x))
    return _Span(first, last, is_whole and x.is_exact and y.is_exact)


def _is_empty(span: _Span) -> bool:
    return span.first is not None and span.last is not None and _is_at_least(span.first, span.last, -1)


def _touches(x: _Span, y: _Span) -> bool:
    """Whether no key lies between the last of one span and the first of the other."""
    return x.last is None or y.first is None or _is_at_least(x.last, y.first, 1)


def _chosen(condition: _Span | None, inverse: _Span | None, x: _Span | None, y: _Span | None) -> _Span | None:
    """The keys of one span where a condition holds, and of another where it does not."""
    if condition is not None and condition.condition is not None:
        return None if x is None or y is None else _where(condition.condition, x, y)
    return _either(_both(condition, x), _both(inverse, y))


def _where(condition: Node, x: _Span, y: _Span) -> _Span:
    """One span where a condition of the row holds, and another where it does not."""
    first = last = None
    if x.first is not None or y.first is not None:
        first = build("where", condition, x.first or constant(-OPEN), y.first or constant(-OPEN))
    if x.last is not None or y.last is not None:
        last = build("where", condition, x.last or constant(OPEN), y.last or constant(OPEN))
    return _Span(first, last, x.is_exact and y.is_exact)


def _is_at_least(x: Node, y: Node, more: int = 0) -> bool:
    """Whether x + more >= y for all inputs, as far as this is seen."""
    if (linear(x) - linear(y)).bounds[0] + more >= 0:
        return True
    if y.op == "maximum":
        return all(_is_at_least(x, each, more) for each in y.arguments)
    if x.op == "minimum":
        return all(_is_at_least(each, y, more) for each in x.arguments)
    if x.op == "maximum" and any(_is_at_least(each, y, more) for each in x.arguments):
        return True
    return y.op == "minimum" and any(_is_at_least(x, each, more) for each in y.arguments)


def _never_falls(node: Node) -> bool:
    """Whether the value stays or rises when q_idx rises, as far as this is seen. True is above False."""
    return _keeps_direction(node, 1)


def _never_rises(node: Node) -> bool:
    return _keeps_direction(node, -1)


def _keeps_direction(node: Node, sign: int) -> bool:
    """Whether sign × node never falls when q_idx rises. Captured arrays are not taken to be sorted."""
    if "q_idx" not in node.inputs:
        return True
    if node.type == Type.FLOAT32 or any(each.type == Type.FLOAT32 for each in node.arguments):
        return False
    if node.op == "input":
        return sign > 0
    x, y = node.arguments[0], node.arguments[-1]
    if node.op in ("add", "minimum", "maximum", "fmin", "fmax") or (node.op in BITS and node.type == Type.BOOL):
        return node.op != "bitwise_xor" and all(_keeps_direction(each, sign) for each in node.arguments)
    if node.op in ("negative", "logical_not", "invert"):
        return _keeps_direction(x, -sign)
    if node.op == "subtract":
        return _keeps_direction(x, sign) and _keeps_direction(y, -sign)
    if node.op in ("less", "less_equal"):
        return _keeps_direction(x, -sign) and _keeps_direction(y, sign)
    if node.op == "where":
        return _keeps_direction_of_where(node, sign)
    if node.op == "cast":
        least, greatest = node.type.limits
        return least <= x.bounds[0] and x.bounds[1] <= greatest and _keeps_direction(x, sign)
    if node.op in ("multiply", "floor_divide", "truncated_divide", "right_shift") and "q_idx" not in y.inputs:
        is_known = node.op in ("multiply", "right_shift") or y.bounds[0] > 0
        return is_known and y.bounds[0] >= 0 and _keeps_direction(x, sign)
    return False


def _keeps_direction_of_where(node: Node, sign: int) -> bool:
    condition, x, y = node.arguments
    if not _keeps_direction(x, sign) or not _keeps_direction(y, sign):
        return False
    if "q_idx" not in condition.inputs:
        return True
    if node.type == Type.BOOL:
        return False
    # why: a rising condition goes from y to x, so x must lie on the right side of y.
    above, below = (x, y) if sign > 0 else (y, x)
    if _never_falls(condition):
        return _is_at_least(above, below)
    return _never_rises(condition) and _is_at_least(below, above)
