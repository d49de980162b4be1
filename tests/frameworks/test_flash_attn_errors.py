"""Errors of the flash-attn interfaces: they have the caller's argument names, and the axes of shapes."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from refusals import refused

from cuflash import ProblemError
from cuflash.frameworks.flash_attn import v2 as fa2
from cuflash.frameworks.flash_attn import v3 as fa3
from cuflash.frameworks.flash_attn import v4 as fa4


def int32(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


Q, CACHE, PAGES = torch.zeros(2, 1, 4, 16), torch.zeros(2, 24, 2, 16), torch.zeros(9, 8, 2, 16)
NEW = torch.zeros(2, 1, 2, 16)
TABLE, BAD_TABLE, BOUNDS = int32([0, 1, 2], [3, 4, 5]), int32([0, 1, 2], [10, 4, 5]), int32(0, 1, 2)
OVER_CACHE, OVER_PAGES = {"q": Q, "k_cache": CACHE, "v_cache": CACHE}, {"q": Q, "k_cache": PAGES, "v_cache": PAGES}
NEW_KEYS, TWO_CACHES = {"k": NEW, "v": NEW}, OVER_PAGES | {"v_cache": PAGES.clone()}
NARROW = NEW[..., :8]
ROWS = {"page_table": TABLE, "cache_seqlens": int32(3, 9)}
PACKED = {"q": Q[:, 0], "k": PAGES, "v": PAGES, "cu_seqlens_q": BOUNDS, "max_seqlen_q": 1, "max_seqlen_k": 40}
PRIVATE = {"q": Q, "k": CACHE, "v": CACHE}
OPTIONS_2 = {"dropout_p": 0.0, "softmax_scale": 0.5, "causal": False}
GRADIENTS = {"dout": Q, "out": Q, "softmax_lse": torch.zeros(2, 4, 1)}
LONG = {"cache_seqlens": int32(3, 99)}
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "2 lengths": (fa2.flash_attn_with_kvcache, OVER_CACHE | LONG, "cache_seqlens[1] is 99, but sequence 1 has 24 rows"),
    "3 lengths": (fa3.flash_attn_with_kvcache, OVER_CACHE | LONG, "cache_seqlens[1] is 99, but sequence 1 has 24 rows"),
    "2 batch": (fa2.flash_attn_with_kvcache, OVER_CACHE | {"cache_seqlens": int32(3, 9, 9)},
                "q is for 2 sequences, but cache_seqlens for 3"),
    "2 table": (fa2.flash_attn_with_kvcache, OVER_PAGES | {"block_table": BAD_TABLE, "cache_seqlens": int32(3, 9)},
                "block_table[1, 0] is 10, but k_cache has 9 pages, and keys 0 to 7 of sequence 1 lie there; give one "
                "of these, or cache_seqlens that leaves"),
    "2 rank": (fa2.flash_attn_with_kvcache, OVER_PAGES | {"block_table": TABLE[0], "cache_seqlens": int32(3, 9)},
               "block_table has shape (3,); give (batch, max_pages)"),
    "2 dims": (fa2.flash_attn_with_kvcache, OVER_CACHE | {"k_cache": CACHE[..., :8]}, "k_cache has head_dim 8, but q"),
    "2 new": (fa2.flash_attn_with_kvcache, OVER_CACHE | {"k": NARROW, "v": NEW, "cache_seqlens": int32(3, 4)},
              "k has shape (2, 1, 2, 8); this problem needs (2, 1, 2, 16): (batch,"),
    "2 new table": (fa2.flash_attn_with_kvcache, TWO_CACHES | NEW_KEYS | {
        "block_table": BAD_TABLE, "cache_seqlens": int32(3, 4)}, "block_table[1, 0] is 10, but k_cache has 9 pages"),
    "2 bounds of pages": (fa2.flash_attn_varlen_func, PACKED | {
        "cu_seqlens_k": int32(0, 5, 40), "block_table": TABLE}, "cu_seqlens_k.diff()[1] is 35, but sequence 1 has 24"),
    "2 qkv": (fa2.flash_attn_varlen_qkvpacked_func, {
        "qkv": torch.zeros(5, 3, 2, 16), "cu_seqlens": int32(0, 3, 9), "max_seqlen": 9}, "cu_seqlens is [0, 3, 9], "),
    "2 qkv dtype": (fa2.flash_attn_varlen_qkvpacked_func, {
        "qkv": torch.zeros(5, 3, 2, 16), "cu_seqlens": BOUNDS.long(), "max_seqlen": 9}, "cu_seqlens has dtype torch"),
    "2 qkv rows": (fa2.flash_attn_varlen_qkvpacked_func, {
        "qkv": torch.zeros(5, 3, 2, 16), "cu_seqlens": int32(0, 3, 9), "max_seqlen": 9}, "but q of qkv has 5 rows"),
    "2 dense qkv": (fa2.flash_attn_qkvpacked_func, {"qkv": torch.zeros(2, 5, 3, 2, 16, dtype=torch.int64)},
                    "q of qkv has dtype int64"),
    "2 kv": (fa2.flash_attn_kvpacked_func, {"q": Q, "kv": torch.zeros(2, 5, 2, 2, 8)},
             "k of kv has head_dim 8, but q has 16; q and k of kv must share"),
    "2 kv window": (fa2.flash_attn_kvpacked_func, {"q": Q, "kv": torch.zeros(2, 5, 2, 2, 16), "window_size": "k"},
                    "window_size='k' is not a pair"),
    "2 kv rows": (fa2.flash_attn_varlen_kvpacked_func, {
        "q": Q[:, 0], "kv": torch.zeros(5, 2, 2, 16), "cu_seqlens_q": BOUNDS, "cu_seqlens_k": int32(0, 3, 9),
        "max_seqlen_q": 1, "max_seqlen_k": 9}, "cu_seqlens_k is [0, 3, 9], which ends with 9, but k of kv has 5 rows"),
    "3 qkv": (fa3.flash_attn_qkvpacked_func, {"qkv": torch.zeros(2, 5, 16, 16), "num_heads_q": 6},
              "q of qkv has 6 heads and k of qkv has 5"),
    "3 dense qkv": (fa3.flash_attn_qkvpacked_func, {"qkv": torch.zeros(2, 5, 3, 4, 16, dtype=torch.int32)},
                    "q of qkv has dtype int32"),
    "3 sinks": (fa3.flash_attn_func, PRIVATE | {"s_aux": torch.zeros(3)}, "s_aux has shape (3,); this problem needs "),
    "3 sinks of a cache": (fa3.flash_attn_with_kvcache, OVER_CACHE | {"s_aux": torch.zeros(3)}, "s_aux has shape (3,)"),
    "4 sinks": (fa4.flash_attn_func, PRIVATE | {"learnable_sink": torch.zeros(3)}, "learnable_sink has shape (3,); "),
    "4 bounds of pages": (fa4.flash_attn_varlen_func, PACKED | {
        "cu_seqlens_k": int32(0, 5, 40), "page_table": TABLE}, "cu_seqlens_k.diff()[1] is 35, but sequence 1 has 24"),
    "row": (fa3.flash_attn_with_kvcache, OVER_PAGES | ROWS | {"cache_batch_idx": int32(0, 2)},
            "cache_batch_idx[1] is 2, but page_table has 2 rows; give one of these"),
    "row of new keys": (fa3.flash_attn_with_kvcache, TWO_CACHES | NEW_KEYS | ROWS | {"cache_batch_idx": int32(-1, 1)},
                        "cache_batch_idx[0] is -1, but page_table has 2 rows; give one of these"),
    "no page": (fa3.flash_attn_with_kvcache, OVER_PAGES | ROWS | {
        "page_table": TABLE - 1, "cache_batch_idx": int32(1, 0)}, "page_table[1, 0] is -1, but k_cache has 9 pages"),
    "private row": (fa3._flash_attn_forward, {"q": Q, "k": PAGES, "v": PAGES, "page_table": TABLE, "seqused_k": int32(
        3, 9), "kv_batch_idx": int32(0, 2)}, "kv_batch_idx[1] is 2, but page_table has 2 rows; give one of these"),
    "private row of a cache": (fa3._flash_attn_forward, PRIVATE | {"seqused_k": int32(3, 9), "kv_batch_idx": int32(
        0, 2)}, "kv_batch_idx[1] is 2, but k has 2 rows"),
    "private new": (fa3._flash_attn_forward, PRIVATE | {"k_new": NARROW, "v_new": NEW, "seqused_k": int32(3, 4)},
                    "k_new has shape (2, 1, 2, 8); this problem needs (2, 1, 2, 16): (batch,"),
    "private 2": (fa2._flash_attn_varlen_forward, PACKED | OPTIONS_2 | {
        "cu_seqlens_k": None, "block_table": BAD_TABLE, "seqused_k": int32(3, 9)}, "block_table[1, 0] is 10, but k "),
    "gradients 2": (fa2._flash_attn_backward, PRIVATE | GRADIENTS | OPTIONS_2 | dict.fromkeys(
        ("dq", "dk", "dv", "alibi_slopes")) | {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0,
        "deterministic": False, "softmax_lse": torch.zeros(2, 3, 1)}, "softmax_lse has shape (2, 3, 1); this "),
    "gradients 3": (fa3._flash_attn_backward, PRIVATE | GRADIENTS | {"sequed_k": int32(3, 99)}, "sequed_k[1] is 99"),
    "gradients 3 dtype": (fa3._flash_attn_backward, PRIVATE | GRADIENTS | {"sequed_k": int32(3, 9).long()},
                          "sequed_k has dtype torch.int64"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_errors_have_the_names_of_the_caller(name: str) -> None:
    function, arguments, text = CASES[name]
    with refused(ProblemError, text):
        function(**arguments)


AXES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], str]] = {
    "alibi_slopes": (fa2.flash_attn_func, (Q, CACHE, CACHE), {"alibi_slopes": torch.zeros(3)},
                     "in shape (4,) or (2, 4): (heads_q,) or (batch, heads_q)"),
    "out_": (fa3._flash_attn_forward, (Q, CACHE, CACHE), {"out_": Q[0]},
             "give torch.float32 on cpu in shape (2, 1, 4, 16): (batch, seqlen, heads, head_dim), or None"),
    "packed out_": (fa3._flash_attn_forward, (Q[:, 0], CACHE, CACHE), {"out_": Q, "cu_seqlens_q": BOUNDS},
                    "in shape (2, 4, 16): (total, heads, head_dim), or None"),
    "dk": (fa3._flash_attn_backward, (Q, Q, CACHE, CACHE, Q, torch.zeros(2, 4, 1)), {"dk": Q},
           "in shape (2, 24, 2, 16): (batch, seqlen, heads, head_dim), or None"),
    "out": (fa3.flash_attn_combine, (torch.zeros(3, 2, 1, 4, 16), torch.zeros(3, 2, 1, 4)), {"out": Q[0]},
            "in shape (2, 1, 4, 16): (batch, seqlen, heads, head_dim), or None"),
}  # fmt: skip


@pytest.mark.parametrize("name", AXES)
def test_shapes_in_errors_have_the_names_of_their_axes(name: str) -> None:
    function, arrays, keywords, text = AXES[name]
    with refused(
        ProblemError, f"{name.rpartition(' ')[2]} has shape {tuple(*[x.shape for x in keywords.values()][:1])}", text
    ):
        function(*arrays, **keywords)


def test_a_missing_row_of_a_sequence_without_keys_is_no_error() -> None:
    arguments = OVER_PAGES | ROWS | {"cache_seqlens": int32(0, 9), "cache_batch_idx": int32(-1, 1)}
    out = fa3.flash_attn_with_kvcache(**arguments)
    assert not out[0].any()
