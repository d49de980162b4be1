"""How the key blocks of backward on Hopper are dealt out: their order, who shares them, and within which bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plans import of_lengths, problem

from cuflash.planning.backward import MOST_PARTS, SHORT_KEYS, SHORT_WAVES
from cuflash.planning.backward_schedule import L2_BYTES
from cuflash.planning.delta import DELTA_HEADS
from cuflash.planning.device import DEVICES
from cuflash.planning.plan import Plan
from cuflash.planning.planner import plan

H100 = DEVICES["sm_90"]


def backward(*head_dims: int, **more: Any) -> Plan:
    return plan(problem(*head_dims, op="backward", **more), H100)


def fields(*head_dims: int, **more: Any) -> dict[str, int]:
    """The fields of the launch of Hopper's one kernel for all gradients."""
    made = backward(*head_dims, **more)
    assert made.launches[1].variant.source == "sm90/backward/backward.cu"
    return dict(made.launches[1].fields)


def shared(of: dict[str, int]) -> tuple[int, ...]:
    return tuple(of[name] for name in ("whole_blocks", "shared_first", "shared_keys", "shared_steps"))


def test_as_many_blocks_as_multiprocessors_share_what_the_last_wave_has() -> None:
    made = fields(128, 128, dims=(4, 4096, 4096, 16, 16))
    assert shared(made) == (15 * 132, 15 * 132, 68, 33)  # of 2048 key blocks of 64 tiles
    assert shared(fields(128, 128, dims=(1, 512, 512, 16, 16))) == (0, 0, 64, 4)
    # a whole wave, almost one, and a short one
    for dims in ((1, 4096, 128 * 132, 1, 1), (1, 4096, 128 * 131, 1, 1), (1, 256, 512, 16, 16)):
        assert shared(fields(128, 128, dims=dims))[1:] == (0, 0, 0)
    for more in ({"deterministic": True}, {"causal": True}):
        assert shared(fields(128, 128, dims=(1, 512, 512, 16, 16), **more))[1:] == (0, 0, 0)
    wide = backward(128, 128, dims=(3, 4096, 4096, 16, 16)).launches[1]
    assert wide.num_blocks % 132 == 0  # whole waves of blocks


