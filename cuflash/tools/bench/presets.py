"""The presets of the benchmark.

The problems of `models` have the heads, head dims and lengths of published configurations. The docstrings of the
preset functions are texts of `bench --help`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ...testing.arrays import NumpyArrays
from ...testing.cases import Case
from .mods import FUNCTIONS, ModCase

TOKENS = 16384  # batch x seqlen of a problem of `paper`
HIDDEN = 2048  # heads x head_dim
FLOAT32_SEQLENS = (8192, 65536)  # the score matrix fits into memory only at the first
FLOAT32_HEADS = 16
BOTH = ("forward", "backward")
FORWARD = BOTH[:1]


class Timed(NamedTuple):
    """A problem and the op to time on it."""

    op: str
    case: Case


class Model(NamedTuple):
    """A call of a model. lengths, heads, dims: one number for both, or a pair: q and k, or for dims q (and k) and v."""

    name: str
    batch: int
    lengths: int | tuple[int, int]
    heads: int | tuple[int, int]
    dims: int | tuple[int, int]
    causal: bool = False
    window: int = -1  # keys to the left, and without a causal mask to the right, too
    softcap: float = 0.0
    ops: tuple[str, ...] = BOTH

    def case(self, dtype: str) -> Case:
        """Returns the problem in this dtype."""
        pairs = (x if isinstance(x, tuple) else (x, x) for x in (self.lengths, self.heads, self.dims))
        (seqlen_q, seqlen_k), (heads_q, heads_kv), (dim, dim_v) = pairs
        window = self.window, 0 if self.causal and self.window >= 0 else self.window
        return Case(self.name, self.batch, seqlen_q, seqlen_k, heads_q, heads_kv, dim, dim_v, dtype, self.causal,
                    window, softcap=self.softcap)  # fmt: skip


def _training(name: str, batch: int, length: int, heads: Any, dims: Any, **more: Any) -> Model:
    return Model(f"{name}, training", batch, length, heads, dims, causal=True, **more)


def _prefill(name: str, length: int, heads: Any, dims: Any, **more: Any) -> Model:
    return Model(f"{name}, prefill", 1, length, heads, dims, causal=True, ops=FORWARD, **more)


MODELS = (
    # language models, in training
    _training("GPT-2 small", 16, 1024, 12, 64),
    _training("GPT-2 XL", 8, 1024, 25, 64),
    _training("GPT-3 175B", 2, 2048, 96, 128),
    _training("OPT 6.7B", 8, 2048, 32, 128),
    _training("Pythia 1B", 8, 2048, 8, 256),
    _training("Falcon 7B", 4, 2048, (71, 1), 64),
    _training("Phi-2", 8, 2048, 32, 80),
    _training("Llama 2 7B", 4, 4096, 32, 128),
    _training("Llama 2 70B", 2, 4096, (64, 8), 128),
    _training("Llama 3 8B", 2, 8192, (32, 8), 128),
    _training("Llama 3.1 405B", 1, 8192, (128, 8), 128),
    _training("Llama 3.2 1B", 2, 8192, (32, 8), 64),
    _training("Mistral 7B", 2, 8192, (32, 8), 128, window=4095),
    _training("Gemma 2B", 2, 8192, (8, 1), 256),
    _training("Gemma 2 9B, local", 2, 8192, (16, 8), 256, window=4095, softcap=50.0),
    _training("Gemma 2 27B", 1, 8192, (32, 16), 128, softcap=50.0),
    _training("Gemma 3 4B, local", 2, 8192, (8, 4), 256, window=1023),
    _training("Qwen2.5 0.5B", 8, 4096, (14, 2), 64),
    _training("Qwen2.5 7B", 2, 4096, (28, 4), 128),
    _training("Qwen3 32B", 1, 4096, (64, 8), 128),
    _training("Phi-3 mini", 4, 4096, 32, 96, window=2046),
    _training("Phi-3 mini 128k", 4, 4096, 32, 96),
    _training("DeepSeek-V3", 1, 4096, 128, (192, 128)),
    _training("gpt-oss 20B, local", 2, 4096, (64, 8), 64, window=127),
    _training("OLMo 2 7B", 4, 4096, 32, 128),
    _training("SmolLM2 135M", 8, 2048, (9, 3), 64),
    _training("StarCoder", 1, 8192, (48, 1), 128),
    # language models, prompts
    _prefill("Llama 3.1 8B", 131072, (32, 8), 128),
    _prefill("Llama 3.1 70B", 32768, (64, 8), 128),
    _prefill("Mixtral 8x7B", 32768, (32, 8), 128),
    _prefill("Qwen2.5 72B", 32768, (64, 8), 128),
    _prefill("Phi-4", 16384, (40, 10), 128),
    _prefill("Command R+", 16384, (96, 8), 128),
    _prefill("GLM-4 9B", 8192, (32, 2), 128),
    _prefill("Yi 34B", 777, (56, 8), 128),
    _prefill("Llama 3.2 3B", 333, (24, 8), 128),
    _prefill("Llama 3.1 8B, short", 128, (32, 8), 128),
    Model("Llama 3 8B, 512 new of 8k tokens", 4, (512, 8192), (32, 8), 128, causal=True, ops=FORWARD),
    # encoders of text and proteins
    Model("BERT base", 32, 512, 12, 64),
    Model("BERT large", 16, 384, 16, 64),
    Model("BERT base, a text of 1k", 1, 1024, 12, 64),
    Model("ModernBERT base, local", 4, 8192, 12, 64, window=64),
    Model("ModernBERT base, global", 4, 8192, 12, 64),
    Model("ESM-2 650M", 8, 1022, 20, 64),
    Model("ESM-2 15B", 4, 1022, 40, 128),
    # images
    Model("ViT-B/16", 128, 197, 12, 64),
    Model("ViT-L/14 at 336", 32, 577, 16, 64),
    Model("DINOv2 g/14", 16, 1370, 24, 64),
    Model("SigLIP So400m", 32, 729, 16, 72),
    Model("Swin-T, windows of 49", 4096, 49, 3, 32),
    Model("SwinV2-T, windows of 64", 4096, 64, 3, 32),
    Model("SwinV2-B, windows of 256", 512, 256, 4, 32),
    Model("InternViT 6B", 8, 1025, 25, 128),
    # diffusion of images and video
    Model("Stable Diffusion 1.5", 8, 4096, 8, 40),
    Model("Stable Diffusion 1.5, text", 8, (4096, 77), 8, 40),
    Model("SDXL", 4, 4096, 10, 64),
    Model("SDXL, inner", 4, 1024, 20, 64),
    Model("Stable Diffusion 3.5 large", 2, 4429, 38, 64),
    Model("FLUX.1", 2, 4608, 24, 128),
    Model("PixArt", 4, 4096, 16, 72),
    Model("CogVideoX 5B", 1, 17776, 48, 64, ops=FORWARD),
    Model("Mochi 1", 1, 44776, 24, 128, ops=FORWARD),
    Model("Wan2.1 14B", 1, 75600, 40, 128, ops=FORWARD),
    Model("HunyuanVideo", 1, 119056, 24, 128, ops=FORWARD),
    # speech
    Model("Whisper large, sound", 16, 1500, 20, 64),
    Model("Whisper large, text to sound", 16, (448, 1500), 20, 64),
    Model("wav2vec 2.0 large", 16, 1499, 16, 64),
    # structure prediction: rows of an alignment, and tokens
    Model("Evoformer, rows", 512, 384, 8, 32),
    Model("AlphaFold 3, diffusion", 4, 768, 16, 48),
)
# Batch, cached keys, heads of q, of kv, head dim: one new query for each sequence.
DECODING = (
    *((batch, keys, 32, 8, 128) for batch, keys in ((1, 4096), (1, 32768), (1, 131072), (16, 4096), (64, 4096))),
    *((batch, keys, 64, 8, 128) for batch, keys in ((1, 32768), (16, 8192), (128, 2048))),
    (8, 8192, 16, 1, 128),
    *((batch, keys, 32, 32, 128) for batch, keys in ((1, 4096), (16, 2048))),
    *((batch, keys, 64, 8, 64) for batch, keys in ((1, 8192), (32, 8192))),
    *((batch, keys, 8, 1, 256) for batch, keys in ((1, 8192), (32, 8192))),
)


def grid(
    arrays: NumpyArrays, options: argparse.Namespace, seqlens: tuple[int, ...], masks: tuple[bool, ...] = (False, True)
) -> list[Timed]:
    """Returns a grid of head dims, masks and lengths with a constant number of tokens, as in papers of the field."""
    on_gpu = arrays.on_gpu
    tokens, width = (TOKENS, HIDDEN) if on_gpu else (2048, 256)
    dtype = _dtype(arrays, options)
    return [
        Timed(op, square(max(1, tokens // seqlen), seqlen, max(1, width // head_dim), head_dim, dtype, causal))
        for op in options.ops or BOTH
        for head_dim in options.head_dims or ((64, 128, 256) if on_gpu else (64,))
        for causal in (masks if options.causal is None else (options.causal,))
        for seqlen in options.seqlens or seqlens
    ]


def paper(arrays: NumpyArrays, options: argparse.Namespace) -> list[Timed]:
    """Speed by head dim, mask and length, as in papers, and of float32 with scores too large for memory."""
    seqlens = (512, 1024, 2048, 4096, 8192, 16384) if arrays.on_gpu else (512, 2048)
    return grid(arrays, options, seqlens) + _of_float32(arrays, options, FLOAT32_SEQLENS)


def quick(arrays: NumpyArrays, options: argparse.Namespace) -> list[Timed]:
    """Speed at one length under a causal mask, by head dim, in less than a minute."""
    cases = grid(arrays, options, (4096,) if arrays.on_gpu else (512,), masks=(True,))
    return cases + _of_float32(arrays, options, FLOAT32_SEQLENS[:1])


def _of_float32(arrays: NumpyArrays, options: argparse.Namespace, seqlens: tuple[int, ...]) -> list[Timed]:
    """Returns problems in float32; for backward only the first length."""
    if not arrays.on_gpu or options.dtype:
        return []
    return [
        Timed(op, square(1, seqlen, FLOAT32_HEADS, 64, "float32", False))
        for op in options.ops or BOTH
        for seqlen in (seqlens if op == "forward" else seqlens[:1])
    ]


def models(arrays: NumpyArrays, options: argparse.Namespace) -> list[Timed]:
    """Calls of models; without a GPU, shortened so that NumPy takes moments."""
    dtype = _dtype(arrays, options)
    cases = [(model.ops, model.case(dtype)) for model in MODELS]
    cases = cases if arrays.on_gpu else [(ops, _small(case)) for ops, case in cases]
    return [Timed(op, case) for op in options.ops or BOTH for ops, case in cases if op in ops]


def decode(arrays: NumpyArrays, options: argparse.Namespace) -> list[Timed]:
    """Steps of decoding from a cache."""
    dtype = _dtype(arrays, options)
    cases = []
    for batch, keys, heads_q, heads_kv, dim in DECODING:
        name = f"decode d{dim} heads {heads_q}/{heads_kv} batch {batch} keys {keys}"
        cases.append(Case(name, batch, 1, keys, heads_q, heads_kv, dim, dim, dtype, causal=True))
    cases = cases if arrays.on_gpu else [_small(case) for case in cases]
    return [Timed(op, case) for op in options.ops or FORWARD for case in cases]


def masks(arrays: NumpyArrays, options: argparse.Namespace) -> list[Timed]:
    """Masks and scores at head dim 128: options of the call, and score_mod and mask_mod, as in flex_attention."""
    dtype = _dtype(arrays, options)
    batch, seqlen, heads = (2, 8192, 16) if arrays.on_gpu else (1, 512, 2)
    plain = square(batch, seqlen, heads, 128, dtype, True)
    cases = [
        replace(plain, name="causal"),
        replace(plain, name="sliding window", window_size=(seqlen // 8 - 1, 0)),
        replace(plain, name="causal, softcap", softcap=30.0),
    ]
    shape = batch, seqlen, seqlen, heads, heads, 128, 128, dtype
    cases += [ModCase(name, *shape, mods=name) for name in FUNCTIONS]
    return [Timed(op, case) for op in options.ops or BOTH for case in cases]


def memory(arrays: NumpyArrays, options: argparse.Namespace) -> list[Timed]:
    """Memory of calls on a causal problem of head dim 64, at lengths that double."""
    seqlens = options.seqlens or (tuple(1024 << n for n in range(7)) if arrays.on_gpu else (256, 512, 1024))
    heads = 16 if arrays.on_gpu else 2
    cases = [square(1, seqlen, heads, 64, _dtype(arrays, options), True) for seqlen in seqlens]
    return [Timed(op, case) for op in options.ops or BOTH for case in cases]


class Preset(NamedTuple):
    """The problems of a preset, and their unit. takes: options that change the problems, beside the dtype."""

    make: Callable[[NumpyArrays, argparse.Namespace], list[Timed]]
    takes: tuple[str, ...] = ("ops",)
    is_grid: bool = False  # True if head dim, mask and length distinguish its problems
    unit: str = "TFLOP/s"  # "" for bytes
    algorithms: tuple[str, ...] = ("flash2",)
    beside_flex: bool = False  # True if flex_attention is timed, too
    times_first_calls: bool = False


OF_PROBLEMS = ("ops", "head_dims", "seqlens", "causal", "algorithms")
PRESETS = {
    "paper": Preset(paper, OF_PROBLEMS, is_grid=True, times_first_calls=True),
    "models": Preset(models),
    "decode": Preset(decode, unit="GB/s"),
    "masks": Preset(masks, beside_flex=True),
    "memory": Preset(
        memory, ("ops", "seqlens", "algorithms"), is_grid=True, unit="", algorithms=("flash2", "standard")
    ),
    "quick": Preset(quick, OF_PROBLEMS, is_grid=True),
}
GRIDS = tuple(name for name, preset in PRESETS.items() if preset.is_grid)


def _dtype(arrays: NumpyArrays, options: argparse.Namespace) -> str:
    return str(options.dtype or ("bfloat16" if arrays.on_gpu else "float32"))


def square(batch: int, seqlen: int, heads: int, head_dim: int, dtype: str, causal: bool) -> Case:
    """Returns a problem with as many queries as keys."""
    name = f"{dtype} d{head_dim} {'causal' if causal else 'full'} seqlen {seqlen} batch {batch} heads {heads}"
    return Case(name, batch, seqlen, seqlen, heads, heads, head_dim, head_dim, dtype, causal)


def _small(case: Case) -> Case:
    lengths = {name: min(getattr(case, name), 256) for name in ("seqlen_q", "seqlen_k")}
    heads = max(1, case.heads_q // case.heads_kv)
    return replace(case, name=f"{case.name}, shortened", batch=1, heads_q=min(heads, 4), heads_kv=1, **lengths)
