"""Launches of a call (`Launch`, `Plan`), and functions that the planners of all ops share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from .. import units
from ..errors import UnsupportedError
from ..problem.integers import integer_names
from ..problem.operands import DeltaRole
from ..problem.problem import LENGTHS, Problem
from .device import Device
from .mod_code import ModCode
from .variant import AnyTile, Variant, variant_of

MAX_GRID = 2**31 - 1
_OF_MASK_TILES = "block_mask", "tile_counts"
NOTHING: Mapping[str, Any] = MappingProxyType({})


class TmaBox(NamedTuple):
    """An operand as TMA copies it: rows `begin … end - 1` of each head, `rows` of them at a time.

    varlen: True if a copy may end at any row, at the end of a sequence: `VarlenMapRows` in common/varlen.cuh.
    """

    rows: int
    begin: int
    end: int
    varlen: bool = False


class Part(NamedTuple):
    """A part of the workspace; offset and size in bytes."""

    begin: int
    size: int


class Launch(NamedTuple):
    """One kernel of a plan. The grid is one-dimensional.

    fields: numbers of the parameter struct that the plan sets. Pointers, strides of `Operand`s and `ProblemParams` are
    set elsewhere.
    tma_boxes: tensor maps by operand. An operand without a map in the struct is listed for its alignment.
    takes_counter: True if thread blocks number their work tiles, or themselves in order of start, by a counter.
    arrivals: number of counters by which thread blocks detect the last one to end.
    aliases: the operand or part of the workspace of a struct member, where their names differ.
    """

    variant: Variant
    num_blocks: int
    fields: Mapping[str, int] = NOTHING
    tma_boxes: Mapping[str, TmaBox] = NOTHING
    takes_counter: bool = False
    arrivals: int = 0
    aliases: Mapping[str, str] = NOTHING

    # Needed because the default NOTHING, a mapping proxy, cannot be pickled.
    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self)

    @property
    def splits_text(self) -> str:
        """A description of the splits of each query block's keys."""
        if splits := self.fields.get("splits"):
            how = f"{splits}"
        elif (tiles := self.fields["split_tiles"]) and self.variant.tile is not None:
            how = f"of {tiles * self.variant.tile.block_k} keys"
        else:
            how = "as many as the lengths on the GPU ask for"
        return f"{how} (for each of {self.arrivals} query blocks); the last one to end merges them"

    def __str__(self) -> str:
        return (
            f"{self.num_blocks} blocks of {self.variant.num_threads} threads, "
            f"{units.memory(self.variant.smem_bytes)} of shared memory each"
        )


class Plan(NamedTuple):
    """The launches of a call. Memory is in bytes; `workspace_bytes` counts memory besides inputs and outputs."""

    problem: Problem
    device: str
    launches: tuple[Launch, ...]  # in order; empty on the CPU and for algorithm="standard"
    workspace_bytes: int = 0
    workspace: Mapping[str, Part] = NOTHING
    fallback: str | None = None  # on Hopper: the reason why its sm90 kernels cannot run the call
    host_kernel: str = ""  # name of the host implementation, if no kernel is launched

    # Needed because the default NOTHING, a mapping proxy, cannot be pickled.
    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self)

    @property
    def variant(self) -> Variant | None:
        """The variant of the main kernel; None without launches.

        Launches of mask tiles aside, it is the second one, after delta, or the only one.
        """
        launches = [launch for launch in self.launches if launch.variant.op not in _OF_MASK_TILES] or self.launches
        return launches[min(1, len(launches) - 1)].variant if launches else None

    @property
    def kernel(self) -> str:
        """The name of the main kernel, or of the host implementation."""
        return self.variant.name if self.variant else self.host_kernel

    @property
    def flops(self) -> int:
        """The multiplications and additions of the matrix products."""
        return self.problem.flops

    @property
    def out_bytes(self) -> int:
        """The bytes of out, or of all gradients for backward."""
        return self._result_bytes(lse=False)

    @property
    def lse_bytes(self) -> int:
        """The bytes of lse."""
        return self._result_bytes(lse=True)

    def _result_bytes(self, lse: bool) -> int:
        op, specs = self.problem.op, self.problem.specs
        results = zip(op.outputs, specs[len(op.inputs) :], strict=True)
        return sum(spec.num_bytes for x, spec in results if spec is not None and (x.name == "lse") == lse)

    @property
    def tma_operands(self) -> tuple[str, ...]:
        """The operands that must begin at a multiple of 16 bytes; TMA copies most of them."""
        return tuple({name: None for launch in self.launches for name in launch.tma_boxes})

    @property
    def vector_loaded(self) -> dict[str, int]:
        """The alignment in bytes of captured arrays of which two elements are loaded together."""
        return {
            name: size
            for launch in self.launches
            if (mod_code := launch.variant.mod_code)
            for name, size in mod_code.vector_loaded
        }

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        several = len(self.launches) > 1
        lines = [
            f"problem    {self.problem.op.name} of {self.problem.dtype}",
            f"lengths    {_lengths_text(self.problem)}",
        ]
        lines += [] if several else [f"kernel     {self.kernel}"]
        lines.append(f"device     {self.device}")
        for launch in self.launches:
            if several:
                lines.append(f"kernel     {launch.variant.name}: {launch}")
            if (tile := launch.variant.tile) is not None:
                stages = f"{tile.stages} stage{'s' * (tile.stages > 1)}"
                lines.append(
                    f"tile       {tile.block_q} queries x {tile.block_k} keys, head dims padded to "
                    f"({tile.head_dim}, {tile.head_dim_v}), {stages}, {tile.warps} warps"
                )
            if launch.arrivals:
                lines.append(f"splits     {launch.splits_text}")
            if not several:
                lines.append(f"launch     {launch}")
        results = f"out {units.memory(self.out_bytes)}, lse {units.memory(self.lse_bytes)}"
        if self.problem.op.name == "backward":
            results = f"gradients {units.memory(self.out_bytes)}"
        if self.fallback:
            lines.append(f"fallback   not Hopper's own kernel: {self.fallback}")
        lines += [
            f"memory     {results}, workspace {units.memory(self.workspace_bytes)}",
            f"work       {units.work(self.flops)}",
        ]
        return "\n".join(lines)


