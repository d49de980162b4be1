"""The problem of a call: one frozen, hashable value without pointers, from validated arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from ..errors import ProblemError
from . import append, block_mask
from .array_spec import ArraySpec
from .checks import MAX_SEQLEN, check_alike, check_operand, check_output
from .dtypes import DTYPES
from .mask import Mask
from .mod_arrays import check_block_mask, check_mod_array
from .operands import INTEGERS, MISSING_AXES, MOD_KINDS, Op, Operand
from .options import OptionContext, Options
from .seqlen_info import SeqlenInfo, bounded, check_unbounded, varlen_layout

LAYOUT = "(batch, seqlen, heads, head_dim), (seqlen, heads, head_dim) or (seqlen, head_dim)"
LENGTHS = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v")  # fields of a `Problem`
Specs = Sequence[ArraySpec | None]
# Numbers of products of an op: over head_dim (backward's s, dq and dk), and over head_dim_v (dp and dv).
_PRODUCTS = {"backward": (3, 2)}


class Problem(NamedTuple):
    """A legal problem. Lengths count for 4-D arrays; `head_dim_v` is 0 for `lse`, which has no v.

    With `seqlen_info`, batch is the number of sequences, seqlen_q and seqlen_k bound the lengths of each, and mask is
    for a sequence of these lengths.
    `merge_states` is the problem of its outs, without keys: seqlen_k and head_dim are 0.
    For `append_kv`, seqlen_k and the k of `seqlen_info` count the new keys; without q, lengths of q are 0.
    `create_block_mask` is a problem of float32 without head dims; with `seqlen_info`, packed rows are the most allowed.
    `specs` are the specs of the op's operands in their order and in the ranks of the call; None for a missing input.
    `misaligned` names arrays that may begin anywhere, so kernels may not load two of their elements together.
    """

    op: Op
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    mask: Mask
    options: Options  # validated, with mask options reset: `mask` holds them
    device: str
    library: str
    specs: tuple[ArraySpec | None, ...]
    seqlen_info: SeqlenInfo | None = None  # of variable-length sequences; None for a dense call
    misaligned: tuple[str, ...] = ()

    @classmethod
    def from_specs(cls, op: Op, specs: Specs, options: Options) -> Problem:
        """Validates a call: the specs of the op's operands in their order, and the options before validation.

        Missing operands are dense: specs may be fewer than operands, and None stands for any that is not optional.
        """
        if op.name == "merge":
            return _of_states(op, specs)
        if op.name == "append_kv":
            return _of_append(op, specs, options)
        if op.name == "block_mask":
            return _of_block_mask(op, specs)
        band, sizes = op.band, op.sizes
        if band is not None:
            assert op.plain is not None
            op = op.plain  # masks that hide the same keys make equal problems, however they are expressed
        specs = (*specs, *[None] * (len(op.operands) - len(specs)))
        named: Any = dict(zip(("q", "k", "v") if "v" in op.index else ("q", "k"), specs, strict=False))
        check_alike(named)
        varlen_specs = {
            x.name: spec for x, spec in zip(op.operands, specs, strict=True) if x.dtype == INTEGERS and spec
        }
        layout = varlen_layout(named, varlen_specs) if varlen_specs else None
        lengths, q = _lengths(named, layout), named["q"]
        if op.name == "backward" and (out := specs[op.index["out"]]) is not None:
            # Backward also takes a float32 out of 16-bit inputs.
            wide = out.dtype == "float32" and DTYPES[q.dtype].itemsize == 2
            options = options._replace(out_dtype="float32" if wide else None)
        elif op.accumulates and DTYPES[q.dtype].itemsize == 2:
            options = options._replace(out_dtype="float32")
        options = options.validated(OptionContext(lengths["head_dim"], q.dtype))
        if layout is None:
            batch, seqlen_q, seqlen_k, *_ = lengths.values()
            axes = {**lengths, "batch_q": batch, "rows_q": seqlen_q, "batch_k": batch, "rows_k": seqlen_k}
            check_unbounded(options)
            varlen = None
        else:
            # Gradients of unused rows are 0 in output arguments, too.
            varlen = SeqlenInfo.from_layout(layout, options, op.name == "backward" or specs[len(op.inputs)] is None)
            lengths = bounded(lengths, options)
            axes = {**layout, **lengths}
        arguments = options.causal, options.window_size, options.diagonal_offset
        mask = Mask.from_options(lengths["seqlen_q"], lengths["seqlen_k"], *arguments)
        if band is not None:
            mask = mask.within(band)
            varlen = None if varlen is None else varlen.within(band)
        if sizes is not None:
            check_block_mask(sizes, op.mod_spec.mask_tile_axes if op.mod_spec is not None else (), lengths)
        checked = _checked(op, specs, axes, _dtypes_of(q.dtype, options.out_dtype), len(named))
        # Keywords for 16 fields would take 2 µs.
        of_call = q.dtype, mask, _unmasked(options), q.device, q.library, checked, varlen, ()
        return cls._make((op, *lengths.values(), *of_call))

    def shape(self, operand: Operand) -> tuple[int, ...]:
        """Returns the shape of an operand with the axes of q or k, with all of its axes."""
        varlen = self.seqlen_info or SeqlenInfo(self.batch, self.seqlen_q, self.batch, self.seqlen_k)
        return tuple([getattr(varlen if hasattr(varlen, axis) else self, axis) for axis in operand.axes])

    @property
    def specs_4d(self) -> Sequence[Any]:
        """Specs of the operands in their order: 4-D for arrays with a head dim, unchanged for others."""
        if self.specs[0] is not None and len(self.specs[0].shape) == 4 and self.seqlen_info is None:
            return self.specs
        pairs = zip(self.op.operands, self.specs, strict=True)
        return [spec.as_4d() if spec is not None and len(operand.axes) == 4 else spec for operand, spec in pairs]

    def spec(self, name: str) -> ArraySpec:
        """Returns the spec of a present operand, as in `specs_4d`."""
        spec: ArraySpec = self.specs_4d[self.op.index[name]]
        return spec

    def has(self, name: str) -> bool:
        """Returns True if the op takes an operand of this name, and it is present."""
        number = self.op.index.get(name)
        return number is not None and self.specs[number] is not None

    @property
    def outputs(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shape and dtype of each result."""
        return tuple([(x.shape, x.dtype) for x in self.specs[len(self.op.inputs) :] if x is not None])

    @property
    def softmax_scale(self) -> float:
        """Factor of the products q kᵀ."""
        return self.options.scores.softmax_scale

    @property
    def out_dtype(self) -> str:
        """The dtype of out."""
        return self.options.out_dtype or self.dtype

    @property
    def ordinal(self) -> int | None:
        """Number of the GPU that holds the arrays; None for the CPU."""
        return int(self.device.removeprefix("cuda:")) if self.device.startswith("cuda:") else None

    @property
    def flops(self) -> int:
        """Multiplications and additions of the products over the visible pairs. A repeated product counts once."""
        by_dim, by_dim_v = _PRODUCTS.get(self.op.name, (1, 1))
        pairs = self.batch * self.heads_q * self.mask.num_visible()
        return 2 * pairs * (by_dim * self.head_dim + by_dim_v * self.head_dim_v)


