"""Planner of decoding: forward with few queries over many keys, where thread blocks split the keys of a query.

The query heads of a group are rows of one thread block, so that they read the cache once if they fit one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..problem.dtypes import DTYPES
from ..problem.problem import Problem
from ..problem.seqlen_info import PADDED_SLOT, SeqlenInfo
from . import tiles_sm80
from .device import Device
from .mod_code import make_mod_code
from .plan import MAX_GRID, Launch, Plan, TmaBox, blocks_of, make_plan, make_variant
from .tile import FLOAT_BYTES
from .tile_shapes_sm90 import FEW_SEQUENCES, GROUP_ROWS, WARP_ROWS, WarpgroupTile, decoding_tile
from .tiles_sm80 import Tile
from .variant import Variant

# With so few queries a varlen sequence, and so few rows with all heads of a group, reading keys takes most of the time.
FEW_QUERIES, FEW_ROWS = 16, 2 * GROUP_ROWS
SPLITS_OF_A_BLOCK = 8  # most splits for each thread block of the grid, beside one for each query block
MAX_TILES = 2**30  # most key tiles of all query blocks that `DecodeTileScheduler` can count
# Relative times of a key tile of 64 rows, of 16 rows, and of merging splits. A key tile of forward.cu takes 1, which is
# 1.2 µs on Hopper.
STEP, STEP_OF_A_WARP, MERGE = 4 / 3, 0.6, 4.0
# For sm80/decode.cu, where the host chooses the splits: most keys of a split, fewest tiles of a split (kLeast in the
# kernel), and most bytes of all states.
LONG_SPLIT, LEAST_TILES, MAX_STATES_BYTES = 8192, 4, 64 * 2**20
GAIN = 1.2  # least estimated speed-up over forward.cu
# Times for sm90 kernels, in units of a key tile read from memory: start and end of a kernel; a key tile that other
# thread blocks read, too; merging, relative to reading as many bytes of keys.
START, READ_AGAIN, MERGED_BYTES = 4.0, 0.45, 1.5
# kCost of thread blocks of 64 and of 16 rows, and kLeast, in sm90/decode/scheduler.cuh.
SPLIT_COST, SPLIT_COST_OF_A_WARP, SPLIT_TILES = 1.4, 2.0, 2
PAGE_STEP = 8  # keys: rows of shared memory that are swizzled together
GAIN_OF_A_WARP = 1.1  # least estimated speed-up of blocks of 16 rows, if there are more rows


def decode_plans(problem: Problem, device: Device, rows: Sequence[WarpgroupTile]) -> Iterator[Plan]:
    """Yields plans with sm90 decode kernels, in order of preference; none if forward.cu is faster.

    rows: tiles of forward.cu, in order of preference.
    """
    splits, group = _splits(problem), problem.heads_q // problem.heads_kv
    if (
        not rows
        or problem.op.name != "forward"
        or not _may_share_keys(problem)
        or (varlen := _lengths(problem)) is None
    ):
        return
    num_rows = group * (problem.seqlen_q if problem.has("cu_seqlens_q") else varlen.rows_q)
    # Not for one split, which must have the bits of forward.cu: narrow.cu gives others.
    is_narrow = splits != 1 and (num_rows <= WARP_ROWS or _is_faster_narrow(problem, device, rows[0], num_rows))
    ways = [(rows[0], True, True), (rows[0], True, False)] if is_narrow else []
    for row, by_warps, may_be_single in (*ways, *((row, False, False) for row in rows)):
        candidate = _decode_plan(problem, varlen, device, row, by_warps, may_be_single)
        if candidate is None:
            return
        yield candidate


def _decode_plan(
    problem: Problem, varlen: SeqlenInfo, device: Device, row: WarpgroupTile, is_narrow: bool, may_be_single: bool
) -> Plan | None:
    """Returns one such plan; None if forward.cu is faster, or if the kernel may be unable to count the key tiles."""
    splits, group = _splits(problem), problem.heads_q // problem.heads_kv
    is_packed = problem.has("cu_seqlens_q") or problem.has("cu_seqlens_k")
    rows = varlen._replace(rows_q=varlen.rows_q * group)  # of a kv head
    wide_blocks, num_blocks = (
        rows.num_slots("q", problem.batch, size) * problem.heads_kv
        for size in (GROUP_ROWS, WARP_ROWS if is_narrow else GROUP_ROWS)
    )
    if not _is_few(problem):
        whole = varlen.num_slots("q", problem.batch, row.block_q) * problem.heads_q
        visible_tiles = _visible_tiles(problem, row.block_q, row.block_k)
        if not _is_faster(STEP * wide_blocks, whole, visible_tiles, splits, device.num_sms):
            return None
    few, paged = problem.batch <= FEW_SEQUENCES and not is_packed, problem.has("page_table")
    # The kernel then splits keys so that no thread block has a second work tile. Not with pages: 5 % slower.
    is_single = is_narrow and may_be_single and few and not paged and splits == 0 and num_blocks <= device.num_sms
    problem = problem._replace(seqlen_info=varlen)
    tile = decoding_tile(row, paged, few, is_narrow, is_single)
    tiles = max(blocks_of(problem.seqlen_k, tile.block_k), 1)
    if num_blocks * tiles > MAX_TILES:
        return None
    if splits == 0:
        most = device.num_sms if num_blocks <= device.num_sms else SPLITS_OF_A_BLOCK * device.num_sms + num_blocks
    else:
        # At most one split for each tile. One more, as splits begin at the first key, even if the mask hides it.
        most = (min(splits, tiles) + 1) * num_blocks
    num_work = min(num_blocks * tiles, most)
    partial_rows = min(tile.block_q, problem.seqlen_q * group)
    cut = page_cut(problem, tile.block_k)
    box = TmaBox(cut["page_box"] or tile.block_k, 0, varlen.rows_k, varlen=True)
    fields = {"heads_kv": problem.heads_kv, "max_slots": most, "partial_rows": partial_rows} | cut
    fields["split_tiles"] = 0 if splits == 0 else max(1, blocks_of(tiles, splits))
    rows_of_splits = most * partial_rows
    workspace = {"partial_out": rows_of_splits * tile.head_dim_v, "partial_sums": 2 * rows_of_splits}
    # q and out have no tensor maps, but must be aligned as if they had.
    tma_boxes = {"k": box, "v": box, "q": box, "out": box}
    source = "sm90/decode/narrow.cu" if is_narrow else "sm90/decode/decode.cu"
    variant = _variant(problem, device, source, tile)
    launch = Launch(variant, min(num_work, device.num_sms), fields, tma_boxes, num_work > device.num_sms)
    if splits == 1:
        return make_plan(problem, device, [launch], num_work=num_work)
    return make_plan(problem, device, [launch._replace(arrivals=num_blocks)], workspace, num_work=num_work)


def _variant(problem: Problem, device: Device, source: str, tile: Tile | WarpgroupTile) -> Variant:
    return make_variant(problem, device, "forward", source, tile, make_mod_code(problem), out_dtype=problem.out_dtype)


def _is_faster_narrow(problem: Problem, device: Device, row: WarpgroupTile, num_rows: int) -> bool:
    """Returns True if blocks of 16 rows are estimated to be faster than blocks of 64, for `num_rows` rows a kv head.

    Each narrow block reads all keys, most from L2. One thread block merges the splits of a block.
    """
    if num_rows > FEW_ROWS or _splits(problem) != 0:
        return False
    times = []
    for is_narrow, cost in ((False, SPLIT_COST), (True, SPLIT_COST_OF_A_WARP)):
        tile, heads = decoding_tile(row, paged=False, few=False, narrow=is_narrow), problem.batch * problem.heads_kv
        blocks, tiles = heads * blocks_of(num_rows, tile.block_q), _visible_tiles(problem, num_rows, tile.block_k)
        shared_rows, each = min(num_rows, tile.block_q), max(heads, READ_AGAIN * blocks) * tiles / device.num_sms
        worth_merging = cost * math.sqrt(tiles * shared_rows / tile.block_k)
        splits = tiles / max(blocks * tiles / device.num_sms, worth_merging, SPLIT_TILES)
        floats_to_keys = MERGED_BYTES * 2 * tile.head_dim_v / ((tile.head_dim + tile.head_dim_v) * tile.block_k)
        times.append(START + each + (shared_rows * splits * floats_to_keys if splits > 1 else 0.0))
    return times[0] > GAIN_OF_A_WARP * times[1]


def split_plan(problem: Problem, device: Device, row: Tile, whole: int, fallback: str | None) -> Plan | None:
    """Returns the plan with sm80/decode.cu; None if `whole` blocks of sm80/forward.cu are faster, or no tile fits.

    row: the tile of sm80/forward.cu.
    """
    splits = _splits(problem)
    # Not for one split, which must have the bits of forward.cu: sm80/decode.cu gives others.
    if problem.op.name != "forward" or problem.options.algorithm != "flash2" or splits == 1:
        return None
    if not _may_share_keys(problem):
        return None
    rows, dims = tiles_sm80.DECODE[problem.dtype], (problem.head_dim, problem.head_dim_v)
    tile = tiles_sm80.choose(rows, DTYPES[problem.dtype].itemsize, *dims, device)
    varlen, group = _lengths(problem), problem.heads_q // problem.heads_kv
    if tile is None or varlen is None:
        return None
    queries, head_parts = max(tile.block_q // group, 1), blocks_of(group, tile.block_q)
    num_blocks = varlen.num_slots("q", problem.batch, queries) * head_parts * problem.heads_kv
    visible_tiles = _visible_tiles(problem, row.block_q, row.block_k)
    if not _is_few(problem) and not _is_faster(
        STEP_OF_A_WARP * num_blocks, whole, visible_tiles, splits, device.num_sms
    ):
        return None
    if splits == 0:
        resident = device.num_sms * tile.blocks_per_sm
        splits = max(blocks_of(2 * resident, max(num_blocks, 1)), blocks_of(problem.seqlen_k, LONG_SPLIT))
    states_bytes = FLOAT_BYTES * max(num_blocks, 1) * tile.block_q * (tile.head_dim_v + 2)
    most = min(blocks_of(problem.seqlen_k, LEAST_TILES * tile.block_k), MAX_STATES_BYTES // states_bytes)
    splits = max(min(splits, most), 1)
    if num_blocks * splits > MAX_GRID:
        return None
    fields = {"heads_kv": problem.heads_kv, "head_parts": head_parts, "queries": queries, "splits": splits}
    problem = problem._replace(seqlen_info=varlen)
    variant = _variant(problem, device, "sm80/decode.cu", tile)
    states = num_blocks * splits * tile.block_q if splits > 1 else 0
    workspace = {"partial_out": states * tile.head_dim_v, "partial_sums": 2 * states}
    launch = Launch(variant, num_blocks * splits, fields, arrivals=num_blocks if splits > 1 else 0)
    return make_plan(problem, device, [launch], workspace, fallback)


def _splits(problem: Problem) -> int:
    """Returns the number of splits of a query's keys that the caller gives; 0 to choose it here."""
    # With split_size it is one: a row then has the same bits as in calls with many queries, whose keys are not split.
    return problem.options.num_splits if problem.options.split_size is None else 1


