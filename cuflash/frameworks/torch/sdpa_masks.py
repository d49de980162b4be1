"""PyTorch's memory-efficient attention on cuflash: the op that `scaled_dot_product_attention` calls with a mask tensor.

Operands are (batch, heads, seqlen, head_dim), attn_bias is (batch, heads, seqlen_q, seqlen_k), is_causal is aligned
top-left. Results have the shapes and strides of PyTorch's fake kernels, which compiled code requires. Autograd is
outside of these functions, though tensors may still require grad.
"""

from __future__ import annotations

from typing import Any

import torch

from ...ops.backward import backward
from ...ops.forward import forward
from ...ops.lse import lse as log_sum_exp

_STEP_OF_LSE, _STEP_OF_BIAS = 32, 16  # multiples to which lse's rows and a mask gradient's keys are padded


def masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns out, lse, and the two numbers of the random state; the first is the seed."""
    seed = drawn(query, (), dropout_p)
    results: Any = forward(
        *(x.transpose(1, 2) for x in (query, key, value)),
        return_lse=compute_log_sumexp,
        bias=None if attn_bias is None else _shrunk(attn_bias.detach()),
        **_keywords(scale, is_causal, dropout_p, seed),
    )
    out, lse = results if compute_log_sumexp else (results, None)
    return out.transpose(1, 2), _padded(lse, query), seed, torch.empty_like(seed)


def masked_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Returns gradients of query, key, value and attn_bias; the last is None unless `grad_input_mask` requires it."""
    *_, requires_bias = grad_input_mask
    is_bias_wanted = attn_bias is not None and requires_bias
    # A mask with a gradient keeps its axes: PyTorch expects the gradient of every element, and sums expanded axes.
    bias = None if attn_bias is None else attn_bias.detach() if is_bias_wanted else _shrunk(attn_bias.detach())
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    lse = logsumexp[..., : query.shape[2]]
    if lse.shape[2] < query.shape[2]:
        # PyTorch's forward omits lse if the mask alone requires grad.
        lse = log_sum_exp(q, k, bias=bias, **_keywords(scale, is_causal))
    dq, dk, dv, *grads = backward(
        *(dout, q, k, v, o, lse),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        bias=bias,
        captured_grads=(bias,) if is_bias_wanted else None,
        **_keywords(scale, is_causal, dropout_p, seed),
    )
    dbias = None
    if is_bias_wanted:
        ((dbias,),) = grads
        dbias = _aligned(dbias)
    return *(x.transpose(1, 2) for x in (dq, dk, dv)), dbias


def drawn(query: torch.Tensor, shape: tuple[int, ...], dropout_p: float) -> torch.Tensor:
    """Draws random numbers on the device by PyTorch's generator, if weights are dropped; the host does not wait."""
    state = torch.empty(shape, dtype=torch.int64, device=query.device)
    return state.random_() if dropout_p > 0.0 else state


def _keywords(
    scale: float | None, is_causal: bool, dropout_p: float = 0.0, seed: torch.Tensor | None = None
) -> dict[str, Any]:
    keywords = {"softmax_scale": scale, "causal": is_causal, "diagonal_offset": 0}
    return keywords | ({"dropout_p": dropout_p, "dropout_seed": seed} if dropout_p > 0.0 else {})


def _shrunk(bias: torch.Tensor) -> torch.Tensor:
    """Returns a mask whose expanded axes have length 1, so that kernels load repeated values once."""
    for axis, (length, stride) in enumerate(zip(bias.shape, bias.stride(), strict=True)):
        if length > 1 and stride == 0:
            bias = bias.narrow(axis, 0, 1)
    return bias


def _padded(lse: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor:
    """Returns lse with its rows padded to a multiple of `_STEP_OF_LSE`; without rows if it was not computed."""
    batch, heads, rows, _ = query.shape
    if lse is not None and rows % _STEP_OF_LSE == 0:
        return lse
    whole = -(-rows // _STEP_OF_LSE) * _STEP_OF_LSE if lse is not None else 0
    dtype = torch.float32 if lse is None else lse.dtype
    padded = torch.full((batch, heads, whole), torch.inf, dtype=dtype, device=query.device)
    if lse is not None:
        padded[..., :rows] = lse
    return padded


def _aligned(dbias: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a mask with rows that begin at multiples of `_STEP_OF_BIAS` elements."""
    keys = dbias.shape[-1]
    if keys % _STEP_OF_BIAS == 0:
        return dbias
    whole = -(-keys // _STEP_OF_BIAS) * _STEP_OF_BIAS
    return dbias.new_empty((*dbias.shape[:-1], whole))[..., :keys].copy_(dbias)
