"""Resolves mods (score_mod, mask_mod, bias, sinks, dropout) of a public call into an op and its extra inputs.

Every call does so. It reuses earlier work: functions are cached by the objects that they refer to, ops by digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple

from ..arrays.find import library_of
from ..errors import ProblemError, UnsupportedError
from ..mods.analysis.intervals import Band, band
from ..mods.graph.graph import Graph
from ..mods.tracing.operand import is_integer, name_of_dtype
from ..mods.tracing.trace import trace
from ..problem.mod_spec import BIAS_AXES, Bias, ModSpec, captured, make_mod_spec
from ..problem.operands import Op, Sizes, banded, mod_op
from ..problem.options import Options, check_dropout, is_zero
from ..units import kind_of
from .block_mask import BlockMask
from .dropout_seed import check_seed, seed_array

VarlenInputs = tuple[Any, ...]  # `VarlenArgs` that the op takes; () for a dense call


@dataclass(frozen=True, slots=True)
class Shaped:
    """A placeholder array: shape and dtype only."""

    shape: tuple[int, ...]
    dtype: str


class ModArgs(NamedTuple):
    """The mod arguments of a public call. Functions may be traced already."""

    score_mod: Any = None
    mask_mod: Any = None
    block_mask: Any = None
    bias: Any = None
    sinks: Any = None
    dropout_p: Any = 0.0


class ModCall(NamedTuple):
    """A resolved call: the op, its inputs after the plain op's, and the results to sum for each requested gradient.

    needs_seed: True if the seed of dropout follows the arrays; the mask tiles come last. grads: for each gradient,
    indices among the results after dq, dk and dv.
    """

    op: Op
    arrays: tuple[Any, ...]
    needs_seed: bool
    mask_tiles: tuple[Any, ...]
    grads: tuple[tuple[int, ...], ...]

    def inputs(self, dropout_seed: Any, q: Any) -> tuple[Any, ...]:
        """Returns the inputs after the plain op's. A seed that is not needed is validated."""
        if self.needs_seed:
            return self.inputs_with(seed_array(dropout_seed, q))
        if dropout_seed is not None:
            check_seed(dropout_seed, q)
        return self.inputs_with(None)

    def inputs_with(self, seed: Any) -> tuple[Any, ...]:
        """Returns the inputs after the plain op's. seed: an array, if it is needed."""
        return (*self.arrays, seed, *self.mask_tiles) if self.needs_seed else (*self.arrays, *self.mask_tiles)

    def captured_grads(self, sums: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the gradients of captured arrays, each the sum of some of the results after dq, dk and dv."""
        return tuple([reduce(add, [sums[index] for index in group]) for group in self.grads])


def resolve_mods(
    plain: Op, mod_args: ModArgs, varlen_args: VarlenInputs, options: Options, captured_grads: Any = None
) -> ModCall:
    """Resolves the mods of a call into an op and its extra inputs. plain: the op without mods.

    varlen_args: arrays of lengths that the op takes; () for a dense call. options: before validation.
    """
    score = _graph(mod_args.score_mod, "score_mod")
    mask, block_mask = _mask(mod_args, varlen_args)
    bias = None if mod_args.bias is None else _bias(mod_args.bias)
    has_sinks = mod_args.sinks is not None
    drops = not is_zero(mod_args.dropout_p) and bool(check_dropout(mod_args.dropout_p))
    sizes = None if block_mask is None else block_mask.sizes
    fits = not varlen_args or mask is None or (mask_band := band(mask.root)) is None or _fits(mask_band, options)
    digests = None if score is None else score.digest, None if mask is None else mask.digest
    key = plain, *digests, bias, has_sinks, drops, sizes, fits
    if (kind := _call_kinds.get(key)) is None:
        if len(_call_kinds) >= MAX_KEYS:
            _call_kinds.clear()
        kind = _call_kinds.setdefault(key, _call_kind(key, score, mask))
    arrays = [each.array for each in captured((score, mask if kind.has_mask else None))]
    arrays += [] if bias is None else [mod_args.bias]
    loaded = len(arrays)
    arrays += [mod_args.sinks] if has_sinks else []
    numbers: tuple[tuple[int, ...], ...] = ()
    if captured_grads is not None:
        numbers = _numbers(captured_grads, mod_args, score, kind.mod_spec, arrays, loaded)
    if not kind.mod_spec.changes:
        return ModCall(kind.op, (), False, (), numbers)
    if isinstance(options.algorithm, str) and options.algorithm == "standard":
        raise UnsupportedError(
            "algorithm='standard' takes no score_mod, mask_mod, bias, sinks and dropout; take another one, which give "
            "the same numbers"
        )
    mask_tiles = (block_mask.cells,) if block_mask is not None and kind.mod_spec.has_block_mask else ()
    if not numbers:
        return ModCall(kind.op, tuple(arrays), drops, mask_tiles, ())
    flat = tuple(dict.fromkeys(number for group in numbers for number in group))
    indices = tuple([tuple([flat.index(number) for number in group]) for group in numbers])
    return ModCall(_op_of(key, kind, flat), tuple(arrays), drops, mask_tiles, indices)


class _CallKind(NamedTuple):
    """Common part of calls whose arguments are of the same kinds: the op, without requested gradients.

    band: the mask_mod as a band, applied like causal and window_size. It is None for other masks, and for a band that
    hides nothing, unless it came as a block mask. has_mask: True if the mask is a part of kernels.
    """

    mod_spec: ModSpec
    op: Op
    band: Band | None
    has_mask: bool


# The plain op, digests of score_mod and mask_mod, the bias, has_sinks, drops, sizes of the block mask, and
# True if the arguments of a plain call can express the mask.
_Key = tuple[Op, str | None, str | None, Bias | None, bool, bool, Sizes | None, bool]
MAX_KEYS = 1024
_call_kinds: dict[_Key, _CallKind] = {}


def _call_kind(key: _Key, score: Graph | None, mask: Graph | None) -> _CallKind:
    plain, _, _, bias, has_sinks, drops, sizes, fits = key
    has_block_mask = sizes is not None
    mask_band = None if mask is None or not fits else band(mask.root)
    if mask_band is not None:
        mask, has_block_mask = None, False
        mask_band = None if sizes is None and mask_band.is_open else mask_band
    mod_spec = make_mod_spec(score, mask, bias, has_sinks, drops, has_block_mask)
    kind = _CallKind(mod_spec, plain, mask_band, mask is not None)
    return kind._replace(op=_op_of(key, kind, ()))


def _op_of(key: _Key, kind: _CallKind, grads: tuple[int, ...]) -> Op:
    """Returns the op of a call of this kind. grads: numbers of the arrays whose gradients it returns."""
    plain, *_, sizes, _ = key
    op = kind.op
    if kind.mod_spec.changes:
        op = mod_op(plain, kind.mod_spec, grads, sizes if kind.mod_spec.has_block_mask else None)
    return op if kind.band is None or op.band is not None else banded(op, kind.band, sizes)


def _graph(function: Any, kind: str) -> Graph | None:
    return function if function is None or isinstance(function, Graph) else trace(function, kind)


def _mask(mod_args: ModArgs, varlen_args: VarlenInputs) -> tuple[Graph | None, BlockMask | None]:
    """Returns the mask_mod of a call, and its block mask."""
    block_mask = mod_args.block_mask
    graph = _graph(mod_args.mask_mod, "mask_mod")
    if block_mask is None:
        return graph, None
    if not isinstance(block_mask, BlockMask):
        raise ProblemError(f"block_mask is {kind_of(block_mask)}; give what create_block_mask returned")
    mask_graph = block_mask.graph
    if graph is not None and graph is not mask_graph:
        if graph.digest != mask_graph.digest:
            raise ProblemError("block_mask was made of another mask_mod than the one of the call; give one of them")
        if any(x.array is not y.array for x, y in zip(graph.arrays, mask_graph.arrays, strict=True)):
            raise ProblemError(
                "block_mask was made of a mask_mod that refers to other arrays than the one of the call; make a new "
                "one by create_block_mask when arrays change"
            )
    block_mask.check_varlen(varlen_args)
    return mask_graph, block_mask


def _fits(mask_band: Band, options: Options) -> bool:
    """True if the band and the options' mask use the same diagonal offset, or one of them is open."""
    window = options.window_size
    sides = window if isinstance(window, tuple | list) else (0,)
    is_open = all(side is None or (is_integer(side) and side == -1) for side in sides)
    return (
        mask_band.is_open
        or (options.causal is False and is_open)
        or (options.diagonal_offset is None) == mask_band.from_end
    )


def _bias(bias: Any) -> Bias:
    library = None if isinstance(bias, Shaped) else library_of("bias", bias)
    try:
        shape, dtype = bias.shape, bias.dtype
    except AttributeError:  # arrays that only have DLPack
        assert library is not None
        spec = library.spec("bias", bias)
        shape, dtype = spec.shape, spec.dtype
    if len(shape) > len(BIAS_AXES):
        raise ProblemError(
            f"bias has shape {tuple(shape)}; give (batch, heads_q, seqlen_q, seqlen_k), of which any may be 1 and "
            "the first may be left out"
        )
    return Bias(name_of_dtype(dtype), tuple([length > 1 for length in shape]))


def _numbers(
    captured_grads: Any, mod_args: ModArgs, score: Graph | None, mod_spec: ModSpec, arrays: Sequence[Any], loaded: int
) -> tuple[tuple[int, ...], ...]:
    """Returns, for each array of `captured_grads`, its numbers among the arrays that may have gradients."""
    if not isinstance(captured_grads, tuple | list):
        raise ProblemError(f"captured_grads is {kind_of(captured_grads)}; give a tuple of arrays, () for none")
    numbers = [*range(0 if score is None else len(score.arrays))]
    numbers += [loaded - 1] if mod_args.bias is not None else []
    numbers = [number for number in numbers if mod_spec.arrays[number].type.is_float]
    numbers += [loaded] if mod_args.sinks is not None else []
    groups = [tuple([number for number in numbers if arrays[number] is x]) for x in captured_grads]
    for position, (x, group) in enumerate(zip(captured_grads, groups, strict=True)):
        if not group:
            names = [_described(mod_spec, number, arrays) for number in numbers]
            is_array = hasattr(x, "shape") and not isinstance(x, type)
            kind = f"an array of shape {tuple(x.shape)}" if is_array else kind_of(x)
            raise ProblemError(
                f"captured_grads[{position}] is {kind} that has no gradient here; give, as the same objects, some of: "
                f"{', '.join(names) or 'nothing, as no array of floats changes the scores'}"
            )
    return tuple(groups)


def _described(mod_spec: ModSpec, number: int, arrays: Sequence[Any]) -> str:
    name = mod_spec.arrays[number].name if number < len(mod_spec.arrays) else "sinks"
    shape = tuple(getattr(arrays[number], "shape", ()))
    return f"{name} {shape}" if name in ("bias", "sinks") else f"the array {shape} that score_mod refers to"
