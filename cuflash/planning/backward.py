"""Planner of backward: the choice of its kernels."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product

from ..problem.problem import Problem
from . import tiles_sm90
from .backward_schedule import KEY_ROWS, choose_sharing_rows, count_key_blocks
from .backward_sm80 import sm80_plan
from .backward_sm90 import cluster_plan, dq_dkv_plan, dq_dkv_variant, listed_plan, warpgroup_plan
from .block_mask import is_block_sparse
from .delta import changes_weights
from .device import Device
from .hopper import HOPPER, reason_against
from .plan import Plan, blocks_of
from .variant import Variant

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
                return listed_plan(problem, device, tile.for_varlen(), lengths)
            return warpgroup_plan(problem, device, tile)
        shares = choose_sharing_rows(problem, device, rows[1].block_q)
        if not _has_few_keys(problem, device, 2 if shares else 1):
            candidate = cluster_plan(problem, device)
            if candidate is not None and not any(launch.variant in avoided for launch in candidate.launches):
                return candidate
            return dq_dkv_plan(problem, device, rows, shares=shares)
        reason = few_keys
    return sm80_plan(problem, device, reason if device.capability == HOPPER else None)


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
                candidate = warpgroup_plan(problem, device, tile, is_sparse)
            else:
                candidate = listed_plan(problem, device, tile.for_varlen(), lengths)
            if not any(launch.variant in avoided for launch in candidate.launches):
                return candidate
    rows = []
    for tiles in tiles_sm90.choose_mod_dq_dkv(*dims, capped):
        fitting = (
            (tile, is_sparse)
            for is_sparse, tile in product(ways, tiles)
            if dq_dkv_variant(problem, device, tile, is_sparse) not in avoided
        )
        if (fits := next(fitting, None)) is None:
            return None
        rows.append(fits)
    taken, skipping = zip(*rows, strict=True)
    return dq_dkv_plan(problem, device, taken, skipping)
