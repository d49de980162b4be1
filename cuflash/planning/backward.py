"""The plans of backward: its kernels in order, their grids, and the workspace they share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from ..errors import UnsupportedError
from ..problem.dtypes import DTYPES
from ..problem.lengths import PADDED_SLOT
from ..problem.problem import Problem
from . import tiles_sm80, tiles_sm90
from .device import Device
from .hopper import HOPPER, reason_against
from .plan import Box, Launch, Plan, blocks_of, compile_arch, heads_together, make_plan
from .tile import rounded_up
from .tiles_sm80 import BackwardTile, Tile
from .tiles_sm90 import OUT_ROWS, WarpgroupBackwardTile, WarpgroupRowsTile
from .variant import PORTABLE_THREADS, Variant, variant_of

DELTA_ROWS = 32  # queries of a block of the delta kernel
ACC_ROWS = 16  # rows of a tile of the accumulators
ACC_OF_THREAD = 16  # elements that a thread of the convert kernel converts
HEADS_TOGETHER = 16  # under a mask, the key blocks of this many heads start together, longest first. why: L34
ORDERED_HEADS_TOGETHER = 32  # the same where Hopper's key blocks wait for each other; without a mask 16. why: L38
# Hopper's other calls take fewer kv heads: as many as touch L2_BYTES (about two L2 caches), but at least as many as
# have WAVES_TOGETHER waves of blocks; a wave has one block for each multiprocessor. why: L34
L2_BYTES = 96 * 2**20
WAVES_TOGETHER = 3
# Up to this seqlen_k a block on Hopper takes several key blocks, if SHORT_WAVES waves of blocks remain. why: L35
SHORT_KEYS = 2**14
SHORT_WAVES = 4
KEY_ROWS = 128  # keys of a key block on Hopper
MAX_TURNS = 2**16 - 1  # the most key blocks that Hopper's counter of a dq tile can count
SHARED_STEPS = 4  # the fewest query tiles that a block takes of key blocks that it shares
WAVES = 2  # waves of blocks that fill a GPU evenly. why: L35
STATS_ROWS = 128  # the largest block_q


class SharedKeys(NamedTuple):
    """Key blocks that would not fill Hopper's multiprocessors, and the blocks of threads that share them.

    They are the last ones or, if each is shared by heads, all. Key blocks are counted over batch and kv heads.
    `TiledBackwardParams` has the same fields.
    """

    whole_blocks: int  # blocks of threads that take whole key blocks; the rest of the grid shares
    shared_first: int  # the first key block that is shared
    shared_keys: int  # how many key blocks are shared
    shared_steps: int  # query tiles that each sharing block takes
    parts_log2: int = 0  # 2^parts_log2 blocks of threads share the query heads of each key block


def backward_plan(problem: Problem, device: Device, misaligned: Collection[str]) -> Plan:
    """The plan of backward on this GPU."""
    reason = reason_against(problem, device, misaligned) or _reason_against(problem)
    if reason is None:
        own, capped = problem.lengths, problem.options.softcap > 0.0
        # why 0: tiles for many queries have no place in the slots of sequences of several lengths.
        queries = problem.mask.num_visible() / max(problem.seqlen_k, 1) if own is None else 0
        tile = tiles_sm90.choose_backward(problem.head_dim, problem.head_dim_v, queries, capped)
        rows = () if tile is not None else tiles_sm90.choose_rows(problem.head_dim, problem.head_dim_v, capped)
        if tile is not None:
            return _warpgroup_plan(problem, device, tile)
        # why: with few key blocks most of the GPU would idle, so the generic kernel splits the query heads of a group
        # among blocks; not if deterministic (see `_generic_plan`).
        grouped = not problem.options.deterministic and problem.heads_q > problem.heads_kv
        if rows and not (grouped and 2 * _key_blocks(problem, KEY_ROWS) < device.num_sms):
            return _rows_plan(problem, device, rows)
        reason = (
            "with so few keys, the query heads of a kv head are better shared out among blocks"
            if rows
            else f"head dims ({problem.head_dim}, {problem.head_dim_v}) are over 256"
        )
    return _generic_plan(problem, device, reason if device.capability == HOPPER else None)


def _reason_against(problem: Problem) -> str | None:
    """Why Hopper's kernels cannot take this backward, besides the reasons that also hold for forward."""
    if problem.batch == 0:
        return "the batch is empty"
    if blocks_of(problem.seqlen_k, KEY_ROWS) > MAX_TURNS:
        return f"seqlen_k {problem.seqlen_k} is over {MAX_TURNS * KEY_ROWS}"
    return None


