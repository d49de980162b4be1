"""The plans of forward and lse."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from ..errors import UnsupportedError
from ..problem.dtypes import DTYPES
from ..problem.problem import Problem
from . import tiles_sm80, tiles_sm90
from .device import Device
from .hopper import HOPPER, reason_against
from .plan import Box, Launch, Plan, blocks_of, compile_arch, heads_together, make_plan
from .tiles_sm90 import FEW_SEQUENCES, GROUP_ROWS, OUT_ROWS, WarpgroupTile
from .variant import variant_of

DECODED_ROWS = 2 * GROUP_ROWS  # rows of the heads of a group, up to which they share blocks
SPLITS_OF_A_BLOCK = 8  # splits that a block of threads has at most, beside one for each query block: `choose_splits`
PAGE_STEP = 8  # keys: the rows of shared memory that are swizzled together
MAX_TILES = 2**30  # key tiles of all query blocks that `DecodeQueue` can count
L2_BYTES = 32 * 2**20  # bytes of k and v of the heads whose query blocks start together on Hopper, longest first (L34)


def forward_plan(problem: Problem, device: Device, misaligned: Collection[str]) -> Plan:
    """The plan of forward or lse on this GPU."""
    reason = reason_against(problem, device, misaligned)
    if reason is None:
        keys = _keys_of_a_query(problem)
        capped = problem.options.softcap > 0.0
        tile = tiles_sm90.choose(problem.op.name, problem.head_dim, problem.head_dim_v, keys, capped)
        if tile is not None:
            return _warpgroup_plan(problem, device, tile)
        reason = f"head dims ({problem.head_dim}, {problem.head_dim_v}) are over 256"
    return _generic_plan(problem, device, reason if device.capability == HOPPER else None)


def _keys_of_a_query(problem: Problem) -> float:
    """How many keys a query sees on average under a mask; of several lengths, as if all sequences had the mean."""
    if (own := problem.lengths) is not None:
        mean_q, mean_k = (-(-batch * rows // max(problem.batch, 1)) for batch, rows in (own[:2], own[2:4]))
        mask = own.mask(min(mean_q, problem.seqlen_q), min(mean_k, problem.seqlen_k))
    else:
        mask = problem.mask
    return math.inf if mask.is_full else mask.num_visible() / max(mask.seqlen_q, 1)


def _generic_plan(problem: Problem, device: Device, fallback: str | None) -> Plan:
    """A block of threads for each query block of a head and each slice of v's columns."""
    op = problem.op.name
    rows = tiles_sm80.of_algorithm(problem.dtype, problem.options.algorithm)
    itemsize = DTYPES[problem.dtype].itemsize
    tile = tiles_sm80.choose(rows, itemsize, problem.head_dim, problem.head_dim_v, device)
    if tile is None:
        raise UnsupportedError(
            f"head dims ({problem.head_dim}, {problem.head_dim_v}) in {problem.dtype} have no tile on {device.name} "
            f"({device.arch}, {device.smem_per_block} bytes of shared memory a block); 1 to 256 always fit, up to 512 "
            "on sm_80, sm_90 and sm_100. Pass NumPy arrays, or algorithm='standard'."
        )
    if op == "lse":
        tile = replace(tile, head_dim_v=0, stages=2, max_slices=1, flash2_only=False)
    variant = variant_of(
        op=op,
        source=f"sm80/{op}.cu",
        arch=compile_arch("sm80", device),
        dtype=problem.dtype,
        out_dtype=problem.out_dtype,
        algorithm=problem.options.algorithm if op == "forward" else "flash2",
        tile=tile,
        lengths=problem.lengths is not None,
    )
    num_q_blocks, times = blocks_of(problem.seqlen_q, tile.block_q), problem.batch
    if (own := problem.lengths) is not None:
        num_q_blocks, times = own.num_slots("q", problem.batch, tile.block_q), 1
    num_slices = blocks_of(problem.head_dim_v, tile.head_dim_v) if tile.head_dim_v else 1
    num_blocks = num_q_blocks * num_slices * problem.heads_q * times
    fields = {"num_q_blocks": num_q_blocks, "num_slices": num_slices}
    return make_plan(problem, device, [Launch(variant, num_blocks, fields)], fallback=fallback)


