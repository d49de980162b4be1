"""Schedule of key blocks in backward on Hopper: their order, and the thread blocks that share them."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..problem.dtypes import DTYPES
from ..problem.mask import Mask
from ..problem.problem import Problem
from ..problem.seqlen_info import SeqlenInfo
from .block_mask import is_block_sparse
from .device import Device
from .plan import MAX_GRID, blocks_of, heads_in_l2
from .tile import FLOAT_BYTES
from .tile_shapes_sm90 import WarpgroupBackwardTile

KEY_ROWS = 128  # keys of a key block on Hopper
HEADS_IN_L2 = 16  # under a mask, key blocks of this many heads start together (longest blocks first, L34)
ORDERED_HEADS_IN_L2 = 32  # likewise for deterministic calls on Hopper; without a mask 16 (ordered sums of dq, L38)
# Hopper's other calls take fewer kv heads: as many as touch L2_BYTES (about two L2 caches), but at least as many as
# fill WAVES_TOGETHER waves (heads that share L2, L34). A wave has one thread block for each SM.
L2_BYTES = 96 * 2**20
WAVES_TOGETHER = 3
SEQUENCES_TOGETHER = 8  # most sequences that alternate in a list, one key block each (fewer waits for dq, L54)
# Sequences alternate if the tile gives a thread block at least so many key blocks. With fewer (d 96), alternating makes
# calls 2 to 5 % slower.
LEAST_KEY_BLOCKS = 4
HEADS_WITHOUT_SEMAPHORES = 8  # most heads that start together without a mask if sequences do not alternate: +1 % at 2k
# Under a mask, thread blocks share the query heads of a key block. Each of them takes at least about so many columns of
# q (heads times head_dim), and so many rows. At most PART_WAVES waves of them start together (shared L2, L34).
LEAST_PART_COLUMNS, LEAST_PART_ROWS, PART_WAVES = 256, 4096, 2
SHARED_STEPS = 4  # fewest query tiles that a thread block takes of shared key blocks
WAVES = 2  # waves of thread blocks that fill a GPU evenly (L35)


class SharedKeys(NamedTuple):
    """Key blocks that would not fill Hopper's SMs, and the thread blocks that share them.

    Shared are the last key blocks, or all of them if thread blocks share query heads. Key blocks are counted over batch
    and kv heads. `TiledBackwardParams` has the same fields.
    """

    whole_blocks: int  # thread blocks that take whole key blocks; the rest of the grid takes shared ones
    shared_first: int  # first shared key block
    shared_keys: int  # number of shared key blocks
    shared_steps: int  # query tiles of each thread block that shares
    parts_log2: int = 0  # 2^parts_log2 thread blocks share the query heads of each key block


def count_key_blocks(problem: Problem, size: int) -> int:
    """Returns the number of blocks of `size` keys, over batch and kv heads; for varlen as if no sequence were short."""
    if (varlen := problem.seqlen_info) is not None:
        return varlen.batch_k * blocks_of(varlen.rows_k, size) * problem.heads_kv
    return blocks_of(problem.seqlen_k, size) * problem.heads_kv * problem.batch


def is_full(problem: Problem) -> bool:
    """Returns True if causal and windows hide no key; False for dense block-sparse calls, whose mask_mod may."""
    if (varlen := problem.seqlen_info) is not None:
        return varlen.left is varlen.right is None
    return problem.mask.is_full and not is_block_sparse(problem)


def _parts_for_l2(problem: Problem, seqlen_q: int) -> int:
    """Returns log2 of the number of thread blocks that share the query heads of a key block, for L2.

    Under a mask, key blocks have unequal numbers of tiles. So concurrent key blocks drift to different query heads, the
    farther apart the more heads a group has, and L2 holds few of these (L34).
    """
    least = LEAST_PART_COLUMNS // problem.head_dim, blocks_of(LEAST_PART_ROWS, max(seqlen_q, 1)), 1
    return blocks_of(problem.heads_q // problem.heads_kv, max(least)).bit_length() - 1


def kv_heads_in_l2(problem: Problem, device: Device, num_k_blocks: int, parts_log2: int = 0) -> int:
    """Returns the number of kv heads whose key blocks start together (longest blocks first, L34).

    num_k_blocks: key blocks of a sequence. parts_log2: 2^parts_log2 thread blocks share the query heads of each.
    """
    if problem.options.deterministic:
        return HEADS_IN_L2 if is_full(problem) else ORDERED_HEADS_IN_L2
    if is_full(problem):
        return 1
    lengths = problem.seqlen_q, problem.seqlen_k
    if problem.mask.is_full:  # a mask_mod alone hides keys: key blocks may see all queries, which L2 should hold
        return heads_in_l2(_head_bytes(problem, *lengths, group=1), L2_BYTES // 2, HEADS_IN_L2)
    if parts_log2:
        return _heads_of_parts(device, num_k_blocks << parts_log2)
    least = _heads_of_waves(device, num_k_blocks)
    return heads_in_l2(_head_bytes(problem, *lengths), L2_BYTES, HEADS_IN_L2, least)


def _head_bytes(problem: Problem, seqlen_q: int, seqlen_k: int, group: int = 0) -> int:
    """Returns bytes that the key blocks of a kv head touch: k and v; q, dout and dq of `group` query heads.

    group: 0 for all query heads of the kv head.
    """
    group = group or problem.heads_q // problem.heads_kv
    row = DTYPES[problem.dtype].itemsize * (problem.head_dim + problem.head_dim_v)
    acc = FLOAT_BYTES * problem.head_dim
    return seqlen_k * row + group * seqlen_q * (row + acc)


def _heads_of_waves(device: Device, num_k_blocks: int) -> int:
    """Returns the number of heads with `num_k_blocks` key blocks each that fill WAVES_TOGETHER waves."""
    return blocks_of(WAVES_TOGETHER * device.num_sms, max(num_k_blocks, 1))


def _heads_of_parts(device: Device, blocks: int) -> int:
    """Returns the most kv heads, `blocks` thread blocks each, that fit PART_WAVES waves; at least one."""
    return heads_in_l2(max(blocks, 1), PART_WAVES * _wave(device), HEADS_IN_L2)


def _wave(device: Device) -> int:
    """Returns the power of two nearest to the number of SMs."""
    return 1 << round(math.log2(device.num_sms))


def listed_together(problem: Problem, device: Device, tile: WarpgroupBackwardTile, least_parts: int) -> tuple[int, int]:
    """Returns the number of kv heads that start together, and of sequences that alternate in the list of key blocks.

    least_parts: thread blocks that share each key block, 1 for none.

    Dense calls of small head dims give a thread block several key blocks of a head: these do not wait for each other
    at dq. In a list, key blocks of other heads and sequences come between them instead (L54).
    """
    varlen = problem.seqlen_info
    assert varlen is not None
    # Mean lengths, as the host has no others.
    seqlen_q = min(varlen.mean_rows("q", problem.batch), problem.seqlen_q)
    seqlen_k = min(varlen.mean_rows("k", problem.batch), problem.seqlen_k)
    if least_parts > 1:
        return _heads_of_parts(device, blocks_of(seqlen_k, tile.block_k) * least_parts), 1
    if tile.key_blocks == 1 or problem.options.deterministic:
        return kv_heads_in_l2(problem, device, blocks_of(problem.seqlen_k, tile.block_k)), 1
    # Up to one wave: few key blocks of one tile of dq then run at the same time; more is slower. All heads of one
    # sequence may start together.
    most = min(max(problem.heads_kv, _wave(device)), problem.heads_kv * SEQUENCES_TOGETHER)
    # Pairs of a sequence and a kv head whose bytes fit one L2 cache.
    heads_of_all = heads_in_l2(max(_head_bytes(problem, seqlen_q, seqlen_k), 1), L2_BYTES // 2, most)
    least = 1 if is_full(problem) else _heads_of_waves(device, blocks_of(seqlen_k, tile.block_k))
    if tile.key_blocks < LEAST_KEY_BLOCKS:
        most = min(problem.heads_kv, HEADS_WITHOUT_SEMAPHORES) if is_full(problem) else problem.heads_kv
        return heads_in_l2(1, heads_of_all, most, least), 1
    heads = heads_in_l2(1, heads_of_all, problem.heads_kv, least)
    return heads, max(heads_of_all // heads, 1)


def choose_parts(problem: Problem, device: Device, block_q: int) -> int:
    """Returns log2 of the number of thread blocks that share the query heads of each key block (L2, L34; waves, L35).

    0 without a mask, where key blocks are shared by steps, and for deterministic sums. Else as many as L2 needs, and
    more until thread blocks almost fill the GPU.
    """
    if problem.options.deterministic or problem.mask.is_full:
        return 0
    group, blocks = problem.heads_q // problem.heads_kv, count_key_blocks(problem, KEY_ROWS)
    tiles = blocks_of(problem.seqlen_q, block_q)
    # Adding up sums costs about as much as SHARED_STEPS steps, and a mask leaves a key block about half of its steps.
    most = min(group, group * tiles // (4 * SHARED_STEPS))
    # Masks without a left bound only: windows of half of the keys were slower. Not with mask tiles, which may leave few
    # tiles.
    goes_apart = problem.mask.lo == -problem.seqlen_q and not _are_equal(problem.mask) and not is_block_sparse(problem)
    log2 = _parts_for_l2(problem, problem.seqlen_q) if goes_apart and blocks * group <= MAX_GRID else 0
    while 2 << log2 <= most and not _almost_fill(problem, device, blocks << log2):
        log2 += 1
    return log2


def _almost_fill(problem: Problem, device: Device, blocks: int) -> bool:
    """Returns True if blocks fill a GPU almost evenly (L35): one wave of about equal key blocks, else WAVES waves."""
    return 8 * blocks >= 7 * (1 if _are_equal(problem.mask) else WAVES) * device.num_sms


def _are_equal(mask: Mask) -> bool:
    """Returns True if about equally many queries see each key: most windows, and few queries over many keys."""
    longest = min(mask.seqlen_q, mask.hi - mask.lo + 1)  # most queries that see a key
    return 5 * mask.num_visible() >= 4 * mask.seqlen_k * longest


def choose_least_parts(problem: Problem, varlen: SeqlenInfo, most: int) -> int:
    """Returns the number of thread blocks, up to `most`, that share each key block of a list, for L2 (L34)."""
    # 1 in a window, where all key blocks have about equally many tiles.
    if problem.options.deterministic or is_full(problem) or varlen.left is not None:
        return 1
    return max(min(1 << _parts_for_l2(problem, varlen.mean_rows("q", problem.batch)), most), 1)


def choose_sharing_rows(problem: Problem, device: Device, block_q: int) -> bool:
    """Returns True if two thread blocks share the query heads of each key block of dk and dv in backward_dq_dkv.

    The rule is as in `choose_parts` (full waves, L35), but not for calls with mods.
    """
    if problem.options.deterministic or problem.mask.is_full or problem.seqlen_info is not None:
        return False
    group = problem.heads_q // problem.heads_kv
    # Adding up sums takes as long as some tiles, and a mask leaves a key block about half of its tiles.
    is_long = group * blocks_of(problem.seqlen_q, block_q) >= 2 * 4 * SHARED_STEPS
    return group > 1 and is_long and not _almost_fill(problem, device, count_key_blocks(problem, KEY_ROWS))


def choose_shared(
    problem: Problem, device: Device, key_blocks: int, num_k_blocks: int, of_one: int
) -> SharedKeys | None:
    """Returns how up to one thread block for each SM shares the key blocks of the last wave (L35); None if none does.

    of_one: steps of a key block, the same for all.
    """
    if not problem.mask.is_full:
        return None
    parts, heads_kv = blocks_of(num_k_blocks, key_blocks), problem.batch * problem.heads_kv
    whole = parts * heads_kv // device.num_sms * device.num_sms
    first = whole // parts * num_k_blocks + whole % parts * key_blocks
    count = heads_kv * num_k_blocks - first
    steps = max(-(-count * of_one // device.num_sms), SHARED_STEPS)
    # Adding up dk and dv of a shared key block costs about as much as SHARED_STEPS steps.
    if count == 0 or steps + SHARED_STEPS > min(key_blocks, num_k_blocks) * of_one or count * of_one >= 2**31:
        return None
    return SharedKeys(whole, first, count, steps)


def choose_splits(problem: Problem, num_k_blocks: int, resident: int) -> int:
    """Returns the number of thread blocks that split a kv head's query heads, so that WAVES waves fill the GPU (L35).

    Without splits, a key block takes all heads of its group and keeps dk and dv in registers. Few keys then leave most
    of the GPU idle. Splits cost accumulators, of fewer than twice WAVES waves of blocks.
    """
    group = problem.heads_q // problem.heads_kv
    num_parts = min(group, -(-WAVES * resident // max(num_k_blocks, 1)))
    return -(-group // -(-group // num_parts))  # equal numbers of heads, except perhaps in the last block
