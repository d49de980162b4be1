"""Kernels with mods in tests: the variants that plans of some calls have."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from mod_table import SMALL

import cuflash
from cuflash.planning.variant import Variant
from cuflash.testing.cases import Case
from cuflash.testing.functions import alibi, document, everything, joined, relative_position, sinks_of, softcap
from cuflash.testing.mods import without_grads

# Mods with the head dims that are compiled: ALiBi compiles fastest, and a mask has mask tiles.
CALLS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "alibi": (alibi, (64, 128, 256)),
    "softcap": (softcap, (64,)),
    "relative_position": (relative_position, (64,)),
    "document": (document, (128,)),
    "everything": (joined(everything), (64,)),
}
# Mods that are also compiled on Hopper for variable-length sequences, packed or with keys in pages.
OF_LENGTHS: dict[str, tuple[int, ...]] = {"alibi": (64, 256), "document": (128,), "everything": (64,)}
OF_SUMS = {"alibi": 128}  # mods that are also compiled on Hopper to add to float32 arrays, at one head dim
OPS: dict[str, dict[str, Any]] = {
    "forward": {},
    "lse": {},
    "backward": {},
    "deterministic": {"op": "backward", "deterministic": True},
}


@cache
def mod_variants(arch: str, on_any_gpu: bool = False, names: tuple[str, ...] = tuple(CALLS)) -> tuple[Variant, ...]:
    """Returns the variants of calls with these mods on a GPU. on_any_gpu: strides forbid sm90 kernels."""
    variants: dict[Variant, None] = {}
    for name, (op, more) in product(names, OPS.items()):
        make, dims = CALLS[name]
        for dim in dims[: 1 if on_any_gpu else None]:
            case = replace(SMALL, head_dim=dim, head_dim_v=dim, causal=name == "alibi")
            q, k, v = case.arrays()
            arguments, call = make(np.asarray, case), {"op": op, **more}
            grads = arguments.get("captured_grads", ())
            arguments = without_grads(arguments) | case.arguments()
            if call["op"] == "backward" and grads:
                call["captured_grads"] = grads
            arrays = (q[:, ::-1] if on_any_gpu else q, k, *(() if op == "lse" else (v,)))
            calls = [(arrays, {})]
            if dim in OF_LENGTHS.get(name, ()) and not on_any_gpu:
                calls += [packed(arrays), paged(arrays)] if call["op"] != "backward" else [packed(arrays)]
            if OF_SUMS.get(name) == dim and call["op"] != "lse" and not on_any_gpu:
                calls.append((arrays, {"accumulate": True}))
            for operands, keywords in calls:
                plan = cuflash.plan(*operands, **keywords, **arguments, **call, device=arch)
                variants |= dict.fromkeys(launch.variant for launch in plan.launches)
    return tuple(each for each in variants if each.mod_code is not None or each.op in MORE or each.lists_seqlens)


def packed(arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the rows as packed sequences, and the arguments with their bounds."""
    batch, seqlen = arrays[0].shape[:2]
    bounds = np.arange(batch + 1, dtype=np.int32) * seqlen
    rows = tuple(x.reshape(-1, *x.shape[2:]) for x in arrays)
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    return rows, {**lengths, "max_seqlen_q": seqlen, "max_seqlen_k": seqlen}


def paged(arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arrays with the keys of each sequence as a page, and the arguments for pages."""
    pages = np.arange(len(arrays[1]), dtype=np.int32)[:, None]
    return arrays, {"page_table": pages, "seqused_k": np.full(len(pages), arrays[1].shape[1], np.int32)}


# Few queries of 8 heads over many keys, which thread blocks split: numbers of queries, and arguments.
FEW: tuple[tuple[int, dict[str, Any]], ...] = ((1, {}), (1, {"num_splits": 2}), (8, {}))
OF_FEW = (alibi, 128), (sinks_of(), 64)


def few_variants(arch: str, of_few: Any = OF_FEW) -> tuple[Variant, ...]:
    """Returns the variants of decoding with some mods on a GPU, each with a head dim."""
    variants: dict[Variant, None] = {}
    for (make, dim), (queries, more), paged in product(of_few, FEW, (False, True)):
        case = Case("few", 2, queries, 1024, 8, 1, dim, dim, "float16")
        q, k, v = case.arrays()
        varlen_kwargs = {"seqused_k": np.zeros(2, np.int32)}
        if paged:
            k, v = (x.reshape(32, 64, *x.shape[2:]) for x in (k, v))
            varlen_kwargs["page_table"] = np.zeros((2, 16), np.int32)
        mod_kwargs = without_grads(make(np.asarray, case))
        plan = cuflash.plan(q, k, v, **varlen_kwargs, **mod_kwargs, **more, device=arch)
        variants |= dict.fromkeys(launch.variant for launch in plan.launches)
    return tuple(variants)


# Kernels without mods that only calls with mods launch.
MORE = ("sum_tables", "sinks_gradient", "tile_counts")
