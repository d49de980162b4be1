"""Generates from a paged cache, and checks its log-probabilities against a training forward: bit for bit on a GPU.

A small decoder with random weights reads packed prompts and then generates token by token. On a GPU, with CuPy arrays,
each step replays a CUDA graph that is captured once. On the CPU, with NumPy arrays, the bits of a row may depend on the
other rows of a call, so log-probabilities are only close. It exits with 1 if they are not equal, or not close.
"""

import functools
import sys
from typing import Any

import numpy as np

import cuflash

LAYERS, WIDTH, HEADS, HEADS_KV, HEAD_DIM, HIDDEN, VOCAB = 3, 256, 4, 2, 64, 512, 256
PROMPTS, PAGE = [5, 130, 1, 260], 16  # tokens of each prompt; keys of a page
SPLIT = 128  # split_size, keys of a split: with a fixed one, a row of attention has the same bits in all calls
# x (rows, n) times w (n, m): one thread for each element of y adds products from first to last.
PRODUCT = "float sum = 0; for (int k = 0; k < n; ++k) sum += x[i / m * n + k] * w[k * m + i % m]; y = sum;"
KERNEL = "raw float32 x, raw float32 w, int32 n, int32 m", "float32 y", PRODUCT, "product_by_rows"


class Decoder:
    """A decoder of grouped-query attention and perceptrons, each after an RMSNorm, with random weights."""

    def __init__(self, xp: Any, positions: int) -> None:
        self.xp, self.product = xp, None if xp is np else xp.ElementwiseKernel(*KERNEL)
        self.dtype = "float32" if xp is np else "float16"  # of q, k and v
        rng, heads, heads_kv = np.random.default_rng(0), HEADS * HEAD_DIM, HEADS_KV * HEAD_DIM
        shapes = {"q": (WIDTH, heads), "k": (WIDTH, heads_kv), "v": (WIDTH, heads_kv), "o": (heads, WIDTH)}
        shapes |= {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "first": (VOCAB, WIDTH), "last": (WIDTH, VOCAB)}
        drawn = [{name: rng.normal(0, x[0] ** -0.5, x) for name, x in shapes.items()} for _ in range(LAYERS)]
        self.weights = [{name: xp.asarray(x, "float32") for name, x in layer.items()} for layer in drawn]
        self.ones, self.mean = xp.ones((VOCAB, 1), "float32"), xp.full((WIDTH, 1), 1 / WIDTH, "float32")
        angles = np.outer(np.arange(positions), 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM))
        self.cos, self.sin = xp.asarray(np.cos(angles), "float32"), xp.asarray(np.sin(angles), "float32")

    def times(self, x: Any, w: Any) -> Any:
        # Not x @ w: the order of sums in a library's matrix product depends on the number of rows, and a decode step
        # has fewer rows than a training step. Here each row is computed independently of the others.
        if self.product is None:
            return (x[:, None] @ w)[:, 0]
        return self.product(x, w, *w.shape, self.xp.empty((len(x), w.shape[1]), "float32"))

    def norm(self, x: Any) -> Any:
        return x / self.xp.sqrt(self.times(x * x, self.mean) + 1e-5)

    def logits(self, tokens: Any, attend: Any) -> Any:
        """Returns logits (rows, VOCAB) of tokens (rows,). Only attend(layer, q, k, v) mixes rows."""
        x, times = self.weights[0]["first"][tokens], self.times
        for layer, w in enumerate(self.weights):
            y = self.norm(x)
            q, k, v = (times(y, w[name]).reshape(len(x), -1, HEAD_DIM).astype(self.dtype) for name in "qkv")
            x = x + times(attend(layer, q, k, v).reshape(len(x), -1).astype("float32"), w["o"])
            x = x + times(self.xp.maximum(times(self.norm(x), w["up"]), 0), w["down"])
        return times(self.norm(x), w["last"])

    def log_probs(self, logits: Any, tokens: Any) -> Any:
        logits = logits - logits.max(axis=1, keepdims=True)
        logits -= self.xp.log(self.times(self.xp.exp(logits), self.ones))
        return self.xp.take_along_axis(logits, tokens[:, None], 1)[:, 0]


