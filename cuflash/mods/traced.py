"""Values that write down what is done to them: a traced function computes with these in place of numbers and arrays.

They answer Python's operators, the protocols of NumPy and of PyTorch, and methods by their names. What would need their
value while they are traced raises ProblemError with the line of the function; only `bool()` has answers: see `paths`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NoReturn

import numpy as np

from ..errors import ProblemError
from .build import cast, constant, load
from .functions import FUNCTIONS, call, operation
from .graph import CapturedArray, Node
from .operand import Operand, as_node, fault, is_array
from .operations import Type
from .paths import truth

# Short arrays may be used without an index along one axis: their elements are computed one by one.
MAX_ELEMENTS = 256
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
_UNARY = {"neg": "negative", "abs": "absolute", "invert": "invert"}


def _refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
    raise fault(
        "a traced value has no number yet, so int, float, item, range, indices of lists, sets and keys of dicts cannot "
        "take it; compute with it, or index an array with it"
    )


def _as_integer(op: str) -> Callable[[Any], TracedScalar]:
    return lambda self: TracedScalar(cast(operation(op, self), Type.INT32))


def _operator(op: str, is_exchanged: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        pair = (other, self) if is_exchanged else (self, other)
        if any(isinstance(each, Elements) for each in map(_elements, pair)):
            return _of_elements(op, *map(_elements, pair))
        if not isinstance(other, Operand | bool | int | float | np.generic) and not is_array(other):
            return NotImplemented
        return TracedScalar(operation(op, *pair))

    return method


class _MissingError(ProblemError, AttributeError):
    """An attribute that traced values do not have. why AttributeError: hasattr asks for it."""


class Traced(Operand):
    """The operators and protocols of both kinds."""

    # why: NumPy's arrays and scalars then leave their operators to these.
    __array_priority__ = 1e6
    __hash__ = _refuse
    __int__ = __float__ = __index__ = __complex__ = item = tolist = __array__ = _refuse
    __floor__, __ceil__, __trunc__ = (_as_integer(op) for op in ("floor", "ceil", "trunc"))

    def __getattr__(self, name: str) -> Any:
        if name in FUNCTIONS:
            return lambda *arguments, **keywords: called(name, [self, *arguments], keywords)
        raise _MissingError(str(fault(f"a traced value has no {name}")))

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
        is_method = name.startswith("__") and name.endswith("__")
        return called(name[2:-2] if is_method else name, arguments, keywords or {}, "torch")

    def __jax_array__(self) -> NoReturn:
        raise fault("this function of JAX takes no traced values; functions of jax.numpy that the function names do")

    def __bool__(self) -> bool:
        return truth(self.node)

    def __pos__(self) -> Any:
        return self

    def __round__(self, digits: int | None = None) -> Any:
        if digits is not None:
            raise fault(f"round to {digits} digits; only whole numbers are known")
        return TracedScalar(cast(operation("round", self), Type.INT32))

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
    setattr(Traced, f"__{_name}__", lambda self, op=_op: _mapped(self, op))


class TracedScalar(Traced):
    """A number of the function that is traced: one of its arguments, or what it computed."""

    shape: tuple[int, ...] = ()
    ndim = 0
    device = "cpu"
    __iter__ = None

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def node(self) -> Node:
        """The expression."""
        return self._node

    @property
    def dtype(self) -> Any:
        """NumPy's dtype for the type of the node."""
        return np.dtype(self._node.type.numpy)

    def __repr__(self) -> str:
        return f"traced {self._node!r}"


class Arrays(list[CapturedArray]):
    """The captured arrays, in the order in which something was first loaded from them."""

    def number_of(self, array: CapturedArray) -> int:
        """The place of an array."""
        for place, each in enumerate(self):
            if each is array:
                return place
        self.append(array)
        return len(self) - 1


