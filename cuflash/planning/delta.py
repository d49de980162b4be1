"""Launch of delta, the first kernel of backward, and sizes of its results."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..problem.problem import Problem
from ..problem.seqlen_info import PADDED_SLOT
from .device import Device
from .plan import Launch, blocks_of, make_variant
from .tile import rounded_up

DELTA_ROWS = 32  # queries of a thread block
# With varlen, where a thread block first searches for its sequence: most heads of a block, and fewest blocks of an SM.
DELTA_HEADS, DELTA_BLOCKS = 8, 16
# Words of a list entry for a block of rows, without and with mods: common/visible_rows.cuh.
BLOCK_WORDS, MOD_BLOCK_WORDS = 16, 20
STATS_ROWS = 128  # the largest block_q of any kernel


def changes_weights(problem: Problem) -> bool:
    """Returns True if score_mod, mask_mod, bias or dropout change weights. Sinks do not, as lse includes them."""
    mod_spec = problem.op.mod_spec
    return mod_spec is not None and not (mod_spec.score is mod_spec.mask is None and not mod_spec.drops)


def block_words(problem: Problem) -> int:
    """Returns the words of a list entry that delta writes for a block of rows."""
    return MOD_BLOCK_WORDS if changes_weights(problem) else BLOCK_WORDS


def delta_launch(problem: Problem, device: Device, stats_rows: int, stats_step: int, **fields: int) -> Launch:
    """Returns the launch of delta. stats_step: 2 if lse and delta of a query are adjacent, 1 if each has a row.

    For sm90 kernels, whose stats_step is 1, delta also lists the blocks of variable-length sequences.
    """
    varlen = problem.seqlen_info
    lists_seqlens = varlen is not None and stats_step == 1 and changes_weights(problem)
    variant = make_variant(
        problem, device, "delta", "portable/delta.cu", out_dtype=problem.out_dtype, lists_seqlens=lists_seqlens,
        accumulates=problem.op.accumulates, delta=problem.op.delta,
    )  # fmt: skip
    fields |= {"stats_rows": stats_rows, "stats_step": stats_step, "stats_delta": 1 if stats_step == 2 else stats_rows}
    blocks, each = problem.heads_q * (stats_rows // DELTA_ROWS), 1
    if varlen is None:
        return Launch(variant, problem.batch * blocks, fields)
    each = max(1, min(DELTA_HEADS, blocks // (DELTA_BLOCKS * device.num_sms)))
    of_slots = 1 + fields["num_slots"] if "num_slots" in fields else 0
    num_blocks = of_slots + blocks_of(problem.heads_q, each) * (stats_rows // DELTA_ROWS)
    return Launch(variant, num_blocks, fields | {"heads_each": each})


def stats_rows_of(problem: Problem, block_q: int = STATS_ROWS) -> int:
    """Returns a head's rows in the workspace: queries rounded up to tiles of all kernels; for varlen, to slots."""
    if (varlen := problem.seqlen_info) is not None:
        if max(varlen.num_slots(side, problem.batch, PADDED_SLOT) for side in "qk") * PADDED_SLOT >= 2**31:
            raise UnsupportedError(
                f"{varlen.batch_q} x {varlen.rows_q} queries and {varlen.batch_k} x {varlen.rows_k} keys, with each "
                f"sequence rounded up to {PADDED_SLOT}, are {2**31} rows or more; split the batch into several calls"
            )
        return varlen.num_slots("q", problem.batch, PADDED_SLOT) * PADDED_SLOT
    return rounded_up(rounded_up(problem.seqlen_q, block_q), STATS_ROWS)
