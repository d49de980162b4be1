"""Plans of backward with sm90 kernels: their grids, and the workspace that they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..problem.problem import Problem
from ..problem.seqlen_info import PADDED_SLOT, SeqlenInfo
from . import tiles_sm90
from .backward_schedule import (
    HEADS_IN_L2,
    KEY_ROWS,
    SHARED_STEPS,
    WAVES,
    SharedKeys,
    choose_least_parts,
    choose_parts,
    choose_shared,
    count_key_blocks,
    is_full,
    kv_heads_in_l2,
    listed_together,
)
from .backward_sm80 import ACC_ROWS, convert_launch
from .block_mask import KeySteps, tile_counts_launch, with_mask_tiles
from .delta import block_words, changes_weights, delta_launch, stats_rows_of
from .device import Device
from .mod_code import make_mod_code
from .plan import Launch, Plan, TmaBox, blocks_of, make_plan, make_variant
from .tile_shapes_sm90 import OUT_ROWS, WarpgroupBackwardTile, WarpgroupDqDkvTile
from .variant import Variant

KEY_SHARES_WORDS = 4  # numbers of `KeyShares`, which divide the list of key blocks: common/visible_rows.cuh
SORTED_WAVES = 2  # last waves of that list, in which the longest key blocks come first
MOST_PARTS = 8  # most thread blocks that share a key block of the list
# Up to this seqlen_k a block on Hopper takes several key blocks, if SHORT_WAVES waves of blocks remain (L35).
SHORT_KEYS = 2**14
SHORT_WAVES = 4


def warpgroup_plan(problem: Problem, device: Device, tile: WarpgroupBackwardTile, is_sparse: bool = False) -> Plan:
    """Returns the plan with sm90 kernels: delta, then all gradients in one kernel.

    is_sparse: True if it skips tiles that the mask_mod hides fully; two more kernels before it list them.
    """
    deterministic, full, heads = problem.options.deterministic, is_full(problem), problem.batch * problem.heads_q
    stats_rows = stats_rows_of(problem, tile.block_q)
    num_q_blocks, num_k_blocks = blocks_of(problem.seqlen_q, tile.block_q), blocks_of(problem.seqlen_k, tile.block_k)
    key_blocks = 1 if deterministic else max(1, tile.key_blocks // (1 if full else 2))
    blocks = count_key_blocks(problem, tile.block_k * key_blocks)
    steps = num_q_blocks * (problem.heads_q // problem.heads_kv)  # query tiles of a key block without a mask
    parts_log2 = choose_parts(problem, device, tile.block_q)
    # If sparse, one at a time: thread blocks take key blocks until none is left.
    if is_sparse or parts_log2 > 0 or problem.seqlen_k > SHORT_KEYS or blocks < SHORT_WAVES * device.num_sms:
        key_blocks, blocks = 1, count_key_blocks(problem, tile.block_k)
    # Not if sparse, as key blocks have unequal numbers of steps.
    shared = None if deterministic or is_sparse else choose_shared(problem, device, key_blocks, num_k_blocks, steps)
    if parts_log2 > 0:
        shared = SharedKeys(blocks << parts_log2, 0, blocks, 0, parts_log2)
        blocks <<= parts_log2
    elif shared is not None:
        blocks = shared.whole_blocks + blocks_of(shared.shared_keys * steps, shared.shared_steps)
    else:
        shared = SharedKeys(blocks, 0, 0, 0)
    fields = {
        "num_q_blocks": num_q_blocks,
        "num_k_blocks": num_k_blocks,
        "key_blocks": key_blocks,
        "heads_in_l2": kv_heads_in_l2(problem, device, num_k_blocks, parts_log2),
        "stats_rows": stats_rows,
        "deterministic": int(deterministic),
        **shared._asdict(),
    }
    # `semaphores` has a counter for each tile of dq and for each shared key block. With mask tiles it then has one of
    # the key blocks taken, and one for each order.
    workspace = _sums(problem, tile, heads, stats_rows, num_q_blocks, shared.shared_keys)
    counters, more_semaphores, of_mask_tiles = heads * num_q_blocks, shared.shared_keys, []
    if is_sparse:
        listed = KeySteps.for_problem(problem, num_q_blocks, num_k_blocks)
        workspace |= {"tile_counts": counters} | listed.workspace
        fields |= listed.fields
        first_counter = counters + more_semaphores + 1
        of_mask_tiles = [tile_counts_launch(problem, device, tile.block_q, num_q_blocks, listed, first_counter)]
        more_semaphores += 1 + listed.orders
        blocks = min(blocks, device.num_sms)
    workspace["semaphores"] = counters + more_semaphores
    variant = _warpgroup_variant(problem, device, "backward", replace(tile, shares_heads=parts_log2 > 0), is_sparse)
    launches = [
        delta_launch(problem, device, stats_rows, 1, num_q_blocks=num_q_blocks, more_semaphores=more_semaphores),
        *of_mask_tiles,
        # The counter numbers thread blocks as they start, so that a block waits only for running blocks.
        Launch(
            variant,
            blocks,
            fields,
            _tma_boxes(problem, *tile.tma_rows, tile.dq_rows),
            takes_counter=deterministic and not is_sparse,
        ),
    ]
    buffers: Mapping[str, int] = workspace
    if is_sparse:
        launches, buffers = with_mask_tiles(problem, device, launches, workspace)
    return make_plan(problem, device, launches, buffers, num_work=count_key_blocks(problem, tile.block_k))


def cluster_plan(problem: Problem, device: Device) -> Plan | None:
    """Returns the plan with sm90 kernels: delta; all gradients, in clusters of two thread blocks; convert of dq.

    None where clusters do not serve: deterministic, accumulate, variable lengths, other head dims.
    """
    tile = tiles_sm90.choose_cluster(problem.head_dim, problem.head_dim_v)
    if tile is None or problem.options.deterministic or problem.op.accumulates or problem.seqlen_info is not None:
        return None
    heads, rows_q = problem.batch * problem.heads_q, blocks_of(problem.seqlen_q, ACC_ROWS) * ACC_ROWS
    stats_rows, num_k_blocks = stats_rows_of(problem), blocks_of(problem.seqlen_k, tile.block_k)
    workspace = {"stats": 2 * heads * stats_rows, "dq_acc": heads * rows_q * tile.head_dim}
    fields = {
        "num_q_blocks": blocks_of(problem.seqlen_q, tile.block_q),
        "num_k_blocks": num_k_blocks,
        "heads_in_l2": kv_heads_in_l2(problem, device, num_k_blocks),
        "stats_rows": stats_rows,
    }
    key_blocks, tma_boxes = count_key_blocks(problem, tile.block_k), _tma_boxes(problem, *tile.tma_rows)
    main = make_variant(problem, device, "backward", "sm90/backward_cluster/backward_cluster.cu", tile)
    launches = [
        delta_launch(problem, device, stats_rows, 1, padded_dim=tile.head_dim),
        Launch(main, tile.num_in_cluster * key_blocks, fields, tma_boxes),
        convert_launch(problem, device, workspace, tile.head_dim, tile.head_dim_v),
    ]
    return make_plan(problem, device, launches, workspace, num_work=key_blocks)


def listed_plan(problem: Problem, device: Device, tile: WarpgroupBackwardTile, varlen: SeqlenInfo) -> Plan:
    """Returns the plan for variable-length sequences: delta lists key blocks, which persistent thread blocks take."""
    deterministic, full = problem.options.deterministic, is_full(problem)
    group = problem.heads_q // problem.heads_kv
    stats_rows = stats_rows_of(problem)
    num_q_blocks = blocks_of(stats_rows, tile.block_q)
    most_blocks = varlen.num_slots("k", problem.batch, tile.block_k)
    blocks = most_blocks * problem.heads_kv
    takers = min(blocks, device.num_sms)
    # The mean, as the host has no lengths. A mask leaves a key block about half of its steps.
    steps = group * blocks_of(varlen.mean_rows("q", problem.batch), tile.block_q)
    most_parts = min(MOST_PARTS, steps // (SHARED_STEPS if full else 4 * SHARED_STEPS))
    least_parts = choose_least_parts(problem, varlen, most_parts)
    together, sequences_together = listed_together(problem, device, tile, least_parts)
    shared_keys = 0
    if not deterministic and most_parts > 1 and (full or least_parts > 1 or blocks < WAVES * device.num_sms):
        shared_keys = takers if full else blocks
    fields = {
        "num_q_blocks": num_q_blocks,
        "num_k_blocks": most_blocks,
        "key_blocks": 1,
        "heads_in_l2": together,
        "stats_rows": stats_rows,
        "deterministic": int(deterministic),
        **SharedKeys(takers, 0, shared_keys, 0)._asdict(),
    }
    key_fields = {
        "num_slots": varlen.num_slots("k", problem.batch, PADDED_SLOT),
        "block_k": tile.block_k,
        "max_key_blocks": most_blocks,
        "sorted_blocks": blocks_of(SORTED_WAVES * device.num_sms, min(together, problem.heads_kv) * least_parts),
        "takers": takers,
        "shared_keys": shared_keys,
        "least_parts": least_parts,
        "most_parts": most_parts,
        "last_steps": steps if full else 0,
        "sequences_together": sequences_together,
    }
    workspace = _sums(problem, tile, problem.heads_q, stats_rows, num_q_blocks, shared_keys) | {
        "key_list": most_blocks * block_words(problem),
        "key_shares": KEY_SHARES_WORDS,
        # A counter for each tile of dq, one for each shared key block, and one of the key blocks taken.
        "semaphores": problem.heads_q * num_q_blocks + shared_keys + 1,
    }
    variant = _warpgroup_variant(problem, device, "backward", tile)
    launches = [
        delta_launch(
            problem, device, stats_rows, 1, num_q_blocks=num_q_blocks, more_semaphores=shared_keys + 1, **key_fields
        ),
        Launch(variant, takers, fields, _tma_boxes(problem, *tile.tma_rows)),
    ]
    return make_plan(problem, device, launches, workspace, num_work=MOST_PARTS * blocks)


def _sums(
    problem: Problem, tile: WarpgroupBackwardTile, heads: int, stats_rows: int, num_q_blocks: int, shared_keys: int
) -> dict[str, int]:
    """Returns floats of the workspace without counters: stats, and sums that thread blocks share.

    With accumulate, thread blocks add to the float32 arrays of the call.
    """
    stats = {"stats": 2 * heads * stats_rows}
    if problem.op.accumulates:
        return stats
    return stats | {
        "dq_acc": heads * num_q_blocks * tile.acc_floats,
        "dk_acc": shared_keys * tile.block_k * tile.head_dim,
        "dv_acc": shared_keys * tile.block_k * tile.head_dim_v,
    }


def dq_dkv_plan(
    problem: Problem,
    device: Device,
    tiles: tuple[WarpgroupDqDkvTile, ...],
    is_sparse: tuple[bool, ...] = (False,) * 3,
    shares: bool = False,
) -> Plan:
    """Returns the plan with sm90 kernels delta, dq, dk and dv. All repeat bit by bit, even without `deterministic`.

    is_sparse: for each gradient, True if its kernel skips tiles that the mask_mod hides fully. shares: True if two
    thread blocks share the query heads of each key block of dk, and of dv.
    """
    if (varlen := problem.seqlen_info) is None:
        num_q_blocks = blocks_of(problem.seqlen_q, tiles[0].block_q)
        num_k_blocks = blocks_of(problem.seqlen_k, tiles[1].block_k)
        batch_factor, of_slots, workspace = problem.batch, {}, {}
    else:
        num_q_blocks, num_k_blocks = (varlen.num_slots(side, problem.batch, PADDED_SLOT) for side in "qk")
        batch_factor, of_slots = 1, {"num_slots": max(num_q_blocks, num_k_blocks)}
        workspace = dict.fromkeys(("q_blocks", "k_blocks"), of_slots["num_slots"] * block_words(problem))
    work = batch_factor * problem.heads_q * num_q_blocks, batch_factor * problem.heads_kv * num_k_blocks
    stats_rows = stats_rows_of(problem)
    fields = {
        "num_q_blocks": num_q_blocks,
        "num_k_blocks": num_k_blocks,
        "heads_in_l2": 1 if is_full(problem) else HEADS_IN_L2,
        "stats_rows": stats_rows,
    }
    of_semaphores = {"num_q_blocks": 0, "more_semaphores": 2 * work[1]} if shares else {}
    launches = [delta_launch(problem, device, stats_rows, 1, **of_slots, **of_semaphores)]
    for tile, skips in zip(tiles, is_sparse, strict=True):
        shared, result = shares and tile.gradient != "dq", tile.gradient
        variant = dq_dkv_variant(problem, device, replace(tile, shares_heads=shared), skips)
        num_work = work[result != "dq"] * (2 if shared else 1)
        blocks = num_work if varlen is None else min(num_work, device.num_sms)
        launch_fields = fields | {"first_semaphore": work[1] if result == "dv" else 0} if shared else fields
        tma_boxes, aliases = _tma_boxes(problem, *tile.tma_rows), {"acc": f"{result}_acc"} if shared else {}
        launches.append(
            Launch(variant, blocks, launch_fields, tma_boxes, takes_counter=varlen is not None, aliases=aliases)
        )
    buffers: Mapping[str, int] = workspace | {"stats": 2 * batch_factor * problem.heads_q * stats_rows}
    if shares:
        rows = work[1] * KEY_ROWS
        sums = {"dk_acc": rows * tiles[1].head_dim, "dv_acc": rows * tiles[2].head_dim_v}
        buffers = {**buffers, **sums, "semaphores": of_semaphores["more_semaphores"]}
    if any(is_sparse):
        launches, buffers = with_mask_tiles(problem, device, launches, buffers)
    return make_plan(problem, device, launches, buffers, num_work=max(work))


def _tma_boxes(problem: Problem, box_q: int, box_k: int, box_dq: int = OUT_ROWS) -> dict[str, TmaBox]:
    """Returns TMA boxes for visible rows of q, dout, k and v, and for all rows of the gradients.

    Gradients have all rows because a store may not begin before the first row of its box. Varlen boxes have all rows.
    """
    if (varlen := problem.seqlen_info) is not None:
        rows = {"q": varlen.rows_q, "k": varlen.rows_k, "v": varlen.rows_k, "dout": varlen.rows_q}
        loaded = {"q": box_q, "k": box_k, "v": box_k, "dout": box_q}
        tma_boxes = {name: TmaBox(loaded[name], 0, rows[name], varlen=True) for name in rows}
        return tma_boxes | {f"d{name}": TmaBox(OUT_ROWS, 0, rows[name], varlen=True) for name in "qkv"}
    visible_q, visible_k = problem.mask.row_range(0, problem.seqlen_k), problem.mask.key_range(0, problem.seqlen_q)
    row_box, key_box = TmaBox(box_q, *visible_q), TmaBox(box_k, *visible_k)
    tma_boxes = {"q": row_box, "k": key_box, "v": key_box, "dout": row_box}
    stored = TmaBox(OUT_ROWS, 0, problem.seqlen_k)
    return tma_boxes | {"dq": TmaBox(box_dq, 0, problem.seqlen_q), "dk": stored, "dv": stored}


def _warpgroup_variant(
    problem: Problem,
    device: Device,
    op: str,
    tile: WarpgroupBackwardTile | WarpgroupDqDkvTile,
    is_sparse: bool = False,
) -> Variant:
    kernel = "backward" if isinstance(tile, WarpgroupBackwardTile) else "backward_dq_dkv"
    keys_as_rows = op != "backward_dq"
    mod_code = make_mod_code(problem, keys_as_rows, is_sparse=is_sparse) if changes_weights(problem) else None
    source = f"sm90/{kernel}/{kernel}.cu"
    return make_variant(problem, device, op, source, tile, mod_code, accumulates=problem.op.accumulates)


def dq_dkv_variant(problem: Problem, device: Device, tile: WarpgroupDqDkvTile, is_sparse: bool = False) -> Variant:
    """Returns the variant of a kernel for one gradient. is_sparse: True if it skips tiles that the mask_mod hides."""
    return _warpgroup_variant(problem, device, f"backward_{tile.gradient}", tile, is_sparse)
