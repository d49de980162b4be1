"""Functions of NumPy, CuPy, PyTorch, JAX and `math` on traced scalars, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

from ...errors import ProblemError
from ..graph.extents import is_inside, leaves_int64
from ..graph.float_ranges import is_rounded_to_int32
from ..graph.graph import Node
from ..graph.operations import COMPARISONS, FLOATING, ROUNDING, UNARY, Type
from ..graph.simplify import build, cast, constant
from .operand import Operand, as_node, fault, is_array, is_name_of_dtype, name_of_dtype, type_of_cast
from .promotion import of_whole_number, promoted, widened, with_short_numbers

BOOL, INT32, INT64, FLOAT32, UINT64, FLOAT64 = Type
MAX_EXPONENT = 8  # of integer powers, which become products
# exp(60) makes a sigmoid below 1e-26, and the derivative stays finite.
MAX_EXP = 60.0
_ROUNDINGS = {"float16": "as_float16", "half": "as_float16", "bfloat16": "as_bfloat16"}
_DEVICES = ("cpu", "cuda", "gpu", "meta", "mps", "xpu", "tpu")


def operation(op: str, *values: Any) -> Node:
    """Returns an operation of `operations.NUMPY`, a comparison that it lacks, or an integer power."""
    if len(values) != (3 if op == "where" else 1 if op in UNARY else 2):
        raise TypeError(f"it takes {1 if op in UNARY else 2} but was given {len(values)}")
    nodes = [as_node(value) for value in values]
    if op in COMPARISONS or op in ("greater", "greater_equal"):
        nodes = with_short_numbers(values, nodes)
    if op in ("greater", "greater_equal"):
        op, nodes = "less" if op == "greater" else "less_equal", nodes[::-1]
    if op in COMPARISONS and (result := of_whole_number(op, *nodes)) is not None:
        return result
    if op == "power" and not any(each.type.is_float for each in nodes):
        return _integer_power(*nodes)
    if leaves_int64(op, nodes):
        raise fault(
            f"{op} of integers may leave 64 bits, as an index or a length may be up to 2^30; bound it first, as by "
            "minimum, clip or %, or compute with floats"
        )
    if op in FLOATING or any(each.type.is_float for each in (nodes[1:] if op == "where" else nodes)):
        nodes = promoted(op, nodes)
    try:
        return build(op, *nodes)
    except ProblemError as error:
        raise fault(str(error)) from None


def _integer_power(base: Node, exponent: Node) -> Node:
    if exponent.op == "constant" and 0 <= exponent.value <= MAX_EXPONENT:
        return reduce(partial(operation, "multiply"), [base] * exponent.value, constant(1))
    if base.op == "constant" and base.value == 2 and exponent.bounds[0] >= 0:
        return operation("left_shift", constant(1), exponent)
    raise fault(f"an integer to the power of an integer that is not one of 0 to {MAX_EXPONENT}; write 2.0 ** x")


def to_type(value: Any, dtype: Any) -> Node:
    """Casts a value to the type of a dtype of any library. Floats of 16 bits are float32, rounded to 16 bits."""
    node, type, rounding = as_node(value), type_of_cast(dtype), _ROUNDINGS.get(name_of_dtype(dtype))
    return widened(cast(node, type)) if rounding is None else build(rounding, node)


def _logical(op: str) -> Callable[[Any, Any], Node]:
    return lambda x, y: build(op, cast(as_node(x), BOOL), cast(as_node(y), BOOL))


def _exchanged(op: str) -> Callable[[Any, Any], Node]:
    """Returns an operation with exchanged arguments, for methods such as __rsub__, which libraries call by name."""
    return lambda x, y: operation(op, y, x)


def _clip(x: Any, min: Any = None, max: Any = None, *, a_min: Any = None, a_max: Any = None) -> Node:
    low, high = a_min if min is None else min, a_max if max is None else max
    result = as_node(x)
    if low is not None:
        result = operation("maximum", result, low)
    return result if high is None else operation("minimum", result, high)


def _divide(x: Any, y: Any, rounding_mode: str | None = None) -> Node:
    op = {None: "divide", "floor": "floor_divide", "trunc": "truncated_divide"}.get(rounding_mode)
    if op is None:
        raise TypeError(f"rounding_mode is {rounding_mode}; None, 'floor' and 'trunc' are known")
    return operation(op, x, y)


def _lax_divide(x: Any, y: Any) -> Node:
    nodes = as_node(x), as_node(y)
    return operation("divide" if any(each.type.is_float for each in nodes) else "truncated_divide", *nodes)


def _round(x: Any, decimals: int = 0) -> Node:
    if decimals != 0:
        raise fault(f"round to {decimals} digits; only whole numbers are known")
    return operation("round", x)


def _where(condition: Any, x: Any = None, y: Any = None) -> Node:
    if x is None or y is None:
        raise fault("where with one argument finds places in an array; where(condition, x, y) chooses")
    return operation("where", condition, x, y)


def tensor_where(x: Any, condition: Any, y: Any) -> Node:
    """Returns x.where(condition, y), the method of PyTorch's tensors."""
    return operation("where", condition, x, y)


