"""Attention for Hugging Face transformers, by `attn_implementation="cuflash"`.

    from cuflash.frameworks.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cuflash")

Causal attention and causal sliding windows run on cuflash: in training, in prefill (also after a cached prefix) and
token by token, with grouped heads, softcap, sinks, dropout and position biases.

Several sequences in one row run, too: by position_ids that start again, or by `cu_seq_lens_q`, `cu_seq_lens_k`,
`max_length_q` and `max_length_k`. Padding-free collators of transformers and TRL pass these. Batches may be padded
before or behind their tokens, also of encoders. Where a token is padding, a causal layer's out is 0.

Other masks run as well. A mask that transformers describes by a function becomes a part of the kernel, without a mask
tensor. Examples are padding between tokens, chunked attention, windows of all kinds, parts that see later
tokens, and static caches. Mask tensors of the caller, and of decoding with a static cache, are read in place.

Layers that are compiled with a mask tensor run on transformers' own "sdpa" function, as their graph would end at each
layer otherwise. Whole models under `torch.compile` always do. CUFLASH_LOG=1 logs this once for each model. Refused:
attention weights, head masks, sparse indices, paged caches. transformers 4 makes masks even without `attention_mask`
and a cache: pass a mask of ones there.

Models whose layers do not call a registered function are refused as they are loaded. Some take their attention from a
table of classes. Of these the image models run (SAM, SAM-HQ, Data2VecVision): their class for sdpa does, with cuflash
in place of PyTorch's function. Falcon's layers require the name "sdpa" and its masks, to which they add ALiBi: load it
with "sdpa". On a GPU `cuflash.frameworks.sdpa.activate()` runs those calls on cuflash that PyTorch's fused kernels
could take.

Within `cuflash.distributed.region(layout)` the ranks of a group share the rows of a model's sequence.

Sources: integrations/sdpa_attention.py and masking_utils.py of transformers 5.23 and of 4.53, which is the first
version in which masks can be registered.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

try:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface
except ImportError as error:
    raise ImportError(
        "cuflash.frameworks.transformers needs transformers 4.53 or later, the first that asks an attention function "
        "which masks it needs: pip install 'transformers>=4.53'"
    ) from error

from ...distributed import regions
from ...errors import ProblemError, UnsupportedError
from ..bool_masks import visible_in
from ..torch import attention
from ..torch.tensors import disabled
from .in_region import check_layer, needs_no_mask, region_of
from .mask_mod import mask_mod_of
from .masks import (
    Pattern,
    SequenceMask,
    VarlenKeywords,
    also_packed,
    is_recorded,
    is_traced,
    is_whole,
    varlen_of_function,
    varlen_of_positions,
    varlen_of_static,
)
from .models import (
    EAGER,
    NAME,
    SDPA,
    refuse_by_configuration,
    refuse_by_name,
    refuse_weights,
    tell_from_flash_attn,
    tell_of_sdpa,
)

__all__ = ["cuflash_attention_forward", "cuflash_mask", "register"]

_NOT_GIVEN: Any = object()
# Refused arguments that change the result.
_REFUSED = ("head_mask", "indices", "block_indices", "cache")
_SDPA_HAS_BIASES = "position_bias" in inspect.signature(sdpa_attention_forward).parameters  # older versions ignore them
# Models whose layers add to their mask; they take None as a mask that hides nothing.
_ADD_TO_MASKS = ("doge",)
# Over a static cache, generation compiles forwards of up to this many queries, and makes their masks before.
_MOST_COMPILED = 64


def register() -> None:
    """Registers `attn_implementation="cuflash"` with transformers, for all models; a second call changes nothing.

    Notes
    -----
    Limits and rules for NaN are described in `cuflash.forward` and `cuflash.backward`.

    Examples
    --------
    >>> import torch, transformers
    >>> from cuflash.frameworks.transformers import register
    >>> register()
    >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    >>> model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="cuflash")
    >>> model(torch.ones(2, 11, dtype=torch.long)).logits.shape
    torch.Size([2, 11, 64])
    """
    AttentionInterface.register(NAME, cuflash_attention_forward)
    AttentionMaskInterface.register(NAME, cuflash_mask)
    tell_from_flash_attn()
    refuse_by_name()


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
    position_bias: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes the attention of a layer; transformers calls it.

    Parameters
    ----------
    module : torch.nn.Module
        The layer; its `is_causal` and `config` are read.
    query : Tensor (batch, heads_q, seqlen_q, head_dim)
        Queries, with any strides.
    key, value : Tensor (batch, heads_kv, seqlen_k, …)
        Keys and values.
    attention_mask : Tensor or None
        Bools, or floats to add, broadcast to (batch, heads_q, seqlen_q, seqlen_k). Without a mask, the last query
        of a causal layer is aligned with the last key.
    dropout : float, default 0.0
        Probability at which weights are dropped.
    scaling : float, default 1/sqrt(head_dim)
        Softmax scale.
    is_causal : bool, default `module.is_causal`
        Hides later keys if there is no mask.
    sliding_window : int, optional
        Largest number of keys that a query sees, including the key at its own position, if there is no mask.
    softcap : float, optional
        Cap on scores.
    position_bias : Tensor, optional
        Floats to add to scores, broadcast as attention_mask.
    s_aux, sinks : Tensor (heads_q,) or (batch, heads_q, seqlen_q, 1), optional
        One more logit without a value, of each head or of each query.
    **kwargs
        `cu_seq_lens_q` and `cu_seq_lens_k`, or position_ids of a single row that start again, separate the sequences
        of a row.

    Returns
    -------
    out : Tensor (batch, seqlen_q, heads_q, head_dim_v)
        Contiguous.
    weights : None
        Attention weights are never returned.

    Raises
    ------
    UnsupportedError
        For the refused cases of this module's docstring.
    ProblemError, UnsupportedError, CompileError
        As in `cuflash.forward`, which also describes limits.

    Examples
    --------
    >>> import torch
    >>> from cuflash.frameworks.transformers import cuflash_attention_forward
    >>> layer, (query, key, value) = torch.nn.Module(), torch.randn(3, 2, 4, 100, 64)
    >>> out, _ = cuflash_attention_forward(layer, query, key, value, attention_mask=None, is_causal=True)
    >>> out.shape
    torch.Size([2, 100, 4, 64])
    """
    if torch.compiler.is_compiling() and (regions.active or isinstance(attention_mask, SequenceMask)):
        # A graph cannot read a region, nor a mask that was created outside of it.
        more = {"position_bias": position_bias, "s_aux": s_aux, "sinks": sinks, **kwargs}
        if sliding_window is not _NOT_GIVEN:
            more["sliding_window"] = sliding_window
        out = _uncompiled(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, softcap=softcap, **more
        )
        return out, None
    _refuse(kwargs)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    sizes = query.shape[0], query.shape[2], key.shape[2]
    sink = s_aux if sinks is None else sinks
    region = region_of(module) if regions.is_used and not torch.compiler.is_compiling() else None
    compute = attention if region is None else region.attention
    layer = _Layer(query, key, value, scaling, softcap or 0.0, dropout, sink, position_bias, compute)
    if region is not None:
        check_layer(attention_mask, position_bias, dropout, kwargs)
        window = _keys_before(module, query.shape[2], region.layout.seqlen, causal, sliding_window)
        return layer.whole(causal=causal, window_size=(window, -1)), None
    bounds = None if kwargs.get("cu_seq_lens_q") is None else _bounds(kwargs)
    if isinstance(attention_mask, SequenceMask):
        if (attention_mask.shape[0], *attention_mask.shape[2:]) == sizes and bounds is None:
            if attention_mask.varlen is not None and layer.is_of_heads:
                return layer.of_varlen(attention_mask.varlen), None
            if (keywords := attention_mask.as_function(query.shape[1])) is not None:
                return layer.whole(**keywords), None
        attention_mask = attention_mask.whole()
    if attention_mask is not None:
        if bounds is not None:
            attention_mask = also_packed(attention_mask, *bounds)
        if is_recorded() and not softcap and sink is None and (position_bias is None or _SDPA_HAS_BIASES):
            model = getattr(getattr(module, "config", None), "model_type", "")
            tell_of_sdpa(f"{type(module).__name__} of {model}")
            more = kwargs if position_bias is None else {**kwargs, "position_bias": position_bias}
            out, _ = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **more
            )
            return out, None
        return layer.whole(**_of_tensor(attention_mask, layer.bias, sizes[2])), None
    if bounds is not None:
        keywords = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), bounds, strict=True))
        keywords |= {f"max_seqlen_{side}": _in_host_memory(kwargs.get(f"max_length_{side}")) for side in "qk"}
        longest = keywords["max_seqlen_k"] or key.shape[2]
        window = _keys_before(module, 1, longest, causal, sliding_window)
        return layer.of_varlen(VarlenKeywords(keywords, causal, None if window < 0 else window + 1)), None
    window = _keys_before(module, query.shape[2], key.shape[2], causal, sliding_window)
    packed = varlen_of_positions(kwargs.get("position_ids"), *sizes)
    if packed is not None:
        return layer.of_varlen(packed._replace(causal=causal, window=None if window < 0 else window + 1)), None
    return layer.whole(causal=causal, window_size=(window, -1)), None


