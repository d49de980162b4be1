"""A causal attention layer that learns to recall, by plain SGD on `cuflash.forward` and `cuflash.backward`.

Every sequence repeats 8 tokens in a random order, so the next token follows only from an earlier repetition. It runs on
a GPU with CuPy arrays if there is one, else on the CPU with NumPy arrays. It exits with 1 if the loss has not fallen to
a fifth.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import cuflash

BATCH, SEQLEN, HEADS, HEAD_DIM, TOKENS = 32, 64, 2, 16, 8
RATE = 4.0


def main(steps: int = 150) -> int:
    """Trains, prints the loss, and returns the exit code."""
    xp = find_library()
    rng = np.random.default_rng(0)
    shapes = {"q": (2 * TOKENS, HEADS * HEAD_DIM), "k": (2 * TOKENS, HEADS * HEAD_DIM)}
    shapes |= {"v": (2 * TOKENS, HEADS * HEAD_DIM), "o": (HEADS * HEAD_DIM, TOKENS)}
    weights = {name: xp.asarray(rng.normal(0, shape[0] ** -0.5, shape), "float32") for name, shape in shapes.items()}
    losses = []
    for step in range(steps + 1):
        loss, gradients = loss_and_gradients(xp, weights, *(xp.asarray(x) for x in sequences(rng)))
        for name, gradient in gradients.items():
            weights[name] -= RATE * gradient
        losses.append(loss)
        if step % 15 == 0:
            print(f"step {step:4} loss {loss:.3f}")
    print(f"The loss has fallen {losses[0] / losses[-1]:.1f} times.")
    return int(not losses[-1] < losses[0] / 5)


def find_library() -> Any:
    """Returns CuPy if attention and matrix products run on a GPU through it, else NumPy."""
    shape = (BATCH, SEQLEN, HEADS, HEAD_DIM)
    try:
        if cuflash.plan(shape, shape, shape, op="backward", dtype="float32", causal=True).device != "cpu":
            import cupy

            cupy.ones((1, 1)) @ cupy.ones((1, 1))  # raises ImportError without cuBLAS: pip install nvidia-cublas
            print("Training on the GPU with CuPy arrays.")
            return cupy
    except (ImportError, cuflash.UnsupportedError) as error:
        print(error)
    print("Training on the CPU with NumPy arrays.")
    return np


def sequences(rng: np.random.Generator) -> tuple[Any, Any]:
    """Returns each token with its predecessor, (batch, seqlen, 2 tokens), and the next one, (batch, seqlen, tokens)."""
    order = rng.permuted(np.tile(np.arange(TOKENS), (BATCH, 1)), axis=1)
    one_hot = np.eye(TOKENS, dtype=np.float32)[np.tile(order, SEQLEN // TOKENS + 1)]
    before, now, after = (np.roll(one_hot, shift, axis=1)[:, :SEQLEN] for shift in (1, 0, -1))
    return np.concatenate([before, now], axis=2), after


def loss_and_gradients(xp: Any, weights: dict[str, Any], x: Any, target: Any) -> tuple[float, dict[str, Any]]:
    """Returns the cross-entropy of predictable next tokens, and its gradient with respect to every weight."""
    q, k, v = ((x @ weights[name]).reshape(BATCH, SEQLEN, HEADS, HEAD_DIM) for name in "qkv")
    out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    logits = out.reshape(BATCH, SEQLEN, -1) @ weights["o"]
    p = xp.exp(logits - logits.max(axis=2, keepdims=True))
    p /= p.sum(axis=2, keepdims=True)
    predictable = slice(TOKENS, None)  # the first occurrence of a token does not determine the next one
    loss = -xp.log((p * target).sum(axis=2))[:, predictable].mean()

    dlogits = (p - target) / (BATCH * (SEQLEN - TOKENS))
    dlogits[:, :TOKENS] = 0
    dout = (dlogits @ weights["o"].T).reshape(out.shape)
    dq, dk, dv = cuflash.backward(dout, q, k, v, out, lse, causal=True)
    gradients = {name: flat(x).T @ flat(d) for name, d in (("q", dq), ("k", dk), ("v", dv))}
    return float(loss), gradients | {"o": flat(out).T @ flat(dlogits)}


def flat(x: Any) -> Any:
    """Returns x as one row for each token of each sequence."""
    return x.reshape(BATCH * SEQLEN, -1)


if __name__ == "__main__":
    sys.exit(main())
