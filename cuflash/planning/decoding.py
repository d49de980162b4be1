"""The plan of forward on Hopper for few queries over many keys, where blocks of threads share the keys of a query.

The query heads of a group are rows of one block, so a cache is read once for all of them.
"""

from __future__ import annotations

from ..problem.lengths import Lengths
from ..problem.problem import Problem
from .device import Device
from .pages import page_cut
from .plan import Box, Launch, Plan, blocks_of, compile_arch, make_plan
from .tiles_sm90 import FEW_SEQUENCES, GROUP_ROWS, WARP_ROWS, WarpgroupTile
from .variant import variant_of

# Few queries of a sequence of several lengths, and few rows with all heads of a group: keys are then what takes time.
FEW_QUERIES, FEW_ROWS = 16, 2 * GROUP_ROWS
SPLITS_OF_A_BLOCK = 8  # splits that a block of threads has at most, beside one for each query block: `choose_splits`
MAX_TILES = 2**30  # key tiles of all query blocks that `DecodeQueue` can count
# Times of a key tile of 64 rows and of merging splits, where a key tile takes forward.cu 1: about 1.2 µs.
STEP, MERGE = 4 / 3, 4.0
GAIN = 1.2  # how many times as fast it must look for forward.cu to be left


def decode_plan(problem: Problem, device: Device, row: WarpgroupTile) -> Plan | None:
    """The plan; None if forward.cu is faster, or if there may be more key tiles than the kernel can count."""
    asked, own = problem.options.sequences, problem.lengths
    # why one: a row then has the bits that it has in calls of many queries, whose keys are never cut.
    splits = asked.num_splits if asked.split_size is None else 1
    group = problem.heads_q // problem.heads_kv
    is_few = own is not None and problem.seqlen_q <= FEW_QUERIES and problem.seqlen_q * group <= FEW_ROWS
    if own is None:
        mask, places = problem.mask, (problem.batch, problem.seqlen_q, problem.batch, problem.seqlen_k)
        own = Lengths(*places, left=-mask.lo, right=mask.hi, offset=0)
    is_packed = problem.has("cu_seqlens_q") or problem.has("cu_seqlens_k")
    # why not for one split: its bits are those of other kernels.
    is_narrow = splits != 1 and problem.seqlen_q * group <= WARP_ROWS
    rows = own._replace(rows_q=own.rows_q * group)  # of a kv head
    num_blocks = rows.num_slots("q", problem.batch, WARP_ROWS if is_narrow else GROUP_ROWS) * problem.heads_kv
    if not is_few:
        whole = own.num_slots("q", problem.batch, row.block_q) * problem.heads_q
        if not _is_faster(problem, row, num_blocks, whole, splits, device.num_sms):
            return None
    tile = row.for_decoding(few=problem.batch <= FEW_SEQUENCES and not is_packed, narrow=is_narrow)
    tiles = max(blocks_of(problem.seqlen_k, tile.block_k), 1)
    if num_blocks * tiles > MAX_TILES:
        return None
    problem = problem._replace(lengths=own)
    if splits == 0:
        most = device.num_sms if num_blocks <= device.num_sms else SPLITS_OF_A_BLOCK * device.num_sms + num_blocks
    else:
        most = (splits + 1) * num_blocks  # why one more: splits are counted from the first key, which may be hidden
    num_work = min(num_blocks * tiles, most)
    partial_rows = min(tile.block_q, problem.seqlen_q * group)
    cut = page_cut(problem, tile.block_k)
    box = Box(cut["page_box"] or tile.block_k, 0, own.rows_k, ragged=True)
    fields = {"heads_kv": problem.heads_kv, "max_slots": most, "partial_rows": partial_rows} | cut
    fields["split_tiles"] = 0 if splits == 0 else max(1, blocks_of(tiles, splits))
    workspace = {"partial_out": most * partial_rows * tile.head_dim_v, "partial_lse": most * partial_rows}
    # why q and out: they have no tensor maps, but must be aligned as if they had.
    boxes = {"k": box, "v": box, "q": box, "out": box}
    capped, arch = problem.options.softcap > 0.0, compile_arch("sm90", device)
    source = "sm90/decode_narrow.cu" if is_narrow else "sm90/decode.cu"
    variant = variant_of(
        "forward", source, arch, problem.dtype, problem.out_dtype, tile=tile, softcap=capped, lengths=True
    )
    alone = splits == 1
    launch = Launch(
        variant, min(num_work, device.num_sms), fields, boxes, num_work > device.num_sms, 0 if alone else num_blocks
    )
    return make_plan(problem, device, [launch], {} if alone else workspace, num_work=num_work)


def _is_faster(problem: Problem, row: WarpgroupTile, num_blocks: int, whole: int, splits: int, num_sms: int) -> bool:
    """Whether `num_blocks` query blocks of sm90/decode.cu look faster than `whole` of forward.cu."""
    seen = min(problem.seqlen_k, problem.mask.hi - problem.mask.lo + row.block_q)  # keys, by the queries of a block
    tiles = max(blocks_of(seen, row.block_k), 1)
    if splits == 0:
        steps = max(num_blocks * tiles / num_sms, 1.0) * STEP + MERGE
    else:
        steps = blocks_of(num_blocks * splits, num_sms) * blocks_of(tiles, splits) * STEP + MERGE * (splits > 1)
    return GAIN * steps < blocks_of(whole, num_sms) * tiles
