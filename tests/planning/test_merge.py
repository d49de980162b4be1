"""Plan of `merge_states`: a thread for each 16 bytes of out. `test_planner` has the calls that it refuses."""

from __future__ import annotations

import pytest
from plans import DTYPES
from variants import merge_of

from cuflash.planning.device import DEVICES
from cuflash.planning.planner import plan as make_plan
from cuflash.problem.dtypes import DTYPES as TABLE

H100 = DEVICES["sm_90"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_cover_every_row_of_out_by_chunks_that_do_not_cross_rows(dtype: str) -> None:
    per_chunk = 16 // TABLE[dtype].itemsize
    for rows in (1, 8, 255, 256, 257):
        for head_dim_v in (1, 4, 5, 7, 8, 9, 64, 65):
            plan = make_plan(merge_of(dtype, head_dim_v, 3, rows), H100)
            (launch,) = plan.launches
            threads = launch.num_blocks * launch.variant.num_threads
            chunks = sum(1 for _ in range(rows) for _ in range(0, head_dim_v, per_chunk))
            assert threads - launch.variant.num_threads < chunks <= threads
            assert launch.fields["num_elements"] == rows * head_dim_v
            assert (launch.fields["num_states"], launch.fields["head_dim_v"]) == (3, head_dim_v)
            assert (plan.workspace_bytes, plan.flops) == (0, 0)
    assert make_plan(merge_of(dtype, 64, rows=0), H100).launches[0].num_blocks == 0
