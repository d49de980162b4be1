"""Plans of forward and lse: choices for speed, edge cases and limits."""

from __future__ import annotations

from itertools import product
from typing import Any

from plans import mod_problem
from plans import problem as make_problem
from variants import problem_of

import cuflash
from cuflash.planning.device import DEVICES
from cuflash.planning.forward import L2_BYTES, LONG_PAIRS, MOST_TAIL_PARTS
from cuflash.planning.plan import Launch
from cuflash.planning.planner import plan as make_plan
from cuflash.planning.tile_shapes_sm90 import WORK_SLOTS
from cuflash.planning.tiles_sm90 import MOD_TILES, TILES, choose, choose_mod_tiles

H100 = DEVICES["sm_90"]
MANY = float("inf")


def launched(*dims: int, op: str = "forward", **more: Any) -> Launch:
    """Returns the launch of the sm90 kernel."""
    (launch,) = make_plan(make_problem(*dims, op=op, **more), H100).launches
    assert launch.variant.source == f"sm90/forward/{op}.cu"
    return launch


def test_the_tile_is_chosen_by_the_mean_visible_keys_of_a_query() -> None:
    windows: list[dict[str, Any]] = [{"window_size": (keys, keys)} for keys in (300, 700)]
    causal: list[dict[str, Any]] = [{"causal": True}, {"causal": True, "diagonal_offset": -2000}]
    tiles = set()
    for seqlen_k, more in product((100, 2289, 2290, 3000, 4096), ({}, *causal, *windows)):  # 2289: just under 640 each
        problem = make_problem(dims=(1, 4096, seqlen_k, 18, 18), **more)
        keys = MANY if problem.mask.is_full else problem.mask.num_visible() / 4096
        (launch,) = make_plan(problem, H100).launches
        assert launch.variant.tile == choose("forward", 64, 64, keys, False)
        tiles.add(launch.variant.tile)
    assert len(tiles) == 2


def test_a_tile_of_fewer_rows_is_taken_where_an_sm_computes_fewer_rows() -> None:
    tall, short = choose("forward", 64, 64, MANY, False), choose("forward", 64, 64, 0.0, False)
    assert tall is not None
    assert short is not None
    assert (tall.block_q, short.block_q) == (192, 128)
    for batch, queries, heads, more, expected in (
        (1, 1024, 12, {}, short),  # each SM has a tile
        (64, 197, 12, {}, short),  # two tiles a sequence, which are half empty
        (4096, 64, 8, {}, short),
        (1, 4096, 10, {}, tall),  # two rounds of 192 rows, three of 128
        (2, 4096, 10, {}, tall),  # four and five
        (1, 8192, 4, {}, short),  # two rounds each
        (1, 4096, 8, {"causal": True}, short),
        (1, 4096, 16, {"causal": True}, tall),
        (8, 1024, 16, {"causal": True}, short),  # few keys
    ):
        dims = batch, queries, queries, heads, heads
        assert launched(dims=dims, **more).variant.tile == expected, (dims, more)
    packed = make_plan(problem_of("forward", "bfloat16", 64, 64, queries=300, keys=4096, packed=True), H100)
    assert packed.variant is not None
    assert packed.variant.tile == tall.for_varlen(False)  # whose lengths the device reads