def _generic_plan(problem: Problem, device: Device, fallback: str | None) -> Plan:
    """Kernels: delta; all gradients, with dq summed in float32; convert. If deterministic: delta; dk and dv; dq."""
    deterministic = problem.options.deterministic
    dims = DTYPES[problem.dtype].itemsize, problem.head_dim, problem.head_dim_v, device
    tile = tiles_sm80.choose(tiles_sm80.BACKWARD[problem.dtype], *dims)
    dq_tile = tiles_sm80.choose(tiles_sm80.DQ[problem.dtype], *dims)
    if tile is None or dq_tile is None:
        raise UnsupportedError(
            f"head dims ({problem.head_dim}, {problem.head_dim_v}) in {problem.dtype} have no backward tile on "
            f"{device.name} ({device.arch}, {device.smem_per_block} bytes of shared memory a block); 1 to 256 are "
            "supported. Pass NumPy arrays (numpy.asarray, cupy.asnumpy, .cpu())."
        )

    own = problem.lengths

    def variant(op: str, source: str, tile: Tile | BackwardTile | None = None) -> Variant:
        arch, lengths = compile_arch("sm80", device), own is not None
        return variant_of(op, source, arch, problem.dtype, problem.dtype, tile=tile, lengths=lengths)

    if own is None:
        heads, heads_kv = problem.batch * problem.heads_q, problem.batch * problem.heads_kv
        num_q_blocks = blocks_of(problem.seqlen_q, dq_tile.block_q)
        num_k_blocks = blocks_of(problem.seqlen_k, tile.block_k)
        rows_q, rows_k = (blocks_of(seqlen, ACC_ROWS) * ACC_ROWS for seqlen in (problem.seqlen_q, problem.seqlen_k))
    else:  # all sequences follow each other in the blocks of a head, and in what is kept for its rows
        heads, heads_kv = problem.heads_q, problem.heads_kv
        num_q_blocks = own.num_slots("q", problem.batch, dq_tile.block_q)
        num_k_blocks = own.num_slots("k", problem.batch, tile.block_k)
        rows_q, rows_k = (own.num_slots(side, problem.batch, PADDED_SLOT) * PADDED_SLOT for side in "qk")
    stats_rows = _stats_rows(problem)
    # why no splits if deterministic: dk and dv would depend on the batch and on the GPU.
    splits = 1
    if not deterministic:
        splits = _num_splits(problem, num_k_blocks * heads_kv, device.num_sms * tile.blocks_per_sm)
    shared_rows = heads_kv * splits * rows_k if splits > 1 else 0
    workspace = {
        "stats": 2 * heads * stats_rows,
        "dq_acc": 0 if deterministic else heads * rows_q * tile.head_dim,
        "dk_acc": shared_rows * tile.head_dim,
        "dv_acc": shared_rows * tile.head_dim_v,
    }
    keyed = {
        "num_k_blocks": num_k_blocks,
        "splits": splits,
        "heads_together": 1 if problem.mask.is_full else HEADS_TOGETHER,
        "stats_rows": stats_rows,
    }
    num_blocks = num_k_blocks * heads_kv * splits
    launches = [_delta(problem, device, stats_rows, 2, padded_dim=tile.head_dim)]
    if deterministic:
        of_dq = {"num_q_blocks": num_q_blocks, "num_slices": 1, "stats_rows": stats_rows}
        dkdv = variant("backward_dkdv", "sm80/backward.cu", replace(tile, with_dq=False))
        launches += [
            Launch(dkdv, num_blocks, keyed),
            Launch(variant("backward_dq", "sm80/backward_dq.cu", dq_tile), heads * num_q_blocks, of_dq),
        ]
    else:
        padded = {"splits": splits, "padded_dim": tile.head_dim, "padded_dim_v": tile.head_dim_v}
        threads = workspace["dq_acc"] // ACC_OF_THREAD
        threads += (workspace["dk_acc"] + workspace["dv_acc"]) // (splits * ACC_OF_THREAD)
        launches += [
            Launch(variant("backward", "sm80/backward.cu", tile), num_blocks, keyed),
            Launch(variant("convert", "portable/convert.cu"), blocks_of(threads, PORTABLE_THREADS), padded),
        ]
    return make_plan(problem, device, launches, workspace, fallback)


