"""Stand-ins in a traced function for functions, classes and modules of libraries, and for objects of the user."""

from __future__ import annotations

import builtins
import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...units import with_article
from . import guards
from .functions import FUNCTIONS
from .guards import Guards, Reader
from .operand import Operand, fault, is_name_of_dtype, is_of_library
from .tracers import called

# Replaces a value that was read, by the number of the parent's read, the reader, its key and the value.
Replace = Callable[[int, Reader, Any, Any], Any]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def library_of(value: Any) -> str:
    """Returns the library of a function or class, or of the type of another object."""
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) and not isinstance(value, types.FunctionType):
        module = type(value).__module__
    first, _, rest = (module or "").partition(".")
    return "lax" if first == "jax" and "lax" in rest.split(".") else first


def stand_in(value: Any, name: str | None = None) -> Any:
    """Returns the replacement of a function or class of a library: it takes traced values if its name is supported."""
    # Classes have one name: np.intc is np.int32.
    name = getattr(value, "__name__", None) if isinstance(value, type) else name or getattr(value, "__name__", None)
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
    """A function of a library, which takes traced values by its name."""

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
    """Returns finfo or iinfo for NumPy's dtypes too, which traced values have."""
    return lambda dtype: (getattr(np, info.__name__) if isinstance(dtype, np.dtype) else info)(dtype)


class _Conversion(type):
    """The metaclass of classes that convert traced values, and behave as a plain class otherwise."""

    plain: Any
    dtype_name: str

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        if arguments and isinstance(arguments[0], Operand):
            return called(cls.dtype_name, arguments, keywords, library_of(cls.plain))
        return cls.plain(*arguments, **keywords)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.plain)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.plain)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.plain, name)

    def __eq__(cls, other: object) -> bool:
        # A plain class equals its dtype, too.
        return bool(cls.plain == (other.plain if isinstance(other, _Conversion) else other))

    def __hash__(cls) -> int:
        return hash(cls.plain)


@functools.lru_cache(maxsize=64, typed=True)  # jnp.int32 equals np.int32, but has another type
def _conversion(plain: Any, name: str) -> type:
    # int and float are bases, because `case int(x)` matches subclasses of int only; bool allows no subclass.
    bases = (plain,) if plain in (int, float) else ()
    return _Conversion(plain.__name__, bases, {"plain": plain, "dtype_name": name, "dtype": np.dtype(plain)})


class _TypeOf(type):
    """The class of `type` inside a traced function."""

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        if len(arguments) != 1:
            return type(*arguments, **keywords)
        kind = getattr(arguments[0], "__class__", type(arguments[0]))
        return stand_in(kind) if kind in (int, float, bool) or issubclass(kind, np.generic) else kind

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)


def _reduction(name: str) -> Callable[..., Any]:
    """Returns the replacement of min, max, any or all."""
    plain = getattr(builtins, name)
    join = {"any": operator.or_, "all": operator.and_}.get(name)

    def reduction(*arguments: Any, **keywords: Any) -> Any:
        values: tuple[Any, ...] = arguments
        if len(arguments) == 1 and isinstance(arguments[0], Operand | list | tuple | types.GeneratorType):
            arguments = tuple(arguments[0])  # type: ignore[arg-type]
            values = (arguments,)
        if not any(isinstance(each, Operand) for each in arguments):
            return plain(*values, **keywords)
        if join is not None:
            return functools.reduce(join, [called("bool", [each], {}) for each in arguments])
        keywords.pop("default", None)
        if (key := keywords.pop("key", None)) is not None:
            return functools.reduce(lambda x, y: _chosen(name, x, y, key), arguments)
        return functools.reduce(lambda x, y: called(name, [x, y], keywords), arguments)

    return reduction


def _chosen(name: str, x: Any, y: Any, key: Callable[[Any], Any]) -> Any:
    """Returns the minimum or the maximum of two values by their keys; the first one if the keys are equal."""
    is_second = key(y) < key(x) if name == "min" else key(y) > key(x)
    return called("where", [is_second, y, x], {}) if isinstance(is_second, Operand) else y if is_second else x