@lru_cache(maxsize=256)
def _unmasked(options: Options) -> Options:
    # Masks that hide the same keys make equal problems, however they are expressed.
    return options._replace(
        causal=False, window_size=(None, None), diagonal_offset=None, max_seqlen_q=None, max_seqlen_k=None
    )


def _lengths(named: dict[str, ArraySpec], layout: Mapping[str, int] | None) -> dict[str, Any]:
    """Validates the shapes of q, k and perhaps v; returns the lengths of a problem in the order of its fields."""
    if layout is None:
        _check_ranks(named)
    q, k, *v = shapes = [spec.as_4d().shape for spec in named.values()]
    (batch, seqlen_q, heads_q, head_dim), (batch_k, seqlen_k, heads_kv, head_dim_k) = q, k
    batch_v, seqlen_v, heads_v, head_dim_v = v[0] if v else (batch_k, seqlen_k, heads_kv, 0)
    if layout is None:
        for name, shape in zip(named, shapes, strict=True):
            if shape[0] != batch:
                raise ProblemError(f"{name} has batch {shape[0]}, but q has {batch}; give all the same batch")
    elif batch_v != batch_k:
        both = f"v has shape {named['v'].shape}, but k {named['k'].shape}"
        raise ProblemError(f"{both}; give both as (batch, seqlen, heads, head_dim), alike but in head_dim")
    if head_dim_k != head_dim:
        raise ProblemError(f"k has head_dim {head_dim_k}, but q has {head_dim}; q and k must share head_dim")
    if (seqlen_v, heads_v) != (seqlen_k, heads_kv):
        raise ProblemError(
            f"v has seqlen {seqlen_v} and {heads_v} heads, but k has seqlen {seqlen_k} and {heads_kv} heads; k and v "
            "must share both"
        )
    if 0 in (heads_q, heads_kv, head_dim) or (v and not head_dim_v):
        raise ProblemError(
            f"shapes {', '.join(f'{n} {s.shape}' for n, s in named.items())}: heads and head_dim must be at least 1 "
            f"(batch and seqlen may be 0) in {LAYOUT}"
        )
    if heads_q % heads_kv:
        raise ProblemError(
            f"q has {heads_q} heads and k has {heads_kv}; heads_q must be a multiple of heads_kv "
            "(query head h uses kv head h // (heads_q // heads_kv))"
        )
    if layout is not None:
        batch, seqlen_q, seqlen_k = layout["batch"], layout["seqlen_q"], layout["seqlen_k"]
    if max(seqlen_q, seqlen_k) > MAX_SEQLEN:
        raise ProblemError(f"seqlen {max(seqlen_q, seqlen_k)} is over the limit of {MAX_SEQLEN}")
    lengths = batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v
    return dict(zip(LENGTHS, lengths, strict=True))


