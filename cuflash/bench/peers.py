"""What is timed beside each other: our algorithms, and the other attention kernels found on this machine."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..forward import forward
from .arrays import CupyArrays, NumpyArrays, TorchArrays
from .measure import Run

FLOAT16 = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Contender:
    """`call(q, k, v, causal)` takes and gives (batch, seqlen, heads, head_dim) without copies."""

    name: str
    dtypes: tuple[str, ...]
    call: Callable[[Any, Any, Any, bool], Any]
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    ours: bool = False

    def run(self, causal: bool) -> Run:
        """What `measure` times."""
        return Run(lambda inputs: self.call(*inputs, causal), self.scope)


def ours(algorithm: str) -> Contender:
    """`cuflash.forward` by this algorithm."""

    def call(q: Any, k: Any, v: Any, causal: bool) -> Any:
        return forward(q, k, v, causal=causal, algorithm=algorithm)

    return Contender(f"cuflash {algorithm}", (*FLOAT16, "float32", "float64"), call, ours=True)


def find(arrays: NumpyArrays) -> tuple[list[Contender], dict[str, str]]:
    """The peers for these arrays, and those that are missing with the reason."""
    found: list[Contender] = []
    missing: dict[str, str] = {}
    if isinstance(arrays, TorchArrays):
        found += _torch_backends()
        try:
            found.append(_flash_attention_4())
        except Exception as error:  # why: what its import raises depends on the compiler packages below it
            missing["FlashAttention-4"] = str(error) or type(error).__name__
    elif isinstance(arrays, CupyArrays):
        missing["torch, FlashAttention-4"] = "torch with CUDA is not installed"
    found.append(_matmul_softmax_matmul(arrays))
    return found, missing


def _torch_backends() -> list[Contender]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def call(q: Any, k: Any, v: Any, causal: bool) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    # why: torch warns at each call of every backend that it was told to leave out.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch|cuflash\.bench")
    return [
        Contender("torch flash", FLOAT16, call, partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)),
        Contender("torch cuDNN", FLOAT16, call, partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)),
        Contender("torch efficient", ("float32",), call, partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION)),
    ]


def _flash_attention_4() -> Contender:
    from flash_attn.cute import flash_attn_func

    def call(q: Any, k: Any, v: Any, causal: bool) -> Any:
        result = flash_attn_func(q, k, v, causal=causal)
        return result[0] if isinstance(result, tuple) else result

    return Contender("FlashAttention-4", FLOAT16, call)


def _matmul_softmax_matmul(arrays: NumpyArrays) -> Contender:
    """Attention as it is written on one line of an array library, with the whole score matrix in memory."""
    if not isinstance(arrays, CupyArrays):
        import numpy as xp
    else:
        xp = arrays.cupy

    def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        s = xp.matmul(q, k.swapaxes(2, 3))
        s *= q.shape[3] ** -0.5
        if causal:
            s[..., ~xp.tri(s.shape[2], s.shape[3], k=s.shape[3] - s.shape[2], dtype=bool)] = -xp.inf
        s -= s.max(axis=3, keepdims=True)
        xp.exp(s, out=s)
        s /= s.sum(axis=3, keepdims=True)
        return xp.matmul(s, v).transpose(0, 2, 1, 3)

    def through_torch(q: Any, k: Any, v: Any, causal: bool) -> Any:
        assert isinstance(arrays, TorchArrays)
        q, k, v = (xp.from_dlpack(x) for x in (q, k, v))
        return arrays.torch.from_dlpack(attention(q, k, v, causal))

    name = "CuPy matmul" if arrays.on_gpu else "NumPy matmul"
    return Contender(name, ("float32",), through_torch if isinstance(arrays, TorchArrays) else attention)
