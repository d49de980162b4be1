"""The schedule of key blocks in backward on Hopper: their order, and which thread blocks share them."""

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
from .tiles_sm90 import WarpgroupBackwardTile

KEY_ROWS = 128  # keys of a key block on Hopper
HEADS_IN_L2 = 16  # under a mask, the key blocks of this many heads start together, longest first. why: L34
ORDERED_HEADS_IN_L2 = 32  # the same where Hopper's key blocks wait for each other; without a mask 16. why: L38
# Hopper's other calls take fewer kv heads: as many as touch L2_BYTES (about two L2 caches), but at least as many as
# have WAVES_TOGETHER waves of blocks; a wave has one block for each SM. why: L34
L2_BYTES = 96 * 2**20
WAVES_TOGETHER = 3
SEQUENCES_TOGETHER = 8  # that take turns in a list of key blocks at most, each with one block. why: L54
# Sequences take turns where the tile gives a thread block so many key blocks. why: with fewer, at d 96, calls are
# 2 to 5 % slower.
LEAST_KEY_BLOCKS = 4
HEADS_WITHOUT_SEMAPHORES = 8  # that start together at most where sequences take no turns, without a mask. why: 2k +1 %
# Under a mask, thread blocks share the query heads of a key block. Each of them takes about so many columns of q
# (heads times head_dim) or more, and about so many rows. At most PART_WAVES waves of them start together. why: L34
LEAST_PART_COLUMNS, LEAST_PART_ROWS, PART_WAVES = 256, 4096, 2
SHARED_STEPS = 4  # the fewest query tiles that a block takes of key blocks that it shares
WAVES = 2  # waves of blocks that fill a GPU evenly. why: L35


class SharedKeys(NamedTuple):
    """Key blocks that would not fill Hopper's SMs, and the thread blocks that share them.

    They are the last ones or, if each is shared by heads, all. Key blocks are counted over batch and kv heads.
    `TiledBackwardParams` has the same fields.
    """

    whole_blocks: int  # thread blocks that take whole key blocks; the rest of the grid shares
    shared_first: int  # the first key block that is shared
    shared_keys: int  # how many key blocks are shared
    shared_steps: int  # query tiles that each sharing block takes
    parts_log2: int = 0  # 2^parts_log2 thread blocks share the query heads of each key block


def count_key_blocks(problem: Problem, size: int) -> int:
    """Blocks of so many keys of all kv heads; of several lengths, as if all were whole."""
    if (varlen := problem.seqlen_info) is not None:
        return varlen.batch_k * blocks_of(varlen.rows_k, size) * problem.heads_kv
    return blocks_of(problem.seqlen_k, size) * problem.heads_kv * problem.batch


def is_full(problem: Problem) -> bool:
    """Returns whether every query sees every key of its sequence. Under a mask_mod it may not."""
    if (varlen := problem.seqlen_info) is not None:
        return varlen.left is varlen.right is None
    return problem.mask.is_full and not is_block_sparse(problem)


