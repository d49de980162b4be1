"""Planner of forward and lse."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

from ..errors import UnsupportedError
from ..problem.dtypes import DTYPES
from ..problem.problem import Problem
from . import tiles_sm80, tiles_sm90
from .block_mask import is_block_sparse, with_mask_tiles
from .decoding import decode_plans, page_cut, split_plan
from .device import Device
from .hopper import HOPPER, reason_against
from .mod_code import ModCode, make_mod_code
from .plan import Launch, Plan, TmaBox, blocks_of, heads_in_l2, make_plan, make_variant
from .tile_shapes_sm90 import GROUP_ROWS, OUT_ROWS, WarpgroupTile
from .variant import Variant

WIDE_HEAD = 128  # larger head dims are wide: kHasTail in kernels_cu/sm90/forward/varlen_scheduler.cuh
LONG_PAIRS = 1024  # with at least so many keys a sequence, work tiles of wide heads are scheduled in pairs
MOST_TAIL_PARTS = 32  # one for each lane of a warp
# Time of a row in a tile of 128 rows to one in a tile of 192. H200, 24 calls of d 32 and 64: 1.12 to 1.4.
SHORT_TILE_ROW = 1.35
# Most bytes of k and v of heads whose query blocks start together on Hopper (longest blocks first, L34).
L2_BYTES = 32 * 2**20


def forward_plan(
    problem: Problem, device: Device, misaligned: Collection[str], avoided: Collection[Variant] = ()
) -> Plan:
    """Returns the plan of forward or lse on a GPU. avoided: kernels that must not run."""
    reason = reason_against(problem, device, misaligned)
    if reason is None:
        for candidate in _hopper_plans(problem, device):
            if candidate.variant not in avoided:
                return candidate
            reason = "its registers do not hold what mods need"
        reason = reason or f"head dims {problem.head_dim, problem.head_dim_v} are over 256"
    return _sm80_plan(problem, device, reason if device.capability == HOPPER else None)


def _hopper_plans(problem: Problem, device: Device) -> Iterator[Plan]:
    """Yields plans with sm90 kernels, in order of preference."""
    keys, op = _keys_of_a_query(problem), problem.op.name
    dims, is_capped = (problem.head_dim, problem.head_dim_v), problem.options.softcap > 0.0
    mod_code = make_mod_code(problem, is_sparse=_passes_over_tiles(problem))
    if problem.op.mod_spec is not None:
        rows = tiles_sm90.choose_mod_tiles(op, *dims, keys, is_capped, problem.op.mod_spec.drops)
    else:
        row = tiles_sm90.choose(op, *dims, keys, is_capped)
        shorter = tiles_sm90.choose(op, *dims, 0.0, is_capped)
        if row is not None and shorter is not None and _takes_fewer_rows(problem, device, shorter, row):
            row = shorter
        rows = () if row is None else (row,)
    decode_plan = None
    # Splits and the warps of decode kernels have partial states of their own, and none adds to the caller's.
    for decode_plan in () if problem.op.accumulates else decode_plans(problem, device, rows):
        yield decode_plan
    # If decode kernels are faster but spill, sm80's decode kernel runs: it also splits keys among thread blocks.
    if decode_plan is None:
        yield from (_warpgroup_plan(problem, device, tile, mod_code) for tile in rows)


def _takes_fewer_rows(problem: Problem, device: Device, shorter: WarpgroupTile, tile: WarpgroupTile) -> bool:
    """Returns True if an SM computes so much fewer rows with the shorter tile that it takes less time.

    SMs take tiles in rounds, and compute rows of a tile that do not exist, too. False for varlen, whose lengths the
    device reads.
    """
    if problem.seqlen_info is not None or shorter.block_q == tile.block_q:
        return False
    heads = problem.heads_q * problem.batch
    rows = [
        blocks_of(blocks_of(problem.seqlen_q, each.block_q) * heads, device.num_sms) * each.block_q
        for each in (shorter, tile)
    ]
    return SHORT_TILE_ROW * rows[0] < rows[1]


def _passes_over_tiles(problem: Problem) -> bool:
    """Returns True if sm90 kernels skip tiles that the mask_mod hides; kernels that load pages skip none."""
    return is_block_sparse(problem) and not problem.has("page_table")


def _keys_of_a_query(problem: Problem) -> float:
    """Returns the mean number of keys that a query sees under a mask, or inf without one.

    For varlen it assumes that all sequences have the mean length.
    """
    if (varlen := problem.seqlen_info) is not None:
        batch = max(problem.batch, 1)
        mean_q, mean_k = -(-varlen.batch_q * varlen.rows_q // batch), -(-varlen.batch_k * varlen.rows_k // batch)
        mask = varlen.mask(min(mean_q, problem.seqlen_q), min(mean_k, problem.seqlen_k))
    else:
        mask = problem.mask
    return math.inf if mask.is_full else mask.num_visible() / max(mask.seqlen_q, 1)


def _sm80_plan(problem: Problem, device: Device, fallback: str | None) -> Plan:
    """Returns the plan with sm80 kernels: one thread block for each query block, head and slice of v's columns."""
    op = problem.op.name
    rows = tiles_sm80.of_algorithm(problem.dtype, problem.options.algorithm, problem.op.mod_spec is not None)
    itemsize = DTYPES[problem.dtype].itemsize
    tile = tiles_sm80.choose(rows, itemsize, problem.head_dim, problem.head_dim_v, device)
    if tile is not None and problem.op.accumulates and problem.head_dim_v > tile.head_dim_v:
        # Thread blocks share a row, and each would need the lse before the others change it.
        raise UnsupportedError(
            f"accumulate=True with head_dim_v {problem.head_dim_v} in {problem.dtype}; it takes up to "
            f"{tile.head_dim_v} on {device.name}. Compute a float32 part, and add it by merge_states."
        )
    if tile is None:
        raise UnsupportedError(
            f"head dims ({problem.head_dim}, {problem.head_dim_v}) in {problem.dtype} have no tile on {device.name} "
            f"({device.arch}, {device.smem_per_block} bytes of shared memory a block). 1 to 512 always fit in float16 "
            "and bfloat16; float32 takes 1 to 256 on sm_86, sm_89, sm_120 and sm_121, and 1 to 512 elsewhere. Cast to "
            "a dtype that fits, or pass NumPy arrays or algorithm='standard'."
        )
    if op == "lse":
        tile = replace(tile, head_dim_v=0, stages=2, max_slices=1, flash2_only=False)
    algorithm = problem.options.algorithm if op == "forward" else "flash2"
    mod_code = make_mod_code(problem, is_sparse=is_block_sparse(problem))
    variant = make_variant(
        problem, device, op, f"sm80/{op}.cu", tile, mod_code, out_dtype=problem.out_dtype, algorithm=algorithm,
        accumulates=problem.op.accumulates,
    )  # fmt: skip
    num_q_blocks, batch_factor = blocks_of(problem.seqlen_q, tile.block_q), problem.batch
    if (varlen := problem.seqlen_info) is not None:
        num_q_blocks, batch_factor = varlen.num_slots("q", problem.batch, tile.block_q), 1
    num_slices = blocks_of(problem.head_dim_v, tile.head_dim_v) if tile.head_dim_v else 1
    num_blocks = num_q_blocks * num_slices * problem.heads_q * batch_factor
    split = None if problem.op.accumulates else split_plan(problem, device, tile, num_blocks, fallback)
    if split is not None:
        return split
    fields = {"num_q_blocks": num_q_blocks, "num_slices": num_slices}
    launches, workspace = with_mask_tiles(problem, device, [Launch(variant, num_blocks, fields)])
    return make_plan(problem, device, launches, workspace, fallback)


