"""The plans of backward: its kernels in order, their grids, and the workspace they share."""

from __future__ import annotations

from dataclasses import replace

from . import tiles_sm80, tiles_sm90
from .device import Device
from .errors import UnsupportedError
from .problem import ITEMSIZE, Problem
from .tiles_sm80 import BackwardTile, Tile
from .tiles_sm90 import WarpgroupBackwardTile, WarpgroupRowsTile
from .variant import (
    PORTABLE_THREADS,
    Launch,
    Plan,
    SharedKeys,
    Variant,
    check_grid,
    compile_arch,
    flops,
    heads_together,
    result_bytes,
    suits_warpgroups,
)

DELTA_ROWS = 32  # of a block of the delta kernel
ACC_ROWS = 16  # of a tile of the accumulators
ACC_OF_THREAD = 16  # elements that a thread of the convert kernel owns
# Heads whose key blocks start longest first under a mask; what they read and add to stays in L2 (kernels_cu/TUNING.md).
HEADS_TOGETHER = 16
ORDERED_HEADS_TOGETHER = 32  # the same of Hopper's, when key blocks wait for each other; 16 without a mask
# Of Hopper's kv heads fewer: those that touch so much, near two L2 caches, but as many as make up some waves of blocks.
L2_BYTES = 96 * 2**20
WAVES_TOGETHER = 3
# Up to this seqlen_k a block of Hopper's takes several key blocks, where SHORT_WAVES of blocks are left.
SHORT_KEYS = 2**14
SHORT_WAVES = 4
KEY_ROWS = 128  # of a block of Hopper's
MAX_TURNS = 2**16 - 1  # key blocks that Hopper's counter of a tile of dq counts
SHARED_STEPS = 4  # of query tiles: the fewest of a block that shares key blocks
WAVES = 2  # of blocks that a GPU needs to be filled evenly
STATS_ROWS = 128  # the largest block_q


