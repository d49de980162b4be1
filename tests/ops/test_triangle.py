"""Attention along the rows of a matrix of pairs, against the written definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from libraries import jax_of, torch_of

import cuflash

SHAPE = ROWS, HEADS, SEQLEN, DIM = 3, 4, 10, 8


def inputs(batch: int) -> tuple[Any, ...]:
    random = np.random.default_rng(4)
    shape = (batch, *SHAPE)
    q, k, v = (random.standard_normal(shape).astype("f4") for _ in range(3))
    mask = random.random((batch, ROWS, SEQLEN)) > 0.3
    mask[0, 1] = False
    return q, k, v, random.standard_normal((batch, HEADS, SEQLEN, SEQLEN)).astype("f4"), mask


def whole(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    s = np.einsum("brhid,brhjd->brhij", q, k) / np.sqrt(DIM) + bias[:, None]
    s = np.where(mask[:, :, None, None], s, -np.inf)
    with np.errstate(all="ignore"):
        p = np.exp(s - s.max(axis=4, keepdims=True))
    p = np.where(mask[:, :, None, None], p, 0)
    return np.einsum("brhij,brhjd->brhid", p / np.maximum(p.sum(axis=4, keepdims=True), 1e-30), v)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_rows_share_the_bias(library: str, batch: int) -> None:
    def convert(x: Any) -> Any:
        return x if library == "numpy" else torch_of(x, "cpu") if library == "torch" else jax_of(x, "cpu")

    arrays = inputs(batch)
    out = cuflash.triangle_attention(*map(convert, arrays))
    assert type(out) is type(convert(arrays[0]))
    np.testing.assert_allclose(np.asarray(out), whole(*arrays), rtol=1e-4, atol=1e-5)
    every = np.ones_like(arrays[4])
    out = cuflash.triangle_attention(*map(convert, arrays[:4]), softmax_scale=DIM**-0.5)
    np.testing.assert_allclose(np.asarray(out), whole(*arrays[:4], every), rtol=1e-4, atol=1e-5)


def slopes(arrays: tuple[Any, ...], dout: Any) -> list[Any]:
    """Returns gradients of q, k, v and bias by finite differences, at three elements of each."""
    whole_arrays = [x.astype("f8") if x.dtype == np.float32 else x for x in arrays]
    results = []
    for x in whole_arrays[:4]:
        of_x = []
        for place in (0, x.size // 2, x.size - 1):
            flat, ends = x.reshape(-1), []
            before = flat[place]
            for flat[place] in (before + 1e-5, before - 1e-5):
                ends.append((whole(*whole_arrays) * dout).sum())
            flat[place] = before
            of_x.append((ends[0] - ends[1]) / 2e-5)
        results.append(of_x)
    return results


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_triangle_attention_of_frameworks_has_gradients(library: str, batch: int) -> None:
    arrays = inputs(batch)
    dout = np.random.default_rng(5).standard_normal(arrays[0].shape).astype("f4")
    if library == "torch":
        torch = pytest.importorskip("torch")
        from cuflash.frameworks.torch import triangle_attention

        tensors = [torch_of(x, "cpu") for x in arrays]
        leaves = [x.requires_grad_() for x in tensors[:4]]
        out = triangle_attention(*leaves, tensors[4])
        gradients = torch.autograd.grad(out, leaves, torch_of(dout, "cpu"))
        out = out.detach()
    else:
        jax = pytest.importorskip("jax")
        from cuflash.frameworks.jax import triangle_attention

        mask = jax_of(arrays[4], "cpu")
        attend = jax.jit(lambda *x: triangle_attention(*x, mask))
        out, pull = jax.vjp(attend, *(jax_of(x, "cpu") for x in arrays[:4]))
        gradients = pull(jax_of(dout, "cpu"))
    np.testing.assert_allclose(np.asarray(out), whole(*arrays), rtol=1e-4, atol=1e-5)
    for x, expected in zip(gradients, slopes(arrays, dout), strict=True):
        got = np.asarray(x).reshape(-1)
        np.testing.assert_allclose(got[[0, got.size // 2, -1]], expected, rtol=2e-3, atol=2e-4)


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v, bias, mask = inputs(2)
    with pytest.raises(cuflash.ProblemError, match=r"q has shape .*; give \(batch, rows, heads, seqlen, head_dim\)"):
        cuflash.triangle_attention(q[0], k, v, bias)
    with pytest.raises(cuflash.ProblemError, match=r"bias has shape \(1, 4, 10, 10\); q and k need \(2, 4, 10, 10\)"):
        cuflash.triangle_attention(q, k, v, bias[:1])
    with pytest.raises(cuflash.ProblemError, match=r"mask has shape \(2, 2, 10\); q and k need \(2, 3, 10\)"):
        cuflash.triangle_attention(q, k, v, bias, mask[:, :2])
    with pytest.raises(cuflash.ProblemError, match=r"bias has dtype bool; give float16"):
        cuflash.triangle_attention(q, k, v, bias > 0)
    with pytest.raises(cuflash.ProblemError, match=r"mask has dtype float32; give bool"):
        cuflash.triangle_attention(q, k, v, bias, mask.astype(np.float32))
    with pytest.raises(cuflash.ProblemError, match="bias is a NoneType"):
        cuflash.triangle_attention(q, k, v, None)
