"""Functions rebuilt, so that what they refer to answers traced values. The user's objects stay as they are.

A function runs with private globals and cells: arrays in them are `TracedArray`, functions are rebuilt in the same way,
functions of array libraries answer traced values by their names, and of other objects each part is replaced when it is
read. Every read is written into a recipe.
"""

from __future__ import annotations

import builtins
import enum
import functools
import numbers
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from . import recipe
from .functions import FUNCTIONS
from .graph import CapturedArray
from .operand import Operand, captured, fault, is_array, is_of_library
from .recipe import Matcher, Reader, Recipe
from .traced import Arrays, TracedArray, called

_CONSTANTS = (numbers.Number, str, bytes, type(None), type(...), enum.Enum, np.generic, np.dtype, range, slice)
# Objects of libraries that stay as they are.
_PLAIN_TYPES = ("dtype", "device", "Device", "memory_format", "layout", "finfo", "iinfo")
# Where wrappers of functions keep the function.
_INNER = ("_torchdynamo_orig_callable", "pyfunc", "__wrapped__")


def _library_of(value: Any) -> str:
    """The first name of the module that a function or class is of; of other objects, that of their type."""
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) and not isinstance(value, types.FunctionType):
        module = type(value).__module__
    return (module or "").partition(".")[0]


def _replaced_builtin(name: str) -> Callable[..., Any]:
    plain = getattr(builtins, name)
    join = {"any": operator.or_, "all": operator.and_}.get(name)

    def replaced(*arguments: Any, **keywords: Any) -> Any:
        values = list(arguments[0]) if len(arguments) == 1 and not isinstance(arguments[0], str) else list(arguments)
        if not any(isinstance(each, Operand) for each in values):
            return plain(*([values] if len(arguments) == 1 else values), **keywords)
        if join is not None:
            return functools.reduce(join, [called("bool", [each], {}) for each in values])
        return functools.reduce(lambda x, y: called(name, [x, y], keywords), values)

    return replaced


def _replaced_class(plain: type, name: str) -> type:
    """A class that converts traced values, and is `plain` for all others, for isinstance and as a dtype."""

    class Conversion(type):
        def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
            if arguments and isinstance(arguments[0], Operand):
                return called(name, arguments, keywords)
            return plain(*arguments, **keywords)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, plain)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, plain)

    return Conversion(plain.__name__, (), {"dtype": np.dtype(plain)})


def _replaced_import(name: str, *arguments: Any, **keywords: Any) -> Any:
    return _of_module(builtins.__import__(name, *arguments, **keywords))


_BUILTINS: dict[str, Any] = {
    **vars(builtins),
    **{name: _replaced_builtin(name) for name in ("min", "max", "any", "all")},
    **{plain.__name__: _replaced_class(plain, plain.__name__) for plain in (int, float, bool)},
    "__import__": _replaced_import,
}


class _Module:
    """A module of a library: its functions answer traced values."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _of_module(value) if isinstance(value, types.ModuleType) else _of_library(value, name)


def _of_module(module: types.ModuleType) -> Any:
    return _Module(module) if is_of_library(module.__name__) else module


def _of_library(value: Any, name: str | None = None) -> Any:
    """A function or class of a library, which answers traced values if its name is known."""
    name = name or getattr(value, "__name__", None)
    library = _library_of(value)
    if library == "builtins":
        return _BUILTINS.get(str(name), value)
    if name in ("finfo", "iinfo"):
        return _limits(value)
    if name not in FUNCTIONS or not callable(value):
        return value
    if isinstance(value, type) and not isinstance(value, np.ufunc):
        return _replaced_class(value, name)

    return _Function(value, name, library)


class _Function:
    """A function of a library, which answers traced values by its name."""

    def __init__(self, function: Any, name: str, library: str) -> None:
        self._function, self._name, self._library = function, name, library

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if any(isinstance(each, Operand) for each in (*arguments, *keywords.values())):
            return called(self._name, arguments, keywords, self._library)
        return self._function(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def _limits(info: Any) -> Callable[[Any], Any]:
    """finfo or iinfo, for NumPy's dtypes too, which traced values have."""
    return lambda dtype: (getattr(np, info.__name__) if isinstance(dtype, np.dtype) else info)(dtype)


