"""Plans of forward and lse: what is chosen for speed, at its edges and within its bounds."""

from __future__ import annotations

from typing import Any

from plans import problem

from cuflash.planning.device import KNOWN
from cuflash.planning.forward import L2_BYTES
from cuflash.planning.plan import Launch
from cuflash.planning.planner import plan

H100 = KNOWN["sm_90"]


def launched(*dims: int, op: str = "forward", **more: Any) -> Launch:
    """The launch of Hopper's kernel."""
    (launch,) = plan(problem(*dims, op=op, **more), H100).launches
    assert launch.variant.source == f"sm90/{op}.cu"
    return launch


def test_the_tile_is_chosen_by_the_keys_that_a_query_sees_on_average_under_a_mask() -> None:
    def block_q(seqlen_k: int, **more: Any) -> int:
        tile = launched(dims=(1, 4096, seqlen_k, 2, 2), **more).variant.tile
        assert tile is not None
        return tile.block_q

    assert block_q(100) == block_q(4096) == 192  # without a mask
    assert block_q(2289, causal=True) == 128  # 639.9 keys
    assert block_q(2290, causal=True) == 192
    assert block_q(3000, causal=True, diagonal_offset=-2000) == 128
    assert block_q(4096, window_size=(300, 300)) == 128
    assert block_q(4096, window_size=(700, 700)) == 192


def test_tiles_are_counted_where_blocks_take_several_of_different_lengths() -> None:
    for op in ("forward", "lse"):
        for batch, several in ((33, False), (34, True)):  # 132 and 136 tiles for 132 multiprocessors
            dims = batch, 128, 256, 4, 4
            assert launched(op=op, dims=dims, causal=True).counted == several
            assert launched(op=op, dims=dims, window_size=(9, -1)).counted == several
            full = launched(op=op, dims=dims)
            assert not full.counted
            assert full.num_blocks == 132
    assert not plan(problem(dims=(34, 128, 256, 4, 4), causal=True), KNOWN["sm_80"]).launches[0].counted


def test_as_many_heads_start_longest_first_as_have_their_keys_and_values_in_l2() -> None:
    def together(seqlen_k: int, heads: tuple[int, int] = (16, 16), batch: int = 4, **more: Any) -> int:
        of = {"dims": (batch, 256, seqlen_k, *heads), "causal": True} | more
        return launched(128, 128, **of).fields["heads_together"]

    assert together(1024, causal=False) == together(2**20) == 1
    assert together(256) == 64 == 4 * 16  # all of them
    assert together(256, (3, 3), batch=1) == 2  # a power of two
    for seqlen_k in (1024, 8192, 2**15):
        found, head_bytes = together(seqlen_k), 2 * seqlen_k * (128 + 128)
        assert found * head_bytes <= L2_BYTES < 4 * found * head_bytes
    assert together(8192, (16, 2)) > together(8192)  # a group shares its keys
    # of a window those keys count that a query block sees
    assert together(2**20, window_size=(1023 - 128, 0)) == together(1024)
