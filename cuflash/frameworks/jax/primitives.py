"""The two JAX primitives under `attention`, forward and backward; each is one call of XLA's foreign function interface.

Operands and results are the op's, and `static.names` lists the inputs. Arrays like q share one rank, and so do arrays
like k. They are (batch, seqlen, heads, dim), or without the first axis, or the first and third. Arrays like lse are
(batch, heads, seqlen, 1), or without the first axis, or the first two. int32 arrays of lengths are unchanged. Operands
have been validated.

Primitives, instead of `jax.ffi.ffi_call`, because only their lowering has the platform and the final shapes, after
vmap. It compiles and loads the kernels, and turns the workspace into an extra result, so that XLA plans its memory.
XLA would reuse memory that a handler allocates during a capture before the graph runs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import xla_bridge
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ...arrays.jax import check_alive
from ...errors import ProblemError, UnsupportedError
from ...problem.dtypes import DTYPES
from ...problem.operands import VARLEN_ARGS, Op
from ...units import kind_of
from . import ffi, handlers, partition
from .handlers import BACKWARD, FORWARD, CallOptions, CallSpec, Shape, axes_of, halved, is_like_lse
from .mod_attributes import folded as fold_mods
from .mod_attributes import is_mod_operand


def _result_shapes(op: Op, shapes: Mapping[str, Shape]) -> list[Shape]:
    """Returns the shapes of the results. Each axis has its length in the operands, given by name."""

    def axes(name: str) -> list[str]:
        return axes_of(op, name, len(shapes["q"]), len(shapes["k"]))

    lengths = {"one": 1}
    for name, shape in shapes.items():
        if not is_mod_operand(op.operands[op.index[name]]):
            lengths |= zip(axes(name), shape, strict=True)
    return [
        shapes[operand.name.removeprefix("d")]
        if is_mod_operand(operand)
        else tuple(lengths[axis] for axis in axes(operand.name))
        for operand in op.outputs
    ]


def _result_types(target: str, *operands: Any, static: CallOptions) -> list[Any]:
    op, q = static.op(target), operands[0]
    shapes = _result_shapes(op, halved(static.names, [x.shape for x in operands]))
    accumulator = np.dtype(DTYPES[str(q.dtype)].accumulator)
    dtypes_by_name = {"lse": accumulator}
    if static.grads:
        dtypes_by_name |= {f"d{name}": x.dtype for name, x in zip(static.names, operands, strict=True)}
    dtypes = [dtypes_by_name.get(x.name if is_mod_operand(x) else x.dtype, q.dtype) for x in op.outputs]
    return [q.update(shape=x, dtype=dtype, weak_type=False) for x, dtype in zip(shapes, dtypes, strict=True)]


def checked_array(name: str, array: Any) -> Any:
    """Returns an operand as a validated JAX array or tracer; NumPy arrays are copied to JAX's device."""
    if not isinstance(array, (jax.Array, np.ndarray)):
        raise ProblemError(f"{name} is {kind_of(array)}; give a JAX or NumPy array")
    if isinstance(array, np.ndarray):
        array = as_jax(name, array)
    elif not isinstance(array, jax.core.Tracer):
        check_alive(name, array)
    check_numbers(name, array.shape)
    check_whole(name, array)
    return array


def as_jax(name: str, array: Any) -> Any:
    """Returns a value as a JAX array."""
    try:
        return jnp.asarray(array)
    except (TypeError, ValueError):
        kind = f"has dtype {array.dtype}" if isinstance(array, np.ndarray) else f"is {kind_of(array)}"
        raise ProblemError(f"{name} {kind}, of which JAX has no arrays; give a JAX or NumPy array") from None


def refuse_cached(names: Sequence[str]) -> None:
    """Raises UnsupportedError for gradients of a call whose keys are in a cache."""
    cached = [name for name in ("page_table", "cache_batch_idx") if name in names]
    if cached:
        raise UnsupportedError(
            f"{cached[0]} was given and gradients are requested, but cached keys have none, as several sequences may "
            "share them; call it outside of jax.grad, or with jax.lax.stop_gradient of q, k and v, or gather the keys "
            "into k and v, packed (cu_seqlens_k) or one row of the batch for each sequence (seqused_k)"
        )