def _warpgroup_plan(problem: Problem, device: Device, tile: WarpgroupTile) -> Plan:
    """A block of threads for each multiprocessor, which takes one query block after the other."""
    op, capped = problem.op.name, problem.options.softcap > 0.0
    if problem.lengths is not None:
        if op == "forward" and problem.seqlen_q * (problem.heads_q // problem.heads_kv) <= DECODED_ROWS:
            made = _decode_plan(problem, device, tile)
            if made is not None:
                return made
        return _ragged_plan(problem, device, tile.for_lengths())
    arch = compile_arch("sm90", device)
    variant = variant_of(op, f"sm90/{op}.cu", arch, problem.dtype, problem.out_dtype, tile=tile, softcap=capped)
    heads = problem.heads_q * problem.batch
    num_q_blocks = blocks_of(problem.seqlen_q, tile.block_q)
    num_tiles = num_q_blocks * heads
    full, together = problem.mask.is_full, 1
    if not full:
        # why L34: the blocks of these heads take the same queries at about the same time, and read the keys they see.
        keys = min(problem.seqlen_k, problem.mask.hi - problem.mask.lo + tile.block_q)
        head_bytes = 2 * keys * (problem.head_dim + problem.head_dim_v) * problem.heads_kv
        together = heads_together(head_bytes, L2_BYTES * problem.heads_q, heads)
    seen = problem.mask.key_range(0, problem.seqlen_q)
    box_k = Box(tile.block_k, *seen)
    boxes = {"q": Box(GROUP_ROWS, 0, problem.seqlen_q), "k": box_k}
    if op == "forward":
        boxes |= {"v": box_k, "out": Box(OUT_ROWS, 0, problem.seqlen_q)}
    fields = {"num_q_blocks": num_q_blocks, "num_tiles": num_tiles, "heads_together": together}
    counted = num_tiles > device.num_sms and not full
    launch = Launch(variant, min(num_tiles, device.num_sms), fields, boxes, counted)
    return make_plan(problem, device, [launch], num_work=num_tiles)


def _ragged_plan(problem: Problem, device: Device, tile: WarpgroupTile) -> Plan:
    """The same for sequences of several lengths, of which the device alone knows how many query blocks they have."""
    op, own = problem.op.name, problem.lengths
    assert own is not None
    is_capped, arch = problem.options.softcap > 0.0, compile_arch("sm90", device)
    variant = variant_of(
        op, f"sm90/{op}.cu", arch, problem.dtype, problem.out_dtype, tile=tile, softcap=is_capped, lengths=True
    )
    num_q_blocks = min(own.num_slots("q", problem.batch, tile.block_q), own.batch_q * own.rows_q)
    num_tiles = num_q_blocks * problem.heads_q
    head_bytes = 2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.heads_kv
    together = heads_together(head_bytes, L2_BYTES * problem.heads_q, problem.heads_q)
    cut = _page_cut(problem, tile)
    box_k = Box(cut["page_box"] or tile.block_k, 0, own.rows_k, ragged=True)
    boxes = {"q": Box(GROUP_ROWS, 0, own.rows_q, ragged=True), "k": box_k}
    if op == "forward":
        boxes |= {"v": box_k, "out": Box(OUT_ROWS, 0, own.rows_q, ragged=True)}
    fields = {"heads_together": together} | cut
    launch = Launch(variant, min(num_tiles, device.num_sms), fields, boxes, num_tiles > device.num_sms)
    return make_plan(problem, device, [launch], num_work=num_tiles)


def _decode_plan(problem: Problem, device: Device, row: WarpgroupTile) -> Plan | None:
    """The plan for few queries of each sequence, whose keys are shared out among blocks of threads.

    None if there may be more key tiles than the kernel can count.
    """
    own, asked = problem.lengths, problem.options.sequences
    assert own is not None
    # why one: a row then has the bits that it has in calls of many queries, whose keys are never cut.
    splits = asked.num_splits if asked.split_size is None else 1
    capped, arch = problem.options.softcap > 0.0, compile_arch("sm90", device)
    is_packed = problem.has("cu_seqlens_q") or problem.has("cu_seqlens_k")
    tile = row.for_decoding(few=problem.batch <= FEW_SEQUENCES and not is_packed)
    variant = variant_of(
        "forward", "sm90/decode.cu", arch, problem.dtype, problem.out_dtype, tile=tile, softcap=capped, lengths=True
    )
    group = problem.heads_q // problem.heads_kv
    rows = own._replace(rows_q=own.rows_q * group)  # of a kv head
    num_blocks = rows.num_slots("q", problem.batch, tile.block_q) * problem.heads_kv
    tiles = max(blocks_of(problem.seqlen_k, tile.block_k), 1)
    # why one more: splits are counted from the first key, which need not be seen.
    max_slots = SPLITS_OF_A_BLOCK * device.num_sms + num_blocks if splits == 0 else (splits + 1) * num_blocks
    num_work = min(num_blocks * tiles, max_slots)
    if num_blocks * tiles > MAX_TILES:
        return None
    partial_rows = min(tile.block_q, problem.seqlen_q * group)
    cut = _page_cut(problem, tile)
    box = Box(cut["page_box"] or tile.block_k, 0, own.rows_k, ragged=True)
    fields = {"heads_kv": problem.heads_kv, "max_slots": max_slots, "partial_rows": partial_rows} | cut
    fields["split_tiles"] = 0 if splits == 0 else max(1, blocks_of(tiles, splits))
    alone = splits == 1
    workspace = {"partial_out": max_slots * partial_rows * tile.head_dim_v, "partial_lse": max_slots * partial_rows}
    # why q and out: they have no tensor maps, but must be aligned as if they had.
    boxes = {"k": box, "v": box, "q": box, "out": box}
    launch = Launch(
        variant, min(num_work, device.num_sms), fields, boxes, num_work > device.num_sms, 0 if alone else num_blocks
    )
    return make_plan(problem, device, [launch], {} if alone else workspace, num_work=num_work)


def _page_cut(problem: Problem, tile: WarpgroupTile) -> dict[str, int]:
    """Of a page of d keys, key // d == key * magic >> shift for keys below 2^31.

    A copy brings whole swizzled groups of rows; of pages that do not consist of them, threads copy each key by itself.
    """
    if not problem.has("page_table"):
        return {"page_box": 0, "page_magic": 0, "page_shift": 0}
    assert problem.lengths is not None
    size = problem.lengths.rows_k
    shift = 31 + (size - 1).bit_length()
    magic = -(-(1 << shift) // size)
    box = math.gcd(size, tile.block_k)
    box = box if box % PAGE_STEP == 0 else 0
    return {"page_box": box, "page_magic": magic - (magic >> 31 << 32), "page_shift": shift}