def backward_plan(problem: Problem, device: Device, deterministic: bool, aligned: bool) -> Plan:
    """The plan of backward on this GPU; arguments as of `plan.plan`."""
    if aligned and _suits_warpgroups(problem, device):
        queries, capped = problem.mask.num_visible() / max(problem.seqlen_k, 1), problem.softcap > 0.0
        # why: a block of keys takes all query heads of its group; the generic kernel shares them out where most of the
        # GPU would idle. Not when deterministic, as in `_num_splits`, nor where Hopper's blocks share key blocks.
        grouped = not deterministic and problem.heads_q > problem.heads_kv
        splits = grouped and 2 * -(-problem.seqlen_k // KEY_ROWS) * problem.heads_kv * problem.batch < device.num_sms
        tile = tiles_sm90.choose_backward(problem.head_dim, problem.head_dim_v, queries, capped)
        if tile is not None:
            if problem.mask.is_full or not splits:
                return _warpgroup_plan(problem, device, tile, deterministic)
        elif not splits and (tiles := tiles_sm90.choose_rows(problem.head_dim, problem.head_dim_v, capped)):
            return _rows_plan(problem, device, tiles, deterministic)
    return _generic_plan(problem, device, deterministic)


def _generic_plan(problem: Problem, device: Device, deterministic: bool) -> Plan:
    """delta, then dk and dv with dq added up in float32, then dq converted; or, without atomics, dq by itself."""
    dims = ITEMSIZE[problem.dtype], problem.head_dim, problem.head_dim_v, device
    tile = tiles_sm80.choose(tiles_sm80.BACKWARD[problem.dtype], *dims)
    dq_tile = tiles_sm80.choose(tiles_sm80.DQ[problem.dtype], *dims)
    if tile is None or dq_tile is None:
        raise UnsupportedError(
            f"head dims ({problem.head_dim}, {problem.head_dim_v}) in {problem.dtype} have no backward tile on "
            f"{device.name} ({device.arch}, {device.smem_per_block} bytes of shared memory a block); 1 to 256 are "
            "supported. Pass NumPy arrays (numpy.asarray, cupy.asnumpy, .cpu())."
        )

    def variant(op: str, source: str, tile: Tile | BackwardTile | None = None) -> Variant:
        return Variant(op, source, compile_arch("sm80", device), problem.dtype, problem.dtype, tile=tile)

    heads, heads_kv = problem.batch * problem.heads_q, problem.batch * problem.heads_kv
    num_q_blocks = -(-problem.seqlen_q // (dq_tile if deterministic else tile).block_q)
    num_k_blocks = -(-problem.seqlen_k // tile.block_k) * heads_kv
    # why: not when deterministic, or dk and dv would depend on the batch and on the GPU.
    splits = 1 if deterministic else _num_splits(problem, num_k_blocks, device.num_sms * tile.blocks_per_sm)
    stats_rows = _stats_rows(problem)
    # The workspace in floats: stats, and the accumulators in whole tiles of rows.
    rows_q, rows_k = (-(-seqlen // ACC_ROWS) * ACC_ROWS for seqlen in (problem.seqlen_q, problem.seqlen_k))
    parts = [2 * heads * stats_rows, 0 if deterministic else heads * rows_q * tile.head_dim]
    parts += [heads_kv * splits * rows_k * dim if splits > 1 else 0 for dim in (tile.head_dim, tile.head_dim_v)]
    threads = parts[1] // ACC_OF_THREAD + (parts[2] + parts[3]) // (splits * ACC_OF_THREAD)

    launches = [_delta(problem, device, stats_rows)]
    if deterministic:
        launches += [
            Launch(variant("backward_dkdv", "sm80/backward.cu", replace(tile, with_dq=False)), num_k_blocks),
            Launch(variant("backward_dq", "sm80/backward_dq.cu", dq_tile), heads * num_q_blocks),
        ]
    else:
        launches += [
            Launch(variant("backward", "sm80/backward.cu", tile), num_k_blocks * splits),
            Launch(variant("convert", "portable/convert.cu"), -(-threads // PORTABLE_THREADS)),
        ]
    check_grid(problem, max(launch.num_blocks for launch in launches))
    return replace(
        _gradients(problem, device, tuple(launches), num_q_blocks, [*parts, 0]),
        stats_rows=stats_rows,
        num_k_blocks=-(-problem.seqlen_k // tile.block_k),
        heads_together=1 if problem.mask.is_full else HEADS_TOGETHER,
        num_splits=splits,
        deterministic=deterministic,
    )


def _suits_warpgroups(problem: Problem, device: Device) -> bool:
    """Whether Hopper's own kernels apply, head dims over 256 aside."""
    if not suits_warpgroups(problem, device) or problem.batch == 0:
        return False
    if any(dim % 8 for dim in (problem.head_dim, problem.head_dim_v)):  # gradients are contiguous
        return False
    return -(-problem.seqlen_k // KEY_ROWS) <= MAX_TURNS


def _warpgroup_plan(problem: Problem, device: Device, tile: WarpgroupBackwardTile, deterministic: bool) -> Plan:
    """delta, then all gradients in one kernel."""
    heads, heads_kv = problem.batch * problem.heads_q, problem.batch * problem.heads_kv
    num_q_blocks, num_k_blocks = -(-problem.seqlen_q // tile.block_q), -(-problem.seqlen_k // tile.block_k)
    key_blocks = 1 if deterministic else max(1, tile.key_blocks // (1 if problem.mask.is_full else 2))
    blocks = -(-num_k_blocks // key_blocks) * heads_kv
    if problem.seqlen_k > SHORT_KEYS or blocks < SHORT_WAVES * device.num_sms:
        key_blocks, blocks = 1, num_k_blocks * heads_kv
    stats_rows = _stats_rows(problem, tile.block_q)
    steps = num_q_blocks * (problem.heads_q // problem.heads_kv)  # of query tiles, of a key block without a mask
    shared = None if deterministic else _shared_keys(problem, device, key_blocks, num_k_blocks, steps)
    floats = 0
    if shared is not None:
        blocks = shared.whole_blocks + -(-shared.count * steps // shared.steps)
        floats = shared.count * tile.block_k
    launches = (
        _delta(problem, device, stats_rows),
        Launch(_warpgroup_variant(problem, device, "backward", tile), blocks),
    )
    check_grid(problem, max(num_k_blocks * heads_kv, *(launch.num_blocks for launch in launches)))
    # The workspace in floats: stats, dq, shared dk and dv, and a counter for each tile of dq and each shared key block.
    parts = [2 * heads * stats_rows, heads * num_q_blocks * tile.acc_floats]
    parts += [floats * tile.head_dim, floats * tile.head_dim_v]
    parts.append(heads * num_q_blocks + (shared.count if shared is not None else 0))
    if deterministic:
        together = HEADS_TOGETHER if problem.mask.is_full else ORDERED_HEADS_TOGETHER
    else:
        together = 1 if problem.mask.is_full else _heads_together(problem, device, num_k_blocks)
    return replace(
        _gradients(problem, device, launches, num_q_blocks, parts),
        stats_rows=stats_rows,
        num_k_blocks=num_k_blocks,
        heads_together=together,
        key_blocks=key_blocks,
        shared=shared,
        deterministic=deterministic,
    )


def _heads_together(problem: Problem, device: Device, num_k_blocks: int) -> int:
    """Kv heads whose key blocks start longest first."""
    row, group = ITEMSIZE[problem.dtype] * (problem.head_dim + problem.head_dim_v), problem.heads_q // problem.heads_kv
    acc = tiles_sm90.FLOAT_BYTES * problem.head_dim
    head_bytes = problem.seqlen_k * row + group * problem.seqlen_q * (row + acc)  # k, v; q, dout, dq
    waves = -(-WAVES_TOGETHER * device.num_sms // num_k_blocks)
    return heads_together(head_bytes, L2_BYTES, HEADS_TOGETHER, waves)


def _shared_keys(
    problem: Problem, device: Device, key_blocks: int, num_k_blocks: int, of_one: int
) -> SharedKeys | None:
    """The blocks of the last wave where it leaves much of the GPU idle: as many blocks as multiprocessors share them.

    Without a mask alone, where every key block has the same number of steps, `of_one`.
    """
    if not problem.mask.is_full:
        return None
    parts, heads_kv = -(-num_k_blocks // key_blocks), problem.batch * problem.heads_kv
    whole = parts * heads_kv // device.num_sms * device.num_sms
    first = whole // parts * num_k_blocks + whole % parts * key_blocks
    count = heads_kv * num_k_blocks - first
    steps = max(-(-count * of_one // device.num_sms), SHARED_STEPS)
    # why: to add up dk and dv costs about as much as SHARED_STEPS.
    if count == 0 or steps + SHARED_STEPS > min(key_blocks, num_k_blocks) * of_one or count * of_one >= 2**31:
        return None
    return SharedKeys(whole, first, count, steps)


def _rows_plan(problem: Problem, device: Device, tiles: tuple[WarpgroupRowsTile, ...], deterministic: bool) -> Plan:
    """delta, then dq, dk and dv one after the other; the same whether it is to be deterministic, as they always are."""
    num_q_blocks, num_k_blocks = -(-problem.seqlen_q // tiles[0].block_q), -(-problem.seqlen_k // tiles[1].block_k)
    blocks = problem.batch * problem.heads_q * num_q_blocks, problem.batch * problem.heads_kv * num_k_blocks
    stats_rows = _stats_rows(problem)
    launches = [_delta(problem, device, stats_rows)]
    for tile in tiles:
        variant = _warpgroup_variant(problem, device, f"backward_{tile.gradient}", tile)
        launches.append(Launch(variant, blocks[tile.gradient != "dq"]))
    check_grid(problem, max(launch.num_blocks for launch in launches))
    parts = [2 * problem.batch * problem.heads_q * stats_rows, 0, 0, 0, 0]
    return replace(
        _gradients(problem, device, tuple(launches), num_q_blocks, parts),
        stats_rows=stats_rows,
        num_k_blocks=num_k_blocks,
        heads_together=1 if problem.mask.is_full else HEADS_TOGETHER,
        deterministic=deterministic,
    )


def _delta(problem: Problem, device: Device, stats_rows: int) -> Launch:
    arch = compile_arch("sm80", device)
    variant = Variant("delta", "portable/delta.cu", arch, problem.dtype, problem.out_dtype)
    return Launch(variant, problem.batch * problem.heads_q * stats_rows // DELTA_ROWS)


def _stats_rows(problem: Problem, block_q: int = STATS_ROWS) -> int:
    """Queries of a head in the workspace, which holds whole tiles of every kernel."""
    return _rounded_up(_rounded_up(problem.seqlen_q, block_q), STATS_ROWS)


def _rounded_up(length: int, step: int) -> int:
    return -(-length // step) * step


def _warpgroup_variant(
    problem: Problem, device: Device, op: str, tile: WarpgroupBackwardTile | WarpgroupRowsTile
) -> Variant:
    source = "sm90/backward.cu" if isinstance(tile, WarpgroupBackwardTile) else "sm90/backward_rows.cu"
    arch, capped = compile_arch("sm90", device), problem.softcap > 0.0
    return Variant(op, source, arch, problem.dtype, problem.dtype, tile=tile, softcap=capped)


def _gradients(
    problem: Problem, device: Device, launches: tuple[Launch, ...], num_q_blocks: int, parts: list[int]
) -> Plan:
    """The plan of a backward whose second launch is the main one; `parts` of the workspace in floats."""
    begins = [4 * sum(parts[:n]) for n in range(len(parts))]
    return Plan(
        kernel=launches[1].variant.name,
        device=device.name,
        launches=launches,
        num_q_blocks=num_q_blocks,
        num_slices=1,
        out_bytes=result_bytes(problem, "backward"),
        lse_bytes=0,
        workspace_bytes=4 * sum(parts),
        flops=flops(problem, "backward"),
        workspace=tuple(begin if part else -1 for begin, part in zip(begins, parts, strict=True)),
    )


def _num_splits(problem: Problem, num_k_blocks: int, resident: int) -> int:
    """Among how many blocks the query heads of a kv head are shared out: as many as fill the GPU some times over.

    A block of keys takes all heads of its group, so that dk and dv stay in registers; with few keys most of the GPU
    would idle. The accumulators this costs are those of few keys: they stay under twice WAVES waves of blocks.
    """
    group = problem.heads_q // problem.heads_kv
    wanted = min(group, -(-WAVES * resident // max(num_k_blocks, 1)))
    return -(-group // -(-group // wanted))  # each takes as many heads as any other, but perhaps the last
