"""Mask_mods that are a plain window run the plain call, with its plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mod_calls import arrays, normal

import cuflash
from cuflash import mods
from cuflash.mods.analysis.intervals import Band, band
from cuflash.mods.tracing.trace import trace

# Masks, and the equivalent arguments.
WINDOWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "causal": (mods.causal, {"causal": True}),
    "sliding": (mods.sliding_window(5, 2), {"window_size": (5, 2)}),
    "sliding back": (mods.sliding_window(5), {"window_size": (5, 0)}),
    "from the begin": (lambda b, h, q, k: q >= k, {"causal": True, "diagonal_offset": 0}),
    "both": (mods.and_masks(mods.causal, mods.sliding_window(7, 3)), {"window_size": (7, 0)}),
    "distance": (lambda b, h, q, k: abs(q - k) <= 4, {"window_size": (4, 4), "diagonal_offset": 0}),
    "diagonal": (lambda b, h, q, k: q + 3 == k, {"window_size": (0, 0), "diagonal_offset": 3}),
    "strictly before": (
        lambda b, h, q, k: k < q + mods.seqlen_k() - mods.seqlen_q(),
        {"causal": True, "diagonal_offset": 34 - 21 - 1},
    ),
    "not behind": (lambda b, h, q, k: ~(k > q + 2), {"causal": True, "diagonal_offset": 2}),
    "everything": (lambda b, h, q, k: (k >= 0) | (q > k), {}),
}

MORE: list[dict[str, Any]] = [{"causal": True}, {"window_size": (3, 9)}, {"causal": True, "diagonal_offset": 5}]


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_mask_has_the_plan_of_the_arguments(name: str) -> None:
    mask_mod, same = WINDOWS[name]
    inputs = arrays("float32")
    for op in ("forward", "backward"):
        results, expected = (cuflash.plan(*inputs, op=op, **each) for each in ({"mask_mod": mask_mod}, same))
        assert results == expected
        for arch in ("sm_80", "sm_90"):
            shapes = {"dtype": "bfloat16", "device": arch, "op": op}
            dims = [(2, 21, 4, 64), (2, 34, 2, 64), (2, 34, 2, 64)]
            assert cuflash.plan(*dims, mask_mod=mask_mod, **shapes) == cuflash.plan(*dims, **same, **shapes)
    results, expected = (cuflash.forward(*inputs, return_lse=True, **each) for each in ({"mask_mod": mask_mod}, same))
    assert all((x == y).all() for x, y in zip(results, expected, strict=True))


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_and_the_arguments_hide_together(name: str, more: dict[str, Any]) -> None:
    mask_mod, inputs = WINDOWS[name][0], arrays("float32")
    plan = cuflash.plan(*inputs, mask_mod=mask_mod, **more)
    assert plan.problem.op.mod_spec is None

    def visible_to_all(b: Any, h: Any, q: Any, k: Any) -> Any:
        return mask_mod(b, h, q, k) & ((k % 2 == 0) | (k % 2 == 1))  # not recognised as a window

    expected = cuflash.forward(*inputs, mask_mod=visible_to_all, **more)
    np.testing.assert_allclose(cuflash.forward(*inputs, mask_mod=mask_mod, **more), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("more", [{}, *MORE])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_of_sequences_count_from_the_lengths_of_each(name: str, more: dict[str, Any]) -> None:
    mask_mod = WINDOWS[name][0]
    q, k, v = normal(40, 4, 8), normal(60, 2, 8), normal(60, 2, 8)
    varlen_kwargs = {"cu_seqlens_q": np.array([0, 21, 40], np.int32), "cu_seqlens_k": np.array([0, 34, 60], np.int32)}

    def visible_to_all(b: Any, h: Any, q: Any, k: Any) -> Any:
        return mask_mod(b, h, q, k) & ((k % 2 == 0) | (k % 2 == 1))

    results, expected = (cuflash.forward(q, k, v, mask_mod=each, return_lse=True, **varlen_kwargs, **more)
                     for each in (mask_mod, visible_to_all))  # fmt: skip
    for x, y in zip(results, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)
    if not more:
        assert cuflash.plan(q, k, v, mask_mod=mask_mod, **varlen_kwargs).problem.op.mod_spec is None


def test_a_window_beside_a_score_leaves_the_score_alone() -> None:
    inputs = arrays("float32")
    alibi = mods.alibi(4)
    plan = cuflash.plan(*inputs, score_mod=alibi, mask_mod=mods.causal)
    assert plan == cuflash.plan(*inputs, score_mod=alibi, causal=True)
    assert plan.problem.op.mod_spec is not None
    assert plan.problem.op.mod_spec.mask is None


OTHERS = {
    "chunks": mods.chunked(3),
    "of the head": lambda b, h, q, k: k <= q + h,
    "half the slope": lambda b, h, q, k: 2 * k <= q,
    "of one end alone": lambda b, h, q, k: k <= mods.seqlen_k() - 5,
    "both alignments": mods.and_masks(mods.causal, lambda b, h, q, k: k <= q + 1),
    "two conditions": lambda b, h, q, k: (k <= q) & (q > 3),
    "nothing": lambda b, h, q, k: k < 0,
    "array": mods.document(np.array([0, 5, 9])),
}


@pytest.mark.parametrize("name", OTHERS)
def test_masks_that_are_no_window_stay(name: str) -> None:
    assert band(trace(OTHERS[name], "mask_mod").root) is None
    assert cuflash.plan(*arrays("float32"), mask_mod=OTHERS[name]).problem.op.mod_spec is not None


def test_bands_of_masks() -> None:
    def band_of(mask_mod: Any) -> Band | None:
        return band(trace(mask_mod, "mask_mod").root)

    assert band_of(mods.causal) == Band(None, 0, True)
    assert band_of(lambda b, h, q, k: k > q - 3) == Band(-2, None, False)
    assert band_of(mods.sliding_window(4, 1)) == Band(-4, 1, True)
