"""Tracers: values that record the operations applied to them, in place of a function's numbers and arrays.

They take Python's operators, the protocols of NumPy and PyTorch, and methods by name. An operation that needs a number
during the trace raises ProblemError with the line of the function. Only `bool()` has an outcome: see `branches`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import reduce
from types import FunctionType
from typing import Any, NoReturn

import numpy as np

from ...errors import ProblemError
from ..graph.graph import Node
from ..graph.operations import Type
from ..graph.precision import has_digits
from ..graph.simplify import cast, constant
from .branches import branch_on
from .functions import FUNCTIONS, as_integer, call, operation, tensor_where
from .operand import CONVERSIONS, Operand, as_node, fault, is_array, located, refusal

_BINARY = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "left_shift",
    "rshift": "right_shift",
}
_COMPARISONS = {
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
}
# The methods that Python calls on the second operand.
_REFLECTED = {op: f"__r{name}__" for name, op in _BINARY.items()} | {
    **{_COMPARISONS[one]: f"__{other}__" for one, other in (("lt", "gt"), ("le", "ge"), ("gt", "lt"), ("ge", "le"))},
    **{_COMPARISONS[name]: f"__{name}__" for name in ("eq", "ne")},
}
_UNARY = {"neg": "negative", "abs": "absolute", "invert": "invert"}
# The library whose dtypes traced scalars have.
dtypes: ContextVar[Any] = ContextVar("cuflash_dtypes", default=np)


def _refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
    raise fault(
        "a traced value has no number yet, so range, item, tolist, indices of lists, sets and keys of dicts cannot "
        f"take it; compute with it, index an array with it, or convert it by {CONVERSIONS}"
    )


def _as_integer(op: str) -> Callable[[Any], TracedScalar]:
    return lambda self: TracedScalar(as_integer(op)(self))


def _operator(op: str, is_exchanged: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any, *modulus: Any) -> Any:
        if modulus:
            raise fault("pow(x, y, z) of a traced value is not known; x ** y % z is")
        if not isinstance(other, Operand | bool | int | float | np.generic) and not is_array(other):
            return _with_stranger(op, self, other, is_exchanged)
        pair = (other, self) if is_exchanged else (self, other)
        if any(map(_is_short, pair)):
            return _map(lambda *row: TracedScalar(operation(op, *row)), [_elements(each) for each in pair])
        return TracedScalar(operation(op, *pair))

    return method


def _with_stranger(op: str, x: Any, other: Any, is_exchanged: bool) -> Any:
    """Returns the result of an operator that the other operand's class defines, or raises ProblemError.

    Python would compare the identities of two operands that do not know each other. None is unequal to every number.
    """
    if other is None and op in ("equal", "not_equal"):
        return op == "not_equal"
    reflected = None if is_exchanged else getattr(type(other), _REFLECTED[op], None)
    # Methods in C take no other classes, or ask for the value of a number.
    if not isinstance(reflected, FunctionType) or (result := reflected(other, x)) is NotImplemented:
        raise fault(refusal(other))
    return result


class _MissingError(ProblemError, AttributeError):
    """An attribute that traced values do not have. It is an AttributeError, which hasattr catches."""


class Traced(Operand):
    """The operators and protocols of all traced values."""

    shape: tuple[int, ...]
    ndim: int
    # The priority makes NumPy's arrays and scalars defer to these operators.
    __array_priority__ = 1e6
    __hash__ = _refuse
    __int__ = __float__ = __index__ = __complex__ = item = tolist = __array__ = _refuse
    __floor__, __ceil__, __trunc__ = (_as_integer(op) for op in ("floor", "ceil", "trunc"))

    def __getattr__(self, name: str) -> Any:
        if name == "where":
            return lambda condition, y: TracedScalar(tensor_where(self, condition, y))
        if name in FUNCTIONS or name in _REDUCTIONS or name == "dot":
            return lambda *arguments, **keywords: called(name, [self, *arguments], keywords)
        raise _MissingError(located(f"a traced value has no {name}"))

    def __array_ufunc__(self, ufunc: Any, method: str, *arguments: Any, **keywords: Any) -> Any:
        if method != "__call__":
            raise fault(f"numpy.{ufunc.__name__}.{method} of a traced value is not known")
        return called(ufunc.__name__, arguments, keywords, "numpy")

    def __array_function__(self, function: Any, _: Any, arguments: Any, keywords: Any) -> Any:
        return called(function.__name__, arguments, keywords, "numpy")

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = str(function.__name__).partition(".")[0]
        if name == "__getitem__" or name == "getitem":
            raise fault("a tensor made inside the function has a traced index; make it before, and refer to it")
        if name == "where" and hasattr(function, "__objclass__"):
            return TracedScalar(tensor_where(*arguments, **keywords or {}))
        is_method = name.startswith("__") and name.endswith("__")
        return called(name[2:-2] if is_method else name, arguments, keywords or {}, "torch")

    def __jax_array__(self) -> NoReturn:
        raise fault("this function of JAX takes no traced values; functions of jax.numpy that the function names do")

    def __bool__(self) -> bool:
        return branch_on(self.node)

    def __pos__(self) -> Any:
        return self

    def __round__(self, digits: int | None = None) -> Any:
        if digits is not None:
            raise fault(f"round to {digits} digits; only whole numbers are known")
        return TracedScalar(as_integer("round")(self))

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


for _name, _op in _BINARY.items():
    setattr(Traced, f"__{_name}__", _operator(_op))
    setattr(Traced, f"__r{_name}__", _operator(_op, is_exchanged=True))
for _name, _op in _COMPARISONS.items():
    setattr(Traced, f"__{_name}__", _operator(_op))
for _name, _op in _UNARY.items():
    setattr(Traced, f"__{_name}__", lambda self, op=_op: called(op, [self], {}))
for _name in ("__matmul__", "__rmatmul__"):  # both orders have one sum of products
    setattr(Traced, _name, lambda self, other: called("dot", [self, other], {}))


class TracedScalar(Traced):
    """A number of a traced function: an argument, or a result of operations."""

    shape: tuple[int, ...] = ()
    ndim = 0
    __iter__ = None

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def node(self) -> Node:
        """The expression of the number."""
        return self._node

    @property
    def dtype(self) -> Any:
        """The dtype of the node in the library that the function uses: PyTorch, or NumPy for all others."""
        type, library = self._node.type, dtypes.get()
        # A float64 without more digits than float32 becomes float32.
        name = (type if type != Type.FLOAT64 or has_digits(self._node) else Type.FLOAT32).numpy.__name__
        return np.dtype(name) if library is np else getattr(library, name.rstrip("_"))

    @property
    def device(self) -> Any:
        """The CPU, which stands for any device."""
        return "cpu" if dtypes.get() is np else dtypes.get().device("cpu")

    def numel(self) -> int:
        """Returns the number of elements, 1."""
        return 1

    def dim(self) -> int:
        """Returns the number of axes, 0."""
        return 0

    def is_floating_point(self) -> bool:
        """True if the node is a float."""
        return self._node.type.is_float

    def __repr__(self) -> str:
        return f"traced {self._node!r}"


class Elements(Traced):
    """Elements of a short array, computed one by one."""

    ndim = 1

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = tuple(values)
        self.shape = (len(self._values),)

    @property
    def node(self) -> Node:
        """The element, if there is only one."""
        if len(self._values) != 1:
            raise fault(f"an array of {len(self._values)} elements is used as a number; any, all or sum make one of it")
        return as_node(self._values[0])

    @property
    def dtype(self) -> Any:
        """The dtype of the first element."""
        return self._values[0].dtype

    def elements(self) -> Elements:
        """Returns itself."""
        return self

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, Operand):
            raise fault("the result of computing with a whole array has a traced index; compute it before the call")
        return Elements(self._values[place]) if isinstance(place, slice) else self._values[place]


def _is_short(value: Any) -> bool:
    return isinstance(value, Traced) and value.ndim > 0


def _elements(value: Any) -> Any:
    """Returns the elements of an array with one axis; other values unchanged."""
    return value.elements() if _is_short(value) else value


def _map(compute: Callable[..., Any], arguments: Sequence[Any]) -> Elements:
    """Returns the results of a function of numbers for each element."""
    counts = {len(each) for each in arguments if isinstance(each, Elements)} - {1}
    if len(counts) > 1:
        raise fault(f"arrays of {' and '.join(map(str, sorted(counts)))} elements are computed with together")
    count = max(counts, default=1)
    columns = [each if isinstance(each, Elements) and len(each) > 1 else [each] * count for each in arguments]
    return Elements(compute(*row) for row in zip(*columns, strict=True))


def _sum(values: Elements) -> Any:
    # Starts from 0, because the sum of conditions is their number.
    return reduce(operator.add, values, TracedScalar(constant(0)))


def _extreme(op: str) -> Callable[[Elements], Any]:
    return lambda values: reduce(lambda x, y: TracedScalar(operation(op, x, y)), values)


def _join_bools(join: Callable[[Any, Any], Any]) -> Callable[[Elements], Any]:
    return lambda values: reduce(join, [TracedScalar(cast(as_node(each), Type.BOOL)) for each in values])


# Functions of a short array that return a number.
_REDUCTIONS: dict[str, Callable[[Elements], Any]] = {
    "any": _join_bools(operator.or_),
    "all": _join_bools(operator.and_),
    "sum": _sum,
    "mean": lambda values: _sum(values) / len(values),
    **dict.fromkeys(("max", "amax"), _extreme("maximum")),
    **dict.fromkeys(("min", "amin"), _extreme("minimum")),
}


def called(name: str, arguments: Sequence[Any], keywords: Mapping[str, Any], library: str = "") -> Any:
    """Calls a function of a library with traced arguments, some of which may be short arrays."""
    if not any(map(_is_short, arguments)):
        if name == "dot":
            raise fault("@ and dot of a traced number; they multiply arrays of one axis, and * multiplies numbers")
        return TracedScalar(call(name, arguments, keywords, library))
    values = [_elements(each) for each in arguments]
    if name == "dot":
        return _sum(_map(operator.mul, values))
    if name in _REDUCTIONS and not (len(values) > 1 and name in ("max", "min") and isinstance(values[1], Operand)):
        return _REDUCTIONS[name](values[0])
    return _map(lambda *row: TracedScalar(call(name, row, keywords, library)), values)
