"""Attention of one layer over vLLM's caches."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from vllm import envs
from vllm._custom_ops import reshape_and_cache_flash
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backend import AttentionImpl, AttentionType
from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce

from ... import mods
from ...errors import ProblemError, UnsupportedError
from ...ops.forward import forward
from ...ops.merge import merge_states
from ..serving import MAX_HEAD_DIM, SPLIT_SIZE
from .metadata import Metadata

KV_CACHE_DTYPES = ("auto", "float16", "bfloat16")
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class Implementation(AttentionImpl[Metadata]):
    """Attention of one layer. sliding_window: keys that are visible left and right of the diagonal, -1 for all.

    With decode context parallelism a rank's cache holds some of the keys. Its part of the attention is merged with
    the other ranks' parts by lse, and then with attention over the new tokens.
    """

    can_return_lse_for_decode = True  # natural logarithm, as `lse_base_on_e` says
    supports_dcp = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise UnsupportedError(
                f"kv_cache_dtype is {kv_cache_dtype}, but cuflash reads caches of 16 or 32 bits, "
                f"{', '.join(KV_CACHE_DTYPES)}; leave --kv-cache-dtype at auto, or take another backend"
            )
        if head_size > MAX_HEAD_DIM:
            raise UnsupportedError(
                f"head_size is {head_size}, but CUFLASH has at most {MAX_HEAD_DIM}; leave out --attention-backend, "
                "and vLLM takes another"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        left = -1 if sliding_window is None else sliding_window - 1
        self.sliding_window = (left, 0 if left >= 0 and attn_type == AttentionType.DECODER else left)
        self._is_encoder = attn_type in _ENCODERS
        self._views_of_cache: tuple[ref[torch.Tensor], Any, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._options: dict[str, Any] = {"softmax_scale": self.scale, "softcap": self.logits_soft_cap}
        if envs.VLLM_BATCH_INVARIANT:
            self._options["split_size"] = SPLIT_SIZE
        self._mods: dict[str, Any] = {} if sinks is None else {"sinks": sinks}
        if self.dcp_world_size > 1:
            self._check_ranks()

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes attention of the batch to output (tokens, heads, head_size), and returns it."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError(
                "output_scale was given, but cuflash writes no quantized output; turn fuse_attn_quant of "
                "pass_config off"
            )
        if self.alibi_slopes is not None and "score_mod" not in self._mods:
            # In the first run, which has no metadata: a copy to the GPU cannot be captured in a graph.
            self.alibi_slopes = self.alibi_slopes.to(query.device)
            self._mods["score_mod"] = mods.alibi(self.alibi_slopes)
        if attn_metadata is None:  # a run that measures the memory of the other layers
            return output.fill_(0)
        n = attn_metadata.num_actual_tokens
        if self._is_encoder:
            self._over_new(query[:n], key[:n], value[:n], attn_metadata, causal=False, out=output[:n], **self._mods)
            return output
        k, v = self._views(kv_cache)
        if self.dcp_world_size > 1:
            self._over_ranks(query[:n], key[:n], value[:n], k, v, attn_metadata, output[:n])
            return output
        causal = attn_metadata.causal
        for part in attn_metadata.parts():
            q, out = query, output
            if part.tokens != slice(query.shape[0]):  # a slice takes 2 us of the host
                q, out = query[part.tokens], output[part.tokens]
            forward(
                q,
                k,
                v,
                out=out,
                cu_seqlens_q=part.query_start_loc,
                seqused_k=part.seq_lens,
                page_table=part.block_table,
                max_seqlen_q=part.max_query_len,
                max_seqlen_k=attn_metadata.max_seq_len,
                causal=causal,
                window_size=self._window(causal),
                **self._options,
                **self._mods,
            )
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes new keys and values to their slots, of which negative ones are left out. Encoders have no cache."""
        if self._is_encoder:
            return
        k, v = self._views(kv_cache)
        if key.is_cuda:
            scales = layer._k_scale, layer._v_scale  # not read for caches of 16 bits
            reshape_and_cache_flash(key, value, k, v, slot_mapping, self.kv_cache_dtype, *scales)
            return
        rows = (slot_mapping >= 0).nonzero()[:, 0]
        page, row = slot_mapping[rows] // k.shape[1], slot_mapping[rows] % k.shape[1]
        k[page, row], v[page, row] = key[rows], value[rows]

    def _views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values (pages, page size, kv heads, head dim) of a cache. They are made once for a cache.

        Making them takes 7 us of the host. They hold the memory of the cache, but not its tensor, whose end ends them.
        A cache that changed in place has new ones.
        """
        shape, strides, address = kv_cache.shape, kv_cache.stride(), kv_cache.data_ptr()
        views = self._views_of_cache  # read once: another thread may replace it
        if views is not None and views[0]() is kv_cache and views[1] == (shape, strides, address):
            return views[2]
        if len(shape) != 4 or shape[1] != self.num_kv_heads or shape[3] <= self.head_size:
            raise ProblemError(
                f"kv_cache has shape {tuple(shape)}, but CUFLASH reads (pages, {self.num_kv_heads} kv heads, page "
                f"size, {2 * self.head_size} for a key and a value) as in vLLM 0.32; install this version"
            )
        with torch.inference_mode(False):  # writes may run in another mode than the first call
            pages = kv_cache.new_empty(0).set_(kv_cache).transpose(1, 2)
            k, v = pages[..., : self.head_size], pages[..., self.head_size :]
        layer = ref(self)

        def forget(_: Any) -> None:
            if (this := layer()) is not None:
                this._views_of_cache = None

        self._views_of_cache = ref(kv_cache, forget), (shape, strides, address), (k, v)
        return k, v

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies of the layer hold: no views, as these would be of copied memory."""
        return self.__dict__ | {"_views_of_cache": None}

    def _window(self, causal: bool) -> tuple[int, int]:
        left, right = self.sliding_window
        return left, right if causal else left

    def _over_new(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: Metadata,
        causal: bool,
        **keywords: Any,
    ) -> Any:
        """Computes attention of the batch's tokens to each other. keywords: further ones of `forward`."""
        starts, longest = metadata.query_start_loc, metadata.max_query_len
        return forward(
            query,
            key,
            value,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=causal,
            window_size=self._window(causal),
            **self._options,
            **keywords,
        )

    def _check_ranks(self) -> None:
        if self.sliding_window[0] >= 0 or self.alibi_slopes is not None:
            name = "ALiBi" if self.sliding_window[0] < 0 else "a sliding window"
            raise UnsupportedError(
                f"the layer has {name}, but with decode context parallelism the keys of a rank are not neighbours; set "
                "--decode-context-parallel-size 1"
            )
        if self.attn_type == AttentionType.ENCODER_DECODER or self.kv_sharing_target_layer_name is not None:
            kind = "cross attention" if self.kv_sharing_target_layer_name is None else "the cache of another layer"
            raise UnsupportedError(
                f"the layer has {kind}, but with decode context parallelism it needs its own keys of new tokens; set "
                "--decode-context-parallel-size 1"
            )
        config = get_current_vllm_config_or_none()
        is_a2a = config is not None and config.parallel_config.dcp_comm_backend == "a2a"
        self._merge_ranks = dcp_a2a_lse_reduce if is_a2a else cp_lse_ag_out_rs

    def _over_ranks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: Metadata,
        output: torch.Tensor,
    ) -> None:
        """Merges attention to this rank's keys, to the other ranks' keys, and to the new tokens, which have the sinks.

        A rank without keys of a sequence has out 0 and lse -inf.
        """
        causal = metadata.causal
        if metadata.max_context_len == 0:
            self._over_new(query, key, value, metadata, causal, out=output, **self._mods)
            return
        group = get_dcp_group()
        state = forward(
            group.all_gather(query.contiguous(), dim=1),
            k,
            v,
            cu_seqlens_q=metadata.query_start_loc,
            seqused_k=metadata.context_lens,
            page_table=metadata.block_table,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_context_len,
            return_lse=True,
            **self._options,
        )
        out, lse = self._merge_ranks(state[0], state[1].T.contiguous(), group, return_lse=True)
        new_out, new_lse = self._over_new(query, key, value, metadata, causal, return_lse=True, **self._mods)
        output.copy_(merge_states([out, new_out], [lse.T.contiguous(), new_lse])[0])