def _check_ranks(named: dict[str, ArraySpec]) -> None:
    rank_q = len(named["q"].shape)
    is_legal = 2 <= rank_q <= 4
    for name, spec in named.items():
        rank = len(spec.shape)
        if rank != rank_q or not is_legal:
            alike = f", but q has rank {rank_q}; give all of {', '.join(named)} the same layout:"
            raise ProblemError(
                f"{name} has shape {spec.shape}, rank {rank}{alike if 2 <= rank <= 4 else '; give'} {LAYOUT}"
            )


@lru_cache(maxsize=64)
def _dtypes_of(dtype: str, out_dtype: str | None) -> dict[str, tuple[str, ...]]:
    """Returns the legal dtypes of an operand, by its `Operand.dtype`; the first is the dtype of new arrays."""
    narrow = DTYPES[dtype].itemsize == 2
    return {
        "inputs": (dtype,),
        "lse": (DTYPES[dtype].accumulator,),
        "out": (out_dtype or dtype,),
        "any out": (dtype, "float32") if narrow else (dtype,),
        "table": tuple(dict.fromkeys((dtype, "float32"))),
        INTEGERS: (INTEGERS,),
    }


def _checked(
    op: Op, specs: Specs, lengths: Mapping[str, int], dtypes: Mapping[str, tuple[str, ...]], validated: int
) -> tuple[ArraySpec | None, ...]:
    """Validates the operands after the first `validated`; returns the specs of all, dense for missing ones."""
    checked: list[Any] = list(specs)
    q, k, *_ = checked
    totals = {f"rows_{side}": f"total_{side}" for side in "qk" if lengths.get(f"is_packed_{side}")}
    ranks = {"batch_q": len(q.shape), "batch_k": len(k.shape)}
    for number, operand in enumerate(op.operands[validated:], validated):
        spec, is_output = specs[number], number >= len(op.inputs)
        if spec is None and operand.optional and not is_output:
            continue
        if operand.dtype in MOD_KINDS:
            if spec is None:  # the gradient of a captured array is dense, with the shape and dtype of the array
                spec = checked[op.index[operand.name.removeprefix("d")]].with_packed_strides()
            checked[number] = check_mod_array(operand, spec, q, lengths, is_output)
            continue
        missing = MISSING_AXES[ranks.get(operand.axes[0], 4)]  # 4 by default: sinks keep their heads
        axes = [axis for axis in operand.axes if axis not in missing]
        shape = tuple([lengths[axis] for axis in axes])
        allowed = dtypes[operand.dtype]
        if spec is None:
            checked[number] = ArraySpec.contiguous(shape, allowed[0], q.device, q.library)
        else:
            check_operand(operand.name, spec, q, shape, allowed, [totals.get(axis, axis) for axis in axes])
            if is_output:
                check_output(operand.name, spec)
    return tuple(checked)


