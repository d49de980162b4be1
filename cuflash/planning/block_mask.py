"""Mask tiles of 64 x 64 scores: which calls use them, and the launch that computes them from the mask_mod."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ..mods.graph.graph import LENGTHS
from ..problem.mod_arrays import MASK_TILE
from ..problem.problem import Problem
from .device import Device
from .mod_code import make_mod_code
from .plan import NOTHING, Launch, Plan, blocks_of, make_plan, make_variant
from .tile import rounded_up
from .variant import PORTABLE_THREADS

# Mask tiles that a call computes: up to so many, and not for so few keys, of which kernels have a tile or two.
MAX_MASK_TILES, FEW_KEYS = 2**24, 128
MAX_ORDERED = 2**12  # key blocks of a head: to order them takes time that grows with their square
LINE_FLOATS = 32  # of 128 bytes
WARP = 32  # threads, which own a mask tile
WAVES = 4  # of thread blocks that fill the GPU: mask tiles take unequal time
BLOCKS_PER_SM = 2048 // PORTABLE_THREADS


def is_block_sparse(problem: Problem) -> bool:
    """Returns whether kernels of this problem pass over tiles in which the caller's mask shows nothing."""
    mod_spec = problem.op.mod_spec
    return mod_spec is not None and mod_spec.mask is not None and (mod_spec.has_block_mask or _is_worth_it(problem))


def _is_worth_it(problem: Problem) -> bool:
    return problem.seqlen_k > FEW_KEYS and 0 < math.prod(mask_tiles_shape(problem)) <= MAX_MASK_TILES


def mask_tiles_shape(problem: Problem) -> tuple[int, int, int, int]:
    """Shape (batch, heads, …, …) of the mask tiles that a call computes. Batch or heads are 1 where they share them."""
    batch = problem.batch if _tells_sequences_apart(problem) else 1
    heads = problem.heads_q if "h" in _inputs(problem) else 1
    return batch, heads, blocks_of(problem.seqlen_q, MASK_TILE), blocks_of(problem.seqlen_k, MASK_TILE)


def mask_tile_strides(problem: Problem) -> tuple[int, int, int]:
    """From the mask tiles of a sequence to those of the next, of a head, and of 64 queries; 0 where they are shared.

    Mask tiles are an input of the call, or are computed by it.
    """
    mod_spec = problem.op.mod_spec
    is_input = mod_spec is not None and mod_spec.has_block_mask
    batch, heads, rows, columns = problem.spec("mask_tiles").shape if is_input else mask_tiles_shape(problem)
    return heads * rows * columns * (batch > 1), rows * columns * (heads > 1), columns


def _inputs(problem: Problem) -> frozenset[str]:
    """Returns the inputs that the mask_mod depends on."""
    mod_spec = problem.op.mod_spec
    return frozenset() if mod_spec is None or mod_spec.mask is None else mod_spec.mask.inputs


def _tells_sequences_apart(problem: Problem) -> bool:
    """Returns whether the mask depends on the sequence, or on its lengths where only the device knows them."""
    inputs = _inputs(problem)
    return "b" in inputs or (problem.seqlen_info is not None and not inputs.isdisjoint(LENGTHS))


def mask_tiles_launch(problem: Problem, device: Device) -> tuple[Launch, int] | None:
    """The launch that computes the mask tiles of a call, and floats of their part "mask_tiles" of the workspace.

    None where no kernel uses them, and where they are an input.
    """
    mod_spec = problem.op.mod_spec
    if mod_spec is None or mod_spec.has_block_mask or not is_block_sparse(problem):
        return None
    shape = mask_tiles_shape(problem)
    # why not of each sequence if all share them: what a mask shows of the longest it shows of any.
    of_lengths = problem.seqlen_info is not None and _tells_sequences_apart(problem)
    launch = _launch(problem, device, shape, of_lengths, of_call=problem.seqlen_info is None or of_lengths)
    # why whole lines: what lies behind the mask tiles is copied 16 bytes at a time.
    return launch, rounded_up(blocks_of(math.prod(shape), 4), LINE_FLOATS)


def with_mask_tiles(
    problem: Problem, device: Device, launches: list[Launch], workspace: Mapping[str, int] = NOTHING
) -> tuple[list[Launch], Mapping[str, int]]:
    """Launches and floats of the workspace, after those of the mask tiles that they use, if the call computes any."""
    if (launch_and_floats := mask_tiles_launch(problem, device)) is None:
        return launches, workspace
    launch, floats = launch_and_floats
    return [launch, *launches], {**workspace, "mask_tiles": floats}


