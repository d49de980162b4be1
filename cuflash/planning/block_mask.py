"""Mask tiles of 64 x 64 scores: the calls that use them, and the launch that computes them from the mask_mod."""

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

# A call computes at most so many mask tiles, and none for so few keys: kernels have one or two tiles of these.
MAX_MASK_TILES, FEW_KEYS = 2**24, 128
MAX_ORDERED = 2**12  # most key blocks of a head that are ordered; the time of ordering grows with their square
LINE_FLOATS = 32  # floats of a line of 128 bytes
WARP = 32  # threads for each mask tile
WAVES = 4  # waves of thread blocks, as mask tiles take unequal time
BLOCKS_PER_SM = 2048 // PORTABLE_THREADS


def is_block_sparse(problem: Problem) -> bool:
    """Returns True if kernels of this problem skip tiles that the mask_mod hides fully."""
    mod_spec = problem.op.mod_spec
    return mod_spec is not None and mod_spec.mask is not None and (mod_spec.has_block_mask or _is_worth_it(problem))


def _is_worth_it(problem: Problem) -> bool:
    return problem.seqlen_k > FEW_KEYS and 0 < math.prod(mask_tiles_shape(problem)) <= MAX_MASK_TILES


def mask_tiles_shape(problem: Problem) -> tuple[int, int, int, int]:
    """Returns the shape (batch, heads, rows, columns) of a call's computed mask tiles; a shared axis has length 1."""
    batch = problem.batch if _tells_sequences_apart(problem) else 1
    heads = problem.heads_q if "h" in _inputs(problem) else 1
    return batch, heads, blocks_of(problem.seqlen_q, MASK_TILE), blocks_of(problem.seqlen_k, MASK_TILE)


def mask_tile_strides(problem: Problem) -> tuple[int, int, int]:
    """Returns strides of mask tiles, given or computed: by sequence, by head and by 64 queries; 0 for a shared axis."""
    mod_spec = problem.op.mod_spec
    is_input = mod_spec is not None and mod_spec.has_block_mask
    batch, heads, rows, columns = problem.spec("mask_tiles").shape if is_input else mask_tiles_shape(problem)
    return heads * rows * columns * (batch > 1), rows * columns * (heads > 1), columns


def _inputs(problem: Problem) -> frozenset[str]:
    """Returns the inputs that the mask_mod depends on."""
    mod_spec = problem.op.mod_spec
    return frozenset() if mod_spec is None or mod_spec.mask is None else mod_spec.mask.inputs


def _tells_sequences_apart(problem: Problem) -> bool:
    """Returns True if the mask depends on the sequence, or on lengths that only the device has."""
    inputs = _inputs(problem)
    return "b" in inputs or (problem.seqlen_info is not None and not inputs.isdisjoint(LENGTHS))


def mask_tiles_launch(problem: Problem, device: Device) -> tuple[Launch, int] | None:
    """Returns the launch that computes a call's mask tiles, and the floats of the workspace part "mask_tiles".

    None if no kernel uses mask tiles, or if they are an input.
    """
    mod_spec = problem.op.mod_spec
    if mod_spec is None or mod_spec.has_block_mask or not is_block_sparse(problem):
        return None
    shape = mask_tiles_shape(problem)
    # If all sequences share mask tiles, those for the longest one hold for all.
    of_lengths = problem.seqlen_info is not None and _tells_sequences_apart(problem)
    launch = _launch(problem, device, shape, of_lengths, of_call=problem.seqlen_info is None or of_lengths)
    # Whole lines, as the part behind the mask tiles is copied 16 bytes at a time.
    return launch, rounded_up(blocks_of(math.prod(shape), 4), LINE_FLOATS)


def with_mask_tiles(
    problem: Problem, device: Device, launches: list[Launch], workspace: Mapping[str, int] = NOTHING
) -> tuple[list[Launch], Mapping[str, int]]:
    """Returns launches and workspace floats with the launch and the part of computed mask tiles added, if any."""
    if (launch_and_floats := mask_tiles_launch(problem, device)) is None:
        return launches, workspace
    launch, floats = launch_and_floats
    return [launch, *launches], {**workspace, "mask_tiles": floats}


class KeySteps(NamedTuple):
    """Lists of the steps of key blocks in backward on Hopper."""

    heads: int  # kv heads, over sequences, with separate lists; 1 if all share them
    heads_q: int  # query heads of such a kv head with separate lists
    list_stride_batch: int  # as in TileCountsParams
    list_stride_head: int
    num_k_blocks: int
    list_lines: int
    is_ordered: bool

    @classmethod
    def for_problem(cls, problem: Problem, num_q_blocks: int, num_k_blocks: int) -> KeySteps:
        """Returns the lists of a problem. Key blocks with more steps come first.

        They stay in order if deterministic, as they add to dq in that order, and under causal or a window.
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
        """The number of orders of key blocks; each needs a counter."""
        return self.heads if self.is_ordered else 0

    @property
    def workspace(self) -> dict[str, int]:
        """The floats of its workspace parts."""
        ordered, lists = self.orders * self.num_k_blocks, self.heads * self.heads_q * self.num_k_blocks
        return {"key_order": ordered, "step_counts": ordered, "key_steps": lists * self.list_lines * WARP}

    @property
    def fields(self) -> dict[str, int]:
        """The fields that both kernels have."""
        return {
            "list_lines": self.list_lines,
            "list_stride_batch": self.list_stride_batch,
            "list_stride_head": self.list_stride_head,
        }


def tile_counts_launch(
    problem: Problem, device: Device, block_q: int, num_q_blocks: int, steps: KeySteps, first_counter: int
) -> Launch:
    """Returns the launch that lists the steps of key blocks of backward on Hopper, and counts steps of query tiles.

    first_counter: index in `semaphores` of the orders' counters, which are zero.
    """
    accumulates = problem.op.accumulates
    variant = make_variant(problem, device, "tile_counts", "portable/tile_counts.cu", accumulates=accumulates)
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
    """Returns the plan of the op block_mask: mask tiles by sequence and head, or shared by all of them."""
    shape = problem.spec("mask_tiles").shape
    launch = _launch(problem, device, shape, problem.seqlen_info is not None, of_call=False)
    return make_plan(problem, device, [launch], num_work=math.prod(shape))


def _launch(problem: Problem, device: Device, shape: tuple[int, ...], of_lengths: bool, of_call: bool) -> Launch:
    _, heads, mask_tiles_q, mask_tiles_k = shape
    num_mask_tiles = math.prod(shape)
    # float32 for any dtype of q: functions are as exact as in NumPy, and kernels of all dtypes share the code.
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
