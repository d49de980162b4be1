"""Tracers of captured arrays: indexing returns elements, which are loads."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NoReturn

from ..graph.graph import CapturedArray, Node
from ..graph.operations import SHORT_FLOATS, Type
from ..graph.simplify import build, cast, constant, load
from .operand import CONVERSIONS, Operand, as_node, extent_of_dtype, fault
from .promotion import widened
from .tracers import Elements, Traced, TracedScalar, called

# Short arrays may be used without an index along one axis: their elements are computed one by one.
MAX_ELEMENTS = 256
# Methods of an array with axes that return such an array.
_ARRAY_METHODS = ("to", "astype", "type", "type_as", "float", "half", "bfloat16", "double", "int", "long", "bool",
             "clone", "detach", "contiguous", "cpu", "cuda", "copy")  # fmt: skip


class Arrays(list[CapturedArray]):
    """The captured arrays, in the order of their first loads."""

    def number_of(self, array: CapturedArray) -> int:
        """Returns the number of an array; appends the array if it is new."""
        for place, each in enumerate(self):
            if each is array:
                return place
        self.append(array)
        return len(self) - 1


def _refuse_value(self: Any, *_: Any, **__: Any) -> NoReturn:
    raise fault(
        f"a captured array of shape {self.shape} has no number yet, as each call reads it anew, so range, tolist, "
        "indices of lists, sets and keys of dicts cannot take it or its elements; compute with its elements, convert "
        f"them by {CONVERSIONS}, or make a number of it before the call, such as n = int(array[0]), and refer to that"
    )


class TracedArray(Traced):
    """A captured array: indexing returns elements. Axes are indexed one after the other, as in `array[b][h]`."""

    def __init__(
        self,
        array: CapturedArray,
        arrays: Arrays,
        indices: Sequence[Node | None] | None = None,
        casts: Sequence[Callable[[Any], Any]] = (),
    ) -> None:
        self._captured, self._arrays, self._casts = array, arrays, tuple(casts)
        self._indices = [None] * len(array.shape) if indices is None else list(indices)
        self.shape = tuple(n for n, index in zip(array.shape, self._indices, strict=True) if index is None)
        self.ndim = len(self.shape)

    @property
    def node(self) -> Node:
        """The element, if every axis has an index."""
        if self.ndim:
            raise fault(
                f"an array of shape {self.shape} is used as a number; index it, or compute with whole arrays before "
                "the call and refer to the result"
            )
        indices = [index for index in self._indices if index is not None]
        number, extent = self._arrays.number_of(self._captured), extent_of_dtype(self._captured.dtype)
        element = load(number, self._captured.type, indices, extent)
        if (rounding := f"as_{self._captured.dtype}") in SHORT_FLOATS:
            element = build(rounding, element)  # changes no value: the trace removes it at its end
        return reduce(lambda node, cast_to: cast_to(TracedScalar(node)).node, self._casts, element)

    @property
    def dtype(self) -> Any:
        """The dtype of the array in its library."""
        return self._captured.array.dtype

    @property
    def device(self) -> Any:
        """The device of the array in its library."""
        return getattr(self._captured.array, "device", "cpu")

    @property
    def size(self) -> Any:
        """The size as in the array's library: a method for PyTorch's tensors, a number elsewhere."""
        if callable(getattr(self._captured.array, "size", None)):
            return lambda dim=None: self.shape if dim is None else self.shape[dim]
        return self.numel()

    def elements(self) -> Elements:
        """Returns the elements of a short array with one axis."""
        if self.ndim > 1 or len(self) > MAX_ELEMENTS:
            raise fault(
                f"an array of shape {self.shape} is computed with as a whole; index it first, or compute before the "
                f"call and refer to the result (up to {MAX_ELEMENTS} elements of one axis may be used together)"
            )
        return Elements(self)

    def item(self, *index: Any) -> Any:
        """Returns an element as a traced value: by an index for each axis, or without one if it is the only element."""
        if len(index) not in (0, self.ndim) or (not index and self.numel() != 1):
            indices = ", ".join(map(str, index))
            raise fault(f"item({indices}) of an array of shape {self.shape}; index it, as in array[h]")
        return TracedScalar(widened(self[index or (0,) * self.ndim].node))

    __int__ = __float__ = __index__ = __complex__ = tolist = __array__ = __hash__ = _refuse_value

    def numel(self) -> int:
        """Returns the number of elements."""
        return reduce(operator.mul, self.shape, 1)

    def dim(self) -> int:
        """Returns the number of axes."""
        return self.ndim

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a number")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        if self.ndim == 0 or name not in _ARRAY_METHODS:
            return super().__getattr__(name)
        return lambda *arguments, **keywords: self._whole(name, arguments, keywords)

    def _whole(self, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Calls a method of an array with axes that casts it or changes nothing."""

        def cast_to(element: TracedScalar) -> Any:
            return called(name, [element, *arguments], keywords)

        cast_to(TracedScalar(constant(0, self._captured.type)))  # raises the errors of the call in its line
        return TracedArray(self._captured, self._arrays, self._indices, [*self._casts, cast_to])

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
        return TracedArray(self._captured, self._arrays, indices, self._casts)

    def _index(self, axis: int, key: Any) -> Node:
        if key is None or isinstance(key, slice):
            raise fault("slices and new axes of a captured array; slice it before the call and refer to the result")
        index, extent = as_node(key), self._captured.shape[axis]
        if index.type == Type.UINT64:
            # Indices past the end of the array read its last element.
            index = cast(build("minimum", index, constant(extent)), Type.INT64)
        if not index.type.is_integer:
            name = index.type.name.lower()
            raise fault(f"an index of type {name}; integers are indices, and where() chooses by a condition")
        if index.op != "constant":
            return index
        if not -extent <= index.value < extent:
            raise fault(f"index {index.value} is outside of an axis of {extent}")
        return constant(index.value % extent)

    def __repr__(self) -> str:
        return f"captured {self._captured.dtype} array of shape {self.shape}"


class RefusedArray(Operand):
    """A captured array that a mod cannot use: its error is raised when the function uses it."""

    def __init__(self, message: str) -> None:
        self._message = message

    @property
    def node(self) -> Node:
        """Always raises the error."""
        raise fault(self._message)

    def __getattr__(self, name: str) -> NoReturn:
        raise fault(self._message)

    def __getitem__(self, key: Any) -> NoReturn:
        raise fault(self._message)