class KeySteps(NamedTuple):
    """Lists of the steps of key blocks in backward on Hopper."""

    heads: int  # kv heads of all sequences that have lists of their own; 1 if all share them
    heads_q: int  # query heads of such a kv head that have lists of their own
    list_stride_batch: int  # as in TileCountsParams
    list_stride_head: int
    num_k_blocks: int
    list_lines: int
    is_ordered: bool

    @classmethod
    def for_problem(cls, problem: Problem, num_q_blocks: int, num_k_blocks: int) -> KeySteps:
        """Key blocks with more steps come first.

        Not if deterministic, as they then add to dq in their order, and not where causal or a window orders them.
        """
        of_batch, of_head, _ = mask_tile_strides(problem)
        heads_kv = problem.heads_kv if of_head else 1
        ordered = not problem.options.deterministic and problem.mask.is_full and num_k_blocks <= MAX_ORDERED
        return cls(
            heads=(problem.batch if of_batch else 1) * heads_kv,
            heads_q=problem.heads_q // problem.heads_kv if of_head else 1,
            list_stride_batch=heads_kv if of_batch else 0,
            list_stride_head=1 if of_head else 0,
            num_k_blocks=num_k_blocks,
            list_lines=blocks_of(num_q_blocks + 1, WARP),  # with the end of the list; a warp reads a line at a time
            is_ordered=ordered,
        )

    @property
    def orders(self) -> int:
        """Orders of key blocks, each of which needs a counter."""
        return self.heads if self.is_ordered else 0

    @property
    def workspace(self) -> dict[str, int]:
        """Floats of its parts of the workspace."""
        ordered, lists = self.orders * self.num_k_blocks, self.heads * self.heads_q * self.num_k_blocks
        return {"key_order": ordered, "step_counts": ordered, "key_steps": lists * self.list_lines * WARP}

    @property
    def fields(self) -> dict[str, int]:
        """Of both kernels."""
        return {
            "list_lines": self.list_lines,
            "list_stride_batch": self.list_stride_batch,
            "list_stride_head": self.list_stride_head,
        }


def tile_counts_launch(
    problem: Problem, device: Device, block_q: int, num_q_blocks: int, steps: KeySteps, first_counter: int
) -> Launch:
    """The launch that lists the steps of key blocks of backward on Hopper, and counts those of each tile of queries.

    first_counter: a zero for each order, among `semaphores`.
    """
    variant = make_variant(problem, device, "tile_counts", "portable/tile_counts.cu")
    of_batch, of_head, of_row = mask_tile_strides(problem)
    warps, tiles = PORTABLE_THREADS // WARP, problem.batch * problem.heads_q * num_q_blocks
    count_blocks = blocks_of(tiles, warps)
    fields = {
        "mask_tiles_batch": of_batch,
        "mask_tiles_head": of_head,
        "mask_tiles_row": of_row,
        "num_q_blocks": num_q_blocks,
        "num_k_blocks": steps.num_k_blocks,
        "block_q": block_q,
        "first_counter": first_counter,
        "deterministic": int(problem.options.deterministic),
        "count_blocks": count_blocks,
        **steps.fields,
    }
    return Launch(variant, count_blocks + steps.heads * blocks_of(steps.num_k_blocks, warps), fields)


def block_mask_plan(problem: Problem, device: Device) -> Plan:
    """The plan of the op block_mask, whose result has the mask tiles of each sequence and head, or of all of them."""
    shape = problem.spec("mask_tiles").shape
    launch = _launch(problem, device, shape, problem.seqlen_info is not None, of_call=False)
    return make_plan(problem, device, [launch], num_work=math.prod(shape))


def _launch(problem: Problem, device: Device, shape: tuple[int, ...], of_lengths: bool, of_call: bool) -> Launch:
    _, heads, mask_tiles_q, mask_tiles_k = shape
    num_mask_tiles = math.prod(shape)
    # why float32, whatever q is: functions are then as exact as in NumPy, and kernels of all dtypes share the code.
    source, code = "portable/block_mask.cu", make_mod_code(problem)
    variant = make_variant(problem, device, "block_mask", source, mod_code=code, dtype="float32", is_varlen=of_lengths)
    fields = {
        "num_mask_tiles": num_mask_tiles,
        "heads": heads,
        "mask_tiles_q": mask_tiles_q,
        "mask_tiles_k": mask_tiles_k,
        "of_call": int(of_call),
    }
    blocks = min(blocks_of(num_mask_tiles, PORTABLE_THREADS // WARP), WAVES * BLOCKS_PER_SM * device.num_sms)
    return Launch(variant, blocks, fields)
