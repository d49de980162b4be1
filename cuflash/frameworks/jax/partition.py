"""Partitioning of calls under plain `jit`: over batch and heads, so that a device needs its part alone.

Outside of `shard_map`, a call on several devices has a rule for XLA's partitioner (Shardy; each axis has a
factor). Each device then runs the same call on its part. Without the rule, every device would gather whole arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src.lib import xla_client
from jax._src.sharding_impls import GSPMDSharding, ShardingContext
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir

from ...problem.operands import VARLEN_ARGS, Op
from .handlers import CallOptions, Shape, axes_of

BATCH, HEADS, GROUP = "batch", "heads", "group"  # the factors that may be split, and the query heads of a kv head
# Varlen arrays of sequences that are rows of a batch. With others, sequences are packed or share a cache.
_OF_ROWS = {"seqused_q", "seqused_k"}


def lowered(primitive: Any, context: Any, operands: Sequence[Any], static: CallOptions) -> Any:
    """Returns the partitioned form of a call that is lowered in this context; None for calls that stay whole.

    Calls with mods stay whole: b and h would count within a part. Exports stay whole, too: the rule exists in this
    process alone.
    """
    module = context.module_context
    axes = module.axis_context
    if not isinstance(axes, ShardingContext) or axes.num_devices == 1 or static.functions is not None:
        return None
    if module.lowering_parameters.for_export or not jax.config.jax_use_shardy_partitioner:
        return None
    # Any devices will do: only their count matters, as shardings hold their numbers.
    devices = tuple(jax.devices(module.platforms[0])[: axes.num_devices])
    module = module.replace(axis_context=ShardingContext(axes.num_devices, devices))
    call = mlir.lower_fun(_partitioned(primitive, static), multiple_results=True)
    return call(context.replace(module_context=module), *operands)


@functools.lru_cache(maxsize=1024)
def _partitioned(primitive: Any, static: CallOptions) -> Any:
    """Returns the call as a function of its operands that XLA partitions."""
    op = static.op(primitive.name)

    def call(*operands: Any) -> tuple[Any, ...]:
        return tuple(primitive.bind(*operands, static=static))

    def rule(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        return _rule(op, static.names, [x.shape for x in operands], [x.shape for x in results])

    def partition(mesh: Any, operands: Any, results: Any) -> tuple[Any, Any, Any, Any]:
        axes, of_results = _axes(op, static.names, [x.shape for x in operands])
        parts = _Parts.from_sharding(operands[0].sharding, axes[0])
        lengths = dict(zip(axes[1], operands[1].shape, strict=True))  # of k: its heads are the ones split
        parts = parts.fitting(lengths.get(BATCH, 1), lengths.get(HEADS, 1))
        return mesh, call, tuple(map(parts.sharding, of_results)), tuple(map(parts.sharding, axes))

    function = custom_partitioning(call)
    # Not decoded: a mesh axis of 4 may split two kv heads into two parts, which no axis name can express.
    function.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    return function


class _Parts(NamedTuple):
    """Devices, and their numbers as an array (parts of the batch, parts of the heads, copies of each)."""

    devices: Any
    numbers: np.ndarray[Any, Any]

    @classmethod
    def from_sharding(cls, sharding: Any, axes: Sequence[str]) -> _Parts:
        """Returns the parts of an array with these axes."""
        devices = tuple(sharding._device_assignment)
        tiled = sharding._hlo_sharding
        if not tiled.is_tiled():
            return cls(devices, np.arange(len(devices)).reshape(1, 1, -1))
        numbers = np.reshape(tiled.tile_assignment_devices(), tiled.tile_assignment_dimensions())
        numbers = numbers[(None,) * 2 + (...,)]  # an absent axis has one part
        for place, name in enumerate((BATCH, HEADS)):
            if name in axes:
                numbers = np.swapaxes(numbers, place, 2 + axes.index(name))
        return cls(devices, numbers.reshape(*numbers.shape[:2], -1))

    def fitting(self, batch: int, heads: int) -> _Parts:
        """Returns parts whose axis is whole where these lengths are not divisible."""
        numbers = self.numbers
        if batch % numbers.shape[0]:
            numbers = numbers.transpose(1, 0, 2).reshape(1, numbers.shape[1], -1)
        if heads % numbers.shape[1]:
            numbers = numbers.reshape(numbers.shape[0], 1, -1)
        return self._replace(numbers=numbers)

    def sharding(self, axes: Sequence[str]) -> GSPMDSharding:
        """Returns the sharding of an array with these axes."""
        batch, heads, _ = self.numbers.shape
        numbers = self.numbers.transpose(1, 0, 2) if BATCH not in axes else self.numbers
        split = {BATCH: batch, HEADS: heads}
        dimensions = [split.get(axis, 1) for axis in axes]  # batch stands before heads in every array
        op_sharding = xla_client.OpSharding()
        op_sharding.type = xla_client.OpSharding.Type.OTHER
        op_sharding.tile_assignment_dimensions = [*dimensions, numbers.size // int(np.prod(dimensions))]
        op_sharding.tile_assignment_devices = numbers.ravel().tolist()
        op_sharding.replicate_on_last_tile_dim = True
        return GSPMDSharding(self.devices, op_sharding)


def _axes(op: Op, names: Sequence[str], shapes: Sequence[Shape]) -> tuple[list[list[str]], list[list[str]]]:
    """Returns the axes of operands and results: BATCH and HEADS for axes that may be split, others by name."""
    of_rows = _OF_ROWS.issuperset(name for name in names if name in VARLEN_ARGS)
    split = {"heads_q": HEADS, "heads_kv": HEADS}
    split |= dict.fromkeys(("batch_q", "batch_k", "batch"), BATCH) if of_rows else {}

    def axes_by_name(name: str) -> list[str]:
        named = axes_of(op, "k" if name == "kv" else name, len(shapes[0]), len(shapes[1]))
        return [split.get(axis, axis) for axis in named]

    return [axes_by_name(name) for name in names], [axes_by_name(operand.name) for operand in op.outputs]


def _rule(
    op: Op, names: Sequence[str], shapes: Sequence[Shape], of_results: Sequence[Shape]
) -> tuple[str, dict[str, Any]]:
    """Returns Shardy's rule: the factors of each axis, and the factors that are whole on every device."""
    axes, result_axes = _axes(op, names, shapes)
    heads_kv = shapes[1][axes[1].index(HEADS)] if HEADS in axes[1] else 1
    whole: list[str] = []  # in order of appearance, as Shardy requires

    def factors(named: Sequence[str], shape: Sequence[int]) -> Iterator[str]:
        for axis, length in zip(named, shape, strict=True):
            if axis == HEADS and length > heads_kv > 1:
                whole.extend({GROUP}.difference(whole))
                yield f"({HEADS} {GROUP})"
            elif axis == BATCH or (axis == HEADS and heads_kv > 1):
                yield axis
            else:  # a separate factor: an axis that is whole on every device needs no partner
                whole.append(f"whole{len(whole)}")
                yield whole[-1]

    sides = [
        ", ".join(" ".join(factors(named, shape)) for named, shape in zip(operand_axes, lengths, strict=True))
        for operand_axes, lengths in ((axes, shapes), (result_axes, of_results))
    ]
    sizes = {GROUP: shapes[0][axes[0].index(HEADS)] // heads_kv} if GROUP in whole else {}
    return " -> ".join(sides), {"need_replication_factors": tuple(whole), **sizes}