def _lengths_text(problem: Problem) -> str:
    """Returns the lengths of a problem by name, which shows exchanged axes. Heads and head dims of 0 are omitted."""
    most = "up to " if integer_names(problem) else ""
    texts = [(name, f"{most if name.startswith('seqlen') else ''}{getattr(problem, name)}") for name in LENGTHS]
    has_no_axis = ("heads_q", "heads_kv", "head_dim", "head_dim_v")
    return ", ".join([f"{name} {text}" for name, text in texts if not (text == "0" and name in has_no_axis)])


def _reduced(record: Launch | Plan) -> tuple[Any, ...]:
    """Returns a record's constructor for pickle, without fields that hold the default NOTHING."""
    fields: dict[str, Any] = {name: x for name, x in zip(record._fields, record, strict=True) if x is not NOTHING}
    return partial(type(record), **fields), ()


def make_plan(
    problem: Problem,
    device: Device,
    launches: list[Launch],
    workspace: Mapping[str, int] | None = None,
    fallback: str | None = None,
    num_work: int = 0,
) -> Plan:
    """Returns the plan of some launches; raises UnsupportedError if a grid is too large.

    workspace: floats of each part, by name. num_work: number of work tiles, if kernels number them by a counter.
    """
    if (most := max([num_work, *[launch.num_blocks for launch in launches]])) > MAX_GRID:
        raise UnsupportedError(
            f"{_described(problem)} need {most} blocks; a launch has at most {MAX_GRID}. Split the batch into several "
            "calls."
        )
    parts, begin = {}, 0
    for name, floats in (workspace or {}).items():
        if floats:
            parts[name] = Part(begin, 4 * floats)
            begin += 4 * floats
    return Plan(problem, device.name, tuple(launches), begin, parts, fallback)


def _described(problem: Problem) -> str:
    if problem.op.name == "merge":
        return f"outs of shape {problem.spec('out').shape}"
    if problem.op.name == "append_kv":
        return f"new keys of shape {problem.spec('k').shape} and their queries"
    return f"batch {problem.batch} x heads {problem.heads_q} x seqlens {problem.seqlen_q} and {problem.seqlen_k}"


def make_variant(
    problem: Problem,
    device: Device,
    op: str,
    source: str,
    tile: AnyTile | None = None,
    mod_code: ModCode | None = None,
    *,
    dtype: str | None = None,
    out_dtype: str | None = None,
    algorithm: str = "flash2",
    is_varlen: bool | None = None,
    lists_seqlens: bool = False,
    accumulates: bool = False,
    delta: DeltaRole | None = None,
) -> Variant:
    """Returns the variant of a source for a problem. Dtypes and `is_varlen` default to the problem's."""
    arch, softcap, dtype = device.arch, False, dtype or problem.dtype
    if source.startswith("sm90/"):
        arch, softcap = f"{arch}a", problem.options.softcap > 0.0
    if is_varlen is None:
        is_varlen = problem.seqlen_info is not None
    # By position, which makes the cache lookup faster.
    return variant_of(
        op, source, arch, dtype, out_dtype or dtype, algorithm, tile, softcap, is_varlen, mod_code, lists_seqlens,
        accumulates, delta,
    )  # fmt: skip


def blocks_of(length: int, step: int) -> int:
    """Returns the number of blocks of `step` that cover a length."""
    return -(-length // step)


def heads_in_l2(head_bytes: int, most_bytes: int, most: int, least: int = 1) -> int:
    """Returns a power of two up to `most`: the most heads that touch `most_bytes` together, but at least `least`."""
    together = 1
    while 2 * together <= most and (2 * together * head_bytes <= most_bytes or together < least):
        together *= 2
    return together
