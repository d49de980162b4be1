"""flash-attn 2's private functions, called as by the packages that build upon them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from libraries import torch_of
from tensors import arguments_of, assert_results, assert_sequences, assert_vjp, in_numpy
from tensors import random_qkv as dense

from cuflash import ProblemError, UnsupportedError
from cuflash.frameworks.flash_attn import v2 as fa2
from cuflash.testing.sequences import Sequences, check_gradients, upstream, varlen_arrays

CASE = Sequences("packed", (5, 0, 1, 17), (9, 3, 0, 17), causal=True, dims=(16, 16), dtype="float32")
MASKS = [(0.25, False, -1, -1, 0.0), (0.25, True, -1, -1, 0.0), (None, False, 4, 2, 1.5)]


def options_of(scale: Any, causal: bool, left: int, right: int, softcap: float) -> dict[str, Any]:
    return {"softmax_scale": scale, "causal": causal, "window_size": (left, right), "softcap": softcap}


def parts(like: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns targets for gradients of these: every second row of memory that holds NaN."""
    wide = [torch.full((2 * len(x), *x.shape[1:]), torch.nan, dtype=x.dtype, device=x.device) for x in like]
    return tuple(x[::2] for x in wide)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense(mask: tuple[Any, ...], dtype: Any, device: str) -> None:
    q, k, v = tensors = dense(device, dtype, grad=False)
    out, lse, dmask, state = fa2._flash_attn_forward(q, k, v, 0.0, *mask, None, False)
    assert (dmask.numel(), state.shape, state.dtype) == (0, (2,), torch.int64)
    assert_results(tensors, out, lse, **options_of(*mask))
    targets, dout = parts(tensors), out.cos()
    rest = fa2._flash_attn_backward(dout, q, k, v, out, lse, *targets, 0.0, *mask, None, True, rng_state=state)
    assert (rest.numel(), rest.dtype) == (0, torch.float32)
    assert_vjp(targets, tensors, dout, **options_of(*mask))


def test_views_of_one_packed_gradient(device: str) -> None:
    q, k, v = tensors = dense(device, torch.float32, heads=(2, 2), lengths=(9, 9), grad=False)
    mask = 0.25, True, -1, -1, 0.0, None
    out, lse, *_ = fa2._flash_attn_forward(q, k, v, 0.0, *mask, False)
    packed = torch.full((2, 9, 3, 2, 16), torch.nan, device=device)
    fa2._flash_attn_backward(out, q, k, v, out, lse, *packed.unbind(2), 0.0, *mask, False)
    assert_vjp(packed.unbind(2), tensors, out, causal=True)
    only = torch.empty_like(k)
    fa2._flash_attn_backward(out, q, k, v, out, lse, None, only, None, 0.0, *mask, False)
    assert torch.allclose(only, packed[:, :, 1], atol=1e-5)


