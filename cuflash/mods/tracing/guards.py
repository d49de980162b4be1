"""What a trace read on its way, by which a later call sees in microseconds whether its own trace would be the same.

Guards hold no array and no other object that is large or alive: they hold the reads that lead from the function to
what it refers to, and what was found there: code objects, numbers, the dtypes and shapes of arrays. They are written as
the text of a Python function, as every call asks it: a loop over reads that are functions takes four times as long.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

Reader = Callable[[Any, Any], Any]
# What a read may raise where there is nothing.
ABSENT = (AttributeError, LookupError, TypeError, ValueError)


def cell(function: Any, place: Any) -> Any:
    """What a function refers to in a cell of its closure."""
    return function.__closure__[place].cell_contents


def global_of(function: Any, name: Any) -> Any:
    """What a function refers to among the globals of its module."""
    return function.__globals__[name]


# Reads as text, of an object and a key.
_TEXTS: dict[Any, str] = {
    cell: "{0}.__closure__[{1}].cell_contents",
    global_of: "{0}.__globals__[{1}]",
    operator.getitem: "{0}[{1}]",
    getattr: "getattr({0}, {1})",
}


class Matcher(NamedTuple):
    """Whether what a read finds fits to the trace: an expression of `value` and of objects, which are {0}, {1} …

    v3 is what read number 3 finds.
    """

    text: str
    objects: tuple[Any, ...] = ()


class _Read(NamedTuple):
    """One read: `read(found, key)`, where `found` is what the read of number `parent` found; 0 is the function."""

    parent: int
    read: Reader
    key: Any
    matches: Matcher


class Guards:
    """The reads of one trace, in their order.

    root: which functions it is of. is_complete: whether nothing else was read; otherwise the function is traced anew
    each time.
    """

    def __init__(self) -> None:
        self.root = Matcher("True")
        self._reads: list[_Read] = []
        self._objects = [0]
        self.is_complete = True

    def add(self, parent: int, read: Reader, key: Any, matches: Matcher, is_object: bool = False) -> int:
        """Writes a read down, and returns its number. is_object: nothing that was found before is this object."""
        self._reads.append(_Read(parent, read, key, matches))
        if is_object:
            self._objects.append(len(self._reads))
        return len(self._reads)

    def function(self, results: Sequence[int]) -> Callable[[Any], tuple[Any, ...] | None]:
        """A function of what may be the function of this trace: what the reads of these numbers find now.

        It returns None where a read finds what does not fit.
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
        # why: what was two objects may be one now, and a trace would see it.
        pairs = [f"v{one} is v{other}" for one, other in combinations(self._objects, 2)]
        if len(pairs) > 3:
            ids = ", ".join(f"id(v{number})" for number in self._objects)
            pairs = [f"len({{{ids}}}) < {len(self._objects)}"]
        lines += [f"if {' or '.join(pairs)}: return None"] if pairs else []
        lines.append(f"return ({''.join(f'v{number}, ' for number in results)})")
        body = "".join(f"        {line}\n" for line in lines)
        text = f"def found(v0):\n    try:\n{body}    except ABSENT: return None\n"
        exec(compile(text, f"<{__name__}>", "exec"), names)
        made: Callable[[Any], tuple[Any, ...] | None] = names["found"]
        return made


def same_as(number: int) -> Matcher:
    """It must be the object that an earlier read finds."""
    return Matcher(f"{{value}} is v{number}")


def identical(wanted: Any) -> Matcher:
    """It must be this object, which belongs to a library."""
    return Matcher("{value} is {0}", (wanted,))


def equal(wanted: Any) -> Matcher:
    """It must be an equal number or string of the same type. why repr: 0.0 equals -0.0, and NaN not even itself."""
    if isinstance(wanted, int | str | bytes | None):
        return Matcher("{value} is {0} or (type({value}) is {1} and {value} == {0})", (wanted, type(wanted)))
    objects = wanted, type(wanted), repr(wanted)
    return Matcher("{value} is {0} or (type({value}) is {1} and repr({value}) == {2})", objects)


def of_type(wanted: Any) -> Matcher:
    """It must have the same type; what it holds is read by itself."""
    return Matcher("type({value}) is {0}", (type(wanted),))


def of_keys(wanted: Any) -> Matcher:
    """It must be a container with the same keys, or of the same length."""
    if isinstance(wanted, dict):
        return Matcher("type({value}) is {0} and tuple({value}) == {1}", (type(wanted), tuple(wanted)))
    return Matcher("type({value}) is {0} and len({value}) == {1}", (type(wanted), len(wanted)))


def of_constants(wanted: Any) -> Matcher:
    """It must be a container of equal numbers and strings."""
    return Matcher("type({value}) is {0} and repr({value}) == {1}", (type(wanted), repr(wanted)))


def of_code(wanted: Any) -> Matcher:
    """It must be a function of the same code; its cells, globals and defaults are read by themselves."""
    return Matcher("type({value}) is {0} and {value}.__code__ is {1}", (type(wanted), wanted.__code__))


def of_shape(wanted: Any) -> Matcher:
    """It must be an array of the same library, dtype and shape. Its values are not part of a trace."""
    objects = type(wanted), wanted.dtype, wanted.shape
    return Matcher("type({value}) is {0} and {value}.dtype == {1} and {value}.shape == {2}", objects)


def absent(read: Reader) -> Reader:
    """Whether a read still finds nothing."""

    def is_absent(value: Any, key: Any) -> bool:
        try:
            read(value, key)
        except ABSENT:
            return True
        return False

    return is_absent