def _cell(function: Any, place: Any) -> Any:
    return function.__closure__[place].cell_contents


def _global(function: Any, name: Any) -> Any:
    return function.__globals__[name]


def _element(container: Any, place: Any) -> Any:
    return tuple(container)[place]


@functools.lru_cache(maxsize=256)
def _names_of(code: types.CodeType) -> tuple[str, ...]:
    """The names that code may look up among globals, with those of the functions inside it."""
    inner = (name for each in code.co_consts if isinstance(each, types.CodeType) for name in _names_of(each))
    return tuple(dict.fromkeys([*code.co_names, *inner]))


class Capture:
    """Rebuilds one function. `arrays` holds the captured arrays in the order in which they were first loaded from."""

    def __init__(self, function: Any) -> None:
        self.arrays = Arrays()
        self._numbers: dict[int, int] = {}  # of reads, by the identity of what they found
        self._replaced: dict[int, Any] = {}
        self._alive: list[Any] = []  # why: identities are those of objects that are alive
        matches, replace = self._kind(function)
        self.recipe = Recipe(matches)
        self.function = self._remembered(function, replace, 0) if replace else function

    def read_of(self, array: CapturedArray) -> int:
        """The number of the read that found an array."""
        return self._numbers[id(array.array)]

    def read(self, parent: int, read: Reader, key: Any, value: Any) -> Any:
        """What stands for a value that was read."""
        if id(value) in self._replaced:
            self.recipe.add(parent, read, key, recipe.same_as(self._numbers[id(value)]))
            return self._replaced[id(value)]
        matches, replace = self._kind(value)
        number = self.recipe.add(parent, read, key, matches)
        return value if replace is None else self._remembered(value, replace, number)

    def _remembered(self, value: Any, replace: Callable[[Any, int], Any], number: int) -> Any:
        self._alive.append(value)
        self._numbers[id(value)] = number
        result = self._replaced[id(value)] = replace(value, number)
        return result

    def _kind(self, value: Any) -> tuple[Matcher, Callable[[Any, int], Any] | None]:
        """How a later call tells that a value fits, and what makes its replacement; None if it stays as it is."""
        library = _library_of(value)
        is_library = is_of_library(library)
        if isinstance(value, _CONSTANTS) and not is_array(value):
            return recipe.equal(value), None
        if is_array(value):
            return recipe.of_shape(value), self._array
        if isinstance(value, types.ModuleType):
            return recipe.identical(value), (lambda x, _: _Module(x)) if is_of_library(value.__name__) else self._object
        if isinstance(value, types.FunctionType) and (not is_library or "<locals>" in value.__qualname__):
            return recipe.of_code(value), self._function
        if isinstance(value, functools.partial):
            return recipe.of_type(value), self._partial
        if isinstance(value, types.MethodType):
            return recipe.of_type(value), self._method
        for name in _INNER:
            inner = getattr(value, name, None)
            if callable(inner) and not isinstance(value, type) and not is_of_library(_library_of(inner)):
                return recipe.of_type(value), functools.partial(self._inner, name)
        if isinstance(value, type | types.BuiltinFunctionType | np.ufunc | types.FunctionType):
            return recipe.identical(value), (lambda x, _: _of_library(x)) if is_library else None
        if is_library and (type(value).__name__ in _PLAIN_TYPES or hasattr(value, "__wrapped__")):
            return recipe.equal(value), (lambda x, _: _of_library(x))
        if type(value) in (list, tuple, set, frozenset) or (isinstance(value, tuple) and hasattr(value, "_fields")):
            return recipe.of_keys(value), self._sequence
        if type(value) is dict:
            return recipe.of_keys(value), self._dict
        return recipe.of_type(value), self._object

    def _array(self, array: Any, number: int) -> TracedArray:
        return TracedArray(captured(array), self.arrays)

    def _function(self, function: types.FunctionType, number: int) -> types.FunctionType:
        closure, code = function.__closure__ or (), function.__code__
        cells = tuple(types.CellType() for _ in closure)
        scope: dict[str, Any] = {"__builtins__": _BUILTINS, "__name__": function.__globals__.get("__name__")}
        rebuilt = types.FunctionType(code, scope, function.__name__, None, cells or None)
        self._replaced[id(function)] = rebuilt  # why first: functions may refer to themselves
        for place, (new, old) in enumerate(zip(cells, closure, strict=True)):
            try:
                value = old.cell_contents
            except ValueError:  # the cell is empty
                continue
            new.cell_contents = self.read(number, _cell, place, value)
        for name in _names_of(code):
            if name in function.__globals__:
                scope[name] = self.read(number, _global, name, function.__globals__[name])
        if function.__defaults__ is not None:
            rebuilt.__defaults__ = self.read(number, getattr, "__defaults__", function.__defaults__)
        if function.__kwdefaults__ is not None:
            rebuilt.__kwdefaults__ = self.read(number, getattr, "__kwdefaults__", function.__kwdefaults__)
        return rebuilt

    def _partial(self, function: functools.partial[Any], number: int) -> functools.partial[Any]:
        inner, arguments, keywords = (
            self.read(number, getattr, name, getattr(function, name)) for name in ("func", "args", "keywords")
        )
        return functools.partial(inner, *arguments, **keywords)

    def _method(self, method: types.MethodType, number: int) -> Any:
        function, owner = (
            self.read(number, getattr, name, getattr(method, name)) for name in ("__func__", "__self__")
        )
        return types.MethodType(function, owner)

    def _inner(self, name: str, wrapper: Any, number: int) -> Any:
        return self.read(number, getattr, name, getattr(wrapper, name))

    def _sequence(self, values: Any, number: int) -> Any:
        read = operator.getitem if isinstance(values, list | tuple) else _element
        parts = [self.read(number, read, place, each) for place, each in enumerate(values)]
        if hasattr(values, "_fields"):
            return type(values)(*parts)
        # why a tuple of a set: traced values are found in it by comparing, and have no hash.
        return parts if isinstance(values, list) else tuple(parts)

    def _dict(self, values: dict[Any, Any], number: int) -> dict[Any, Any]:
        return {key: self.read(number, operator.getitem, key, each) for key, each in values.items()}

    def _object(self, value: Any, number: int) -> Any:
        return _Object(self, value, number)


