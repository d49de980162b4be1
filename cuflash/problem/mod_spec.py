"""Mods as expressions: one for scores, one for the mask, and the kinds of the arrays that they load from.

A bias is an array that the score loads from, and a bias of bools is a part of the mask. So no other code treats
functions and biases separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from ..mods.graph.graph import INDEX_OFFSETS, CapturedArray, Graph, Node, node, post_order, variable
from ..mods.graph.operations import DIVISIONS, Type
from ..mods.graph.simplify import build, constant, load, rebuilt

SCORE = variable("score")
LEAST_SCORE = -1e37  # scores up to it weigh nothing: models add the least number of a dtype to hide keys
PAIR = ("score", "q_idx", "k_idx")  # inputs that vary within a head
# Indices of the axes of a bias, which may lack the first ones.
BIAS_AXES = ("b", "h", "q_idx", "k_idx")
_ARGUMENTS = ("q_idx", "k_idx", "h", "b")  # in the order of INDEX_OFFSETS
_SHIFTED = {variable(x): build("add", variable(x), variable(y)) for x, y in zip(_ARGUMENTS, INDEX_OFFSETS, strict=True)}


class Offsets(IntEnum):
    """The index offsets that code reads: none, those of keys a multiple of `COUNTER_KEYS`, or any."""

    NONE = 0
    ALIGNED = 1
    ANY = 2


class ArrayKind(NamedTuple):
    """Properties of a loaded array that code depends on, and its name as an operand of the call."""

    name: str
    dtype: str
    rank: int
    type: Type


class Bias(NamedTuple):
    """Properties of a bias that code depends on: its dtype, and True for each axis longer than 1."""

    dtype: str
    varies: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ModSpec:
    """Changes that the mods of a call make in scores and weights. Specs of equal digests are equal.

    score: the final score as an expression of the scaled and capped one; None if it is unchanged.
    mask: True for visible keys, as an expression; None if all are visible.
    arrays: kinds of the arrays that both load from, by number.
    has_sinks, drops, has_block_mask: True if the call has sinks, dropout, or a block mask argument.
    digest: identifies all that code depends on.
    mask_tile_axes: axes along which the block mask's tiles differ, which may not be broadcast.
    offsets: the index offsets that functions and dropout add to their indices.
    """

    score: Node | None = field(compare=False)
    mask: Node | None = field(compare=False)
    arrays: tuple[ArrayKind, ...] = field(compare=False)
    has_sinks: bool = field(compare=False)
    drops: bool = field(compare=False)
    has_block_mask: bool = field(compare=False)
    digest: str
    mask_tile_axes: tuple[str, ...] = field(compare=False, default=())
    offsets: Offsets = field(compare=False, default=Offsets.NONE)

    @property
    def changes(self) -> bool:
        """True if the call differs from a plain one."""
        return not (self.score is self.mask is None and not (self.has_sinks or self.drops))

    @property
    def divides_float64(self) -> bool:
        """True if a pair of a query and a key needs a quotient or a remainder of float64."""
        order = post_order([root for root in (self.score, self.mask) if root is not None])
        return any(
            each.op in DIVISIONS and each.type == Type.FLOAT64 and not each.inputs.isdisjoint(PAIR) for each in order
        )

    def encoded(self) -> list[Any]:
        """Returns lists of numbers and strings: the nodes, each after its arguments, then the other fields."""
        roots = self.score, self.mask
        order = post_order([root for root in roots if root is not None])
        indices = {each: index for index, each in enumerate(order)}
        nodes = [
            [each.op, each.type.value, [indices[x] for x in each.arguments], each.value, each.range, each.extent]
            for each in order
        ]
        ends = [None if root is None else indices[root] for root in roots]
        flags = self.has_sinks, self.drops, self.has_block_mask, *([self.offsets] if self.offsets else [])
        return [nodes, ends, self.arrays, flags, self.digest, self.mask_tile_axes]

    @classmethod
    def decoded(cls, encoded: list[Any]) -> ModSpec:
        """Returns the inverse of `encoded`, in any process."""
        rows, ends, arrays, (has_sinks, drops, has_block_mask, *offsets), digest, mask_tile_axes = encoded
        nodes: list[Node] = []
        for op, type, arguments, value, *ranges in rows:  # programs of older versions have one range
            limits = (None if range is None else tuple(range) for range in ranges)
            nodes.append(node(op, Type(type), [nodes[index] for index in arguments], value, *limits))
        score, mask = (None if index is None else nodes[index] for index in ends)
        kinds = tuple(ArrayKind(name, dtype, rank, Type(type)) for name, dtype, rank, type in arrays)
        flags = has_sinks, drops, has_block_mask
        return cls(score, mask, kinds, *flags, digest, tuple(mask_tile_axes), *map(Offsets, offsets))

    # Nodes are interned, and pickle would recurse from each to its arguments.
    def __reduce__(self) -> tuple[Any, ...]:
        return ModSpec.decoded, (self.encoded(),)

    @property
    def tiles_are_of_mask(self) -> bool:
        """True if a full tile has no masked score. A block mask argument does not include a bias of bools."""
        return not (self.has_block_mask and any(each.name == "bias" and each.type == Type.BOOL for each in self.arrays))


def make_mod_spec(
    score_mod: Graph | None,
    mask_mod: Graph | None,
    bias: Bias | None = None,
    has_sinks: bool = False,
    drops: bool = False,
    has_block_mask: bool = False,
    offsets: Offsets = Offsets.NONE,
) -> ModSpec:
    """Returns the changes of a call. Its arrays are in the order score_mod, mask_mod, bias.

    The functions are called with the sums of indices and offsets. A bias has the indices of the call.
    """
    new = _SHIFTED if offsets else {}
    graphs = (score_mod, mask_mod)
    digests = tuple(None if each is None else each.digest for each in graphs)
    kinds: list[ArrayKind] = []
    roots = []
    for graph in graphs:
        roots.append(None if graph is None else substituted(graph.root, new, len(kinds)))
        for each in () if graph is None else graph.arrays:
            kinds.append(ArrayKind(f"captured{len(kinds)}", each.dtype, len(each.shape), each.type))
    score, mask = roots
    if bias is not None:
        axes = BIAS_AXES[len(BIAS_AXES) - len(bias.varies) :]
        indices = [variable(axis) if varies else constant(0) for axis, varies in zip(axes, bias.varies, strict=True)]
        kind = ArrayKind("bias", bias.dtype, len(indices), Type.BOOL if bias.dtype == "bool" else Type.FLOAT32)
        part = load(len(kinds), kind.type, indices)
        kinds.append(kind)
        if kind.type == Type.BOOL:
            mask = part if mask is None else build("bitwise_and", mask, part)
        else:
            score = build("add", SCORE if score is None else score, part)
    if score is SCORE:
        score = None
    if mask is not None and mask.op == "constant" and mask.value:
        mask = None
    inputs = mask_mod.root.inputs if has_block_mask and mask_mod is not None else ()
    axes = tuple(axis for name, axis in (("b", "batch"), ("h", "heads_q")) if name in inputs)
    flags = has_sinks, drops, has_block_mask
    digest = repr((digests, bias, *flags, *([int(offsets)] if offsets else [])))
    return ModSpec(score, mask, tuple(kinds), *flags, digest, axes, offsets)


def substituted(root: Node, new: dict[Node, Node], first_array: int = 0) -> Node:
    """Returns an expression with other nodes for some inputs, and array numbers that begin at `first_array`."""
    if not new and not first_array:
        return root
    replaced = dict(new)
    for each in post_order([root]):
        if each in replaced:
            continue
        arguments = [replaced[argument] for argument in each.arguments]
        if each.op == "load":
            replaced[each] = load(each.value + first_array, each.type, arguments, each.extent)
        else:
            replaced[each] = rebuilt(each, arguments)
    return replaced[root]


@lru_cache(maxsize=64)
def exchanged(root: Node) -> Node:
    """Returns an expression with queries and keys exchanged."""
    query, key = variable("q_idx"), variable("k_idx")
    return substituted(root, {query: key, key: query})


def captured(graphs: Sequence[Graph | None]) -> list[CapturedArray]:
    """Returns the arrays of functions, in the order of `ModSpec.arrays`."""
    return [each for graph in graphs if graph is not None for each in graph.arrays]