def _whole_call(*arguments: Any, **keywords: Any) -> torch.Tensor:
    return cuflash_attention_forward(*arguments, **keywords)[0]


_uncompiled = disabled(
    _whole_call,
    "masks that cuflash makes for transformers outside of a graph are read outside of it; leave fullgraph=False",
)


class _Layer(NamedTuple):
    """A call of a layer without its mask. bias: position bias. attention: the function of q, k and v."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float | None
    softcap: float
    dropout: float
    sink: torch.Tensor | None
    bias: torch.Tensor | None
    attention: Callable[..., Any]

    @property
    def is_of_heads(self) -> bool:
        """True if all rows may be packed: no argument belongs to single rows, whose numbers packing would change."""
        return self.bias is None and (self.sink is None or self.sink.dim() == 1)

    def whole(self, **masks: Any) -> torch.Tensor:
        """Computes all rows and keys. masks: keywords of `attention`."""
        if self.bias is not None:
            masks = {"bias": self.bias[..., : self.key.shape[2]]} | masks
        q, k, v = (x.transpose(1, 2) for x in (self.query, self.key, self.value))
        return self._attention(q, k, v, masks).contiguous()

    def of_varlen(self, varlen: VarlenKeywords) -> torch.Tensor:
        """Computes rows that hold variable-length sequences."""
        if not self.is_of_heads:
            raise UnsupportedError(
                "position_bias, or sinks of single queries, of several sequences in one row (cu_seq_lens_q, or "
                "position_ids that start again): they count from the start of the row; give one sequence a row, or "
                f"{SDPA}"
            )
        q, k, v = (x.transpose(1, 2) for x in (self.query, self.key, self.value))
        window = -1 if varlen.window is None else varlen.window - 1
        shape = q.shape[:3]
        if "cu_seqlens_q" in varlen.keywords:
            q = q.flatten(0, 1)
        if "cu_seqlens_k" in varlen.keywords:
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        out = self._attention(q, k, v, {"causal": varlen.causal, "window_size": (window, -1), **varlen.keywords})
        return out.contiguous().view(*shape, -1)

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor:
        keywords = {"softmax_scale": self.scaling, "softcap": self.softcap, **keywords}
        if self.dropout:
            keywords["dropout_p"] = self.dropout
        if self.sink is not None and self.sink.dim() == 1:
            keywords["sinks"] = self.sink if self.sink.dtype in (q.dtype, torch.float32) else self.sink.float()
        if self.sink is None or "sinks" in keywords:
            result: torch.Tensor = self.attention(q, k, v, **keywords)
            return result
        out, lse = self.attention(q, k, v, return_lse=True, **keywords)
        share = torch.sigmoid(lse - self.sink.squeeze(-1).to(lse.dtype))
        return (out * share.transpose(1, 2)[..., None]).to(out.dtype)


def _of_tensor(mask: torch.Tensor, bias: torch.Tensor | None, seqlen_k: int) -> dict[str, Any]:
    """Returns the keywords of `attention` for a mask tensor, beside a position bias."""
    mask = mask[..., :seqlen_k]
    if bias is None:
        return {"bias": mask}
    return {"mask_mod": visible_in(mask)} if mask.dtype == torch.bool else {"bias": bias[..., :seqlen_k] + mask}


def _bounds(kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bounds of the sequences, of queries and of keys."""
    q, k = kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k")
    if k is None:
        raise ProblemError("cu_seq_lens_q was given without cu_seq_lens_k; give both (the same for self-attention)")
    return q.to(torch.int32), k.to(torch.int32)


