"""Calls of PyTorch with gradients, through each integration, for tests of autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from cuflash.frameworks import flash_attn_3_interface as flash_attn_3
from cuflash.frameworks import flash_attn_4_interface as flash_attn_4
from cuflash.frameworks import flash_attn_interface as flash_attn
from cuflash.frameworks.torch import attention, flex_attention, triangle_attention

HEADS, ROWS, DIM = 2, 9, 16
DENSE, PACKED, HEADS_FIRST = (2, ROWS, HEADS, DIM), (ROWS, HEADS, DIM), (2, HEADS, ROWS, DIM)
BOUNDS = torch.tensor([0, 4, ROWS], dtype=torch.int32)


def packed(*tensors: Any, **options: Any) -> Any:
    """Runs `attention` on two packed sequences."""
    bounds = BOUNDS.to(tensors[0].device)
    return attention(*tensors, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=5, max_seqlen_k=5, **options)


def flash_attn_packed(*tensors: Any) -> Any:
    bounds = BOUNDS.to(tensors[0].device)
    return flash_attn.flash_attn_varlen_func(*tensors, bounds, bounds, 5, 5)


def flash_attn_alibi(*tensors: Any) -> Any:
    return flash_attn.flash_attn_func(*tensors, alibi_slopes=torch.ones(HEADS, device=tensors[0].device))


def of_mods(q: Any, k: Any, v: Any, slopes: Any, sinks: Any, bias: Any) -> Any:
    return attention(q, k, v, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), sinks=sinks, bias=bias)


def of_flex(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    return flex_attention(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())


def of_layer(q: Any, k: Any, v: Any, weight: Any) -> Any:
    """Runs attention between matrix products, which selective checkpoints save."""
    return attention(q @ weight, k, v, causal=True) @ weight


# Shapes of the inputs, which all require grad, and a function of them.
Case = tuple[tuple[tuple[int, ...], ...], Callable[..., Any]]
PLAIN: dict[str, Case] = {
    "dense": ((DENSE,) * 3, functools.partial(attention, causal=True)),
    "lse": ((DENSE,) * 3, lambda *x: attention(*x, return_lse=True)[1]),
    "packed": ((PACKED,) * 3, packed),
    "layer": ((*(DENSE,) * 3, (DIM, DIM)), of_layer),
    "op": ((DENSE,) * 3, lambda *x: torch.ops.cuflash.attention(*x, None, True, -1, -1, None, 0.0, False)[0]),
    "flash-attn": ((DENSE,) * 3, functools.partial(flash_attn.flash_attn_func, causal=True)),
    "flash-attn, one tensor": (((2, ROWS, 3, HEADS, DIM),), flash_attn.flash_attn_qkvpacked_func),
    "flash-attn, packed": ((PACKED,) * 3, flash_attn_packed),
    "flash-attn 3": ((DENSE,) * 3, flash_attn_3.flash_attn_func),
    "flash-attn 4": ((DENSE,) * 3, lambda *x: flash_attn_4.flash_attn_func(*x)[0]),
}
MODS: dict[str, Case] = {
    "mods": ((*(DENSE,) * 3, (HEADS,), (HEADS,), (HEADS, ROWS, ROWS)), of_mods),
    "packed mods": ((*(PACKED,) * 3, (HEADS,)), lambda q, k, v, sinks: packed(q, k, v, sinks=sinks)),
    "dropout": ((DENSE,) * 3, functools.partial(attention, dropout_p=0.3)),
    "flex": ((*(HEADS_FIRST,) * 3, (HEADS,)), of_flex),
    "triangle": ((*((1, 5, HEADS, 5, DIM),) * 3, (1, HEADS, 5, 5)), triangle_attention),
    "flash-attn, dropout": ((DENSE,) * 3, functools.partial(flash_attn.flash_attn_func, dropout_p=0.3)),
    "flash-attn, ALiBi": ((DENSE,) * 3, flash_attn_alibi),
}
CASES = PLAIN | MODS


def inputs_of(case: str) -> tuple[list[Any], Callable[..., Any]]:
    """Returns random inputs that require grad, and the function."""
    shapes, function = CASES[case]
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes], function


def gradients(function: Callable[..., Any], inputs: list[Any]) -> Any:
    """Returns gradients of a loss, with the same seeds of dropout each time."""
    torch.manual_seed(3)
    return torch.autograd.grad(function(*inputs).square().sum(), inputs)
