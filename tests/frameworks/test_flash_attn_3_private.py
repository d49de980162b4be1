"""FlashAttention-3's private functions, called as by the packages that build upon them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from libraries import torch_of
from tensors import arguments_of, assert_equal, assert_results, assert_sequences, assert_vjp, in_numpy
from tensors import random_qkv as dense

from cuflash import ProblemError, UnsupportedError
from cuflash.frameworks.flash_attn import v3 as fa3
from cuflash.testing.appends import WRITTEN, drawn
from cuflash.testing.sequences import Sequences, check_gradients, upstream, varlen_arrays

CASE = Sequences("packed", (5, 0, 1, 17), (9, 3, 0, 17), causal=True, dims=(16, 16), dtype="float32")
LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"


@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window_size": (4, 2), "softcap": 1.5, "softmax_scale": 0.25}], ids=str
)
def test_dense(mask: dict[str, Any], device: str) -> None:
    q, k, v = tensors = dense(device, torch.bfloat16, grad=False)
    options = dict(mask)
    left, right = options.pop("window_size", (-1, -1))
    options |= {"window_size_left": left, "window_size_right": torch.tensor(right)}
    out, lse, *rest = fa3._flash_attn_forward(q, k, v, **options)
    assert_results(tensors, out, lse, **mask)
    assert [x.numel() for x in rest] == [0, 0]
    causal = options.pop("causal", False)
    targets, dout = tuple(torch.full_like(x, torch.nan) for x in tensors), out.cos()
    grads = dict(zip(("dq", "dk", "dv"), targets, strict=True))
    rest = fa3._flash_attn_backward(dout, q, k, v, out, lse, **grads, is_causal=causal, deterministic=True, **options)
    assert (rest.numel(), rest.dtype) == (0, torch.float32)
    assert_vjp(targets, tensors, dout, **mask)


@pytest.mark.parametrize("used", [False, True])
def test_packed(used: bool, device: str) -> None:
    case = replace(CASE, used_q=used, used_k=used)
    inputs = varlen_arrays(replace(case, spare_q=(1, 2, 0, 3), spare_k=(0, 3, 2, 1)) if used else case)
    arguments = arguments_of(inputs, device)
    q, k, v = tensors = tuple(arguments[name] for name in "qkv")
    varlen_kwargs = {name: arguments[name] for name in LENGTHS if name in arguments}
    bounds = {"max_seqlen_q": 20, "max_seqlen_k": torch.tensor(20)}
    out, lse, *_ = fa3._flash_attn_forward(q, k, v, **varlen_kwargs, **bounds, causal=True)
    assert_sequences(inputs, out, lse)
    targets, dout = tuple(torch.full_like(x, torch.nan) for x in tensors), torch_of(upstream(inputs)[0][0], device)
    varlen_kwargs = {name.replace("seqused", "sequed"): x for name, x in varlen_kwargs.items()}
    grads = dict(zip(("dq", "dk", "dv"), targets, strict=True))
    fa3._flash_attn_backward(dout, q, k, v, out, lse, **varlen_kwargs, **bounds, **grads, is_causal=True)
    check_gradients(inputs, [in_numpy(x) for x in targets], dlse=False)


def test_caches(device: str) -> None:
    for place in ("paged", "cache"):
        inputs = varlen_arrays(replace(CASE, place_k=place, used_k=True, page_size=3))
        arguments = arguments_of(inputs, device)
        q, k, v, used = (arguments[name] for name in ("q", "k", "v", "seqused_k"))
        varlen_kwargs = {"cu_seqlens_q": arguments["cu_seqlens_q"], "max_seqlen_q": 17, "causal": True}
        varlen_kwargs |= {"page_table": arguments.get("page_table"), "kv_batch_idx": arguments.get("cache_batch_idx")}
        assert_sequences(inputs, *fa3._flash_attn_forward(q, k, v, seqused_k=used, **varlen_kwargs)[:2])
        if place == "paged":
            bounds = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
            assert_sequences(inputs, *fa3._flash_attn_forward(q, k, v, cu_seqlens_k=bounds, **varlen_kwargs)[:2])
            more = {"cu_seqlens_k": bounds + 7, "seqused_k": used}
            assert_sequences(inputs, *fa3._flash_attn_forward(q, k, v, **more, **varlen_kwargs)[:2])


def test_new_keys_equal_the_public_function(device: str) -> None:
    call = drawn(place="pages of 3", dims=(16, 16), rotary_dim=8)
    call = {name: torch_of(x, device) for name, x in call.items()}
    call |= {name: torch.ones_like(call[name]) for name in WRITTEN}  # they hold NaN
    q, k, v, k_new, v_new, used = (call[name] for name in ("q", "k_cache", "v_cache", "k", "v", "seqused_k"))
    rest = {"page_table": call["page_table"], "rotary_cos": call["rotary_cos"], "rotary_sin": call["rotary_sin"]}
    again = k.clone(), v.clone()
    expected = fa3.flash_attn_with_kvcache(
        q, *again, k_new, v_new, cache_seqlens=used, **rest, causal=True, num_splits=1
    )
    results = fa3._flash_attn_forward(q, k, v, k_new, v_new, seqused_k=used, seqlens_rotary=used, **rest, causal=True)
    assert_equal((results[0], k, v), (expected, *again))
    with pytest.raises(ProblemError, match="cu_seqlens_k was given beside new keys"):
        fa3._flash_attn_forward(q, k, v, k_new, v_new, cu_seqlens_k=used, seqused_k=used)


def test_out_is_written_and_must_fit() -> None:
    q, k, v = dense("cpu", torch.float32, grad=False)
    out = torch.full_like(q, torch.nan)
    result, *_ = fa3._flash_attn_forward(q, k, v, out_=out)
    assert result is out
    assert_results((q, k, v), out)
    for wrong in (out[:, :3], out.half()):
        with pytest.raises(
            ProblemError, match=r"out_ has shape .*give torch.float32 on cpu in shape \(2, 9, 4, 16\): \(batch"
        ):
            fa3._flash_attn_forward(q, k, v, out_=wrong)


def test_gradients_flow() -> None:
    q, k, v = tensors = dense("cpu", torch.float32)
    out, lse, *_ = fa3._flash_attn_forward(*tensors, causal=True)
    grads = torch.autograd.grad(out, tensors, out.detach())
    assert_vjp(grads, tensors, out.detach(), causal=True)
    only = torch.empty_like(k)
    fa3._flash_attn_backward(out, q, k, v, out, lse, dk=only, is_causal=True)
    assert torch.allclose(only, grads[1], atol=1e-5)


def test_unsupported_arguments_are_refused_by_name() -> None:
    q, k, v = dense("cpu", torch.float32, grad=False)
    ones = torch.ones(2, dtype=torch.int32)
    for changes, error, words in (
        ({"qv": q}, UnsupportedError, "qv"),
        ({"q_descale": q}, UnsupportedError, "q_descale"),
        ({"attention_chunk": -4}, ProblemError, "attention_chunk=-4"),
        ({"leftpad_k": ones}, UnsupportedError, "leftpad_k was given"),
        ({"seqlens_rotary": ones}, UnsupportedError, "seqlens_rotary was given"),
        ({"rotary_cos": q}, ProblemError, "rotary_cos was given, but not both of k_new and v_new"),
        ({"seqused_k": ones.long()}, ProblemError, "seqused_k has dtype torch.int64"),
        ({"pack_gqa": 1}, ProblemError, "pack_gqa=1"),
    ):
        with pytest.raises(error, match=words):
            fa3._flash_attn_forward(q, k, v, **changes)
    with pytest.raises(ProblemError, match="sm_margin"):
        fa3._flash_attn_backward(q, q, k, v, q, q, sm_margin=None)
