"""Objects that a traced function refers to, such as a model: what is read of them is replaced, and written down."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

from . import guards
from .guards import Guards, Reader
from .operand import Operand, fault, is_of_library
from .stand_ins import library_of

# Makes what stands for a value that was read: of the parent's number, the read, its key, and the value.
Replace = Callable[[int, Reader, Any, Any], Any]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class CapturedObject:
    """Stands for an object. Its methods run with it in the object's place.

    why slots: without a __dict__ of its own, vars() and __dict__ are reads of the object's, too.
    """

    __slots__ = ("_captured",)
    _captured: tuple[Replace, Guards, Any, int]

    def __init__(self, replace: Replace, guards_of_trace: Guards, value: Any, number: int) -> None:
        object.__setattr__(self, "_captured", (replace, guards_of_trace, value, number))

    # why: isinstance(x, C) asks for this.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(_value(self))

    def __getattr__(self, name: str) -> Any:
        value, found = _value(self), _find(self, getattr, name)
        if isinstance(found, types.MethodType) and found.__self__ is value:
            return types.MethodType(_replaced(self, _function_of, name, found.__func__), self)
        if isinstance(found, types.BuiltinMethodType) and found.__self__ is value:
            _guards(self).is_complete = False  # why: what it returns may be another thing next time
            return found
        return _replaced(self, getattr, name, found)

    def __setattr__(self, name: str, value: Any) -> None:
        raise fault(f"the attribute {name} of a captured object is set; a function that is traced changes nothing")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise fault("an item of a captured object is set; a function that is traced changes nothing")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, Operand):
            raise fault(f"a {type(_value(self)).__name__} has a traced index; only arrays have")
        return _read(self, operator.getitem, key)

    def __len__(self) -> int:
        return int(_read(self, _length, None))

    def __bool__(self) -> bool:
        return bool(_read(self, _truth, None))

    def __eq__(self, other: object) -> bool:
        _guards(self).is_complete = False  # why: what it compares with is written nowhere
        return bool(_value(self) == (_value(other) if type(other) is CapturedObject else other))

    def __hash__(self) -> int:
        # why not _value: tables of weak references hash keys at the interpreter's end, too, when globals are gone
        return hash(self._captured[2])

    def __str__(self) -> str:
        return str(_value(self))

    def __iter__(self) -> Iterator[Any]:
        return iter(_read(self, _listed, None))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        value = _value(self)
        call = type(value).__call__
        if is_of_library(library_of(call)) and hasattr(value, "forward"):
            # why forward: what torch.nn.Module does around it has no meaning here, but for hooks.
            if any(getattr(value, name, None) for name in _HOOKS):
                raise fault(f"the {type(value).__name__} has hooks of forward, which are not traced; remove them")
            return self.forward(*arguments, **keywords)
        if not isinstance(call, types.FunctionType):
            return value(*arguments, **keywords)  # a callable that is written in C
        return _read(self, _function_of_type, "__call__")(self, *arguments, **keywords)


def _value(of: Any) -> Any:
    return of._captured[2]


def _guards(of: CapturedObject) -> Guards:
    return of._captured[1]


def _read(of: CapturedObject, read: Reader, key: Any) -> Any:
    """What stands for what a read finds."""
    return _replaced(of, read, key, _find(of, read, key))


def _replaced(of: CapturedObject, read: Reader, key: Any, found: Any) -> Any:
    """What stands for what a read has found."""
    replace, _, _, number = of._captured
    return replace(number, read, key, found)


def _find(of: CapturedObject, read: Reader, key: Any) -> Any:
    """What a read finds. If it finds nothing, that is written down, too."""
    _, written, value, number = of._captured
    try:
        return read(value, key)
    except guards.ABSENT:
        written.add(number, guards.absent(read), key, guards.equal(True))
        raise


def _function_of(value: Any, name: Any) -> Any:
    return getattr(value, name).__func__


def _function_of_type(value: Any, name: Any) -> Any:
    return getattr(type(value), name)


def _length(value: Any, _: Any) -> int:
    return len(value)


def _truth(value: Any, _: Any) -> bool:
    return bool(value)


def _listed(value: Any, _: Any) -> tuple[Any, ...]:
    return tuple(value)