def check_whole(name: str, array: Any) -> None:
    """Raises UnsupportedError if explicit mesh axes split an array, or it is one term of a sum (unreduced)."""
    if axes := _axes("unreduced", array):
        raise UnsupportedError(
            f"{name} is unreduced over mesh axes {axes} ({jax.typeof(array)}): a term of a sum that is yet to be "
            "taken; take it by jax.lax.psum within jax.shard_map, or by jax.reshard outside of it"
        )
    spec = jax.typeof(array).sharding.spec
    if any(axes is not None for axes in getattr(spec, "partitions", spec)):
        raise UnsupportedError(
            f"{name} is split over devices by explicit mesh axes ({jax.typeof(array)}); call attention within "
            "jax.shard_map, over batch or heads"
        )


def check_not_reduced(name: str, array: Any) -> None:
    """Raises UnsupportedError if mesh axes require an array's gradient to be one term of a sum."""
    if axes := _axes("reduced", array):
        raise UnsupportedError(
            f"{name} is reduced over mesh axes {axes} ({jax.typeof(array)}), so that its gradient would be a sum that "
            "is yet to be taken; give jax.lax.pcast(..., to='varying') of it within jax.shard_map, or jax.reshard "
            "outside of it"
        )


def _axes(state: str, array: Any) -> str:
    """Returns the mesh axes over which an array has this state; its type lists manual axes from JAX 0.10 on."""
    kind = jax.typeof(array)
    layout = kind.sharding.spec, getattr(kind, "manual_axis_type", None)
    return ", ".join(sorted({str(axis) for x in layout for axis in getattr(x, state, ())}))


