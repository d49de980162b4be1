"""The attention backend: SGLang's layers and batches as calls of `cuflash.forward`."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_exec

from ...errors import ProblemError
from ...ops.forward import forward
from ..serving import SPLIT_SIZE
from .checks import check_keywords, check_layer, check_runner
from .metadata import GraphBuffers, Keys, Metadata, Pages


class Backend(AttentionBackend):
    """Attention of one of SGLang's model runners over its caches. SGLang creates it for `--attention-backend cuflash`.

    Parameters
    ----------
    runner : ModelRunner
        SGLang's model runner, which has the caches.

    Raises
    ------
    UnsupportedError
        The model, its cache or an option is none that the backend serves; the message says what to change.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        check_runner(runner)
        self.token_to_kv_pool = pool = runner.token_to_kv_pool
        has_window_pool = isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0
        # Layers whose keys lie in the pool that holds windows alone.
        mapping = pool.layers_mapping if has_window_pool else {}
        self.window_layers = {layer_id for layer_id, (_, is_windowed) in mapping.items() if is_windowed}
        self.has_encoder = runner.model_config.is_encoder_decoder
        self.pages = Pages(runner, pool if has_window_pool else None)
        self.split_size = SPLIT_SIZE if get_exec().deterministic.enable_deterministic_inference else None
        self.forward_metadata: Metadata | None = None
        self.graph_buffers: GraphBuffers | None = None
        self._checked_layers: set[int] = set()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Computes the metadata of a batch that runs without a CUDA graph."""
        is_empty = forward_batch.forward_mode.is_idle() or forward_batch.batch_size == 0
        self.forward_metadata = None if is_empty else self.pages.metadata(forward_batch, in_graph=False)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates the arrays that kernels in CUDA graphs read."""
        self.graph_buffers = GraphBuffers(self.pages, max_bs, max_num_tokens, self.has_encoder)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fills the arrays of CUDA graphs, before a capture and before each replay.

        Bounds are those of the cache, so a graph that was captured with short sequences is replayed with long ones.
        """
        if self.graph_buffers is None:
            raise ProblemError("a CUDA graph needs arrays; call init_cuda_graph_state first")
        self.forward_metadata = self.graph_buffers.fill(self.pages.metadata(forward_batch, in_graph=True))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Returns the length of sequences that pad a batch to the size of a graph."""
        return 1

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: torch.Tensor | None = None,
        return_lse: bool = False,
        **keywords: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Writes new keys and values to the cache; returns attention of the batch, and with return_lse its lse.

        Parameters
        ----------
        q : Tensor (tokens, heads_q * head_dim)
            Queries, sequence after sequence.
        k : Tensor (tokens, heads_kv, head_dim), optional
            Keys of new tokens; None if the cache has them, as of layers that share it.
        v : Tensor (tokens, heads_kv, head_dim_v), optional
            Values of new tokens.
        layer : RadixAttention
            Heads, scale, window, cap and kind of attention.
        forward_batch : ForwardBatch
            The batch that `init_forward_metadata` got.
        save_kv_cache : bool, default True
            False: k and v are in the cache already.
        sinks : Tensor (heads_q,), optional
            One more logit of each head, without a value.
        return_lse : bool, default False
            Returns (out, lse).

        Returns
        -------
        out : Tensor (tokens, heads_q * head_dim_v)
            Attention. Rows of no sequence hold no result.
        lse : Tensor (tokens, heads_q), with return_lse
            Natural logarithm of the sum of exp of the visible scores, float32.
        """
        check_keywords(keywords)
        if layer.layer_id not in self._checked_layers:
            check_layer(layer)
            self._checked_layers.add(layer.layer_id)
        metadata = self.forward_metadata
        if metadata is None:
            raise ProblemError("the batch has no metadata; call init_forward_metadata with it first")
        keys = self._keys(metadata, layer)
        if save_kv_cache and k is not None:
            place = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=metadata.window_slots)
            self.token_to_kv_pool.set_kv_buffer(layer, place, k, v)
        heads, head_dim_v = layer.tp_q_head_num, layer.v_head_dim
        causal, window = _mask(layer)
        k_cache, v_cache = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        out = forward_batch._attn_output if hasattr(forward_batch, "_attn_output") else None
        results: Any = forward(
            q.reshape(-1, heads, layer.qk_head_dim),
            k_cache.view(-1, keys.page_size, *k_cache.shape[1:]),
            v_cache.view(-1, keys.page_size, *v_cache.shape[1:]),
            softmax_scale=layer.scaling,
            causal=causal,
            window_size=(-1, -1) if window is None else (window, 0 if causal else window),
            softcap=layer.logit_cap or 0.0,
            return_lse=return_lse,
            out=None if out is None else out.view(-1, heads, head_dim_v),
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_seqlen_q,
            seqused_k=keys.seqused,
            max_seqlen_k=keys.max_seqlen,
            page_table=keys.page_table,
            split_size=self.split_size,
            sinks=sinks,
        )
        if return_lse:
            return results[0].view(-1, heads * head_dim_v), results[1].T.contiguous()
        attended: torch.Tensor = results.view(-1, heads * head_dim_v)
        return attended

    forward_decode = forward_extend

    def _keys(self, metadata: Metadata, layer: Any) -> Keys:
        """Returns the keys that a layer attends to: of the encoder, of the pool of windowed layers, or all."""
        keys: Keys | None = metadata.keys
        if layer.is_cross_attention:
            keys = metadata.encoder_keys
        elif layer.layer_id in self.window_layers:
            keys = metadata.window_keys
        if keys is None:
            raise ProblemError(
                f"layer {layer.layer_id} is cross attention, but the batch has no encoder_lens; give the number of "
                "encoder tokens of each sequence"
            )
        return keys


def _mask(layer: Any) -> tuple[bool, int | None]:
    """Returns causal, and the number of visible keys before each query, None for all."""
    two_sided = AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL
    causal = not layer.is_cross_attention and layer.attn_type not in two_sided
    window = layer.sliding_window_size
    return causal, None if layer.is_cross_attention or window is None or window < 0 else window
