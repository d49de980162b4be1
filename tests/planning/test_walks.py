"""The walks of tests read a block's index as the kernels do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from walks import Work, covering, head_by_head, longest_first

import cuflash
from cuflash.runtime import compiler

PROGRAM = """
#include "tile_range.cuh"
#include "work.cuh"
__device__ constexpr bool is(HeadBlock at, int head, int block) { return at.head == head && at.block == block; }
__device__ constexpr bool is(Work work, int batch, int head, int part, int block) {
  return work.batch == batch && work.head == head && work.part == part && work.block == block;
}
__device__ constexpr bool is(TileRange tiles, int begin, int end) { return tiles.begin == begin && tiles.end == end; }
"""


def claims(rng: np.random.Generator) -> Iterator[str]:
    """What must hold of the functions of the kernels for some grids: what those of the walks find."""
    for _ in range(500):
        batch, heads, parts, num_blocks, together = (int(n) for n in rng.integers(1, 7, 5))
        num_heads = batch * heads * parts
        index = int(rng.integers(num_heads * num_blocks))
        told = f"longest_first({index}, {num_blocks}, {num_heads}, {together})"
        for call, at in (
            (told, longest_first(index, num_blocks, num_heads, together)),
            (f"head_by_head({index}, {num_blocks})", head_by_head(index, num_blocks)),
        ):
            yield "is({}, {}, {})".format(call, *at)
            yield "is(Work({}, {}, {}), {}, {}, {}, {})".format(call, heads, parts, *Work.of(at, heads, parts))
        begin, end, size = (int(n) for n in rng.integers(1, 300, 3))
        tiles = covering((begin, end), size)
        yield f"is(TileRange::covering({{{begin}, {end}}}, {size}), {tiles.start}, {tiles.stop})"


def test_the_functions_of_the_walks_are_those_of_the_kernels() -> None:
    """NVRTC compiles a program that claims what the walks find; with one false claim it does not compile."""
    nvrtc = pytest.importorskip("cupy").cuda.nvrtc
    lines = [f'static_assert({claim}, "");' for claim in claims(np.random.default_rng(0))]
    variant = cuflash.plan((1, 8, 1, 64), (1, 8, 1, 64), (1, 8, 1, 64), dtype="float16", device="sm_80").variant
    assert variant is not None
    for extra in ("", 'static_assert(is(head_by_head(7, 4), 1, 2), "");'):
        program = nvrtc.createProgram(PROGRAM + "\n".join([*lines, extra]), "work.cu", (), ())
        try:
            nvrtc.compileProgram(program, (*compiler.options(variant), f"-I{compiler.source_root() / 'common'}"))
            assert not extra, "a false claim was compiled"
        except nvrtc.NVRTCError:
            log = nvrtc.getProgramLog(program)
            assert extra, log[:2000]
            assert log.count("static assertion failed") == 1, log[:2000]
        finally:
            nvrtc.destroyProgram(program)
