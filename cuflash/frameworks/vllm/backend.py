"""The class in which vLLM looks up what the backend supports, and the classes that it consists of."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from ..serving import MAX_HEAD_DIM
from .implementation import KV_CACHE_DTYPES, Implementation
from .metadata import Builder

_DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


class Backend(AttentionBackend):
    """Attention of vLLM on cuflash.

    vLLM refuses a configuration before it loads a model, with a reason: head dims over 256, quantized caches, MLA,
    sparse attention, per-head scales, prefixes of images (mm_prefix), R-SWA, prefill context parallelism, and GPUs
    older than sm_80. Calls refuse fused quantization of outputs and a causal flag for each sequence.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = list(_DTYPE_NAMES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(KV_CACHE_DTYPES)
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """Returns the name under which `plugin` registers this class."""
        return "CUFLASH"

    @staticmethod
    def get_impl_cls() -> type[Implementation]:
        """Returns the class of one layer's attention."""
        return Implementation

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """Returns the class that describes batches."""
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Returns the page sizes of kernels: all."""
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """True for head dims of which all features have kernels."""
        return 0 < head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """True for Ampere and newer."""
        return bool(capability.major >= 8)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """True for all of vLLM's types."""
        return attn_type in {each.value for each in AttentionType}

    @classmethod
    def supports_sink(cls) -> bool:
        """True: one more logit of each head."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """True: to the left for causal layers, to both sides for others."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """True: decoders may see later tokens."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """True: by split_size, with which all layouts have equal bits."""
        return True

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """Returns the reasons against a configuration, in vLLM's words where it has them."""
        reasons: list[str] = super().validate_configuration(*args, **kwargs)
        if kwargs.get("use_dcp") and kwargs.get("has_sliding_window"):
            reasons.append("sliding window with DCP not supported")
        return reasons

    @classmethod
    def supports_combination(cls, *args: Any, **kwargs: Any) -> str | None:
        """Returns the reason against a pair of dtypes, as q, k and v of a call have one dtype."""
        names = ("head_size", "dtype", "kv_cache_dtype")
        call = dict(zip(names, args, strict=False)) | kwargs
        dtype, cache_dtype = _DTYPE_NAMES.get(call["dtype"]), call["kv_cache_dtype"]
        if cache_dtype in (None, "auto", dtype) or cache_dtype not in KV_CACHE_DTYPES:
            return None
        return f"kv_cache_dtype {cache_dtype} differs from the model's dtype {dtype}; leave it at auto"
