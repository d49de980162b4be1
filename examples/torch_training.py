"""Trains a four-layer transformer in PyTorch twice: with cuflash, and with PyTorch's scaled_dot_product_attention.

On a GPU it trains in bfloat16 on 4 x 8192 tokens. On the CPU it trains in float32 on 4 x 64 tokens, which takes
minutes. It prints losses and time per step of both, and exits with 1 if the losses differ by more than rounding
explains.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

from packages import explain_missing

with explain_missing():
    import torch
    from torch import nn
    from torch.nn import functional

    from cuflash.frameworks.torch import attention

BATCH, HEADS, HEAD_DIM, LAYERS, TOKENS = 4, 4, 128, 4, 64
COMPARED = 10  # number of first steps whose losses are compared


class Block(nn.Module):  # type: ignore[misc]
    """A block of causal attention and a perceptron, each after a layer norm and inside a residual connection."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.attend = attend
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.norm, wide = nn.LayerNorm(width), 4 * width
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the block's output for x; both are (batch, seqlen, width)."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.mlp(x)


def parameter(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Runs PyTorch's attention, with axes (batch, heads, seqlen, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def train(
    name: str, attend: Any, device: str, dtype: torch.dtype, seqlen: int, steps: int
) -> tuple[list[float], float]:
    """Returns the losses of all steps, and the seconds per step."""
    torch.manual_seed(0)
    width = HEADS * HEAD_DIM
    layers = [Block(attend) for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(TOKENS, width), *layers, nn.Linear(width, TOKENS)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(1)
    cycle = torch.randperm(TOKENS, generator=generator)  # the order of tokens, which the model must learn
    losses, started = [], 0.0
    for step in range(steps):
        if step == steps // 2:
            started = clock(device)
        start = torch.randint(TOKENS, (BATCH, 1), generator=generator)
        tokens = cycle[(start + torch.arange(seqlen + 1)) % TOKENS]
        noise = torch.rand(tokens.shape, generator=generator) < 0.3
        tokens = tokens.where(~noise, torch.randint(TOKENS, tokens.shape, generator=generator)).to(device)
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if (step + 1) % max(1, steps // 10) == 0:
            # Without the loss: reading it makes the host wait for the GPU.
            print(f"{name}: {step + 1} of {steps} steps", flush=True)
    return [float(loss) for loss in losses], (clock(device) - started) / (steps - steps // 2)


def clock(device: str) -> float:
    """Waits for the GPU and returns the time in seconds."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> int:
    """Trains with both and compares the losses."""
    on_gpu = torch.cuda.is_available()
    device, dtype, seqlen, steps = ("cuda", torch.bfloat16, 8192, 50) if on_gpu else ("cpu", torch.float32, 64, 10)
    print(
        f"Training on the {'GPU' if on_gpu else 'CPU'}, {str(dtype).removeprefix('torch.')}, seqlen {seqlen}.",
        flush=True,
    )
    ours, seconds = train("cuflash", functools.partial(attention, causal=True), device, dtype, seqlen, steps)
    theirs, their_seconds = train("PyTorch", parameter, device, dtype, seqlen, steps)
    for name, losses, each in (("cuflash", ours, seconds), ("PyTorch", theirs, their_seconds)):
        print(f"{name}  loss {losses[0]:.3f} … {losses[-1]:.3f}, {each * 1e3:.1f} ms a step")
    # Only the first steps: training amplifies rounding, and later losses differ as much between two equal runs.
    apart = max(abs(x - y) for x, y in zip(ours[:COMPARED], theirs[:COMPARED], strict=True))
    print(f"{their_seconds / seconds:.2f} times as fast; losses of {COMPARED} steps are {apart:.1e} apart.")
    return int(not apart < (2e-2 if on_gpu else 1e-4) or not ours[-1] < ours[0])


if __name__ == "__main__":
    sys.exit(main())
