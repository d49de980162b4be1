"""Plans of backward, made without a GPU: its kernels in order, tiles that fit, grids that reach every row, memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_plan import ARCHS, DTYPES, problem
from variants import edges

import cuflash
from cuflash.device import KNOWN, Device
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.plan import plan
from cuflash.plan_backward import DELTA_ROWS, STATS_ROWS
from cuflash.problem import ITEMSIZE, Problem
from cuflash.tiles_sm80 import BACKWARD, DQ, SMEM_RESERVED, TILES, BackwardTile, DqTile, Tile, choose
from cuflash.variant import MAX_GRID, Plan, Variant

DETERMINISTIC = pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "deterministic"])


def rounded_up(length: int, step: int) -> int:
    return -(-length // step) * step


def generic(of: Problem, device: Device = KNOWN["sm_90"], deterministic: bool = False) -> Plan:
    """The plan of what every GPU has; Hopper has kernels of its own for most problems."""
    return plan(of, "backward", device, deterministic, aligned=False)


def variants_of(made: Plan) -> list[Variant]:
    return [launch.variant for launch in made.launches]


def check_backward(made: Plan, of: Problem, device: Device, deterministic: bool) -> None:
    """All that must hold of the plan of a backward call."""
    delta, main, last = made.launches
    assert [delta.variant.op, main.variant.op, last.variant.op] == (
        ["delta", "backward_dkdv", "backward_dq"] if deterministic else ["delta", "backward", "convert"]
    )
    assert (made.kernel, made.device, made.variant) == (main.variant.name, device.name, main.variant)
    for variant in variants_of(made):
        assert (variant.arch, variant.dtype, variant.algorithm) == (device.arch, of.dtype, "flash2")
        assert variant.out_dtype == (of.out_dtype if variant.op == "delta" else of.dtype)
        assert variant.smem_bytes <= device.smem_per_block
        assert variant.num_threads % 32 == 0 < variant.num_threads <= 1024
        if variant.tile is not None:
            assert of.head_dim <= variant.tile.head_dim
            assert of.head_dim_v <= variant.tile.head_dim_v
    tile, heads_q = main.variant.tile, of.batch * of.heads_q
    assert isinstance(tile, BackwardTile)
    assert tile.with_dq is not deterministic
    stats_rows = rounded_up(of.seqlen_q, 128)
    assert delta.num_blocks * DELTA_ROWS == heads_q * stats_rows
    heads_kv, splits = of.batch * of.heads_kv, made.num_splits
    assert main.num_blocks * tile.block_k == splits * heads_kv * rounded_up(of.seqlen_k, tile.block_k)
    assert 1 <= splits <= (1 if deterministic else of.heads_q // of.heads_kv)
    workspace = 8 * heads_q * stats_rows
    begins = [0 if workspace else -1]
    if deterministic:
        assert isinstance(last.variant.tile, DqTile)
        block_q = last.variant.tile.block_q
        assert last.num_blocks * block_q == heads_q * rounded_up(of.seqlen_q, block_q)
        assert made.num_q_blocks * block_q == rounded_up(of.seqlen_q, block_q)
    else:
        of_split = heads_kv * rounded_up(of.seqlen_k, 16) if splits > 1 else 0
        dq = heads_q * rounded_up(of.seqlen_q, 16) * tile.head_dim
        parts = dq, of_split * tile.head_dim, of_split * tile.head_dim_v
        assert last.num_blocks == -(-sum(parts) // (16 * last.variant.num_threads))  # 16 elements a thread
        for part, copies in zip(parts, (1, splits, splits), strict=True):
            begins.append(workspace if part else -1)
            workspace += 4 * copies * part
    assert made.heads_together == (1 if of.mask.is_full else 16)
    assert made.workspace == (*begins, *[-1] * (5 - len(begins)))
    assert (made.key_blocks, made.deterministic) == (1, deterministic)
    assert (made.workspace_bytes, made.lse_bytes, made.num_slices) == (workspace, 0, 1)
    pairs = of.batch * of.heads_q * of.mask.num_visible()
    assert made.flops == 2 * pairs * (3 * of.head_dim + 2 * of.head_dim_v)


@DETERMINISTIC
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_pair_of_head_dims_up_to_256_has_tiles(arch: str, dtype: str, deterministic: bool) -> None:
    device, dims = KNOWN[arch], [dim for dim in edges(dtype) if dim <= 256]
    for head_dims in {*itertools.product(dims, dims), *((dim, dim) for dim in range(1, 257))}:
        of = problem(*head_dims, dtype=dtype)
        check_backward(generic(of, device, deterministic), of, device, deterministic)


@DETERMINISTIC
@pytest.mark.parametrize("head_dims", [(257, 257), (257, 64), (64, 257), (512, 512)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", ARCHS)
def test_head_dims_over_256_are_unsupported_with_a_way_out(
    arch: str, dtype: str, head_dims: tuple[int, int], deterministic: bool
) -> None:
    words = rf"\({head_dims[0]}, {head_dims[1]}\) in {dtype}.*{arch}.*1 to 256.*NumPy arrays"
    with pytest.raises(UnsupportedError, match=words):
        generic(problem(*head_dims, dtype=dtype), KNOWN[arch], deterministic)


@DETERMINISTIC
def test_float64_is_unsupported_with_a_way_out(deterministic: bool) -> None:
    with pytest.raises(UnsupportedError, match=r"float64.*float32, bfloat16.*NumPy"):
        generic(problem(dtype="float64"), KNOWN["sm_90"], deterministic)


@DETERMINISTIC
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 2**20 + 1])
def test_the_grids_cover_every_query_and_key(length: int, deterministic: bool) -> None:
    for dtype, (seqlen_q, seqlen_k) in itertools.product(DTYPES, ((length, 77), (77, length))):
        of = problem(64, 96, dims=(3, seqlen_q, seqlen_k, 6, 2), dtype=dtype, causal=True)
        check_backward(generic(of, KNOWN["sm_90"], deterministic), of, KNOWN["sm_90"], deterministic)


@DETERMINISTIC
def test_where_there_is_nothing_to_read_only_what_writes_is_launched(deterministic: bool) -> None:
    # launches are of delta, of dk and dv, of dq
    for dims, wanted in (
        ((0, 5, 7, 4, 2), [False, False, False]),
        ((2, 0, 7, 4, 4), [False, True, False]),
        ((2, 5, 0, 4, 2), [True, False, True]),
        ((2, 0, 0, 4, 2), [False, False, False]),
    ):
        of = problem(dims=dims)
        made = generic(of, KNOWN["sm_90"], deterministic)
        check_backward(made, of, KNOWN["sm_90"], deterministic)
        assert [launch.num_blocks > 0 for launch in made.launches] == wanted
        assert (made.workspace_bytes > 0) == wanted[0]


@DETERMINISTIC
def test_more_blocks_than_a_launch_has_are_unsupported_with_a_way_out(deterministic: bool) -> None:
    most = MAX_GRID // (STATS_ROWS // DELTA_ROWS)  # heads of one query, counted in blocks of delta
    made = plan(problem(dims=(most, 1, 1, 1, 1)), "backward", KNOWN["sm_90"], deterministic)
    assert MAX_GRID - 4 < max(launch.num_blocks for launch in made.launches) <= MAX_GRID
    # too many for delta, for dk and dv, and for delta again
    for dims in ((most + 1, 1, 1, 1, 1), (2**20, 1, 2**20, 1, 1), (2**20, 2**20, 1, 1, 1)):
        with pytest.raises(UnsupportedError, match=rf"batch {dims[0]} .*at most {MAX_GRID}.*Split the batch"):
            generic(problem(dims=dims), KNOWN["sm_90"], deterministic)


def test_memory_and_work_of_one_problem_in_numbers() -> None:
    of = problem(72, 96, dims=(2, 300, 500, 4, 2), causal=True, dtype="float16")
    made, fixed = (generic(of, deterministic=deterministic) for deterministic in (False, True))
    assert fixed.workspace_bytes == 8 * 2 * 4 * 384
    # 32 blocks of keys do not fill the GPU, so each head of a group gets its own, and its own share of dk and dv
    assert made.num_splits == 2
    assert made.workspace_bytes == 8 * 2 * 4 * 384 + 4 * 2 * 4 * 304 * 96 + 2 * 4 * 2 * 2 * 512 * (96 + 96)
    for each in (made, fixed, plan(of, "backward", None)):
        assert each.out_bytes == 2 * 2 * (300 * 4 * 72 + 500 * 2 * (72 + 96))
        assert each.lse_bytes == 0
        assert each.flops == 2 * 2 * 4 * sum(range(201, 501)) * (3 * 72 + 2 * 96)
    assert generic(replace(of, out_dtype="float32"), KNOWN["sm_90"]).out_bytes == made.out_bytes


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 32])
def test_the_heads_of_a_group_are_split_only_where_few_keys_would_leave_the_gpu_idle(group: int) -> None:
    device = KNOWN["sm_90"]
    for seqlen in (1, 300, 4096, 2**16):
        of = problem(128, 128, dims=(1, 64, seqlen, group, 1), dtype="bfloat16")
        made = generic(of, device)
        tile = made.launches[1].variant.tile
        assert isinstance(tile, BackwardTile)
        enough = 2 * device.num_sms * tile.blocks_per_sm
        key_blocks = made.launches[1].num_blocks // made.num_splits
        assert made.num_splits == 1 or key_blocks < enough
        assert made.num_splits == group or made.launches[1].num_blocks * 2 > enough
        heads = -(-group // made.num_splits)
        assert (made.num_splits - 1) * heads < group  # no split is without heads
        # what the splits cost is bounded, whatever the length
        extra = made.workspace_bytes - made.workspace[2] if made.workspace[2] >= 0 else 0
        assert extra <= 2 * enough * 4 * tile.block_k * (tile.head_dim + tile.head_dim_v)


ROWS = [pytest.param(dtype, row, id=f"{dtype}-{i}") for dtype in DTYPES for i, row in enumerate(BACKWARD[dtype])]
DQ_ROWS = [pytest.param(dtype, row, id=f"{dtype}-{i}") for dtype in DTYPES for i, row in enumerate(DQ[dtype])]


@pytest.mark.parametrize(("dtype", "row"), ROWS)
def test_a_row_of_backward_divides_its_tile_among_its_warps(dtype: str, row: BackwardTile) -> None:
    assert row.with_dq  # the plan leaves it out
    assert row.stages in (1, 2)
    assert row.warp_keys % 16 == row.piece_q % 16 == row.head_dim % 32 == row.head_dim_v % 32 == 0
    assert row.group >= 1
    assert row.block_k % row.warp_keys == 0
    assert row.group * row.block_k == row.warps * row.warp_keys  # each key has the same number of warps
    assert row.block_q == row.group * row.piece_q if row.group > 1 else row.block_q % row.piece_q == 0
    for columns in (row.head_dim, row.head_dim_v):
        assert columns % (16 * row.group) == 0
    assert STATS_ROWS % row.block_q == 0
    check_fits(dtype, row)


@pytest.mark.parametrize(("dtype", "row"), DQ_ROWS)
def test_a_row_of_dq_divides_its_queries_among_its_warps(dtype: str, row: DqTile) -> None:
    assert row.stages in (1, 2)
    assert row.max_slices == 1
    assert row.block_q % (16 * row.warps) == row.block_k % 16 == row.head_dim % 32 == row.head_dim_v % 32 == 0
    assert STATS_ROWS % row.block_q == 0
    check_fits(dtype, row)


def check_fits(dtype: str, row: BackwardTile | DqTile) -> None:
    """The row is for blocks of some GPU, as many on each SM as it says."""
    smem = row.smem_bytes(ITEMSIZE[dtype])
    assert any(smem <= device.smem_per_block and has_room(row, dtype, device) for device in KNOWN.values())


def has_room(row: Tile | BackwardTile, dtype: str, device: Device) -> bool:
    return row.blocks_per_sm * (row.smem_bytes(ITEMSIZE[dtype]) + SMEM_RESERVED) <= device.smem_per_sm


def test_the_stats_of_a_head_are_whole_blocks_of_delta_and_no_more_than_the_longest_tile() -> None:
    assert STATS_ROWS % DELTA_ROWS == 0
    assert max(row.block_q for table in (BACKWARD, DQ) for rows in table.values() for row in rows) == STATS_ROWS


@pytest.mark.parametrize("table", [TILES, BACKWARD, DQ], ids=["forward", "backward", "dq"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_stand_in_order_of_head_dim_then_of_shared_memory(dtype: str, table: dict[str, Any]) -> None:
    order = [(row.head_dim, row.head_dim_v, -row.smem_bytes(ITEMSIZE[dtype])) for row in table[dtype]]
    assert order == sorted(order)


@pytest.mark.parametrize("table", [BACKWARD, DQ], ids=["backward", "dq"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_row_with_room_is_chosen_or_else_the_smallest_that_fits(dtype: str, table: dict[str, Any]) -> None:
    rows = table[dtype]
    for device, row in itertools.product(KNOWN.values(), rows):
        fitting = [other for other in rows if (other.head_dim, other.head_dim_v) == (row.head_dim, row.head_dim_v)
                   and other.smem_bytes(ITEMSIZE[dtype]) <= device.smem_per_block]  # fmt: skip
        roomy = [other for other in fitting if has_room(other, dtype, device)]
        chosen = choose(rows, ITEMSIZE[dtype], row.head_dim, row.head_dim_v, device)
        assert chosen == (roomy[0] if roomy else fitting[-1])


@DETERMINISTIC
def test_no_length_stride_or_mask_is_part_of_what_is_compiled(deterministic: bool) -> None:
    device = KNOWN["sm_90"]
    wanted = variants_of(generic(problem(), device, deterministic))
    for changes in ({"dims": (1, 1, 1, 2, 1)}, {"dims": (5, 999, 16384, 64, 8)}, {"causal": True}, {"softcap": 3.0},
                    {"window_size": (5, 6)}, {"softmax_scale": 0.7}, {"algorithm": "flashd"},
                    {"algorithm": "standard"}):  # fmt: skip
        assert variants_of(generic(problem(**changes), device, deterministic)) == wanted
    # only delta reads out
    wide = variants_of(generic(problem(out_dtype="float32"), device, deterministic))
    assert wide == [replace(wanted[0], out_dtype="float32"), *wanted[1:]]


SHAPES = ((2, 300, 4, 64), (2, 500, 2, 64), (2, 500, 2, 96))


@DETERMINISTIC
def test_the_public_plan_is_that_of_the_call(deterministic: bool) -> None:
    more = {"causal": True, "window_size": (9, -1), "diagonal_offset": 3, "softcap": 2.0, "softmax_scale": 0.5}
    for arch in ARCHS:
        made = cuflash.plan(*SHAPES, op="backward", deterministic=deterministic, dtype="bfloat16", device=arch, **more)  # type: ignore[arg-type]
        assert made == plan(problem(64, 96, **more), "backward", KNOWN[arch], deterministic)
    arrays = [np.zeros(shape, np.float16) for shape in SHAPES]
    assert cuflash.plan(*arrays, op="backward", deterministic=deterministic).kernel == "reference_backward_flash2"


def test_plans_are_not_deterministic_unless_asked_for() -> None:
    made = cuflash.plan(*SHAPES, op="backward", dtype="float16", device="sm_80")
    assert made == cuflash.plan(*SHAPES, op="backward", deterministic=False, dtype="float16", device="sm_80")
    assert made.kernel.startswith("backward_sm80_fp16_d96")


@DETERMINISTIC
def test_a_printed_plan_names_each_kernel_in_order_and_the_workspace(deterministic: bool) -> None:
    made = cuflash.plan(*SHAPES, op="backward", deterministic=deterministic, dtype="bfloat16", device="sm_80")
    lines = str(made).splitlines()
    told = ["kernel", "kernel", "tile", "kernel", *(["tile"] if deterministic else [])]
    assert [line.split()[0] for line in lines] == ["device", *told, "memory", "work"]
    kernels = [line for line in lines if line.startswith("kernel")]
    for line, launch in zip(kernels, made.launches, strict=True):
        for words in (launch.variant.name, f"{launch.num_blocks} blocks", f"{launch.variant.smem_bytes} bytes"):
            assert words in line
    assert f"out {made.out_bytes} bytes" in lines[-2]
    assert f"workspace {made.workspace_bytes} bytes" in lines[-2]
    assert f"{made.flops} FLOPs" in lines[-1]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "forward": ({"op": "forward", "deterministic": True}, r"deterministic=True, op='forward'.*only for backward"),
    "lse": ({"op": "lse", "v": None, "deterministic": True}, r"deterministic=True, op='lse'.*only for backward"),
    "text": ({"deterministic": "no"}, r"deterministic='no'.*True or False"),
    "number": ({"deterministic": 1}, r"deterministic=1.*True or False"),
    "none": ({"deterministic": None}, r"deterministic=None.*True or False"),
    "text_for_forward": ({"op": "forward", "deterministic": "no"}, r"deterministic='no'.*True or False"),
    "algorithm": ({"algorithm": "flashd"}, r"op='backward' takes neither algorithm nor out_dtype"),
    "out_dtype": ({"out_dtype": "float32"}, r"op='backward' takes neither algorithm nor out_dtype"),
    "no_v": ({"v": None}, "v is a NoneType"),
}


@pytest.mark.parametrize("name", BAD)
def test_the_public_plan_refuses(name: str) -> None:
    changes, words = BAD[name]
    arguments = dict(zip("qkv", SHAPES, strict=True)) | {"op": "backward", "dtype": "float16", "device": "sm_90"}
    with pytest.raises(ProblemError, match=words):
        cuflash.plan(**(arguments | changes))  # type: ignore[arg-type]
