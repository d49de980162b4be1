"""Metadata of a batch: vLLM's arrays of lengths and pages as they are, for all layers of a cache group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.distributed.parallel_state import get_dcp_world_size_and_rank
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens, split_decodes_and_prefills

from ...errors import UnsupportedError
from ..serving import bound_of_keys


class Part(NamedTuple):
    """Sequences of a batch that one call computes, and their rows of q."""

    tokens: slice
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int


@dataclass
class Metadata(AttentionMetadata):
    """Metadata of a batch, under vLLM's names. max_seq_len: None for the width of the block table.

    num_decodes: the first sequences of a mixed batch, which have a call of their own, and 0 in other batches.
    prefill_start_loc: offsets of the others in their call. context_lens: with decode context parallelism, the keys of
    this rank before the batch. max_context_len: their bound, 0 where no rank has any.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int | None
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool
    num_decodes: int = 0
    num_decode_tokens: int = 0
    max_decode_len: int = 0
    prefill_start_loc: torch.Tensor | None = None
    context_lens: torch.Tensor | None = None
    max_context_len: int | None = 0
    _parts: list[Part] | None = field(default=None, init=False, repr=False)

    def parts(self) -> list[Part]:
        """Returns the calls of a layer: all sequences together, or decodes and prefills apart."""
        if self._parts is None:  # the first layer's: slices of tensors take 1 us each
            count, tokens, rows = self.num_decodes, self.num_decode_tokens, self.num_actual_tokens
            starts, lengths, table = self.query_start_loc, self.seq_lens, self.block_table
            if self.prefill_start_loc is None:
                self._parts = [Part(slice(rows), starts, lengths, table, self.max_query_len)]
            else:
                decodes = starts[: count + 1], lengths[:count], table[:count]
                prefills = self.prefill_start_loc, lengths[count:], table[count:]
                self._parts = [
                    Part(slice(tokens), *decodes, self.max_decode_len),
                    Part(slice(tokens, rows), *prefills, self.max_query_len),
                ]
        return self._parts


class Builder(AttentionMetadataBuilder[Metadata]):
    """Makes metadata without work on the host or copies, so a CUDA graph reads the lengths of each replay.

    Decodes of a mixed batch have a call of their own, in which keys may be split over thread blocks. On an H200 the two
    calls take 0.68 to 0.82 of the time of one. So full graphs hold uniform batches alone.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        parallel = vllm_config.parallel_config
        self.interleave = parallel.cp_kv_cache_interleave_size
        self.ranks, self.rank = get_dcp_world_size_and_rank(getattr(kv_cache_spec, "dcp_sharded", False))
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        if self.ranks > 1:  # one buffer for all batches: graphs keep its address
            count = vllm_config.scheduler_config.max_num_seqs
            self._context_lens = torch.zeros(count, dtype=torch.int32, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Returns UNIFORM_BATCH: the host divides mixed batches."""
        return AttentionCGSupport.UNIFORM_BATCH

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """Returns the metadata of a batch."""
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise UnsupportedError(
                "causal is a tensor with a flag for each sequence, but all sequences of a call of CUFLASH are causal "
                "or none; leave out --attention-backend, and vLLM takes another for this model"
            )
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            if getattr(common, name, None) is not None:
                raise UnsupportedError(
                    f"{name} was given, but CUFLASH has causal masks, windows, or no mask; leave out "
                    "--attention-backend, and vLLM takes another for this model"
                )
        metadata = Metadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=self._bound(common.max_seq_len, common),
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )
        if self.ranks > 1:
            self._add_context(metadata, common)
        else:
            self._split(metadata, common)
        return metadata

    def _in_graph(self, common: Any) -> bool:
        """True if a full graph may hold such a batch: captures and the runs before them, which compile, then agree."""
        compilation = self.vllm_config.compilation_config
        if not compilation.cudagraph_mode.has_full_cudagraphs():
            return False
        return bool(common.num_actual_tokens <= (compilation.max_cudagraph_capture_size or 0))

    def _bound(self, length: int, common: Any) -> int | None:
        return None if self._in_graph(common) else bound_of_keys(length)

    def _split(self, metadata: Metadata, common: Any) -> None:
        """Divides a batch that begins with decodes and ends with prefills, as `reorder_batch_threshold` makes it."""
        threshold = self.reorder_batch_threshold or 1
        decodes, prefills, tokens, _ = split_decodes_and_prefills(common, decode_threshold=threshold)
        if decodes and prefills:
            metadata.num_decodes, metadata.num_decode_tokens, metadata.max_decode_len = decodes, tokens, threshold
            metadata.prefill_start_loc = common.query_start_loc[decodes:] - tokens

    def _add_context(self, metadata: Metadata, common: Any) -> None:
        """Adds lengths of this rank's part of the keys before the batch.

        All ranks make the same choice for max_context_len, as all of them take part in the exchange.
        """
        count = common.seq_lens.shape[0]
        context = common.seq_lens - common.query_start_loc.diff()
        self._context_lens[:count] = get_dcp_local_seq_lens(context, self.ranks, self.rank, self.interleave)
        metadata.context_lens = self._context_lens[:count]
        bound, is_empty = common.seq_lens_cpu_upper_bound, False
        if bound is not None and not self._in_graph(common):
            is_empty = not bool((bound[:count] > common.query_start_loc_cpu.diff()[:count]).any())
        share = self.ranks * self.interleave
        longest = -(-common.max_seq_len // share) * self.interleave
        metadata.max_context_len = 0 if is_empty else self._bound(longest, common)