def _of_states(op: Op, specs: Specs) -> Problem:
    """Validates the states of `merge_states`: outs, then as many lses."""
    count = len(op.inputs) // 2
    shapes: Any = specs[: 2 * count]
    outs, lses = shapes[:count], shapes[count:]
    check_alike({f"outs[{i}]": spec for i, spec in enumerate(outs)})
    first = outs[0]
    shape = first.shape
    if not 2 <= len(shape) <= 4:
        raise ProblemError(f"outs[0] has shape {shape}, rank {len(shape)}; give {LAYOUT}")
    b, s, h, d = first.as_4d().shape
    if h < 1 or d < 1:
        raise ProblemError(
            f"outs[0] has shape {shape}; heads and head_dim must be at least 1 (others may be 0) in {LAYOUT}"
        )
    lse_shape, lse_dtype = (b, h, s)[4 - len(shape) :], DTYPES[first.dtype].accumulator
    missing = MISSING_AXES[len(shape)]
    out_axes, lse_axes = ([x for x in operand.axes if x not in missing] for operand in op.outputs)
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_operand(f"outs[{i}]", out, first, shape, (first.dtype,), out_axes, "outs[0]")
        check_operand(f"lses[{i}]", lse, first, lse_shape, (lse_dtype,), lse_axes, "outs[0]")
    results = first.with_packed_strides(), lses[0].with_packed_strides()
    lengths = b, s, 0, h, h, 0, d
    return Problem(
        op, *lengths, first.dtype, Mask.from_options(s, 0), Options(), first.device, first.library, (*shapes, *results)
    )


def _of_append(op: Op, specs: Specs, options: Options) -> Problem:
    """Validates a call of `append_kv`."""
    axes, checked = append.validated(op, specs)
    cache: Any = checked[0]
    options = options.validated(OptionContext(axes["head_dim"], cache.dtype))
    lengths = itemgetter("batch", "rows_q", "rows_k", "heads_q", "heads_kv", "head_dim", "head_dim_v")(axes)
    varlen = SeqlenInfo(axes["batch_q"], axes["rows_q"], axes["batch_k"], axes["rows_k"])
    of_cache = cache.device, cache.library
    return Problem._make((op, *lengths, cache.dtype, Mask.from_options(0, 0), options, *of_cache, checked, varlen, ()))


def _of_block_mask(op: Op, specs: Specs) -> Problem:
    """Validates a call of `create_block_mask`. Its options are the defaults."""
    sizes, lengths, checked = block_mask.validated(op, specs)
    like: Any = checked[0]
    batch, heads, seqlen_q, seqlen_k = sizes
    options = _unmasked(Options().validated(OptionContext(1, "float32")))
    mask = Mask.from_options(seqlen_q, seqlen_k)
    fields = batch, seqlen_q, seqlen_k, heads, heads, 0, 0, "float32", mask, options, like.device, like.library
    return Problem(op, *fields, checked, lengths)