def _tma_boxes(problem: Problem, rows_q: int, box_k: TmaBox) -> dict[str, TmaBox]:
    """Returns the TMA boxes of the operands. box_k: the box of k and v."""
    tma_boxes = {"q": TmaBox(GROUP_ROWS, 0, rows_q, box_k.varlen), "k": box_k}
    if problem.op.name == "forward":
        tma_boxes |= {"v": box_k, "out": TmaBox(OUT_ROWS, 0, rows_q, box_k.varlen)}
    return tma_boxes


def _warpgroup_variant(problem: Problem, device: Device, tile: WarpgroupTile, mod_code: ModCode | None) -> Variant:
    name, accumulates = problem.op.name, problem.op.accumulates
    source, out_dtype = f"sm90/forward/{name}.cu", problem.out_dtype
    return make_variant(problem, device, name, source, tile, mod_code, out_dtype=out_dtype, accumulates=accumulates)


def _warpgroup_plan(problem: Problem, device: Device, tile: WarpgroupTile, mod_code: ModCode | None) -> Plan:
    """Returns the plan with persistent sm90 kernels: one thread block for each SM, which takes query blocks in turn."""
    if problem.seqlen_info is not None:
        return _varlen_plan(problem, device, tile.for_varlen(problem.has("page_table")), mod_code)
    variant = _warpgroup_variant(problem, device, tile, mod_code)
    heads = problem.heads_q * problem.batch
    num_q_blocks = blocks_of(problem.seqlen_q, tile.block_q)
    num_tiles = num_q_blocks * heads
    full, together = problem.mask.is_full and not is_block_sparse(problem), 1
    if not full:
        # Blocks of these heads take the same queries at about the same time, so that L2 holds the keys that these see
        # (longest blocks first, L34).
        keys = min(problem.seqlen_k, problem.mask.hi - problem.mask.lo + tile.block_q)
        head_bytes = 2 * keys * (problem.head_dim + problem.head_dim_v) * problem.heads_kv
        together = heads_in_l2(head_bytes, L2_BYTES * problem.heads_q, heads)
    key_range = problem.mask.key_range(0, problem.seqlen_q)
    tma_boxes = _tma_boxes(problem, problem.seqlen_q, TmaBox(tile.block_k, *key_range))
    fields = {"num_q_blocks": num_q_blocks, "num_tiles": num_tiles, "heads_in_l2": together}
    # With a margin also without a mask: a thread block that starts late, as another kernel holds its SM, would delay
    # its whole share (5 times the SMs' share of the time).
    takes_counter = num_tiles > device.num_sms and (not full or problem.options.sm_margin > 0)
    launch = Launch(variant, min(num_tiles, device.num_sms), fields, tma_boxes, takes_counter)
    launches, workspace = with_mask_tiles(problem, device, [launch])
    return make_plan(problem, device, launches, workspace, num_work=num_tiles)


