"""Tables of the mma.sync tiles: the row chosen at the edges of each row, and coverage of known GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from plans import ARCHS, DTYPES
from plans import problem as make_problem
from variants import edges

from cuflash.planning.device import DEVICES, Device
from cuflash.planning.planner import plan as make_plan
from cuflash.planning.tiles_sm80 import BACKWARD, DECODE, DQ, SMEM_RESERVED, TILES, choose
from cuflash.problem.dtypes import DTYPES as TABLE

TABLES = {"forward": TILES, "backward": BACKWARD, "dq": DQ}
ROWS = [
    pytest.param(dtype, rows[dtype], row, id=f"{table}-{dtype}-{number}")
    for table, rows in TABLES.items()
    for dtype in DTYPES
    for number, row in enumerate(rows[dtype])
]


def tightest(row: Any, itemsize: int) -> Device:
    """Returns the GPU with the least shared memory that a row fits `blocks_per_sm` times."""
    smem = row.smem_bytes(itemsize)
    return replace(DEVICES["sm_80"], smem_per_block=smem, smem_per_sm=row.blocks_per_sm * (smem + SMEM_RESERVED))


@pytest.mark.parametrize(("dtype", "rows", "row"), ROWS)
def test_a_row_is_chosen_up_to_its_head_dims_and_down_to_its_shared_memory(
    dtype: str, rows: Sequence[Any], row: Any
) -> None:
    if not getattr(row, "flash2_only", False):  # a row for all algorithms may stand behind one for flash2
        rows = [other for other in rows if not getattr(other, "flash2_only", False)]
    itemsize = TABLE[dtype].itemsize
    device, most_v = tightest(row, itemsize), row.head_dim_v * row.max_slices
    assert choose(rows, itemsize, row.head_dim, most_v, device) is row
    assert choose(rows, itemsize, row.head_dim - 31, most_v, device) is row
    for dims in ((row.head_dim + 1, most_v), (row.head_dim, most_v + 1)):
        other = choose(rows, itemsize, *dims, device)
        assert other is not row
        if other is not None:
            assert other.head_dim >= dims[0]
            assert other.head_dim_v * other.max_slices >= dims[1]
    # With a byte less, the row does not fit, or is taken only if no smaller row has the same head dims.
    smaller = replace(device, smem_per_block=device.smem_per_block - 1)
    other = choose(rows, itemsize, row.head_dim, most_v, smaller)
    assert other is None or other.smem_bytes(itemsize) <= smaller.smem_per_block
    crowded = replace(device, smem_per_sm=device.smem_per_sm - 1)
    alike = [other for other in rows if (other.head_dim, other.head_dim_v) == (row.head_dim, row.head_dim_v)]
    assert (choose(rows, itemsize, row.head_dim, most_v, crowded) is row) == (row is alike[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", ARCHS)
def test_known_gpus_have_tiles_for_head_dims_up_to_256(arch: str, dtype: str) -> None:
    device, itemsize = DEVICES[arch], TABLE[dtype].itemsize
    dims = {dim for of_hopper in (False, True) for dim in edges(dtype, of_hopper) if dim <= 256}
    for head_dim, head_dim_v in {(a, b) for a in dims for b in dims} | {(dim, dim) for dim in range(1, 257)}:
        for rows in (TILES, BACKWARD, DQ):
            tile = choose(rows[dtype], itemsize, head_dim, head_dim_v, device)
            assert tile.head_dim >= head_dim
            assert tile.head_dim_v * tile.max_slices >= head_dim_v
            assert tile.smem_bytes(itemsize) <= device.smem_per_block
        for algorithm in ("flash1", "flashd"):
            plan = make_plan(make_problem(head_dim, head_dim_v, dtype=dtype, algorithm=algorithm), device)
            assert not plan.variant.tile.flash2_only


def test_no_tile_of_forward_reaches_farther_than_its_docstring_says() -> None:
    for row in (row for table in (TILES, DECODE) for rows in table.values() for row in rows):
        assert max(row.block_q, row.block_k) <= 128