def test_a_block_takes_several_key_blocks_of_short_heads_where_there_are_enough() -> None:
    def key_blocks(dim: int, seqlen_k: int = 1024, heads: int = 1024, **more: Any) -> int:
        return fields(dim, dim, dims=(1, 1024, seqlen_k, heads, heads), **more)["key_blocks"]

    assert (key_blocks(32), key_blocks(64), key_blocks(96), key_blocks(128)) == (4, 4, 2, 1)
    assert (key_blocks(64, causal=True), key_blocks(96, causal=True)) == (2, 1)
    assert key_blocks(64, deterministic=True) == 1
    assert (key_blocks(96, SHORT_KEYS), key_blocks(96, SHORT_KEYS + 1)) == (2, 1)
    least = -(-SHORT_WAVES * H100.num_sms // 4)  # heads of 8 key blocks, two a block
    assert (key_blocks(96, heads=least), key_blocks(96, heads=least - 1)) == (2, 1)


def test_what_heads_that_start_together_touch_stays_in_l2_unless_they_do_not_fill_the_gpu() -> None:
    for seqlen, heads, dim in (
        (1024, 32, 128), (4096, 32, 128), (8192, 32, 128), (16384, 32, 128), (2**17, 32, 128), (4096, 32, 64),
        (16384, 32, 64), (8192, 8, 128), (2**17, 8, 128),
    ):  # fmt: skip
        found = fields(dim, dim, dims=(4, seqlen, seqlen, 32, heads), causal=True)["heads_in_l2"]
        group = 32 // heads
        head_bytes = seqlen * (2 * 2 * dim + group * (2 * 2 * dim + 4 * dim))  # k and v; q, dout, and dq in float32
        blocks = seqlen // 128
        assert 1 <= found <= 16
        assert found == 1 or found * head_bytes <= L2_BYTES or found * blocks < 2 * 3 * H100.num_sms
        assert found == 16 or 2 * found * head_bytes > L2_BYTES
    assert fields(dims=(4, 4096, 4096, 8, 8))["heads_in_l2"] == 1  # key blocks of equal length
    assert fields(dims=(4, 1024, 1024, 8, 8), causal=True, deterministic=True)["heads_in_l2"] > 16


@pytest.mark.parametrize(
    ("dim", "heads", "rows", "causal", "heads_and_sequences"),
    [
        (64, (32, 32), 512, False, (32, 4)),
        (64, (32, 32), 512, True, (32, 4)),
        (64, (32, 32), 1024, False, (32, 2)),
        (64, (32, 32), 4096, True, (16, 1)),
        (64, (32, 32), 16384, False, (4, 1)),  # these touch as much as one L2 cache holds
        (64, (32, 32), 256, False, (32, 4)),  # these make up a wave
        (64, (64, 64), 256, True, (64, 2)),
        (64, (256, 256), 128, False, (256, 1)),
        (64, (16, 16), 512, True, (16, 8)),
        (64, (64, 8), 512, True, (8, 2)),
        (64, (3, 3), 512, False, (2, 8)),  # not too many sequences
        (96, (16, 16), 2048, False, (8, 1)),  # without turns, fewer of them
        (96, (16, 16), 2048, True, (16, 1)),
        (128, (16, 16), 512, False, (1, 1)),
        (128, (16, 16), 512, True, (16, 1)),
    ],
)
def test_small_head_dims_take_key_blocks_of_other_heads_and_sequences_in_between(
    dim: int, heads: tuple[int, int], rows: int, causal: bool, heads_and_sequences: tuple[int, int]
) -> None:
    made = of_lengths(dim, 16384 // rows, rows, heads, causal=causal)
    together = made.launches[1].fields["heads_in_l2"], made.launches[0].fields["sequences_together"]
    assert together == heads_and_sequences
    made = of_lengths(dim, 16384 // rows, rows, heads, causal=causal, deterministic=True)
    assert made.launches[0].fields["sequences_together"] == 1


@pytest.mark.parametrize(("num_sms", "sequences"), [(114, 4), (132, 4), (78, 2)])
def test_a_wave_of_key_blocks_is_that_of_the_gpu_or_nearly(num_sms: int, sequences: int) -> None:
    problem = of_lengths(64, 32, 512, (32, 32)).problem
    made = plan(problem, replace(H100, num_sms=num_sms))
    assert made.launches[0].fields["sequences_together"] == sequences


def test_blocks_of_threads_take_listed_key_blocks_and_share_the_last_or_few() -> None:
    def listed(batch: int, rows: int, heads: tuple[int, int], **more: Any) -> tuple[int, int, int, int]:
        made = of_lengths(128, batch, rows, heads, **more)
        delta, taking = made.launches[0].fields, made.launches[1]
        assert taking.num_blocks == delta["takers"]
        assert taking.fields["shared_keys"] == delta["shared_keys"]
        return taking.num_blocks, delta["shared_keys"], delta["most_parts"], delta["last_steps"]

    assert listed(4, 4096, (16, 16)) == (132, 132, MOST_PARTS, 64)  # those of the last wave
    assert listed(4, 4096, (16, 16), causal=True) == (132, 0, 4, 0)  # none: they are many
    assert listed(4, 4096, (16, 16), deterministic=True)[1] == 0
    assert listed(8, 2048, (8, 1), causal=True) == (132, 138, MOST_PARTS, 0)  # all, perhaps
    assert listed(1, 128, (1, 1)) == (4, 0, 0, 2)  # adding up takes longer
    assert listed(8, 2048, (8, 1), causal=True, deterministic=True)[1] == 0
    assert of_lengths(64).launches[0].fields["heads_each"] == DELTA_HEADS // 2
    grouped, taking = (x.fields for x in of_lengths(128, 2, 4096, (64, 8), causal=True).launches)
    assert (grouped["least_parts"], grouped["shared_keys"]) == (4, grouped["max_key_blocks"] * 8)
    assert of_lengths(128, 2, 4096, (64, 8), causal=True, deterministic=True).launches[0].fields["shared_keys"] == 0
    # as many heads as have two waves of parts; the last two waves of all lists are sorted
    assert (grouped["sorted_blocks"], taking["heads_in_l2"]) == (33, 2)
    for more in ({}, {"causal": True, "window_size": (1023, 0)}):
        assert of_lengths(128, 2, 4096, (64, 8), **more).launches[0].fields["least_parts"] == 1


def test_blocks_share_the_query_heads_of_key_blocks_that_are_few_or_have_many_tiles_under_a_mask() -> None:
    def parts(batch: int, seqlen: int, heads: tuple[int, int] = (8, 1), **more: Any) -> tuple[int, int, int]:
        made = fields(128, 128, dims=(batch, seqlen, seqlen, *heads), **({"causal": True} | more))
        count = 1 << made["parts_log2"]
        assert count == 1 or made["whole_blocks"] == made["shared_keys"] * count
        return count, made["shared_keys"], made["shared_steps"]

    # almost one of key blocks that about as many queries see
    assert parts(8, 2048, window_size=(511, 0)) == (1, 0, 0)
    assert parts(4, 2048, window_size=(511, 0)) == (2, 64, 0)
    assert parts(60, 512) == (1, 0, 0)
    # with so many rows for each part they are many, but near each other
    assert parts(8, 2048) == (4, 128, 0)
    assert parts(2, 4096, (64, 8)) == (4, 512, 0)
    assert parts(2, 8192, (32, 8)) == (2, 1024, 0)
    assert parts(1, 8192, (128, 8)) == (8, 512, 0)
    assert parts(8, 2048, (32, 8)) == (2, 1024, 0)
    assert parts(16, 1024, (32, 8)) == parts(8, 4096, (16, 8)) == (1, 0, 0)
    assert parts(2, 4096, (64, 8), window_size=(1023, 0)) == (1, 0, 0)
    assert parts(2, 4096, (64, 8), window_size=(4095, 0)) == (4, 512, 0)  # it hides nothing
    assert parts(1, 2048) == (8, 16, 0)  # a part has one query head at least
    assert parts(1, 2048, (12, 2)) == (4, 32, 0)
    assert parts(1, 128) == (1, 0, 0)  # adding up takes longer
    assert parts(1, 2048, (2, 2)) == parts(1, 2048, deterministic=True) == (1, 0, 0)
    assert parts(1, 2048, causal=False)[0] == 1  # blocks share steps


def test_two_blocks_share_the_query_heads_of_key_blocks_by_rows_that_are_less_than_two_waves() -> None:
    def made(batch: int, seqlen: int, heads: tuple[int, int], **more: Any) -> Plan:
        return backward(256, 256, dims=(batch, seqlen, seqlen, *heads), **({"causal": True} | more))

    shared = made(2, 8192, (8, 1))
    (_, dq, dk, dv), of_delta = shared.launches, shared.launches[0].fields
    assert (dq.num_blocks, dk.num_blocks, dv.num_blocks) == (8 * 2 * 64, 2 * 2 * 64, 2 * 2 * 64)
    assert (of_delta["num_q_blocks"], of_delta["more_semaphores"]) == (0, 2 * 2 * 64)
    assert (dk.fields["first_semaphore"], dv.fields["first_semaphore"]) == (0, 2 * 64)
    for heads, more in (((8, 8), {}), ((8, 1), {"causal": False}), ((8, 1), {"deterministic": True})):
        assert "semaphores" not in made(2, 8192, heads, **more).workspace
    assert "semaphores" not in made(4, 8192, (8, 1)).workspace
    assert "semaphores" not in made(2, 8192, (8, 1), window_size=(1023, 0)).workspace  # a wave of blocks that are alike
    assert "semaphores" in made(1, 8192, (8, 1), window_size=(1023, 0)).workspace
    for queries, shares in ((256, True), (192, False)):  # with few, adding up takes longer
        few = backward(256, 256, dims=(2, queries, 8192, 8, 1), causal=True, diagonal_offset=0)
        assert ("semaphores" in few.workspace) == shares


def test_kernels_by_rows_take_key_blocks_that_are_few_if_two_blocks_share_each() -> None:
    def goes_by_rows(seqlen: int, **more: Any) -> bool:
        made = backward(256, 256, dims=(1, seqlen, seqlen, 8, 1), **more)
        return made.launches[-1].variant.source == "sm90/backward/backward_rows.cu"

    # half as many blocks as there are SMs, or more: 33 key blocks, each for two, and 66
    assert (goes_by_rows(33 * 128, causal=True), goes_by_rows(32 * 128, causal=True)) == (True, False)
    assert (goes_by_rows(66 * 128), goes_by_rows(65 * 128)) == (True, False)


def test_two_waves_of_blocks_that_share_query_heads_start_together() -> None:
    for batch, seqlen, heads, together in ((2, 4096, 64, 2), (1, 8192, 128, 1), (2, 8192, 32, 2), (8, 1024, 64, 16)):
        made = fields(128, 128, dims=(batch, seqlen, seqlen, heads, 8), causal=True)
        assert made["parts_log2"] > 0
        assert made["heads_in_l2"] == together
