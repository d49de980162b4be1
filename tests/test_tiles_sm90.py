"""The table of Hopper tiles: rows that fit, the choice among them, and which operands the copy engine can address."""

from __future__ import annotations

from itertools import product

import pytest

from cuflash.device import KNOWN
from cuflash.tiles_sm90 import TILES, WarpgroupTile, allows_tma, choose

MOST = KNOWN["sm_90"].smem_per_block
MANY = float("inf")
CAPPED = (False, True)
LSE_ROWS = dict.fromkeys(choose("lse", row.head_dim, 0, MANY, capped) for row in TILES for capped in CAPPED)


def name_of(row: WarpgroupTile) -> str:
    more = {None: "", True: "-capped", False: "-uncapped"}[row.softcap]
    return f"{row.head_dim}-{row.head_dim_v}-{row.block_q}{more}"


each_row = pytest.mark.parametrize("row", [*TILES, *LSE_ROWS], ids=name_of)


@each_row
def test_a_row_fits_a_block_and_its_registers(row: WarpgroupTile) -> None:
    assert row.smem_bytes(2) <= MOST == 227 * 1024
    assert row.smem_bytes(2) % 1024 == 0
    groups = row.block_q // 64
    assert groups in (2, 3)  # that compute
    assert row.warps == 4 * (groups + 1)
    assert row.block_q % 64 == row.block_k % 16 == row.head_dim % 32 == row.head_dim_v % 32 == 0
    assert max(row.block_q, row.block_k) <= 256  # the most rows of a box
    # scores, weights and output in the registers of a thread
    assert row.block_k // 2 + row.block_k // 4 + row.head_dim_v // 2 < (240 if groups == 2 else 160)


@each_row
def test_the_ring_holds_what_is_in_use_and_one_more(row: WarpgroupTile) -> None:
    skips = row.block_q > row.block_k  # a warpgroup then holds a v while it passes over a k and waits for the next
    assert row.stages >= (3 + skips if row.head_dim_v else 2)
    assert 1 <= row.q_stages <= 2
    assert row.q_columns % 16 == 0
    assert 0 <= row.q_columns <= row.head_dim
    assert (row.out_panels > 0) == (row.head_dim_v > 0)


def test_a_stage_or_a_panel_more_is_as_much_shared_memory_as_it_holds() -> None:
    def smem(**more: int) -> int:
        return WarpgroupTile(**{"head_dim": 192, "head_dim_v": 128, "block_q": 128, "block_k": 96, "stages": 2,
                                "q_stages": 1, "q_columns": 0, "out_panels": 1, **more}).smem_bytes(2)  # fmt: skip

    panel = 128
    assert smem(stages=6) - smem() == 4 * 96 * 3 * panel  # the wider of k and v, in panels of 64 columns
    assert smem(head_dim=256) - smem() == (128 + 2 * 96) * panel
    assert smem(head_dim_v=192) == smem()
    assert smem(q_stages=2) - smem() == 128 * 3 * panel
    assert smem(out_panels=2) - smem() == 128 * panel
    assert smem(q_columns=192) == smem()


def covers(row: WarpgroupTile, head_dim: int, head_dim_v: int, capped: bool) -> bool:
    return head_dim <= row.head_dim and head_dim_v <= row.head_dim_v and row.softcap in (None, capped)


def test_every_row_is_chosen_for_its_own_head_dims_and_scores() -> None:
    for row, capped in product(TILES, CAPPED):
        found = choose("forward", row.head_dim, row.head_dim_v, row.max_keys or MANY, capped)
        assert (found == row) == (row.softcap in (None, capped))
    assert len({(row.head_dim, row.head_dim_v, row.max_keys, row.softcap) for row in TILES}) == len(TILES)


@pytest.mark.parametrize("capped", CAPPED)
def test_the_first_row_that_covers_the_head_dims_is_chosen_and_none_past_the_last(capped: bool) -> None:
    for dims in product(range(1, 260, 3), range(1, 260, 3)):
        covering = [row for row in TILES if covers(row, *dims, capped)]
        found = choose("forward", *dims, 100.0, capped)
        assert found == (covering[0] if covering else None)
        assert (found is None) == (max(dims) > 256)


@pytest.mark.parametrize("capped", CAPPED)
def test_a_row_for_few_keys_is_chosen_up_to_its_limit(capped: bool) -> None:
    limited = [row for row in TILES if row.max_keys is not None and row.softcap in (None, capped)]
    assert limited
    for row in limited:
        assert row.max_keys is not None
        dims = row.head_dim, row.head_dim_v
        assert choose("forward", *dims, 0.5, capped) == choose("forward", *dims, row.max_keys, capped) == row
        beyond = choose("forward", *dims, row.max_keys + 0.5, capped)
        assert beyond is not None
        assert beyond != row
        assert (beyond.head_dim, beyond.head_dim_v, beyond.max_keys) == (*dims, None)


@pytest.mark.parametrize("capped", CAPPED)
def test_lse_has_the_row_of_forward_for_many_keys_without_v(capped: bool) -> None:
    for head_dim in range(1, 257):
        row = choose("lse", head_dim, 0, MANY, capped)
        assert row is not None
        assert (row.head_dim_v, row.out_panels, row.ping_pong, row.max_keys) == (0, 0, False, None)
        assert choose("lse", head_dim, 0, 1.0, capped) == row  # for any number of keys
        of_forward = choose("forward", head_dim, 1, MANY, capped)
        assert of_forward is not None
        assert head_dim <= row.head_dim == of_forward.head_dim
        assert (row.block_q, row.block_k, row.stages) == (of_forward.block_q, of_forward.block_k, of_forward.stages)
    assert choose("lse", 257, 0, MANY, capped) is None


SHAPE = (2, 300, 4, 64)
TMA = {
    "dense": (SHAPE, (76800, 256, 64, 1), True),
    "heads_first": (SHAPE, (76800, 64, 19200, 1), True),
    "a_slice_of_wider_rows": (SHAPE, (4 * 300 * 72, 4 * 72, 72, 1), True),
    "zero_batch_stride": (SHAPE, (0, 256, 64, 1), False),
    "zero_head_stride": (SHAPE, (76800, 256, 0, 1), False),
    "reversed": (SHAPE, (76800, -256, 64, 1), False),
    "odd_rows": (SHAPE, (76800, 257, 64, 1), False),
    "rows_of_4_elements": (SHAPE, (76800, 252, 64, 1), False),
    "rows_of_8_elements": (SHAPE, (76800, 264, 8, 1), True),
    "near": (SHAPE, (2**39 - 8, 256, 64, 1), True),
    "far": (SHAPE, (2**39, 256, 64, 1), False),
    "length_1_of_no_stride": ((1, 1, 1, 33), (0, 0, 0, 1), True),
    "length_1_of_any_stride": ((1, 300, 1, 64), (-7, 64, 3, 1), True),
    "length_2_of_no_stride": ((1, 2, 1, 64), (0, 0, 0, 1), False),
}


@pytest.mark.parametrize("name", TMA)
def test_tma_takes_positive_multiples_of_16_bytes_below_2_to_the_40(name: str) -> None:
    shape, strides, allowed = TMA[name]
    assert allows_tma(shape, strides) is allowed


def test_tma_judges_strides_in_bytes() -> None:
    assert allows_tma(SHAPE, (76800, 260, 64, 1), 4)
    assert not allows_tma(SHAPE, (76800, 260, 64, 1), 2)
    assert not allows_tma(SHAPE, (2**38, 256, 64, 1), 4)
