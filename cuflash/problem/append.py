"""Validates the arrays of `append_kv` and their shapes. Lengths are in the memory of the device, and not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import ProblemError
from .array_spec import ArraySpec
from .checks import MAX_SEQLEN, check_alike, check_operand, check_output
from .operands import INTEGERS, Op
from .seqlen_info import CACHE, PACKED, PAGES, VARLEN_LAYOUTS, packed_hint, rank_of

NEW = "(batch, seqlen, heads, head_dim)"
_FLOATS = ("k_cache", "v_cache", "k", "v", "q")
_LAYOUTS = VARLEN_LAYOUTS | dict.fromkeys(("rotary_cos", "rotary_sin"), "(positions, rotary_dim / 2)")
# (argument, another one that it needs, hint for errors).
_BESIDE = (
    ("cu_seqlens_q", "q", "give q, or leave cu_seqlens_q=None"),
    ("rotary_cos", "rotary_sin", "give both, or neither"),
    ("rotary_sin", "rotary_cos", "give both, or neither"),
    ("q", "rotary_cos", "q is only rotated here: give rotary_cos and rotary_sin, or leave q=None"),
)
Named = Mapping[str, ArraySpec]


def validated(op: Op, specs: Sequence[ArraySpec | None]) -> tuple[dict[str, int], tuple[ArraySpec | None, ...]]:
    """Validates a call; returns the lengths of all axes and the specs of all operands. Without q, its lengths are 0."""
    named = {x.name: spec for x, spec in zip(op.inputs, specs, strict=False) if spec is not None}
    _check_together(named)
    _check_ranks(named)
    check_alike({name: named[name] for name in _FLOATS if name in named})
    cache, axes = named["k_cache"], _axes(op, named)
    _check_sizes(named, axes)
    dtypes = {"inputs": (cache.dtype,), "table": (cache.dtype, "float32"), INTEGERS: (INTEGERS,)}
    for operand in op.inputs:
        if (spec := named.get(operand.name)) is None:
            continue
        # Packed rows have no axis of the batch.
        names = operand.axes[max(0, len(operand.axes) - len(spec.shape)) :]
        shape = tuple([axes[axis] for axis in names])
        check_operand(operand.name, spec, cache, shape, dtypes[operand.dtype], names, "k_cache")
        if operand.written:
            _check_written(operand.name, spec)
    if named.get("rotary_sin", cache).dtype != named.get("rotary_cos", cache).dtype:
        both = f"rotary_cos {named['rotary_cos'].dtype} and rotary_sin {named['rotary_sin'].dtype}"
        raise ProblemError(f"{both} differ; give both in {cache.dtype}, or both in float32")
    q = named.get("q")
    inputs = tuple([named.get(operand.name) for operand in op.inputs])
    return axes, (*inputs, None if q is None else q.with_packed_strides())


def _check_together(named: Named) -> None:
    for name, other, hint in _BESIDE:
        if name in named and other not in named:
            raise ProblemError(f"{name} was given without {other}; {hint}")
    if "page_table" in named and "cache_batch_idx" in named:
        raise ProblemError("page_table and cache_batch_idx place the same keys; give one of them")


def _check_ranks(named: Named) -> None:
    for name, spec in named.items():
        if name.endswith("_cache"):
            layout = PAGES if "page_table" in named else CACHE
        elif name in _FLOATS:
            side = "q" if name == "q" else "k"
            layout = PACKED.format(side) if f"cu_seqlens_{side}" in named else NEW
        else:
            layout = _LAYOUTS[name]
        if len(spec.shape) != rank_of(layout):
            rank, packed = len(spec.shape), ""
            if name in ("k", "v", "q"):
                packed = packed_hint("q" if name == "q" else "k", rank, named.keys() - {"page_table"})
            raise ProblemError(f"{name} has shape {spec.shape}, rank {rank}; give {layout}{packed}")


def _axes(op: Op, named: Named) -> dict[str, int]:
    """Returns the lengths of all axes, each from the first operand that has it."""
    axes = dict.fromkeys(("batch_q", "rows_q", "heads_q", "positions", "pairs"), 0) | {"max_pages": 1}
    for operand in reversed(op.inputs):
        if spec := named.get(operand.name):
            axes.update(zip(operand.axes, (spec.as_4d() if len(operand.axes) == 4 else spec).shape, strict=True))
    axes["bounds"] = axes["batch"] + 1
    for side in "qk":
        if side in named and f"cu_seqlens_{side}" not in named:
            axes[f"batch_{side}"] = axes["batch"]
    return axes


def _check_sizes(named: Named, axes: Mapping[str, int]) -> None:
    shape = named["k_cache"].shape
    if 0 in (axes["heads_kv"], axes["head_dim"], axes["head_dim_v"]):
        both = f"k_cache {shape}, v_cache {named['v_cache'].shape}, (…, heads, head_dim)"
        raise ProblemError(f"shapes {both}: heads and head_dim must be at least 1 (others may be 0)")
    if "page_table" in named and axes["page_size"] < 1:
        raise ProblemError(f"k_cache has shape {shape}: pages of 0 keys; give {PAGES} with page_size >= 1")
    if not {"page_table", "cache_batch_idx"} & set(named) and axes["num_pages"] != axes["batch"]:
        raise ProblemError(
            f"k_cache has shape {shape}, {axes['num_pages']} rows, but seqused_k is for {axes['batch']} sequences; "
            f"give {CACHE}, a row of the cache for each, or cache_batch_idx or page_table"
        )
    if "q" in named and (axes["heads_q"] < 1 or axes["heads_q"] % axes["heads_kv"]):
        raise ProblemError(
            f"q has {axes['heads_q']} heads and k_cache has {axes['heads_kv']}; heads_q must be a multiple of heads_kv"
        )
    if "rotary_cos" in named and not 1 <= axes["pairs"] <= axes["head_dim"] // 2:
        raise ProblemError(
            f"rotary_cos has shape {named['rotary_cos'].shape}, for {2 * axes['pairs']} elements of a row, but "
            f"head_dim is {axes['head_dim']}; give (positions, rotary_dim / 2) with rotary_dim from 2 to head_dim"
        )
    capacity = axes["max_pages"] * axes["page_size"]
    for name, seqlen in (("k_cache", capacity), ("k", axes["rows_k"]), ("q", axes["rows_q"])):
        if seqlen > MAX_SEQLEN:
            raise ProblemError(f"{name} has seqlen {seqlen}, over the limit of {MAX_SEQLEN}")


def _check_written(name: str, spec: ArraySpec) -> None:
    """Validates an input that is written to, which no copy can replace."""
    if spec.last_dim_strided:
        raise ProblemError(
            f"{name} has shape {spec.shape} and strides {spec.strides}: its last dimension is not contiguous, and it "
            "is written in place, so no copy can take its place; give one whose last stride is 1"
        )
    check_output(name, spec)
