"""Functions rebuilt, so that what they refer to answers traced values. The user's objects stay as they are.

A function runs with private globals and cells: arrays in them are `TracedArray`, functions are rebuilt in the same way,
functions of array libraries answer traced values by their names, and of other objects each part is replaced when it is
read. Every read adds a guard.
"""

from __future__ import annotations

import builtins
import collections
import enum
import functools
import numbers
import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ...errors import ProblemError
from ..graph.graph import CapturedArray
from . import guards
from .array_tracer import Arrays, RefusedArray, TracedArray
from .captured_object import CapturedObject
from .guards import Guards, Matcher, Reader, cell, global_of
from .operand import Operand, captured, is_array, is_of_library, located
from .stand_ins import BUILTINS, Module, library_of, stand_in

_CONSTANTS = (numbers.Number, str, bytes, type(None), type(...), enum.Enum, np.generic, np.dtype, range, slice)
# Objects of libraries that stay as they are.
_PLAIN_TYPES = ("dtype", "device", "Device", "memory_format", "layout", "finfo", "iinfo")
# Where wrappers that libraries make keep the function of the user.
_INNER = ("_torchdynamo_orig_callable", "pyfunc", "__wrapped__")
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_C_FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, np.ufunc)


def _element(container: Any, place: Any) -> Any:
    return tuple(container)[place]


def _imported(_: Any, name: Any) -> Any:
    return sys.modules[name]


@functools.lru_cache(maxsize=256)
def _names_of(code: types.CodeType) -> tuple[str, ...]:
    """The names that code may look up among globals, with those of the functions inside it."""
    inner = (name for each in code.co_consts if isinstance(each, types.CodeType) for name in _names_of(each))
    return tuple(dict.fromkeys([*code.co_names, *inner]))


class _Set(set[Any]):
    """A captured set, in which a traced value is found by comparing, because it has no hash."""

    def __contains__(self, value: object) -> bool:
        return any(value == each for each in self) if isinstance(value, Operand) else super().__contains__(value)


class _FrozenSet(frozenset[Any]):
    """The same for a set that does not change."""

    def __contains__(self, value: object) -> bool:
        return any(value == each for each in self) if isinstance(value, Operand) else super().__contains__(value)


