"""Attention for Hugging Face transformers, by `attn_implementation="cuflash"`.

    from cuflash.frameworks.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cuflash")

Causal attention and causal sliding windows run on cuflash: in training, in prefill (also where a prompt continues a
cache) and token by token, with grouped heads and with softcap. So do several sequences in one row, told by position_ids
that start again or by `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`, as padding-free collators of
transformers and TRL give them, and batches with padding before or behind their tokens, also of encoders. No mask tensor
is made for those; where a token is padding, a causal layer's out is 0.

transformers' own "sdpa" function computes calls that need a mask tensor: padding between tokens, static caches,
attention in chunks, parts that see what follows, masks of the caller, and whole models under `torch.compile`, which
always get one. CUFLASH_LOG=1 says so once for each model. What neither computes, or might compute wrongly, is refused:
softcap with a mask tensor, a sliding window that the layer does not pass on, dropout, attention weights, sinks, biases,
sparse indices, paged caches. transformers 4 makes a mask tensor even if it is given neither `attention_mask` nor a
cache: pass a mask of ones there.

Sources: integrations/sdpa_attention.py and masking_utils.py of transformers 5.23 and of 4.53, which is the first
version in which masks can be registered.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

import torch

try:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface, PreTrainedModel
    from transformers.utils import generic
except ImportError as error:
    raise ImportError(
        "cuflash.frameworks.transformers needs transformers 4.53 or later, the first that asks an attention function "
        "which masks it needs: pip install 'transformers>=4.53'"
    ) from error

from ..errors import ProblemError, UnsupportedError
from ..log import logger
from .torch import attention
from .transformers_masks import (
    Pattern,
    Places,
    SequenceMask,
    also_packed,
    is_traced,
    places_of_packed,
    places_of_padded,
    places_of_positions,
)

__all__ = ["cuflash_attention_forward", "cuflash_mask", "register"]

_NAME = "cuflash"
_EAGER = 'load the model with attn_implementation="eager"'
_SDPA = 'load the model with attn_implementation="sdpa"'
_NOT_GIVEN: Any = object()
# Arguments by which models change the result, besides q, k, v and the mask.
_REFUSED = ("s_aux", "sinks", "position_bias", "head_mask", "indices", "block_indices", "cache")
# Models whose layers add to the mask that they are given; for them no mask means that nothing is hidden.
_ADD_TO_MASKS = ("doge",)
# Some models test for the flash-attn package in this way, and the name "cuflash" would pass the test.
_TAKES_FOR_FLASH_ATTN = re.compile(r"""["']flash["'] in [\w.]*_attn_implementation""")


def register() -> None:
    """Makes `attn_implementation="cuflash"` known to transformers, for all models; a second call changes nothing."""
    AttentionInterface.register(_NAME, cuflash_attention_forward)
    AttentionMaskInterface.register(_NAME, cuflash_mask)
    _tell_from_flash_attn()
    _refuse_attention_of_models_own()


def cuflash_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = _NOT_GIVEN,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes the attention of a layer; transformers calls it.

    query (batch, heads_q, seqlen_q, head_dim), key (batch, heads_kv, seqlen_k, head_dim), value (batch, heads_kv,
    seqlen_k, head_dim_v), any strides. Without a mask, the last query of a causal layer sees the last key, and at most
    `sliding_window` keys in all. Rows may hold several sequences, each of which sees itself alone, told by
    `cu_seq_lens_q` and `cu_seq_lens_k`, or by position_ids of a single row that start again. With a mask tensor that
    `cuflash_mask` did not make, transformers' sdpa function computes the call.

    Returns (out, None); out is (batch, seqlen_q, heads_q, head_dim_v) and contiguous. Raises UnsupportedError for what
    the module's docstring lists as refused; other errors are those of `cuflash.forward`.
    """
    _refuse(dropout, kwargs)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    sizes = query.shape[0], query.shape[2], key.shape[2]
    if isinstance(attention_mask, SequenceMask):
        if (attention_mask.shape[0], *attention_mask.shape[2:]) == sizes:
            return _of_places(query, key, value, attention_mask.places, scaling, softcap), None
        attention_mask = attention_mask.whole()
    if attention_mask is not None:
        if softcap:
            raise UnsupportedError(
                f"softcap={softcap} with a mask tensor (padding between tokens, a static cache, a mask of yours): "
                "cuflash takes no mask tensors, and sdpa no softcap; give batches with padding on one side and a "
                f"dynamic cache, or {_EAGER}"
            )
        if not is_traced():
            _tell_of_sdpa(type(module).__name__, str(getattr(getattr(module, "config", None), "model_type", "")))
        if kwargs.get("cu_seq_lens_q") is not None:
            attention_mask = also_packed(attention_mask, *_bounds(kwargs))
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return out, None
    if kwargs.get("cu_seq_lens_q") is not None:
        told = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), _bounds(kwargs), strict=True))
        told |= {f"max_seqlen_{side}": _in_host_memory(kwargs.get(f"max_length_{side}")) for side in "qk"}
        longest = told["max_seqlen_k"] or key.shape[2]
        window = _keys_before(module, 1, longest, causal, sliding_window)
        places = Places(told, causal, None if window < 0 else window + 1)
        return _of_places(query, key, value, places, scaling, softcap), None
    window = _keys_before(module, query.shape[2], key.shape[2], causal, sliding_window)
    found = places_of_positions(kwargs.get("position_ids"), *sizes)
    if found is not None:
        places = found._replace(causal=causal, window=None if window < 0 else window + 1)
        return _of_places(query, key, value, places, scaling, softcap), None
    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        softmax_scale=scaling,
        causal=causal,
        window_size=(window, -1),
        softcap=softcap or 0.0,
    )
    return out.contiguous(), None


def _of_places(query: Any, key: Any, value: Any, places: Places, scaling: Any, softcap: Any) -> torch.Tensor:
    """The call of a layer whose rows hold sequences of several lengths."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = attention(
        q.flatten(0, 1) if "cu_seqlens_q" in places.told else q,
        k.flatten(0, 1),
        v.flatten(0, 1),
        softmax_scale=scaling,
        causal=places.causal,
        window_size=(-1 if places.window is None else places.window - 1, -1),
        softcap=softcap or 0.0,
        **places.told,
    )
    return out.contiguous().view(*q.shape[:3], -1)