def test_tiles_are_counted_where_blocks_take_several_of_different_lengths() -> None:
    for op in ("forward", "lse"):
        for batch, several in ((H100.num_sms // 4, False), (H100.num_sms // 4 + 1, True)):  # of 4 tiles each
            dims = batch, 128, 256, 4, 4
            assert launched(op=op, dims=dims, causal=True).takes_counter == several
            assert launched(op=op, dims=dims, window_size=(9, -1)).takes_counter == several
            full = launched(op=op, dims=dims)
            assert not full.takes_counter
            assert full.num_blocks == H100.num_sms
    assert (
        not make_plan(make_problem(dims=(34, 128, 256, 4, 4), causal=True), DEVICES["sm_80"]).launches[0].takes_counter
    )


def test_heads_that_start_together_have_their_keys_and_values_in_l2() -> None:
    def together(seqlen_k: int, heads: tuple[int, int] = (16, 16), batch: int = 4, **more: Any) -> int:
        arguments = {"dims": (batch, 256, seqlen_k, *heads), "causal": True} | more
        return launched(128, 128, **arguments).fields["heads_in_l2"]

    assert together(1024, causal=False) == together(2**20) == 1
    assert together(256) == 4 * 16  # all of them
    assert together(256, (3, 3), batch=1) == 2  # a power of two
    for seqlen_k in (1024, 8192, 2**15):
        count, head_bytes = together(seqlen_k), 2 * seqlen_k * (128 + 128)
        assert count * head_bytes <= L2_BYTES < 4 * count * head_bytes
    assert together(8192, (16, 2)) > together(8192)  # a group shares its keys
    # In a window, only keys that a query block sees count.
    assert together(2**20, window_size=(1023 - 128, 0)) == together(1024)


def test_heads_come_in_pairs_but_of_short_sequences_with_wide_heads() -> None:
    def in_pairs(count: int, mean: int, head_dim: int, heads: int = 16, **more: Any) -> int:
        rows = (count * mean, heads, head_dim)
        varlen_kwargs = {"cu_seqlens_q": (count + 1,), "cu_seqlens_k": (count + 1,), "max_seqlen_k": mean} | more
        plan = cuflash.plan(rows, rows, rows, dtype="bfloat16", device="sm_90", num_splits=1, **varlen_kwargs)
        return int(plan.launches[0].fields["in_pairs"])

    assert in_pairs(32, 512, 128) == in_pairs(32, 512, 64) == in_pairs(16, LONG_PAIRS, 256) == 1
    assert in_pairs(16, LONG_PAIRS - 1, 256) == in_pairs(32, 512, 192) == 0
    assert in_pairs(1, 16384, 256) == 1
    assert in_pairs(1, 16384, 256, max_seqlen_k=500) == 0  # max_seqlen_k bounds the keys
    assert in_pairs(32, 512, 64, heads=3) == 0
    pages = {"cu_seqlens_k": None, "max_seqlen_k": None}
    plan = cuflash.plan((2000, 8, 256), (99, 16, 8, 256), (99, 16, 8, 256), cu_seqlens_q=(3,), page_table=(2, 64),
                        dtype="bfloat16", device="sm_90", num_splits=1, **pages)  # fmt: skip
    assert plan.launches[0].fields["in_pairs"] == 1  # up to 1024 keys, in pages of 16


def test_the_last_packed_sequences_of_one_wave_start_together() -> None:
    """They do so with wide heads, under a mask."""

    def parts(count: int, mean: int, head_dim: int = 256, heads: int = 16, cached: bool = False, **more: Any) -> int:
        rows, one = (count * mean, heads, head_dim), (count, mean, heads, head_dim)
        varlen_kwargs = {"cu_seqlens_q": (count + 1,), "cu_seqlens_k": (count + 1,)}
        if cached:
            rows, varlen_kwargs = one, {"seqused_k": (count,)}
        more = {"causal": True, "num_splits": 1, "max_seqlen_k": mean} | more
        plan = cuflash.plan(rows, rows, rows, dtype="bfloat16", device="sm_90", **varlen_kwargs, **more)
        return int(plan.launches[0].fields["tail_parts"])

    # Sequences with a query block for each SM, and the rows behind them.
    for count, mean in ((64, 256), (32, 512), (32, 500), (16, 1024)):
        sequences, blocks = parts(count, mean) - 1, 16 * -(-mean // 128)
        assert (sequences - 1) * blocks < H100.num_sms <= sequences * blocks
    assert parts(32, 512, window_size=(99, 9), causal=False) == parts(32, 512)
    assert parts(8, 2048) == 2 + 1  # two at least, as long as one has no more than two waves
    assert parts(4, 4096) == 0  # heads start in two sections
    assert parts(4, 4096, heads=8) == parts(4, 4097, heads=8, max_seqlen_k=4096) == 2 + 1
    assert parts(4, 4225, heads=8, max_seqlen_k=4096) == 0
    assert parts(500, 9, heads=1) == MOST_TAIL_PARTS
    assert parts(1, 512) == parts(32, 512, causal=False) == parts(32, 512, head_dim=128) == 0
    assert parts(32, 512, cached=True) == 0


def test_kernels_mods_that_spill_are_not_taken() -> None:
    """Other tiles of the same head dims come next, and at last the sm80 kernels."""
    for op, head_dim, causal in (
        ("forward", 64, False),
        ("forward", 64, True),
        ("forward", 136, False),
        ("lse", 64, True),
    ):
        call, spilled, sources = mod_problem(op, head_dim, causal=causal), [], [f"sm90/forward/{op}.cu"]
        while sources[-1].startswith("sm90/"):
            plan = make_plan(call, H100, avoided=frozenset(spilled))
            (launch,) = plan.launches
            assert launch.variant not in spilled
            assert launch.variant.mod_code is not None
            spilled.append(launch.variant)
            sources.append(launch.variant.source)
        tiles = [variant.tile for variant in spilled[:-1]]
        chosen = choose_mod_tiles(op, head_dim, head_dim, call.seqlen_k / 2 if causal else MANY, False, False)
        assert tuple(tiles) == chosen
        assert len({(tile.head_dim, tile.head_dim_v) for tile in tiles}) == 1
        assert tiles[0] == choose(op, head_dim, head_dim, call.seqlen_k / 2 if causal else MANY, False)
        assert sources[-1] == f"sm80/{op}.cu"
        assert "registers" in plan.fallback


def test_mod_tiles_fit_and_have_the_head_dims_of_plain_tiles() -> None:
    dims = {(row.head_dim, row.head_dim_v) for row in TILES}
    assert dims == {(row.head_dim, row.head_dim_v) for row in MOD_TILES}
    assert all(row.smem_bytes(2) <= H100.smem_per_block for row in MOD_TILES)
    assert not set(TILES) & set(MOD_TILES)
    for head_dim in (64, 96, 128, 192, 256):  # each stage of the ring may belong to another work tile
        assert all(row.stages + 5 <= WORK_SLOTS for row in choose_mod_tiles("lse", head_dim, 1, MANY, False, False))
    assert choose_mod_tiles("forward", 257, 64, MANY, False, False) == ()


def test_rows_for_dropout_alone_or_for_none_are_taken_accordingly() -> None:
    for head_dim in (64, 96, 128):
        plain = choose("forward", head_dim, head_dim, MANY, False)
        dropped = choose_mod_tiles("forward", head_dim, head_dim, MANY, False, True)
        assert (plain, *dropped) == choose_mod_tiles("forward", head_dim, head_dim, MANY, False, False)
        plan = cuflash.plan(*((1, 2048, 4, head_dim),) * 3, dtype="bfloat16", device="sm_90", dropout_p=0.1)
        assert plan.launches[0].variant.tile == dropped[0]
        assert plan.fallback is None
    for softcap in (False, True):
        rows = choose_mod_tiles("forward", 256, 256, MANY, softcap, True)
        others = choose_mod_tiles("forward", 256, 256, MANY, softcap, False)
        assert [row for row in rows if not row.dropout] == list(others)
        assert len(rows) == len(others) + (not softcap)