def _primitive(name: str) -> Any:
    """Returns the primitive of a target with all its rules."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(functools.partial(_result_types, name))
    primitive.def_impl(functools.partial(_run_eagerly, primitive))
    batching.primitive_batchers[primitive] = functools.partial(_batched, primitive)
    ad.primitive_jvps[primitive] = functools.partial(_refuse_derivatives, name)
    mlir.register_lowering(primitive, functools.partial(_refuse_platform, name))
    for platform, lower in (("cpu", _lower_for_cpu), ("cuda", _lower_for_cuda)):
        mlir.register_lowering(primitive, functools.partial(_lower, primitive, lower), platform=platform)
    return primitive


def _run_eagerly(primitive: Any, *operands: Any, static: CallOptions) -> Any:
    # A primitive runs only under jit, even where the user disables jit, or JAX does so to find the origin of a NaN.
    # That search is off in here, as it would find this call and recurse without end.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        results = _jitted(primitive, static)(*operands)
    checked = (results[0],) if primitive.name == FORWARD else results  # lse may be -inf: a query without keys
    nans, infs = jax.config.jax_debug_nans, jax.config.jax_debug_infs
    for what, is_debugged, is_bad in (("nan", nans, jnp.isnan), ("inf", infs, jnp.isinf)):
        if is_debugged and any(is_bad(x).any() for x in checked):
            raise FloatingPointError(f"invalid value ({what}) encountered in {primitive.name}")
    return results


@functools.lru_cache(maxsize=4096)
def _jitted(primitive: Any, static: CallOptions) -> Any:
    return jax.jit(functools.partial(primitive.bind, static=static))


def _refuse_derivatives(name: str, *arguments: Any, **parameters: Any) -> Any:
    raise UnsupportedError(
        f"{name} has no derivative of its own: gradients of attention are taken once, in reverse mode. For second "
        "derivatives and forward mode take jax.nn.dot_product_attention"
    )


def _batched(
    primitive: Any, operands: Sequence[Any], axes: Sequence[int | None], *, static: CallOptions
) -> tuple[list[Any], list[int]]:
    """Applies vmap: the new axis joins batch, or heads if it stands before them, so that nothing is transposed.

    With packed rows, or keys in pages or in rows of a cache, it joins heads: all elements have the same lengths. Mods
    are rewritten so that b and h keep their meaning. A captured array that is mapped, or gets a gradient, has the new
    axis in front. Mask tiles that are not shared follow q. Dropout depends on b and h itself, and takes one call for
    each element.

    An operand without the axis is copied: TMA cannot address a stride of 0, and sm80 kernels on Hopper cost
    more than the copy. (Query heads that share k and v need no vmap: pass them to one call, as grouped heads.)
    """
    op, names = static.op(primitive.name), static.names
    for name, x in zip(names, operands, strict=True):
        check_whole(name, x)
        check_not_reduced(name, x)
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    shapes = [
        x.shape if axis is None else (*x.shape[:axis], *x.shape[axis + 1 :])
        for x, axis in zip(operands, axes, strict=True)
    ]
    shape_q, rank = shapes[0], len(shapes[0])
    before_heads = 2 if rank == 4 else 1
    folded_axis = axes[0] if axes[0] is not None and axes[0] <= before_heads else 0
    mapped = [name for name, axis in zip(names, axes, strict=True) if name in VARLEN_ARGS and axis is not None]
    is_placed = not set(VARLEN_ARGS).isdisjoint(set(names) - {"seqused_q", "seqused_k"})
    if mapped and is_placed:
        raise UnsupportedError(
            f"{', '.join(mapped)} under vmap: sequences that are packed or lie in a cache have no axis to map lengths "
            "over; pack what is mapped as further sequences of one call, or take jax.lax.map"
        )
    of_heads = is_placed or (folded_axis == before_heads and not mapped)
    apart: frozenset[str] = frozenset()  # mod arrays that have the new axis, too
    if static.functions is not None:
        grad_names = {operand.name.removeprefix("d") for operand in op.outputs if is_mod_operand(operand)}
        apart = frozenset(
            name
            for name, axis in zip(names, axes, strict=True)
            if is_mod_operand(op.operands[op.index[name]])
            and name != "mask_tiles"
            and (axis is not None or name in grad_names)
        )
        if static.functions.mod_spec.drops or (mapped and "sinks" in apart):
            return _in_turn(primitive, operands, axes, static)
        of_heads = of_heads or "sinks" in apart
    folded_axis = 0 if mapped and folded_axis == before_heads else folded_axis

    def place(name: str, rank: int) -> int:
        """Returns the position of the new axis in an operand of this rank (without the axis)."""
        if not of_heads:
            return folded_axis
        return rank - (1 if rank == 2 else 2) - is_like_lse(name)

    folded = []
    length = (shape_q[-2] if rank > 2 else 1) if of_heads else (shape_q[0] if rank == 4 else 1)
    is_outer = of_heads or folded_axis == 0
    for name, x, axis, shape in zip(names, operands, axes, shapes, strict=True):
        if name in apart or (name == "sinks" and of_heads):
            x = jnp.broadcast_to(x, (size, *shape)) if axis is None else jnp.moveaxis(x, axis, 0)
            x = x.reshape(-1) if name == "sinks" else x
        elif name == "mask_tiles":
            x = _mask_tiles(x, axis, size, length, int(of_heads), is_outer)
        elif not is_mod_operand(op.operands[op.index[name]]) and (name not in VARLEN_ARGS or not of_heads):
            to = place(name, len(shape))
            whole = (*shape[:to], size, *shape[to:])
            x = jnp.broadcast_to(jnp.expand_dims(x, to), whole) if axis is None else jnp.moveaxis(x, axis, to)
            x = x.reshape(_folded(name, shape, size, of_heads))
        folded.append(x)
    if static.functions is not None:
        axis_name = "h" if of_heads else "b"
        apart -= {"sinks"}
        new_names, functions = fold_mods(names, static.functions, axis_name, length, size, is_outer, apart)
        static = static._replace(names=new_names, functions=functions)
    results, out_axes = [], []
    outputs = primitive.bind(*folded, static=static)
    for operand, x, shape in zip(op.outputs, outputs, _result_shapes(op, halved(names, shapes)), strict=True):
        out_axes.append(0 if is_mod_operand(operand) else place(operand.name, len(shape)))
        results.append(x.reshape(*shape[: out_axes[-1]], size, *shape[out_axes[-1] :]))
    return results, out_axes


def _in_turn(
    primitive: Any, operands: Sequence[Any], axes: Sequence[int | None], static: CallOptions
) -> tuple[list[Any], list[int]]:
    """Applies vmap where nothing can be folded: one call for each element."""
    mapped = [jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True) if axis is not None]

    def one(parts: list[Any]) -> Any:
        left = iter(parts)
        whole = [x if axis is None else next(left) for x, axis in zip(operands, axes, strict=True)]
        return primitive.bind(*whole, static=static)

    results = jax.lax.map(one, mapped)
    return results, [0] * len(results)


def _mask_tiles(mask_tiles: Any, axis: int | None, size: int, length: int, mapped_axis: int, is_outer: bool) -> Any:
    """Returns mask tiles whose axis `mapped_axis`, batch or heads, grows from `length` to `size * length`.

    axis: the position of the new axis in them, or None. is_outer: it stands before the axis that it joins.
    """
    if axis is None and mask_tiles.shape[mapped_axis] == 1:
        return mask_tiles
    mask_tiles = mask_tiles[None] if axis is None else jnp.moveaxis(mask_tiles, axis, 0)
    shape = mask_tiles.shape[1:]
    whole = jnp.broadcast_to(mask_tiles, (size, *shape[:mapped_axis], length, *shape[mapped_axis + 1 :]))
    joined = jnp.moveaxis(whole, 0, mapped_axis if is_outer else mapped_axis + 1)
    return joined.reshape(*shape[:mapped_axis], size * length, *shape[mapped_axis + 1 :])


def _folded(name: str, shape: Shape, size: int, of_heads: bool) -> Shape:
    """Returns the shape of an operand with `size` times the heads, or with `size` times the batch and all axes."""
    if name in VARLEN_ARGS:
        return (size * shape[0], *shape[1:])
    like_lse = is_like_lse(name)
    if len(shape) == 2:
        shape = (1, *shape) if like_lse else (shape[0], 1, shape[1])
    if of_heads:
        heads_at = len(shape) - (3 if like_lse else 2)
        return (*shape[:heads_at], size * shape[heads_at], *shape[heads_at + 1 :])
    batch, *inner = (1, *shape) if len(shape) == 3 else shape
    return (batch * size, *inner)


def _refuse_platform(name: str, context: Any, *operands: Any, static: CallOptions) -> Any:
    platforms = ", ".join(context.module_context.platforms)
    raise UnsupportedError(f"{name} runs on NVIDIA GPUs and the CPU, not on {platforms}; move the arrays there")


def _lower(primitive: Any, lower: Any, context: Any, *operands: Any, static: CallOptions) -> Any:
    partitioned = partition.lowered(primitive, context, operands, static)  # its parts are lowered here, too
    if partitioned is not None:
        return partitioned
    return lower(primitive.name, context, *operands, static=static)


def _lower_for_cpu(name: str, context: Any, *operands: Any, static: CallOptions) -> Any:
    # Without shapes: in an exported program they may be symbolic, and the buffers have the real ones.
    return jax.ffi.ffi_lowering(name)(context, *operands, call=CallSpec(static).encode())


def _lower_for_cuda(name: str, context: Any, *operands: Any, static: CallOptions) -> Any:
    shapes, dtypes = tuple(x.shape for x in context.avals_in), tuple(str(x.dtype) for x in context.avals_in)
    check_numbers("an operand", *shapes)
    call_spec = CallSpec(static, shapes, dtypes)
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError as error:  # jax.export writes for other machines
        if name == BACKWARD:
            raise UnsupportedError(
                "the workspace of backward depends on the GPU, and JAX sees none here: export on a machine that has "
                f'one, or for platforms=["cpu"], or forward alone, with vjp_order=0 ({error})'
            ) from error
        devices = []
    floats = handlers.load(name, call_spec, [device.local_hardware_id for device in devices])
    if not floats:
        return jax.ffi.ffi_lowering(name)(context, *operands, call=call_spec.encode())
    call_spec = call_spec._replace(workspace=floats)
    workspace = jax.core.ShapedArray((call_spec.workspace,), np.dtype("float32"))
    context = context.replace(avals_out=[*context.avals_out, workspace])
    return jax.ffi.ffi_lowering(name)(context, *operands, call=call_spec.encode())[:-1]


def check_numbers(name: str, *shapes: Shape) -> None:
    """Raises UnsupportedError for symbolic shapes."""
    for shape in shapes:
        if not all(isinstance(length, int) for length in shape):
            raise UnsupportedError(
                f"{name} has the symbolic shape {shape}; kernels are planned for numbers: export with those"
            )


@atexit.register
def _wait_at_exit() -> None:
    """Waits at the exit of the process for calls that still run.

    XLA's threads call Python; a thread that does so after the interpreter is gone never returns, and the process hangs.
    Calls whose results have no reference any more are visible to `on_cpu` alone.
    """
    if not xla_bridge.backends_are_initialized():
        return
    with contextlib.suppress(Exception):  # there may be no CPU backend; errors are raised where results are read
        for array in jax.live_arrays("cpu"):
            with contextlib.suppress(Exception):
                array.block_until_ready()
    handlers.on_cpu.wait(quiet=0.05)


forward, backward = _primitive(FORWARD), _primitive(BACKWARD)

for _target in (FORWARD, BACKWARD):
    ffi.register(_target, "cpu", 0, functools.partial(handlers.run_on_cpu, _target))
    _run = functools.partial(handlers.run_on_cuda, _target)
    ffi.register(_target, "CUDA", ffi.COMMAND_BUFFER_COMPATIBLE, _run)