def _in_host_memory(length: Any) -> int | None:
    """Returns a bound on lengths, or None if the host would have to wait for it."""
    if isinstance(length, torch.Tensor):
        return None if length.is_cuda or is_traced() else int(length)
    return None if length is None else int(length)


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
    """Returns the mask of a forward pass; transformers calls it.

    Parameters
    ----------
    kv_length, kv_offset : int
        Number of keys, and position of the first one.
    attention_mask : Tensor (batch, positions), optional
        1 or True where a token counts.
    local_size : int, optional
        Size of a window or chunk.
    allow_is_causal_skip : bool, default True
        Permits None.
    config : PretrainedConfig, optional
        The model's configuration.
    **kwargs
        Further arguments of transformers' `sdpa_mask`.

    Returns
    -------
    mask : Tensor (batch, 1, seqlen_q, seqlen_k) or None
        None if only causality and the sliding window hide keys, for queries at the end. Otherwise a stand-in,
        which becomes a tensor only if the model reads it. While models are compiled or captured, or may be, the
        boolean mask of transformers' sdpa.

    Raises
    ------
    UnsupportedError
        For models that would not call `cuflash_attention_forward`, if their configuration got the name after loading.

    Examples
    --------
    >>> from cuflash.frameworks.transformers import cuflash_mask
    >>> cuflash_mask(batch_size=2, q_length=100, kv_length=100) is None
    True
    """
    if not is_traced():
        refuse_by_configuration(config.__class__)
    if needs_no_mask(kwargs.get("mask_function"), attention_mask):
        return None
    end = kv_offset + kv_length
    adds_to_masks = getattr(config, "model_type", None) in _ADD_TO_MASKS
    ends, whole = _ends_at(end, kwargs), is_whole(attention_mask, kv_offset, end)
    if allow_is_causal_skip and not adds_to_masks and ends and whole and _is_window(config, end, local_size):
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
    offset = kwargs.get("q_offset", kwargs.get("cache_position", 0))
    is_static = isinstance(offset, torch.Tensor) and not ends
    mask_function = kwargs.get("mask_function")
    if adds_to_masks or mask_function is None or is_traced() or (is_static and seqlen_q <= _MOST_COMPILED):
        mask: torch.Tensor | None = make()
        return mask
    padding = None if whole else attention_mask
    shape = kwargs["batch_size"], 1, seqlen_q, kv_length
    varlen = varlen_of_function(mask_function, padding, seqlen_q, kv_offset, kv_length, ends)
    device = _device(attention_mask, offset, kwargs.get("device"))
    if padding is not None and padding.shape[1] < end:
        padding = torch.nn.functional.pad(padding, (0, end - padding.shape[1]))
    mask_mod = mask_mod_of(mask_function, padding, None if ends else offset, kv_offset, device)
    if varlen is None and is_static and isinstance(kwargs.get("q_offset"), torch.Tensor):
        used = int(offset) + seqlen_q - kv_offset
        varlen = varlen_of_static(Pattern.from_function(mask_function), attention_mask, kv_offset, used, shape, device)
    return SequenceMask.create(varlen, shape, device, make, mask_mod)


