"""The operations of the expression graph: their types, and their functions in NumPy.

Every name is NumPy's, where NumPy has one. `truncated_divide` and `truncated_remainder` are C's / and %, which round
towards zero. Division of an integer by zero gives zero.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

Function = Callable[..., Any]


class Type(enum.IntEnum):
    """The type of a node. The numbers are fixed: XLA's programs and pickled block masks hold them."""

    BOOL = 0
    INT32 = 1
    INT64 = 2
    FLOAT32 = 3
    UINT64 = 4
    FLOAT64 = 5

    @property
    def numpy(self) -> type[np.generic]:
        """NumPy's scalar type."""
        return _NUMPY[self]

    @property
    def is_integer(self) -> bool:
        """True for int32 and int64; bool and uint64 are not included."""
        return self in (Type.INT32, Type.INT64)

    @property
    def is_float(self) -> bool:
        """True for float32 and float64."""
        return self in (Type.FLOAT32, Type.FLOAT64)

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the greatest value of bool and integers."""
        return _LIMITS[self]


_NUMPY: dict[Type, type[np.generic]] = {
    Type.BOOL: np.bool_,
    Type.INT32: np.int32,
    Type.INT64: np.int64,
    Type.FLOAT32: np.float32,
    Type.UINT64: np.uint64,
    Type.FLOAT64: np.float64,
}
_LIMITS = {
    Type.BOOL: (0, 1),
    Type.INT32: (-(2**31), 2**31 - 1),
    Type.INT64: (-(2**63), 2**63 - 1),
    Type.UINT64: (0, 2**64 - 1),
}
_ORDER = (Type.BOOL, Type.INT32, Type.INT64, Type.UINT64, Type.FLOAT32, Type.FLOAT64)


def common_type(types: Iterable[Type]) -> Type:
    """Returns the type of a result of arguments of these types: the largest one."""
    return max(types, key=_ORDER.index)


def converted(x: Any, type: Any) -> Any:
    """Returns numbers as another type of NumPy.

    Floats become integers as on a GPU: rounded towards zero, clamped to the limits of the type, and 0 for NaN. A
    float64 NaN, and a NaN that becomes a 64-bit integer, become the integer with only the highest bit set.
    """
    x = np.asarray(x)
    if x.dtype.kind != "f" or np.dtype(type).kind not in "iu":
        return x.astype(type)
    least, greatest = np.iinfo(type).min, np.iinfo(type).max
    whole, limit = np.trunc(x.astype(np.float64)), float(greatest) + (greatest < 2**53)
    is_inside = (whole >= float(least)) & (whole < limit)
    highest_bit = np.array(1, f"u{np.dtype(type).itemsize}") << (8 * np.dtype(type).itemsize - 1)
    of_nan = highest_bit.view(type) if 8 in (x.dtype.itemsize, np.dtype(type).itemsize) else np.array(0, type)
    outside = np.where(np.isnan(x), of_nan, np.where(x > 0, np.array(greatest, type), np.array(least, type)))
    return np.where(is_inside, np.where(is_inside, whole, 0).astype(type), outside)


def _is_float(x: Any) -> bool:
    return bool(np.asarray(x).dtype.kind == "f")


def _by_integer(divide: Function, a: Any, b: Any) -> Any:
    """Returns divide(a, b), or 0 where an integer is divided by zero."""
    if _is_float(a):
        return divide(a, b)
    return np.where(b == 0, 0, divide(a, np.where(b == 0, 1, b).astype(np.asarray(b).dtype)))


def _floor_divide(a: Any, b: Any) -> Any:
    return _by_integer(np.floor_divide, a, b)


def _remainder(a: Any, b: Any) -> Any:
    return _by_integer(np.remainder, a, b)


def _truncated_divide(a: Any, b: Any) -> Any:
    if _is_float(a):
        return np.trunc(a / b)
    return _by_integer(_towards_zero, a, b)


def _towards_zero(a: Any, b: Any) -> Any:
    # Computed without absolute values, because the least integer has none.
    is_below = (np.remainder(a, b) != 0) & ((a < 0) != (b < 0))
    return np.floor_divide(a, b) + is_below.astype(np.asarray(a).dtype)


def _truncated_remainder(a: Any, b: Any) -> Any:
    return _by_integer(np.fmod, a, b)


def _rsqrt(x: Any) -> Any:
    return np.asarray(1, x.dtype) / np.sqrt(x)


def _rounded_once(function: Function) -> Function:
    """Returns a function that computes in float64: its float32 is exact if float32 holds the result.

    Functions of float32 may be off in the last place, by the processor: np.log10(np.float32(100)) is above 2.
    """
    return lambda x, *others: function(x, *others, dtype=np.float64).astype(np.asarray(x).dtype)


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.float64])(x).astype(np.asarray(x).dtype)


def _as_float16(x: Any) -> Any:
    return np.asarray(x).astype(np.float16).astype(np.asarray(x).dtype)


def _to_odd(x: Any) -> Any:
    """Returns float64 as float32: of the two neighbours of a number between them, the one whose last bit is 1.

    A second rounding, to 16 bits, then has the result of one rounding: no number becomes a tie.
    """
    short = np.asarray(x).astype(np.float32)
    is_above = np.abs(short.astype(np.float64)) > np.abs(x)
    return (short.view(np.uint32) - is_above.astype(np.uint32) | (short != x)).view(np.float32)


def _as_bfloat16(x: Any) -> Any:
    bits = _to_odd(x).view(np.uint32)
    # To the nearest number with 16 bits less, and to the even one of two.
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32)).astype(np.asarray(x).dtype)


# Roundings of float32 or float64 to floats of 16 bits; the result is float32.
# The rounding to a dtype is named after it.
SHORT_FLOATS: dict[str, Function] = {"as_float16": _as_float16, "as_bfloat16": _as_bfloat16}
# Operations of floats; other arguments become floats first.
FLOATING: dict[str, Function] = {
    "exp": np.exp,
    "exp2": _rounded_once(np.exp2),
    "expm1": np.expm1,
    "log": np.log,
    "log2": _rounded_once(np.log2),
    "log10": _rounded_once(np.log10),
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": _rsqrt,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "erf": _erf,
    "sign": np.sign,
    "divide": np.divide,
    "power": _rounded_once(np.power),
}
DIVISIONS = ("floor_divide", "remainder", "truncated_divide", "truncated_remainder")
ROUNDING: dict[str, Function] = {"floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": np.rint}
# Operations of numbers: the result has the larger type of the arguments.
ARITHMETIC: dict[str, Function] = {
    "negative": np.negative,
    "absolute": np.absolute,
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "fmin": np.fmin,
    "fmax": np.fmax,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "truncated_divide": _truncated_divide,
    "truncated_remainder": _truncated_remainder,
}
BITS: dict[str, Function] = {
    "invert": np.invert,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "left_shift": np.left_shift,
    "right_shift": np.right_shift,
}
COMPARISONS: dict[str, Function] = {
    "less": np.less,
    "less_equal": np.less_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}
# Operations of conditions. For bool, `&` and `logical_and` are one node, and so on.
LOGIC: dict[str, Function] = {"logical_not": np.logical_not}
# A condition in two equivalent forms: by the query, and by the key. The name is fixed: XLA's programs hold it.
EQUIVALENT: dict[str, Function] = {"alike": lambda by_query, by_key: by_query}

NUMPY: dict[str, Function] = (
    FLOATING | SHORT_FLOATS | ROUNDING | ARITHMETIC | BITS | COMPARISONS | LOGIC | EQUIVALENT | {"where": np.where}
)
# Operations that have another name for bools, as in NumPy, torch and JAX.
BOOL_FORMS = {
    "add": "bitwise_or",
    "maximum": "bitwise_or",
    "fmax": "bitwise_or",
    "multiply": "bitwise_and",
    "minimum": "bitwise_and",
    "fmin": "bitwise_and",
    "invert": "logical_not",
}
COMMUTATIVE = {
    *("add", "multiply", "minimum", "maximum", "fmin", "fmax"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "equal", "not_equal"),
}
# The operations of one argument; `where` has three, and all others have two.
UNARY = {*FLOATING, *SHORT_FLOATS, *ROUNDING, *LOGIC, "negative", "absolute", "invert"} - {"divide", "power"}
