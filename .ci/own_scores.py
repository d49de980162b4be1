#!/usr/bin/env python3
"""Tells how fast calls with mods are, beside our plain calls and what others have.

    .ci/own_scores.py                                     the whole table, in bfloat16, batch 4; peers compile for long
    .ci/own_scores.py --ours                                 ours alone
    .ci/own_scores.py --kinds alibi prefix --dims 64 --lengths 8192 --heads 16/16 --ops forward
    .ci/own_scores.py --extras                               block masks, pair bias, new functions; no table

Each row has milliseconds of a call: the median of spans between two events, of all calls in turns, without CUDA graphs,
so that the host counts where it is slower than the GPU. `ours` takes a block mask, as Flex does; `alone` makes one.
Peers: torch's flex_attention by Triton (`flex`) and by FlashAttention-4 where it can be imported (`flash`), and cuDNN.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch
import versus_calls
from own_scores_calls import KINDS, OPS, Call, Row, arrays_of, calls_of, first_line, kind_of, ours, peer, spans
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import cuflash
from cuflash import mods

COLUMNS = ("ours", "alone", "plain", "flex", "flash", "cudnn")


def run_row(row: Row, chosen: argparse.Namespace) -> dict[str, Any]:
    """Times a row and prints its line."""
    found: dict[str, Any] = {**row._asdict(), "notes": []}
    try:
        calls, found["notes"] = calls_of(row, chosen.ours)
        found |= spans(calls, chosen.seconds)
    except Exception as error:
        found["notes"].append(first_line(error))
    numbers = [f"{found[name]:9.4f}" if name in found else " " * 8 + "-" for name in COLUMNS]
    mine, plain = found.get("ours"), found.get("plain", found.get("ours"))
    peers = [found[name] for name in COLUMNS[3:] if name in found]
    ratios = [mine / plain if mine else None, min(peers) / mine if mine and peers else None]
    numbers += [f"{ratio:7.3f}" if ratio else "      -" for ratio in ratios]
    print(row.name, *numbers, flush=True)
    for note in found["notes"]:
        print(f"    {note}", flush=True)
    return found


# Beside the table.


def extra(name: str, work: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """Prints what is found, or why nothing is."""
    try:
        found: dict[str, Any] = work()
        print(f"{name}: " + ", ".join(f"{key} {value:.4f}" for key, value in found.items()), flush=True)
    except Exception as error:
        found = {"note": first_line(error)}
        print(f"{name}: {found['note']}", flush=True)
    return {"extra": name, **found}


def working(calls: dict[str, Call]) -> dict[str, Call]:
    """Those that work. Why others do not is printed."""
    found = {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
            found[name] = call
        except Exception as error:
            print(f"    {name}: {first_line(error)}")
    return found


def time_block_masks(alone: bool) -> dict[str, float]:
    """Milliseconds to make a block mask of 8k x 8k: causal documents."""
    n, like = 8192, torch.zeros(1, device="cuda")
    kind = kind_of("causal_documents", 16, n)
    both = mods.and_masks(mods.causal, kind.mask)
    calls: dict[str, Call] = {"ours": lambda: cuflash.create_block_mask(both, 1, 1, n, n, like=like)}
    if not alone:
        compiled = torch.compile(create_block_mask)
        calls["flex, compiled"] = lambda: compiled(kind.flex_mask, None, None, n, n, device="cuda")
        calls["flex"] = lambda: create_block_mask(kind.flex_mask, None, None, n, n, device="cuda")
    return spans(working(calls), 0.3)


def time_pair_bias(n: int, op: str, alone: bool) -> dict[str, float]:
    """Milliseconds of attention along the rows of pairs, which share a bias; backward also makes its gradient."""
    torch.manual_seed(0)
    arrays = [torch.randn(n, n, 4, 32, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    bias = torch.randn(1, 4, n, n, device="cuda", dtype=torch.bfloat16)
    call, _ = ours(arrays, op, {"bias": bias})
    calls: dict[str, Call] = {"ours": call}
    if op == "backward":
        calls = {"ours": partial(call, captured_grads=(bias,)), "ours without dbias": call}
    calls["plain"] = ours(arrays, op, {})[0]
    if not alone:
        q, k, v, dout = (x.transpose(1, 2).contiguous() for x in arrays)
        leaves = [x.requires_grad_(op == "backward") for x in (q, k, v, bias.clone())]

        def attend() -> Any:
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                return scaled_dot_product_attention(*leaves[:3], attn_mask=leaves[3].expand(n, -1, -1, -1))

        calls["efficient"] = attend
        if op == "backward":
            kept: list[Any] = []

            def pull() -> Any:
                kept[:] = kept or [attend()]
                return torch.autograd.grad(kept[0], leaves, dout, retain_graph=True)

            calls["efficient"] = pull
    return spans(working(calls), 0.3)


def time_new_function(op: str, alone: bool) -> dict[str, float]:
    """Seconds of the first call of a function that no call had before, of one from disk, and of Flex's first."""
    from cuflash.runtime import compiler
    from cuflash.runtime.call import CALL_CACHE

    arrays, number = arrays_of(Row("", (16, 16), 64, 2048, op)), random.random()

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * number + (q - k) * 0.01

    def seconds(call: Call) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    out, lse = cuflash.forward(*arrays[:3], return_lse=True)
    call: Call = partial(cuflash.forward, *arrays[:3], score_mod=score_mod)
    if op == "backward":
        call = partial(cuflash.backward, arrays[3], *arrays[:3], out, lse, score_mod=score_mod)
    found = {"new": seconds(call), "again": seconds(call)}
    compiler._kernels.clear()
    CALL_CACHE.clear()
    found["from disk"] = seconds(call)
    if not alone:
        attend = torch.compile(partial(flex_attention, score_mod=score_mod), dynamic=False)
        try:
            found["flex, new"] = seconds(lambda: peer(arrays, op, attend)[0]())
        except Exception as error:
            print(f"    flex: {first_line(error)}")
    return found


def run_extras(alone: bool) -> list[dict[str, Any]]:
    """All of them."""
    found = [extra("block mask 8k x 8k, ms", partial(time_block_masks, alone))]
    for n, op in product((256, 384, 768), OPS):
        found.append(extra(f"pair bias {n}, {op}, ms", partial(time_pair_bias, n, op, alone)))
        torch.cuda.empty_cache()
    for op in OPS:
        found.append(extra(f"a new function, {op}, s", partial(time_new_function, op, alone)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--ops", nargs="+", default=OPS, choices=OPS)
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--heads", nargs="+", default=["16/16", "16/4"], metavar="Q/KV")
    parser.add_argument("--ours", action="store_true", help="ours alone")
    parser.add_argument("--extras", action="store_true", help="what stands beside the table, and not the table")
    parser.add_argument("--seconds", type=float, default=0.15, help="for each call of a row, about")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that is found")
    chosen = parser.parse_args()
    clock = versus_calls.sm_clock()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, SM clock {clock} MHz", flush=True)
    if chosen.extras:
        found = run_extras(chosen.ours)
    else:
        heads = [(int(q), int(kv)) for q, kv in (each.split("/") for each in chosen.heads)]
        width = len(Row("none", (16, 16), 64, 2048, "forward").name)
        print(" " * width, *(f"{name:>9}" for name in COLUMNS), "/plain", " peer/", flush=True)
        found = []
        for op, dim, seqlen, pair, kind in product(chosen.ops, chosen.dims, chosen.lengths, heads, chosen.kinds):
            found.append(run_row(Row(kind, pair, dim, seqlen, op), chosen))
            torch.cuda.empty_cache()
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