class Capture:
    """Rebuilds one function. `arrays` holds the captured arrays in the order in which they were first loaded from."""

    def __init__(self, function: Any) -> None:
        self.arrays = Arrays()
        self._numbers: dict[int, int] = {}  # of reads, by the identity of what they found
        self._replaced: dict[int, Any] = {}
        self._alive: list[Any] = []  # why: identities are those of objects that are alive
        self._builtins = BUILTINS | {"__import__": self._import}
        # why before the matcher: to find it may show that the guards cannot be complete.
        self.guards = Guards()
        self.guards.root, replace = self._kind(function)
        self.function = self._remembered(function, replace, 0) if replace else function

    def read_of(self, array: CapturedArray) -> int:
        """The number of the read that found an array."""
        return self._numbers[id(array.array)]

    def dtypes(self) -> Any:
        """The library whose dtypes traced scalars have: PyTorch where a tensor was captured or torch is named."""
        names = (each.__name__ if isinstance(each, types.ModuleType) else library_of(each) for each in self._alive)
        return sys.modules["torch"] if any(name.partition(".")[0] == "torch" for name in names) else np

    def read(self, parent: int, read: Reader, key: Any, value: Any) -> Any:
        """What stands for a value that was read."""
        if id(value) in self._replaced:
            self.guards.add(parent, read, key, guards.same_as(self._numbers[id(value)]))
            return self._replaced[id(value)]
        matches, replace = self._kind(value)
        number = self.guards.add(parent, read, key, matches, is_object=replace is not None)
        if isinstance(value, type) and not is_of_library(library_of(value)):
            self.guards.is_complete = False  # why: what is read of a class of the user is written nowhere
        return value if replace is None else self._remembered(value, replace, number)

    def _remembered(self, value: Any, replace: Callable[[Any, int], Any], number: int) -> Any:
        self._alive.append(value)
        self._numbers[id(value)] = number
        result = self._replaced[id(value)] = replace(value, number)
        return result

    def _kind(self, value: Any) -> tuple[Matcher, Callable[[Any, int], Any] | None]:
        """How a later call tells that a value fits, and what makes its replacement; None if it stays as it is."""
        if isinstance(value, _CONSTANTS):
            return guards.equal(value), None
        if is_array(value):
            return guards.of_shape(value), self._array
        if (found := self._kind_of_container(value)) is not None:
            return found
        library = library_of(value)
        is_library = is_of_library(library)
        if isinstance(value, types.ModuleType):
            return guards.identical(value), self._module
        if isinstance(value, functools.partial):
            return guards.of_type(value), self._partial
        if isinstance(value, types.MethodType):
            return guards.of_type(value), self._method
        if is_of_library(type(value).__module__) and not isinstance(value, type):
            for name in _INNER:
                inner = getattr(value, name, None)
                if callable(inner) and not is_of_library(library_of(inner)):
                    return guards.of_type(value), functools.partial(self._inner, name)
        if isinstance(value, types.FunctionType) and (not is_library or "<locals>" in value.__qualname__):
            return guards.of_code(value), self._function
        if isinstance(value, (type, types.FunctionType, *_C_FUNCTIONS)):
            return guards.identical(value), (lambda x, _: stand_in(x)) if is_library else None
        if is_library and (type(value).__name__ in _PLAIN_TYPES or hasattr(value, "__wrapped__")):
            return guards.equal(value), (lambda x, _: stand_in(x))
        if "<locals>" in type(value).__qualname__:
            self.guards.is_complete = False  # why: such a class may keep arrays alive by what it refers to
        return guards.of_type(value), self._object

    def _kind_of_container(self, value: Any) -> tuple[Matcher, Callable[[Any, int], Any] | None] | None:
        if isinstance(value, dict | types.MappingProxyType):
            return guards.of_keys(value) if type(value) is dict else guards.of_type(value), self._mapping
        if type(value) not in _CONTAINERS and not (isinstance(value, tuple) and hasattr(value, "_fields")):
            return None
        if all(isinstance(each, _CONSTANTS) for each in value):
            return guards.of_constants(value), lambda x, _: _copied(x, x)
        return guards.of_keys(value), self._sequence

    def _array(self, array: Any, number: int) -> Operand:
        try:
            return TracedArray(captured(array), self.arrays)
        except ProblemError as error:
            # why without the line: errors tell the one that uses the array.
            return RefusedArray(str(error).removeprefix(located("")))

    def _function(self, function: types.FunctionType, number: int) -> types.FunctionType:
        closure, code = function.__closure__ or (), function.__code__
        cells = tuple(types.CellType() for _ in closure)
        scope: dict[str, Any] = {"__builtins__": self._builtins, "__name__": function.__globals__.get("__name__")}
        rebuilt = types.FunctionType(code, scope, function.__name__, None, cells or None)
        self._replaced[id(function)] = rebuilt  # why first: functions may refer to themselves
        if "__class__" in code.co_freevars:
            self.guards.is_complete = False  # why: methods that super() finds are not rebuilt
        for place, (new, old) in enumerate(zip(cells, closure, strict=True)):
            try:
                value = old.cell_contents
            except ValueError:  # the cell is empty
                continue
            new.cell_contents = self.read(number, cell, place, value)
        for name in _names_of(code):
            if name in function.__globals__:
                scope[name] = self.read(number, global_of, name, function.__globals__[name])
        if function.__defaults__ is not None:
            rebuilt.__defaults__ = self.read(number, getattr, "__defaults__", function.__defaults__)
        if function.__kwdefaults__ is not None:
            rebuilt.__kwdefaults__ = self.read(number, getattr, "__kwdefaults__", function.__kwdefaults__)
        return rebuilt

    def _import(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        module = builtins.__import__(name, *arguments, **keywords)
        return self.read(0, _imported, module.__name__, module)

    def _module(self, module: types.ModuleType, number: int) -> Any:
        return Module(module) if is_of_library(module.__name__) else self._object(module, number)

    def _partial(self, function: functools.partial[Any], number: int) -> functools.partial[Any]:
        inner, arguments, keywords = (
            self.read(number, getattr, name, getattr(function, name)) for name in ("func", "args", "keywords")
        )
        return functools.partial(inner, *arguments, **keywords)

    def _method(self, method: types.MethodType, number: int) -> Any:
        function, owner = (self.read(number, getattr, name, getattr(method, name)) for name in ("__func__", "__self__"))
        return types.MethodType(function, owner)

    def _inner(self, name: str, wrapper: Any, number: int) -> Any:
        return self.read(number, getattr, name, getattr(wrapper, name))

    def _sequence(self, values: Any, number: int) -> Any:
        read = operator.getitem if isinstance(values, list | tuple | collections.deque) else _element
        return _copied(values, [self.read(number, read, place, each) for place, each in enumerate(values)])

    def _mapping(self, values: Mapping[Any, Any], number: int) -> dict[Any, Any]:
        if type(values) is not dict:
            # why listed: the guards of a kind of dict do not have its keys yet.
            self.guards.add(number, lambda x, _: tuple(x), None, guards.of_constants(tuple(values)))
        return {key: self.read(number, operator.getitem, key, each) for key, each in values.items()}

    def _object(self, value: Any, number: int) -> CapturedObject:
        return CapturedObject(self.read, self.guards, value, number)


def _copied(values: Any, parts: Iterable[Any]) -> Any:
    """A container of the same kind, which the function may change."""
    if isinstance(values, set):
        return _Set(parts)
    if isinstance(values, frozenset):
        return _FrozenSet(parts)
    return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)