BUILTINS: dict[str, Any] = {
    **vars(builtins),
    **{name: _reduction(name) for name in ("min", "max", "any", "all")},
    **{plain.__name__: _conversion(plain, plain.__name__) for plain in (int, float, bool)},
    "type": _TypeOf("type", (), {}),
}


class CapturedObject:
    """Replaces an object of the user, such as a model: its methods run with this as `self`, and each read is guarded.

    It has slots and no __dict__, so that vars() and __dict__ read the user's object.
    """

    __slots__ = ("_captured",)
    _captured: tuple[Replace, Guards, Any, int]

    def __init__(self, replace: Replace, reads: Guards, value: Any, number: int) -> None:
        object.__setattr__(self, "_captured", (replace, reads, value, number))

    # isinstance(x, C) reads this property.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(_value(self))

    def __getattr__(self, name: str) -> Any:
        value, result = _value(self), _find(self, getattr, name)
        if isinstance(result, types.MethodType) and result.__self__ is value:
            return types.MethodType(_replace(self, _function_of, name, result.__func__), self)
        if isinstance(result, types.BuiltinMethodType) and result.__self__ is value:
            _guards(self).is_complete = False  # it may return another value next time
            return result
        return _replace(self, getattr, name, result)

    def __setattr__(self, name: str, value: Any) -> None:
        raise fault(f"the attribute {name} of a captured object is set; a function that is traced changes nothing")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise fault("an item of a captured object is set; a function that is traced changes nothing")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, Operand):
            raise fault(f"{with_article(type(_value(self)).__name__)} has a traced index; only arrays have")
        return _read(self, operator.getitem, key)

    def __len__(self) -> int:
        return int(_read(self, _apply, len))

    def __bool__(self) -> bool:
        return bool(_read(self, _apply, bool))

    def __eq__(self, other: object) -> bool:
        _guards(self).is_complete = False  # no guard holds the other operand
        return bool(_value(self) == (_value(other) if type(other) is CapturedObject else other))

    def __hash__(self) -> int:
        # Not by _value, a global that may be gone: tables of weak references hash keys at the interpreter's end, too.
        return hash(self._captured[2])

    def __str__(self) -> str:
        return str(_value(self))

    def __iter__(self) -> Iterator[Any]:
        return iter(_read(self, _apply, tuple))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        value = _value(self)
        call = type(value).__call__
        if is_of_library(library_of(call)) and hasattr(value, "forward"):
            # forward is called directly: torch.nn.Module.__call__ adds only hooks, which are refused here.
            if any(getattr(value, name, None) for name in _HOOKS):
                raise fault(f"the {type(value).__name__} has hooks of forward, which are not traced; remove them")
            return self.forward(*arguments, **keywords)
        if not isinstance(call, types.FunctionType):
            return value(*arguments, **keywords)  # a callable that is written in C
        return _read(self, _function_of_type, "__call__")(self, *arguments, **keywords)


def _value(x: Any) -> Any:
    return x._captured[2]


def _guards(x: CapturedObject) -> Guards:
    return x._captured[1]


def _read(x: CapturedObject, read: Reader, key: Any) -> Any:
    """Reads from the object, and returns the replacement of the result."""
    return _replace(x, read, key, _find(x, read, key))


def _replace(x: CapturedObject, read: Reader, key: Any, result: Any) -> Any:
    """Returns the replacement of the result of a read."""
    replace, _, _, number = x._captured
    return replace(number, read, key, result)


def _find(x: CapturedObject, read: Reader, key: Any) -> Any:
    """Returns the result of a read. If the read fails, a guard holds that it fails."""
    _, reads, value, number = x._captured
    try:
        return read(value, key)
    except guards.ABSENT:
        reads.add(number, guards.absent(read), key, guards.equal(True))
        raise


def _function_of(value: Any, name: Any) -> Any:
    return getattr(value, name).__func__


def _function_of_type(value: Any, name: Any) -> Any:
    return getattr(type(value), name)


def _apply(value: Any, function: Any) -> Any:
    return function(value)
