"""The expression graph: interned nodes, traversal in post-order, and digests."""

from __future__ import annotations

import hashlib
import struct
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...locks import Lock
from .operations import Type

# The arguments of user functions, and the lengths of the sequence that they may read.
MASK_ARGUMENTS = ("b", "h", "q_idx", "k_idx")
SCORE_ARGUMENTS = ("score", *MASK_ARGUMENTS)
LENGTHS = ("seqlen_q", "seqlen_k")
INPUTS = (*SCORE_ARGUMENTS, *LENGTHS)
# Numbers that a call which is a part of a larger one adds to q_idx, k_idx, h and b.
INDEX_OFFSETS = ("q_offset", "k_offset", "h_offset", "b_offset")
# Below 2^31, so that sums of a few indices stay in int32.
MAX_INDEX = 2**30 - 1
Range = tuple[int, int]


class Node:
    """One expression. Equal expressions are one object, so they are compared by `is`.

    `op` is "constant", "input", "load", "cast" or a name of `operations.NUMPY`. `value` is the value of a constant, the
    name of an input, or the number of a load's captured array. The `arguments` of a load are its indices. `inputs`
    holds the names of all inputs below. `range` bounds bool and integer values. `digest` covers the whole expression,
    and is the same in every process. `extent` is also a range, often narrower: types follow from `extent`, and code
    from `range` alone.
    """

    __slots__ = ("__weakref__", "arguments", "digest", "extent", "inputs", "op", "range", "type", "value")

    op: str
    type: Type
    arguments: tuple[Node, ...]
    value: Any
    inputs: frozenset[str]
    range: Range | None
    extent: Range | None
    digest: bytes

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        for name, value in ({"extent": state[1].get("range")} | state[1]).items():  # older pickles have no extent
            setattr(self, name, value)

    def __repr__(self) -> str:
        if self.op in ("constant", "input"):
            return str(self.value)
        number = str(self.value) if self.op == "load" else ""
        return f"{self.op}{number}({', '.join(map(repr, self.arguments))})"

    @property
    def bounds(self) -> Range:
        """The range of a bool or integer node."""
        assert self.range is not None, self
        return self.range

    @property
    def ends(self) -> Range:
        """The extent of a bool or integer node."""
        assert self.extent is not None, self
        return self.extent


_Key = tuple[str, Type, tuple[Node, ...], Any, Range | None]
_nodes: weakref.WeakValueDictionary[_Key, Node] = weakref.WeakValueDictionary()
_lock = Lock()
_FORMATS = {Type.FLOAT32: "<f", Type.FLOAT64: "<d"}


def node(
    op: str,
    type: Type,
    arguments: Sequence[Node] = (),
    value: Any = None,
    range: Range | None = None,
    extent: Range | None = None,
) -> Node:
    """Returns the interned node of an expression (hash-consing). It folds nothing: see `build`."""
    # Float constants are compared by bits: -0.0 equals 0.0, and NaN does not equal itself.
    bits = struct.pack(_FORMATS[type], value) if op == "constant" and type.is_float else None
    range = None if type.is_float else range or type.limits
    extent = extent or range
    # The key has the extent of loads only: other extents follow from the arguments.
    key = op, type, tuple(arguments), value if bits is None else bits, extent if op == "load" else None
    with _lock:
        node = _nodes.get(key)
        if node is None:
            node = _nodes[key] = Node()
            node.op, node.type, node.arguments, node.value = op, type, tuple(arguments), value
            names = [value] if op == "input" else []
            node.inputs = frozenset(names).union(*(each.inputs for each in arguments))
            node.range, node.extent = range, extent
            mark = repr(value).encode() if bits is None else bits
            node.digest = _hash(f"{op} {type.name} ".encode(), mark, *(each.digest for each in arguments))
    return node


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(len(part).to_bytes(4, "little") + part for part in parts), digest_size=16).digest()


def variable(name: str) -> Node:
    """Returns the node of an input: the score is a float, and all other inputs are non-negative integers."""
    if name == "score":
        return node("input", Type.FLOAT32, value=name)
    return node("input", Type.INT32, value=name, range=(0, MAX_INDEX))


# Not frozen: a repeated call creates instances anew, and frozen instances take three times as long.
@dataclass(slots=True, eq=False)
class CapturedArray:
    """An array that a function refers to. Code depends only on its dtype and its number of axes.

    array: the user's object, of any library. dtype: its name in NumPy or ml_dtypes, such as "bfloat16".
    """

    array: Any
    dtype: str
    shape: tuple[int, ...]
    type: Type


@dataclass(slots=True, eq=False)
class Graph:
    """A traced function: its result, the arrays that its loads refer to by index, and the digest of its code."""

    root: Node
    arrays: tuple[CapturedArray, ...]
    digest: str


def post_order(roots: Iterable[Node]) -> list[Node]:
    """Returns all nodes at or below `roots`, each once and after its arguments."""
    visited: set[Node] = set()
    order: list[Node] = []
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, has_arguments = stack.pop()
        if has_arguments:
            order.append(node)
        elif node not in visited:
            visited.add(node)
            stack.append((node, True))
            stack += [(each, False) for each in reversed(node.arguments) if each not in visited]
    return order


def digest(roots: Iterable[Node], arrays: Iterable[CapturedArray]) -> str:
    """Returns a digest of everything that code depends on: operations, types, constants, dtypes and ranks of arrays."""
    kinds = [f"{each.dtype} {len(each.shape)}".encode() for each in arrays]
    return _hash(*(root.digest for root in roots), *kinds).hex()