def _bounds(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where sequences begin, of queries and of keys."""
    q, k = given["cu_seq_lens_q"], given.get("cu_seq_lens_k")
    if k is None:
        raise ProblemError("cu_seq_lens_q was given without cu_seq_lens_k; give both (the same for self-attention)")
    return q.to(torch.int32), k.to(torch.int32)


def _in_host_memory(length: Any) -> int | None:
    """A bound on lengths that need not be waited for."""
    if isinstance(length, torch.Tensor):
        return None if length.is_cuda or is_traced() else int(length)
    return None if length is None else int(length)


@functools.cache
def _tell_of_sdpa(layer: str, model: str) -> None:
    logger.debug("%s of %s has a mask tensor, with which transformers' sdpa computes it, and not cuflash", layer, model)


def cuflash_mask(
    *,
    kv_length: int,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of a forward pass, which transformers asks for; None if `cuflash_attention_forward` needs none.

    No mask is needed if only causality and the model's sliding window hide keys, and the last query stands at the last
    key. What packed rows and padding hide besides is told by a mask that is made only if the model looks into it.
    Otherwise this is the boolean mask of transformers' sdpa, (batch, 1, seqlen_q, seqlen_k).
    """
    end = kv_offset + kv_length
    own_masks = getattr(config, "model_type", None) in _ADD_TO_MASKS
    ends, whole = _ends_at(end, kwargs), _is_whole(attention_mask, kv_offset, end)
    if allow_is_causal_skip and not own_masks and ends and whole and _is_window(config, end, local_size):
        return None
    make = functools.partial(
        sdpa_mask,
        kv_length=kv_length,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        config=config,
        **kwargs,
    )
    seqlen_q = kwargs["q_length"] if "q_length" in kwargs else len(kwargs["cache_position"])
    places = None
    if not own_masks and not is_traced():
        padding = None if whole else attention_mask
        places = _places(kwargs.get("mask_function"), padding, seqlen_q, kv_offset, kv_length, ends)
    if places is not None:
        shape = kwargs["batch_size"], 1, seqlen_q, kv_length
        return SequenceMask.of(places, shape, places.told["cu_seqlens_k"].device, make)
    mask: torch.Tensor | None = make()
    return mask


def _places(
    mask_function: Any, padding: torch.Tensor | None, seqlen_q: int, kv_offset: int, seqlen_k: int, ends: bool
) -> Places | None:
    """Where sequences lie if a mask says just that; None if it says less, or anything else."""
    pattern = None if mask_function is None else Pattern.of(mask_function)
    if pattern is None or (pattern.causal and not ends):
        return None
    if pattern.packed is not None:
        is_plain = padding is None and pattern.packed.shape[1] == seqlen_q == seqlen_k
        return places_of_packed(pattern.packed, pattern) if is_plain else None
    end = kv_offset + seqlen_k
    if padding is None or padding.shape[1] < end:
        return None
    return places_of_padded(padding[:, kv_offset:end].bool(), seqlen_q, pattern)


def _is_window(config: Any, end: int, local_size: int | None) -> bool:
    """Whether a local mask hides nothing, or is the sliding window that layers pass on, and not a mask of chunks."""
    if local_size is None or end <= local_size:
        return True
    chunk = getattr(config, "attention_chunk_size", None)
    return local_size == getattr(config, "sliding_window", None) and local_size != chunk


def _ends_at(end: int, sizes: dict[str, Any]) -> bool:
    """Whether the queries stand at consecutive positions, the last of them at the last key."""
    if "cache_position" in sizes:  # transformers 4
        position = sizes["cache_position"]
        wanted = torch.arange(end - len(position), end, device=position.device)
        return not is_traced() and torch.equal(position, wanted)
    # why: with a static cache the offset is a tensor, and the keys behind it are not written yet.
    offset = sizes.get("q_offset", 0)
    return not isinstance(offset, torch.Tensor) and bool(offset + sizes["q_length"] == end)


def _is_whole(padding: torch.Tensor | None, begin: int, end: int) -> bool:
    """Whether none of the keys `begin … end - 1` is padding."""
    if padding is None:
        return True
    return padding.shape[1] >= end and not is_traced() and bool(padding[:, begin:end].all())


def _keys_before(module: torch.nn.Module, seqlen_q: int, seqlen_k: int, causal: bool, sliding_window: Any) -> int:
    """How many keys before its own position a query sees; -1 means all."""
    if causal and 1 < seqlen_q > seqlen_k:
        raise UnsupportedError(
            f"{seqlen_q} causal queries of {seqlen_k} keys without a mask: no decoder has them, so which keys they see "
            f"is not known; pass attention_mask or is_causal=False, or {_SDPA}"
        )
    given = sliding_window is not _NOT_GIVEN
    window = sliding_window if given else getattr(getattr(module, "config", None), "sliding_window", None)
    if window is None or seqlen_k <= window:
        return -1
    if not given:
        raise UnsupportedError(
            f"{type(module).__name__} does not say whether this layer uses the model's sliding window of {window}, "
            f"which {seqlen_k} keys exceed; {_SDPA}"
        )
    if not causal:
        raise UnsupportedError(
            f"sliding_window={window} of {seqlen_k} keys without causality and without a mask: models differ in what "
            f"they mean by it; {_SDPA}"
        )
    if window < 1:
        raise ProblemError(f"sliding_window={window}; give a count of keys, the query's own among them, or None")
    return int(window) - 1


def _refuse(dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise UnsupportedError(
            f"dropout={dropout}: cuflash has no dropout; train with config.attention_dropout = 0.0, or {_SDPA}"
        )
    if others.get("output_attentions"):
        raise UnsupportedError(f"output_attentions=True: cuflash never holds the attention weights; {_EAGER}")
    for name in _REFUSED:
        if others.get(name) is not None:
            raise UnsupportedError(f"{name}: cuflash has no such part of attention; {_EAGER}")


@functools.cache
def _tell_from_flash_attn() -> None:
    """Stops transformers 5 from taking "cuflash" for the flash-attn package.

    why: it takes any name with "flash" in it for that package, fails to load it, and would give layers cu_seq_lens in
    place of masks. One function decides this. Modules import it by name, so it is replaced in every loaded module.
    """
    original: Any = getattr(generic, "is_flash_attention_requested", None)
    if original is None:
        return

    @functools.wraps(original)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name != _NAME and original(config, requested_attention_implementation, *args, **kwargs)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("is_flash_attention_requested") is original:
            module.is_flash_attention_requested = is_flash_attention_requested  # type: ignore[attr-defined]


def _refuse_attention_of_models_own() -> None:
    """Makes transformers refuse "cuflash" for models that have attention code of their own.

    why: transformers does not ask a model whether it supports a registered name. Such a model would not call our
    function, would use our mask in its own code (where None shows what follows), or would find no class of the name.
    """
    # The method's name in transformers 4.53, and its name in later versions.
    for name in ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation"):
        original: Any = getattr(PreTrainedModel, name, None)
        if original is None or hasattr(original, "of_cuflash"):
            continue

        @functools.wraps(original)
        def judged(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            # why any argument: models pass the name by position or by keyword, and the keyword differs between them.
            if _NAME in (*args, *kwargs.values()):
                _judge(type(self))
            return original(self, *args, **kwargs)

        judged.of_cuflash = True  # type: ignore[attr-defined]
        setattr(PreTrainedModel, name, judged)


def _judge(model: type) -> None:
    """Raises UnsupportedError for a model that would not call our function, or would lose its masks."""
    code = vars(sys.modules[model.__module__])
    supports_backend = getattr(model, "_supports_attention_backend", False)
    has_classes = any(name.endswith("ATTENTION_CLASSES") for name in code) and "ALL_ATTENTION_FUNCTIONS" not in code
    if has_classes or not (supports_backend or getattr(model, "_supports_sdpa", False)):
        raise UnsupportedError(f"{model.__name__} has attention of its own, which cuflash is not; {_EAGER}")
    try:
        source = inspect.getsource(sys.modules[model.__module__])
    except (OSError, TypeError):  # the model was typed in and has no file
        return
    if _TAKES_FOR_FLASH_ATTN.search(source):
        raise UnsupportedError(
            f'{model.__name__} takes every name with "flash" in it for the flash-attn package, and would drop its '
            f"padding mask; {_SDPA}, or take another version of transformers"
        )