@pytest.mark.parametrize(("heads", "length"), [(4, 9), (4, 4), (1, 1)])
def test_transposed_lse_of_diffusers_is_accepted(heads: int, length: int, device: str) -> None:
    class Function(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            with torch.set_grad_enabled(True):
                result = fa2._wrapped_flash_attn_forward(q, k, v, 1e-30, 0.25, False, -1, -1, 0.0, None, True)
            out, lse, _, state = result
            ctx.save_for_backward(q, k, v, out, lse.permute(0, 2, 1), state)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            q, k, v, out, lse, state = ctx.saved_tensors
            grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            mask = 1e-30, 0.25, False, -1, -1, 0.0, None, False
            fa2._wrapped_flash_attn_backward(dout, q, k, v, out, lse, *grads, *mask, state)
            return grads

    tensors = dense(device, torch.float32, heads=(heads, heads), lengths=(length, 12))
    out = Function.apply(*tensors)
    assert_results(tensors, out)
    dout = torch.ones_like(out)
    assert_vjp(torch.autograd.grad(out, tensors, dout), tensors, dout)


@pytest.mark.parametrize("gaps", [(0, 0), (0, 3)])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_packed(mask: tuple[Any, ...], gaps: tuple[int, int], device: str) -> None:
    inputs = varlen_arrays(replace(CASE, gaps=gaps, **options_of(*mask)))
    arguments = arguments_of(inputs, device)
    q, k, v = tensors = tuple(arguments[name] for name in "qkv")
    lengths = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"], 17, 17
    out, lse, dmask, state = fa2._flash_attn_varlen_forward(q, k, v, *lengths, 0.0, *mask, zero_tensors=True)
    assert (dmask.numel(), state.shape, lse.shape) == (0, (2,), (4, len(q)))
    assert_sequences(inputs, out, lse)
    targets, dout = parts(tensors), torch_of(upstream(inputs)[0][0], device)
    state = dout, q, k, v, out, lse
    fa2._flash_attn_varlen_backward(*state, *targets, *lengths, 0.0, *mask, None, False)
    check_gradients(inputs, [in_numpy(x) for x in targets], dlse=False)


def test_pages_and_used_keys(device: str) -> None:
    inputs = varlen_arrays(replace(CASE, place_k="paged", used_k=True, page_size=3))
    arguments = arguments_of(inputs, device)
    q, k, v, used = (arguments[name] for name in ("q", "k", "v", "seqused_k"))
    bounds = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    more = {"block_table": arguments["page_table"]}
    for cu_seqlens_k, seqused_k in ((bounds, None), (None, used), (bounds + 7, used)):
        lengths = arguments["cu_seqlens_q"], cu_seqlens_k, 17, 17, 0.0, None, True
        for splits in ({}, {"num_splits": 1}, {"num_splits": 3}):
            keywords = more | splits | {"seqused_k": seqused_k}
            assert_sequences(inputs, *fa2._flash_attn_varlen_forward(q, k, v, *lengths, **keywords)[:2])
    inputs = varlen_arrays(replace(CASE, used_k=True, spare_k=(0, 3, 2, 1)))
    arguments = arguments_of(inputs, device)
    tensors = (arguments[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"))
    results = fa2._flash_attn_varlen_forward(*tensors, 17, 17, 0.0, None, True, seqused_k=arguments["seqused_k"])
    assert_sequences(inputs, *results[:2])


def test_compiled_is_eager() -> None:
    torch._dynamo.reset()
    q, k, v = dense("cpu", torch.float32, grad=False)
    mask = 0.0, 0.25, True, -1, -1, 0.0, None

    def step(q: Any, k: Any, v: Any) -> Any:
        out, lse, *_ = fa2._wrapped_flash_attn_forward(q, k, v, *mask, False)
        targets = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        fa2._wrapped_flash_attn_backward(out, q, k, v, out, lse, *targets, *mask, False)
        return out, *targets

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(q, k, v), step(q, k, v)))


def test_backward_accepts_tensors_that_require_grad() -> None:
    q, k, v = tensors = dense("cpu", torch.float32)
    mask = 0.0, 0.25, False, -1, -1, 0.0, None
    out, lse, *_ = fa2._flash_attn_forward(q, k, v, *mask, False)
    targets = parts(tuple(x.detach() for x in tensors))
    fa2._flash_attn_backward(out, q, k, v, out, lse, *targets, *mask, False)
    expected = torch.autograd.grad(out, tensors, out.detach())
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(targets, expected, strict=True))


def test_refused_calls_write_nothing() -> None:
    q, k, v = dense("cpu", torch.float32, grad=False)
    mask = 0.25, False, -1, -1, 0.0, None
    out, lse, *_ = fa2._flash_attn_forward(q, k, v, 0.0, *mask, False)
    zeros = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for position, wrong, words in (
        (0, out[..., :8], "dout has shape"),
        (5, lse[:, :, :3], "lse has shape"),
        (6, zeros[0][:, :3], r"dq has shape \(2, 3, 4, 16\).*shape \(2, 9, 4, 16\): \(batch"),
        (7, zeros[1].half(), r"dk has shape .* dtype torch.float16.*torch.float32"),
        (8, 3, "dv is an int"),
        (1, None, "q is a NoneType"),
    ):
        operands = [out, q, k, v, out, lse, *zeros]
        operands[position] = wrong
        with pytest.raises(ProblemError, match=words):
            fa2._flash_attn_backward(*operands, 0.0, *mask, False)
    assert not any(x.any() for x in zeros)
    with pytest.raises(ProblemError, match=r"dropout_p=1\.5"):
        fa2._flash_attn_forward(q, k, v, 1.5, *mask, False)
    with pytest.raises(ProblemError, match=r"dropout_p=0\.1, but there is no rng_state"):
        fa2._flash_attn_backward(out, q, k, v, out, lse, *zeros, 0.1, *mask, False)
    with pytest.raises(ProblemError, match=r"alibi_slopes has shape \(3,\)"):
        fa2._flash_attn_forward(q, k, v, 0.0, *mask[:-1], torch.ones(3), False)
    with pytest.raises(ProblemError, match="softcap=None"):
        fa2._flash_attn_backward(out, q, k, v, out, lse, *zeros, 0.0, 0.25, False, -1, -1, None, None, False)
    bounds = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="leftpad_k was given"):
        fa2._flash_attn_varlen_forward(q[0], k[0], v[0], bounds, bounds, 9, 9, 0.0, None, True, leftpad_k=bounds)
    with pytest.raises(ProblemError, match="num_splits=-1 is negative"):
        fa2._flash_attn_varlen_forward(q[0], k[0], v[0], bounds, bounds, 9, 9, 0.0, None, True, num_splits=-1)
