"""Translates names of other attention libraries, keywords and functions, for the text of errors."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from ..errors import ProblemError, UnsupportedError

Call = TypeVar("Call", bound=Callable[..., Any])
Refusal = TypeVar("Refusal", bound=Exception)


class Argument(NamedTuple):
    """An argument under all of its names: `names` in functions of cuflash, `foreign` in other libraries.

    A name such as "cu_seqlens_q cu_seqlens_k" is two arguments that replace a foreign one together. unless: a
    parameter; this row does not hold for functions that have it.
    """

    names: tuple[str, ...]
    foreign: str
    note: str
    unless: str = ""


_MASKS = "attn_mask attention_mask atten_mask mask masks custom_mask key_padding_mask padding_mask src_key_padding_mask"
_LENGTHS = "actual_seq_lengths actual_seq_lens actual_seq_len"
_PADDING = "key_padding_mask padding_mask src_key_padding_mask"
# Keywords of PyTorch, flash-attn, xformers, transformers, JAX, Triton, FlashInfer, vLLM, cuDNN, SageAttention and CANN.
ARGUMENTS = (
    Argument(("q", "query"), "queries Q", "an array"),
    Argument(("k", "key"), "keys K", "an array"),
    Argument(("v", "value"), "values V", "an array"),
    Argument(("k",), "k_cache key_cache", "the cache, whole or in pages", unless="k_cache"),
    Argument(("v",), "v_cache value_cache", "the cache, whole or in pages", unless="v_cache"),
    Argument(("causal", "is_causal"), "causal_mask is_causal_mask isCausal is_casual", "True or False"),
    Argument(("softmax_scale", "scale", "sm_scale"), "softmax_factor scaling qk_scale attn_scale scale_value "
             "softmax_temp",              "default 1/sqrt(head_dim)"),
    Argument(("seqused_k", "key_value_seq_lengths", "kv_lens"), "cache_seqlens context_lens seqlens seqlens_k seq_lens "
             f"kv_seqlens actual_seq_lengths_kv actual_seq_lens_kv {_LENGTHS} {_PADDING}",
             "(batch,) in int32, how many keys of each sequence are used"),
    Argument(("cu_seqlens_q cu_seqlens_k",), f"cu_seqlens cu_seq_lens cu_seq seqlens {_PADDING}",
             "(batch + 1,) in int32, for packed rows"),
    Argument(("mask_mod",), f"{_MASKS} segment_ids document_ids", "a function of b, h, q_idx, k_idx, as of "
             "cuflash.mods"),
    Argument(("bias",), "attn_bias attention_bias ab position_bias", "floats that are added to the scores"),
    Argument(("bias",), _MASKS, "bools, True for keys that are seen, or floats that are added", unless="mask"),
    Argument(("mask",), _MASKS, "bools, True for keys that are seen"),
    Argument(("block_mask",), f"{_MASKS} segment_ids document_ids", "of create_block_mask", unless="mask_mod"),
    Argument(("block_mask",), "block_sparse_tensors", "of create_block_mask"),
    Argument(("dropout_p",), "dropout p attention_dropout p_dropout", "the fraction of weights to drop"),
    Argument(("dropout_seed",), "seed rng_seed philox_seed rng_state dropout_rng generator",
             "an integer or an array of one"),
    Argument(("window_size", "local_window_size", "sliding_window"), "window window_left window_size_left "
             "window_size_right", "the keys beside the diagonal"),
    Argument(("softcap", "soft_cap"), "logits_soft_cap logits_softcap attn_logit_softcapping logit_soft_cap "
             "attn_softcap", "a number"),
    Argument(("return_lse", "return_residual", "return_aux"), "return_attn_probs return_softmax return_softmax_lse "
             "need_weights output_attentions", "for lse beside out; no call returns the weights"),
    Argument(("page_table", "page_indices"), "block_table block_tables", "(batch, max_pages) in int32"),
    Argument(("seqused_q", "query_seq_lengths"), f"q_seqlens seqlens_q actual_seq_lens_q {_LENGTHS}",
             "(batch,) in int32, how many queries of each sequence are used"),
    Argument(("cu_seqlens_k",), "cu_seqlens_kv cu_seq_k cu_seqlen_k cu_seq_lens_k kv_indptr actual_seq_kvlen",
             "(batch + 1,) in int32"),
    Argument(("cu_seqlens_k",), "cu_seqlens_k_new", "(batch + 1,) in int32, of the new keys", unless="mask_mod"),
    Argument(("cu_seqlens_q", "cu_q_lens"), "cu_seq_q cu_seqlen_q cu_seq_lens_q qo_indptr actual_seq_qlen",
             "(batch + 1,) in int32"),
    Argument(("max_seqlen_q max_seqlen_k",), "max_seqlen max_seq_len", "bounds on the lengths"),
    Argument(("max_seqlen_k",), "max_seqlen_kv max_k max_length_k max_seq_len_k", "a bound on the lengths"),
    Argument(("max_seqlen_q",), "max_q max_length_q max_seq_len_q", "a bound on the lengths"),
    Argument(("sinks",), "s_aux sink learnable_sink attention_sinks", "(heads_q,)"),
    Argument(("score_mod",), "alibi_slopes use_alibi", "a function, such as cuflash.mods.alibi(heads)"),
    Argument(("lse",), "softmax_lse logsumexp", "(batch, heads_q, seqlen_q)"),
    Argument(("dout",), "do grad_out grad_output", "in the shape of out"),
    Argument(("grads_out",), "dq dk dv", "(dq, dk, dv), arrays to write to"),
    Argument(("cache_batch_idx",), "kv_batch_idx", "(batch,) in int32"),
    Argument(("rotary_cos",), "cos", "(positions, rotary_dim / 2)"),
    Argument(("rotary_sin",), "sin", "(positions, rotary_dim / 2)"),
    Argument(("rotary_interleaved",), "interleaved is_neox", "True for pairs of neighbours, the opposite "
             "of is_neox"),
    Argument(("k_cache",), "key_cache", "(batch, capacity, heads, head_dim), or pages"),
    Argument(("v_cache",), "value_cache", "(batch, capacity, heads, head_dim), or pages"),
    Argument(("algorithm",), "algo", "a name"),
    Argument(("diagonal_offset",), "offset", "an integer"),
    Argument(("num_splits",), "splits n_splits", "an integer"),
    Argument(("batch",), "B batch_size", "an integer"),
    Argument(("heads",), "H num_heads n_heads nheads", "an integer"),
    Argument(("seqlen_q",), "Q_LEN q_len", "an integer"),
    Argument(("seqlen_k",), "KV_LEN kv_len k_len", "an integer"),
    Argument(("like",), "device", "an array on that device"),
    Argument(("out",), "output out_ o", "an array to write to", unless="dout"),
    Argument(("out",), "output out_ o", "the result of cuflash.forward", unless="algorithm"),
    Argument(("outs",), "out_partial v_a v_b prefix_output suffix_output v", "the outs of all parts"),
    Argument(("lses",), "lse_partial s_a s_b prefix_lse suffix_lse s", "the lses of all parts"),
)  # fmt: skip
# Keywords without a replacement in the function that got them, and the reason.
NEEDLESS = {
    **dict.fromkeys(("enable_gqa", "num_kv_heads", "n_rep"), "heads_q may be any multiple of heads_kv"),
    **dict.fromkeys(("layout", "tensor_layout", "qkv_layout", "input_layout", "kv_layout"),
                    "help() of the function has the axes; arrays of any strides do, so transpose as a view"),
    **dict.fromkeys(("kernel_options", "pack_gqa", "scheduler_metadata", "backend", "implementation"),
                    "cuflash.plan shows which kernel runs"),
    **dict.fromkeys(("B", "batch", "batch_size", "H", "heads", "num_heads", "n_heads", "nheads", "head_num", "Q_LEN",
                     "q_len", "seqlen_q", "KV_LEN", "kv_len", "k_len", "seqlen_k"), "the shapes of the arrays have it"),
    **dict.fromkeys(("output_lse", "s_out"), "lse is returned in a new array"),
    "device": "results are on the device of the arrays",
    "BLOCK_SIZE": "tiles are 64 queries x 64 keys",
    "_compile": "functions are traced once, and become a part of a kernel",
}  # fmt: skip
_FIRST = "forward", "attention"  # functions that errors name first
_TORCH, _FLASH_ATTN = "cuflash.frameworks.torch", "cuflash.frameworks.flash_attn"
# Functions of other libraries, and packages of cuflash that `import cuflash` leaves out.
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
    "fwd": "cuflash.forward",
    **dict.fromkeys(("bwd", "gradients"), "cuflash.backward"),
    **dict.fromkeys(("block_mask", "create_mask"), "cuflash.create_block_mask"),
    "alibi": "cuflash.mods.alibi",
    **{name: f"import cuflash.{name} first" for name in ("frameworks", "testing", "tools")},
}  # fmt: skip
# Strings as repr() shows them; an apostrophe follows a letter.
_QUOTED = r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_functions: list[Callable[..., Any]] = []  # public functions of the imported packages


def answers_foreign(function: Call) -> Call:
    """Decorates a public function: its error for an unknown keyword names the parameter that replaces it.

    A function with `**foreign` calls `refuse_foreign` itself and gets no wrapper, which would cost each repeated call
    0.3 µs. Its signature then lacks `**foreign`. Its required parameters get the default None, which validation
    refuses: Python's error for a missing argument would come before the function's body, without the hint.
    """
    _functions.append(function)
    signature = inspect.signature(function)
    *parameters, last = signature.parameters.values()
    if last.kind is last.VAR_KEYWORD:
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        required = [x for x in parameters if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
        function.__defaults__ = *[None] * len(required), *(function.__defaults__ or ())
        return function

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except TypeError:
            if foreign := [name for name in keywords if name not in signature.parameters]:
                raise refuse_foreign(function, foreign) from None
            raise

    return checked  # type: ignore[return-value]


def refuse_foreign(function: Callable[..., Any], foreign: Iterable[str]) -> TypeError:
    """Returns the error for unknown keywords of a function, with the parameters that replace them."""
    texts = [f"got an unexpected keyword argument {keyword!r}; {_answer(function, keyword)}" for keyword in foreign]
    return TypeError(f"{function.__name__}() {'. It '.join(texts)}")


def _answer(function: Callable[..., Any], keyword: str) -> str:
    names = _names(function)
    if phrases := _phrases(keyword, names):
        return f"give {phrases}"
    if keyword in NEEDLESS:
        return f"leave it out: {NEEDLESS[keyword]}"
    home = _home(function)
    others = sorted(_functions, key=lambda x: (_home(x) != home, _home(x) != "cuflash", x.__name__ not in _FIRST))
    for other in others:
        phrases = f"{keyword}=" if keyword in _names(other) else _phrases(keyword, _names(other))
        if phrases:
            return f"{_home(other)}.{other.__name__} has {phrases}"
    typed = _similar(keyword, names)
    return f"give {typed}=" if typed else f"give some of {', '.join(names)}"


def _similar(name: str, names: Iterable[str]) -> str | None:
    """Returns the name of which another one is a misspelling, if any: "causal" for "casual"."""
    # At difflib's default of 0.6, names of other meaning match: "softmax_scale" for "softmax_lse_return".
    return next(iter(difflib.get_close_matches(name, names, 1, cutoff=0.8)), None)


def _names(function: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's parameters."""
    return list(inspect.signature(function).parameters)


