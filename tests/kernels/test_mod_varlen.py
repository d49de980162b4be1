"""Mods over variable-length sequences on a GPU: each sequence has the results of a call alone.

`b` is the index of the sequence, and `q_idx` and `k_idx` count from its begin. `seqlen_q()` and `seqlen_k()` are its
used lengths, which only the device has.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hopper import ON_HOPPER
from libraries import recorded
from mod_table import check_sequences, launched

import cuflash
from cuflash.mods import seqlen_k, seqlen_q
from cuflash.testing.functions import FUNCTIONS, Maker, alibi, bias_of, joined, sinks_of
from cuflash.testing.layouts import host, identical
from cuflash.testing.mods import bounds_case, check_of_lengths, without_grads
from cuflash.testing.sequences import Sequences, varlen_arrays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan")]
PACKED = Sequences("packed", (130, 0, 300, 1, 65), (200, 70, 300, 64, 0), bounded=True)
USED: dict[str, Any] = {"used_q": True, "used_k": True, "spare_q": (9, 3, 0, 2, 1), "spare_k": (1, 70, 4, 0, 5)}
CASES = [
    PACKED,
    replace(PACKED, name="used", **USED),
    replace(PACKED, name="rectangle", place_q="rectangle", place_k="rectangle", used_q=True, used_k=True),
    replace(PACKED, name="pages", place_k="paged", used_k=True),
    replace(PACKED, name="cache", place_k="cache", place_q="rectangle", used_q=True, used_k=True),
    replace(PACKED, name="window", causal=False, window_size=(150, 20), softcap=5.0, **USED),
    replace(PACKED, name="few", queries=(1, 2, 0, 3), keys=(900, 5, 2700, 0), heads=(8, 1), place_k="paged",
            used_k=True),
    replace(PACKED, name="wide", dims=(128, 128), dtype="bfloat16", causal=True),
    # Lengths around the tiles of sm90 kernels. No query sees the first keys, or the first queries see no key.
    Sequences("edges", (0, 1, 127, 128, 129, 193), (129, 0, 128, 127, 1, 257), gaps=(0, 5), bounded=True, heads=(6, 2),
              causal=True),
    replace(PACKED, name="far", queries=(70, 1, 129, 64), keys=(300, 64, 400, 5), window_size=(40, -1), causal=True,
            heads=(8, 2), dtype="bfloat16"),
    *(replace(PACKED, name=f"d{dims[0]}x{dims[1]}", dims=dims, dtype="bfloat16", **USED)
      for dims in ((96, 96), (192, 128), (256, 256))),
    replace(PACKED, name="wide_pages", dims=(256, 256), place_k="paged", used_k=True, page_size=3),
]  # fmt: skip


def by_lengths(put: Any, case: Any) -> Any:
    """Builds a score_mod of the used lengths, and a mask that hides the first half of keys from the last queries."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score * (1.0 + 0.25 * b) + (k_idx * 1.0) / (seqlen_k() + 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return (2 * k_idx >= seqlen_k()) | (4 * q_idx < 3 * seqlen_q())

    return {"score_mod": score_mod, "mask_mod": mask_mod}


