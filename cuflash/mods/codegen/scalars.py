"""Prints operations of scalars as CUDA."""

from __future__ import annotations

import math

from ..graph.graph import Node
from ..graph.operations import COMPARISONS, Type, common_type
from ..graph.simplify import constant, has_inverse
from .hoisting import SUMS

SCALARS = {
    Type.BOOL: "bool",
    Type.INT32: "int",
    Type.INT64: "long long",
    Type.FLOAT32: "float",
    Type.UINT64: "unsigned long long",
    Type.FLOAT64: "double",
}
_INFIX = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "less": "<",
    "less_equal": "<=",
    "equal": "==",
    "not_equal": "!=",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
}
_PREFIX = {"negative": "-", "invert": "~", "logical_not": "!"}
_FLOAT_FUNCTIONS = {
    "exp": "expf",
    "exp2": "exp2f",
    "expm1": "expm1f",
    "log": "logf",
    "log2": "log2f",
    "log10": "log10f",
    "log1p": "log1pf",
    "sqrt": "sqrtf",
    "rsqrt": "rsqrtf",
    "tanh": "hyperbolic_tangent",
    "sin": "sinf",
    "cos": "cosf",
    "erf": "erff",
    "sign": "sign",
    "power": "powf",
    "floor": "floorf",
    "ceil": "ceilf",
    "trunc": "truncf",
    "round": "rintf",
    "absolute": "fabsf",
    "minimum": "minimum",
    "maximum": "maximum",
    "fmin": "fminf",
    "fmax": "fmaxf",
}
# Operations of floats that must have equal bits in every kernel: the compiler does not fuse these sums and products,
# and no function depends on a kernel's dtype.
_EXACT = {"add": "__fadd_rn", "subtract": "__fsub_rn", "multiply": "__fmul_rn", "tanh": "tanhf"}
# Operations of float64 only. Sums and products are not fused, as in NumPy.
_DOUBLE = {
    "add": "__dadd_rn({0}, {1})",
    "subtract": "__dsub_rn({0}, {1})",
    "multiply": "__dmul_rn({0}, {1})",
    "tanh": "tanh({0})",
    "sign": "{0} > 0.0 ? 1.0 : {0} < 0.0 ? -1.0 : {0} + 0.0",
    "minimum": "{0} < {1} || {0} != {0} ? {0} : {1}",
    "maximum": "{0} > {1} || {0} != {0} ? {0} : {1}",
    "truncated_divide": "trunc({0} / {1})",
    "truncated_remainder": "fmod({0}, {1})",
    "remainder": "[](double x, double y) {{ const double r = fmod(x, y); return r == 0.0 ? copysign(0.0, y) : "
    "(r < 0.0) != (y < 0.0) ? r + y : r; }}({0}, {1})",
    "floor_divide": "[](double x, double y) {{ if (y == 0.0) return x / y; const double r = fmod(x, y); "
    "const double below = r != 0.0 && (r < 0.0) != (y < 0.0) ? 1.0 : 0.0, quotient = (x - r) / y - below; "
    "if (quotient == 0.0) return copysign(0.0, y < 0.0 ? -x : x); "
    "const double whole = floor(quotient); return quotient - whole > 0.5 ? whole + 1.0 : whole; }}({0}, {1})",
}
# Rounds float64 to the float32 beside it whose last bit is 1, so that a rounding to 16 bits makes no tie of it.
_TO_ODD = (
    "[](double x) {{ const float y = static_cast<float>(x); return x == x ? __uint_as_float(__float_as_uint(y) - "
    "(fabs(static_cast<double>(y)) > fabs(x)) | (y != x)) : y; }}({0})"
)
# Roundings to 16 bits, of ties to even. Numbers below the normal ones of float16 are multiples of 2^-24, as is 0.5.
_SHORT = {
    "as_bfloat16": "[](float x) {{ const unsigned bits = __float_as_uint(x); return x == x ? "
    "__uint_as_float((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u) : x; }}({0})",
    "as_float16": "[](float x) {{ const float size = fabsf(x); const unsigned bits = __float_as_uint(x); "
    "if (size < 0x1p-14f) return copysignf(__fsub_rn(__fadd_rn(size, 0.5f), 0.5f), x); "
    "return size < 65520.0f ? __uint_as_float((bits + 0xfffu + (bits >> 13 & 1u)) & 0xffffe000u) "
    ": x * __uint_as_float(0x7f800000u); }}({0})",
}
_DOUBLE |= {op: text.replace("({0})", f"({_TO_ODD})") for op, text in _SHORT.items()}
_UNSIGNED = {
    "right_shift": "{1} < 64ull ? {0} >> {1} : 0ull",
    **dict.fromkeys(("floor_divide", "truncated_divide"), "{1} == 0ull ? 0ull : {0} / {1}"),
    **dict.fromkeys(("remainder", "truncated_remainder"), "{1} == 0ull ? 0ull : {0} % {1}"),
}
_INTEGER_FUNCTIONS = {
    "absolute": "absolute",
    "minimum": "min",
    "maximum": "max",
    "fmin": "min",
    "fmax": "max",
    "right_shift": "shifted_right",
}
_DIVISIONS = {
    "floor_divide": "floor_divide",
    "remainder": "floor_remainder",
    "truncated_divide": "truncated_divide",
    "truncated_remainder": "truncated_remainder",
}