def _masked_fill(x: Any, mask: Any, value: Any) -> Node:
    return operation("where", mask, _filled(value, as_node(x).type), x)


def _filled(value: Any, type: Type) -> Node:
    """Returns a value cast to a type, or unchanged if it is an integer outside of the type."""
    node = as_node(value)
    is_whole = not (type.is_float or node.type.is_float or type == BOOL)
    return node if is_whole and not is_inside(node.ends, type) else cast(node, type)


def _sign(x: Any) -> Node:
    node = as_node(x)
    if node.type == UINT64:
        return cast(cast(node, BOOL), INT32)
    if not node.type.is_integer:
        return operation("sign", node)
    zero = constant(0, node.type)
    return operation("subtract", cast(build("less", zero, node), INT32), cast(build("less", node, zero), INT32))


def _float_power(x: Any, y: Any) -> Node:
    return operation("power", as_float(x), as_float(y))


def _ieee_remainder(x: Any, y: Any) -> Node:
    return operation("subtract", x, operation("multiply", y, operation("round", operation("divide", x, y))))


def _no_lax_round(*_: Any, **__: Any) -> Node:
    raise fault("jax.lax.round takes halves away from zero, which no mod does; jax.numpy.round takes them to even")


def _select_n(which: Any, *cases: Any) -> Node:
    if len(cases) != 2:
        raise fault(f"select_n of {len(cases)} cases; 2 are known")
    return operation("where", which, cases[1], cases[0])


def _log(x: Any, base: Any = None) -> Node:
    logarithm = operation("log", x)
    return logarithm if base is None else operation("divide", logarithm, operation("log", base))


def _tan(x: Any) -> Node:
    return operation("divide", operation("sin", x), operation("cos", x))


def _square(x: Any) -> Node:
    return operation("multiply", x, x)


def _inverse(x: Any) -> Node:
    return operation("divide", 1.0, x)


def _sigmoid(x: Any) -> Node:
    # Bounded, because the derivative of an infinite exponential would be NaN.
    power = operation("exp", operation("minimum", operation("negative", x), MAX_EXP))
    return _inverse(operation("add", 1.0, power))


def _silu(x: Any, inplace: bool = False) -> Node:
    return operation("multiply", x, _sigmoid(x))


def _relu(x: Any, inplace: bool = False) -> Node:
    return operation("maximum", x, 0)


