"""ALiBi, dropout, sinks and chunks under flash-attn's names: results, gradients, weights and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tensors import random_qkv

import cuflash
from cuflash import ProblemError, UnsupportedError, mods
from cuflash.frameworks.flash_attn import v2 as fa2
from cuflash.frameworks.flash_attn import v3 as fa3
from cuflash.frameworks.flash_attn import v4 as fa4
from cuflash.frameworks.torch import attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SLOPES = {"of heads": torch.tensor([0.5, 0.25, 0.125, 0.7]), "of the batch": torch.linspace(0.1, 1, 8).reshape(2, 4)}
MASKS: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (5, 3)}}


def tensors(device: str, lengths: tuple[int, int] = (9, 12)) -> list[Any]:
    """Returns q, k and v with 4 heads of q and 2 of k that require grad."""
    return list(random_qkv(device, torch.float32 if device == "cpu" else torch.float16, lengths=lengths))


def eager(q: Any, k: Any, v: Any, slopes: Any = None, scale: float | None = None, mask: Any = None) -> Any:
    """Returns (out, lse, weights) with all weights in memory, in float64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    rows = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    keys = torch.arange(k.shape[2], device=q.device)
    scores = q @ k.transpose(2, 3) * (scale or 1 / math.sqrt(q.shape[3]))
    if slopes is not None:
        scores = scores - slopes.double().reshape(-1, q.shape[1])[..., None, None] * (rows - keys).abs()
    if mask:
        visible = (keys <= rows) if mask.get("causal") else (rows - 5 <= keys) & (keys <= rows + 3)
        scores = scores.masked_fill(~visible, -math.inf)
    weights = scores.softmax(-1)
    return (weights @ v).transpose(1, 2), scores.logsumexp(-1), weights


def near(got: Any, expected: Any) -> None:
    tolerance = {torch.float32: 2e-6, torch.float16: 4e-3}[got.dtype]
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("slopes", SLOPES)
def test_alibi(slopes: str, mask: str, device: str) -> None:
    inputs, slope = tensors(device), SLOPES[slopes].to(device)
    out, lse, _ = fa2.flash_attn_func(*inputs, alibi_slopes=slope, return_attn_probs=True, **MASKS[mask])
    expected, expected_lse, _ = eager(*inputs, slope, mask=MASKS[mask])
    near(out, expected)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-3, atol=1e-3)
    dout = torch.randn_like(out)
    pairs = zip(*(torch.autograd.grad(x, inputs, dout.to(x.dtype)) for x in (out, expected)), strict=True)
    for got, exact in pairs:
        near(got, exact)
    packed = torch.stack([inputs[1].detach(), inputs[2].detach()], 2)
    got = fa2.flash_attn_kvpacked_func(inputs[0], packed, alibi_slopes=slope, **MASKS[mask])
    assert torch.equal(got, out)


