"""Plans of the backward that Hopper has of its own: which problems get it, its launches and its memory."""

from __future__ import annotations

import itertools
from dataclasses import astuple, replace
from typing import Any

import pytest
from test_plan import problem
from test_plan_backward import DETERMINISTIC, rounded_up

from cuflash.device import KNOWN, Device
from cuflash.errors import UnsupportedError
from cuflash.plan import plan
from cuflash.plan_backward import DELTA_ROWS, SHORT_KEYS, SHORT_WAVES, STATS_ROWS
from cuflash.problem import Problem
from cuflash.tiles_sm90 import (
    BACKWARD,
    GRADIENTS,
    PANEL_COLUMNS,
    ROWS,
    WarpgroupBackwardTile,
    WarpgroupRowsTile,
    choose_backward,
    choose_rows,
)
from cuflash.variant import MAX_GRID, Plan, SharedKeys

H100 = KNOWN["sm_90"]


def tile_of(made: Plan) -> WarpgroupBackwardTile | WarpgroupRowsTile | None:
    """The tile of Hopper's main kernel; None for another one."""
    assert made.variant is not None
    tile = made.variant.tile
    rows = isinstance(tile, WarpgroupRowsTile)
    hopper = isinstance(tile, WarpgroupBackwardTile) or rows
    assert hopper == made.variant.of_warpgroups == (made.variant.arch == "sm_90a")
    assert hopper == made.variant.source.startswith("sm90/backward")
    assert rows == (made.variant.source == "sm90/backward_rows.cu")
    return tile if isinstance(tile, (WarpgroupBackwardTile, WarpgroupRowsTile)) else None


def check_hopper(of: Problem, deterministic: bool = False, device: Device = H100) -> Plan:
    """All that must hold of the plan, which is Hopper's."""
    made = plan(of, "backward", device, deterministic)
    tile = tile_of(made)
    assert isinstance(tile, WarpgroupBackwardTile)
    assert made.variant is not None
    assert (tile.head_dim >= of.head_dim, tile.head_dim_v >= of.head_dim_v) == (True, True)
    assert (made.variant.op, made.variant.softcap) == ("backward", of.softcap > 0.0)
    assert made.variant.smem_bytes <= device.smem_per_block
    delta, main = made.launches
    heads, heads_kv = of.batch * of.heads_q, of.batch * of.heads_kv
    stats_rows = rounded_up(rounded_up(of.seqlen_q, tile.block_q), STATS_ROWS)
    assert (delta.variant.op, delta.variant.out_dtype) == ("delta", of.out_dtype)
    assert delta.num_blocks * DELTA_ROWS == heads * stats_rows
    assert made.num_k_blocks == -(-of.seqlen_k // tile.block_k)
    parts, whole_blocks, count = -(-made.num_k_blocks // made.key_blocks), main.num_blocks, 0
    if made.shared is not None:
        assert of.mask.is_full
        assert not deterministic
        whole_blocks, first, count, steps = astuple(made.shared)
        assert first == whole_blocks // parts * made.num_k_blocks + whole_blocks % parts * made.key_blocks
        assert first + count == heads_kv * made.num_k_blocks
        of_one = made.num_q_blocks * of.heads_q // of.heads_kv
        assert 0 < count * of_one - (main.num_blocks - whole_blocks - 1) * steps <= steps  # none is without
        assert main.num_blocks - whole_blocks <= device.num_sms
        assert steps < made.key_blocks * of_one
        assert whole_blocks % device.num_sms == 0
        assert 0 < heads_kv * parts - whole_blocks < device.num_sms
    else:
        assert whole_blocks == heads_kv * parts
    assert (made.num_q_blocks - 1) * tile.block_q < of.seqlen_q <= made.num_q_blocks * tile.block_q
    assert (made.num_k_blocks - 1) * tile.block_k < of.seqlen_k <= made.num_k_blocks * tile.block_k
    assert (made.num_splits, made.num_slices, made.lse_bytes) == (1, 1, 0)
    # the workspace: stats, then dq in float32 by whole tiles and panels, shared dk and dv, then a counter for each
    tiles = heads * made.num_q_blocks
    dq = 8 * heads * stats_rows
    dk = dq + 4 * tiles * tile.block_q * rounded_up(tile.head_dim, PANEL_COLUMNS)
    dv = dk + 4 * count * tile.block_k * tile.head_dim
    turns = dv + 4 * count * tile.block_k * tile.head_dim_v
    assert made.workspace == (0, dq, *((dk, dv) if count else (-1, -1)), turns)
    assert made.workspace_bytes == turns + 4 * (tiles + count)
    assert dq % 128 == dk % 128 == dv % 16 == turns % 4 == 0  # of whole tiles the copy engine wants 16
    assert made.deterministic == deterministic
    if deterministic:
        assert made.heads_together == (16 if of.mask.is_full else 32)
    else:
        assert 1 <= made.heads_together <= (1 if of.mask.is_full else 16)
    return made


@DETERMINISTIC
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pair_of_head_dims_up_to_128_that_tma_can_address_has_a_tile(dtype: str, deterministic: bool) -> None:
    for dims in itertools.product(range(8, 129, 8), repeat=2):
        check_hopper(problem(*dims, dims=(2, 300, 500, 2, 2), dtype=dtype), deterministic)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 60},
        {"head_dim_v": 60},
        {"dtype": "float32"},
        {"causal": True, "diagonal_offset": -300},  # nothing is seen
        {"dims": (0, 300, 500, 2, 2)},
        {"dims": (2, 0, 500, 2, 2)},
        {"dims": (2, 300, 0, 2, 2)},
        {"dims": (2, 300, 2**23, 2, 2)},  # more key blocks than are counted
    ],
    ids=str,
)
def test_other_problems_have_the_generic_kernels(changes: dict[str, Any]) -> None:
    made = plan(problem(**{"dims": (2, 300, 500, 2, 2)} | changes), "backward", H100)
    assert tile_of(made) is None