def _warpgroup_plan(problem: Problem, device: Device, tile: WarpgroupBackwardTile) -> Plan:
    """Kernels: delta, then all gradients in one."""
    deterministic, is_full, own = problem.options.deterministic, _is_full(problem), problem.lengths
    heads = problem.heads_q * (1 if own is not None else problem.batch)
    stats_rows = _stats_rows(problem, tile.block_q)
    num_q_blocks = blocks_of(problem.seqlen_q if own is None else stats_rows, tile.block_q)
    num_k_blocks = blocks_of(problem.seqlen_k, tile.block_k)  # of a sequence
    key_blocks = 1 if deterministic else max(1, tile.key_blocks // (1 if is_full else 2))
    blocks = _key_blocks(problem, tile.block_k * key_blocks)
    if problem.seqlen_k > SHORT_KEYS or blocks < SHORT_WAVES * device.num_sms:
        key_blocks, blocks = 1, _key_blocks(problem, tile.block_k)
    if own is not None:
        blocks = own.num_slots("k", problem.batch, tile.block_k * key_blocks) * problem.heads_kv
    steps = num_q_blocks * (problem.heads_q // problem.heads_kv)  # query tiles that a key block has without a mask
    parts_log2 = _parts_log2(problem, device, tile.block_q) if key_blocks == 1 else 0
    shared = None if deterministic else _shared_keys(problem, device, key_blocks, num_k_blocks, steps)
    if parts_log2 > 0:
        shared = SharedKeys(blocks << parts_log2, 0, blocks, 0, parts_log2)
        blocks <<= parts_log2
    elif shared is not None:
        blocks = shared.whole_blocks + blocks_of(shared.shared_keys * steps, shared.shared_steps)
    else:
        shared = SharedKeys(blocks, 0, 0, 0)
    if deterministic:
        together = HEADS_TOGETHER if is_full else ORDERED_HEADS_TOGETHER
    else:
        together = 1 if is_full else _heads_together(problem, device, num_k_blocks)
    fields = {
        "num_q_blocks": num_q_blocks,
        "num_k_blocks": num_k_blocks if own is None else (blocks >> parts_log2) // problem.heads_kv,
        "key_blocks": key_blocks,
        "heads_together": together,
        "stats_rows": stats_rows,
        "deterministic": int(deterministic),
        **shared._asdict(),
    }
    # `turns` has a counter for each tile of dq and for each shared key block; of several lengths, one number more.
    shared_floats = shared.shared_keys * tile.block_k
    workspace = {
        "stats": 2 * heads * stats_rows,
        "dq_acc": heads * num_q_blocks * tile.acc_floats,
        "dk_acc": shared_floats * tile.head_dim,
        "dv_acc": shared_floats * tile.head_dim_v,
        "turns": heads * num_q_blocks + shared.shared_keys + (own is not None),
    }
    variant = _warpgroup_variant(problem, device, "backward", replace(tile, shares_heads=parts_log2 > 0))
    launches = [
        _delta(problem, device, stats_rows, 1, num_q_blocks=num_q_blocks, shared_keys=shared.shared_keys),
        Launch(variant, blocks, fields, _boxes(problem, *tile.boxes)),
    ]
    return make_plan(problem, device, launches, workspace, num_work=_key_blocks(problem, tile.block_k))


def _key_blocks(problem: Problem, size: int) -> int:
    """Blocks of so many keys of all kv heads; of several lengths, as if all were whole."""
    if (own := problem.lengths) is not None:
        return own.batch_k * blocks_of(own.rows_k, size) * problem.heads_kv
    return blocks_of(problem.seqlen_k, size) * problem.heads_kv * problem.batch


def _can_share(problem: Problem) -> bool:
    """Whether all key blocks have the same number of steps, so that blocks of threads may share them."""
    return problem.lengths is None and problem.mask.is_full


def _is_full(problem: Problem) -> bool:
    """Whether every query sees every key of its sequence."""
    own = problem.lengths
    return problem.mask.is_full if own is None else own.left is own.right is None


def _heads_together(problem: Problem, device: Device, num_k_blocks: int) -> int:
    """How many kv heads start their key blocks together, longest first. why: L34"""
    row = DTYPES[problem.dtype].itemsize * (problem.head_dim + problem.head_dim_v)
    group = problem.heads_q // problem.heads_kv
    acc = tiles_sm90.FLOAT_BYTES * problem.head_dim
    head_bytes = problem.seqlen_k * row + group * problem.seqlen_q * (row + acc)  # k, v; q, dout, dq
    waves = -(-WAVES_TOGETHER * device.num_sms // num_k_blocks)
    return heads_together(head_bytes, L2_BYTES, HEADS_TOGETHER, waves)


def _parts_log2(problem: Problem, device: Device, block_q: int) -> int:
    """2 to this power blocks of threads share the query heads of each key block (L35).

    One where key blocks are shared by steps, where there are almost WAVES waves of them, or where sums are ordered.
    """
    if problem.options.deterministic or _can_share(problem):
        return 0
    group, blocks = problem.heads_q // problem.heads_kv, _key_blocks(problem, KEY_ROWS)
    # why: adding up costs about as much as SHARED_STEPS steps, and under a mask a key block has half of them or so.
    most = min(group, group * blocks_of(problem.seqlen_q, block_q) // (4 * SHARED_STEPS))
    log2 = 0
    while 2 << log2 <= most and 8 * (blocks << log2) < 7 * WAVES * device.num_sms:
        log2 += 1
    return log2


def _shared_keys(
    problem: Problem, device: Device, key_blocks: int, num_k_blocks: int, of_one: int
) -> SharedKeys | None:
    """Lets a block per multiprocessor, at most, share the key blocks of the last wave; None where none share (L35).

    Every key block has the same number of steps, `of_one`.
    """
    if not _can_share(problem):
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


def _rows_plan(problem: Problem, device: Device, tiles: tuple[WarpgroupRowsTile, ...]) -> Plan:
    """Kernels: delta, dq, dk and dv. They are always deterministic, so the option `deterministic` changes nothing."""
    num_q_blocks = blocks_of(problem.seqlen_q, tiles[0].block_q)
    num_k_blocks = blocks_of(problem.seqlen_k, tiles[1].block_k)
    times = problem.batch
    if (own := problem.lengths) is not None:
        num_q_blocks = own.num_slots("q", problem.batch, tiles[0].block_q)
        num_k_blocks = own.num_slots("k", problem.batch, tiles[1].block_k)
        times = 1
    blocks = times * problem.heads_q * num_q_blocks, times * problem.heads_kv * num_k_blocks
    stats_rows = _stats_rows(problem)
    fields = {
        "num_q_blocks": num_q_blocks,
        "num_k_blocks": num_k_blocks,
        "heads_together": 1 if _is_full(problem) else HEADS_TOGETHER,
        "stats_rows": stats_rows,
    }
    boxes = _boxes(problem, *tiles[0].boxes)
    launches = [_delta(problem, device, stats_rows, 1)]
    for tile in tiles:
        variant = _warpgroup_variant(problem, device, f"backward_{tile.gradient}", tile)
        launches.append(Launch(variant, blocks[tile.gradient != "dq"], fields, boxes))
    return make_plan(problem, device, launches, {"stats": 2 * times * problem.heads_q * stats_rows})


def _boxes(problem: Problem, box_q: int, box_k: int) -> dict[str, Box]:
    """Boxes for the rows of q and dout that see a key, those of k and v that are seen, and all rows of the gradients.

    why all rows of dq: a store may not begin before the first row of its box. Of several lengths, boxes of any rows.
    """
    if (own := problem.lengths) is not None:
        rows = {"q": own.rows_q, "k": own.rows_k, "v": own.rows_k, "dout": own.rows_q}
        loaded = {"q": box_q, "k": box_k, "v": box_k, "dout": box_q}
        boxes = {name: Box(loaded[name], 0, rows[name], ragged=True) for name in rows}
        return boxes | {f"d{name}": Box(OUT_ROWS, 0, rows[name], ragged=True) for name in "qkv"}
    seen_q, seen_k = problem.mask.row_range(0, problem.seqlen_k), problem.mask.key_range(0, problem.seqlen_q)
    boxes = {"q": Box(box_q, *seen_q), "k": Box(box_k, *seen_k), "v": Box(box_k, *seen_k), "dout": Box(box_q, *seen_q)}
    stored = Box(OUT_ROWS, 0, problem.seqlen_k)
    return boxes | {"dq": Box(OUT_ROWS, 0, problem.seqlen_q), "dk": stored, "dv": stored}


def _delta(problem: Problem, device: Device, stats_rows: int, stats_step: int, **fields: int) -> Launch:
    """The launch of delta. stats_step is 2 if lse and delta of a query stand side by side, 1 if each has a row."""
    arch = compile_arch("sm80", device)
    lengths = problem.lengths is not None
    variant = variant_of("delta", "portable/delta.cu", arch, problem.dtype, problem.out_dtype, lengths=lengths)
    fields |= {"stats_rows": stats_rows, "stats_step": stats_step, "stats_delta": 1 if stats_step == 2 else stats_rows}
    heads = problem.heads_q * (1 if lengths else problem.batch)
    return Launch(variant, heads * stats_rows // DELTA_ROWS, fields)


def _stats_rows(problem: Problem, block_q: int = STATS_ROWS) -> int:
    """Queries of a head in the workspace, rounded up to whole tiles of every kernel; of several lengths, to slots."""
    if (own := problem.lengths) is not None:
        return own.num_slots("q", problem.batch, PADDED_SLOT) * PADDED_SLOT
    return rounded_up(rounded_up(problem.seqlen_q, block_q), STATS_ROWS)


def _warpgroup_variant(
    problem: Problem, device: Device, op: str, tile: WarpgroupBackwardTile | WarpgroupRowsTile
) -> Variant:
    source = "sm90/backward.cu" if isinstance(tile, WarpgroupBackwardTile) else "sm90/backward_rows.cu"
    arch, capped = compile_arch("sm90", device), problem.options.softcap > 0.0
    lengths = problem.lengths is not None
    return variant_of(op, source, arch, problem.dtype, problem.dtype, tile=tile, softcap=capped, lengths=lengths)


def _num_splits(problem: Problem, num_k_blocks: int, resident: int) -> int:
    """Among how many blocks the query heads of a kv head are split, so that WAVES waves of blocks fill the GPU.

    why L35: a key block takes all heads of its group, so that dk and dv stay in registers, but with few keys most of
    the GPU would idle. A split costs accumulators, but only those of fewer than twice WAVES waves of blocks.
    """
    group = problem.heads_q // problem.heads_kv
    wanted = min(group, -(-WAVES * resident // max(num_k_blocks, 1)))
    return -(-group // -(-group // wanted))  # all blocks but perhaps the last take the same number of heads
