"""Ops as data: the arrays that each reads and writes, with their axes and dtypes.

Pointers, alignment, overlap, strides and copies are handled by these names, in one way for all ops. A new array is one
more `Operand` here, and a field of that name in the structs of the kernels that read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from ..locks import Once
from ..mods.analysis.intervals import Band
from .mod_spec import ModSpec

# Axes are rows, not seqlen: variable-length sequences may lie in any number of rows (problem/seqlen_info.py).
ROWS_Q = ("batch_q", "rows_q", "heads_q")
ROWS_K = ("batch_k", "rows_k", "heads_kv")
LSE_AXES = ("batch_q", "heads_q", "rows_q")
# Missing axes by rank: of q for operands with the axes of q, of k for operands with the axes of k.
MISSING_AXES: dict[int, tuple[str, ...]] = {
    4: (),
    3: ("batch_q", "batch_k"),
    2: ("batch_q", "batch_k", "heads_q", "heads_kv"),
}
DeltaRole = Literal["takes", "returns"]  # of an op: delta is one more input, or one more result
INTEGERS = "int32"  # dtype of operands that hold lengths, pages and cache rows


class Operand(NamedTuple):
    """An array of a call. Axes have the names of a `Problem`'s lengths.

    dtype: the rule for its dtype: "inputs" or "out" for the dtype of these, "lse" for the accumulator's, "int32" for
    itself. "any out" is either of the first two, "table" the dtype of the inputs or float32. problem/mod_arrays.py
    validates MOD_KINDS.
    strided: True if kernels read its strides; otherwise an array that is not contiguous is copied.
    any_last_stride: True if kernels read the stride of its last axis, too.
    written: True for an input that the op writes in place. Such an array is never copied.
    """

    name: str
    axes: tuple[str, ...]
    dtype: str = "inputs"
    optional: bool = False
    strided: bool = True
    written: bool = False
    any_last_stride: bool = False

    @property
    def called(self) -> str:
        """Name of the array in errors. Arrays that functions refer to have no name that a user would recognise."""
        return "an array that score_mod or mask_mod refers to" if self.dtype == CAPTURED else self.name


class Sizes(NamedTuple):
    """The lengths of a block mask, which no array has."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int


@dataclass(frozen=True, eq=False)
class Op:
    """A public call: inputs in the order of its arguments, and outputs in the order of its results.

    mod_spec: the mods, whose arrays are among the inputs; None for a plain call. sizes: lengths of the block mask.
    band: visible keys, beside the mask of the options. plain: the op without its band, or without mods.
    accumulates: True if results are added to float32 arrays. delta: the role of backward's delta, if it is an array.
    """

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    mod_spec: ModSpec | None = None
    sizes: Sizes | None = None
    band: Band | None = None
    plain: Op | None = None
    accumulates: bool = False
    delta: DeltaRole | None = None

    # Ops are compared by identity, so a copy must be the op of calls, in another process, too.
    def __reduce__(self) -> tuple[Any, ...]:
        return _op, _arguments(self)

    @Once
    def operands(self) -> tuple[Operand, ...]:
        """Inputs, then outputs: the order of pointers everywhere."""
        return self.inputs + self.outputs

    @Once
    def index(self) -> dict[str, int]:
        """Index of each operand in that order, by name."""
        return {operand.name: number for number, operand in enumerate(self.operands)}

    @Once
    def names(self) -> tuple[str, ...]:
        """Names of all operands."""
        return tuple(operand.name for operand in self.operands)

    @Once
    def written(self) -> tuple[int, ...]:
        """Indices of the inputs that are written to."""
        return tuple(number for number, operand in enumerate(self.inputs) if operand.written)


Q = Operand("q", (*ROWS_Q, "head_dim"))
K = Operand("k", (*ROWS_K, "head_dim"))
V = Operand("v", (*ROWS_K, "head_dim_v"))
OUT = Operand("out", (*ROWS_Q, "head_dim_v"), "out")
LSE = Operand("lse", LSE_AXES, "lse", strided=False)


