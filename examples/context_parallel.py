"""Trains a transformer on packed documents that several processes share, and compares the losses with one process.

    python examples/context_parallel.py [--ranks 4] [--steps 5]

Every process holds a part of the rows (context parallelism). On a machine with as many GPUs as ranks it uses NCCL, else
gloo on the CPU. It exits with 1 if the losses differ by more than rounding explains.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from packages import explain_missing

with explain_missing():
    import torch
    from torch import distributed as dist
    from torch import multiprocessing, nn
    from torch.nn import functional

    from cuflash.distributed import Layout, attention

CU_SEQLENS = [0, 200, 210, 387, 512]  # bounds of four documents
HEADS, HEAD_DIM, LAYERS, TOKENS = 4, 16, 2, 64


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Applies rotary embedding to (batch, rows, heads, head_dim) by the rows' positions in their documents."""
    frequencies = 1e4 ** (-torch.arange(HEAD_DIM // 2, device=x.device) / (HEAD_DIM // 2))
    angles = (positions[:, None] * frequencies)[:, None]
    even, odd = x.chunk(2, -1)
    return torch.cat([even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()], -1)


class Layer(nn.Module):  # type: ignore[misc]
    """A layer of causal attention and a perceptron, each after a layer norm and inside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.norm, wide = nn.LayerNorm(width), 4 * width
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Returns the output for this rank's rows x (1, rows, width)."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        q, k = rotate(q, positions), rotate(k, positions)
        x = x + self.out(attention(q, k, v, layout=layout, causal=True).flatten(2))
        return x + self.mlp(x)


def train(layout: Layout, device: str, steps: int) -> list[float]:
    """Returns the losses of all steps."""
    torch.manual_seed(0)
    embedding, layers, head = (
        nn.Embedding(TOKENS, HEADS * HEAD_DIM),
        nn.ModuleList(),
        nn.Linear(HEADS * HEAD_DIM, TOKENS),
    )
    layers.extend(Layer() for _ in range(LAYERS))
    model = nn.ModuleList([embedding, layers, head]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(TOKENS, (1, layout.seqlen), generator=torch.Generator().manual_seed(1))
    mine, targets = (layout.shard(x, dim=1).to(device) for x in (tokens, tokens.roll(-1, 1)))
    positions = torch.from_numpy(layout.positions()).to(device)
    losses = []
    for _ in range(steps):
        x = embedding(mine)
        for layer in layers:
            x = layer(x, positions, layout)
        # The mean over all rows: ranks may hold different numbers of them.
        loss = functional.cross_entropy(head(x).flatten(0, 1), targets.flatten(), reduction="sum") / layout.seqlen
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses


def run_rank(rank: int, ranks: int, steps: int, device: str, folder: str) -> None:
    """Runs one process of the group; rank 0 writes the losses to a file."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store-{ranks}", ranks)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=ranks)
    losses = train(Layout(CU_SEQLENS, dist.group.WORLD), device, steps)
    if rank == 0:
        Path(folder, f"losses-{ranks}").write_text(" ".join(map(repr, losses)), "ascii")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Trains twice; returns 1 if the losses differ."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="processes that share the sequence (4)")
    parser.add_argument("--steps", type=int, default=5, help="steps of the optimizer (5)")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.device_count() >= options.ranks else "cpu"
    losses: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, options.ranks):
            arguments = (ranks, options.steps, device, folder)
            multiprocessing.spawn(run_rank, arguments, nprocs=ranks)
            losses[ranks] = [float(text) for text in Path(folder, f"losses-{ranks}").read_text("ascii").split()]
            where = f"{ranks} GPUs" if device == "cuda" else "the CPU"
            print(f"{ranks} ranks on {where}: losses", *(f"{loss:.5f}" for loss in losses[ranks]))
    worst = max(abs(a - b) for a, b in zip(*losses.values(), strict=True)) if len(losses) > 1 else 0.0
    print(f"largest difference {worst:.1g}")
    return int(not worst < 1e-3)


if __name__ == "__main__":
    sys.exit(main())