def _leaky_relu(x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Node:
    return operation("where", operation("less", 0.0, x), x, operation("multiply", x, negative_slope))


def _softplus(x: Any) -> Node:
    size = operation("exp", operation("negative", operation("absolute", x)))
    return operation("add", operation("maximum", x, 0.0), operation("log1p", size))


def _log_sigmoid(x: Any) -> Node:
    return operation("negative", _softplus(operation("negative", x)))


def _gelu(x: Any, approximate: Any = "none") -> Node:
    x = as_float(x)
    half = operation("multiply", 0.5, x)
    if approximate in ("tanh", True):
        cube = operation("multiply", operation("multiply", x, x), x)
        sum_ = operation("add", x, operation("multiply", 0.044715, cube))
        curve = operation("tanh", operation("multiply", math.sqrt(2 / math.pi), sum_))
    else:
        curve = operation("erf", operation("multiply", math.sqrt(0.5), x))
    return operation("multiply", half, operation("add", 1.0, curve))


def _lerp(x: Any, y: Any, weight: Any) -> Node:
    return operation("add", x, operation("multiply", weight, operation("subtract", y, x)))


def _is_nan(x: Any) -> Node:
    return operation("not_equal", x, x)


def _is_inf(x: Any) -> Node:
    return operation("equal", operation("absolute", x), math.inf)


def _is_finite(x: Any) -> Node:
    return operation("less", operation("absolute", x), math.inf)


def _to(x: Any, *others: Any, dtype: Any = None, **_: Any) -> Node:
    """Returns x.to(dtype), x.to(device), x.to(other), x.astype("int32"): devices, layouts and flags change nothing."""
    for other in (dtype, *others):
        if isinstance(other, Node):
            return cast(as_node(x), other.type)
        if isinstance(other, Operand) or is_array(other):
            return to_type(x, other.dtype)
        if isinstance(other, str) and not is_name_of_dtype(other):
            if other.partition(":")[0] not in _DEVICES:
                raise fault(f"{other!r} is neither a dtype that a mod knows nor a device")
            continue
        if other is not None and type(other).__name__ not in ("bool", "int", "device", "memory_format", "Device"):
            return to_type(x, other)
    return as_node(x)


def _fill(value: float) -> Callable[..., Node]:
    """Returns methods such as x.new_zeros(shape, dtype), for a scalar. The default is the type of x."""
    return lambda x, shape=(), *_, dtype=None, **__: _full(x, shape, value, dtype=dtype)


def _full(x: Any, shape: Any, value: Any, *_: Any, dtype: Any = None, **__: Any) -> Node:
    if tuple(shape if isinstance(shape, Sequence) else (shape,)) not in ((), (1,)):
        raise fault(f"an array of shape {shape} is made inside the function; make it before the call, and refer to it")
    return _filled(value, as_node(x).type) if dtype is None else to_type(value, dtype)


def _like(value: float) -> Callable[..., Node]:
    return lambda x, dtype=None, **_: _full(x, (), value, dtype=dtype)


def _full_like(x: Any, fill_value: Any, dtype: Any = None, **_: Any) -> Node:
    return _full(x, (), fill_value, dtype=dtype)


def _same(x: Any, *_: Any, **__: Any) -> Node:
    return as_node(x)


def _cast(type: Type) -> Callable[..., Node]:
    return lambda x, *_, **__: widened(cast(as_node(x), type))


def _short(name: str) -> Callable[..., Node]:
    return lambda x, *_, **__: to_type(x, name)


def as_integer(op: str) -> Callable[[Any], Node]:
    """Returns an operation that rounds to integers, as Python's numbers do. Only bounded floats become int32."""

    def rounded(x: Any) -> Node:
        node = operation(op, x)
        if not node.type.is_float:
            return cast(node, INT32) if node.type == BOOL else node
        return cast(node, INT32 if is_rounded_to_int32(node) else INT64)

    return rounded


def as_float(x: Any) -> Node:
    """Returns a number as Python's float."""
    node = as_node(x)
    return widened(node) if node.type.is_float else cast(node, FLOAT64)


# Names of all libraries, after the names of operations themselves, for the functions above and for operations.
_SAME_AS = {
    "absolute": "abs fabs",
    "add": "radd",
    "subtract": "sub",
    "multiply": "mul rmul",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "truncated_remainder": "fmod rem",
    "power": "pow",
    "minimum": "min amin",
    "maximum": "max amax",
    "negative": "neg",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "equal": "eq",
    "not_equal": "ne",
    "round": "rint",
    "trunc": "fix",
    "erf": "special_erf",
    "exp2": "special_exp2",
    "expm1": "special_expm1",
    "log1p": "special_log1p",
    "bitwise_and": "and rand",
    "bitwise_or": "or ror",
    "bitwise_xor": "xor rxor",
    "invert": "bitwise_not inv",
    "left_shift": "lshift shift_left bitwise_left_shift",
    "right_shift": "rshift shift_right_arithmetic bitwise_right_shift",
}
_OTHERS: dict[str, Callable[..., Node]] = {
    "where": _where,
    "select": _where,
    "select_n": _select_n,
    "masked_fill": _masked_fill,
    "logical_not": partial(operation, "logical_not"),
    "logical_and": _logical("bitwise_and"),
    "logical_or": _logical("bitwise_or"),
    "logical_xor": _logical("bitwise_xor"),
    **dict.fromkeys(("clamp", "clip"), _clip),
    "clamp_min": lambda x, min: _clip(x, min),
    "clamp_max": lambda x, max: _clip(x, None, max),
    **dict.fromkeys(("divide", "div", "true_divide", "truediv"), _divide),
    **dict.fromkeys(("sign", "sgn"), _sign),
    "float_power": _float_power,
    **{f"r{name}": _exchanged(op) for name, op in {"sub": "subtract", "div": "divide", "truediv": "divide",
       "floordiv": "floor_divide", "mod": "remainder", "pow": "power"}.items()},
    "round": _round,
    "around": _round,
    "log": _log,
    "tan": _tan,
    "square": _square,
    "reciprocal": _inverse,
    **dict.fromkeys(("sigmoid", "special_expit", "expit", "logistic"), _sigmoid),
    **dict.fromkeys(("silu", "swish"), _silu),
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "softplus": _softplus,
    **dict.fromkeys(("logsigmoid", "log_sigmoid"), _log_sigmoid),
    "gelu": _gelu,
    "lerp": _lerp,
    "isnan": _is_nan,
    "isinf": _is_inf,
    **dict.fromkeys(("isfinite", "is_finite"), _is_finite),
    **dict.fromkeys(("to", "astype", "type", "type_as", "asarray", "array", "as_tensor"), _to),
    "new_zeros": _fill(0),
    "new_ones": _fill(1),
    "new_full": _full,
    "new_tensor": lambda x, value, dtype=None, **_: _full(x, (), value, dtype=dtype),
    "zeros_like": _like(0),
    "ones_like": _like(1),
    "full_like": _full_like,
    **{name: _cast(type) for name, type in {"float": FLOAT32, "float32": FLOAT32,
       "double": FLOAT64, "float64": FLOAT64, "int": INT32, "int32": INT32, "long": INT64,
       "int64": INT64, "bool": BOOL, "bool_": BOOL, "any": BOOL, "all": BOOL}.items()},
    **{name: _short(name) for name in _ROUNDINGS},
    **dict.fromkeys(("clone", "detach", "contiguous", "squeeze", "unsqueeze", "view", "reshape", "expand", "cpu",
       "cuda", "copy", "positive", "expand_dims", "ravel", "flatten", "stop_gradient", "broadcast_to"), _same),
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Node]] = {
    name: partial(operation, op)
    for op in (*FLOATING, *ROUNDING, *_SAME_AS, "fmin", "fmax", "truncated_divide")
    for name in (op, *_SAME_AS.get(op, "").split())
} | _OTHERS
# Functions whose names mean something else in one library.
_LIBRARY_FUNCTIONS: dict[tuple[str, str], Callable[..., Node]] = {
    ("jax", "gelu"): lambda x, approximate=True: _gelu(x, approximate),
    ("jax", "div"): _lax_divide,
    ("numpy", "log"): partial(operation, "log"),
    ("lax", "div"): _lax_divide,
    ("lax", "round"): _no_lax_round,
    ("math", "pow"): _float_power,
    ("math", "remainder"): _ieee_remainder,
    ("math", "fabs"): lambda x: operation("absolute", as_float(x)),
    ("builtins", "int"): as_integer("trunc"),
    ("builtins", "float"): as_float,
    **{("math", name): as_integer(name) for name in ("floor", "ceil", "trunc")},
}
# Keywords of NumPy's and PyTorch's functions that change nothing with these values.
_NO_MEANING = {"out": None, "where": True, "dtype": None, "casting": "same_kind", "axis": None, "dim": None}


def call(name: str, arguments: Sequence[Any], keywords: Mapping[str, Any], library: str = "") -> Node:
    """Returns the result of a function of a library for traced arguments."""
    function = _LIBRARY_FUNCTIONS.get((library, name)) or FUNCTIONS.get(name)
    if function is None:
        names = ", ".join(sorted(FUNCTIONS))
        raise fault(f"{library}{'.' if library else ''}{name} of a traced value is not known; these are: {names}")
    options = {key: x for key, x in keywords.items() if key not in _NO_MEANING or x is not _NO_MEANING[key]}
    try:
        return function(*arguments, **options)
    except TypeError as error:
        raise fault(f"{name} of a traced value does not take these arguments: {error}") from error