class TracedArray(Traced):
    """A captured array: indexing gives elements. Axes are indexed one after the other, as in `array[b][h]`."""

    def __init__(
        self,
        array: CapturedArray,
        arrays: Arrays,
        indices: Sequence[Node | None] | None = None,
        type: Type | None = None,
    ) -> None:
        self._captured, self._arrays, self._type = array, arrays, type or array.type
        self._indices = [None] * len(array.shape) if indices is None else list(indices)
        self.shape = tuple(n for n, index in zip(array.shape, self._indices, strict=True) if index is None)
        self.ndim = len(self.shape)

    @property
    def node(self) -> Node:
        """The element, when every axis has an index."""
        if self.ndim:
            raise fault(
                f"an array of shape {self.shape} is used as a number; index it, or compute with whole arrays before "
                "the call and refer to the result"
            )
        indices = [index for index in self._indices if index is not None]
        return cast(load(self._arrays.number_of(self._captured), self._captured.type, indices), self._type)

    @property
    def dtype(self) -> Any:
        """The dtype of the array, as its library has it."""
        return self._captured.array.dtype

    @property
    def device(self) -> Any:
        """The device of the array, as its library has it."""
        return getattr(self._captured.array, "device", "cpu")

    @property
    def size(self) -> Any:
        """As in the array's library: a method of PyTorch's tensors, a number elsewhere."""
        if callable(getattr(self._captured.array, "size", None)):
            return lambda dim=None: self.shape if dim is None else self.shape[dim]
        return self.numel()

    def numel(self) -> int:
        """The number of elements."""
        return reduce(operator.mul, self.shape, 1)

    def dim(self) -> int:
        """The number of axes."""
        return self.ndim

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a number")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        if self.ndim == 0 or name not in FUNCTIONS:
            return super().__getattr__(name)
        return lambda *arguments, **keywords: self._whole(name, arguments, keywords)

    def _whole(self, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Methods of an array with axes: casts, what changes nothing, and what sums up a few elements."""
        if name in _OF_ALL:
            return getattr(_elements(self), name)(*arguments, **keywords)
        if name not in _OF_WHOLE:
            raise fault(f"{name} of an array of shape {self.shape}; index it, or do this before the call")
        probe = TracedScalar(constant(0, self._type))
        cast_to = called(name, [probe, *arguments], keywords).node.type
        return TracedArray(self._captured, self._arrays, self._indices, cast_to)

    def __getitem__(self, key: Any) -> TracedArray:
        keys = list(key) if isinstance(key, tuple) else [key]
        if any(each is Ellipsis for each in keys):
            place = next(i for i, each in enumerate(keys) if each is Ellipsis)
            keys[place : place + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        if len(keys) > self.ndim:
            raise fault(f"{len(keys)} indices of an array of {self.ndim} axes")
        free = [axis for axis, index in enumerate(self._indices) if index is None]
        indices = list(self._indices)
        for axis, each in zip(free, keys, strict=False):
            if not (isinstance(each, slice) and each == slice(None)):
                indices[axis] = self._index(axis, each)
        return TracedArray(self._captured, self._arrays, indices, self._type)

    def _index(self, axis: int, key: Any) -> Node:
        if key is None or isinstance(key, slice):
            raise fault("slices and new axes of a captured array; slice it before the call and refer to the result")
        index, extent = as_node(key), self._captured.shape[axis]
        if not index.type.is_integer:
            given = index.type.name.lower()
            raise fault(f"an index of type {given}; integers are indices, and where() chooses by a condition")
        if index.op != "constant":
            return index
        if not -extent <= index.value < extent:
            raise fault(f"index {index.value} is outside of an axis of {extent}")
        return constant(index.value % extent)

    def __repr__(self) -> str:
        return f"captured {self._captured.dtype} array of shape {self.shape}"


class Elements(list[Any]):
    """The elements of a short array: what is done to it is done to each."""

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, Operand):
            raise fault("the result of computing with a whole array has a traced index; compute it before the call")
        return super().__getitem__(place)

    def any(self, *_: Any, **__: Any) -> Any:
        """Whether one of them is not zero."""
        return reduce(operator.or_, [TracedScalar(cast(as_node(each), Type.BOOL)) for each in self])

    def all(self, *_: Any, **__: Any) -> Any:
        """Whether none of them is zero."""
        return reduce(operator.and_, [TracedScalar(cast(as_node(each), Type.BOOL)) for each in self])

    def sum(self, *_: Any, **__: Any) -> Any:
        """Their sum, from the first to the last."""
        return reduce(operator.add, self)

    def dot(self, other: Any) -> Any:
        """The sum of products with another short array."""
        return _of_elements("multiply", self, _elements(other)).sum()


_OF_ALL = ("any", "all", "sum", "dot")
_OF_WHOLE = ("to", "astype", "type", "type_as", "float", "half", "bfloat16", "double", "int", "long", "bool",
             "clone", "detach", "contiguous", "cpu", "cuda", "copy")  # fmt: skip


def _elements(value: Any) -> Any:
    """The elements of an array with one axis; other values as they are."""
    if isinstance(value, Elements) or not isinstance(value, TracedArray) or value.ndim == 0:
        return value
    if value.ndim > 1 or len(value) > MAX_ELEMENTS:
        raise fault(
            f"an array of shape {value.shape} is computed with as a whole; index it first, or compute before the call "
            f"and refer to the result (up to {MAX_ELEMENTS} elements of one axis may be used together)"
        )
    return Elements(value)


def _of_elements(op: str, x: Any, y: Any) -> Elements:
    count = max(len(each) for each in (x, y) if isinstance(each, Elements))
    columns = [each if isinstance(each, Elements) else [each] * count for each in (x, y)]
    if len(columns[0]) != len(columns[1]):
        raise fault(f"arrays of {len(columns[0])} and {len(columns[1])} elements are computed with together")
    return Elements(TracedScalar(operation(op, *pair)) for pair in zip(*columns, strict=True))


for _name, _op in (_BINARY | _COMPARISONS).items():
    setattr(Elements, f"__{_name}__", lambda self, other, op=_op: _of_elements(op, self, _elements(other)))
for _name, _op in _BINARY.items():
    setattr(Elements, f"__r{_name}__", lambda self, other, op=_op: _of_elements(op, _elements(other), self))
for _name, _op in _UNARY.items():
    setattr(Elements, f"__{_name}__", lambda self, op=_op: _mapped(self, op))


def _mapped(value: Any, op: str) -> Any:
    value = _elements(value)
    if isinstance(value, Elements):
        return Elements(TracedScalar(operation(op, each)) for each in value)
    return TracedScalar(operation(op, value))


def called(name: str, arguments: Sequence[Any], keywords: Mapping[str, Any], library: str = "") -> Any:
    """A function of a library with traced arguments, some of which may be short arrays."""
    if name in _OF_ALL and arguments and isinstance(_elements(arguments[0]), Elements):
        return getattr(_elements(arguments[0]), name)(*arguments[1:], **keywords)
    return TracedScalar(call(name, arguments, keywords, library))

