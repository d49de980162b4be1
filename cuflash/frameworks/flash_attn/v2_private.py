"""The private functions of flash-attn 2 that TransformerEngine, diffusers and ring-flash-attention call.

`cuflash.frameworks.flash_attn_interface` has them under these names and as `_wrapped_…`. Forwards return (out,
softmax_lse, S_dmask, rng_state) and are differentiable, unlike flash-attn's. Backwards write into dq, dk and dv, which
may be None or views of any strides, and return softmax_d, which is empty. Without dropout S_dmask is empty, and
rng_state, two int64 numbers, is unset. With dropout the first is the seed, which the backward needs. Rows of no
sequence are always 0, whatever `zero_tensors` says.

Source: flash_attn/flash_attn_interface.py of flash-attn 2.8.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...errors import REFUSALS
from ...ops.backward import backward
from ...problem.foreign import renamed
from ...problem.options import check_flag
from ..torch import check_tensor
from ..torch.ops import backward_by_op
from ..torch.tensors import becomes_an_op, disabled
from ..torch.varlen import check_integers, paged_or_packed
from .arguments import FROM_BOUNDS, NAMES_2, attend, bounds_to_host, cap_of, check_fits, refuse_leftpad, window_of
from .mods import attend_with_weights, v2_mod_kwargs

_mod_backward = disabled(backward, "cuflash runs gradients with ALiBi or dropout outside of compiled graphs")
NAMES = {"lse": "softmax_lse"}  # argument names in errors of `backward`, with the callers' names
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> Results:
    """Computes `flash_attn_func`, with its errors; lse is (batch, heads_q, seqlen_q) float32."""
    window = window_size_left, window_size_right
    mod_kwargs = v2_mod_kwargs(q, dropout_p, alibi_slopes)
    return _with_rest(q, k, v, return_softmax, mod_kwargs, (softmax_scale, causal, window, softcap))


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Results:
    """Computes `flash_attn_varlen_func`, with its errors; lse is (heads_q, total_q) float32.

    `seqused_k` (batch,): numbers of keys that count; beside a block table cu_seqlens_k may then be None. `num_splits`:
    thread blocks that share the keys of a query, 0 for an automatic choice. leftpad_k is an UnsupportedError.
    """
    refuse_leftpad("leftpad_k", leftpad_k)
    check_integers("cu_seqlens_q", cu_seqlens_q, required=True)
    window = window_size_left, window_size_right
    mod_kwargs = v2_mod_kwargs(q, dropout_p, alibi_slopes, cu_seqlens_q)
    sequences = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    sequences |= paged_or_packed(cu_seqlens_k, seqused_k, block_table) | {"num_splits": num_splits}
    names = NAMES_2 | FROM_BOUNDS if seqused_k is None else NAMES_2
    options = softmax_scale, causal, window, softcap
    return _with_rest(q, k, v, return_softmax, mod_kwargs, options, names, **sequences)


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes the gradients of `_flash_attn_forward`'s out into dq, dk and dv.

    softmax_lse may be a view (batch, seqlen_q, heads_q) of the forward's result, as flash-attn reads memory alone.
    Raises ProblemError where dq, dk or dv differs from q, k or v in shape or dtype, or shares memory with another
    argument. Raises as `cuflash.backward` does.
    """
    check_tensor("q", q)
    mod_kwargs = v2_mod_kwargs(q, dropout_p, alibi_slopes, None, rng_state, draws=False)
    if q.ndim == 4:
        softmax_lse = _heads_first(softmax_lse, q)
    window = window_size_left, window_size_right
    inputs, targets = (dout, q, k, v, out, softmax_lse), (dq, dk, dv)
    return write_gradients(inputs, targets, softmax_scale, causal, window, softcap, deterministic, mod_kwargs)


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """Writes the gradients of `_flash_attn_varlen_forward`'s out into dq, dk and dv; rows of no sequence become 0.

    Raises as `_flash_attn_backward` does.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for name, tensor in lengths.items():
        check_integers(name, tensor, required=True)
    mod_kwargs = v2_mod_kwargs(q, dropout_p, alibi_slopes, cu_seqlens_q, rng_state, draws=False)
    window = window_size_left, window_size_right
    inputs, targets = (dout, q, k, v, out, softmax_lse), (dq, dk, dv)
    varlen_kwargs = lengths | {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return write_gradients(
        inputs, targets, softmax_scale, causal, window, softcap, deterministic, mod_kwargs, **varlen_kwargs
    )


def _with_rest(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    return_softmax: bool,
    mod_kwargs: dict[str, Any],
    options: tuple[Any, Any, Any, Any],
    names: Mapping[str, str] = NAMES_2,
    **sequences: Any,
) -> Results:
    """Returns a forward's out and lse, the weights on request, and the random state, whose first number is the seed."""
    if check_flag("return_softmax", return_softmax):
        out, lse, weights = attend_with_weights(q, k, v, *options, False, True, mod_kwargs, names, **sequences)
    else:
        out, lse = attend(q, k, v, *options, False, True, mod_kwargs=mod_kwargs, names=names, **sequences)
        weights = q.new_empty(0)
    state = q.new_empty(2, dtype=torch.int64)
    if "dropout_seed" in mod_kwargs:
        state[:1] = mod_kwargs["dropout_seed"]
        state[1:] = 0
    return out, lse, weights, state


def _heads_first(lse: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Returns lse as (batch, heads, seqlen): diffusers transposes its last two axes before it passes it back."""
    check_tensor("softmax_lse", lse)
    batch, seqlen, heads, _ = q.shape
    is_turned = lse.shape == (batch, seqlen, heads) and (seqlen != heads or not lse.is_contiguous())
    return lse.transpose(1, 2) if is_turned else lse


def write_gradients(
    inputs: tuple[torch.Tensor, ...],
    targets: tuple[torch.Tensor | None, ...],
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    deterministic: bool,
    mod_kwargs: dict[str, Any] | None = None,
    names: Mapping[str, str] = NAMES,
    sm_margin: int = 0,
    **sequences: Any,
) -> torch.Tensor:
    """Writes the gradients of q, k and v into the targets that are not None. inputs: (dout, q, k, v, out, lse).

    mod_kwargs: the mod keywords of `backward`. names: argument names in errors of `backward`, with the caller's names.
    """
    for name, tensor in zip(("dout", "q", "k", "v", "out", "softmax_lse"), inputs, strict=True):
        check_tensor(name, tensor)
    dout, q, k, v, out, lse = inputs
    for name, target, like in zip(("dq", "dk", "dv"), targets, (q, k, v), strict=True):
        if target is not None:
            check_tensor(name, target)
            check_fits(name, target, like.shape, like.dtype, like.device)
    bounds_to_host(sequences)
    keywords = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_of(window_size),
        "diagonal_offset": None,
        "softcap": cap_of(softcap),
        "sm_margin": sm_margin,
        **sequences,
        **(mod_kwargs or {}),
    }
    deterministic = check_flag("deterministic", deterministic) or torch.are_deterministic_algorithms_enabled()
    try:
        with torch.no_grad():
            if mod_kwargs or not becomes_an_op():
                compute = _mod_backward if mod_kwargs else backward
                compute(*inputs, deterministic=deterministic, grads_out=targets, **keywords)
            else:
                gradients = backward_by_op(dout, q, k, v, out, lse, None, keywords, deterministic)
                for target, gradient in zip(targets, gradients, strict=True):
                    if target is not None:
                        target.copy_(gradient)
    except REFUSALS as error:
        raise renamed(error, names) from error.__cause__
    return q.new_empty(0, dtype=torch.float32)