def test_operands_that_tma_cannot_address_have_the_generic_kernels() -> None:
    of = problem(dims=(2, 300, 500, 2, 2))
    check_hopper(of)
    assert tile_of(plan(of, "backward", H100, False, aligned=False)) is None
    for operand in range(3):
        strides = list(of.strides)
        batch, seqlen, *rest = strides[operand]
        for bad in ((batch, -seqlen, *rest), (batch, seqlen + 1, *rest), (0, seqlen, *rest)):
            strides[operand] = bad
            assert tile_of(plan(replace(of, strides=tuple(strides)), "backward", H100)) is None


@pytest.mark.parametrize("arch", [arch for arch in KNOWN if arch != "sm_90"])
def test_other_gpus_have_the_generic_kernels(arch: str) -> None:
    assert tile_of(plan(problem(dims=(2, 300, 500, 2, 2)), "backward", KNOWN[arch])) is None


@DETERMINISTIC
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 2**20 + 1])
def test_the_grids_cover_every_query_and_key(length: int, deterministic: bool) -> None:
    for dims, causal in itertools.product((64, 96, 128), (False, True)):
        for lengths in ((length, 77), (77, length)):
            check_hopper(problem(dims, dims, dims=(3, *lengths, 2, 2), causal=causal), deterministic)


def test_large_groups_with_few_keys_are_split_by_the_generic_kernel_unless_deterministic() -> None:
    for seqlen_k, generic in ((128 * 65, True), (128 * 66, False)):  # half of the GPU
        dims = 1, 300, seqlen_k, 8, 1
        for of in (problem(dims=dims, causal=True), problem(256, 256, dims=dims)):
            assert (tile_of(plan(of, "backward", H100)) is None) == generic
            assert tile_of(plan(of, "backward", H100, True)) is not None
    check_hopper(problem(dims=(1, 300, 128, 1, 1)))
    assert check_hopper(problem(dims=(1, 300, 128, 8, 1))).shared is not None  # by blocks that share key blocks


def test_as_many_blocks_as_multiprocessors_share_what_the_last_wave_has() -> None:
    made = check_hopper(problem(128, 128, dims=(4, 4096, 4096, 16, 16)))
    assert made.shared == SharedKeys(15 * 132, 15 * 132, 68, 33)  # of 2048 key blocks of 64 tiles
    assert made.launches[1].num_blocks == 16 * 132
    made = check_hopper(problem(128, 128, dims=(1, 512, 512, 16, 16)))
    assert made.shared == SharedKeys(0, 0, 64, 4)
    # a whole wave, almost one, and a short one
    for dims in ((1, 4096, 128 * 132, 1, 1), (1, 4096, 128 * 131, 1, 1), (1, 256, 512, 16, 16)):
        assert check_hopper(problem(128, 128, dims=dims)).shared is None
    assert check_hopper(problem(128, 128, dims=(1, 512, 512, 16, 16)), deterministic=True).shared is None


