"""Plans, made without a GPU: tiles that cover and fit, grids that reach every row, names that never clash.

Those of the kernels that Hopper has of its own stand in `test_plan_sm90`; without `aligned` there are none.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from variants import variants

import cuflash
from cuflash import device as devices
from cuflash import tiles_sm80
from cuflash.device import KNOWN, Device
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.plan import merge_plan, plan
from cuflash.problem import ITEMSIZE, ArraySpec, Problem
from cuflash.variant import PARAMS_BYTES, Launch, Plan

DTYPES = ("float16", "bfloat16", "float32")
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# Every head dim at which the choice of a tile can change, its neighbours, and the ends.
ROWS = (*tiles_sm80.TILES_16BIT, *tiles_sm80.TILES_32BIT)
ROW_DIMS = {dim for tile in ROWS for dim in (tile.head_dim, tile.head_dim_v)}
EDGES = sorted({dim + step for dim in ROW_DIMS for step in (-1, 0, 1) if dim + step <= 256} | {1, 8, 40, 80})


def problem(
    head_dim: int = 64, head_dim_v: int | None = 64, *, dtype: str = "bfloat16", **more: Any
) -> Problem:  # v is left out with head_dim_v=None
    b, sq, sk, hq, hkv = more.pop("dims", (2, 300, 500, 4, 2))
    specs = [ArraySpec.dense(shape, dtype) for shape in ((b, sq, hq, head_dim), (b, sk, hkv, head_dim))]
    v = None if head_dim_v is None else ArraySpec.dense((b, sk, hkv, head_dim_v), dtype)
    return Problem.of(*specs, v, **more)


def check_tiled(made: Plan, of: Problem, op: str, device: Device) -> None:
    """All that must hold of the plan of a tiled kernel."""
    assert made.variant is not None
    tile = made.variant.tile
    assert tile is not None
    assert of.head_dim <= tile.head_dim
    assert made.variant.smem_bytes <= device.smem_per_block
    # the last block still owns a query, or a column of v, that no other does
    assert (made.num_q_blocks - 1) * tile.block_q < of.seqlen_q <= made.num_q_blocks * tile.block_q
    if op == "forward":
        assert (made.num_slices - 1) * tile.head_dim_v < of.head_dim_v <= made.num_slices * tile.head_dim_v
        assert made.num_slices <= tile.max_slices
    else:
        assert (made.num_slices, tile.head_dim_v) == (1, 0)
    assert made.launches == (Launch(made.variant, made.num_q_blocks * made.num_slices * of.heads_q * of.batch),)
    assert made.variant.num_threads == 32 * tile.warps <= 1024
    assert tile.block_q % (16 * tile.warps) == 0  # what common/config.cuh asserts too
    assert made.variant.arch == device.arch


def test_the_devices_of_the_contract_can_be_named() -> None:
    assert tuple(KNOWN) == ARCHS
    for arch, device in KNOWN.items():
        assert devices.named(arch) is device
        assert device.arch == arch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_pair_of_head_dims_up_to_256_has_a_tile(arch: str, dtype: str) -> None:
    device = KNOWN[arch]
    for head_dim, head_dim_v in itertools.product(EDGES, EDGES):
        of = problem(head_dim, head_dim_v, dtype=dtype)
        check_tiled(plan(of, "forward", device, aligned=False), of, "forward", device)
    for head_dim in range(1, 257):
        for algorithm in ("flash1", "flash2", "flashd"):
            of = problem(head_dim, head_dim, dtype=dtype, algorithm=algorithm)
            check_tiled(plan(of, "forward", device, aligned=False), of, "forward", device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", ARCHS)
def test_lse_has_a_tile_without_v_for_every_head_dim(arch: str, dtype: str) -> None:
    device = KNOWN[arch]
    for head_dim in EDGES:
        of = problem(head_dim, None, dtype=dtype)
        check_tiled(plan(of, "lse", device, aligned=False), of, "lse", device)


@pytest.mark.parametrize("head_dims", [(512, 512), (257, 257), (512, 64), (64, 512)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", ARCHS)
def test_head_dims_up_to_512_have_a_tile_or_a_way_out(arch: str, dtype: str, head_dims: tuple[int, int]) -> None:
    device, of = KNOWN[arch], problem(*head_dims, dtype=dtype)
    if dtype == "float32" and device.smem_per_block < 128 * 1024:
        with pytest.raises(UnsupportedError, match=rf"\({head_dims[0]}, .*float32.*{arch}.*NumPy arrays.*'standard'"):
            plan(of, "forward", device)
    else:
        check_tiled(plan(of, "forward", device), of, "forward", device)
    assert plan(replace(of, algorithm="standard"), "forward", device).launches == ()


@pytest.mark.parametrize("head_dims", [(513, 64), (64, 513)])
def test_head_dims_over_512_are_unsupported_with_a_way_out(head_dims: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedError, match=r"513.*1 to 256 always fit.*NumPy arrays.*'standard'"):
        plan(problem(*head_dims), "forward", KNOWN["sm_90"])


@pytest.mark.parametrize("seqlen_q", [1, 63, 64, 65, 127, 128, 129, 16384, 2**20 + 1])
def test_the_grid_covers_every_query(seqlen_q: int) -> None:
    of = problem(dims=(3, seqlen_q, 77, 6, 2))
    check_tiled(plan(of, "forward", KNOWN["sm_90"], aligned=False), of, "forward", KNOWN["sm_90"])


def test_an_empty_problem_has_an_empty_grid() -> None:
    for dims in ((0, 5, 7, 4, 2), (2, 0, 7, 4, 2)):
        (launch,) = plan(problem(dims=dims), "forward", KNOWN["sm_90"]).launches
        assert launch.num_blocks == 0


def test_a_tile_leaves_room_for_the_blocks_it_was_tuned_for_where_any_does() -> None:
    for dtype, device in itertools.product(DTYPES, KNOWN.values()):
        for row in tiles_sm80.TILES[dtype]:
            if row.head_dim > 256:
                continue
            made = plan(problem(row.head_dim, row.head_dim_v, dtype=dtype), "forward", device, aligned=False).variant
            assert made is not None
            chosen = made.tile
            assert chosen is not None
            assert isinstance(chosen, tiles_sm80.Tile)
            if (row.head_dim, row.head_dim_v) == (chosen.head_dim, chosen.head_dim_v):
                roomy = [
                    tile.smem_bytes(ITEMSIZE[dtype]) <= device.smem_per_block
                    and tile.blocks_per_sm * (tile.smem_bytes(ITEMSIZE[dtype]) + 1024) <= device.smem_per_sm
                    for tile in (chosen, row)
                ]
                assert roomy[0] or not roomy[1], (dtype, device.name, row)


def test_variants_with_different_constants_never_share_a_name() -> None:
    by_name: dict[str, dict[str, Any]] = {}
    for variant in itertools.chain.from_iterable(map(variants, ARCHS)):
        constants = {"source": variant.source, **variant.constants}
        assert by_name.setdefault(variant.name, constants) == constants, variant.name
        assert constants["KERNEL"] == variant.name
        assert variant.name.isidentifier()  # it becomes the kernel's symbol
    distinct = {tuple(sorted((k, v) for k, v in c.items() if k != "KERNEL")) for c in by_name.values()}
    assert len(distinct) == len(by_name) > 100  # and no two names stand for one kernel


def test_no_length_stride_or_mask_is_part_of_what_is_compiled() -> None:
    device = KNOWN["sm_89"]
    wanted = plan(problem(), "forward", device).variant
    assert wanted is not None
    for changes in ({"dims": (1, 1, 1, 2, 1)}, {"dims": (5, 999, 16384, 64, 8)}, {"causal": True}, {"softcap": 3.0},
                    {"window_size": (5, 6)}, {"softmax_scale": 0.7}):  # fmt: skip
        assert plan(problem(**changes), "forward", device).variant == wanted
    assert plan(problem(out_dtype="float32"), "forward", device).variant == replace(wanted, out_dtype="float32")
    other = plan(problem(algorithm="flashd"), "forward", device).variant
    assert other is not None
    assert (other.algorithm, other.name != wanted.name) == ("flashd", True)


def test_plans_are_made_once() -> None:
    for device in (None, KNOWN["sm_80"]):
        assert plan(problem(), "forward", device) is plan(problem(), "forward", device)


def test_memory_is_counted_in_bytes() -> None:
    of = problem(64, 96, dims=(2, 300, 500, 4, 2))
    made = plan(of, "forward", KNOWN["sm_90"])
    assert (made.out_bytes, made.lse_bytes, made.workspace_bytes) == (2 * 2 * 300 * 4 * 96, 4 * 2 * 4 * 300, 0)
    assert plan(replace(of, out_dtype="float32"), "forward", KNOWN["sm_90"]).out_bytes == 4 * 2 * 300 * 4 * 96
    assert plan(of, "lse", KNOWN["sm_90"]).out_bytes == 0
    assert plan(problem(dtype="float64"), "forward", None).lse_bytes == 8 * 2 * 4 * 300


def test_standard_runs_through_cupy_and_says_what_it_materialises() -> None:
    made = plan(problem(algorithm="standard"), "forward", KNOWN["sm_90"])
    assert (made.kernel, made.device, made.launches, made.variant) == ("cupy_standard", "H100", (), None)
    assert made.workspace_bytes >= 4 * 2 * 4 * 300 * 500


def test_merge_covers_every_element_of_out() -> None:
    for dtype, head_dim_v in itertools.product(DTYPES, (1, 7, 8, 64, 65)):
        shape = (2, 33, 4, head_dim_v)
        (launch,) = merge_plan(dtype, shape, KNOWN["sm_90"]).launches
        chunks = -(-head_dim_v * ITEMSIZE[dtype] // 16)
        threads = launch.num_blocks * launch.variant.num_threads
        assert threads - launch.variant.num_threads < 2 * 33 * 4 * chunks <= threads
        assert launch.variant.constants["PARAMS_BYTES"] == PARAMS_BYTES["merge"]


UNSUPPORTED = {
    "float64": (lambda: plan(problem(dtype="float64"), "forward", KNOWN["sm_90"]), "float64.*float32, bfloat16.*NumPy"),
    "float64_lse": (lambda: plan(problem(64, None, dtype="float64"), "lse", KNOWN["sm_90"]), "float64.*cast.*NumPy"),
    "float64_merge": (lambda: merge_plan("float64", (1, 2, 3, 4), KNOWN["sm_90"]), "float64.*cast.*NumPy"),
    "too_many_blocks": (
        lambda: plan(problem(dims=(2**20, 2**20, 1, 1, 1)), "forward", KNOWN["sm_90"]),
        r"batch 1048576 .*at most 2147483647.*Split the batch",
    ),
    "merge_too_many_blocks": (
        lambda: merge_plan("float16", (2**20, 2**20, 8, 64), KNOWN["sm_90"]),
        "at most 2147483647",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_no_kernel_does_is_unsupported_with_a_way_out(name: str) -> None:
    call, words = UNSUPPORTED[name]
    with pytest.raises(UnsupportedError, match=words):
        call()


SHAPES = ((2, 300, 4, 64), (2, 500, 2, 64), (2, 500, 2, 96))


def test_the_public_plan_takes_shapes_and_a_device_name() -> None:
    for arch in ARCHS:
        made = cuflash.plan(*SHAPES, dtype="bfloat16", device=arch)
        assert made == plan(problem(64, 96), "forward", KNOWN[arch])
    assert cuflash.plan(*SHAPES[:2], op="lse", dtype="bfloat16", device="sm_80").kernel.startswith("lse_sm80_bf16_d64")
    cpu = cuflash.plan(*SHAPES, op="backward", dtype="bfloat16", device="cpu")
    assert (cpu.kernel, cpu.device, cpu.launches) == ("reference_backward_flash2", "cpu", ())


def test_the_public_plan_takes_arrays_and_every_argument_of_forward() -> None:
    q, k, v = (np.zeros(shape, np.float16) for shape in SHAPES)
    assert cuflash.plan(q, k, v).kernel == "reference_forward_flash2"
    more = {"causal": True, "window_size": (9, -1), "diagonal_offset": 3, "softcap": 2.0, "softmax_scale": 0.5,
            "algorithm": "flashd", "out_dtype": "float32"}  # fmt: skip
    made = cuflash.plan(q, k, v, device="sm_90", **more)  # type: ignore[arg-type]
    assert made == plan(problem(64, 96, dtype="float16", **more), "forward", KNOWN["sm_90"])
    assert made.kernel.endswith("_flashd_out_fp32")


def test_shapes_are_planned_on_the_first_gpu_or_else_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count", lambda: 0)
    assert cuflash.plan(*SHAPES, dtype="float16").device == "cpu"
    monkeypatch.setattr(devices, "count", lambda: 2)
    monkeypatch.setattr(devices, "query", lambda ordinal: replace(KNOWN["sm_90"], name=f"GPU {ordinal}"))
    assert cuflash.plan(*SHAPES, dtype="float16").device == "GPU 0"
    assert cuflash.plan(*SHAPES, dtype="float16", device="cuda:1").device == "GPU 1"
    assert cuflash.plan(*(np.zeros(shape, np.float16) for shape in SHAPES)).device == "cpu"


def test_a_printed_plan_names_kernel_tile_launch_and_memory() -> None:
    text = str(cuflash.plan(*SHAPES, dtype="bfloat16", device="sm_90", causal=True))
    made = cuflash.plan(*SHAPES, dtype="bfloat16", device="sm_90", causal=True)
    (launch,) = made.launches
    tile = launch.variant.tile
    assert tile is not None
    for words in (made.kernel, "H100", f"{tile.block_q} queries x {tile.block_k} keys",
                  f"({tile.head_dim}, {tile.head_dim_v})",
                  f"launch     {launch.num_blocks} blocks of {launch.variant.num_threads} threads",
                  f"{launch.variant.smem_bytes} bytes of shared memory", f"out {made.out_bytes} bytes",
                  f"lse {made.lse_bytes} bytes", "workspace 0 bytes", f"{made.flops} FLOPs"):  # fmt: skip
        assert text.count(words) == 1
    cpu = str(cuflash.plan(*SHAPES, dtype="bfloat16", device="cpu"))
    assert "reference_forward_flash2" in cpu
    assert "launch" not in cpu


def test_a_printed_plan_of_several_kernels_names_each_in_order() -> None:
    made = plan(problem(), "forward", KNOWN["sm_90"])
    (merge,) = merge_plan("float32", (1, 999, 3, 64), KNOWN["sm_90"]).launches
    lines = str(replace(made, launches=(merge, *made.launches))).splitlines()
    assert replace(made, launches=(merge, *made.launches)).variant == made.variant
    assert [line.split()[0] for line in lines] == ["device", "kernel", "kernel", "tile", "memory", "work"]
    for line, launch in zip(lines[1:3], (merge, *made.launches), strict=True):
        assert launch.variant.name in line
        assert f"{launch.num_blocks} blocks of {launch.variant.num_threads} threads" in line
        assert f"{launch.variant.smem_bytes} bytes of shared memory" in line


BAD_PLANS = {
    "op": ({"op": "merge"}, "op='merge'.*forward, lse, backward"),
    "no_dtype": ({"dtype": None}, "q is the shape .*give dtype="),
    "dtype": ({"dtype": "int8"}, "q has dtype int8; give one of float16, bfloat16, float32"),
    "no_v": ({"v": None}, "v is a NoneType"),
    "list": ({"q": [2, 300, 4, 64]}, "q is a list"),
    "algorithm": ({"algorithm": "flash9"}, "algorithm='flash9'"),
    "heads": ({"k": (2, 500, 3, 64), "v": (2, 500, 3, 64)}, "multiple of heads_kv"),
    "negative_length": ({"q": (2, -300, 4, 64)}, "q .*-300"),
    "float_length": ({"q": (2, 300.0, 4, 64)}, r"q .*300\.0"),
    "text_length": ({"q": (2, "300", 4, 64)}, "q .*'300'"),
    **{
        f"device_{name}": ({"device": name}, rf"device='{name}'.*sm_80, .*sm_120")
        for name in ("sm_75", "gpu", "cuda:x", "")
    },
    "device_number": ({"device": 0}, "device=0 .*sm_80, .*sm_120"),
    "device_list": ({"device": ["cpu"]}, r"device=\['cpu'\].*sm_80, .*sm_120"),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_the_public_plan_refuses(name: str) -> None:
    changes, words = BAD_PLANS[name]
    arguments: dict[str, Any] = (
        dict(zip("qkv", SHAPES, strict=True)) | {"dtype": "float16", "device": "sm_90"} | changes
    )
    with pytest.raises(ProblemError, match=words):
        cuflash.plan(**arguments)


def test_planning_on_a_gpu_that_is_not_there_is_an_error_of_ours() -> None:
    with pytest.raises((ProblemError, UnsupportedError), match="99"):
        cuflash.plan(*SHAPES, dtype="float16", device="cuda:99")