def _home(function: Callable[..., Any]) -> str:
    """Returns the name of the package from which users import a function."""
    return "cuflash" if function.__module__.startswith("cuflash.ops.") else function.__module__


def _phrases(keyword: str, names: Iterable[str]) -> str:
    """Returns the parameters in `names` that replace a keyword, in words; "" if there are none."""
    phrases = []
    for argument in ARGUMENTS:
        if argument.unless not in names and keyword in (*argument.names, *argument.foreign.split()):
            note = argument.note if argument.note.startswith("(") else f"({argument.note})"
            present = [x.split() for x in argument.names if set(x.split()) <= set(names)]
            phrases += [f"{' and '.join(f'{x}=' for x in each)} {note}" for each in present]
    return "; or ".join(phrases)


def renamed(error: Refusal, names: Mapping[str, str]) -> Refusal:
    """Returns an error of a call with other names of arguments. names: maps cuflash's names to these.

    Parts of paths and quoted values stay unchanged, as do errors about a function of the caller, and those that such a
    function raises.
    """
    if type(error) not in (ProblemError, UnsupportedError) or "_mod" in str(error):
        return error
    pattern = rf"{_QUOTED}|(?<![\w./\\])[a-z_]+(?![\w/\\]|\.py)"
    text = re.sub(pattern, lambda match: names.get(match[0], match[0]), str(error))
    return type(error)(text).with_traceback(error.__traceback__)


def no_attribute(name: str, public: Iterable[str]) -> AttributeError:
    """Returns the error for a name that the package lacks. public: its names."""
    # Tools look for names such as __wrapped__: those and private ones are no misspellings.
    answer = None if name.startswith("_") else FUNCTIONS.get(name) or _similar(name, public)
    hint = "" if answer is None else f"; {answer}" if answer.startswith("import ") else f"; use {answer}"
    return AttributeError(f"module 'cuflash' has no attribute {name!r}{hint}", name=name)
