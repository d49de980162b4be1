"""The private functions of FlashAttention-3 that Megatron, TransformerEngine and ring attention call.

`cuflash.frameworks.flash_attn_3_interface` has them. The forward is differentiable unless it writes to a cache. The
backward writes into dq, dk and dv, which may be None or views of any strides. Results besides out and lse belong to
flash-attn's kernels, and are empty.

Source: hopper/flash_attn_interface.py of FlashAttention's main branch. Older versions had one pair `window_size` in
place of two numbers; Python refuses calls with it.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import REFUSALS, ProblemError
from ...problem.foreign import renamed
from ..torch import check_tensor
from ..torch.varlen import check_integers
from .arguments import (
    FROM_BOUNDS,
    attend,
    check_out,
    lengths_of,
    refuse_leftpad,
    refuse_of_version_3,
    row_error,
    rows_of_table,
)
from .kvcache import New, over_cache, refuse_rotary_seqlens
from .mods import later_mod_kwargs
from .v2_private import NAMES, Results, write_gradients

# Argument names in errors, with the names here: of calls that write new keys, of other forwards, and of backwards.
_NAMES = {"cache_batch_idx": "kv_batch_idx"}
_CACHE_NAMES = _NAMES | {"k_cache": "k", "v_cache": "v", "k": "k_new", "v": "v_new", "cache_seqlens": "seqused_k"}
_BACKWARD_NAMES = NAMES | {"seqused_q": "sequed_q", "seqused_k": "sequed_k", "causal": "is_causal"}


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    out_: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    kv_batch_idx: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    seqlens_rotary: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Results:
    """Computes attention of dense, packed or cached sequences: all public functions of FlashAttention-3 call it.

    With k_new and v_new, k and v are caches that hold `seqused_k` keys, as in `flash_attn_with_kvcache`. Beside a
    `page_table`, `cu_seqlens_k` gives lengths alone, `seqused_k` takes precedence, and `kv_batch_idx[b]` is sequence
    b's row of the table.

    Returns (out, lse, out_accum, lse_accum). lse is float32, (batch, heads_q, seqlen_q), or (heads_q, total_q) for
    packed q; the last two are empty. out is written into `out_`, if it is given.

    Raises as the public functions do; ProblemError for an `out_` of another shape, dtype or device.
    """
    refuse_of_version_3(softmax_scale, pack_gqa, qv, q_descale, k_descale, v_descale)
    refuse_rotary_seqlens("seqlens_rotary", seqlens_rotary, seqused_k)
    refuse_leftpad("leftpad_k", leftpad_k)
    check_tensor("q", q)
    check_tensor("v", v)
    window = window_size_left, window_size_right
    check_out("out_", out_, q, v)
    table, rows = rows_of_table(page_table, "kv_batch_idx", kv_batch_idx)
    keywords: dict[str, Any] = {"cache_batch_idx": rows, "num_splits": num_splits, "sm_margin": sm_margin}
    keywords["mod_kwargs"] = later_mod_kwargs("s_aux", None, q, attention_chunk)
    is_appending = any(x is not None for x in (k_new, v_new, rotary_cos, rotary_sin))
    names = _CACHE_NAMES if is_appending else _NAMES | FROM_BOUNDS if seqused_k is None else _NAMES
    try:
        if is_appending:
            if cu_seqlens_k is not None:
                raise ProblemError("cu_seqlens_k was given beside new keys; give a cache, with seqused_k for lengths")
            check_integers("seqused_q", seqused_q)
            keywords |= {"cu_seqlens_q": cu_seqlens_q, "seqused_q": seqused_q}
            keywords["max_seqlen_q"] = None if cu_seqlens_q is None else max_seqlen_q
            new = New(k_new, v_new, rotary_cos, rotary_sin, rotary_interleaved, cu_seqlens_k_new)
            result = over_cache(
                3, q, k, v, new, seqused_k, None, table, softmax_scale, causal, window, softcap, True, **keywords
            )
        else:
            check_integers("cache_batch_idx", rows)
            keywords |= lengths_of(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, table, max_seqlen_q, max_seqlen_k)
            result = attend(q, k, v, softmax_scale, causal, window, softcap, False, True, **keywords)
    except REFUSALS as error:
        raise renamed(row_error(error, "kv_batch_idx", page_table, kv_batch_idx), names) from error.__cause__
    out, lse = result
    out = out if out_ is None else out_.copy_(out)
    return out, lse, q.new_empty(0), q.new_empty(0, dtype=torch.float32)


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    sequed_q: torch.Tensor | None = None,
    sequed_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> torch.Tensor:
    """Writes the gradients of `_flash_attn_forward`'s out into dq, dk and dv; rows of no sequence become 0.

    `sequed_q` and `sequed_k` (flash-attn's spelling) are the forward's seqused_q and seqused_k. Returns softmax_d,
    which is empty. Raises ProblemError where dq, dk or dv differs from q, k or v in shape or dtype; and as
    `cuflash.backward` does.
    """
    refuse_of_version_3(softmax_scale, None, None, None, None, None)
    try:
        sequences = lengths_of(cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, None, max_seqlen_q, max_seqlen_k)
    except ProblemError as error:
        raise renamed(error, _BACKWARD_NAMES) from error.__cause__
    window = window_size_left, window_size_right
    inputs, targets = (dout, q, k, v, out, softmax_lse), (dq, dk, dv)
    options = softmax_scale, is_causal, window, softcap, deterministic
    return write_gradients(inputs, targets, *options, names=_BACKWARD_NAMES, sm_margin=sm_margin, **sequences)
