"""Walks of tests decode a block's index as the kernels do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from variants import failed_conditions
from walks import Work, covering, head_by_head, lpt_order

PROGRAM = """
#include "common/tile_range.cuh"
#include "common/tile_scheduler.cuh"
__device__ constexpr bool is(HeadBlock at, int head, int block) { return at.head == head && at.block == block; }
__device__ constexpr bool is(Work work, int batch, int head, int part, int block) {
  return work.batch == batch && work.head == head && work.part == part && work.block == block;
}
__device__ constexpr bool is(TileRange tiles, int begin, int end) { return tiles.begin == begin && tiles.end == end; }
"""


def conditions(rng: np.random.Generator) -> Iterator[str]:
    """Yields conditions about the kernels' functions for random grids, with the results of the walks' functions."""
    for _ in range(500):
        batch, heads, parts, num_blocks, together = (int(n) for n in rng.integers(1, 7, 5))
        num_heads = batch * heads * parts
        index = int(rng.integers(num_heads * num_blocks))
        signature = f"lpt_order({index}, {num_blocks}, {num_heads}, {together})"
        for call, work in (
            (signature, lpt_order(index, num_blocks, num_heads, together)),
            (f"head_by_head({index}, {num_blocks})", head_by_head(index, num_blocks)),
        ):
            yield "is({}, {}, {})".format(call, *work)
            yield "is(Work({}, {}, {}), {}, {}, {}, {})".format(
                call, heads, parts, *Work.from_head_block(work, heads, parts)
            )
        begin, end, size = (int(n) for n in rng.integers(1, 300, 3))
        tiles = covering((begin, end), size)
        yield f"is(TileRange::covering({{{begin}, {end}}}, {size}), {tiles.start}, {tiles.stop})"


def test_the_functions_of_the_walks_are_those_of_the_kernels() -> None:
    wrong = "is(head_by_head(7, 4), 1, 2)"
    assert failed_conditions(PROGRAM, [*conditions(np.random.default_rng(0)), wrong]) == [wrong]
