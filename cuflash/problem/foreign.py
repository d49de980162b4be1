"""Names of other attention libraries, and what stands for each here: keywords of calls, and functions."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

_SCALE = "softmax_scale= (default 1/sqrt(head_dim))"
_MASK = "mask_mod= (a function of b, h, q_idx, k_idx) for masks, or bias= for an array, bool (True is seen) or added"
_PADDING = "seqused_k= (how many keys of each sequence are used), or cu_seqlens_q= and cu_seqlens_k= for packed rows"
_WINDOW = "window_size= (left, right), the keys beside the diagonal"
_SOFTCAP = "softcap= (0.0 for none)"
_LSE = "return_lse=True for (out, lse)"
_PAGES = "page_table= (batch, max_pages) in int32, with seqused_k="
_SINKS = "sinks= (heads_q,)"
_BIAS = "bias= (broadcastable to batch, heads_q, seqlen_q, seqlen_k)"
_SEED = "dropout_seed= (an integer or an array of one)"
_CU_SEQLENS_Q = "cu_seqlens_q= (batch + 1,)"
_BOTH = "{0}_q= and {0}_k="
# Keywords of PyTorch, flash-attn, xformers, transformers, JAX, Triton, FlashInfer, vLLM, cuDNN and SageAttention.
KEYWORDS = {
    "is_causal": "causal= (True or False)",
    "causal_mask": "causal= (True or False)",
    **dict.fromkeys(("scale", "sm_scale", "softmax_factor", "scaling", "qk_scale", "attn_scale"), _SCALE),
    **dict.fromkeys(("attn_mask", "attention_mask", "mask", "custom_mask"), _MASK),
    **dict.fromkeys(("attn_bias", "ab", "position_bias"), _BIAS),
    **dict.fromkeys(("key_padding_mask", "padding_mask", "src_key_padding_mask"), f"{_PADDING}, or {_MASK}"),
    **dict.fromkeys(("dropout", "p", "attention_dropout", "p_dropout"), "dropout_p= (the share to drop)"),
    **dict.fromkeys(("seed", "philox_seed", "rng_state", "dropout_rng"), _SEED),
    **dict.fromkeys(("enable_gqa", "num_kv_heads", "n_rep"), "nothing: heads_q may be any multiple of heads_kv"),
    **dict.fromkeys(("sliding_window", "window", "local_window_size", "window_left", "window_size_left",
                     "window_size_right"), _WINDOW),
    **dict.fromkeys(("logits_soft_cap", "logits_softcap", "soft_cap", "attn_logit_softcapping", "logit_soft_cap",
                     "attn_softcap"), _SOFTCAP),
    **dict.fromkeys(("return_attn_probs", "return_softmax", "return_softmax_lse", "return_aux", "need_weights",
                     "output_attentions", "return_residual"), f"{_LSE}; the weights themselves are not kept"),
    **dict.fromkeys(("block_table", "block_tables", "page_indices"), _PAGES),
    **dict.fromkeys(("cache_seqlens", "kv_lens", "context_lens", "seqlens_k", "seq_lens", "key_value_seq_lengths",
                     "kv_seqlens"), "seqused_k= (batch,) in int32"),
    **dict.fromkeys(("query_seq_lengths", "q_seqlens", "seqlens_q"), "seqused_q= (batch,) in int32"),
    **dict.fromkeys(("cu_seqlens", "cu_seq_lens"), _BOTH.format("cu_seqlens")),
    **dict.fromkeys(("cu_seqlens_kv", "cu_seq_k", "cu_seqlen_k", "cu_seq_lens_k"), "cu_seqlens_k= (batch + 1,)"),
    **dict.fromkeys(("cu_seq_q", "cu_seqlen_q", "cu_seq_lens_q", "qo_indptr", "cu_q_lens"), _CU_SEQLENS_Q),
    **dict.fromkeys(("max_seqlen", "max_seq_len"), _BOTH.format("max_seqlen")),
    **dict.fromkeys(("max_seqlen_kv", "max_k", "max_length_k", "max_seq_len_k"), "max_seqlen_k="),
    **dict.fromkeys(("max_q", "max_length_q", "max_seq_len_q"), "max_seqlen_q="),
    **dict.fromkeys(("s_aux", "sink", "learnable_sink", "attention_sinks"), _SINKS),
    **dict.fromkeys(("alibi_slopes", "use_alibi"), "score_mod=cuflash.mods.alibi(heads)"),
    **dict.fromkeys(("segment_ids", "document_ids"), "mask_mod=cuflash.mods.segments(ids), or packed rows"),
    **dict.fromkeys(("layout", "tensor_layout", "qkv_layout", "input_layout"),
                    "nothing: arrays are (batch, seqlen, heads, head_dim), of any strides, so transpose as a view"),
    **dict.fromkeys(("kernel_options", "pack_gqa", "sm_margin", "scheduler_metadata", "backend", "implementation"),
                    "nothing: cuflash.plan shows which kernel runs"),
    "check": "check=True to cuflash.forward, backward, lse, append_kv or to attention of PyTorch",
    "softmax_lse": "lse=",
    "do": "dout=",
}  # fmt: skip
_TORCH, _FLASH_ATTN = "cuflash.frameworks.torch", "cuflash.frameworks.flash_attn"
# Functions of others, and of our packages that importing cuflash leaves out.
FUNCTIONS = {
    **dict.fromkeys(("attention", "attn", "flash_attention", "flash_attn", "mha", "sdp_attention"),
                    "cuflash.forward; with gradients attention of cuflash.frameworks.torch or .jax"),
    **dict.fromkeys(("scaled_dot_product_attention", "sdpa"),
                    "scaled_dot_product_attention of cuflash.frameworks.sdpa, or cuflash.forward"),
    **dict.fromkeys(("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
                     "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
                     "flash_attn_varlen_kvpacked_func"),
                    f"the function of that name in {_FLASH_ATTN}, or cuflash.forward"),
    "flex_attention": f"flex_attention of {_TORCH}, or cuflash.forward with score_mod= and mask_mod=",
    "varlen_attn": f"attention of {_TORCH}, or cuflash.forward, with cu_seqlens_q= and cu_seqlens_k=",
    "dot_product_attention": "dot_product_attention of cuflash.frameworks.jax, or cuflash.forward",
    "memory_efficient_attention": f"cuflash.forward; with gradients attention of {_TORCH}",
    **dict.fromkeys(("merge_attn_states", "merge_state", "merge_attention", "flash_attn_combine"),
                    "cuflash.merge_states"),
    **dict.fromkeys(("reshape_and_cache", "reshape_and_cache_flash", "append_paged_kv_cache"), "cuflash.append_kv"),
    "logsumexp": "cuflash.lse",
    "gradients": "cuflash.backward",
    "alibi": "cuflash.mods.alibi",
    **{name: f"import cuflash.{name} first" for name in ("frameworks", "testing", "tools")},
}  # fmt: skip


def refuse_foreign(function: Callable[..., Any], foreign: Iterable[str]) -> TypeError:
    """Returns the error of keywords that a function does not take, which names those that stand for them."""
    parameters = inspect.signature(function).parameters.values()
    names = [x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    texts = []
    for keyword in foreign:
        if (answer := KEYWORDS.get(keyword)) is None:
            similar = difflib.get_close_matches(keyword, names, 1)
            answer = f"{similar[0]}=" if similar else f"some of {', '.join(names)}"
        texts.append(f"got an unexpected keyword argument {keyword!r}; give {answer}")
    return TypeError(f"{function.__name__}() {'. It '.join(texts)}")


def no_attribute(name: str, public: Iterable[str]) -> AttributeError:
    """Returns the error of a name that the package does not have. public: those that it has."""
    answer = FUNCTIONS.get(name) or next(iter(difflib.get_close_matches(name, public, 1)), None)
    hint = "" if answer is None else f"; use {answer}"
    return AttributeError(f"module 'cuflash' has no attribute {name!r}{hint}", name=name)
