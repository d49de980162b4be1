"""Guards of a trace: cheap checks that decide in microseconds whether a later call has an equal trace.

Guards hold no array and no other object that is large or alive. They hold the reads that lead from the function to its
objects, and the results. These are code objects, numbers, and dtypes and shapes of arrays. Guards are compiled into a
Python function, because every call runs them: a loop over reads that are functions takes four times as long.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

Reader = Callable[[Any, Any], Any]
# The errors of a read whose object is missing.
ABSENT = (AttributeError, LookupError, TypeError, ValueError)


def cell_value(function: Any, place: Any) -> Any:
    """Returns the value in a cell of a function's closure."""
    return function.__closure__[place].cell_contents


def global_value(function: Any, name: Any) -> Any:
    """Returns a global of a function's module."""
    return function.__globals__[name]


# Texts of reads, by an object and a key.
_TEXTS: dict[Any, str] = {
    cell_value: "{0}.__closure__[{1}].cell_contents",
    global_value: "{0}.__globals__[{1}]",
    operator.getitem: "{0}[{1}]",
    getattr: "getattr({0}, {1})",
}


class Matcher(NamedTuple):
    """An expression that is true if the result of a read, `value`, fits the trace. {0}, {1} … are `objects`.

    v3 is the result of read number 3.
    """

    text: str
    objects: tuple[Any, ...] = ()


class _Read(NamedTuple):
    """One read: `read(x, key)`, where x is the result of the read of number `parent`; 0 is the function."""

    parent: int
    read: Reader
    key: Any
    matches: Matcher


class Guards:
    """The reads of one trace, in order.

    root: matches the functions with this trace. is_complete: False if the trace depends on more than these reads; the
    function is then traced anew each time.
    """

    def __init__(self) -> None:
        self.root = Matcher("True")
        self._reads: list[_Read] = []
        self._objects = [0]
        self.is_complete = True

    def add(self, parent: int, read: Reader, key: Any, matches: Matcher, is_object: bool = False) -> int:
        """Appends a read and returns its number. is_object: no result of an earlier read is this object."""
        self._reads.append(_Read(parent, read, key, matches))
        if is_object:
            self._objects.append(len(self._reads))
        return len(self._reads)

    def function(self, results: Sequence[int]) -> Callable[[Any], tuple[Any, ...] | None]:
        """Returns a function that takes a user function and returns the results of the reads with these numbers.

        It returns None if the result of a read does not fit.
        """
        names: dict[str, Any] = {"ABSENT": ABSENT}

        def name(x: Any) -> str:
            names[f"object{len(names)}"] = x
            return f"object{len(names) - 1}"

        def test(number: int, matches: Matcher) -> str:
            return f"if not ({matches.text.format(*map(name, matches.objects), value=f'v{number}')}): return None"

        lines = [test(0, self.root)]
        for number, (parent, read, key, matches) in enumerate(self._reads, 1):
            text = _TEXTS.get(read) or f"{name(read)}({{0}}, {{1}})"
            lines += [f"v{number} = {text.format(f'v{parent}', name(key))}", test(number, matches)]
        # Distinct objects of the trace may be one object now, which has another trace.
        pairs = [f"v{one} is v{other}" for one, other in combinations(self._objects, 2)]
        if len(pairs) > 3:
            ids = ", ".join(f"id(v{number})" for number in self._objects)
            pairs = [f"len({{{ids}}}) < {len(self._objects)}"]
        lines += [f"if {' or '.join(pairs)}: return None"] if pairs else []
        lines.append(f"return ({''.join(f'v{number}, ' for number in results)})")
        body = "".join(f"        {line}\n" for line in lines)
        text = f"def check(v0):\n    try:\n{body}    except ABSENT: return None\n"
        exec(compile(text, f"<{__name__}>", "exec"), names)
        check: Callable[[Any], tuple[Any, ...] | None] = names["check"]
        return check


def same_as(number: int) -> Matcher:
    """Matches the object that an earlier read returns."""
    return Matcher(f"{{value}} is v{number}")


def identical(x: Any) -> Matcher:
    """Matches this object, which belongs to a library."""
    return Matcher("{value} is {0}", (x,))


def equal(x: Any) -> Matcher:
    """Matches an equal number or string of the same type.

    Floats compare by repr, because 0.0 equals -0.0, and NaN does not equal itself.
    """
    if isinstance(x, int | str | bytes | None):
        return Matcher("{value} is {0} or (type({value}) is {1} and {value} == {0})", (x, type(x)))
    return Matcher("{value} is {0} or (type({value}) is {1} and repr({value}) == {2})", (x, type(x), repr(x)))


def with_type(x: Any) -> Matcher:
    """Matches an object of the same type; its contents have separate reads."""
    return Matcher("type({value}) is {0}", (type(x),))


def with_keys(x: Any) -> Matcher:
    """Matches a container with the same keys, or of the same length."""
    if isinstance(x, dict):
        return Matcher("type({value}) is {0} and tuple({value}) == {1}", (type(x), tuple(x)))
    return Matcher("type({value}) is {0} and len({value}) == {1}", (type(x), len(x)))


def with_constants(x: Any) -> Matcher:
    """Matches a container of equal numbers and strings."""
    return Matcher("type({value}) is {0} and repr({value}) == {1}", (type(x), repr(x)))


def with_code(x: Any) -> Matcher:
    """Matches a function with the same code; its cells, globals and defaults have separate reads."""
    return Matcher("type({value}) is {0} and {value}.__code__ is {1}", (type(x), x.__code__))


def with_shape(x: Any) -> Matcher:
    """Matches an array of the same library, dtype and shape. Its values are not part of a trace."""
    objects = type(x), x.dtype, x.shape
    return Matcher("type({value}) is {0} and {value}.dtype == {1} and {value}.shape == {2}", objects)


def absent(read: Reader) -> Reader:
    """Returns a reader that is True if a read fails."""

    def is_absent(value: Any, key: Any) -> bool:
        try:
            read(value, key)
        except ABSENT:
            return True
        return False

    return is_absent
