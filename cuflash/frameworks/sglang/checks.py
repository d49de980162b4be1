"""Cases that the backend refuses, before the first token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.runtime_context import get_parallel, get_spec

from ...errors import UnsupportedError
from ..serving import MAX_HEAD_DIM

OTHER = "choose another --attention-backend"


def check_runner(runner: Any) -> None:
    """Raises UnsupportedError for models, caches and options that the backend does not serve."""
    config = runner.model_config
    if config.attention_arch == AttentionArch.MLA:
        raise UnsupportedError(
            f"the model has multi-head latent attention (MLA), but cuflash serves keys and values with heads; {OTHER}"
        )
    widest = max(config.head_dim, getattr(config, "v_head_dim", None) or 0)
    if widest > MAX_HEAD_DIM:
        raise UnsupportedError(
            f"the model has head dim {widest}, but cuflash serves up to {MAX_HEAD_DIM} here; {OTHER}"
        )
    if runner.kv_cache_dtype != runner.dtype:
        raise UnsupportedError(
            f"the cache has dtype {runner.kv_cache_dtype} and the model {runner.dtype}, but cuflash reads no quantised "
            "or cast cache; leave --kv-cache-dtype auto"
        )
    if runner.attention_chunk_size is not None:
        raise UnsupportedError(
            f"the model has local attention in chunks of {runner.attention_chunk_size} keys, but cuflash serves "
            f"windows and full attention in SGLang; {OTHER}"
        )
    translator = getattr(runner, "kv_index_translator", None)
    if translator is not None and translator.is_translating:
        raise UnsupportedError("unified memory pools have virtual slots; leave --enable-unified-memory out")
    parallel = get_parallel()
    for option, size in (("--dcp-size", parallel.attn_dcp_size), ("--attn-cp-size", parallel.attn_cp_size)):
        if size > 1:
            raise UnsupportedError(f"{option} is {size}, but cuflash reads all keys on one rank in SGLang; give 1")
    check_topk(get_spec().speculative_eagle_topk)


def check_topk(topk: int | None) -> None:
    """Raises UnsupportedError for draft tokens that form a tree. topk: branches of a draft token."""
    if topk is not None and topk > 1:
        raise UnsupportedError(
            f"draft tokens form a tree (speculative_eagle_topk={topk}), but cuflash verifies chains; give "
            "--speculative-eagle-topk 1, or with NGRAM --speculative-ngram-max-bfs-breadth 1"
        )


def check_layer(layer: Any) -> None:
    """Raises UnsupportedError for scores of a layer that the backend does not compute."""
    if max(layer.qk_head_dim, layer.v_head_dim) > MAX_HEAD_DIM:
        raise UnsupportedError(
            f"layer {layer.layer_id} has head dims {layer.qk_head_dim} and {layer.v_head_dim}, but cuflash serves "
            f"up to {MAX_HEAD_DIM} here; {OTHER}"
        )
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise UnsupportedError(
            f"layer {layer.layer_id} caps scores by {layer.logit_capping_method!r}, but cuflash by 'tanh'; {OTHER}"
        )
    if layer.xai_temperature_len > 0:
        raise UnsupportedError(f"layer {layer.layer_id} scales scores by position (xai_temperature_len); {OTHER}")


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for keywords of a layer's call other than sinks and return_lse."""
    names = [name for name, value in keywords.items() if value is not None]
    if names:
        raise UnsupportedError(
            f"the model passes {', '.join(names)} to attention, but cuflash takes sinks and return_lse; {OTHER}"
        )
