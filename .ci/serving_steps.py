"""A layer of vLLM's backend on one GPU: `serving_steps.py [--cpu]`, --cpu to try it out. Needs vLLM's Python code.

Prints the host's time of a layer beside `cuflash.forward`; a CUDA graph captured at short lengths and replayed at long
ones; mixed batches in one call and in two; and caches as engines lay them out, beside arrays of keys and values.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rank_steps import DEVICE, ON_CPU, host_seconds, medians, seconds  # puts the checkout on the path, too
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata

import cuflash
from cuflash.frameworks.vllm.implementation import Implementation
from cuflash.frameworks.vllm.metadata import Builder, Metadata

HEADS, HEADS_KV, DIM = 32, 8, 128
LAYERS = 1 if ON_CPU else 32
MOST_ADDED = 10e-6  # seconds of a layer over `cuflash.forward`
SHORTER = 64 if ON_CPU else 1  # lengths are divided by it
# New tokens and cached ones of each sequence.
DECODE = [(1, 1000 + 37 * number) for number in range(64)]
MIXED = {
    "60 decodes of 2k, 4 chunks of 512": [(1, 2048)] * 60 + [(512, 2048)] * 4,
    "250 decodes of 1k, a chunk of 2k": [(1, 1024)] * 250 + [(2048, 0)],
    "16 decodes of 16k, a chunk of 512": [(1, 16384)] * 16 + [(512, 4096)],
    "8 decodes of 4k, 8 prompts of 1k": [(1, 4096)] * 8 + [(1024, 0)] * 8,
}  # fmt: skip


class Whole(Builder):
    """A builder of one call for a mixed batch."""

    def _split(self, metadata: Metadata, common: Any) -> None:
        pass


class Batch(NamedTuple):
    """One layer's arrays, vLLM's metadata, and what the layer writes to."""

    arrays: list[torch.Tensor]  # q, k and v of the new tokens, and the cache
    common: Any
    out: torch.Tensor

    @classmethod
    def drawn(cls, sequences: list[tuple[int, int]], page_size: int = 16) -> Batch:
        """Draws a batch with pages in random order. sequences: new tokens and cached ones."""
        sequences = [(-(-new // SHORTER), cached // SHORTER) for new, cached in sequences]
        queries, lengths = [new for new, _ in sequences], [new + cached for new, cached in sequences]
        width = -(-max(lengths) // page_size)
        table = torch.randperm(len(sequences) * width).view(len(sequences), width)
        starts = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(DEVICE), query_start_loc_cpu=starts, seq_lens=seq_lens.to(DEVICE),
            num_reqs=len(sequences), num_actual_tokens=sum(queries), max_query_len=max(queries),
            max_seq_len=max(lengths), block_table_tensor=table.to(DEVICE, torch.int32),
            slot_mapping=torch.zeros(sum(queries), dtype=torch.int64, device=DEVICE),
            seq_lens_cpu_upper_bound=seq_lens,
        )  # fmt: skip
        shapes = [(sum(queries), heads, DIM) for heads in (HEADS, HEADS_KV, HEADS_KV)]
        shapes.append((table.numel(), HEADS_KV, page_size, 2 * DIM))
        arrays = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]
        return cls(arrays, common, torch.empty_like(arrays[0]))

    def layer(self, data: Metadata) -> torch.Tensor:
        """Runs the backend's layer."""
        result: torch.Tensor = LAYER.forward(None, *self.arrays, data, self.out)
        return result

    def forward(self, k: torch.Tensor, v: torch.Tensor) -> Any:
        """Calls `cuflash.forward` over keys and values (pages, page size, heads, dim)."""
        common = self.common
        return cuflash.forward(
            self.arrays[0], k, v, out=self.out, cu_seqlens_q=common.query_start_loc, seqused_k=common.seq_lens,
            page_table=common.block_table_tensor, max_seqlen_q=common.max_query_len, max_seqlen_k=common.max_seq_len,
            softmax_scale=DIM**-0.5, causal=True,
        )  # fmt: skip

    @property
    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the cache, as the backend reads them."""
        k, v = self.arrays[3].transpose(1, 2).split(DIM, -1)
        return k, v


LAYER = Implementation(HEADS, DIM, DIM**-0.5, HEADS_KV)


def builder_of(kind: type[Builder] = Builder, mode: Any = CUDAGraphMode.NONE) -> Builder:
    """Returns a builder without an engine."""
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1, decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=256),
        compilation_config=SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=256),
        speculative_config=None,
    )
    return kind(SimpleNamespace(dcp_sharded=False), ["layer"], config, torch.device(DEVICE))


def print_host_times() -> None:
    """Prints the host's time of a layer in a decode step."""
    batch, builder = Batch.drawn(DECODE), builder_of()
    data = builder.build(0, batch.common)

    def layers(call: Any) -> None:
        for _ in range(LAYERS):
            call()

    calls = {
        "cuflash.forward": partial(layers, partial(batch.forward, *batch.views)),
        "the layer": partial(layers, partial(batch.layer, data)),
        "metadata": partial(layers, partial(builder.build, 0, batch.common)),
    }
    times = {name: each / LAYERS for name, each in medians(host_seconds, calls).items()}
    print(f"\nhost, µs, of a decode step of {len(DECODE)} sequences")
    for name, each in times.items():
        is_above = name == "the layer" and each > times["cuflash.forward"] + MOST_ADDED
        print(f"{name:16} {each * 1e6:8.1f}{'  ABOVE' * is_above}", flush=True)


