"""Plans of forward on Hopper for few queries over many keys, and for many queries of variable-length sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.planning import decoding
from cuflash.planning.device import DEVICES
from cuflash.planning.plan import Launch, Plan
from cuflash.planning.planner import plan as make_plan
from cuflash.planning.tile_shapes_sm90 import GROUP_ROWS
from cuflash.planning.variant import Variant


def plan_of(queries: int = 1, keys: int = 4096, heads: tuple[int, int] = (32, 8), batch: int = 4, **more: Any) -> Plan:
    """Returns the plan of a call over a cache."""
    shapes = (batch, queries, heads[0], 128), *[(batch, keys, heads[1], 128)] * 2
    return cuflash.plan(*shapes, dtype="bfloat16", device="sm_90", seqused_k=(batch,), **more)


def launched(*args: Any, **more: Any) -> Launch:
    (launch,) = plan_of(*args, **more).launches
    return launch


@pytest.mark.parametrize(
    ("queries", "heads", "few"),
    [(1, (32, 8), True), (16, (32, 8), True), (1, (128, 1), True), (16, (4, 4), True), (300, (32, 8), False)],
)
def test_keys_are_shared_out_where_a_sequence_has_few_queries(queries: int, heads: tuple[int, int], few: bool) -> None:
    for batch in (1, 4, 300):
        for keys in (100, 4096) if few else (4096,):
            source = launched(queries, keys, heads, batch).variant.source
            assert source.startswith("sm90/decode/" if few else "sm90/forward/")


def test_a_bound_on_queries_counts_and_not_their_total() -> None:
    shapes = (90_000, 32, 128), (90_000, 8, 128), (90_000, 8, 128)
    for bound, source in ((4, "sm90/decode/narrow.cu"), (16, "sm90/decode/decode.cu"), (300, "sm90/forward/forward.cu"),
                          (None, "sm90/forward/forward.cu")):  # fmt: skip
        lengths = {"cu_seqlens_q": (5,), "cu_seqlens_k": (5,), "max_seqlen_q": bound}
        (launch,) = cuflash.plan(*shapes, dtype="bfloat16", device="sm_90", **lengths).launches
        assert launch.variant.source == source


def test_keys_are_shared_out_where_most_of_the_gpu_would_idle() -> None:
    # (batch, queries, keys, query heads, kv heads)
    idle = [(1, 1, 4096, 32, 8), (1, 64, 4096, 32, 8), (1, 300, 9000, 2, 1), (4, 1, 32768, 16, 16),
            (1, 4096, 4096, 1, 1)]  # fmt: skip
    busy = [(1, 1, 300, 32, 8), (1, 512, 512, 16, 16), (64, 128, 128, 12, 12), (16, 2048, 2048, 16, 16),
            (1, 2048, 2048, 16, 16), (4, 512, 8192, 32, 32)]  # fmt: skip
    for sizes in (*idle, *busy):
        batch, queries, keys, heads_q, heads_kv = sizes
        shapes = (batch, queries, heads_q, 128), (batch, keys, heads_kv, 128), (batch, keys, heads_kv, 128)
        for more in ({}, {"seqused_k": (batch,)} if queries > 16 else {}):
            (launch,) = cuflash.plan(*shapes, dtype="bfloat16", device="sm_90", causal=True, **more).launches
            source = "sm90/decode/" if sizes in idle else "sm90/forward/"
            assert launch.variant.source.startswith(source), (sizes, more)


def test_rows_that_fit_a_warp_take_narrow_unless_bits_must_match() -> None:
    for queries, heads, narrow in ((1, (8, 8), True), (4, (32, 8), True), (5, (32, 8), False)):
        assert (launched(queries, heads=heads).variant.source == "sm90/decode/narrow.cu") == narrow
    assert launched(num_splits=3).variant.source == "sm90/decode/narrow.cu"
    assert launched(num_splits=1).variant.source == launched(split_size=512).variant.source == "sm90/decode/decode.cu"


def test_more_rows_take_narrow_if_merging_costs_more_than_rereading() -> None:
    # 48 query heads of one kv head over 8192 keys; then more rows than FEW_ROWS.
    for batch, heads, narrow in ((1, (48, 1), True), (8, (48, 1), True), (16, (48, 1), False), (8, (192, 8), False),
                                 (1, (128, 1), True), (1, (136, 1), False)):  # fmt: skip
        launch = launched(1, 8192, heads, batch)
        assert (launch.variant.source == "sm90/decode/narrow.cu") == narrow
        assert launch.arrivals == batch * heads[1] * -(-heads[0] // heads[1] // (16 if narrow else 64))
    assert launched(1, 8192, (48, 1), 1, num_splits=3).variant.source == "sm90/decode/decode.cu"


@pytest.mark.parametrize(
    "mask",
    [{}, {"causal": True}, {"window_size": (3000, 30)}, {"diagonal_offset": 4000, "window_size": (-1, 7)}],
    ids=str,
)
def test_lengths_that_are_all_alike_come_with_the_mask_of_the_call(mask: dict[str, Any]) -> None:
    plan = cuflash.plan((2, 5, 8, 64), (2, 4096, 2, 64), (2, 4096, 2, 64), dtype="bfloat16", device="sm_90", **mask)
    varlen = plan.problem.seqlen_info
    assert (varlen.batch_q, varlen.rows_q, varlen.batch_k, varlen.rows_k) == (2, 5, 2, 4096)
    assert varlen.mask(5, 4096) == plan.problem.mask


def test_the_bits_of_other_calls_are_kept_where_the_call_asks_for_them() -> None:
    shapes = (1, 1, 4, 64), (1, 9000, 4, 64), (1, 9000, 4, 64)
    (launch,) = cuflash.plan(*shapes, dtype="bfloat16", device="sm_90", split_size=256).launches
    assert launch.variant.source == "sm90/forward/forward.cu"


def doubled(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return score * 2.0


def every_third(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return (q_idx + k_idx) % 3 > 0


MODS: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": np.zeros(32, np.float32)},
    "score_mod": {"score_mod": doubled},
    "mask_mod": {"mask_mod": every_third},
    "bias": {"bias": np.zeros((32, 1, 4096), np.float32)},
}


def mod_plan(device: str = "sm_90", queries: int = 1, **more: Any) -> Plan:
    """Returns the plan of a call over a cache, from arrays."""
    q, cache = np.zeros((4, queries, 32, 128), np.float16), np.zeros((4, 4096, 8, 128), np.float16)
    return cuflash.plan(q, cache, cache, seqused_k=np.zeros(4, np.int32), device=device, **more)


@pytest.mark.parametrize("name", MODS)
def test_scores_and_masks_of_the_caller_share_keys_as_plain_calls_do(name: str) -> None:
    calls: list[tuple[str, int, dict[str, Any]]] = [("sm_90", 1, {}), ("sm_90", 8, {}), ("sm_80", 1, {})]
    for device, queries, more in (*calls, ("sm_90", 1, {"num_splits": 3})):
        plain, modded = (mod_plan(device, queries, **more, **mods) for mods in ({}, MODS[name]))
        (launch,), (plain_launch,) = modded.launches, plain.launches  # one each: no launch computes mask tiles
        assert launch.variant.source == plain_launch.variant.source
        assert launch.variant.mod_code is not None
        assert (launch.num_blocks, launch.fields) == (plain_launch.num_blocks, plain_launch.fields)
        assert modded.workspace == plain.workspace


def test_all_calls_with_sinks_alone_have_one_kernel() -> None:
    sinks = [np.zeros(32, dtype) for dtype in ("float32", "float16")]
    masks: list[dict[str, Any]] = [{}, {"causal": True}, {"window_size": (9, 0)}]
    names = {mod_plan(sinks=x, **mask).kernel for x in sinks for mask in masks}
    assert len(names) == 1


@pytest.mark.parametrize("device", ["sm_90", "sm_80"])
def test_keys_are_not_split_for_one_split_or_dropout(device: str) -> None:
    for more in ({"num_splits": 1}, {"split_size": 256}, {"dropout_p": 0.5, "dropout_seed": 1}):
        plan = mod_plan(device, sinks=np.zeros(32, np.float32), **more)
        assert plan.launches[0].variant.source.split("/")[-1] == "forward.cu"
        assert "decode" not in plan.kernel
        assert not plan.workspace_bytes


def test_the_next_kernel_for_few_queries_is_taken_if_one_spills() -> None:
    problem, spilled = mod_plan(score_mod=doubled).problem, list[Variant]()
    while not spilled or spilled[-1].of_warpgroups:
        (launch,) = make_plan(problem, DEVICES["sm_90"], (), spilled).launches
        assert launch.variant not in spilled
        spilled.append(launch.variant)
    narrow, wide = "sm90/decode/narrow.cu", "sm90/decode/decode.cu"
    assert list(dict.fromkeys(variant.source for variant in spilled)) == [narrow, wide, "sm80/decode.cu"]
    tiles: list[Any] = [variant.tile for variant in spilled[:-1]]
    assert [tile.single for tile in tiles] == [True, *[False] * (len(tiles) - 1)]
    keys = [tile.block_k for tile in tiles if tile.block_q == GROUP_ROWS]
    assert keys == sorted(keys, reverse=True)


def test_few_sequences_that_are_not_packed_have_kernels_of_their_own() -> None:
    for batch, few in ((1, True), (32, True), (33, False)):
        assert launched(batch=batch).variant.tile.few == few
    varlen_kwargs = {"cu_seqlens_q": (3,), "max_seqlen_q": 1, "seqused_k": (2,)}
    (launch,) = cuflash.plan(
        (2, 32, 128), (2, 99, 8, 128), (2, 99, 8, 128), dtype="bfloat16", device="sm_90", **varlen_kwargs
    ).launches
    assert launch.variant.name.endswith("_decode")


def test_blocks_with_one_work_tile_take_the_single_variant() -> None:
    for batch, more, single in ((1, {}, True), (16, {}, True), (17, {}, False), (1, {"num_splits": 2}, False)):
        plan = plan_of(batch=batch, **more)
        (launch,) = plan.launches
        tile = launch.variant.tile
        assert tile.single == single, batch  # 132 SMs, and 8 kv heads in each batch element
        assert not tile.single or not launch.takes_counter
        assert 2 * (launch.variant.smem_bytes + 1024) <= DEVICES["sm_90"].smem_per_sm or not tile.single
    (launch,) = cuflash.plan((4, 1, 32, 128), (90, 64, 8, 128), (90, 64, 8, 128), dtype="bfloat16", device="sm_90",
                             page_table=(4, 9), seqused_k=(4,)).launches  # fmt: skip
    assert not launch.variant.tile.single
    assert not launched(queries=8).variant.tile.single  # more rows than a warp has
    assert launched(batch=1, queries=1, heads=(128, 1)).variant.tile.single
    assert not launched(batch=17, queries=1, heads=(128, 1)).variant.tile.single


def test_the_device_cuts_keys_unless_the_call_says_how() -> None:
    assert launched().fields["split_tiles"] == 0
    for splits, more in ((1, {}), (5, {}), (99, {}), (1, {"split_size": 256})):  # one by split_size: see hopper.py
        launch = launched(**{"num_splits": splits} | more)
        tiles, each = 4096 // launch.variant.tile.block_k, launch.fields["split_tiles"]
        assert -(-tiles // each) == min(splits, tiles)


def test_more_rows_than_kernels_count_are_not_shared_out() -> None:
    for batch, decodes in ((2**16, True), (2**24, False)):
        shapes = (batch, 1, 16, 64), (batch, 1, 1, 64), (batch, 1, 1, 64)
        plan = cuflash.plan(*shapes, dtype="bfloat16", device="sm_90")
        assert ("decode" in plan.kernel) == decodes


def test_one_split_needs_no_memory_and_no_wait() -> None:
    plan = plan_of(num_splits=1)
    assert not plan.workspace_bytes
    assert not plan.launches[0].arrivals
    plan = plan_of(num_splits=2)
    assert plan.workspace_bytes
    assert plan.launches[0].arrivals == 4 * 8  # query blocks


def test_the_workspace_holds_all_splits_that_the_device_may_make() -> None:
    slots = launched(batch=300).fields["max_slots"]
    assert slots >= decoding.SPLITS_OF_A_BLOCK * DEVICES["sm_90"].num_sms + 300 * 8
    assert launched(batch=4).fields["max_slots"] == DEVICES["sm_90"].num_sms  # at most one for each thread block
    assert plan_of(batch=300).workspace_bytes == 4 * slots * 4 * (128 + 2)


def test_more_splits_than_key_tiles_take_no_more_memory() -> None:
    for queries in (1, 16):
        tiles = 4096 // launched(queries, num_splits=7).variant.tile.block_k
        most = plan_of(queries, num_splits=tiles)
        for splits in (tiles + 1, 10**6, 10**400):
            more = plan_of(queries, num_splits=splits)
            assert more.workspace == most.workspace
            assert more.launches[0].fields["max_slots"] == most.launches[0].fields["max_slots"]


def test_dense_calls_take_any_number_of_splits() -> None:
    for arch in ("sm_90", "sm_80"):
        shapes = (1, 1, 8, 64), (1, 4096, 8, 64), (1, 4096, 8, 64)
        assert cuflash.plan(*shapes, dtype="bfloat16", device=arch, num_splits=10**400).launches


def test_there_are_thread_blocks_even_if_no_key_may_be_used() -> None:
    assert launched(max_seqlen_k=0).num_blocks == 32


def test_more_key_tiles_than_can_be_counted_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_TILES", 4 * 8 * 32)
    assert launched().variant.source == "sm90/decode/narrow.cu"
    assert launched(keys=4097).variant.source == "sm90/forward/forward.cu"


@pytest.mark.parametrize(("page_size", "box"), [(8, 8), (24, 8), (64, 64), (128, 128), (256, 128), (1000, 8)])
def test_a_copy_brings_keys_of_one_page(page_size: int, box: int) -> None:
    shapes = (4, 1, 32, 128), (90, page_size, 8, 128), (90, page_size, 8, 128)
    (launch,) = cuflash.plan(*shapes, dtype="bfloat16", device="sm_90", page_table=(4, 9), seqused_k=(4,)).launches
    assert launch.fields["page_box"] == launch.tma_boxes["k"].rows == box


@pytest.mark.parametrize("page_size", [1, 2, 3, 12, 20, 1001])
def test_keys_of_odd_pages_are_copied_by_threads(page_size: int) -> None:
    shapes = (4, 1, 32, 128), (90, page_size, 8, 128), (90, page_size, 8, 128)
    (launch,) = cuflash.plan(*shapes, dtype="bfloat16", device="sm_90", page_table=(4, 9), seqused_k=(4,)).launches
    assert launch.variant.of_warpgroups
    assert launch.fields["page_box"] == 0


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 8, 12, 24, 64, 96, 255, 256, 257, 1000, 2**20 + 1])
def test_the_page_of_a_key_is_a_product_and_a_shift(page_size: int) -> None:
    shapes = (4, 1, 32, 128), (9, page_size, 8, 128), (9, page_size, 8, 128)
    (launch,) = cuflash.plan(*shapes, dtype="bfloat16", device="sm_90", page_table=(4, 9), seqused_k=(4,)).launches
    magic, shift = launch.fields["page_magic"] % 2**32, launch.fields["page_shift"]
    keys = {key for n in (1, 2, 1000, 2**31 // page_size - 1) for key in (n * page_size - 1, n * page_size)}
    for key in sorted({0, 2**31 - 1, *keys}):
        assert key * magic >> shift == key // page_size


def test_a_printed_plan_tells_how_keys_are_cut() -> None:
    for arch, more, message in (
        ("sm_90", {}, "as many as the lengths on the GPU ask for"),
        ("sm_90", {"num_splits": 3}, "of 1408 keys"),
        ("sm_80", {"num_splits": 3}, "3"),
        ("sm_90", {"num_splits": 1}, None),
    ):
        q, k = (4, 1, 32, 128), (4, 4096, 8, 128)
        lines = str(cuflash.plan(q, k, k, dtype="bfloat16", device=arch, seqused_k=(4,), **more)).splitlines()
        of_all = "(for each of 32 query blocks); the last one to end merges them"
        expected = [] if message is None else [f"splits     {message} {of_all}"]
        assert [line for line in lines if line.startswith("splits")] == expected