def _device(attention_mask: torch.Tensor | None, offset: Any, device: Any) -> torch.device:
    """Returns the device of a mask; transformers 4 does not pass it."""
    devices = (x.device for x in (attention_mask, offset) if isinstance(x, torch.Tensor))
    return next(devices, torch.device("cpu")) if device is None else torch.device(device)


def _is_window(config: Any, end: int, local_size: int | None) -> bool:
    """True if a local mask hides nothing, or is the layers' sliding window and not a chunked mask."""
    if local_size is None or end <= local_size:
        return True
    chunk = getattr(config, "attention_chunk_size", None)
    return local_size == getattr(config, "sliding_window", None) and local_size != chunk


def _ends_at(end: int, sizes: dict[str, Any]) -> bool:
    """True if the queries have consecutive positions, the last of them at the last key."""
    if "cache_position" in sizes:  # transformers 4
        position = sizes["cache_position"]
        expected = torch.arange(end - len(position), end, device=position.device)
        return not is_traced() and torch.equal(position, expected)
    # With a static cache the offset is a tensor, and the keys behind it are not written yet.
    offset = sizes.get("q_offset", 0)
    return not isinstance(offset, torch.Tensor) and bool(offset + sizes["q_length"] == end)


def _keys_before(module: torch.nn.Module, seqlen_q: int, seqlen_k: int, causal: bool, sliding_window: Any) -> int:
    """Returns the number of keys before its own position that a query sees; -1 means all."""
    if causal and 1 < seqlen_q > seqlen_k:
        raise UnsupportedError(
            f"{seqlen_q} causal queries of {seqlen_k} keys without a mask: no decoder has them, so which keys they see "
            f"is not known; pass attention_mask or is_causal=False, or {SDPA}"
        )
    has_window = sliding_window is not _NOT_GIVEN
    window = sliding_window if has_window else getattr(getattr(module, "config", None), "sliding_window", None)
    if not window or seqlen_k <= window:  # 0: none, as in Qwen2-MoE's configuration without a window
        return -1
    if not has_window:
        raise UnsupportedError(
            f"{type(module).__name__} does not say whether this layer uses the model's sliding window of {window}, "
            f"which {seqlen_k} keys exceed; {SDPA}"
        )
    if not causal:
        raise UnsupportedError(
            f"sliding_window={window} of {seqlen_k} keys without causality and without a mask: models differ in what "
            f"they mean by it; {SDPA}"
        )
    if window < 1:
        raise ProblemError(f"sliding_window={window}; give a count of keys, the query's own among them, or None")
    return int(window) - 1


def _refuse(others: dict[str, Any]) -> None:
    refuse_weights(others.get("output_attentions"))
    for name in _REFUSED:
        if others.get(name) is not None:
            raise UnsupportedError(f"{name}: cuflash has no such part of attention; {EAGER}")