def print_graphs() -> None:
    """Prints if a graph captured at a length of 1 gives the bits of a call at full lengths, and its time."""
    batch = Batch.drawn(DECODE)
    data = builder_of(mode=CUDAGraphMode.FULL).build_for_cudagraph_capture(batch.common)
    correct = batch.layer(data).clone()
    lengths = batch.common.seq_lens.clone()
    replay = partial(batch.layer, data)
    if not ON_CPU:
        batch.common.seq_lens.fill_(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            batch.layer(data)
        batch.common.seq_lens.copy_(lengths)
        replay = graph.replay
    batch.out.fill_(torch.nan)
    replay()
    same = torch.equal(batch.out, correct)
    times = medians(seconds, {"graph": replay, "call": partial(batch.layer, data)})
    print(f"\ngraph, captured at length 1: {'equal' if same else 'OTHER'} bits; {times['graph'] * 1e6:.1f} µs, "
          f"without a graph {times['call'] * 1e6:.1f}", flush=True)  # fmt: skip


def print_mixed() -> None:
    """Prints times of mixed batches in one call and in two."""
    print("\nmixed batches, µs              one call       two     ratio")
    for name, sequences in MIXED.items():
        batch = Batch.drawn(sequences)
        calls = {kind: partial(batch.layer, builder_of(kind).build(0, batch.common)) for kind in (Whole, Builder)}
        one, two = medians(seconds, calls).values()
        print(f"{name:34} {one * 1e6:8.1f} {two * 1e6:8.1f} {two / one:8.2f}", flush=True)


def print_layouts() -> None:
    """Prints times over caches as engines lay them out, beside arrays of keys and of values."""
    print("\ncaches, µs                    arrays of pages    vLLM's cache    pages of one slot")
    cases = {"64 decodes of 1k to 3k": DECODE, "4 prompts of 2k after 2k": [(2048, 2048)] * 4}
    for name, sequences in cases.items():
        batch, slots = Batch.drawn(sequences), Batch.drawn(sequences, 1)
        calls = {
            "arrays": partial(batch.forward, *(x.contiguous() for x in batch.views)),
            "views": partial(batch.forward, *batch.views),
            "slots": partial(slots.forward, *(x.contiguous() for x in slots.views)),
        }
        print(f"{name:28}", *(f"{each * 1e6:16.1f}" for each in medians(seconds, calls).values()), flush=True)


def main() -> None:
    torch.manual_seed(0)
    print_host_times()
    print_graphs()
    print_mixed()
    print_layouts()


if __name__ == "__main__":
    main()
