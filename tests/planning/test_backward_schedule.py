"""Schedule of key blocks in backward on Hopper: their order, sharing and limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plans import of_lengths
from plans import problem as make_problem

from cuflash.planning.backward_schedule import (
    KEY_ROWS,
    L2_BYTES,
    PART_WAVES,
    SEQUENCES_TOGETHER,
    SHARED_STEPS,
    WAVES_TOGETHER,
)
from cuflash.planning.backward_sm90 import MOST_PARTS, SHORT_KEYS, SHORT_WAVES, SORTED_WAVES
from cuflash.planning.delta import DELTA_HEADS
from cuflash.planning.device import DEVICES
from cuflash.planning.plan import Launch, Plan, blocks_of
from cuflash.planning.planner import plan as make_plan

H100 = DEVICES["sm_90"]
SMS = H100.num_sms


def backward(*head_dims: int, **more: Any) -> Plan:
    return make_plan(make_problem(*head_dims, op="backward", **more), H100)


def main_launch(*head_dims: int, **more: Any) -> Launch:
    """Returns the launch of the sm90 kernel for all gradients."""
    launch = backward(*head_dims, **more).launches[1]
    assert launch.variant.source == "sm90/backward/backward.cu"
    return launch


def fields(*head_dims: int, **more: Any) -> dict[str, int]:
    return dict(main_launch(*head_dims, **more).fields)


def head_bytes(dim: int, seqlen: int, group: int = 1) -> int:
    """Returns bytes of k and v of a kv head, and of q, dout, and float32 dq of its query heads."""
    return seqlen * (2 * 2 * dim + group * (2 * 2 * dim + 4 * dim))


@pytest.mark.parametrize("dims", [(4, 4096, 4096, 16, 16), (1, 512, 512, 16, 16), (3, 4096, 4096, 16, 16)], ids=str)
def test_as_many_blocks_as_sms_share_the_last_wave(dims: tuple[int, ...]) -> None:
    batch, rows, keys, heads, _ = dims
    launch, steps = main_launch(128, 128, dims=dims), rows // 64
    whole, first, shared, each = (
        launch.fields[name] for name in ("whole_blocks", "shared_first", "shared_keys", "shared_steps")
    )
    assert whole % SMS == 0  # whole waves
    assert first == whole
    assert whole + shared == batch * heads * keys // KEY_ROWS
    sharing = launch.num_blocks - whole
    assert (sharing - 1) * each < shared * steps <= sharing * each  # every step once
    assert 0 < sharing <= SMS
    assert each == max(SHARED_STEPS, blocks_of(shared * steps, SMS))  # as even as possible over all SMs


def test_key_blocks_of_whole_waves_or_ordered_sums_are_not_shared() -> None:
    # A whole wave, almost one, and a wave of few steps.
    lone: list[dict[str, Any]] = [
        {"dims": dims} for dims in ((1, 4096, 128 * SMS, 1, 1), (1, 4096, 128 * (SMS - 1), 1, 1), (1, 256, 512, 16, 16))
    ]
    lone += [{"dims": (1, 512, 512, 16, 16), name: True} for name in ("deterministic", "causal")]
    for more in lone:
        launch = main_launch(128, 128, **more)
        assert not any(launch.fields[name] for name in ("shared_first", "shared_keys", "shared_steps")), more


def test_a_block_takes_several_key_blocks_of_short_heads() -> None:
    def key_blocks(dim: int, seqlen_k: int = 1024, heads: int = 1024, **more: Any) -> tuple[int, int]:
        """Returns the key blocks of a thread block, planned and by its tile."""
        launch = main_launch(dim, dim, dims=(1, 1024, seqlen_k, heads, heads), **more)
        return launch.fields["key_blocks"], getattr(launch.variant.tile, "key_blocks", 0)

    for dim in (32, 64, 96, 128):
        taken, most = key_blocks(dim)
        assert taken == most > (dim < 128)
        assert key_blocks(dim, causal=True)[0] == max(most // 2, 1)
    assert key_blocks(64, deterministic=True)[0] == 1
    assert (key_blocks(96, SHORT_KEYS)[0], key_blocks(96, SHORT_KEYS + 1)[0]) == (2, 1)
    least = blocks_of(SHORT_WAVES * SMS, 4)  # heads of 8 key blocks, two a block
    assert (key_blocks(96, heads=least)[0], key_blocks(96, heads=least - 1)[0]) == (2, 1)


def test_heads_that_start_together_fit_l2_or_are_few_waves() -> None:
    for seqlen, heads, dim in (
        (1024, 32, 128), (4096, 32, 128), (8192, 32, 128), (16384, 32, 128), (2**17, 32, 128), (4096, 32, 64),
        (16384, 32, 64), (8192, 8, 128), (2**17, 8, 128),
    ):  # fmt: skip
        together = fields(dim, dim, dims=(4, seqlen, seqlen, 32, heads), causal=True)["heads_in_l2"]
        touched = together * head_bytes(dim, seqlen, 32 // heads)
        assert 1 <= together <= 16
        assert together == 1 or touched <= L2_BYTES or together * seqlen // 128 < 2 * WAVES_TOGETHER * SMS
        assert together == 16 or 2 * touched > L2_BYTES
    assert fields(dims=(4, 4096, 4096, 8, 8))["heads_in_l2"] == 1  # equal key blocks
    assert fields(dims=(4, 1024, 1024, 8, 8), causal=True, deterministic=True)["heads_in_l2"] > 16


def heads_and_sequences(listed: Plan) -> tuple[int, int]:
    """Returns the numbers of heads and of sequences that start together."""
    return listed.launches[1].fields["heads_in_l2"], listed.launches[0].fields["sequences_together"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(32, 32), (64, 64), (256, 256), (16, 16), (16, 8), (3, 3)], ids=str)
@pytest.mark.parametrize("rows", [128, 256, 512, 1024, 4096, 16384])
def test_small_head_dims_alternate_heads_and_sequences_in_the_list(
    heads: tuple[int, int], rows: int, causal: bool
) -> None:
    together, sequences = heads_and_sequences(of_lengths(64, 16384 // rows, rows, heads, causal=causal))
    group, heads_kv = heads[0] // heads[1], heads[1]
    for count in (together, sequences):
        assert 1 <= count == 1 << count.bit_length() - 1
    assert together <= heads_kv
    assert sequences <= SEQUENCES_TOGETHER
    touched = together * sequences * head_bytes(64, rows, group)  # half of it fits one of the two L2 caches
    few = causal and sequences == 1 and together * rows // 128 < 2 * WAVES_TOGETHER * SMS
    assert touched <= L2_BYTES // 2 or few or together == sequences == 1
    assert sequences == 1 or 2 * together > heads_kv  # all heads of a sequence before a second sequence
    more = 2 * together * sequences
    assert 2 * touched > L2_BYTES // 2 or more > max(heads_kv, SMS) or more > heads_kv * SEQUENCES_TOGETHER
    listed = of_lengths(64, 16384 // rows, rows, heads, causal=causal, deterministic=True)
    assert heads_and_sequences(listed)[1] == 1


def test_larger_head_dims_take_key_blocks_of_one_sequence_at_a_time() -> None:
    for dim, causal in ((96, False), (96, True), (128, False), (128, True)):
        together, sequences = heads_and_sequences(of_lengths(dim, 8, 2048, (16, 16), causal=causal))
        assert sequences == 1
        assert together <= 16 // (1 if causal else 2)  # without a mask, fewer of them
    assert heads_and_sequences(of_lengths(128, 32, 512))[0] == 1


@pytest.mark.parametrize("num_sms", [114, 132, 78])
def test_a_wave_of_key_blocks_is_that_of_the_gpu_or_nearly(num_sms: int) -> None:
    problem = of_lengths(64, 32, 512, (32, 32)).problem
    together, sequences = heads_and_sequences(make_plan(problem, replace(H100, num_sms=num_sms)))
    assert num_sms / 1.5 < together * sequences < 1.5 * num_sms


def test_listed_key_blocks_are_shared_if_last_or_few() -> None:
    def listed(batch: int, rows: int, heads: tuple[int, int], dim: int = 128, **more: Any) -> dict[str, int]:
        delta, taking = of_lengths(dim, batch, rows, heads, **more).launches
        assert taking.num_blocks == delta.fields["takers"] == min(SMS, delta.fields["max_key_blocks"] * heads[1])
        assert taking.fields["shared_keys"] == delta.fields["shared_keys"]
        assert max(delta.fields["most_parts"], delta.fields["least_parts"]) <= MOST_PARTS
        return {**taking.fields, **delta.fields}

    last = listed(4, 4096, (16, 16))
    assert (last["shared_keys"], last["last_steps"]) == (last["takers"], 4096 // 64)  # key blocks of the last wave
    few = listed(8, 2048, (8, 1), causal=True)
    assert (few["shared_keys"], few["last_steps"]) == (few["max_key_blocks"], 0)  # all, perhaps
    assert listed(4, 4096, (16, 16), causal=True)["shared_keys"] == 0  # they are many
    assert listed(1, 128, (1, 1))["shared_keys"] == 0  # adding up takes longer
    for batch, rows, heads, more in (
        (4, 4096, (16, 16), {}), (8, 2048, (8, 1), {"causal": True}), (2, 4096, (64, 8), {"causal": True})
    ):  # fmt: skip
        assert listed(batch, rows, heads, deterministic=True, **more)["shared_keys"] == 0
    assert listed(4, 4096, (16, 16), 64)["heads_each"] <= DELTA_HEADS
    grouped = listed(2, 4096, (64, 8), causal=True)
    assert 1 < grouped["least_parts"] <= 64 // 8
    assert grouped["shared_keys"] == grouped["max_key_blocks"] * 8
    # As many heads as fit two waves of parts; the last two waves of all lists are sorted.
    together = grouped["heads_in_l2"] * grouped["least_parts"]
    assert together * 4096 // 128 <= PART_WAVES * SMS < 3 * together * 4096 // 128
    assert (grouped["sorted_blocks"] - 1) * together < SORTED_WAVES * SMS <= grouped["sorted_blocks"] * together
    for more in ({}, {"causal": True, "window_size": (1023, 0)}):
        assert listed(2, 4096, (64, 8), **more)["least_parts"] == 1


def test_query_heads_of_few_or_long_key_blocks_are_shared() -> None:
    """Under a mask, thread blocks share the query heads of key blocks that are few or have many tiles."""

    def parts(batch: int, seqlen: int, heads: tuple[int, int] = (8, 1), **more: Any) -> int:
        launch = main_launch(128, 128, dims=(batch, seqlen, seqlen, *heads), **{"causal": True} | more)
        count, blocks = 1 << launch.fields["parts_log2"], batch * heads[1] * seqlen // KEY_ROWS
        assert count <= heads[0] // heads[1]  # a part has one query head at least
        if count > 1:
            assert launch.num_blocks == launch.fields["whole_blocks"] == blocks * count
            assert (launch.fields["shared_keys"], launch.fields["shared_steps"]) == (blocks, 0)
        return count

    # Almost a wave of key blocks that about equally many queries see.
    assert parts(8, 2048, window_size=(511, 0)) == 1 < parts(4, 2048, window_size=(511, 0))
    assert parts(60, 512) == 1
    # Key blocks are many, but with enough rows for each part sharing keeps them near each other in L2.
    for batch, seqlen, heads in ((8, 2048, (8, 1)), (2, 4096, (64, 8)), (2, 8192, (32, 8)), (8, 2048, (32, 8))):
        assert parts(batch, seqlen, heads) > 1
    assert parts(1, 8192, (128, 8)) > parts(2, 4096, (64, 8)) > parts(2, 8192, (32, 8))  # the more heads, the more
    assert parts(16, 1024, (32, 8)) == parts(8, 4096, (16, 8)) == 1
    assert parts(2, 4096, (64, 8), window_size=(1023, 0)) == 1
    assert parts(2, 4096, (64, 8), window_size=(4095, 0)) == parts(2, 4096, (64, 8))  # it hides nothing
    assert parts(1, 2048) == 8  # as many as the group has heads, or the next power of two below
    assert parts(1, 2048, (12, 2)) == 4
    assert parts(1, 128) == 1  # adding up takes longer
    assert parts(1, 2048, (2, 2)) == parts(1, 2048, deterministic=True) == 1
    assert fields(128, 128, dims=(1, 2048, 2048, 8, 1))["parts_log2"] == 0  # blocks share steps


def test_dq_dkv_query_heads_are_shared_below_two_waves() -> None:
    """Two thread blocks share the query heads of each key block of backward_dq_dkv below two waves of key blocks."""

    def by_rows(batch: int, seqlen: int, heads: tuple[int, int], **more: Any) -> Plan:
        return backward(192, 192, dims=(batch, seqlen, seqlen, *heads), **({"causal": True} | more))

    shared, key_blocks = by_rows(2, 8192, (8, 1)), 2 * 8192 // KEY_ROWS
    (_, dq, dk, dv), of_delta = shared.launches, shared.launches[0].fields
    assert (dq.num_blocks, dk.num_blocks, dv.num_blocks) == (8 * key_blocks, 2 * key_blocks, 2 * key_blocks)
    assert (of_delta["num_q_blocks"], of_delta["more_semaphores"]) == (0, 2 * key_blocks)
    assert (dk.fields["first_semaphore"], dv.fields["first_semaphore"]) == (0, key_blocks)
    for heads, more in (((8, 8), {}), ((8, 1), {"causal": False}), ((8, 1), {"deterministic": True})):
        assert "semaphores" not in by_rows(2, 8192, heads, **more).workspace
    assert "semaphores" not in by_rows(4, 8192, (8, 1)).workspace
    window = {"window_size": (1023, 0)}  # about equal blocks, for which one wave is enough
    assert "semaphores" not in by_rows(2, 8192, (8, 1), **window).workspace
    assert "semaphores" in by_rows(1, 8192, (8, 1), **window).workspace
    for queries, shares in ((256, True), (192, False)):  # with few, adding up takes longer
        few = backward(192, 192, dims=(2, queries, 8192, 8, 1), causal=True, diagonal_offset=0)
        assert ("semaphores" in few.workspace) == shares


def test_dq_dkv_takes_fewer_key_blocks_if_two_blocks_share_each() -> None:
    def goes_by_rows(key_blocks: int, **more: Any) -> bool:
        launches = backward(192, 192, dims=(1, key_blocks * KEY_ROWS, key_blocks * KEY_ROWS, 8, 1), **more).launches
        return launches[-1].variant.source == "sm90/backward_dq_dkv/backward_dq_dkv.cu"

    # At least half as many thread blocks as SMs, with two blocks for each key block, or one.
    assert (goes_by_rows(SMS // 4, causal=True), goes_by_rows(SMS // 4 - 1, causal=True)) == (True, False)
    assert (goes_by_rows(SMS // 2), goes_by_rows(SMS // 2 - 1)) == (True, False)


def test_two_waves_of_blocks_that_share_query_heads_start_together() -> None:
    for batch, seqlen, heads in ((2, 4096, 64), (1, 8192, 128), (2, 8192, 32), (8, 1024, 64)):
        launched = fields(128, 128, dims=(batch, seqlen, seqlen, heads, 8), causal=True)
        together, blocks = launched["heads_in_l2"], seqlen // KEY_ROWS << launched["parts_log2"]
        assert launched["parts_log2"] > 0
        assert together == 1 or together * blocks <= PART_WAVES * SMS
        assert together == 16 or 4 * together * blocks > PART_WAVES * SMS
