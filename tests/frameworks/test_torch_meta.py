"""Tensors on the device meta: each public call is validated, and returns shapes, dtypes and strides without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import cuflash
from cuflash import ProblemError, mods

torch = pytest.importorskip("torch")
from torch.utils.flop_counter import FlopCounterMode
from torch_calls import BOUNDS, CASES, inputs_of

from cuflash.frameworks import flash_attn_interface as flash_attn
from cuflash.frameworks.torch import attention, flex_attention

BATCH, ROWS, HEADS, DIM = 2, 9, 4, 16


def layout(*tensors: Any) -> list[Any]:
    """Returns all of tensors but their values and devices; None stays None."""
    return [None if x is None else (x.shape, x.stride(), x.dtype, x.requires_grad) for x in tensors]


def on_meta(*tensors: Any) -> list[Any]:
    return [x.detach().to("meta").requires_grad_(x.requires_grad) for x in tensors]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_have_the_cpus_strides(case: str, is_compiled: bool) -> None:
    inputs, function = inputs_of(case)
    layouts = []
    torch._dynamo.reset()
    call = torch.compile(lambda *x: function(*x), backend="aot_eager") if is_compiled else function
    for tensors in (inputs, on_meta(*inputs)):
        out = call(*tensors)
        gradients = torch.autograd.grad(out.sum(), tensors)
        assert {x.device for x in (out, *gradients)} == {tensors[0].device}
        with torch.no_grad():
            plain = function(*tensors)
        layouts.append(layout(out, *gradients, plain))
    assert layouts[0] == layouts[1]


def operands(device: str) -> tuple[Any, ...]:
    q, k, v = torch.zeros(3, BATCH, ROWS, HEADS, DIM, device=device).unbind()
    return q, k, v, torch.zeros(BATCH, HEADS, ROWS, device=device)


def forward(device: str) -> Any:
    q, k, v, _ = operands(device)
    return cuflash.forward(q, k, v, return_lse=True, out_dtype="float32")


def lse(device: str) -> Any:
    q, k, *_ = operands(device)
    return (cuflash.lse(q, k, bias=torch.zeros(ROWS, ROWS, device=device)),)


def backward(device: str) -> Any:
    q, k, v, of_rows = operands(device)
    dq, sinks = torch.empty_like(q), torch.zeros(HEADS, device=device)
    options: Any = {"grads_out": (dq, None, None), "sinks": sinks, "captured_grads": (sinks,)}
    first, *rest, sums = cuflash.backward(v, q, k, v, v, of_rows, **options)
    assert first is dq
    return first, *rest, *sums


def merge_states(device: str) -> Any:
    q, _, _, of_rows = operands(device)
    return cuflash.merge_states([q.half()] * 3, [of_rows] * 3)


def append_kv(device: str) -> Any:
    q, k_cache, v_cache, _ = operands(device)
    new, angles = k_cache[:, :1], torch.zeros(ROWS, DIM // 2, device=device)
    used = torch.tensor([0, 4], dtype=torch.int32, device=device)
    assert cuflash.append_kv(k_cache, v_cache, new.clone(), new.clone(), used) is None
    options = {"q": q[:, :1].clone(), "rotary_cos": angles, "rotary_sin": angles}
    return (cuflash.append_kv(k_cache, v_cache, new.clone(), new.clone(), used, **options),)


def block_mask(device: str) -> Any:
    mask_mod = mods.document(BOUNDS.to(device))
    return (cuflash.create_block_mask(mask_mod, 1, 1, 100, 200, like=operands(device)[0]).cells,)


def flex_block_mask(device: str) -> Any:
    flex = torch.nn.attention.flex_attention
    q = torch.zeros(1, HEADS, 256, DIM, device=device)
    block_mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device=device)
    return flex_attention(q, q, q, block_mask=block_mask, return_aux=flex.AuxRequest(lse=True))


def pages(device: str) -> Any:
    q, k, v, _ = operands(device)
    table, used = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0], [1]], [3, 9]))
    return attention(q[:, :1], k, v, page_table=table, seqused_k=used, return_lse=True)


def flash_attn_cache(device: str) -> Any:
    q, k_cache, v_cache, _ = operands(device)
    new, used = k_cache[:, :1].clone(), torch.tensor([0, 4], dtype=torch.int32, device=device)
    arguments = q[:, :1], k_cache, v_cache, new, new.clone()
    return flash_attn.flash_attn_with_kvcache(*arguments, cache_seqlens=used, return_softmax_lse=True)


def flash_attn_weights(device: str) -> Any:
    q, k, v, _ = operands(device)
    return flash_attn.flash_attn_func(q, k, v, dropout_p=0.1, return_attn_probs=True)


def mapped(device: str) -> Any:
    q, k, v, _ = operands(device)
    return torch.vmap(lambda x: attention(x, k, v, return_lse=True))(torch.stack([q, q]))


def transformed(device: str) -> Any:
    q, k, v, _ = operands(device)
    return torch.func.grad(lambda x: attention(*x).sum())((q, k, v))


CALLS = (
    forward, lse, backward, merge_states, append_kv, block_mask, flex_block_mask, pages, flash_attn_cache,
    flash_attn_weights, mapped, transformed,
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_calls_have_the_layout_of_the_cpu(call: Callable[[str], Any]) -> None:
    results = list(call("meta"))
    assert {x.device.type for x in results if torch.is_tensor(x)} == {"meta"}
    if call is flex_block_mask:
        results[1:] = results[1]
    expected = list(call("cpu"))
    if call is flex_block_mask:
        expected[1:] = expected[1]
    assert layout(*results) == layout(*expected)


def test_shapes_larger_than_memory() -> None:
    q = torch.empty(64, 2**20, 128, 256, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out, of_rows = attention(q, q, q, causal=True, return_lse=True)
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert (out.shape, gradient.shape, of_rows.shape) == (q.shape, q.shape, (64, 128, 2**20))


def test_arguments_are_validated() -> None:
    q, k, v, _ = operands("meta")
    with pytest.raises(ProblemError, match="heads_q must be a multiple of heads_kv"):
        attention(q, k[:, :, :3], v[:, :, :3])
    with pytest.raises(ProblemError, match="v is on cpu, but q is on meta"):
        attention(q, k, torch.zeros(v.shape))
    with pytest.raises(ProblemError, match="window_size"):
        attention(q, k, v, window_size=(-2, 0))


def test_flops_are_counted_and_autocast_of_other_devices_is_not_of_meta() -> None:
    counts = []
    for device in ("cpu", "meta"):
        q, k, v, _ = operands(device)
        with FlopCounterMode(display=False) as counter:
            attention(q.requires_grad_(), k, v).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, k, v).dtype == torch.float32


def test_a_block_mask_on_meta_has_a_repr() -> None:
    mask = cuflash.create_block_mask(mods.document(BOUNDS.to("meta")), 1, 1, 9, 9, like=operands("meta")[0])
    assert repr(mask) == "BlockMask(batch=1, heads=1, seqlen_q=9, seqlen_k=9, cells on the device meta)"
