"""Rebuilds user functions so that their references accept traced values. The user's objects are not changed.

A rebuilt function has private globals and cells. Arrays in them become `TracedArray`, and functions are rebuilt in the
same way. Functions of array libraries take traced values by name. Parts of other objects are replaced on reading.
Every read adds a guard.
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
from .guards import Guards, Matcher, Reader, cell_value, global_value
from .operand import Operand, captured, is_array, is_of_library, located
from .stand_ins import BUILTINS, CapturedObject, Module, library_of, stand_in

_CONSTANTS = (numbers.Number, str, bytes, type(None), type(...), enum.Enum, np.generic, np.dtype, range, slice)
# Objects of libraries that stay as they are.
_PLAIN_TYPES = ("dtype", "device", "Device", "memory_format", "layout", "finfo", "iinfo")
# Attributes of libraries' wrappers that hold the user function.
_INNER = ("_torchdynamo_orig_callable", "pyfunc", "__wrapped__")
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_C_FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, np.ufunc)


def _element(container: Any, place: Any) -> Any:
    return tuple(container)[place]


def _imported(_: Any, name: Any) -> Any:
    return sys.modules[name]


@functools.lru_cache(maxsize=256)
def _names_of(code: types.CodeType) -> tuple[str, ...]:
    """Returns the global names that code, and functions inside it, may read."""
    inner = (name for each in code.co_consts if isinstance(each, types.CodeType) for name in _names_of(each))
    return tuple(dict.fromkeys([*code.co_names, *inner]))


class _Set(set[Any]):
    """A captured set. Membership of a traced value is tested by comparisons, because it has no hash."""

    def __contains__(self, value: object) -> bool:
        return any(value == each for each in self) if isinstance(value, Operand) else super().__contains__(value)


class _FrozenSet(frozenset[Any]):
    """A captured frozenset, otherwise like `_Set`."""

    def __contains__(self, value: object) -> bool:
        return any(value == each for each in self) if isinstance(value, Operand) else super().__contains__(value)


class Capture:
    """Rebuilds one function. `arrays` holds the captured arrays in the order of their first loads."""

    def __init__(self, function: Any) -> None:
        self.arrays = Arrays()
        self._numbers: dict[int, int] = {}  # numbers of reads, by the ids of their results
        self._replaced: dict[int, Any] = {}
        self._alive: list[Any] = []  # keeps objects alive, so that their ids stay unique
        self._builtins = BUILTINS | {"__import__": self._import}
        # Created before the root matcher, whose search may mark the guards as incomplete.
        self.guards = Guards()
        self.guards.root, replace = self._kind(function)
        self.function = self._replace(function, replace, 0) if replace else function

    def read_of(self, array: CapturedArray) -> int:
        """Returns the number of the read that returned an array."""
        return self._numbers[id(array.array)]

    def dtypes(self) -> Any:
        """Returns the library whose dtypes traced scalars have: PyTorch if a tensor or torch was captured."""
        names = (each.__name__ if isinstance(each, types.ModuleType) else library_of(each) for each in self._alive)
        return sys.modules["torch"] if any(name.partition(".")[0] == "torch" for name in names) else np

    def read(self, parent: int, read: Reader, key: Any, value: Any) -> Any:
        """Returns the replacement of a value that was read, and adds its guard."""
        if id(value) in self._replaced:
            self.guards.add(parent, read, key, guards.same_as(self._numbers[id(value)]))
            return self._replaced[id(value)]
        matches, replace = self._kind(value)
        number = self.guards.add(parent, read, key, matches, is_object=replace is not None)
        if isinstance(value, type) and not is_of_library(library_of(value)):
            self.guards.is_complete = False  # reads of a user's class have no guards
        return value if replace is None else self._replace(value, replace, number)

    def _replace(self, value: Any, replace: Callable[[Any, int], Any], number: int) -> Any:
        self._alive.append(value)
        self._numbers[id(value)] = number
        result = self._replaced[id(value)] = replace(value, number)
        return result

    def _kind(self, value: Any) -> tuple[Matcher, Callable[[Any, int], Any] | None]:
        """Returns the matcher of a value, and the function that replaces it; None if the value stays."""
        if isinstance(value, _CONSTANTS):
            return guards.equal(value), None
        if is_array(value):
            return guards.with_shape(value), self._array
        if (kind := self._kind_of_container(value)) is not None:
            return kind
        library = library_of(value)
        is_library = is_of_library(library)
        if isinstance(value, types.ModuleType):
            return guards.identical(value), self._module
        if isinstance(value, functools.partial):
            return guards.with_type(value), self._partial
        if isinstance(value, types.MethodType):
            return guards.with_type(value), self._method
        if is_of_library(type(value).__module__) and not isinstance(value, type):
            for name in _INNER:
                inner = getattr(value, name, None)
                if callable(inner) and not is_of_library(library_of(inner)):
                    return guards.with_type(value), functools.partial(self._inner, name)
        if isinstance(value, types.FunctionType) and (not is_library or "<locals>" in value.__qualname__):
            return guards.with_code(value), self._function
        if isinstance(value, (type, types.FunctionType, *_C_FUNCTIONS)):
            return guards.identical(value), (lambda x, _: stand_in(x)) if is_library else None
        if is_library and (type(value).__name__ in _PLAIN_TYPES or hasattr(value, "__wrapped__")):
            return guards.equal(value), (lambda x, _: stand_in(x))
        if "<locals>" in type(value).__qualname__:
            self.guards.is_complete = False  # such a class may keep arrays alive by its closures
        return guards.with_type(value), self._object

    def _kind_of_container(self, value: Any) -> tuple[Matcher, Callable[[Any, int], Any] | None] | None:
        if isinstance(value, dict | types.MappingProxyType):
            return guards.with_keys(value) if type(value) is dict else guards.with_type(value), self._mapping
        if type(value) not in _CONTAINERS and not (isinstance(value, tuple) and hasattr(value, "_fields")):
            return None
        if all(isinstance(each, _CONSTANTS) for each in value):
            return guards.with_constants(value), lambda x, _: _copy(x, x)
        return guards.with_keys(value), self._sequence

    def _array(self, array: Any, number: int) -> Operand:
        try:
            return TracedArray(captured(array), self.arrays)
        except ProblemError as error:
            # The line is removed, because the error names the line that uses the array.
            return RefusedArray(str(error).removeprefix(located("")))

    def _function(self, function: types.FunctionType, number: int) -> types.FunctionType:
        closure, code = function.__closure__ or (), function.__code__
        mask_tiles = tuple(types.CellType() for _ in closure)
        scope: dict[str, Any] = {"__builtins__": self._builtins, "__name__": function.__globals__.get("__name__")}
        rebuilt = types.FunctionType(code, scope, function.__name__, None, mask_tiles or None)
        self._replaced[id(function)] = rebuilt  # before the reads: functions may refer to themselves
        if "__class__" in code.co_freevars:
            self.guards.is_complete = False  # methods that super() finds are not rebuilt
        for place, (new, old) in enumerate(zip(mask_tiles, closure, strict=True)):
            try:
                value = old.cell_contents
            except ValueError:  # the cell is empty
                continue
            new.cell_contents = self.read(number, cell_value, place, value)
        for name in _names_of(code):
            if name in function.__globals__:
                scope[name] = self.read(number, global_value, name, function.__globals__[name])
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
        return _copy(values, [self.read(number, read, place, each) for place, each in enumerate(values)])

    def _mapping(self, values: Mapping[Any, Any], number: int) -> dict[Any, Any]:
        if type(values) is not dict:
            # The type guards of other mappings do not cover the keys, so the keys get a guard here.
            self.guards.add(number, lambda x, _: tuple(x), None, guards.with_constants(tuple(values)))
        return {key: self.read(number, operator.getitem, key, each) for key, each in values.items()}

    def _object(self, value: Any, number: int) -> CapturedObject:
        return CapturedObject(self.read, self.guards, value, number)


def _copy(values: Any, parts: Iterable[Any]) -> Any:
    """Returns a container of the same kind, which the function may change."""
    if isinstance(values, set):
        return _Set(parts)
    if isinstance(values, frozenset):
        return _FrozenSet(parts)
    return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)