MAKERS: dict[str, Maker] = {
    "places": joined(alibi, FUNCTIONS["prefix"], bias_of("bhqk"), sinks_of()),
    "lengths": by_lengths,
    "striped": joined(FUNCTIONS["striped"], sinks_of()),  # the first queries see no key
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_sequence_agrees_with_float64(cupy: Any, case: Sequences, name: str, any_gpu: bool) -> None:
    if any_gpu and (name != "places" or case not in CASES[:7] or case.name in ("cache", "window")):
        pytest.skip("the same kernels, or too many of them")
    if name == "striped" and case.name not in ("packed", "used", "pages", "far", "d256x256"):
        pytest.skip("too many kernels")
    check_of_lengths(MAKERS[name], varlen_arrays(case), cupy)


@pytest.mark.skipif(ON_HOPPER[1].args[0], reason="needs a GPU of sm_90")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hopper_runs_kernels_of_its_own(cupy: Any, case: Sequences) -> None:
    inputs = varlen_arrays(case)
    arguments, mod_kwargs = inputs.arguments(cupy), without_grads(MAKERS["places"](cupy.asarray, bounds_case(inputs)))
    with launched() as ran:
        cuflash.forward(**arguments, **mod_kwargs)
        cuflash.lse(**{name: x for name, x in arguments.items() if name != "v"}, **mod_kwargs)
        # Three splits: blocks of 16 rows run more than 16 rows only if the number of splits is not given.
        cuflash.forward(**arguments, **mod_kwargs, num_splits=3)
    of_any, of_three = ("decode/narrow", "decode/decode") if case.name == "few" else ("forward/forward",) * 2
    for plan, op, source in zip(ran, ("forward", "lse", "forward"), (of_any, "forward/lse", of_three), strict=True):
        assert [each.variant.source for each in plan.launches if each.variant.op == op] == [f"sm90/{source}.cu"]
    if case.has_gradients:
        source = "sm90/backward/backward.cu" if max(case.dims) <= 128 else "sm90/backward_dq_dkv/backward_dq_dkv.cu"
        out, lse = cuflash.forward(**arguments, return_lse=True, **mod_kwargs)
        with launched() as ran:
            # Deterministic, as few keys of grouped wide heads otherwise run in sm80 kernels.
            cuflash.backward(out, out=out, lse=lse, deterministic=True, **arguments, **mod_kwargs)
        assert [each.variant.source for each in ran[0].launches if each.variant.op != "delta"] in (
            [source], [source] * 3
        )  # fmt: skip


def test_pages_that_are_not_there_hide_their_keys(cupy: Any) -> None:
    inputs = varlen_arrays(replace(PACKED, place_k="paged", used_k=True, causal=True)).without_pages(seed=1)
    check_sequences(cupy, inputs, joined(alibi, bias_of("bhqk")))


def test_scores_that_grow_from_tile_to_tile_are_made_again(cupy: Any) -> None:
    """Maxima rise beyond the range of weights, so that weights are recomputed."""

    def growing(put: Any, case: Any) -> Any:
        return {"score_mod": lambda score, b, h, q_idx, k_idx: score - 2.0 * k_idx * (b + 1)}

    for place in ("packed", "paged"):
        check_sequences(cupy, varlen_arrays(replace(PACKED, place_k=place, used_k=True, dtype="bfloat16")), growing)


def test_each_sequence_is_as_in_a_dense_call(cupy: Any) -> None:
    """Bits differ, as tiles differ; the dense call's mods are shifted to one sequence."""
    inputs = varlen_arrays(replace(PACKED, queries=(130, 200), keys=(200, 200)))
    bounds, arguments = bounds_case(inputs), inputs.arguments(cupy)
    mod_kwargs = without_grads(MAKERS["places"](cupy.asarray, bounds))
    out, lse = (host(x) for x in cuflash.forward(**arguments, return_lse=True, **mod_kwargs))
    for number, rows in enumerate(inputs.queries):
        n = len(rows[0])
        sides = zip("qkv", (inputs.queries, inputs.keys, inputs.keys), strict=True)
        arrays = [cupy.asarray(getattr(inputs, x)[side[number]])[None] for x, side in sides]
        # The first sequence of the dense call is sequence `number`.
        moved = {**mod_kwargs, "bias": mod_kwargs["bias"][number : number + 1, :, :n]}
        lengths = np.array([bounds.seqlen_k // (number + 2)], np.int32)
        moved["mask_mod"] = cuflash.mods.prefix_lm(cupy.asarray(lengths))
        alone = cuflash.forward(*arrays, return_lse=True, **moved)
        np.testing.assert_allclose(out[rows[1]].astype("f4"), host(alone[0])[0].astype("f4"), rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(lse[:, rows[1]], host(alone[1])[0], rtol=1e-5, atol=1e-5)


def test_lengths_that_change_on_the_device_need_nothing_new(cupy: Any) -> None:
    """A replayed graph reads lengths and arrays again."""
    inputs = varlen_arrays(CASES[1])
    bounds, arguments = bounds_case(inputs), inputs.arguments(cupy)
    mod_kwargs, stream = without_grads(MAKERS["places"](cupy.asarray, bounds)), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        out = cuflash.forward(**arguments, **mod_kwargs)
        graph, _ = recorded(stream, partial(cuflash.forward, **arguments, **mod_kwargs, out=out))
        fewer = np.array([100, 0, 200, 1, 30], np.int32)
        for name in ("seqused_q", "seqused_k"):
            arguments[name][...] = cupy.asarray(np.minimum(fewer, inputs.varlen_kwargs[name]))
        mod_kwargs["bias"] *= 0.5
        out[...] = 0.0  # unused rows of a given array stay unchanged
        graph.launch()
        stream.synchronize()
        expected = cuflash.forward(**arguments, **mod_kwargs)
        assert identical([out], [expected])