def _integers(name: str, *axes: str, strided: bool = False) -> Operand:
    return Operand(name, axes, INTEGERS, optional=True, strided=strided)


PACKED_OR_USED = (
    _integers("cu_seqlens_q", "bounds"),
    _integers("cu_seqlens_k", "bounds"),
    _integers("seqused_q", "batch"),
    _integers("seqused_k", "batch"),
)
CACHED = _integers("page_table", "batch", "max_pages", strided=True), _integers("cache_batch_idx", "batch")


class VarlenArgs(NamedTuple):
    """Int32 arrays of a call on variable-length sequences, in the order of the ops' inputs; None for a missing one."""

    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_q: Any = None
    seqused_k: Any = None
    page_table: Any = None
    cache_batch_idx: Any = None

    @property
    def packed_or_used(self) -> tuple[Any, Any, Any, Any]:
        """Arrays that `backward` takes, too: all but the arrays of a cache."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k


VARLEN_ARGS = VarlenArgs._fields
FORWARD = Op("forward", (Q, K, V), (OUT, LSE._replace(optional=True)))
LSE_ONLY = Op("lse", (Q, K), (LSE,))
BACKWARD = Op(
    "backward",
    (
        Q,
        K,
        V,
        OUT._replace(name="dout", dtype="inputs"),
        OUT._replace(dtype="any out"),
        LSE,
        LSE._replace(name="dlse", optional=True),
    ),
    (Q._replace(name="dq"), K._replace(name="dk"), V._replace(name="dv")),
)
OPS = {op.name: op for op in (FORWARD, LSE_ONLY, BACKWARD)}


# Ops on variable-length sequences. They are separate, so that a dense call does no work for missing arrays.
VARLEN_OPS = {
    name: replace(op, inputs=(*op.inputs, *PACKED_OR_USED, *(() if op is BACKWARD else CACHED)))
    for name, op in OPS.items()
}


@lru_cache(maxsize=16)
def summing(op: Op, accumulates: bool, delta: DeltaRole | None = None) -> Op:
    """Returns an op of `OPS` or `VARLEN_OPS` with float32 results to add to, or with an array of delta."""
    outputs = tuple([x._replace(dtype="lse", optional=False) for x in op.outputs]) if accumulates else op.outputs
    array = LSE._replace(name="delta")
    inputs = (*op.inputs, array) if delta == "takes" else op.inputs
    outputs = (*outputs, array) if delta == "returns" else outputs
    return replace(op, inputs=inputs, outputs=outputs, accumulates=accumulates, delta=delta)


# Kinds of mod operands: captured arrays of functions, a bias, the seed of dropout, and the tiles of a block mask.
CAPTURED, BIAS, SEED, MASK_TILES = MOD_KINDS = "captured", "bias", "seed", "mask_tiles"
ANYTHING = "anything"
SINKS = Operand("sinks", ("heads_q",), "table", strided=False)
DROPOUT_SEED = Operand("dropout_seed", (), SEED, optional=True, strided=False)


@lru_cache(maxsize=256)
def mod_op(plain: Op, mod_spec: ModSpec, grads: tuple[int, ...] = (), sizes: Sizes | None = None) -> Op:
    """Returns an op with mods. grads: numbers of the arrays whose gradients are results.

    They are numbers in `ModSpec.arrays`; the number after the last is the sinks. sizes: lengths of its block mask.
    """
    more = _loaded(mod_spec)
    results = [*more, SINKS._replace(axes=(), dtype=CAPTURED)]  # a gradient has the dtype of its array
    more += [SINKS._replace(optional=True)] if mod_spec.has_sinks else []
    more += [DROPOUT_SEED] if mod_spec.drops else []
    more += [Operand("mask_tiles", (), MASK_TILES, optional=True, strided=False)] if mod_spec.has_block_mask else []
    grad_operands = tuple(results[number]._replace(name=f"d{results[number].name}", strided=False) for number in grads)
    inputs, outputs = (*plain.inputs, *more), (*plain.outputs, *grad_operands)
    return replace(plain, inputs=inputs, outputs=outputs, mod_spec=mod_spec, sizes=sizes, plain=plain)


@lru_cache(maxsize=256)
def banded(op: Op, band: Band, sizes: Sizes | None = None) -> Op:
    """Returns the op restricted to the keys of a band. Its problem is one of the plain op.

    sizes: lengths of the block mask that the band came as, if any.
    """
    return replace(op, band=band, sizes=sizes, plain=op)


def _loaded(mod_spec: ModSpec) -> list[Operand]:
    """Returns operands for the arrays that scores and masks load from."""
    return [
        Operand(each.name, (), BIAS if each.name == "bias" else CAPTURED, optional=True, any_last_stride=True)
        for each in mod_spec.arrays
    ]


@lru_cache(maxsize=256)
def block_mask_op(mod_spec: ModSpec, sizes: Sizes) -> Op:
    """Returns the op of `create_block_mask`, from the arrays of a mask to its tiles of 64 queries x 64 keys.

    Only the library and the device of the first input count.
    """
    like = Operand("like", (), ANYTHING, any_last_stride=True)
    return Op(
        "block_mask",
        (like, *PACKED_OR_USED, *_loaded(mod_spec)),
        (Operand("mask_tiles", (), MASK_TILES),),
        mod_spec,
        sizes,
    )


# A cache without a page table is a pool whose pages are its rows: each holds the whole capacity of a sequence.
POOL = ("num_pages", "page_size", "heads_kv")
_TABLE = Operand("rotary_cos", ("positions", "pairs"), "table", optional=True)
APPEND_KV = Op(
    "append_kv",
    (
        Operand("k_cache", (*POOL, "head_dim"), written=True),
        Operand("v_cache", (*POOL, "head_dim_v"), written=True),
        K,
        V,
        _integers("seqused_k", "batch")._replace(optional=False),
        *CACHED,
        _integers("cu_seqlens_k", "bounds"),
        Q._replace(optional=True),
        _integers("cu_seqlens_q", "bounds"),
        _TABLE,
        _TABLE._replace(name="rotary_sin"),
    ),
    (Q._replace(name="q_out", optional=True),),
)


@lru_cache(maxsize=64)
def merge_op(count: int) -> Op:
    """Returns the op of `merge_states` for this many states."""
    outs = tuple(OUT._replace(name=f"outs[{i}]", strided=False) for i in range(count))
    lses = tuple(LSE._replace(name=f"lses[{i}]") for i in range(count))
    return Op("merge", outs + lses, (OUT, LSE))


def _arguments(op: Op) -> tuple[Any, ...]:
    """Returns the function that makes an op and its arguments, or the name of a table of ops and a name in it."""
    for table, ops in _TABLES.items():
        if ops.get(op.name) is op:
            return table, op.name
    if op.name == "merge":
        return merge_op, len(op.inputs) // 2
    if op.band is not None:
        return banded, op.plain, op.band, op.sizes
    if op.name == "block_mask":
        return block_mask_op, op.mod_spec, op.sizes
    if op.mod_spec is None:
        base = (VARLEN_OPS if PACKED_OR_USED[0].name in op.index else OPS)[op.name]
        return summing, base, op.accumulates, op.delta
    assert op.plain is not None
    names = [*[f"d{each.name}" for each in op.mod_spec.arrays], "dsinks"]
    grads = tuple([names.index(each.name) for each in op.outputs[len(op.plain.outputs) :]])
    return mod_op, op.plain, op.mod_spec, grads, op.sizes


def _op(source: Any, *arguments: Any) -> Op:
    """Returns the op from its `_arguments`."""
    op: Op = _TABLES[source][arguments[0]] if isinstance(source, str) else source(*arguments)
    return op


_TABLES = {"dense": OPS, "varlen": VARLEN_OPS, "append": {APPEND_KV.name: APPEND_KV}}
