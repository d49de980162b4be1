"""Planner of backward: its kernels in order, their grids, and the workspace that they share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import product

from ..errors import UnsupportedError
from ..problem.dtypes import DTYPES
from ..problem.problem import Problem
from ..problem.seqlen_info import PADDED_SLOT, SeqlenInfo
from . import tiles_sm80, tiles_sm90
from .backward_schedule import (
    HEADS_IN_L2,
    KEY_ROWS,
    SHARED_STEPS,
    WAVES,
    SharedKeys,
    choose_least_parts,
    choose_parts,
    choose_shared,
    choose_sharing_rows,
    choose_splits,
    count_key_blocks,
    is_full,
    kv_heads_in_l2,
    listed_together,
)
from .block_mask import KeySteps, is_block_sparse, tile_counts_launch, with_mask_tiles
from .delta import block_words, changes_weights, delta_launch, stats_rows_of
from .device import Device
from .hopper import HOPPER, reason_against
from .mod_code import ModCode, make_mod_code
from .plan import Launch, Plan, TmaBox, blocks_of, make_plan, make_variant
from .tiles_sm80 import BackwardTile, Tile
from .tiles_sm90 import OUT_ROWS, WarpgroupBackwardTile, WarpgroupDqDkvTile
from .variant import PORTABLE_THREADS, Variant

KEY_SHARES_WORDS = 4  # numbers of `KeyShares`, which divide the list of key blocks: common/visible_rows.cuh
SORTED_WAVES = 2  # last waves of that list, in which the longest key blocks come first
MOST_PARTS = 8  # most thread blocks that share a key block of the list
ACC_ROWS = 16  # rows of a tile of the accumulators
ACC_OF_THREAD = 16  # elements for each thread of the convert kernel
# Up to this seqlen_k a block on Hopper takes several key blocks, if SHORT_WAVES waves of blocks remain (L35).
SHORT_KEYS = 2**14
SHORT_WAVES = 4
MAX_SEMAPHORES = 2**16 - 1  # most key blocks that the sm90 counter of a dq tile can count
MAX_HEAD = 256  # largest head dim of sm90 kernels


def backward_plan(
    problem: Problem, device: Device, misaligned: Collection[str], avoided: Collection[Variant] = frozenset()
) -> Plan:
    """Returns the plan of backward on a GPU. avoided: kernels that must not run."""
    reason = reason_against(problem, device, misaligned) or _reason_against(problem)
    few_keys = "with so few keys, the query heads of a kv head are better shared out among blocks"
    if reason is None and changes_weights(problem):
        candidate = _mod_plan(problem, device, avoided)
        is_dq_dkv = candidate is not None and candidate.launches[-1].variant.source.endswith("backward_dq_dkv.cu")
        if candidate is not None and not (is_dq_dkv and _has_few_keys(problem, device, 1)):
            return candidate
        reason = few_keys if candidate is not None else "mods need more registers than it has"
    elif reason is None:
        lengths, capped = problem.seqlen_info, problem.options.softcap > 0.0
        tile = tiles_sm90.choose_backward(problem.head_dim, problem.head_dim_v, _queries_of_a_key(problem), capped)
        rows = () if tile is not None else tiles_sm90.choose_dq_dkv(problem.head_dim, problem.head_dim_v, capped)
        if tile is not None:
            if lengths is not None and lengths.num_slots("k", problem.batch, tile.block_k) > 0:
                return _listed_plan(problem, device, tile.for_varlen(), lengths)
            return _warpgroup_plan(problem, device, tile)
        shares = choose_sharing_rows(problem, device, rows[1].block_q)
        if not _has_few_keys(problem, device, 2 if shares else 1):
            candidate = _cluster_plan(problem, device)
            if candidate is not None and not any(launch.variant in avoided for launch in candidate.launches):
                return candidate
            return _dq_dkv_plan(problem, device, rows, shares=shares)
        reason = few_keys
    return _sm80_plan(problem, device, reason if device.capability == HOPPER else None)


def _queries_of_a_key(problem: Problem) -> float:
    """Returns the mean number of queries that see a key, at least 1; 0 for varlen, which has no tile of its own."""
    return max(problem.mask.num_visible() / max(problem.seqlen_k, 1), 1.0) if problem.seqlen_info is None else 0.0


def _reason_against(problem: Problem) -> str | None:
    """Returns the reason why sm90 kernels cannot run this backward, or None. Reasons of `reason_against` come first."""
    if problem.batch == 0:
        return "the batch is empty"
    if blocks_of(problem.seqlen_k, KEY_ROWS) > MAX_SEMAPHORES:
        return f"seqlen_k {problem.seqlen_k} is over {MAX_SEMAPHORES * KEY_ROWS}"
    if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD:
        return f"head dims ({problem.head_dim}, {problem.head_dim_v}) are over {MAX_HEAD}"
    return None


def _has_few_keys(problem: Problem, device: Device, parts: int) -> bool:
    """Returns True if backward_dq_dkv leaves most of the GPU idle, with `parts` thread blocks for each key block.

    Sm80 kernels then split the query heads of a group among more thread blocks, but not if deterministic.
    """
    grouped = not problem.options.deterministic and problem.heads_q > problem.heads_kv
    return grouped and 2 * parts * count_key_blocks(problem, KEY_ROWS) < device.num_sms


def _mod_plan(problem: Problem, device: Device, avoided: Collection[Variant]) -> Plan | None:
    """Returns the plan with mods; None if the kernels of all tiles spill registers."""
    dims, capped, lengths = (problem.head_dim, problem.head_dim_v), problem.options.softcap > 0.0, problem.seqlen_info
    # Values of `is_sparse` to try. Varlen skips no tiles: its kernels number visible rows only, so that their tiles do
    # not align with mask tiles.
    ways = (True, False) if is_block_sparse(problem) and lengths is None else (False,)
    queries = 0.0 if is_block_sparse(problem) else _queries_of_a_key(problem)
    # Sparsity comes before the tile: most masks save more time than a tile for larger head dims costs.
    for is_sparse in ways:
        for tile in tiles_sm90.choose_mod_backward(*dims, queries, capped):
            if lengths is None:
                candidate = _warpgroup_plan(problem, device, tile, is_sparse)
            else:
                candidate = _listed_plan(problem, device, tile.for_varlen(), lengths)
            if not any(launch.variant in avoided for launch in candidate.launches):
                return candidate
    rows = []
    for tiles in tiles_sm90.choose_mod_dq_dkv(*dims, capped):
        fitting = (
            (tile, is_sparse)
            for is_sparse, tile in product(ways, tiles)
            if _dq_dkv_variant(problem, device, tile, is_sparse) not in avoided
        )
        if (fits := next(fitting, None)) is None:
            return None
        rows.append(fits)
    taken, skipping = zip(*rows, strict=True)
    return _dq_dkv_plan(problem, device, taken, skipping)


def _sm80_plan(problem: Problem, device: Device, fallback: str | None) -> Plan:
    """Returns the plan with sm80 kernels: delta; all gradients, with dq summed in float32; convert.

    If deterministic: delta; dk and dv; dq.
    """
    deterministic = problem.options.deterministic
    dims = DTYPES[problem.dtype].itemsize, problem.head_dim, problem.head_dim_v, device
    is_sparse = is_block_sparse(problem)
    dkdv_code = make_mod_code(problem, keys_as_rows=True, is_sparse=is_sparse)
    dq_code = make_mod_code(problem, is_sparse=is_sparse)
    tile = tiles_sm80.choose(tiles_sm80.rows_of(tiles_sm80.BACKWARD[problem.dtype], dkdv_code is not None), *dims)
    dq_tile = tiles_sm80.choose(tiles_sm80.rows_of(tiles_sm80.DQ[problem.dtype], dkdv_code is not None), *dims)
    if tile is None or dq_tile is None:
        raise UnsupportedError(
            f"head dims ({problem.head_dim}, {problem.head_dim_v}) in {problem.dtype} have no backward tile on "
            f"{device.name} ({device.arch}, {device.smem_per_block} bytes of shared memory a block); 1 to 256 are "
            "supported. Pass NumPy arrays (numpy.asarray, cupy.asnumpy, .cpu())."
        )

    varlen = problem.seqlen_info

    def variant(op: str, source: str, tile: Tile | BackwardTile | None = None, code: ModCode | None = None) -> Variant:
        return make_variant(problem, device, op, source, tile, code, accumulates=problem.op.accumulates)

    if varlen is None:
        heads, heads_kv = problem.batch * problem.heads_q, problem.batch * problem.heads_kv
        num_q_blocks = blocks_of(problem.seqlen_q, dq_tile.block_q)
        num_k_blocks = blocks_of(problem.seqlen_k, tile.block_k)
        rows_q, rows_k = (blocks_of(seqlen, ACC_ROWS) * ACC_ROWS for seqlen in (problem.seqlen_q, problem.seqlen_k))
    else:  # sequences follow each other in the blocks of a head, and in the workspace of its rows
        heads, heads_kv = problem.heads_q, problem.heads_kv
        num_q_blocks = varlen.num_slots("q", problem.batch, dq_tile.block_q)
        num_k_blocks = varlen.num_slots("k", problem.batch, tile.block_k)
        rows_q, rows_k = (varlen.num_slots(side, problem.batch, PADDED_SLOT) * PADDED_SLOT for side in "qk")
    stats_rows = stats_rows_of(problem)
    # No splits if deterministic: the sums of dk and dv would depend on the batch and on the GPU.
    splits = 1
    if not deterministic:
        splits = choose_splits(problem, num_k_blocks * heads_kv, device.num_sms * tile.blocks_per_sm)
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
        "heads_in_l2": 1 if problem.mask.is_full else HEADS_IN_L2,
        "stats_rows": stats_rows,
    }
    num_blocks = num_k_blocks * heads_kv * splits
    launches = [delta_launch(problem, device, stats_rows, 2, padded_dim=tile.head_dim)]
    if deterministic:
        of_dq = {"num_q_blocks": num_q_blocks, "num_slices": 1, "stats_rows": stats_rows}
        dkdv = variant("backward_dkdv", "sm80/backward.cu", replace(tile, with_dq=False), dkdv_code)
        launches += [
            Launch(dkdv, num_blocks, keyed),
            Launch(variant("backward_dq", "sm80/backward_dq.cu", dq_tile, dq_code), heads * num_q_blocks, of_dq),
        ]
    else:
        padded = {"splits": splits, "padded_dim": tile.head_dim, "padded_dim_v": tile.head_dim_v}
        threads = workspace["dq_acc"] // ACC_OF_THREAD
        threads += (workspace["dk_acc"] + workspace["dv_acc"]) // (splits * ACC_OF_THREAD)
        launches += [
            Launch(variant("backward", "sm80/backward.cu", tile, dkdv_code), num_blocks, keyed),
            Launch(variant("convert", "portable/convert.cu"), blocks_of(threads, PORTABLE_THREADS), padded),
        ]
    return make_plan(problem, device, *with_mask_tiles(problem, device, launches, workspace), fallback)


def _warpgroup_plan(problem: Problem, device: Device, tile: WarpgroupBackwardTile, is_sparse: bool = False) -> Plan:
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


def _cluster_plan(problem: Problem, device: Device) -> Plan | None:
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
    main = make_variant(problem, device, "backward", "sm90/backward/backward_cluster.cu", tile)
    convert = make_variant(problem, device, "convert", "portable/convert.cu")
    padded = {"splits": 1, "padded_dim": tile.head_dim, "padded_dim_v": tile.head_dim_v}
    launches = [
        delta_launch(problem, device, stats_rows, 1, padded_dim=tile.head_dim),
        Launch(main, tile.num_in_cluster * key_blocks, fields, tma_boxes),
        Launch(convert, blocks_of(workspace["dq_acc"] // ACC_OF_THREAD, PORTABLE_THREADS), padded),
    ]
    return make_plan(problem, device, launches, workspace, num_work=key_blocks)


def _listed_plan(problem: Problem, device: Device, tile: WarpgroupBackwardTile, varlen: SeqlenInfo) -> Plan:
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


def _dq_dkv_plan(
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
        variant = _dq_dkv_variant(problem, device, replace(tile, shares_heads=shared), skips)
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
    source = f"sm90/backward/{kernel}.cu"
    return make_variant(problem, device, op, source, tile, mod_code, accumulates=problem.op.accumulates)


def _dq_dkv_variant(problem: Problem, device: Device, tile: WarpgroupDqDkvTile, is_sparse: bool = False) -> Variant:
    return _warpgroup_variant(problem, device, f"backward_{tile.gradient}", tile, is_sparse)
