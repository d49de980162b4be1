"""Lengths and pages of a batch, computed once for all layers, and the buffers that CUDA graphs read them from."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...errors import ProblemError, UnsupportedError
from ..serving import bound_of_keys
from .checks import check_topk


class Keys(NamedTuple):
    """Keys of each sequence: their number, its upper bound, their pages, and the keys of a page."""

    seqused: torch.Tensor
    max_seqlen: int
    page_table: torch.Tensor
    page_size: int


class Metadata(NamedTuple):
    """Queries and keys of a batch. window_keys: the same keys in the pool of windowed layers."""

    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    keys: Keys
    window_keys: Keys | None = None
    encoder_keys: Keys | None = None
    window_slots: torch.Tensor | None = None  # slots of new tokens in the pool of windowed layers


_SIDES = "keys", "window_keys", "encoder_keys"  # fields of Metadata


class Lengths(NamedTuple):
    """Lengths of a batch: offsets and bound of its queries, number and bound of its keys."""

    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    seqlens_k: torch.Tensor
    max_seqlen_k: int


def lengths_of(batch: Any, capacity: int, in_graph: bool) -> Lengths:
    """Returns the lengths of a batch. capacity: keys that a sequence has room for, the bound inside of a CUDA graph.

    Nothing is read from the device. Draft tokens to verify count as keys, and are not in `seq_lens` yet.
    """
    mode, count, spec = batch.forward_mode, batch.batch_size, batch.spec_info
    seqlens_k, tokens = batch.seq_lens[:count], batch.positions.numel()
    if mode.is_dllm_extend():
        raise UnsupportedError("diffusion models decode blocks (DLLM_EXTEND); choose another --attention-backend")
    width = 0  # queries of each sequence, if all have the same number
    if mode.is_target_verify():
        check_topk(getattr(spec, "topk", None))
        if getattr(spec, "ragged_verify_layout", None) is not None:
            raise UnsupportedError(
                "draft tokens differ in number between sequences (ragged_verify_layout); use fixed ones"
            )
        # In a graph, a rank without sequences may have no draft tokens, but has as many rows as were captured.
        width = tokens // count if in_graph else spec.draft_token_num
        seqlens_k = seqlens_k + width
    elif mode.is_decode_or_idle():
        if spec is not None and mode.is_decode():
            raise UnsupportedError(
                "SGLang drafts tokens step by step with this backend, but cuflash verifies them only; give "
                "--speculative-draft-attention-backend triton"
            )
        width = 1
    elif not mode.is_extend(include_draft_extend_v2=True):
        raise UnsupportedError(f"the batch has forward mode {mode.name}; cuflash serves decode, extend and verify")
    seqlens_cpu = None if in_graph else batch.seq_lens_cpu
    longest = capacity
    if seqlens_cpu is not None:
        longest = int(seqlens_cpu.max()) + mode.is_target_verify() * width
        longest = min(capacity, bound_of_keys(longest))
    if width:
        bounds = torch.arange(0, (count + 1) * width, width, dtype=torch.int32, device=seqlens_k.device)
        return Lengths(bounds, width, seqlens_k, longest)
    bounds = torch.nn.functional.pad(batch.extend_seq_lens[:count].cumsum(0, dtype=torch.int32), (1, 0))
    seqlens_q_cpu = None if in_graph else batch.extend_seq_lens_cpu
    most = tokens // count if in_graph else tokens if seqlens_q_cpu is None else max(seqlens_q_cpu)
    return Lengths(bounds, most, seqlens_k, longest)


class Pages:
    """Page tables of batches, from the slots that SGLang assigns to each token of a request."""

    def __init__(self, runner: Any, window_pool: Any) -> None:
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.page_size = 1 if runner.model_config.is_encoder_decoder else runner.page_size
        self.window_pool = window_pool

    @property
    def capacity(self) -> int:
        """Tokens that a request has room for."""
        return int(self.req_to_token.shape[1])

    def metadata(self, batch: Any, in_graph: bool) -> Metadata:
        """Returns the metadata of a batch. in_graph: shapes and bounds that a CUDA graph may repeat.

        New tokens are read slot by slot, so they may lie anywhere. Text follows the encoder's tokens of a request.
        """
        lengths = lengths_of(batch, self.capacity, in_graph)
        rows = batch.req_pool_indices[: batch.batch_size]
        is_prompt = batch.forward_mode.is_extend() and not batch.forward_mode.is_target_verify()
        page_size = 1 if is_prompt else self.page_size
        encoder_keys = None
        if batch.encoder_lens is None:
            slots = self.req_to_token[rows, : lengths.max_seqlen_k : page_size]
        else:
            encoder_lens = batch.encoder_lens[: batch.batch_size]
            columns = torch.arange(lengths.max_seqlen_k, device=rows.device) + encoder_lens[:, None]
            slots = self.req_to_token[rows[:, None], columns.clamp(max=self.capacity - 1)]
            lens_cpu = None if in_graph else getattr(batch, "encoder_lens_cpu", None)
            longest = self.capacity if lens_cpu is None else max(1, *lens_cpu)
            table = self.req_to_token[rows, :longest].to(torch.int32)
            encoder_keys = Keys(encoder_lens.to(torch.int32), longest, table, 1)
        keys = self._keys(lengths, slots, page_size)
        window_keys = window_slots = None
        if self.window_pool is not None:
            window_keys = self._keys(lengths, self.window_pool.translate_loc_from_full_to_swa(slots), page_size)
            if batch.out_cache_loc is not None:
                window_slots = self.window_pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        return Metadata(lengths.cu_seqlens_q, lengths.max_seqlen_q, keys, window_keys, encoder_keys, window_slots)

    @staticmethod
    def _keys(lengths: Lengths, slots: torch.Tensor, page_size: int) -> Keys:
        table = (slots if page_size == 1 else slots.div(page_size, rounding_mode="floor")).to(torch.int32)
        return Keys(lengths.seqlens_k.to(torch.int32), lengths.max_seqlen_k, table, page_size)


class GraphBuffers:
    """Arrays at fixed addresses, which kernels in CUDA graphs read; each replay fills them first.

    All graphs share them, as they are replayed one after the other.
    """

    def __init__(self, pages: Pages, max_bs: int, max_num_tokens: int, has_encoder: bool) -> None:
        self.device = pages.req_to_token.device
        columns = -(-pages.capacity // pages.page_size)
        shapes: dict[str, tuple[int, ...]] = {"cu_seqlens_q": (max_bs + 1,), "window_slots": (max_num_tokens,)}
        for side in _SIDES:
            shapes |= {f"{side}.seqused": (max_bs,), f"{side}.page_table": (max_bs, columns)}
        names = ["cu_seqlens_q", "keys"]
        names += ["window_keys", "window_slots"] * (pages.window_pool is not None) + ["encoder_keys"] * has_encoder
        self._buffers = {
            name: torch.zeros(shape, dtype=torch.int64 if name == "window_slots" else torch.int32, device=self.device)
            for name, shape in shapes.items()
            if name.split(".")[0] in names
        }

    def fill(self, metadata: Metadata) -> Metadata:
        """Copies the arrays of a batch into the buffers; returns its metadata in these."""
        fields: dict[str, Any] = {
            side: self._fill_keys(side, keys) for side in _SIDES if (keys := getattr(metadata, side)) is not None
        }
        if metadata.window_slots is not None:
            fields["window_slots"] = slots = self._copy("window_slots", metadata.window_slots)
            # Rows that pad a batch write to slot 0, which holds no token.
            self._buffers["window_slots"][len(slots) :].zero_()
        return metadata._replace(cu_seqlens_q=self._copy("cu_seqlens_q", metadata.cu_seqlens_q), **fields)

    def _fill_keys(self, side: str, keys: Keys) -> Keys:
        table = self._copy(f"{side}.page_table", keys.page_table)
        return keys._replace(seqused=self._copy(f"{side}.seqused", keys.seqused), page_table=table)

    def _copy(self, name: str, x: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers[name]
        if len(x) > len(buffer) or x.shape[1:] != buffer.shape[1:]:
            raise ProblemError(
                f"{name} of a batch has shape {tuple(x.shape)}, but init_cuda_graph_state made room for "
                f"{tuple(buffer.shape)}; give it the largest batch and number of tokens that graphs are captured for"
            )
        return buffer[: len(x)].copy_(x)
