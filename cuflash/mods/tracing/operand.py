"""The base class of tracers, the errors of a trace, and the conversion of values to nodes."""

from __future__ import annotations

import math
import reprlib
import sys
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any

import numpy as np

from ...arrays.packages import PACKAGES
from ...errors import ProblemError
from ...units import kind_of
from ..graph.extents import is_float32
from ..graph.graph import CapturedArray, Node, Range
from ..graph.operations import Type
from ..graph.simplify import constant, number_of_numpy

# Functions of these packages and of array libraries take traced values by name. All others are user functions, which
# are traced.
LIBRARIES = frozenset(("builtins", "cuflash", "functools", "math", "operator", "scipy"))

_TYPES = {
    **dict.fromkeys(("bool", "bool_"), Type.BOOL),
    **dict.fromkeys(("int8", "uint8", "int16", "uint16", "int32", "short"), Type.INT32),
    **dict.fromkeys(("uint32", "int64", "int", "int_", "long"), Type.INT64),
    "uint64": Type.UINT64,
    **dict.fromkeys(("float16", "bfloat16", "float32", "half"), Type.FLOAT32),
    **dict.fromkeys(("float64", "float", "double"), Type.FLOAT64),
}
# The integers that a value may be cast to.
_WIDE = ("int32", "int64", "int", "int_", "long")
# The classes of NumPy that convert traced values, for messages.
CONVERSIONS = "np.bool_, int32, int64, float16, float32 or float64"


class Operand:
    """A traced value: a scalar or a short array of `tracers`, or a captured array of `array_tracer`."""

    dtype: Any

    @property
    def node(self) -> Node:
        """The expression of a scalar; an array of several elements raises ProblemError."""
        raise NotImplementedError


# The errors raised while the function runs. They are listed, because the function may catch them and continue.
faults: ContextVar[list[ProblemError] | None] = ContextVar("cuflash_faults", default=None)


def fault(message: str) -> ProblemError:
    """Returns an error that begins with the current line of the user function. The function cannot suppress it."""
    error = ProblemError(located(message))
    if (errors := faults.get()) is not None:
        errors.append(error)
    return error


# The line at the beginning of messages while a recorded function, such as a jaxpr, is read.
source_line: ContextVar[str | None] = ContextVar("cuflash_source_line", default=None)


def located(message: str) -> str:
    """Returns a message that begins with the current line of the user function."""
    if (line := source_line.get()) is not None:
        return f"{line}: {message}"
    frame = sys._getframe(1)
    while frame is not None and is_of_library(frame.f_globals.get("__name__")):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return message
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}: {message}"


def is_of_library(module: str | None) -> bool:
    """True if a module name belongs to Python's standard tools or to an array library."""
    package = module and module.partition(".")[0]
    return package in LIBRARIES or package in PACKAGES


def is_array(value: Any) -> bool:
    """True if a value is an array of any library; NumPy's scalars are numbers."""
    if isinstance(value, Operand | type | np.generic):
        return False
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__getitem__")


def shape_of(value: Any) -> tuple[int, ...]:
    """Returns the shape of an array or of its tracer, else (). A class has (), because its shape is no tuple."""
    return () if isinstance(value, type) else getattr(value, "shape", ())


def is_integer(value: Any) -> bool:
    """True if a value is an integer, other than a bool or NumPy's timedelta64, which are Integral too."""
    return isinstance(value, Integral) and not isinstance(value, bool | np.timedelta64)


def is_real(value: Any) -> bool:
    """True if a value is a real number, other than a bool or NumPy's timedelta64."""
    return isinstance(value, Real) and not isinstance(value, bool | np.timedelta64)


def name_of_dtype(dtype: Any) -> str:
    """Returns the name of a dtype of any library, such as "bfloat16"."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).rpartition(".")[2]


def is_name_of_dtype(name: str) -> bool:
    """True if a string is the name of a dtype that a node can have."""
    return name_of_dtype(name) in _TYPES


def type_of_cast(dtype: Any) -> Type:
    """Returns the type of a value that is cast to a dtype of any library, or to Python's bool, int or float."""
    type = type_of_dtype(dtype)
    if (type.is_integer or type == Type.UINT64) and name_of_dtype(dtype) not in _WIDE:
        raise fault(
            f"a cast to {name_of_dtype(dtype)}, which would wrap; integers are computed as int32 or int64: cast to one "
            "of these, and bound the value by & or % if it is to wrap"
        )
    return type


def type_of_dtype(dtype: Any) -> Type:
    """Returns the type of an element that is loaded from an array of a dtype of any library."""
    name = name_of_dtype(dtype)
    if name not in _TYPES:
        raise fault(
            f"{dtype} has no place in a mod; bool, integers, and floats of 16 to 64 bits have: convert it before the "
            "call"
        )
    return _TYPES[name]


def as_node(value: Any) -> Node:
    """Returns the node of a traced value, of a number, or of an array of one element that the function created."""
    if isinstance(value, Node):
        return value
    if isinstance(value, Operand):
        return value.node
    is_number = isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating)
    if is_number and not isinstance(value, np.timedelta64):
        if is_integer(value) and not -(2**63) <= value < 2**64:
            raise fault(f"{value} is no integer of 64 bits; write it as a float")
        if isinstance(value, np.floating) and value.itemsize >= 8:
            number = float(value)
            if value == value and number != value:
                raise fault(f"{value!r} has more digits than float64; write np.float64(x) to round it")
            return number_of_numpy(number)
        is_long = isinstance(value, float) and not is_float32(value)
        return constant(value, Type.FLOAT64 if is_long else None)
    if is_array(value):
        if math.prod(value.shape) == 1:
            type = type_of_dtype(value.dtype)
            return number_of_numpy(value.item()) if type == Type.FLOAT64 else constant(value.item(), type)
        raise fault(
            f"an array of shape {tuple(value.shape)} that the function itself made or changed meets traced values; "
            "make it before the call and refer to it, so that it is captured"
        )
    raise fault(refusal(value))


def refusal(value: Any) -> str:
    """Returns the message for a value that no operation with a traced value takes."""
    return (
        f"{kind_of(value)} meets traced values; bool, int and float of Python or NumPy do, and arrays of them, but not "
        f"{reprlib.repr(value)}: convert it before the call, as by float(x), or by np.array(x) for a list"
    )


def extent_of_dtype(name: str) -> Range | None:
    """Returns the range of integers of a dtype; None for other dtypes."""
    return (int(np.iinfo(name).min), int(np.iinfo(name).max)) if name.lstrip("u").startswith("int") else None


def captured(array: Any) -> CapturedArray:
    """Returns the description of an array of any library that a traced function refers to."""
    dtype = array.dtype
    if isinstance(dtype, np.dtype) and not dtype.isnative:
        raise fault(f"the bytes of a captured array of dtype {dtype.str} are not in this machine's order; convert it")
    return CapturedArray(array, name_of_dtype(dtype), tuple(array.shape), type_of_dtype(dtype))
