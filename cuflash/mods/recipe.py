"""What a trace read on its way, by which a later call sees in microseconds whether its own trace would be the same.

A recipe holds no array and no other object that is large or alive: it holds the reads that lead from the function to
what it refers to, and what was found there: code objects, numbers, the dtypes and shapes of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Reader = Callable[[Any, Any], Any]
# Whether what a read finds now fits to the trace, from it and from what the reads before it found.
Matcher = Callable[[Any, Sequence[Any]], bool]
# What a read may raise where there is nothing.
ABSENT = (AttributeError, LookupError, TypeError, ValueError)


class _Read(NamedTuple):
    """One read: `read(found, key)`, where `found` is what the read of number `parent` found; 0 is the function."""

    parent: int
    read: Reader
    key: Any
    matches: Matcher


class Recipe:
    """The reads of one trace, in their order.

    is_complete: whether nothing else was read; otherwise the function is traced anew each time.
    """

    def __init__(self, matches_root: Matcher) -> None:
        self._matches_root = matches_root
        self._reads: list[_Read] = []
        self._objects = [0]
        self.is_complete = True

    def add(self, parent: int, read: Reader, key: Any, matches: Matcher, is_object: bool = False) -> int:
        """Writes a read down, and returns its number. is_object: nothing that was found before is this object."""
        self._reads.append(_Read(parent, read, key, matches))
        if is_object:
            self._objects.append(len(self._reads))
        return len(self._reads)

    def found(self, root: Any) -> list[Any] | None:
        """What all reads find now, the function first, if each finds what fits; otherwise None."""
        if not self._matches_root(root, ()):
            return None
        found = [root]
        for parent, read, key, matches in self._reads:
            try:
                value = read(found[parent], key)
            except ABSENT:
                return None
            if not matches(value, found):
                return None
            found.append(value)
        # why: what was two objects may be one now, and a trace would see it.
        if len({id(found[number]) for number in self._objects}) < len(self._objects):
            return None
        return found


def same_as(number: int) -> Matcher:
    """It must be the object that an earlier read finds."""
    return lambda value, found: value is found[number]


def identical(wanted: Any) -> Matcher:
    """It must be this object, which belongs to a library."""
    return lambda value, _: value is wanted


def equal(wanted: Any) -> Matcher:
    """It must be an equal number or string of the same type. why repr: 0.0 equals -0.0, and NaN not even itself."""
    kind = type(wanted)
    if isinstance(wanted, int | str | bytes | None):
        return lambda value, _: value is wanted or (type(value) is kind and value == wanted)
    text = repr(wanted)
    return lambda value, _: value is wanted or (type(value) is kind and repr(value) == text)


def of_type(wanted: Any) -> Matcher:
    """It must have the same type; what it holds is read by itself."""
    kind = type(wanted)
    return lambda value, _: type(value) is kind


def of_keys(wanted: Any) -> Matcher:
    """It must be a container with the same keys, or of the same length."""
    kind, keys = type(wanted), tuple(wanted) if isinstance(wanted, dict) else len(wanted)
    if isinstance(wanted, dict):
        return lambda value, _: type(value) is kind and tuple(value) == keys
    return lambda value, _: type(value) is kind and len(value) == keys


def of_constants(wanted: Any) -> Matcher:
    """It must be a container of equal numbers and strings."""
    kind, text = type(wanted), repr(wanted)
    return lambda value, _: type(value) is kind and repr(value) == text


def of_code(wanted: Any) -> Matcher:
    """It must be a function of the same code; its cells, globals and defaults are read by themselves."""
    kind, code = type(wanted), wanted.__code__
    return lambda value, _: type(value) is kind and value.__code__ is code


def of_shape(wanted: Any) -> Matcher:
    """It must be an array of the same library, dtype and shape. Its values are not part of a trace."""
    kind, dtype, shape = type(wanted), wanted.dtype, wanted.shape
    return lambda value, _: type(value) is kind and value.dtype == dtype and value.shape == shape


def absent(read: Reader) -> Reader:
    """Whether a read still finds nothing."""

    def is_absent(value: Any, key: Any) -> bool:
        try:
            read(value, key)
        except ABSENT:
            return True
        return False

    return is_absent
