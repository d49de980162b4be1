"""The functions of flash-attn 2's compiled module, called by position as xformers calls them."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from libraries import torch_of
from tensors import arguments_of, assert_results, assert_sequences, assert_vjp, in_numpy
from tensors import random_qkv as dense

from cuflash import ProblemError, UnsupportedError
from cuflash.frameworks.flash_attn import v2 as fa2
from cuflash.frameworks.flash_attn import v2_gpu
from cuflash.testing.sequences import Sequences, check_gradients, upstream, varlen_arrays

# Names of the arguments in csrc/flash_attn/flash_api.cpp of flash-attn 2.8.3, without the underscores of optional ones.
OPTIONS = "is_causal, window_size_left, window_size_right, softcap"
STATE = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
BOUNDS = "max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "fwd": f"q, k, v, out, alibi_slopes, p_dropout, softmax_scale, {OPTIONS}, return_softmax, gen",
    "varlen_fwd": "q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, "
    f"{BOUNDS}, p_dropout, softmax_scale, zero_tensors, {OPTIONS}, return_softmax, gen, num_splits=0",
    "bwd": f"{STATE}, alibi_slopes, p_dropout, softmax_scale, {OPTIONS}, deterministic, gen, rng_state",
    "varlen_bwd": f"{STATE}, cu_seqlens_q, cu_seqlens_k, alibi_slopes, {BOUNDS}, p_dropout, softmax_scale, "
    f"zero_tensors, {OPTIONS}, deterministic, gen, rng_state",
    "fwd_kvcache": "q, k_cache, v_cache, k, v, seqlens_k, rotary_cos, rotary_sin, cache_batch_idx, leftpad_k, "
    f"block_table, alibi_slopes, out, softmax_scale, {OPTIONS}, is_rotary_interleaved, num_splits",
}
CASE = Sequences("packed", (5, 0, 1, 17), (9, 3, 0, 17), causal=True, dims=(16, 16), dtype="float32")
CAUSAL = 0.25, True, -1, -1, 0.0


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(v2_gpu, name)).parameters.values()
    assert ", ".join(str(x.replace(annotation=x.empty)) for x in parameters) == SIGNATURES[name]
    assert set(v2_gpu.__all__) == set(SIGNATURES)


@pytest.mark.parametrize("has_targets", [False, True])
def test_dense(has_targets: bool, device: str) -> None:
    q, k, v = tensors = dense(device, torch.float32)
    target = torch.empty_like(q) if has_targets else None
    out, lse, weights, state = v2_gpu.fwd(q, k, v, target, None, 0.0, *CAUSAL, False, None)
    assert not has_targets or out is target
    assert out.grad_fn is lse.grad_fn is None  # compiled functions have no history
    assert (weights.numel(), state.shape) == (0, (2,))
    mask = {"softmax_scale": 0.25, "causal": True}
    assert_results(tensors, out, lse, **mask)
    grads = [torch.empty_like(x) if has_targets else None for x in tensors]
    dout = out.cos()
    *result, rest = v2_gpu.bwd(dout, q, k, v, out, lse, *grads, None, 0.0, *CAUSAL, True, None, state)
    assert rest.dtype == torch.float32
    assert not has_targets or all(x is y for x, y in zip(result, grads, strict=True))
    assert_vjp(result, tensors, dout, **mask)


def test_packed(device: str) -> None:
    inputs = varlen_arrays(replace(CASE, softmax_scale=0.25))
    arguments = arguments_of(inputs, device)
    q, k, v = (arguments[name] for name in "qkv")
    lengths = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]
    rest = None, None, None, None, 17, 17, 0.0, 0.25, False, *CAUSAL[1:]
    out, lse, _, state = v2_gpu.varlen_fwd(q, k, v, None, *lengths, *rest, False, None)
    assert_sequences(inputs, out, lse)
    dout = torch_of(upstream(inputs)[0][0], device)
    operands = dout, q, k, v, out, lse, None, None, None, *lengths, None, 17, 17, 0.0, 0.25, False, *CAUSAL[1:]
    *result, _ = v2_gpu.varlen_bwd(*operands, True, None, state)
    check_gradients(inputs, [in_numpy(x) for x in result], dlse=False)


def test_backward_drops_the_forwards_weights() -> None:
    q, k, v = tensors = dense("cpu", torch.float32)
    out, lse, _, state = v2_gpu.fwd(q, k, v, None, None, 0.5, *CAUSAL, False, None)
    *result, _ = v2_gpu.bwd(out, q, k, v, out, lse, None, None, None, None, 0.5, *CAUSAL, True, None, state)
    grads = [torch.empty_like(x) for x in tensors]
    fa2._flash_attn_backward(out, q, k, v, out, lse, *grads, 0.5, *CAUSAL, None, True, state)
    assert all(map(torch.equal, result, grads))
    assert not torch.equal(out, v2_gpu.fwd(q, k, v, None, None, 0.0, *CAUSAL, False, None)[0])


@pytest.mark.parametrize("is_paged", [False, True])
def test_over_a_cache(is_paged: bool, device: str) -> None:
    place = {"place_k": "paged", "page_size": 3} if is_paged else {"place_k": "rectangle"}
    case = replace(CASE, queries=(2,) * 3, keys=(9, 4, 12), place_q="rectangle", used_k=True, **place)
    inputs = varlen_arrays(case)
    arguments = arguments_of(inputs, device)
    tensors = (arguments[name] for name in "qkv")
    varlen = arguments["seqused_k"], None, None, None, None, arguments.get("page_table")
    target = torch.empty_like(arguments["q"])
    options = None, target, None, *CAUSAL[1:], True, 0
    out, lse = v2_gpu.fwd_kvcache(*tensors, None, None, *varlen, *options)
    assert out is target
    assert_sequences(inputs, out, lse)


def test_invalid_arguments_are_refused() -> None:
    q, k, v = dense("cpu", torch.float32, grad=False)
    with pytest.raises(ProblemError, match=r"out has shape \(2, 3, 4, 16\)"):
        v2_gpu.fwd(q, k, v, q[:, :3], None, 0.0, *CAUSAL, False, None)
    with pytest.raises(UnsupportedError, match="gen was given"):
        v2_gpu.fwd(q, k, v, None, None, 0.0, *CAUSAL, False, torch.Generator())
    lengths = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="cache_leftpad was given"):
        v2_gpu.fwd_kvcache(q, k, v, None, None, None, None, None, None, lengths, None, None, None, *CAUSAL, True, 0)
