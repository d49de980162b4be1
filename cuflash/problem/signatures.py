"""Keyword arguments of the public calls as types, for overloads whose results depend on one more argument.

The functions list all keywords; tests/problem/test_signatures.py compares them with these.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypedDict

from .options import Algorithm, Array, OutDtype, WindowSize


class SharedOptions(TypedDict, Generic[Array], total=False):
    """Keywords of `forward`, `backward` and the `attention` of the frameworks."""

    softmax_scale: float | None
    causal: bool
    window_size: WindowSize
    diagonal_offset: int | None
    softcap: float
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: Array | None
    seqused_k: Array | None
    page_table: Array | None
    cache_batch_idx: Array | None
    score_mod: Any
    mask_mod: Any
    block_mask: Any
    bias: Array | None
    sinks: Array | None
    dropout_p: float
    dropout_seed: Any


class ForwardOptions(SharedOptions[Any], total=False):
    """Keywords of `forward` except return_lse."""

    algorithm: Algorithm
    sm_margin: int
    out: Any
    out_dtype: OutDtype | None
    lse: Any
    accumulate: bool
    check: bool
    num_splits: int
    split_size: int | None


class BackwardOptions(SharedOptions[Any], total=False):
    """Keywords of `backward` except captured_grads and return_delta."""

    dlse: Any
    deterministic: bool
    sm_margin: int
    grads_out: Sequence[Any] | None
    accumulate: bool
    delta: Any
    check: bool


class AttentionOptions(SharedOptions[Array], total=False):
    """Keywords of the `attention` of a framework except return_lse."""

    deterministic: bool
    num_splits: int
    split_size: int | None


class CheckedOptions(AttentionOptions[Array], total=False):
    """Keywords of the `attention` of PyTorch except return_lse."""

    sm_margin: int
    check: bool


class AppendOptions(TypedDict, total=False):
    """Keywords of `append_kv` except q."""

    page_table: Any
    cache_batch_idx: Any
    cu_seqlens_k: Any
    cu_seqlens_q: Any
    q_same_position: bool
    rotary_cos: Any
    rotary_sin: Any
    rotary_interleaved: bool
    check: bool
