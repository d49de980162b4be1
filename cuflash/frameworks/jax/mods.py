"""Mods (score_mod, mask_mod, block_mask, bias, sinks, dropout) of `attention` in JAX.

All arrays that mods read are operands of the call: bias, captured arrays and the mask tiles of a block mask. They may
therefore be traced: arguments of a jitted function, differentiated or mapped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import ProblemError
from ...mods.graph.graph import CapturedArray, Graph, Node, digest, post_order
from ...mods.graph.operations import Type
from ...mods.graph.simplify import cast, load, rebuilt, transform
from ...mods.tracing.jaxpr import graph_of_jaxpr
from ...mods.tracing.operand import extent_of_dtype, is_of_library, name_of_dtype, type_of_dtype
from ...mods.tracing.trace import SIGNATURES, name_of, trace
from ...ops.block_mask import BlockMask
from ...ops.dropout_seed import seed_number
from ...ops.mods import ModArgs, resolve_mods
from ...problem.array_spec import ArraySpec
from ...problem.mod_arrays import check_mod_array
from ...problem.operands import DROPOUT_SEED, OPS, VARLEN_OPS, Op, Sizes
from ...problem.options import Options, check_dropout
from ...units import kind_of
from .primitives import checked_array

_SEEDS = "an int of 64 bits, a key of jax.random, or an array of one integer or of two uint32"


def mod_operands(
    mod_args: ModArgs, dropout_seed: Any, varlen_args: tuple[Any, ...], options: Options
) -> tuple[Op, dict[str, Any]]:
    """Returns the op of a call, and its operands after the plain ones, by name and in order.

    varlen_args: the arrays of lengths, in the op's order, or none.
    """
    bias, sinks = (
        None if x is None else checked_array(name, x)
        for name, x in (("bias", mod_args.bias), ("sinks", mod_args.sinks))
    )
    score, mask = (_graph(f, kind) for f, kind in ((mod_args.score_mod, "score_mod"), (mod_args.mask_mod, "mask_mod")))
    share = check_dropout(mod_args.dropout_p)
    block_mask = _checked(mod_args.block_mask)
    plain = (VARLEN_OPS if varlen_args else OPS)["forward"]
    call = resolve_mods(plain, ModArgs(score, mask, block_mask, bias, sinks, share), varlen_args, options)
    if dropout_seed is not None and not call.needs_seed:
        check_seed(dropout_seed)
    arrays = call.inputs_with(_seed(dropout_seed) if call.needs_seed else None)
    names = [operand.name for operand in call.op.inputs[len(call.op.inputs) - len(arrays) :]]
    return call.op, dict(zip(names, arrays, strict=True))


def _checked(block_mask: Any) -> Any:
    """Returns a block mask whose arrays are JAX's.

    Others are refused: JAX may narrow their dtypes (int64 to int32), which changes the mask.
    """
    if isinstance(block_mask, BlockMask) and not isinstance(block_mask.cells, jax.Array):
        raise ProblemError(
            f"block_mask was made of arrays of {type(block_mask.cells).__module__}; give create_block_mask a JAX array "
            "as like, and a mask_mod that refers to JAX arrays alone"
        )
    return block_mask


class _Frame(NamedTuple):
    """All of a block mask but its arrays. Block masks with equal frames share compiled programs."""

    root: Node
    kinds: tuple[tuple[Any, ...], ...]
    digest: str
    sizes: Sizes
    tells: tuple[bool, bool]


def _leaves(block_mask: BlockMask) -> tuple[tuple[Any, ...], _Frame]:
    graph = block_mask.graph
    kinds = tuple((each.dtype, each.shape, each.type) for each in graph.arrays)
    frame = _Frame(graph.root, kinds, graph.digest, block_mask.sizes, block_mask.tells)
    return (block_mask.cells, *[each.array for each in graph.arrays]), frame


def _with_leaves(frame: _Frame, leaves: Any) -> BlockMask:
    mask_tiles, *arrays = leaves
    captured = tuple(CapturedArray(x, *kind) for x, kind in zip(arrays, frame.kinds, strict=True))
    return BlockMask(None, mask_tiles, frame.sizes, frame.tells, Graph(frame.root, captured, frame.digest))


jax.tree_util.register_pytree_node(BlockMask, _leaves, _with_leaves)


def check_seed(seed: Any) -> None:
    """Validates the seed of a call that drops nothing, and so reads none."""
    if seed_number(seed, _SEEDS) is None:
        words = _seed(seed)
        spec = ArraySpec.contiguous(words.shape, str(words.dtype), library="jax")
        check_mod_array(DROPOUT_SEED, spec, spec, {})


def _seed(seed: Any) -> Any:
    """Returns a seed as two 32-bit numbers, the low one first, or as one 64-bit number."""
    if isinstance(seed, np.ndarray) and seed.dtype.kind in "iu":  # before JAX narrows integers of 64 bits
        if seed.size == 1:
            seed = seed.item()
        else:
            spec = ArraySpec.contiguous(seed.shape, str(seed.dtype), library="jax")
            check_mod_array(DROPOUT_SEED, spec, spec, {})
    if (number := seed_number(seed, _SEEDS)) is not None:
        return jnp.asarray(np.array([number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF], np.uint32))
    if seed is None:
        raise ProblemError(f"dropout_p is not 0, but there is no dropout_seed; give {_SEEDS}")
    if not isinstance(seed, jax.Array | np.ndarray):
        raise ProblemError(f"dropout_seed is {kind_of(seed)}; give {_SEEDS}")
    if not jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = checked_array("dropout_seed", seed)
        is_narrow = jnp.issubdtype(seed.dtype, jnp.integer) and seed.dtype.itemsize < 8
        # A jitted function gets an int as an int32, which drops the same weights as the int.
        return _words(seed.reshape(())) if is_narrow and seed.size == 1 else seed
    if seed.shape:
        raise ProblemError(f"dropout_seed has {seed.shape} keys; give one")
    words = jax.random.key_data(seed)
    # Keys of other generators repeat their words: draw two instead.
    return words if words.shape == (2,) else jax.random.bits(seed, (2,), np.uint32)


def _words(seed: jax.Array) -> jax.Array:
    """Returns the two words of an integer of at most 32 bits, extended to 64."""
    low = seed.astype(np.int32 if jnp.issubdtype(seed.dtype, jnp.signedinteger) else np.uint32)
    return jnp.stack([low.astype(np.uint32), (low < 0).astype(np.uint32) * np.uint32(0xFFFFFFFF)])


def _graph(function: Any, kind: str) -> Graph | None:
    """Returns the graph of a function, over JAX's arrays."""
    if function is None:
        return None
    try:
        graph = trace(function, kind)
    except Exception as error:  # JAX's functions raise exceptions of any type for a traced value
        if not callable(function):
            raise
        graph = _graph_by_jax(function, kind, error)
    called = f"an array that {kind} refers to"
    arrays = [checked_array(called, each.array) for each in graph.arrays]
    for number, (x, each) in enumerate(zip(arrays, graph.arrays, strict=True)):
        if name_of_dtype(x.dtype) != each.dtype and _decides(graph, number) and not _is_kept(each.array, x.dtype):
            raise ProblemError(
                f"{kind} {name_of(function)} refers to an array of {each.dtype} of shape {each.shape}, which JAX makes "
                f"{x.dtype}, so that its values change; enable jax_enable_x64, or subtract an offset before the call"
            )
    return _of_arrays(graph, arrays)


