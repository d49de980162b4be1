#!/usr/bin/env python3
"""Tells how fast packed calls are beside dense ones that do the same: sequences of one length, in all 16k tokens.

    .ci/packed.py                                     a table: share of the dense call's speed, full; causal
    .ci/packed.py --ops backward --dims 96 --lengths 2048

Replays of CUDA graphs, of both in turns, on the same numbers in float16; results of forward are compared bit by bit.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import versus_calls

TOKENS = 16384
# Head dim, query heads, kv heads.
SHAPES = ((64, 32, 32), (64, 16, 16), (96, 16, 16), (128, 16, 16), (128, 32, 8), (192, 16, 16), (256, 8, 8))


class Pair(NamedTuple):
    """A dense call, and a packed one."""

    op: str
    shape: tuple[int, int, int]
    seqlen: int
    causal: bool


class Speed(versus_calls.Speed):
    """Times a dense call in place of the older version, and a packed one in place of the newer one."""

    def calls(self, pair: Any) -> list[Any]:
        """Makes both calls, after it has compared what they give."""
        (cuflash,) = self.versions
        dim, heads_q, heads_kv = pair.shape
        packed = [
            self.array((TOKENS, heads, dim), "float16", n) for n, heads in enumerate((heads_q, heads_kv, heads_kv))
        ]
        dense = [x.reshape(-1, pair.seqlen, *x.shape[1:]) for x in packed]
        bounds = self.cupy.arange(0, TOKENS + 1, pair.seqlen, dtype="int32")
        varlen_kwargs = {f"cu_seqlens_{side}": bounds for side in "qk"} | {
            f"max_seqlen_{side}": pair.seqlen for side in "qk"
        }
        of_both = []
        for arrays, more in ((dense, {}), (packed, varlen_kwargs)):
            out, lse = cuflash.forward(*arrays, causal=pair.causal, return_lse=True, **more)
            forward = partial(cuflash.forward, *arrays, causal=pair.causal, **more)
            dout = self.array(out.shape, "float16", 3)
            backward = partial(cuflash.backward, dout, *arrays, out, lse, causal=pair.causal, **more)
            of_both.append((out, forward if pair.op == "forward" else backward))
        (one, _), (other, _) = of_both
        if not bool((one.reshape(other.shape).view("uint16") == other.view("uint16")).all()):
            sys.exit(f"{pair}: the packed call gives other bits than the dense one")
        return [call for _, call in of_both]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=["forward", "backward"], choices=["forward", "backward"])
    parser.add_argument("--dims", nargs="+", type=int, default=sorted({dim for dim, *_ in SHAPES}))
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 8192])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each pair of calls, about")
    chosen = parser.parse_args()
    if any(length < 1 or TOKENS % length for length in chosen.lengths):
        parser.error(f"--lengths {chosen.lengths}: give divisors of {TOKENS}")
    import cuflash

    speed = Speed([cuflash], rounds=60, seconds=chosen.seconds)
    with speed.stream:
        for op, shape in product(chosen.ops, (shape for shape in SHAPES if shape[0] in chosen.dims)):
            line = []
            for seqlen in chosen.lengths:
                shares = []
                for causal in (False, True):
                    row = speed.measure(Pair(op, shape, seqlen, causal), lambda: None)
                    shares.append(f"{row['ratio']:.3f}")
                    speed.cupy.get_default_memory_pool().free_all_blocks()
                line.append(f"{seqlen} {'; '.join(shares)}")
            print(f"{op} d {shape[0]} {shape[1]}/{shape[2]} | {' | '.join(line)}", flush=True)


if __name__ == "__main__":
    main()