def _parts_for_l2(problem: Problem, seqlen_q: int) -> int:
    """2 to this power thread blocks share the query heads of a key block that sees so many queries.

    Under a mask key blocks have unequal numbers of tiles, so that those which run at the same time come to be at
    different heads, the farther apart the more heads they have. L2 holds few of these. why: L34
    """
    least = LEAST_PART_COLUMNS // problem.head_dim, blocks_of(LEAST_PART_ROWS, max(seqlen_q, 1)), 1
    return blocks_of(problem.heads_q // problem.heads_kv, max(least)).bit_length() - 1


def kv_heads_in_l2(problem: Problem, device: Device, num_k_blocks: int, parts_log2: int = 0) -> int:
    """Returns how many kv heads start their key blocks together, longest first. why: L34

    num_k_blocks: those of a sequence. parts_log2: 2 to this power thread blocks share the query heads of each.
    """
    if problem.options.deterministic:
        return HEADS_IN_L2 if is_full(problem) else ORDERED_HEADS_IN_L2
    if is_full(problem):
        return 1
    lengths = problem.seqlen_q, problem.seqlen_k
    if problem.mask.is_full:  # a mask_mod decides: key blocks may see all queries, and L2 is to hold these
        return heads_in_l2(_head_bytes(problem, *lengths, group=1), L2_BYTES // 2, HEADS_IN_L2)
    if parts_log2:
        return _heads_of_parts(device, num_k_blocks << parts_log2)
    least = _heads_of_waves(device, num_k_blocks)
    return heads_in_l2(_head_bytes(problem, *lengths), L2_BYTES, HEADS_IN_L2, least)


def _head_bytes(problem: Problem, seqlen_q: int, seqlen_k: int, group: int = 0) -> int:
    """Bytes that the key blocks of a kv head touch: k, v; q, dout, dq of so many query heads, or of its own."""
    group = group or problem.heads_q // problem.heads_kv
    row = DTYPES[problem.dtype].itemsize * (problem.head_dim + problem.head_dim_v)
    acc = FLOAT_BYTES * problem.head_dim
    return seqlen_k * row + group * seqlen_q * (row + acc)


def _heads_of_waves(device: Device, num_k_blocks: int) -> int:
    """Returns how many heads have WAVES_TOGETHER waves of key blocks, if each has so many."""
    return blocks_of(WAVES_TOGETHER * device.num_sms, max(num_k_blocks, 1))


def _heads_of_parts(device: Device, blocks: int) -> int:
    """Returns how many kv heads have at most PART_WAVES waves of thread blocks, so many each; at least one."""
    return heads_in_l2(max(blocks, 1), PART_WAVES * _wave(device), HEADS_IN_L2)


def _wave(device: Device) -> int:
    """The power of two next to the number of SMs."""
    return 1 << round(math.log2(device.num_sms))


def listed_together(problem: Problem, device: Device, tile: WarpgroupBackwardTile, least_parts: int) -> tuple[int, int]:
    """Returns how many kv heads start together, and how many sequences take turns in the list of key blocks.

    least_parts: thread blocks that share each key block, if it is more than one.

    Dense calls of small head dims give a thread block several key blocks of a head, which then do not wait for each
    other's sums of dq. Here those of other heads and sequences come between them instead. why: L54
    """
    varlen = problem.seqlen_info
    assert varlen is not None
    # why means: the host knows no more.
    seqlen_q = min(varlen.mean_rows("q", problem.batch), problem.seqlen_q)
    seqlen_k = min(varlen.mean_rows("k", problem.batch), problem.seqlen_k)
    if least_parts > 1:
        return _heads_of_parts(device, blocks_of(seqlen_k, tile.block_k) * least_parts), 1
    if tile.key_blocks == 1 or problem.options.deterministic:
        return kv_heads_in_l2(problem, device, blocks_of(problem.seqlen_k, tile.block_k)), 1
    # why a wave: then few key blocks of one tile of dq run at the same time. More is slower. The heads of one sequence
    # may always start together.
    most = min(max(problem.heads_kv, _wave(device)), problem.heads_kv * SEQUENCES_TOGETHER)
    # Heads of sequences, each counted once, that touch what one L2 cache holds.
    heads_of_all = heads_in_l2(max(_head_bytes(problem, seqlen_q, seqlen_k), 1), L2_BYTES // 2, most)
    least = 1 if is_full(problem) else _heads_of_waves(device, blocks_of(seqlen_k, tile.block_k))
    if tile.key_blocks < LEAST_KEY_BLOCKS:
        most = min(problem.heads_kv, HEADS_WITHOUT_SEMAPHORES) if is_full(problem) else problem.heads_kv
        return heads_in_l2(1, heads_of_all, most, least), 1
    heads = heads_in_l2(1, heads_of_all, problem.heads_kv, least)
    return heads, max(heads_of_all // heads, 1)


def choose_parts(problem: Problem, device: Device, block_q: int) -> int:
    """2 to this power thread blocks share the query heads of each key block (L34, L35).

    One where key blocks are shared by steps, or where sums are ordered; and where they almost fill a GPU, if they are
    not better off near each other.
    """
    if problem.options.deterministic or problem.mask.is_full:
        return 0
    group, blocks = problem.heads_q // problem.heads_kv, count_key_blocks(problem, KEY_ROWS)
    tiles = blocks_of(problem.seqlen_q, block_q)
    # why: adding up costs about as much as SHARED_STEPS steps, and under a mask a key block has half of them or so.
    most = min(group, group * tiles // (4 * SHARED_STEPS))
    # why not where the left side is bounded: windows of half of the keys were slower so. Nor with mask tiles, which may
    # leave few tiles.
    goes_apart = problem.mask.lo == -problem.seqlen_q and not _are_equal(problem.mask) and not is_block_sparse(problem)
    log2 = _parts_for_l2(problem, problem.seqlen_q) if goes_apart and blocks * group <= MAX_GRID else 0
    while 2 << log2 <= most and not _almost_fill(problem, device, blocks << log2):
        log2 += 1
    return log2


def _almost_fill(problem: Problem, device: Device, blocks: int) -> bool:
    """Returns whether blocks fill a GPU almost evenly: a wave of key blocks that are about alike, else WAVES (L35)."""
    return 8 * blocks >= 7 * (1 if _are_equal(problem.mask) else WAVES) * device.num_sms


def _are_equal(mask: Mask) -> bool:
    """Returns whether about as many queries see each key: in most windows, and where few queries see many keys."""
    longest = min(mask.seqlen_q, mask.hi - mask.lo + 1)  # queries that see a key at most
    return 5 * mask.num_visible() >= 4 * mask.seqlen_k * longest


def choose_least_parts(problem: Problem, varlen: SeqlenInfo, most: int) -> int:
    """Blocks of threads that share each key block of a list, up to so many, so that L2 holds what they touch (L34)."""
    # why not in a window: key blocks have as many tiles as each other.
    if problem.options.deterministic or is_full(problem) or varlen.left is not None:
        return 1
    return max(min(1 << _parts_for_l2(problem, varlen.mean_rows("q", problem.batch)), most), 1)


def choose_sharing_rows(problem: Problem, device: Device, block_q: int) -> bool:
    """Returns whether two thread blocks share the query heads of each key block of dk and dv in backward_dq_dkv.

    As for one kernel of all gradients (L35), but not with mods.
    """
    if problem.options.deterministic or problem.mask.is_full or problem.seqlen_info is not None:
        return False
    group = problem.heads_q // problem.heads_kv
    # why: adding up takes as long as some tiles, and under a mask a key block has half of them or so.
    is_long = group * blocks_of(problem.seqlen_q, block_q) >= 2 * 4 * SHARED_STEPS
    return group > 1 and is_long and not _almost_fill(problem, device, count_key_blocks(problem, KEY_ROWS))


def choose_shared(
    problem: Problem, device: Device, key_blocks: int, num_k_blocks: int, of_one: int
) -> SharedKeys | None:
    """Lets a block per SM, at most, share the key blocks of the last wave; None where none share (L35).

    Every key block has the same number of steps, `of_one`.
    """
    if not problem.mask.is_full:
        return None
    parts, heads_kv = blocks_of(num_k_blocks, key_blocks), problem.batch * problem.heads_kv
    whole = parts * heads_kv // device.num_sms * device.num_sms
    first = whole // parts * num_k_blocks + whole % parts * key_blocks
    count = heads_kv * num_k_blocks - first
    steps = max(-(-count * of_one // device.num_sms), SHARED_STEPS)
    # why: adding up dk and dv of a shared key block costs about as much as SHARED_STEPS steps.
    if count == 0 or steps + SHARED_STEPS > min(key_blocks, num_k_blocks) * of_one or count * of_one >= 2**31:
        return None
    return SharedKeys(whole, first, count, steps)


def choose_splits(problem: Problem, num_k_blocks: int, resident: int) -> int:
    """Returns among how many blocks a kv head's query heads are split, so that WAVES waves of blocks fill the GPU.

    why L35: a key block takes all heads of its group, so that dk and dv stay in registers, but with few keys most of
    the GPU would idle. A split costs accumulators, but only those of fewer than twice WAVES waves of blocks.
    """
    group = problem.heads_q // problem.heads_kv
    num_parts = min(group, -(-WAVES * resident // max(num_k_blocks, 1)))
    return -(-group // -(-group // num_parts))  # all blocks but perhaps the last take the same number of heads
