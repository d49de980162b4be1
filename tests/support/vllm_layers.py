"""Layers of vLLM over batches in pages, without an engine, beside attention in float64. Needs vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata

from cuflash.frameworks.vllm.implementation import Implementation
from cuflash.frameworks.vllm.metadata import Builder

HEADS, HEADS_KV, DIM, PAGE = 4, 2, 16, 8


def write_rows(
    key: Any, value: Any, k: Any, v: Any, slots: Any, kv_cache_dtype: str, k_scale: Any, v_scale: Any
) -> None:
    """Writes rows to their slots, as vLLM's kernel does."""
    rows = (slots >= 0).nonzero()[:, 0]
    page, row = slots[rows] // k.shape[1], slots[rows] % k.shape[1]
    k[page, row], v[page, row] = key[rows], value[rows]


LAYER = SimpleNamespace(_k_scale=None, _v_scale=None)  # vLLM's module of a layer


class Batch:
    """Sequences with a context in pages and new tokens, and the attention that they have."""

    def __init__(
        self,
        queries: list[int],
        contexts: list[int],
        dtype: Any = torch.float32,
        padding: int = 0,
        heads: int = HEADS,
        heads_kv: int = HEADS_KV,
        dim: int = DIM,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.queries, self.contexts = queries, contexts
        self.lengths = [query + context for query, context in zip(queries, contexts, strict=True)]
        total, width = sum(queries), -(-max(self.lengths) // PAGE) + 1
        draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)  # noqa: E731
        self.q = draw(total, heads, dim)
        self.k, self.v = ([draw(length, heads_kv, dim) for length in self.lengths] for _ in range(2))
        count = len(queries)
        pages = torch.randperm(count * width + 1, generator=generator)[: count * width].reshape(count, width)
        self.cache = torch.full((count * width + 1, heads_kv, PAGE, 2 * dim), torch.nan, dtype=dtype, device=device)
        self.table = torch.cat([pages, pages.new_zeros(padding, width)]).to(torch.int32)
        zeros = [0] * padding
        starts = torch.tensor([0, *queries, *zeros]).cumsum(0, dtype=torch.int32)
        positions = [range(context, length) for context, length in zip(contexts, self.lengths, strict=True)]
        new_slots = [self.slot(b, j) for b, part in enumerate(positions) for j in part]
        seq_lens = torch.tensor([*self.lengths, *zeros], dtype=torch.int32)
        self.common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(device),
            num_reqs=count + padding,
            num_actual_tokens=total,
            max_query_len=max(queries),
            max_seq_len=max(self.lengths),
            block_table_tensor=self.table.to(device),
            slot_mapping=torch.tensor(new_slots, device=device),
            seq_lens_cpu_upper_bound=seq_lens,
        )

    def slot(self, b: int, j: int) -> int:
        return int(self.table[b, j // PAGE]) * PAGE + j % PAGE

    def fill(self, impl: Implementation, positions: Any = None) -> None:
        """Writes the context, or other positions, to the cache; and slots of -1, which are left out."""
        for b, context in enumerate(self.contexts):
            rows = list(range(context)) if positions is None else positions[b]
            slots = torch.tensor([self.slot(b, i if positions else j) for i, j in enumerate(rows)] + [-1])
            k, v = (torch.cat([x[b][rows], x[b][:1]]) for x in (self.k, self.v))
            impl.do_kv_cache_update(LAYER, k, v, self.cache, slots.to(self.cache.device))

    def new(self) -> tuple[Any, Any]:
        """Returns keys and values of the new tokens, packed."""
        k, v = (torch.cat([x[b][n:] for b, n in enumerate(self.contexts)]) for x in (self.k, self.v))
        return k, v

    def run(self, impl: Implementation, builder: Builder | None = None, **changes: Any) -> Any:
        """Runs a layer on the batch, whose new keys are written first."""
        builder = builder or build_of(device=self.cache.device)
        data = builder.build(0, self.common.replace(**changes))
        k, v = self.new()
        self.fill(impl)
        impl.do_kv_cache_update(LAYER, k, v, self.cache, data.slot_mapping)
        out = torch.full_like(self.q, torch.nan)
        assert impl.forward(LAYER, self.q, k, v, self.cache, data, out) is out
        return out.cpu()

    def expected(self, visible: Any, cap: float = 0, sinks: Any = None, slopes: Any = None) -> Any:
        """Returns attention in float64. visible: a function of query positions and key positions."""
        outs = []
        for q, k, v, context in zip(self.q.split(self.queries), self.k, self.v, self.contexts, strict=True):
            q, k, v = (x.cpu().double().transpose(0, 1) for x in (q, k, v))
            k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
            s = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
            s = cap * torch.tanh(s / cap) if cap else s
            i, j = torch.arange(q.shape[1])[:, None] + context, torch.arange(k.shape[1])
            s = s if slopes is None else s - torch.tensor(slopes)[:, None, None] * (i - j).abs()
            s = s.masked_fill(~visible(i, j), -torch.inf)
            if sinks is not None:
                s = torch.cat([s, sinks.cpu().double()[:, None, None].expand(-1, s.shape[1], 1)], dim=2)
            outs.append((s.softmax(dim=2)[..., : k.shape[1]] @ v).transpose(0, 1))
        return torch.cat(outs)


def layer_of(**settings: Any) -> Implementation:
    """Returns the attention of a layer."""
    return Implementation(HEADS, DIM, DIM**-0.5, HEADS_KV, **settings)


def build_of(ranks: int = 1, mode: Any = CUDAGraphMode.NONE, device: Any = "cpu") -> Builder:
    """Returns a builder without an engine, whose graphs hold up to 16 tokens."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1, decode_context_parallel_size=ranks),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        compilation_config=SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=16),
        speculative_config=None,
    )
    return Builder(SimpleNamespace(dcp_sharded=True), ["layer"], config, torch.device(device))


def causal(i: Any, j: Any) -> Any:
    return j <= i


MIXED = ([1, 1, 3, 7], [20, 0, 9, 5])  # decode steps, a speculated chain or chunk, and another chunk
SLOPES = [0.5, 0.25, 0.125, 0.0625]
SINKS = torch.tensor([1.0, -1.0, 0.0, 2.0])