def test_a_block_takes_several_key_blocks_of_short_heads_where_there_are_enough() -> None:
    of = problem(96, 96, dims=(64, 1024, 1024, 16, 16))
    assert check_hopper(of).key_blocks == 2
    assert check_hopper(of, deterministic=True).key_blocks == 1
    small = problem(64, 64, dims=(64, 1024, 1024, 16, 16))
    assert check_hopper(small).key_blocks == 4
    assert check_hopper(problem(64, 64, dims=(64, 1024, 1024, 16, 16), causal=True)).key_blocks == 2
    assert check_hopper(problem(96, 96, dims=(64, 1024, 1024, 16, 16), causal=True)).key_blocks == 1
    assert check_hopper(problem(96, 96, dims=(64, 1024, SHORT_KEYS + 1, 16, 16))).key_blocks == 1
    least = -(-SHORT_WAVES * H100.num_sms // 4)  # heads of 8 key blocks, two a block
    for heads, key_blocks in ((least, 2), (least - 1, 1)):
        assert check_hopper(problem(96, 96, dims=(1, 1024, 1024, heads, heads))).key_blocks == key_blocks
    assert check_hopper(problem(128, 128, dims=(64, 1024, 1024, 16, 16))).key_blocks == 1


@DETERMINISTIC
def test_no_length_stride_or_mask_is_part_of_what_is_compiled_but_whether_scores_are_capped(
    deterministic: bool,
) -> None:
    wanted = [each.variant for each in check_hopper(problem(dims=(2, 300, 500, 2, 2)), not deterministic).launches]
    for changes in ({"dims": (1, 1, 1, 2, 2)}, {"dims": (5, 999, 16384, 64, 8)}, {"causal": True},
                    {"window_size": (5, 6)}, {"softmax_scale": 0.7}):  # fmt: skip
        made = check_hopper(problem(**{"dims": (2, 300, 500, 2, 2)} | changes), deterministic)
        assert [each.variant for each in made.launches] == wanted
    capped = [each.variant for each in check_hopper(problem(dims=(2, 300, 500, 2, 2), softcap=3.0)).launches]
    assert capped == [wanted[0], replace(wanted[1], softcap=True, tile=capped[1].tile)]
    assert len({variant.name for variant in (*wanted, *capped)}) == 3


def test_more_blocks_than_a_launch_has_are_unsupported_with_a_way_out() -> None:
    most = MAX_GRID // (STATS_ROWS // DELTA_ROWS)
    check_hopper(problem(dims=(most, 1, 1, 1, 1)))
    with pytest.raises(UnsupportedError, match=rf"at most {MAX_GRID}.*Split the batch"):
        plan(problem(dims=(most + 1, 1, 1, 1, 1)), "backward", H100)


def test_rows_stand_in_order_and_the_first_that_covers_is_chosen() -> None:
    dims = [(row.head_dim, row.head_dim_v, -row.min_queries) for row in BACKWARD]
    assert dims == sorted(dims)
    for row in BACKWARD:
        for capped in (False, True) if row.softcap is None else (row.softcap,):
            for head_dims in ((0, 0), (31, row.head_dim_v - 8), (row.head_dim - 8, 31)):
                head_dim, head_dim_v = row.head_dim - head_dims[0], row.head_dim_v - head_dims[1]
                assert choose_backward(head_dim, head_dim_v, row.min_queries, capped) == row
        assert row.block_q % 16 == 0
        assert row.smem_bytes(2) <= H100.smem_per_block
    assert choose_backward(129, 64, 0, False) is choose_backward(64, 129, 0, False) is None


def test_keys_that_few_queries_see_have_their_own_tile() -> None:
    tiles = {}
    for seqlen_q, causal in ((8192, False), (8191, False), (8192, True), (16384, True)):
        of = problem(128, 128, dims=(2, seqlen_q, seqlen_q, 16, 16), causal=causal)
        tile = check_hopper(of).launches[1].variant.tile
        assert isinstance(tile, WarpgroupBackwardTile)
        tiles[seqlen_q, causal] = tile.block_q
    assert tiles == {(8192, False): 80, (8191, False): 64, (8192, True): 64, (16384, True): 80}


def test_what_heads_that_start_together_touch_stays_in_l2() -> None:
    def together(seqlen: int, heads: tuple[int, int] = (32, 32), head_dim: int = 128) -> int:
        of = problem(head_dim, head_dim, dims=(4, seqlen, seqlen, *heads), causal=True)
        return check_hopper(of).heads_together

    assert [together(seqlen) for seqlen in (1024, 4096, 8192, 16384, 2**17)] == [16, 16, 8, 4, 1]
    assert [together(seqlen, head_dim=64) for seqlen in (4096, 16384)] == [16, 8]
    # a kv head has four query heads, but one of 64 key blocks does not fill the GPU
    assert [together(seqlen, (32, 8)) for seqlen in (4096, 8192, 2**17)] == [16, 8, 1]


def check_rows(of: Problem, deterministic: bool = False) -> Plan:
    """The same of a plan with a kernel for each gradient."""
    made = plan(of, "backward", H100, deterministic)
    assert isinstance(tile_of(made), WarpgroupRowsTile)
    delta, *kernels = made.launches
    heads, heads_kv = of.batch * of.heads_q, of.batch * of.heads_kv
    assert (delta.variant.op, delta.variant.out_dtype) == ("delta", of.out_dtype)
    assert delta.num_blocks * DELTA_ROWS == heads * rounded_up(of.seqlen_q, STATS_ROWS)
    assert [each.variant.op for each in kernels] == ["backward_dq", "backward_dk", "backward_dv"]
    for each, gradient in zip(kernels, GRADIENTS, strict=True):
        tile = each.variant.tile
        assert isinstance(tile, WarpgroupRowsTile)
        assert (tile.gradient, each.variant.softcap) == (gradient, of.softcap > 0.0)
        assert (tile.head_dim >= of.head_dim, tile.head_dim_v >= of.head_dim_v) == (True, True)
        assert each.variant.smem_bytes <= H100.smem_per_block
        assert STATS_ROWS % tile.block_q == 0  # stats hold whole tiles
    assert made.num_q_blocks == -(-of.seqlen_q // 128)
    assert made.num_k_blocks == -(-of.seqlen_k // 128)
    blocks = heads * made.num_q_blocks, heads_kv * made.num_k_blocks
    assert tuple(each.num_blocks for each in kernels) == (*blocks, blocks[1])
    assert made.workspace == (0, -1, -1, -1, -1)
    assert made.workspace_bytes == 8 * heads * rounded_up(of.seqlen_q, STATS_ROWS)
    return made


@DETERMINISTIC
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_larger_head_dims_up_to_256_have_a_kernel_for_each_gradient(softcap: float, deterministic: bool) -> None:
    sizes = (8, 64, 128, 136, 192, 200, 256)
    for dims in itertools.product(sizes, sizes):
        if max(dims) > 128:
            more = {"dims": (2, 300, 500, 2, 2), "softcap": softcap, "causal": dims[0] == 256}
            made = check_rows(problem(*dims, **more), deterministic)
            other = check_rows(problem(*dims, **more), not deterministic)
            assert made.launches == other.launches


def test_the_rows_of_larger_head_dims_stand_in_order_and_one_of_each_gradient_is_chosen() -> None:
    dims = [(row.head_dim, row.head_dim_v) for row in ROWS]
    assert dims == sorted(dims)
    for head_dims, capped in itertools.product(dict.fromkeys(dims), (False, True)):
        chosen = choose_rows(*head_dims, capped)
        assert [tile.gradient for tile in chosen] == list(GRADIENTS)
        assert {(tile.head_dim, tile.head_dim_v) for tile in chosen} == {head_dims}
        assert all(tile.softcap in (None, capped) for tile in chosen)
        assert all(box == 32 and tile.columns % box == 0 for tile in chosen for box in tile.boxes)
    assert choose_rows(257, 64, False) == choose_rows(64, 257, True) == ()
    reached = [choose_rows(*head_dims, capped) for head_dims, capped in itertools.product(dims, (False, True))]
    assert set(itertools.chain(*reached)) == set(ROWS)