def _decides(graph: Graph, number: int) -> bool:
    """True if an array holds integers, or floats that decide a mask or an index."""
    loads = (x for x in post_order([graph.root]) if x.op == "load" and x.value == number)
    return any(x.type != Type.FLOAT32 for x in loads)


def _is_kept(array: np.ndarray[Any, Any], dtype: Any) -> bool:
    """True if the values of an array are unchanged in another dtype."""
    with np.errstate(all="ignore"):
        return np.array_equal(array.astype(dtype).astype(array.dtype), array, equal_nan=array.dtype.kind == "f")


def _graph_by_jax(function: Any, kind: str, error: Exception) -> Graph:
    """Returns the graph of a function that JAX traces. error: the reason why cuflash could not trace it."""
    scalars = [jax.ShapeDtypeStruct((), np.dtype("float32" if x == "score" else "int32")) for x in SIGNATURES[kind][0]]
    try:
        closed = jax.make_jaxpr(function)(*scalars)
    except Exception as other:
        if isinstance(error, ProblemError) or type(other) is type(error):
            raise error from None  # JAX's error would add nothing
        raise ProblemError(
            f"{_line_of(error)}{kind} cannot be traced: it calls functions that take JAX's own tracers alone, and JAX "
            f"does not trace it ({type(other).__name__}: {str(other).partition(chr(10))[0]}); write it with operators, "
            "jnp.where and functions of cuflash.mods"
        ) from other
    return graph_of_jaxpr(closed, kind)


def _line_of(error: Exception) -> str:
    """Returns the last line of the user's code in an error's traceback."""
    where, traceback = "", error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if not is_of_library(frame.f_globals.get("__name__")):
            where = f"{frame.f_code.co_filename}:{traceback.tb_lineno}, in {frame.f_code.co_name}: "
        traceback = traceback.tb_next
    return where


def _of_arrays(graph: Graph, arrays: list[Any]) -> Graph:
    """Returns the graph over other arrays, whose dtypes may be narrower: JAX may narrow NumPy's."""
    captured = [CapturedArray(x, name_of_dtype(x.dtype), tuple(x.shape), type_of_dtype(x.dtype)) for x in arrays]
    if all(new.dtype == old.dtype for new, old in zip(captured, graph.arrays, strict=True)):
        return Graph(graph.root, tuple(captured), graph.digest)

    def rule(x: Node, arguments: list[Node]) -> Node:
        if x.op == "load":
            narrow = captured[x.value]
            return cast(load(x.value, narrow.type, arguments, extent_of_dtype(narrow.dtype)), x.type)
        return rebuilt(x, arguments)

    (root,) = transform([graph.root], rule)
    return Graph(root, tuple(captured), digest([root], captured))
