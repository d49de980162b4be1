"""Planner of backward with sm80 kernels, for any GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import UnsupportedError
from ..problem.dtypes import DTYPES
from ..problem.problem import Problem
from ..problem.seqlen_info import PADDED_SLOT
from . import tiles_sm80
from .backward_schedule import HEADS_IN_L2, choose_splits
from .block_mask import is_block_sparse, with_mask_tiles
from .delta import delta_launch, stats_rows_of
from .device import Device
from .mod_code import ModCode, make_mod_code
from .plan import Launch, Plan, blocks_of, make_plan, make_variant
from .tiles_sm80 import BackwardTile, Tile
from .variant import PORTABLE_THREADS, Variant

ACC_ROWS = 16  # rows of a tile of the accumulators
ACC_OF_THREAD = 16  # elements for each thread of the convert kernel


def sm80_plan(problem: Problem, device: Device, fallback: str | None) -> Plan:
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
        launches += [
            Launch(variant("backward", "sm80/backward.cu", tile, dkdv_code), num_blocks, keyed),
            convert_launch(problem, device, workspace, tile.head_dim, tile.head_dim_v, splits),
        ]
    return make_plan(problem, device, *with_mask_tiles(problem, device, launches, workspace), fallback)


def convert_launch(
    problem: Problem, device: Device, workspace: Mapping[str, int], head_dim: int, head_dim_v: int, splits: int = 1
) -> Launch:
    """Returns the launch of convert, the last kernel of backward where thread blocks add to accumulators.

    workspace: the floats of dq_acc, and of dk_acc and dv_acc if blocks share keys. head_dim, head_dim_v: of the tile.
    """
    threads = workspace["dq_acc"] // ACC_OF_THREAD
    threads += (workspace.get("dk_acc", 0) + workspace.get("dv_acc", 0)) // (splits * ACC_OF_THREAD)
    variant = make_variant(problem, device, "convert", "portable/convert.cu", accumulates=problem.op.accumulates)
    padded = {"splits": splits, "padded_dim": head_dim, "padded_dim_v": head_dim_v}
    return Launch(variant, blocks_of(threads, PORTABLE_THREADS), padded)