class _Object:
    """Any other object, such as a model: what is read of it is replaced, and its methods are rebuilt."""

    def __init__(self, capture: Capture, value: Any, number: int) -> None:
        self.__dict__["_cuflash"] = capture, value, number

    # why: isinstance(x, C) asks for this.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.__dict__["_cuflash"][1])

    def _read(self, read: Reader, key: Any) -> Any:
        capture, value, number = self.__dict__["_cuflash"]
        return capture.read(number, read, key, read(value, key))

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__["_cuflash"][1]
        found = getattr(value, name)
        if isinstance(found, types.MethodType) and found.__self__ is value:
            return types.MethodType(self._read(_function_of, name), self)
        return self._read(getattr, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise fault(f"the attribute {name} of a captured object is set; a function that is traced changes nothing")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, Operand):
            raise fault(f"a {type(self.__dict__['_cuflash'][1]).__name__} has a traced index; only arrays have")
        return self._read(operator.getitem, key)

    def __len__(self) -> int:
        return int(self._read(_length, None))

    def __bool__(self) -> bool:
        return bool(self._read(_truth, None))

    def __eq__(self, other: object) -> bool:
        return other is self or bool(self.__dict__["_cuflash"][1] == other)

    def __hash__(self) -> int:
        return hash(self.__dict__["_cuflash"][1])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read(_listed, None))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        kind = type(self.__dict__["_cuflash"][1])
        # why forward: what torch.nn.Module does around it has no meaning here.
        name = "forward" if is_of_library(_library_of(kind.__call__)) and hasattr(kind, "forward") else "__call__"
        return self._read(_function_of, name)(self, *arguments, **keywords)


def _function_of(value: Any, name: Any) -> Any:
    """The function behind a method."""
    return getattr(type(value), name)


def _length(value: Any, _: Any) -> int:
    return len(value)


def _truth(value: Any, _: Any) -> bool:
    return bool(value)


def _listed(value: Any, _: Any) -> tuple[Any, ...]:
    return tuple(value)
