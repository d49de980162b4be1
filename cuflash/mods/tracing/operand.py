"""What stands for a value while a function is traced, and how other values become nodes beside it."""

from __future__ import annotations

import math
import sys
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any

import numpy as np

from ...errors import ProblemError
from ..graph.graph import CapturedArray, Node
from ..graph.operations import Type
from ..graph.simplify import constant

# The functions of these answer traced values by name; all other functions are the user's, and are traced themselves.
LIBRARIES = frozenset(
    ("builtins", "cuflash", "cupy", "functools", "jax", "jaxlib", "math", "numpy", "operator", "scipy", "torch")
)

_TYPES = {
    **dict.fromkeys(("bool", "bool_"), Type.BOOL),
    **dict.fromkeys(("int8", "uint8", "int16", "uint16", "int32", "short"), Type.INT32),
    **dict.fromkeys(("uint32", "int64", "uint64", "int", "int_", "long"), Type.INT64),
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64", "float", "half", "double"), Type.FLOAT32),
}
# The integers that a value may be cast to.
_WIDE = ("int32", "int64", "int", "int_", "long")


class Operand:
    """What a traced function computes with: scalars and short arrays of `traced`, captured ones of `traced_array`."""

    dtype: Any

    @property
    def node(self) -> Node:
        """The expression of a scalar; an array of several elements raises ProblemError."""
        raise NotImplementedError


# The errors that were raised while the function runs. why kept: the function may catch them, and go on with a value.
faults: ContextVar[list[ProblemError] | None] = ContextVar("cuflash_faults", default=None)


def fault(message: str) -> ProblemError:
    """An error that begins with the line of the user's function that runs now, and that the function cannot stop."""
    error = ProblemError(located(message))
    if (found := faults.get()) is not None:
        found.append(error)
    return error


# The line that a message begins with, where no function runs, but what was recorded of one is read.
source_line: ContextVar[str | None] = ContextVar("cuflash_source_line", default=None)


def located(message: str) -> str:
    """A message that begins with the line of the user's function that runs now."""
    if (recorded := source_line.get()) is not None:
        return f"{recorded}: {message}"
    frame = sys._getframe(1)
    while frame is not None and is_of_library(frame.f_globals.get("__name__")):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return message
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}: {message}"


def is_of_library(module: str | None) -> bool:
    """Whether a module, given by its name, belongs to Python's standard tools or to an array library."""
    return module is not None and module.partition(".")[0] in LIBRARIES


def is_array(value: Any) -> bool:
    """Whether a value is an array of any library; NumPy's scalars are numbers."""
    if isinstance(value, Operand | type | np.generic):
        return False
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__getitem__")


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of an array or of what stands for one; () of all else. why not of classes: theirs is no tuple."""
    return () if isinstance(value, type) else getattr(value, "shape", ())


def is_integer(value: Any) -> bool:
    """Whether a value is an integer. why not by Integral alone: bool is one, and so are the spans of time of NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool | np.timedelta64)


def is_real(value: Any) -> bool:
    """Whether a value is a real number, in the same sense."""
    return isinstance(value, Real) and not isinstance(value, bool | np.timedelta64)


def name_of_dtype(dtype: Any) -> str:
    """The name of a dtype of any library, such as "bfloat16"."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).rpartition(".")[2]


def is_name_of_dtype(name: str) -> bool:
    """Whether a string names a dtype that a node can have."""
    return name_of_dtype(name) in _TYPES


def type_of_cast(dtype: Any) -> Type:
    """The type of a value that is cast to a dtype of any library, or to one of Python's types bool, int and float."""
    type = type_of_dtype(dtype)
    if type.is_integer and name_of_dtype(dtype) not in _WIDE:
        raise fault(f"a cast to {name_of_dtype(dtype)}, which would wrap; integers are computed as int32 or int64")
    return type


def type_of_dtype(dtype: Any) -> Type:
    """The type of the elements of an array of a dtype of any library, when they were loaded."""
    name = name_of_dtype(dtype)
    if name not in _TYPES:
        raise fault(f"{dtype} has no place in a mod; bool, integers, and floats of 16 to 64 bits have")
    return _TYPES[name]


def as_node(value: Any) -> Node:
    """The node of a traced value, of a number, or of an array of one element that the function itself made."""
    if isinstance(value, Node):
        return value
    if isinstance(value, Operand):
        return value.node
    is_number = isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating)
    if is_number and not isinstance(value, np.timedelta64):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise fault(f"{value} is no integer of 64 bits; write it as a float")
        return constant(value)
    if is_array(value):
        if math.prod(value.shape) == 1:
            return constant(value.item(), type_of_dtype(value.dtype))
        raise fault(
            f"an array of shape {tuple(value.shape)} that the function itself made or changed meets traced values; "
            "make it before the call and refer to it, so that it is captured"
        )
    raise fault(f"a {value.__class__.__name__} meets traced values; numbers and arrays do")


def captured(array: Any) -> CapturedArray:
    """An array of any library as a traced function refers to it."""
    dtype = array.dtype
    if isinstance(dtype, np.dtype) and not dtype.isnative:
        raise fault(f"the bytes of a captured array of dtype {dtype.str} are not in this machine's order; convert it")
    return CapturedArray(array, name_of_dtype(dtype), tuple(array.shape), type_of_dtype(dtype))