def generate(model: Decoder, tokens: Any, count: int, stream: Any) -> Any:
    """Writes `count` tokens behind each prompt in its row of tokens; returns log_probs in the shape of tokens."""
    xp, (batch, most), num_pages = model.xp, tokens.shape, sum(-(-(length + count) // PAGE) for length in PROMPTS)
    # All state changes in place on the device, so that one captured graph serves every step.
    caches = xp.full((LAYERS, 2, num_pages, PAGE, HEADS_KV, HEAD_DIM), np.nan, model.dtype)
    table, taken = xp.full((batch, -(-most // PAGE)), -1, "int32"), xp.zeros((), "int64")
    used, newest, log_probs = xp.zeros(batch, "int32"), xp.zeros(batch, "int64"), xp.zeros((batch, most), "float32")
    noise = xp.asarray(np.random.default_rng(1).gumbel(size=(most, VOCAB)), "float32")

    def extend(new: Any, cu: Any) -> None:
        """Reads packed tokens, cu[b] … cu[b + 1] - 1 of sequence b, and draws the next token of each sequence."""
        lengths = used + cu[1:] - cu[:-1]
        lacks = (xp.arange(table.shape[1]) * PAGE < lengths[:, None]) & (table < 0)  # True for each page to allocate
        table[...] = xp.where(lacks, taken + xp.cumsum(lacks, dtype="int64").reshape(lacks.shape) - 1, table)
        taken[...] += lacks.sum()

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            k_pages, v_pages = caches[layer, 0], caches[layer, 1]
            q = cuflash.append_kv(k_pages, v_pages, k, v, used, page_table=table, cu_seqlens_k=cu, q=q, cu_seqlens_q=cu,
                                  rotary_cos=model.cos, rotary_sin=model.sin)  # fmt: skip
            return cuflash.forward(q, k_pages, v_pages, causal=True, cu_seqlens_q=cu, page_table=table,
                                   seqused_k=lengths, split_size=SPLIT)  # fmt: skip

        logits = model.logits(new, attend)[cu[1:] - 1]
        newest[...] = (logits + noise[lengths]).argmax(axis=1)  # a draw from softmax(logits)
        here = xp.arange(most) == lengths[:, None]
        tokens[...] = xp.where(here, newest[:, None], tokens)
        log_probs[...] = xp.where(here, model.log_probs(logits, newest)[:, None], log_probs)
        used[...] = lengths

    extend(xp.concatenate([tokens[b, :n] for b, n in enumerate(PROMPTS)]), xp.asarray(np.cumsum([0, *PROMPTS]), "i4"))
    step = functools.partial(extend, newest, xp.arange(batch + 1, dtype="int32"))
    step()  # compiles the kernels, which is impossible during a capture
    if stream is not None:
        memory = xp.cuda.MemoryPool()  # memory for the graph alone
        with xp.cuda.using_allocator(memory.malloc):
            stream.begin_capture()
            step()
            step = functools.partial(stream.end_capture().launch, stream)
    for _ in range(count - 2):
        step()
    if stream is not None:
        stream.synchronize()  # the graph and its memory are freed at the return
    return log_probs


def in_training(model: Decoder, sequences: list[Any]) -> Any:
    """Returns the log-probability of every token but the first of each sequence, by one packed forward."""
    xp, cu = model.xp, model.xp.asarray(np.cumsum([0, *(len(tokens) - 1 for tokens in sequences)]), "int32")
    rows = xp.concatenate([xp.arange(len(tokens) - 1) for tokens in sequences])

    def rope(x: Any) -> Any:  # as in append_kv: computed in float32, rounded once
        (a, b), cos, sin = xp.split(x.astype("float32"), 2, axis=2), model.cos[rows, None], model.sin[rows, None]
        return xp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=2).astype(x.dtype)

    def attend(_: int, q: Any, k: Any, v: Any) -> Any:
        return cuflash.forward(rope(q), rope(k), v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, split_size=SPLIT)

    logits = model.logits(xp.concatenate([tokens[:-1] for tokens in sequences]), attend)
    return model.log_probs(logits, xp.concatenate([tokens[1:] for tokens in sequences]))


def main(count: int = 100, xp: Any = np, stream: Any = None) -> int:
    """Generates `count` tokens for each prompt, runs the training forward, and compares."""
    shape, most = (1, 1, HEADS, HEAD_DIM), max(PROMPTS) + max(count, 2)
    try:
        if cuflash.plan(shape, shape, shape, dtype="float16").device != "cpu":
            import cupy

            xp, stream = cupy, cupy.cuda.Stream(non_blocking=True)  # the default stream captures no graph
            stream.use()
    except cuflash.UnsupportedError as error:
        print(error)
    print(f"Generating {count} tokens behind each of {len(PROMPTS)} prompts on the {'CPU' if xp is np else 'GPU'}.")
    model, tokens = Decoder(xp, most), xp.asarray(np.random.default_rng(2).integers(VOCAB, size=(len(PROMPTS), most)))
    log_probs = generate(model, tokens, count, stream)
    packed = in_training(model, [tokens[b, : length + count] for b, length in enumerate(PROMPTS)])
    trained = xp.stack([packed[end - count : end] for end in np.cumsum([n + count - 1 for n in PROMPTS])])
    drawn = xp.stack([log_probs[b, length : length + count] for b, length in enumerate(PROMPTS)])
    apart = float(abs(trained - drawn).max())
    if xp is np:  # equal bits are not promised on the CPU
        print(f"Log-probabilities in training: all {drawn.size} are at most {apart:.1e} apart.")
        return int(not apart < 1e-4)
    equal = int((trained == drawn).sum())
    print(f"Log-probabilities in training: {equal} of {drawn.size} are bitwise equal, all at most {apart:.1e} apart.")
    return int(equal < drawn.size)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