def _varlen_plan(problem: Problem, device: Device, tile: WarpgroupTile, mod_code: ModCode | None) -> Plan:
    """Returns the plan for variable-length sequences, whose query blocks the device counts."""
    lengths = problem.seqlen_info
    assert lengths is not None
    variant = _warpgroup_variant(problem, device, tile, mod_code)
    num_q_blocks = min(lengths.num_slots("q", problem.batch, tile.block_q), lengths.batch_q * lengths.rows_q)
    num_tiles = num_q_blocks * problem.heads_q
    head_bytes = 2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.heads_kv
    together = heads_in_l2(head_bytes, L2_BYTES * problem.heads_q, problem.heads_q)
    cut = page_cut(problem, tile.block_k)
    box_k = TmaBox(cut["page_box"] or tile.block_k, 0, lengths.rows_k, varlen=True)
    tma_boxes = _tma_boxes(problem, lengths.rows_q, box_k)
    fields = {
        "heads_in_l2": together,
        # No pairs with mask tiles, as the two heads of a pair may have different ones.
        "in_pairs": 0 if _passes_over_tiles(problem) else _in_pairs(problem, tile, together),
        "tail_parts": _tail_parts(problem, tile, device, together),
        **cut,
    }
    launch = Launch(variant, min(num_tiles, device.num_sms), fields, tma_boxes, num_tiles > device.num_sms)
    if not _passes_over_tiles(problem):
        return make_plan(problem, device, [launch], num_work=num_tiles)
    return make_plan(problem, device, *with_mask_tiles(problem, device, [launch]), num_work=num_tiles)


def _in_pairs(problem: Problem, tile: WarpgroupTile, together: int) -> int:
    """Returns 1 if thread blocks take two heads of the same rows, one after the other, else 0."""
    varlen = problem.seqlen_info
    assert varlen is not None
    if (together | problem.heads_q) % 2:
        return 0
    keys = (
        problem.seqlen_k if problem.has("page_table") else min(varlen.mean_rows("k", problem.batch), problem.seqlen_k)
    )
    # No pairs for short sequences with wide heads: pairs are claimed early, and thread blocks then do not end together
    # (early claims, L19).
    return int(tile.head_dim <= WIDE_HEAD or keys >= LONG_PAIRS)


def _tail_parts(problem: Problem, tile: WarpgroupTile, device: Device, together: int) -> int:
    """Returns the number of parts at the end of q's packed axis that start together, longest query blocks first.

    A part is a sequence, or the rows behind the last one. All heads of these parts start together. 0 for none.
    """
    varlen = problem.seqlen_info
    assert varlen is not None
    is_masked, are_wide = not varlen.left is varlen.right is None, tile.head_dim > WIDE_HEAD
    if not (varlen.is_packed_q and is_masked and are_wide) or problem.batch < 2 or together != problem.heads_q:
        return 0
    blocks = max(problem.heads_q * blocks_of(varlen.mean_rows("q", problem.batch), tile.block_q), 1)
    sequences = max(blocks_of(device.num_sms, blocks), 2)  # of one wave
    # 0 if a sequence fills more than two waves: the keys of two long sequences do not fit the L2 cache together.
    return min(sequences + 1, MOST_TAIL_PARTS) if blocks <= 2 * device.num_sms else 0
