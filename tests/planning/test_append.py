"""Plan of `append_kv`: a thread for each piece of a row, and the fields of the arrays."""

from __future__ import annotations

from typing import Any

import pytest
from plans import DTYPES
from variants import append_of

from cuflash.planning.device import DEVICES
from cuflash.planning.planner import plan as make_plan
from cuflash.problem.dtypes import DTYPES as TABLE
from cuflash.units import memory

H100 = DEVICES["sm_90"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_cover_every_element_by_pieces_that_do_not_cross_rows(dtype: str) -> None:
    step = 16 // TABLE[dtype].itemsize
    for rows, queries, dims in ((1, 0, (64, 64)), (2, 3, (64, 40)), (33, 1, (7, 512)), (100, 100, (1, 3))):
        for pairs in {0, 1, dims[0] // 4, dims[0] // 2} - ({1} if dims[0] < 2 else set()):
            plan = make_plan(append_of(dtype, *dims, rows=rows, queries=queries if pairs else 0, pairs=pairs), H100)
            (launch,) = plan.launches
            rotated = len(range(0, pairs, step)) + len(range(2 * pairs, dims[0], step))
            copied = len(range(0, dims[1], step))
            assert (launch.fields["pieces"], launch.fields["pieces_v"]) == (rotated, copied)
            keys, threads = launch.fields["num_key_blocks"], launch.variant.num_threads
            assert (keys - 1) * threads < 2 * rows * 2 * (rotated + copied) <= keys * threads
            more = launch.num_blocks - keys
            assert (more - 1) * threads < (2 * queries * 4 * rotated if pairs else 0) <= more * threads
            assert (plan.workspace_bytes, plan.flops) == (0, 0)
    assert make_plan(append_of(dtype, rows=0), H100).launches[0].num_blocks == 0


def test_one_kernel_serves_every_shape_place_and_rotation() -> None:
    ways: tuple[dict[str, Any], ...] = ({}, {"pairs": 8}, {"pairs": 8, "wide": True, "rotary_interleaved": True},
                                        {"page_size": 16}, {"head_dim": 9, "head_dim_v": 300})  # fmt: skip
    variants = {make_plan(append_of("bfloat16", **way), H100).launches[0].variant for way in ways}
    assert [variant.name for variant in variants] == ["append_kv_portable_bf16"]


def test_the_kernel_gets_places_and_tables() -> None:
    def fields(**way: Any) -> dict[str, int]:
        return dict(make_plan(append_of("float16", **way), H100).launches[0].fields)

    rows, pages = fields(), fields(page_size=16)
    assert (rows["num_pages"], rows["page_size"], rows["max_pages"], rows["page_table_stride"]) == (2, 40, 1, 0)
    assert (pages["num_pages"], pages["page_size"], pages["max_pages"], pages["page_table_stride"]) == (9, 16, 5, 5)
    assert (rows["rotary_dim"], rows["positions"], rows["wide_table"]) == (0, 0, 0)
    half, wide = fields(pairs=8), fields(pairs=8, wide=True, rotary_interleaved=True, q_same_position=True)
    assert (half["rotary_dim"], half["positions"], half["rotary_cos_stride"], half["wide_table"]) == (16, 50, 8, 0)
    assert (half["interleaved"], half["q_same_position"]) == (0, 0)
    assert (wide["interleaved"], wide["q_same_position"], wide["wide_table"]) == (1, 1, 1)


def test_the_plan_can_be_read() -> None:
    for queries, out_bytes in ((0, 0), (3, 2 * 3 * 4 * 64 * 2)):
        plan = make_plan(append_of("float16", queries=queries, pairs=8), H100)
        assert plan.kernel == "append_kv_portable_fp16"
        assert (plan.out_bytes, plan.lse_bytes) == (out_bytes, 0)
        assert f"out {memory(out_bytes)}," in str(plan)
