"""Masks that are a band around the diagonal, recognised by the interval of keys that each row sees.

Sums of captured int64 may wrap and have no interval. Sums that are built here are int64 where int32 may wrap.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..graph.affine import from_linear
from ..graph.graph import MAX_INDEX, Node, post_order, variable
from ..graph.linear import LinearForm, linear
from ..graph.operations import COMPARISONS, Type
from ..graph.simplify import build, cast, constant

# The number that stands for an open end: all keys lie between -OPEN and OPEN.
OPEN = MAX_INDEX + 1
# The number of parts of which an end may be the minimum or the maximum; with more parts the interval is wider.
# All pairs of parts are compared, which took half a minute for a mask written out for a hundred documents.
MOST_PARTS = 16
# Forms with larger factors have no span, so that int64 holds the sums.
MAX_FACTOR = 2**31 - 1
_WRAPPING = {"add", "subtract", "multiply", "negative", "absolute", "left_shift"}


class _Span(NamedTuple):
    """An interval during the analysis; None is an open end.

    condition: only in a span that depends on the row alone. The row sees all keys if it is true, else none.
    """

    first: Node | None = None
    last: Node | None = None
    is_exact: bool = True
    condition: Node | None = None


class Band(NamedTuple):
    """The keys that a query sees, q_idx + lo <= k_idx <= q_idx + hi; None is an open end.

    from_end: True if both offsets count from seqlen_k - seqlen_q, i.e. the diagonal is bottom-right aligned.
    """

    lo: int | None
    hi: int | None
    from_end: bool

    @property
    def is_open(self) -> bool:
        """True if a query sees every key."""
        return self.lo is self.hi is None

    def shifted(self, keys: int) -> Band:
        """Returns the band that begins and ends this many keys later."""
        return self._replace(
            lo=None if self.lo is None else self.lo + keys, hi=None if self.hi is None else self.hi + keys
        )


@lru_cache(maxsize=64)
def band(mask: Node) -> Band | None:
    """Returns the mask as a band that keyword arguments of a plain call can express, or None."""
    if mask.op == "constant" and mask.value:
        return Band(None, None, True)
    span = _span_of_mask(mask)
    if span is None or not span.is_exact:
        return None
    ends = [None if end is None else _diagonal(end) for end in (span.first, span.last)]
    diagonals = [end for end in ends if end is not None]
    if len(diagonals) < (span.first is not None) + (span.last is not None) or len({end[1] for end in diagonals}) > 1:
        return None
    lo, hi = (None if end is None else end[0] for end in ends)
    return Band(lo, hi, not diagonals or diagonals[0][1])


def _diagonal(end: Node) -> tuple[int, bool] | None:
    """Returns (n, False) for an end q_idx + n, (n, True) for an end q_idx + seqlen_k - seqlen_q + n, else None."""
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


def _span(node: Node, is_true: bool, spans: dict[tuple[Node, bool], _Span | None]) -> _Span | None:
    """Returns the span where a condition is true, or false, from the spans of the conditions below it."""
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
        return _choose(spans[condition, True], spans[condition, False], spans[x, is_true], spans[y, is_true])
    if node.op in COMPARISONS and arguments[0].type.is_integer:
        return _span_of_comparison(node, is_true)
    return None


def _span_of_row(condition: Node) -> _Span:
    """Returns the span of all keys in rows where a condition holds, and of no key in other rows."""
    return _Span(last=build("where", condition, constant(OPEN), constant(-OPEN - 1)), condition=condition)


def _span_of_comparison(node: Node, is_true: bool) -> _Span | None:
    if any(x.op in _WRAPPING and x.extent == Type.INT64.limits for x in post_order(node.arguments)):
        return None
    difference = linear(node.arguments[1]) - linear(node.arguments[0])
    if node.op in ("less", "less_equal"):
        positive = difference if is_true else difference * -1
        return _span_where_positive(positive - 1 if (node.op == "less") == is_true else positive)
    if (node.op == "equal") == is_true:
        return _both(_span_where_positive(difference), _span_where_positive(difference * -1))
    return _either(_span_where_positive(difference - 1), _span_where_positive(difference * -1 - 1))


def _span_where_positive(form: LinearForm) -> _Span | None:
    """Returns the span of the keys for which form >= 0."""
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
    """Returns the span of the keys for which sign × atom + bound >= 0; only the atom depends on the key."""
    if atom is variable("k_idx"):
        end = from_linear(bound * -sign)
        return _Span(first=end) if sign > 0 else _Span(last=end)
    if (divisor := _divisor(atom)) is not None:
        # x // n >= a is equivalent to x >= n * a, and x // n <= a to x <= n * a + n - 1.
        form = linear(atom.arguments[0]) * sign + bound * divisor
        return _span_where_positive(form if sign > 0 else form + (divisor - 1))
    if atom.op == "absolute" and sign < 0:
        form = linear(atom.arguments[0])
        return _both(_span_where_positive(bound - form), _span_where_positive(bound + form))
    if atom.op in ("minimum", "maximum", "fmin", "fmax"):
        parts = [_span_where_positive(linear(each) * sign + bound) for each in atom.arguments]
        return _both(*parts) if (atom.op in ("minimum", "fmin")) == (sign > 0) else _either(*parts)
    return None


def _divisor(atom: Node) -> int | None:
    """Returns the number n >= 1 if the atom is a floor division by n, else None."""
    if len(atom.arguments) != 2 or atom.arguments[1].op != "constant":
        return None
    x, number = atom.arguments[0], atom.arguments[1].value
    if atom.op == "right_shift":
        return 2**number if 0 <= number < 31 else None
    is_floor = atom.op == "floor_divide" or (atom.op == "truncated_divide" and x.bounds[0] >= 0)
    return number if is_floor and number >= 1 else None


def _quotient(form: LinearForm, divisor: int) -> LinearForm:
    """Returns form // divisor; coefficients that are multiples of the divisor are divided separately."""
    multiples = {atom: n // divisor for atom, n in form.coefficients.items() if n % divisor == 0}
    quotient = LinearForm(form.constant // divisor, multiples)
    remainder = from_linear(form - quotient * divisor)
    return quotient + linear(build("floor_divide", remainder, constant(divisor)))


def _both(*parts: _Span | None) -> _Span | None:
    """Returns a span of the keys in both spans; it is not exact if one span is unknown."""
    x, y = parts
    if x is None or y is None:
        span = x or y
        return span and _Span(span.first, span.last, is_exact=False)
    first, last = _extreme("maximum", x.first, y.first), _extreme("minimum", x.last, y.last)
    if _has_many_parts(first) or _has_many_parts(last):
        return _Span(x.first, x.last, is_exact=False)
    return _Span(first, last, x.is_exact and y.is_exact)


def _has_many_parts(end: Node | None) -> bool:
    """True if an end is the minimum or the maximum of more than MOST_PARTS numbers."""
    stack, count = [] if end is None else [end], 0
    while stack and count <= MOST_PARTS:  # bounded: nodes with many users double the count repeatedly
        node = stack.pop()
        if node.op in ("minimum", "maximum"):
            stack += node.arguments
        else:
            count += 1
    return count > MOST_PARTS


def _extreme(op: str, x: Node | None, y: Node | None) -> Node | None:
    """Returns the minimum or the maximum of two ends, by `op`. An open end is left out; None if both are open."""
    if x is None or y is None:
        return x or y
    if _is_at_least(x, y):
        return x if op == "maximum" else y
    if _is_at_least(y, x):
        return y if op == "maximum" else x
    return build(op, x, y)


def _either(*parts: _Span | None) -> _Span | None:
    """Returns a span of the keys in at least one span."""
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
    # The union has no hole if both begins or both ends are open, or if each span begins at most one key after the other
    # ends. The second condition also holds where one span is empty.
    is_whole = x.first is y.first is None or x.last is y.last is None or (_touches(x, y) and _touches(y, x))
    return _Span(first, last, is_whole and x.is_exact and y.is_exact)


def _is_empty(span: _Span) -> bool:
    return span.first is not None and span.last is not None and _is_at_least(span.first, span.last, -1)


def _touches(x: _Span, y: _Span) -> bool:
    """True if no key lies between the last key of x and the first key of y."""
    return x.last is None or y.first is None or _is_at_least(x.last, y.first, 1)


def _choose(condition: _Span | None, inverse: _Span | None, x: _Span | None, y: _Span | None) -> _Span | None:
    """Returns the span of x where a condition holds, and of y elsewhere."""
    if condition is not None and condition.condition is not None:
        return None if x is None or y is None else _where(condition.condition, x, y)
    return _either(_both(condition, x), _both(inverse, y))


def _where(condition: Node, x: _Span, y: _Span) -> _Span:
    """Returns the span of x in rows where a condition holds, and of y in other rows."""
    first, last = (
        build("where", condition, one or constant(end), other or constant(end)) if one or other else None
        for one, other, end in ((x.first, y.first, -OPEN), (x.last, y.last, OPEN))
    )
    return _Span(first, last, x.is_exact and y.is_exact)


def _is_at_least(x: Node, y: Node, more: int = 0) -> bool:
    """True if x + more >= y can be proved for all inputs."""
    if (linear(x) - linear(y)).bounds[0] + more >= 0:
        return True
    if y.op == "maximum":
        return all(_is_at_least(x, each, more) for each in y.arguments)
    if x.op == "minimum":
        return all(_is_at_least(each, y, more) for each in x.arguments)
    if x.op == "maximum" and any(_is_at_least(each, y, more) for each in x.arguments):
        return True
    return y.op == "minimum" and any(_is_at_least(x, each, more) for each in y.arguments)
