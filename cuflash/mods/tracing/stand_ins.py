"""Stand-ins for functions, classes and modules of libraries in a traced function: they know traced values."""

from __future__ import annotations

import builtins
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from .functions import FUNCTIONS
from .operand import Operand, is_name_of_dtype, is_of_library
from .tracers import called


def library_of(value: Any) -> str:
    """The first name of the module that a function or class is of; of other objects, that of their type."""
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) and not isinstance(value, types.FunctionType):
        module = type(value).__module__
    first, _, rest = (module or "").partition(".")
    return "lax" if first == "jax" and "lax" in rest.split(".") else first


def stand_in(value: Any, name: str | None = None) -> Any:
    """What stands for a function or class of a library: something that answers traced values if its name is known."""
    name = name or getattr(value, "__name__", None)
    if isinstance(value, types.MethodDescriptorType):
        return Function(value, str(name), value.__objclass__.__module__.partition(".")[0].lstrip("_"))
    library = library_of(value)
    if library == "builtins":
        return BUILTINS.get(str(name), value)
    if name in ("finfo", "iinfo"):
        return _limits(value)
    if name not in FUNCTIONS or not callable(value):
        return value
    if isinstance(value, type):
        return _conversion(value, name) if is_name_of_dtype(name) else value
    return Function(value, name, library)


class Function:
    """A function of a library, which answers traced values by its name."""

    def __init__(self, function: Any, name: str, library: str) -> None:
        self._function, self._name, self._library = function, name, library

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if any(isinstance(each, Operand) for each in (*arguments, *keywords.values())):
            return called(self._name, arguments, keywords, self._library)
        return self._function(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


class Module:
    """A module of a library, whose functions are stand-ins."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, types.ModuleType):
            return Module(value) if is_of_library(value.__name__) else value
        return stand_in(value, name)


def _limits(info: Any) -> Callable[[Any], Any]:
    """finfo or iinfo, for NumPy's dtypes too, which traced values have."""
    return lambda dtype: (getattr(np, info.__name__) if isinstance(dtype, np.dtype) else info)(dtype)


class _Conversion(type):
    """The class of classes that convert traced values, and are a plain class for all others."""

    plain: Any
    dtype_name: str

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        if arguments and isinstance(arguments[0], Operand):
            return called(cls.dtype_name, arguments, keywords)
        return cls.plain(*arguments, **keywords)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.plain)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.plain)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.plain, name)

    def __eq__(cls, other: object) -> bool:
        return other is cls.plain or (isinstance(other, _Conversion) and other.plain is cls.plain)

    def __hash__(cls) -> int:
        return hash(cls.plain)


@functools.lru_cache(maxsize=64)
def _conversion(plain: Any, name: str) -> type:
    # why the base: `case int(x)` takes x from subclasses of int, and bool has none.
    bases = (plain,) if plain in (int, float) else ()
    return _Conversion(plain.__name__, bases, {"plain": plain, "dtype_name": name, "dtype": np.dtype(plain)})


class _TypeOf(type):
    """The class of `type` as a traced function sees it."""

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        if len(arguments) != 1:
            return type(*arguments, **keywords)
        found = getattr(arguments[0], "__class__", type(arguments[0]))
        return BUILTINS[found.__name__] if found in (int, float, bool) else found

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)


def _replaced(name: str) -> Callable[..., Any]:
    """min, max, any or all."""
    plain = getattr(builtins, name)
    join = {"any": operator.or_, "all": operator.and_}.get(name)

    def replaced(*arguments: Any, **keywords: Any) -> Any:
        if len(arguments) == 1 and isinstance(arguments[0], Operand | list | tuple | types.GeneratorType):
            arguments = tuple(arguments[0])  # type: ignore[arg-type]
            values: tuple[Any, ...] = (arguments,)
        else:
            values = arguments
        if not any(isinstance(each, Operand) for each in arguments):
            return plain(*values, **keywords)
        if join is not None:
            return functools.reduce(join, [called("bool", [each], {}) for each in arguments])
        told = {key: value for key, value in keywords.items() if key != "default"}
        return functools.reduce(lambda x, y: called(name, [x, y], told), arguments)

    return replaced


BUILTINS: dict[str, Any] = {
    **vars(builtins),
    **{name: _replaced(name) for name in ("min", "max", "any", "all")},
    **{plain.__name__: _conversion(plain, plain.__name__) for plain in (int, float, bool)},
    "type": _TypeOf("type", (), {}),
}
