"""A causal attention layer in JAX that learns to recall, by plain SGD through `cuflash.frameworks.jax.attention`.

Every sequence repeats 8 tokens in a random order, so the next token follows only from an earlier repetition. The whole
run is one jitted scan. It runs on a GPU if JAX and CuPy can use one, else on the CPU with NumPy arrays. It exits with 1
if the loss has not fallen to a fifth.
"""

from __future__ import annotations

import sys
from typing import Any

from packages import explain_missing

import cuflash

with explain_missing():
    import jax
    import jax.numpy as jnp

    from cuflash.frameworks.jax import attention

BATCH, SEQLEN, HEADS, HEAD_DIM, TOKENS = 32, 64, 2, 16, 8
RATE = 4.0


def main(steps: int = 150) -> int:
    """Trains, prints the loss, and returns the exit code."""
    with jax.default_device(find_device()):
        losses = train(jax.random.key(0), steps)
        for step in range(0, steps + 1, 15):
            print(f"step {step:4} loss {losses[step]:.3f}")
    print(f"The loss has fallen {losses[0] / losses[-1]:.1f} times.")
    return int(not losses[-1] < losses[0] / 5)


def find_device() -> Any:
    """Returns a GPU that cuflash and JAX can use, else the CPU."""
    shape = (BATCH, SEQLEN, HEADS, HEAD_DIM)
    try:
        if cuflash.plan(shape, shape, shape, op="backward", dtype="float32", causal=True).device != "cpu":
            device = jax.local_devices(backend="cuda")[0]
            print("Training on the GPU with JAX arrays.")
            return device
    except (RuntimeError, cuflash.UnsupportedError) as error:  # JAX has no GPU, or cuflash has none
        print(error)
    print("Training on the CPU with NumPy arrays under JAX.")
    return jax.local_devices(backend="cpu")[0]


def train(key: Any, steps: int) -> Any:
    """Trains by SGD; returns the loss of every step."""
    width = HEADS * HEAD_DIM
    shapes = {"q": (2 * TOKENS, width), "k": (2 * TOKENS, width), "v": (2 * TOKENS, width), "o": (width, TOKENS)}
    keys = jax.random.split(key, len(shapes))
    weights = {
        name: shape[0] ** -0.5 * jax.random.normal(each, shape)
        for each, (name, shape) in zip(keys, shapes.items(), strict=True)
    }

    def step(weights: dict[str, Any], key: Any) -> tuple[dict[str, Any], Any]:
        value, gradients = jax.value_and_grad(loss)(weights, *sequences(key))
        return jax.tree.map(lambda w, g: w - RATE * g, weights, gradients), value

    return jax.jit(lambda w, k: jax.lax.scan(step, w, k)[1])(weights, jax.random.split(key, steps + 1))


def sequences(key: Any) -> tuple[Any, Any]:
    """Returns each token with its predecessor, (batch, seqlen, 2 tokens), and the next one, (batch, seqlen, tokens)."""
    order = jax.vmap(lambda k: jax.random.permutation(k, TOKENS))(jax.random.split(key, BATCH))
    one_hot = jnp.tile(jax.nn.one_hot(order, TOKENS), (1, SEQLEN // TOKENS + 1, 1))
    before, now, after = (jnp.roll(one_hot, shift, axis=1)[:, :SEQLEN] for shift in (1, 0, -1))
    return jnp.concatenate([before, now], axis=2), after


def loss(weights: dict[str, Any], x: Any, target: Any) -> Any:
    """Returns the cross-entropy of predictable next tokens."""
    q, k, v = ((x @ weights[name]).reshape(BATCH, SEQLEN, HEADS, HEAD_DIM) for name in "qkv")
    out = attention(q, k, v, causal=True)
    logits = out.reshape(BATCH, SEQLEN, -1) @ weights["o"]
    predictable = slice(TOKENS, None)  # the first occurrence of a token does not determine the next one
    return -(target * jax.nn.log_softmax(logits)).sum(axis=2)[:, predictable].mean()


if __name__ == "__main__":
    sys.exit(main())
