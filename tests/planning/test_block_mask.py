"""Mask tiles of 64 x 64 scores: the calls that compute them, their number, and sharing by sequences and heads."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.mods import masks, scores
from cuflash.mods.language import position_of
from cuflash.mods.tracing.trace import trace
from cuflash.planning.block_mask import (
    BLOCKS_PER_SM,
    MAX_MASK_TILES,
    MAX_ORDERED,
    WAVES,
    is_block_sparse,
    mask_tiles_launch,
    mask_tiles_shape,
)
from cuflash.planning.device import DEVICES
from cuflash.planning.mod_code import make_mod_code
from cuflash.planning.plan import MAX_GRID
from cuflash.planning.planner import plan as make_plan
from cuflash.planning.tile import rounded_up
from cuflash.planning.tile_shapes_sm90 import WarpgroupBackwardTile, WarpgroupDqDkvTile
from cuflash.planning.variant import Variant
from cuflash.problem.array_spec import ArraySpec
from cuflash.problem.mod_spec import make_mod_spec
from cuflash.problem.operands import Sizes, block_mask_op
from cuflash.problem.options import Options
from cuflash.problem.problem import Problem
from cuflash.runtime.mod_params import mod_params

A100 = DEVICES["sm_80"]
LISTED = "list_lines", "list_stride_batch", "list_stride_head"
IDS, ONE = np.zeros((2, 600), np.int32), np.zeros(3, np.int32)


def of_heads(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return (q_idx + h) % 3 > k_idx % 2


def of_keys(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return k_idx % 5 > 0


def first_half(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return 2 * k_idx <= position_of(q_idx)


def make_problem(
    mask_mod: Any = None,
    op: Any = "forward",
    dims: tuple[int, int, int, int] = (2, 300, 500, 4),
    varlen_kwargs: Mapping[str, tuple[int, ...]] | None = None,
    has_block_mask: bool = False,
    head_dim: int = 64,
    **arguments: Any,
) -> Problem:
    """Returns the problem of a call with a mask_mod.

    varlen_kwargs: shapes of the arrays of lengths; cu_seqlens mean packed rows.
    """
    batch, seqlen_q, seqlen_k, heads = dims
    shapes = [(batch, rows, heads, head_dim) for rows in (seqlen_q, seqlen_k)]
    if varlen_kwargs is not None and "cu_seqlens_q" in varlen_kwargs:
        shapes = [shape[1:] for shape in shapes]
    q, k, v = *shapes, None if op == "lse" else shapes[1]
    if has_block_mask:
        arguments["block_mask"] = cuflash.create_block_mask(mask_mod, 1, 1, seqlen_q, seqlen_k, like=IDS)
    else:
        arguments["mask_mod"] = mask_mod
    return cuflash.plan(q, k, v, op=op, dtype="bfloat16", device="cpu", **varlen_kwargs or {}, **arguments).problem


def test_calls_whose_mask_is_their_own_find_cells_first() -> None:
    for op, count in (("forward", 2), ("lse", 2), ("backward", 4)):
        for options in ({}, {"deterministic": True}) if op == "backward" else ({},):
            plan = make_plan(make_problem(masks.segments(IDS), op, **options), A100)
            first, *others = plan.launches
            assert len(plan.launches) == count
            assert first.variant.op == "block_mask"
            assert plan.variant.source == f"sm80/{op}.cu"  # the main kernel is the same as without mask tiles
            assert plan.workspace["mask_tiles"].size == rounded_up(2 * 5 * 8, 128)
            assert all(launch.variant.constants.get("BLOCK_SPARSE", 2) == 2 for launch in others)


def test_forward_and_lse_on_hopper_find_them_too() -> None:
    for op in ("forward", "lse"):
        plan = make_plan(make_problem(masks.segments(IDS), op), DEVICES["sm_90"])
        assert [launch.variant.op for launch in plan.launches] == ["block_mask", op]
        assert plan.variant.source == f"sm90/forward/{op}.cu"
        assert plan.variant.constants["BLOCK_SPARSE"] == 2
        assert "mask_tiles" in plan.workspace


@pytest.mark.parametrize("op", ["forward", "lse"])
def test_varlen_calls_on_hopper_find_mask_tiles_except_with_pages(op: str) -> None:
    packed = make_plan(
        make_problem(masks.segments(IDS), op, varlen_kwargs={"cu_seqlens_q": (3,), "cu_seqlens_k": (3,)}),
        DEVICES["sm_90"],
    )
    assert [launch.variant.op for launch in packed.launches] == ["block_mask", op]
    many = 2, 300, 500, 64  # with so many heads, keys are not split among thread blocks
    varlen_kwargs = {"page_table": (2, 3), "seqused_k": (2,)}
    paged = make_plan(make_problem(masks.segments(IDS), op, many, varlen_kwargs=varlen_kwargs), DEVICES["sm_90"])
    assert [launch.variant.op for launch in paged.launches] == [op]
    for plan, is_sparse in ((packed, 2), (paged, 0)):
        assert (plan.variant.source, plan.variant.is_varlen, plan.fallback) == (f"sm90/forward/{op}.cu", True, None)
        assert plan.variant.constants["BLOCK_SPARSE"] == is_sparse
        assert ("mask_tiles" in plan.workspace) == (is_sparse > 0)


def test_two_heads_with_different_mask_tiles_are_not_paired() -> None:
    varlen_kwargs = {"cu_seqlens_q": (3,), "cu_seqlens_k": (3,)}
    alibi = scores.alibi(np.ones(4, np.float32))
    for functions, pairs in (({"mask_mod": masks.segments(IDS)}, 0), ({"score_mod": alibi}, 1)):
        problem = make_problem(**functions, varlen_kwargs=varlen_kwargs)
        assert make_plan(problem, DEVICES["sm_90"]).launches[-1].fields["in_pairs"] == pairs


def test_varlen_kernels_that_spill_give_way_to_others_and_at_last_to_sm80() -> None:
    problem = make_problem(score_mod=scores.alibi(np.ones(4, np.float32)), varlen_kwargs={"seqused_k": (2,)})
    spilled: set[Variant] = set()
    for _ in range(4):
        variant = make_plan(problem, DEVICES["sm_90"], avoided=spilled).variant
        assert (variant.source, variant.is_varlen, variant in spilled) == ("sm90/forward/forward.cu", True, False)
        spilled.add(variant)
    plan = make_plan(problem, DEVICES["sm_90"], avoided=spilled)
    assert plan.variant.source == "sm80/forward.cu"
    assert "registers" in (plan.fallback or "")


@pytest.mark.parametrize("has_block_mask", [False, True])
def test_backward_on_hopper_counts_the_key_blocks_that_see_a_tile(has_block_mask: bool) -> None:
    problem = make_problem(masks.chunked(64), "backward", (2, 300, 5000, 4), has_block_mask=has_block_mask)
    plan = make_plan(problem, DEVICES["sm_90"])
    *first, delta, counts, main = plan.launches
    assert [launch.variant.op for launch in first] == ([] if has_block_mask else ["block_mask"])
    assert [launch.variant.op for launch in (delta, counts, main)] == ["delta", "tile_counts", "backward"]
    assert plan.variant is main.variant
    assert main.variant.source == "sm90/backward/backward.cu"
    assert main.variant.mod_code == make_mod_code(problem, keys_as_rows=True, is_sparse=True)
    assert counts.variant.mod_code is None  # it is compiled once for all masks
    of_batch, of_head, of_row = strides_of(problem)
    fields, tile = counts.fields, main.variant.tile
    assert tuple(fields[f"mask_tiles_{name}"] for name in ("batch", "head", "row")) == (of_batch, of_head, of_row)
    for rows, blocks, size in ((300, "num_q_blocks", tile.block_q), (5000, "num_k_blocks", tile.block_k)):
        assert (fields[blocks] - 1) * size < rows <= fields[blocks] * size
    assert main.fields.items() >= {name: fields[name] for name in (*LISTED, "num_q_blocks", "num_k_blocks")}.items()
    tiles, key_blocks, warps = 2 * 4 * fields["num_q_blocks"], fields["num_k_blocks"], counts.variant.num_threads // 32
    assert (fields["count_blocks"] - 1) * warps < tiles <= fields["count_blocks"] * warps  # a warp for each tile
    lists = counts.num_blocks - fields["count_blocks"]
    assert (lists - 1) * warps < key_blocks <= lists * warps  # and for each list
    sizes = {"tile_counts": tiles, "key_order": key_blocks, "step_counts": key_blocks, "semaphores": tiles + 2}
    sizes["key_steps"] = 32 * fields["list_lines"] * key_blocks
    assert {name: plan.workspace[name].size for name in sizes} == {name: 4 * size for name, size in sizes.items()}
    assert delta.fields["more_semaphores"] == 2  # counters of the key blocks taken, and of the order
    assert fields["first_counter"] == tiles + 1
    assert ("mask_tiles" in plan.workspace) != has_block_mask


def test_steps_are_listed_for_each_head_with_separate_mask_tiles() -> None:
    def listed(mask_mod: Any, **options: Any) -> tuple[int, ...]:
        dims = (2, options.pop("rows", 300), options.pop("keys", 5000), 4)
        plan = make_plan(make_problem(mask_mod, "backward", dims, **options), DEVICES["sm_90"])
        *_, delta, counts, main = plan.launches
        assert all(main.fields[name] == counts.fields[name] for name in LISTED)
        assert main.fields["num_q_blocks"] < 32 * main.fields["list_lines"]  # with the end of the list
        sizes = (plan.workspace[name].size if name in plan.workspace else 0 for name in ("key_steps", "key_order"))
        of_each = 4 * 32 * main.fields["list_lines"], 4
        lists, orders = (size // each // main.fields["num_k_blocks"] for size, each in zip(sizes, of_each, strict=True))
        return lists, orders, *(main.fields[name] for name in LISTED[1:]), delta.fields["more_semaphores"]

    def of_all(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k + 100 * h + 200 * b < q

    assert listed(of_keys) == listed(of_keys, rows=32 * 128) == (1, 1, 0, 0, 2)
    assert listed(of_heads) == (4, 4, 0, 1, 5)
    assert listed(masks.segments(np.zeros((2, 5000), np.int32))) == (2, 2, 1, 0, 3)
    assert listed(of_all) == (8, 8, 4, 1, 9)
    for unordered in ({"deterministic": True}, {"causal": True}, {"window_size": (100, 100)}):
        assert listed(of_heads, **unordered) == (4, 0, 0, 1, 1)
        assert listed(of_keys, **unordered) == (1, 0, 0, 0, 1)
    assert listed(of_keys, keys=128 * MAX_ORDERED) == (1, 1, 0, 0, 2)
    assert listed(of_keys, keys=128 * MAX_ORDERED + 1) == (1, 0, 0, 0, 1)


def test_sparse_backward_launches_at_most_one_block_for_each_sm() -> None:
    num_sms = DEVICES["sm_90"].num_sms
    for mask_mod, rows in ((of_keys, 2048), (of_keys, 300), (None, 4096)):
        main = make_plan(make_problem(mask_mod, "backward", (4, rows, rows, 8)), DEVICES["sm_90"]).launches[-1]
        if mask_mod is None:
            assert main.num_blocks > num_sms
        else:
            assert (main.fields["whole_blocks"], main.fields["key_blocks"]) == (4 * 8 * -(-rows // 128), 1)
            assert main.num_blocks == min(main.fields["whole_blocks"], num_sms)


@pytest.mark.parametrize(("head_dim", "rows"), [(64, 8192), (128, 8192), (128, 16384), (64, 1024)])
def test_heads_that_start_together_under_a_mask_alone_touch_what_l2_holds(head_dim: int, rows: int) -> None:
    problem = make_problem(of_keys, "backward", (4, rows, rows, 16), head_dim=head_dim)
    together = make_plan(problem, DEVICES["sm_90"]).launches[-1].fields["heads_in_l2"]
    touched = together * rows * head_dim * (2 * 2 + 2 * 2 + 4)
    assert touched <= 48 * 2**20 < 2 * touched or together == 16


def test_sparse_backward_becomes_dense_only_if_all_its_tiles_spill() -> None:
    problem = make_problem(masks.segments(IDS), "backward")
    spilled: set[Variant] = set()
    tiles = []
    while (plan := make_plan(problem, DEVICES["sm_90"], avoided=spilled)).launches[0].variant.op == "block_mask":
        main = plan.variant
        assert main.mod_code == make_mod_code(problem, keys_as_rows=True, is_sparse=True)
        assert isinstance(main.tile, WarpgroupBackwardTile)
        tiles.append(main.tile)
        spilled.add(main)
    assert tiles == sorted(tiles, key=lambda tile: tile.head_dim)  # smaller head dims first
    assert tiles[0].head_dim == tiles[1].head_dim == 64
    assert tiles[0].k_steps > tiles[1].k_steps
    assert [launch.variant.op for launch in plan.launches] == ["delta", "backward"]
    assert plan.launches[1].variant.mod_code == make_mod_code(problem, keys_as_rows=True)
    assert not {"mask_tiles", "tile_counts"} & set(plan.workspace)


def test_dq_dkv_kernels_use_mask_tiles_unless_they_spill() -> None:
    problem = make_problem(masks.segments(IDS), "backward", head_dim=192)
    plan = make_plan(problem, DEVICES["sm_90"])
    assert [launch.variant.op for launch in plan.launches] == [
        "block_mask", "delta", "backward_dq", "backward_dk", "backward_dv"
    ]  # fmt: skip
    for launch in plan.launches[2:]:
        assert launch.variant.mod_code == make_mod_code(
            problem, keys_as_rows=launch.variant.op != "backward_dq", is_sparse=True
        )
    assert plan.variant is plan.launches[2].variant
    wide, narrow = plan.variant.tile, make_plan(problem, DEVICES["sm_90"], avoided={plan.variant}).launches[2].variant
    assert isinstance(wide, WarpgroupDqDkvTile)
    assert isinstance(narrow.tile, WarpgroupDqDkvTile)
    assert wide.columns > narrow.tile.columns
    assert narrow.mod_code == make_mod_code(problem, is_sparse=True)
    again = make_plan(problem, DEVICES["sm_90"], avoided={plan.variant, narrow})
    assert [launch.variant.mod_code for launch in again.launches[2:]] == [
        make_mod_code(problem), *(launch.variant.mod_code for launch in plan.launches[3:])
    ]  # fmt: skip


def test_key_blocks_with_cells_share_no_steps() -> None:
    """Key blocks with mask tiles share no steps; with a bias, key blocks beyond the first wave do."""
    dims = (1, 4096, 128 * 140, 1)
    bias = np.zeros((1, 1, 4096, 1), np.float32)
    for problem, shares in ((make_problem(None, "backward", dims, bias=bias), True),
                            (make_problem(masks.chunked(64), "backward", dims), False)):  # fmt: skip
        plan = make_plan(problem, DEVICES["sm_90"])
        assert (plan.launches[-1].fields["shared_keys"] > 0) == shares
        assert shares or plan.launches[-1].fields["whole_blocks"] == dims[2] // 128


def test_other_calls_find_none() -> None:
    bias = np.zeros((2, 4, 300, 500), np.float32)
    for problem in (
        make_problem(score_mod=scores.alibi(np.ones(4, np.float32))),
        make_problem(bias=bias),
        make_problem(lambda b, h, q_idx, k_idx: k_idx >= 0),  # hides no key
        make_problem(masks.chunked(64), dims=(2, 300, 128, 4)),  # few keys
        make_problem(masks.segments(IDS), dims=(64, 2**15, 2**16, 1)),  # many mask tiles
        make_problem(masks.chunked(64), dims=(2, 0, 500, 4)),  # none
    ):
        assert not is_block_sparse(problem)
        assert mask_tiles_launch(problem, A100) is None
        code = make_mod_code(problem, is_sparse=is_block_sparse(problem))
        assert code is None or dict(code.constants)["BLOCK_SPARSE"] == 0
        assert "mask_tiles" not in make_plan(problem, A100).workspace


def test_mask_tiles_that_are_given_are_used_and_not_found_again() -> None:
    problem = make_problem(masks.chunked(64), has_block_mask=True)
    assert is_block_sparse(problem)
    assert [launch.variant.op for launch in make_plan(problem, A100).launches] == ["forward"]
    # A bias of bools hides more than the block mask, so that a full mask tile may hold hidden pairs.
    both = make_problem(masks.chunked(64), has_block_mask=True, bias=np.zeros((2, 1, 300, 500), bool))
    computed = make_problem(masks.chunked(64), bias=np.zeros((2, 1, 300, 500), bool))
    kinds = [dict(make_mod_code(each, is_sparse=True).constants)["BLOCK_SPARSE"] for each in (problem, both, computed)]
    assert kinds == [2, 1, 2]


PACKED = {"cu_seqlens_q": (4,), "cu_seqlens_k": (4,)}
USED = {"seqused_k": (2,)}


@pytest.mark.parametrize(
    ("mask_mod", "varlen_kwargs", "shape", "of_lengths", "of_call"),
    [
        (of_keys, None, (1, 1), False, 1),
        (first_half, None, (1, 1), False, 1),
        (of_heads, None, (1, 4), False, 1),
        (masks.segments(IDS), None, (2, 1), False, 1),
        (of_keys, USED, (1, 1), False, 0),
        (of_heads, PACKED, (1, 4), False, 0),
        (first_half, USED, (2, 1), True, 1),
        (masks.prefix_lm(ONE), PACKED, (3, 1), True, 1),
    ],
)
def test_sequences_and_heads_share_mask_tiles_unless_the_mask_differs(
    mask_mod: Any, varlen_kwargs: Any, shape: tuple[int, int], of_lengths: bool, of_call: int
) -> None:
    problem = make_problem(mask_mod, varlen_kwargs=varlen_kwargs)
    assert mask_tiles_shape(problem) == (*shape, 5, 8)
    launch, floats = mask_tiles_launch(problem, A100)
    assert 4 * floats == rounded_up(math.prod(shape) * 40, 128)  # the next part is copied 16 bytes at a time
    assert launch.variant.is_varlen == of_lengths
    assert launch.fields == {
        "num_mask_tiles": math.prod(shape) * 40, "heads": shape[1], "mask_tiles_q": 5, "mask_tiles_k": 8,
        "of_call": of_call
    }  # fmt: skip
    assert strides_of(problem) == (40 * shape[1] * (shape[0] > 1), 40 * (shape[1] > 1), 8)


def strides_of(problem: Problem) -> tuple[int, int, int]:
    """Returns the strides of mask tiles by sequence, head and row, as kernels read them."""
    code = make_mod_code(problem)
    packed = bytearray(8 * code.words)
    offsets = mod_params(problem, packed, 0)
    (word,) = [word for name, word in offsets.workspace if name == "mask_tiles"] or [
        word for number, word in offsets.plain if number == problem.op.index["mask_tiles"]
    ]
    strides: tuple[int, int, int] = struct.unpack_from("=2qi", packed, 8 * (word + 2))
    return strides


def test_mask_tiles_that_are_given_have_the_strides_of_their_shape() -> None:
    assert strides_of(make_problem(masks.chunked(64), has_block_mask=True)) == (0, 0, 8)


def test_a_warp_takes_several_cells_where_there_are_many() -> None:
    for rows, keys in ((65, 200), (64 * 40, 64 * 40), (2**17, 2**17)):
        planned = mask_tiles_launch(make_problem(masks.chunked(64), dims=(1, rows, keys, 1)), A100)
        warps, tiles = planned[0].variant.num_threads // 32, planned[0].fields["num_mask_tiles"]
        filled = WAVES * BLOCKS_PER_SM * A100.num_sms
        assert planned[0].num_blocks == min(-(-tiles // warps), filled)
        assert tiles <= MAX_MASK_TILES <= MAX_GRID


def test_the_plan_of_a_block_mask_has_the_cells_that_were_asked_for() -> None:
    mod_spec = make_mod_spec(None, trace(of_heads, "mask_mod"))
    like = ArraySpec.contiguous((1,), "float16", "cuda:0", "cupy")
    problem = Problem.from_specs(block_mask_op(mod_spec, Sizes(3, 2, 130, 64)), [like], Options())
    (launch,) = make_plan(problem, A100).launches
    assert launch.fields == {"num_mask_tiles": 18, "heads": 2, "mask_tiles_q": 3, "mask_tiles_k": 1, "of_call": 0}
    assert (launch.num_blocks, launch.variant.is_varlen, make_plan(problem, A100).workspace_bytes) == (3, False, 0)