def _may_share_keys(problem: Problem) -> bool:
    """Returns True if decode kernels take the mods of the call."""
    mod_spec = problem.op.mod_spec
    # Not for one split, which must have the bits of forward.cu: decoding with mods gives others.
    return mod_spec is None or not (mod_spec.drops or _splits(problem) == 1)


def _is_few(problem: Problem) -> bool:
    """Returns True for a varlen call with so few queries that reading keys takes most of the time."""
    rows = problem.seqlen_q * (problem.heads_q // problem.heads_kv)
    return problem.seqlen_info is not None and problem.seqlen_q <= FEW_QUERIES and rows <= FEW_ROWS


def _lengths(problem: Problem) -> SeqlenInfo | None:
    """Returns the SeqlenInfo of a problem, also of a dense one; None if it has more rows than kernels can count."""
    if problem.seqlen_info is not None:
        return problem.seqlen_info
    mask, sizes = problem.mask, (problem.batch, problem.seqlen_q, problem.batch, problem.seqlen_k)
    varlen = SeqlenInfo(*sizes, left=-mask.lo, right=mask.hi, offset=0)
    most = max([varlen.num_slots(side, problem.batch, PADDED_SLOT) for side in "qk"])
    return varlen if most * PADDED_SLOT < 2**31 else None


def _visible_tiles(problem: Problem, block_q: int, block_k: int) -> int:
    """Returns the number of key tiles that the queries of a block see."""
    mask = problem.mask
    return max(blocks_of(min(problem.seqlen_k, mask.hi - mask.lo + block_q), block_k), 1)


def _is_faster(num_blocks: float, whole: int, tiles: int, splits: int, num_sms: int) -> bool:
    """Returns True if `num_blocks` query blocks with splits are estimated to be faster than `whole` of forward.cu.

    Times are in key tiles of forward.cu. `num_blocks` is scaled by the relative time of its tile.
    """
    if splits == 0:
        steps = max(num_blocks * tiles / num_sms, 1.0) + MERGE
    else:
        splits = min(splits, tiles)
        steps = math.ceil(num_blocks * splits / num_sms) * blocks_of(tiles, splits) + MERGE * (splits > 1)
    return GAIN * steps < blocks_of(whole, num_sms) * tiles


def page_cut(problem: Problem, block_k: int) -> dict[str, int]:
    """Returns the keys of a page in one TMA box, and the magic numbers to divide key indices by the page size.

    key // size == key * magic >> shift for keys below 2^31. page_box is 0 for pages that are no multiple of PAGE_STEP
    keys: threads then copy each key by itself.
    """
    if not problem.has("page_table"):
        return {"page_box": 0, "page_magic": 0, "page_shift": 0}
    assert problem.seqlen_info is not None
    size = problem.seqlen_info.rows_k
    shift = 31 + (size - 1).bit_length()
    magic = -(-(1 << shift) // size)
    box = math.gcd(size, block_k)
    box = box if box % PAGE_STEP == 0 else 0
    return {"page_box": box, "page_magic": magic - (magic >> 31 << 32), "page_shift": shift}