def kind_of(x: Node) -> Type:
    """Returns the type of a value in CUDA: int32 for int64 values that it holds, as int64 takes twice as long."""
    least, greatest = Type.INT32.limits
    is_short = x.type == Type.INT64 and least <= x.bounds[0] and x.bounds[1] <= greatest
    return Type.INT32 if is_short else x.type


def _as(kind: Type, x: Node, text: str) -> str:
    return text if kind_of(x) == kind else f"static_cast<{SCALARS[kind]}>({text})"


def expression(x: Node, arguments: list[str], is_exact: bool) -> str:
    """Returns an operation from the texts of its arguments. is_exact: its bits must not depend on the kernel."""
    if x.op == "cast":
        return f"static_cast<{SCALARS[kind_of(x)]}>({arguments[0]})"
    if x.op == "where":
        one, other = (_as(kind_of(x), x.arguments[place], arguments[place]) for place in (1, 2))
        return f"{arguments[0]} ? {one} : {other}"
    kinds = [kind_of(each) for each in x.arguments]
    kind = common_type(kinds if x.op in COMPARISONS else (kind_of(x), *kinds))
    arguments = [_as(kind, each, text) for each, text in zip(x.arguments, arguments, strict=True)]
    if is_exact and kind == Type.FLOAT32 and x.op in _EXACT:
        return f"{_EXACT[x.op]}({', '.join(arguments)})"
    return _operation(x, kind, arguments)


def _operation(x: Node, kind: Type, arguments: list[str]) -> str:
    """Returns an operation of arguments that all have this type."""
    is_float = kind.is_float
    special = {Type.FLOAT32: _SHORT, Type.FLOAT64: _DOUBLE, Type.UINT64: _UNSIGNED}.get(kind, {}).get(x.op)
    if special is not None:
        return special.format(*arguments)
    if x.op in _DIVISIONS and not is_float:
        return _division(x, kind, arguments)
    if not is_float and x.op in SUMS and x.range == x.type.limits:
        return _wrapping(x.op, kind, arguments)
    if x.op == "divide" and kind == Type.FLOAT32 and has_inverse(x.arguments[1]):
        return f"divided({', '.join(arguments)}, {literal(constant(1 / x.arguments[1].value))})"
    if x.op in _PREFIX:
        return f"{_PREFIX[x.op]}{arguments[0]}"
    if x.op in _INFIX:
        return f"{arguments[0]} {_INFIX[x.op]} {arguments[1]}"
    name = _DIVISIONS.get(x.op) or (_FLOAT_FUNCTIONS if is_float else _INTEGER_FUNCTIONS)[x.op]
    name = name[:-1] if kind == Type.FLOAT64 else name
    return f"{name}({', '.join(arguments)})"


def _wrapping(op: str, kind: Type, arguments: list[str]) -> str:
    if op == "left_shift":
        return f"shifted_left({', '.join(arguments)})"
    if op == "negative":
        return f"wrapping_subtract({_integer(0, kind)}, {arguments[0]})"
    return f"wrapping_{op}({', '.join(arguments)})"


def _division(x: Node, kind: Type, arguments: list[str]) -> str:
    """Returns a division of integers or its remainder; unsigned divisions and shifts are shorter."""
    scalar, (one, other) = SCALARS[kind], x.arguments
    is_quotient = x.op in ("floor_divide", "truncated_divide")
    if one.bounds[0] >= 0 and other.bounds[0] > 0:
        first, second = (f"static_cast<unsigned {scalar}>({each})" for each in arguments)
        return f"static_cast<{scalar}>({first} {'/' if is_quotient else '%'} {second})"
    is_floor = x.op in ("floor_divide", "remainder")
    if is_floor and other.op == "constant" and other.value > 0 and other.value & (other.value - 1) == 0:
        bits = other.value.bit_length() - 1
        return f"{arguments[0]} >> {bits}" if is_quotient else f"{arguments[0]} & {_integer(other.value - 1, kind)}"
    return f"{_DIVISIONS[x.op]}({', '.join(arguments)})"


def literal(x: Node) -> str:
    """Returns the text of a constant."""
    if x.type == Type.BOOL:
        return "true" if x.value else "false"
    if not x.type.is_float:
        return _integer(x.value, kind_of(x))
    is_double = x.type == Type.FLOAT64
    if is_double and not math.isfinite(x.value):
        return f"static_cast<double>({literal(constant(x.value))})"
    if not math.isfinite(x.value):
        bits = "0x7fc00000" if math.isnan(x.value) else "0x7f800000" if x.value > 0 else "0xff800000"
        return f"__uint_as_float({bits}u)"
    mantissa, _, exponent = x.value.hex().partition("p")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    text = f"{mantissa}p{exponent}{'' if is_double else 'f'}"
    return f"({text})" if text[0] == "-" else text


def _integer(value: int, kind: Type) -> str:
    suffix = {Type.INT64: "ll", Type.UINT64: "ull"}.get(kind, "")
    # C++ has no literal for the least integer: it negates a positive literal, which does not fit the type.
    if value in (Type.INT32.limits[0], Type.INT64.limits[0]):
        return f"({value + 1}{suffix} - 1)"
    return f"{value}{suffix}" if value >= 0 else f"({value}{suffix})"
