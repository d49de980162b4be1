"""Plans of backward: kernels in order, division of work, edge cases and limits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from gradients import DETERMINISTIC
from plans import ARCHS, DTYPES, of_lengths, planned_with
from plans import problem as make_problem
from variants import problem_of

import cuflash
from cuflash.errors import UnsupportedError
from cuflash.planning import tiles_sm90
from cuflash.planning.backward import backward_plan
from cuflash.planning.delta import BLOCK_WORDS, DELTA_ROWS, MOD_BLOCK_WORDS, STATS_ROWS
from cuflash.planning.device import DEVICES
from cuflash.planning.mod_code import make_mod_code
from cuflash.planning.plan import MAX_GRID, Plan
from cuflash.planning.planner import plan as make_plan
from cuflash.planning.tile_shapes_sm90 import WarpgroupBackwardTile
from cuflash.planning.tiles_sm90 import choose_backward
from cuflash.planning.variant import Variant
from cuflash.problem.options import Options
from cuflash.problem.problem import Problem

H100 = DEVICES["sm_90"]


def backward(*head_dims: int, arch: str = "sm_80", **more: Any) -> Plan:
    return make_plan(make_problem(*head_dims, op="backward", **more), DEVICES[arch])


@DETERMINISTIC
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_kernels_of_each_device_in_order(arch: str, dtype: str, deterministic: bool) -> None:
    for dim in (64, 128, 192, 256):
        more: dict[str, Any] = {"dtype": dtype, "dims": (2, 300, 500, 2, 2)}
        plan = backward(dim, dim, arch=arch, deterministic=deterministic, **more)
        expected = ["backward_dkdv", "backward_dq"] if deterministic else ["backward", "convert"]
        if arch == "sm_90" and dtype != "float32":
            expected = ["backward"] if dim <= 128 else ["backward_dq", "backward_dk", "backward_dv"]
            if dim == 256 and not deterministic:
                expected = ["backward", "convert"]
        assert [launch.variant.op for launch in plan.launches] == ["delta", *expected]
        assert plan.variant is plan.launches[1].variant
        if len(expected) == 3 and dim == 192:  # sums have a fixed order, deterministic or not
            assert plan.launches == backward(dim, dim, arch=arch, **more).launches


def test_an_out_in_float32_changes_only_delta() -> None:
    problem = make_problem(op="backward", dims=(2, 300, 500, 2, 2))
    wide = Problem.from_specs(
        problem.op, [*problem.specs[:4], problem.spec("out")._replace(dtype="float32")], Options()
    )
    for arch in ("sm_80", "sm_90"):
        plain, plan = make_plan(problem, DEVICES[arch]), make_plan(wide, DEVICES[arch])
        assert plan.launches[0].variant == replace(plain.launches[0].variant, out_dtype="float32")
        assert (plan.launches[1:], plan.out_bytes) == (plain.launches[1:], plain.out_bytes)


@DETERMINISTIC
def test_where_there_is_nothing_to_read_only_what_writes_is_launched(deterministic: bool) -> None:
    # Launches of delta, of dk and dv, of dq.
    for dims, expected in (
        ((0, 5, 7, 4, 2), [False, False, False]),
        ((2, 0, 7, 4, 4), [False, True, False]),
        ((2, 5, 0, 4, 2), [True, False, True]),
        ((2, 0, 0, 4, 2), [False, False, False]),
    ):
        for arch in ("sm_80", "sm_90"):
            plan = backward(arch=arch, dims=dims, deterministic=deterministic)
            assert [launch.num_blocks > 0 for launch in plan.launches] == expected
            assert (plan.workspace_bytes > 0) == expected[0]


@DETERMINISTIC
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_as_many_blocks_as_a_launch_has_are_supported(arch: str, deterministic: bool) -> None:
    most = MAX_GRID // (STATS_ROWS // DELTA_ROWS)  # heads of one query, counted in blocks of delta
    plan = backward(arch=arch, dims=(most, 1, 1, 1, 1), deterministic=deterministic)
    assert MAX_GRID - 4 < max(launch.num_blocks for launch in plan.launches) <= MAX_GRID
    # Too many for delta; for dk and dv; too many key blocks, of which an sm90 block takes several.
    for dims in ((most + 1, 1, 1, 1, 1), (2**20, 1, 2**20, 1, 1), (2**24, 1, 2**14, 1, 1)):
        with pytest.raises(UnsupportedError, match=rf"batch {dims[0]} .*at most {MAX_GRID}.*Split the batch"):
            backward(arch=arch, dims=dims, deterministic=deterministic)


def test_memory_and_work_of_one_problem_in_numbers() -> None:
    more: dict[str, Any] = {"dims": (2, 300, 500, 4, 2), "causal": True, "dtype": "float16"}
    plan, fixed = (backward(72, 96, deterministic=deterministic, **more) for deterministic in (False, True))
    stats, dq, dkdv = 8 * 2 * 4 * 384, 4 * 2 * 4 * 304 * 96, 4 * 2 * 2 * 2 * 512 * 96
    # 32 key blocks do not fill the GPU, so each head of a group gets separate thread blocks, and separate dk and dv.
    assert {name: part.size for name, part in plan.workspace.items()} == {
        "stats": stats, "dq_acc": dq, "dk_acc": dkdv, "dv_acc": dkdv}  # fmt: skip
    assert plan.workspace_bytes == stats + dq + 2 * dkdv
    assert {name: part.size for name, part in fixed.workspace.items()} == {"stats": stats}
    for each in (plan, fixed, make_plan(make_problem(72, 96, "backward", **more), None)):
        assert each.out_bytes == 2 * 2 * (300 * 4 * 72 + 500 * 2 * (72 + 96))
        assert each.lse_bytes == 0
        assert each.flops == 2 * 2 * 4 * sum(range(201, 501)) * (3 * 72 + 2 * 96)


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 32])
def test_query_heads_are_split_only_with_few_keys(group: int) -> None:
    splits, costs = [], []
    for seqlen in (1, 300, 4096, 2**16):
        plan = backward(128, 128, arch="sm_80", dims=(1, 64, seqlen, group, 1))
        splits.append(plan.launches[1].fields["splits"])
        costs.append(sum(plan.workspace[name].size for name in ("dk_acc", "dv_acc") if name in plan.workspace))
        assert backward(dims=(1, 64, seqlen, group, 1), deterministic=True).launches[1].fields["splits"] == 1
    assert splits[0] == group  # one block of keys
    assert backward(dims=(999, 64, 1, group, 1)).launches[1].fields["splits"] == 1  # many of them
    assert splits == sorted(splits, reverse=True)
    assert splits[-1] == 1  # 1024 of them
    assert max(costs) <= 2**26  # whatever the length: some waves of blocks of 64 keys


def test_deterministic_blocks_are_numbered_by_a_counter() -> None:
    for dim in (64, 96, 128):
        for deterministic in (False, True):
            launch = backward(dim, dim, arch="sm_90", causal=True, deterministic=deterministic).launches[-1]
            assert launch.takes_counter == deterministic


def test_clusters_compute_wide_heads_where_they_may() -> None:
    dims: dict[str, Any] = {"dims": (2, 300, 500, 4, 4)}
    for head_dim, head_dim_v in ((256, 256), (200, 64), (64, 256), (200, 192)):
        plan = backward(head_dim, head_dim_v, arch="sm_90", softcap=5.0, **dims)
        delta, main, convert = plan.launches
        assert main.variant.source == "sm90/backward_cluster/backward_cluster.cu"
        assert main.num_blocks == 2 * 2 * 4 * 4  # of each key block, sequence and head
        assert plan.workspace["dq_acc"].size == 4 * 2 * 4 * 304 * 256
        assert (delta.fields["padded_dim"], convert.fields["padded_dim"]) == (256, 256)
        assert "semaphores" not in plan.workspace
        others = backward_plan(plan.problem, H100, (), {main.variant}).launches
        assert {launch.variant.op for launch in others} == {"delta", "backward_dq", "backward_dk", "backward_dv"}
    of_others = [
        backward(192, 192, arch="sm_90", **dims),
        backward(256, 256, arch="sm_90", deterministic=True, **dims),
        backward(256, 256, arch="sm_90", sm_margin=1, **dims),
        backward(256, 256, arch="sm_90", dims=(1, 300, 500, 8, 1)),  # few key blocks of grouped heads: sm80
        of_lengths(256),
        make_plan(mod_problem(256, dims=(2, 300, 500, 4, 4)), H100),
        make_plan(problem_of("backward", "float16", 256, 256, accumulate=True), H100),
    ]
    assert not any(launch.variant.num_in_cluster > 1 for plan in of_others for launch in plan.launches)


def test_keys_that_few_queries_see_have_their_own_tile() -> None:
    tiles = []
    for seqlen, causal in ((8192, False), (16384, True), (8191, False), (8192, True)):
        launch = backward(128, 128, arch="sm_90", dims=(2, seqlen, seqlen, 16, 16), causal=causal).launches[1]
        tiles.append(launch.variant.tile)
        assert tiles[-1] == choose_backward(128, 128, seqlen / (2 if causal else 1), False)
    assert tiles[0] == tiles[1] != tiles[2] == tiles[3]


@pytest.mark.parametrize("more", [{}, {"causal": True}, {"causal": True, "deterministic": True}], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_packed_sequences_have_slots_that_hold_them_all(dim: int, more: dict[str, Any]) -> None:
    with planned_with(tiles_sm90, CLUSTER_BACKWARD=()):  # they are for dense calls
        dense = backward(dim, dim, arch="sm_90", dims=(4, 4096, 4096, 16, 16), **more)
    plan = of_lengths(dim, **more)
    assert plan.fallback is None
    for launch, like in zip(plan.launches, dense.launches, strict=True):
        tile = like.variant.tile
        if isinstance(tile, WarpgroupBackwardTile):
            tile = tile.for_varlen()
        assert launch.variant == replace(like.variant, tile=tile, is_varlen=True)
        assert {name for name, box in launch.tma_boxes.items() if box.varlen} == set(like.tma_boxes)
        if "deterministic" in like.fields:
            assert launch.fields["deterministic"] == like.fields["deterministic"]
    fields, slots, delta = plan.launches[1].fields, 4 * 4096 // 128 + 4 + 2, plan.launches[0]
    rows = delta.fields["stats_rows"] // DELTA_ROWS * -(-16 // delta.fields["heads_each"])
    assert fields["stats_rows"] == slots * 128
    assert fields["num_k_blocks"] == slots
    assert delta.num_blocks == 1 + slots + rows
    if dim > 128:
        assert [plan.workspace[part].size for part in ("q_blocks", "k_blocks")] == [64 * slots] * 2
        assert all(launch.num_blocks == H100.num_sms and launch.takes_counter for launch in plan.launches[1:])
        assert not any(launch.takes_counter for launch in dense.launches)
        return
    tile = plan.launches[1].variant.tile
    assert fields["num_q_blocks"] * tile.block_q == fields["stats_rows"]
    assert plan.workspace["semaphores"].size == 4 * (16 * fields["num_q_blocks"] + fields["shared_keys"] + 1)
    assert plan.workspace["key_list"].size == 64 * slots


def test_rows_of_more_sequences_than_kernels_count_are_refused() -> None:
    few, varlen_kwargs = (2**24, 1, 1, 64), {"seqused_k": (2**24,)}
    with pytest.raises(UnsupportedError, match=r"16777216 x 1 queries.* rounded up to 128, are 2147483648 rows"):
        cuflash.plan(few, few, few, op="backward", dtype="bfloat16", device="sm_90", **varlen_kwargs)


def test_few_packed_keys_of_wide_grouped_heads_take_sm80_kernels() -> None:
    few = of_lengths(256, 2, 256, heads=(16, 2))
    assert "few keys" in few.fallback
    assert of_lengths(256, 64, 256, heads=(16, 2)).fallback is None


def mod_problem(head_dim: int, dims: tuple[int, int, int, int, int] = (2, 300, 500, 4, 2), **arguments: Any) -> Problem:
    """Returns a problem with a score_mod, unless `score_mod` is None, and other mods in `arguments`."""
    batch, seqlen_q, seqlen_k, heads, heads_kv = dims
    q, k = (batch, seqlen_q, heads, head_dim), (batch, seqlen_k, heads_kv, head_dim)
    arguments = {"score_mod": lambda score, b, h, q_idx, k_idx: score * score + (q_idx - k_idx)} | arguments
    return cuflash.plan(q, k, k, op="backward", dtype="bfloat16", device="cpu", **arguments).problem


@DETERMINISTIC
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_kernels_get_mod_code_for_queries_or_keys_as_rows(dim: int, deterministic: bool) -> None:
    dims = (2, 8192, 8192, 2, 2)
    problem = mod_problem(dim, dims=dims, deterministic=deterministic)
    with planned_with(tiles_sm90, CLUSTER_BACKWARD=()):  # they take no mods
        plain = backward(dim, dim, arch="sm_90", dims=dims, deterministic=deterministic)
    plan = make_plan(problem, H100)
    assert plan.fallback is None
    assert [x.variant.op for x in plan.launches] == [x.variant.op for x in plain.launches]
    assert plan.launches[0].variant == plain.launches[0].variant
    for launch in plan.launches[1:]:
        assert launch.variant.mod_code == make_mod_code(problem, keys_as_rows=launch.variant.op != "backward_dq")
    assert make_mod_code(problem) != make_mod_code(problem, keys_as_rows=True)


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_kernels_that_spill_give_way_to_others_and_at_last_to_sm80(dim: int) -> None:
    problem, spilled, taken = mod_problem(dim, dims=(2, 8192, 8192, 2, 2)), set[Variant](), []
    while (plan := backward_plan(problem, H100, (), spilled)).fallback is None:
        variants = [launch.variant for launch in plan.launches[1:]]
        assert not spilled.intersection(variants)
        taken.append(variants)
        spilled.add(variants[-1])
    assert "more registers" in plan.fallback
    assert plan.launches == backward_plan(problem, DEVICES["sm_90"], ("q",)).launches
    assert len(taken) >= (2 if dim in (64, 192, 256) else 1)
    for before, after in pairwise(taken):
        assert before[:-1] == after[:-1] or len(before) != len(after)


def test_sinks_alone_change_nothing_of_backward() -> None:
    plain = backward(64, 64, arch="sm_90")
    plan = make_plan(mod_problem(64, score_mod=None, sinks=(4,)), H100)
    assert plan.launches == plain.launches
    dropped = make_plan(mod_problem(64, score_mod=None, dropout_p=0.5, dropout_seed=1), H100)
    assert dropped.launches[1].variant.mod_code is not None


@DETERMINISTIC
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_varlen_calls_have_the_same_kernels_with_mods(dim: int, deterministic: bool) -> None:
    """Delta writes longer list entries for blocks of rows, also where dense calls would use mask tiles."""
    dims = (2, 8192, 8192, 2, 2)
    problem = mod_problem(dim, seqused_k=(2,), dims=dims, deterministic=deterministic)
    plan, plain = (
        make_plan(mod_problem(dim, seqused_k=(2,), dims=dims, deterministic=deterministic, **more), H100)
        for more in ({}, {"score_mod": None, "sinks": (2,)})
    )
    assert plan.fallback is plain.fallback is None
    assert [x.variant.source for x in plan.launches] == [x.variant.source for x in plain.launches]
    for launch, like in zip(plan.launches, plain.launches, strict=True):
        assert launch.variant.is_varlen
        assert (launch.num_blocks, launch.fields) == (like.num_blocks, like.fields)
        if launch.variant.op == "delta":
            assert (launch.variant.lists_seqlens, like.variant.lists_seqlens) == (True, False)
            assert launch.variant == replace(like.variant, lists_seqlens=True)
        else:
            assert launch.variant.mod_code == make_mod_code(problem, keys_as_rows=launch.variant.op != "backward_dq")
            assert like.variant.mod_code is None
    lists = [name for name in ("key_list", "q_blocks", "k_blocks") if name in plan.workspace]
    assert lists
    for name in lists:
        assert plan.workspace[name].size * BLOCK_WORDS == plain.workspace[name].size * MOD_BLOCK_WORDS


def test_varlen_kernels_that_spill_give_way_too() -> None:
    problem, spilled = mod_problem(192, seqused_k=(2,), dims=(2, 8192, 8192, 2, 2)), set[Variant]()
    while (plan := backward_plan(problem, H100, (), spilled)).fallback is None:
        assert not spilled.intersection(launch.variant for launch in plan.launches)
        spilled.add(plan.launches[-1].variant)
    assert len(spilled) > 1
    assert "more registers" in plan.fallback
    assert not any(launch.variant.lists_seqlens for launch in plan.launches)


def test_few_keys_of_wide_grouped_heads_with_mods_are_shared_out() -> None:
    plan = make_plan(mod_problem(256, dims=(1, 256, 256, 16, 2)), H100)
    assert "few keys" in plan.fallback
    assert make_plan(mod_problem(128, dims=(1, 256, 256, 16, 2)), H100).fallback is None