@pytest.mark.parametrize("device", DEVICES)
def test_alibi_of_packed_rows_and_over_a_cache(device: str) -> None:
    (q, k, v), slope = (x.detach() for x in tensors(device, (9, 9))), SLOPES["of the batch"].to(device)
    bounds = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    rows = [x.flatten(0, 1).requires_grad_() for x in (q, k, v)]
    out = fa2.flash_attn_varlen_func(*rows, bounds, bounds, 9, 9, causal=True, alibi_slopes=slope)
    expected, _, _ = eager(q, k, v, slope, mask=MASKS["causal"])
    near(out, expected.flatten(0, 1))
    used = torch.tensor([7, 9], dtype=torch.int32, device=device)
    got, lse = fa2.flash_attn_with_kvcache(
        q[:, :1], k, v, cache_seqlens=used, causal=True, alibi_slopes=slope, return_softmax_lse=True
    )
    for row, length in enumerate(used.tolist()):
        near(got[row], eager(*(x[row : row + 1] for x in (q[:, :1], k[:, :length], v[:, :length])), slope[row])[0][0])
    alone = [x[:, :8].clone() for x in (k, v)]
    cache = [torch.cat([x, torch.zeros_like(x[:, :2])], 1) for x in alone]
    new = k[:, 8:], v[:, 8:]
    done = fa2.flash_attn_with_kvcache(q[:, 8:], *cache, *new, cache_seqlens=8, causal=True, alibi_slopes=slope)
    near(done, expected[:, 8:])
    assert lse.shape == (2, 4, 1)
    targets = [torch.empty_like(x) for x in rows]
    dout, mask = torch.randn_like(out), (None, True, -1, -1, 0.0, slope)
    state = fa2._flash_attn_varlen_forward(*rows, bounds, bounds, 9, 9, 0.0, *mask)
    fa2._flash_attn_varlen_backward(
        dout, *rows, *state[:2], *targets, bounds, bounds, 9, 9, 0.0, *mask, False, state[3]
    )
    for got, exact in zip(targets, torch.autograd.grad(out, rows, dout), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_packed", [False, True])
def test_dropout_and_its_weights(is_packed: bool, device: str) -> None:
    q, k, v = (x.detach() for x in tensors(device, (150, 140)))
    _, lse, weights = eager(q, k, v, SLOPES["of heads"].to(device), mask=MASKS["causal"])
    arguments: dict[str, Any] = {"causal": True, "alibi_slopes": SLOPES["of heads"].to(device)}
    arguments |= {"dropout_p": 0.25, "return_attn_probs": True}
    if is_packed:
        bounds = [torch.arange(3, dtype=torch.int32, device=device) * n for n in (150, 140)]
        rows = [x.flatten(0, 1).requires_grad_() for x in (q, k, v)]
        out, got_lse, signed = fa2.flash_attn_varlen_func(*rows, *bounds, 150, 140, **arguments)
        out, got_lse = out.unflatten(0, (2, 150)), got_lse.unflatten(1, (2, 150)).transpose(0, 1)
    else:
        rows = [x.requires_grad_() for x in (q, k, v)]
        out, got_lse, signed = fa2.flash_attn_func(*rows, **arguments)
    is_finite = torch.isfinite(lse)
    torch.testing.assert_close(got_lse.double()[is_finite], lse[is_finite], rtol=1e-3, atol=1e-3)
    assert signed.shape == (2, 4, 256, 256)
    assert signed.dtype == q.dtype
    assert not signed[:, :, 150:].any()
    assert not signed[..., 140:].any()
    signed = signed[:, :, :150, :140].double()
    near(signed.abs().to(q.dtype), weights.nan_to_num(0.0))
    dropped = torch.signbit(signed)
    visible = weights.nan_to_num(0.0) > 0
    assert abs(float(dropped[visible].double().mean()) - 0.25) < 0.01
    repeated = v.detach().double().transpose(1, 2).repeat_interleave(2, 1)
    near(out.detach(), ((weights.nan_to_num(0.0) * ~dropped / 0.75) @ repeated).transpose(1, 2))
    again = fa2.flash_attn_func(q, k, v, **arguments)[2][:, :, :150, :140]
    assert not torch.equal(torch.signbit(again), dropped), "each call draws a seed"
    q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
    exact = eager(q64, k64, v64, SLOPES["of heads"].to(device), mask=MASKS["causal"])[2][:, :, 10:]
    values = v64.transpose(1, 2).repeat_interleave(2, 1)
    expected = ((exact * ~dropped[:, :, 10:] / 0.75) @ values).transpose(1, 2)
    dout = torch.randn_like(expected)
    grads = torch.autograd.grad(out[:, 10:], rows, dout.to(out.dtype))
    for got, real in zip(grads, torch.autograd.grad(expected, (q64, k64, v64), dout), strict=True):
        near(got.reshape(real.shape), real)


def test_private_functions_pass_the_seed_to_backward() -> None:
    q, k, v = (x.detach() for x in tensors("cpu"))
    mask = (0.3, 0.25, True, -1, -1, 0.0, SLOPES["of heads"])
    out, lse, weights, state = fa2._flash_attn_forward(q, k, v, *mask, True)
    assert weights.shape == (2, 4, 128, 128)
    assert (state.shape, state.dtype) == ((2,), torch.int64)
    mod_kwargs = {"score_mod": mods.alibi(mask[-1]), "dropout_p": 0.3, "dropout_seed": int(state[0])}
    expected = attention(q, k, v, softmax_scale=0.25, causal=True, **mod_kwargs)
    assert torch.equal(out, expected)
    targets, dout = [torch.empty_like(x) for x in (q, k, v)], torch.randn_like(out)
    fa2._flash_attn_backward(dout, q, k, v, out, lse, *targets, *mask, False, state)
    expected = cuflash.backward(dout, q, k, v, out, lse, softmax_scale=0.25, causal=True, **mod_kwargs)
    assert all(torch.equal(*pair) for pair in zip(targets, expected, strict=True))
    plain = fa2._flash_attn_forward(q, k, v, 0.0, *mask[1:], True)
    assert plain[2].numel() == 0


@pytest.mark.parametrize(
    "dtype", [torch.float32, None, torch.float16, torch.bfloat16], ids=["float32", "of q", "float16", "bfloat16"]
)
@pytest.mark.parametrize("device", DEVICES)
def test_sinks(device: str, dtype: Any) -> None:
    inputs = tensors(device)
    sink = torch.tensor([0.3, -1.0, 2.0, 0.0], device=device, dtype=dtype or inputs[0].dtype).requires_grad_()
    out, lse = fa4.flash_attn_func(*inputs, causal=True, learnable_sink=sink, return_lse=True)
    exact, plain, _ = eager(*inputs, mask=MASKS["causal"])
    share = torch.sigmoid(plain - sink.double()[:, None])
    expected = exact * share.transpose(1, 2)[..., None]
    near(out, expected)
    torch.testing.assert_close(lse.double(), torch.logaddexp(plain, sink.double()[:, None]), rtol=1e-3, atol=1e-3)
    dout = torch.randn_like(out)
    pairs = zip(*(torch.autograd.grad(x, (*inputs, sink), dout.to(x.dtype)) for x in (out, expected)), strict=True)
    for got, real in pairs:
        assert got.dtype == real.dtype
        torch.testing.assert_close(got.double(), real.double(), rtol=1e-2, atol=1e-2 if device == "cuda" else 1e-5)
    assert torch.equal(fa3.flash_attn_func(*inputs, causal=True, s_aux=sink), out)
    bounds = [torch.arange(3, dtype=torch.int32, device=device) * n for n in (9, 12)]
    rows = [x.flatten(0, 1) for x in inputs]
    for got in (
        fa3.flash_attn_varlen_func(*rows, *bounds, 9, 12, causal=True, s_aux=sink),
        fa4.flash_attn_varlen_func(
            *rows, None, *bounds, max_seqlen_q=9, max_seqlen_k=12, causal=True, learnable_sink=sink
        )[0],
    ):
        near(got, expected.flatten(0, 1))
    with torch.no_grad():
        near(fa3.flash_attn_with_kvcache(*inputs, cache_seqlens=12, causal=True, s_aux=sink), expected)


def test_chunks() -> None:
    inputs = tensors("cpu")
    out = fa3.flash_attn_func(*inputs, causal=True, attention_chunk=4)
    assert torch.equal(out, attention(*inputs, causal=True, mask_mod=mods.chunked(4)))
    with torch.no_grad():
        cached = fa3.flash_attn_with_kvcache(*inputs, cache_seqlens=12, causal=True, attention_chunk=4)
    near(cached, out)
    got = fa3._flash_attn_forward(*inputs, causal=True, attention_chunk=4)[0]
    assert torch.equal(got, out)


def test_a_model_compiles_around_the_calls() -> None:
    q, k, v = (x.detach() for x in tensors("cpu"))
    slopes = SLOPES["of heads"]

    def layer(q: Any, k: Any, v: Any) -> Any:
        return fa2.flash_attn_func(q * 2, k, v, causal=True, alibi_slopes=slopes) + 1

    got = torch.compile(layer, backend="eager")(q, k, v)
    assert torch.equal(got, layer(q, k, v))
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes has shape \(3,\).*shape \(4,\) or \(2, 4\): \(heads_q"),
        ({"alibi_slopes": torch.ones(4, dtype=torch.float64)}, r"dtype torch\.float64"),
        ({"alibi_slopes": [1.0] * 4}, "alibi_slopes is a list"),
        ({"dropout_p": 1.0}, r"dropout_p=1\.0 is outside"),
        ({"dropout_p": "0.1"}, "dropout_p='0.1' is a str"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        fa2.flash_attn_func(*tensors("cpu"), **arguments)


def test_tiny_dropout_drops_nothing() -> None:
    inputs = tensors("cpu")
    out, _, weights = fa2.flash_attn_func(*inputs, dropout_p=1e-30, return_attn_probs=True)
    assert torch.equal(out, fa2.flash_attn_func(*inputs))
    assert weights.numel() == 0


def test_weights_of_pages_are_refused() -> None:
    q, k, v = (x.detach() for x in tensors("cpu", (4, 8)))
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    bounds = [torch.arange(3, dtype=torch.int32) * n for n in (4, 8)]
    varlen_args = (*bounds, 4, 8)
    with pytest.raises(UnsupportedError, match="block_table, dropout_p and return_attn_probs"):
        fa2.flash_attn_varlen_func(
            q.flatten(0, 1), k, v, *varlen_args, dropout_p=0.1, return_attn_probs=True, block_table=table
        )
