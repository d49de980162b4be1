"""The contenders that are timed: our algorithms, and the other attention kernels found on this machine."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np

from .. import info
from ..ops.backward import backward
from ..ops.forward import forward
from .arrays import CupyArrays, Inputs, NumpyArrays, TorchArrays
from .measure import Run

FLOAT16 = ("float16", "bfloat16")
EVERY_DTYPE = (*FLOAT16, "float32", "float64")
Prepare = Callable[[Inputs, bool], Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class Contender:
    """`prepare(inputs, causal)` makes the call that is timed; that call returns out, or the tuple (dq, dk, dv).

    Arrays are (batch, seqlen, heads, head_dim), and none is copied. For backward `prepare` runs the contender's own
    forward. `keywords` are the arguments of our public call besides inputs and mask.
    """

    op: str
    name: str
    dtypes: tuple[str, ...]
    prepare: Prepare
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    ours: bool = False
    keywords: dict[str, Any] = field(default_factory=dict)

    def run(self, input_sets: list[Inputs], causal: bool) -> Run:
        """The calls that `measure` times, one for each input set."""
        with self.scope():
            return Run([self.prepare(inputs, causal) for inputs in input_sets], self.scope)


def ours(op: str, arrays: NumpyArrays, algorithms: tuple[str, ...]) -> list[Contender]:
    """`cuflash.forward` by each of these algorithms, or `cuflash.backward` plain and deterministic."""
    if op == "forward":
        return [_ours(op, algorithm, _prepare_forward, algorithm=algorithm) for algorithm in algorithms]
    # why: on NumPy arrays backward is always deterministic
    names = ("backward", "deterministic") if arrays.on_gpu else ("backward",)
    return [_ours(op, name, _prepare_backward, deterministic=name == "deterministic") for name in names]


def _ours(op: str, name: str, prepare: Callable[..., Callable[[], Any]], **keywords: Any) -> Contender:
    prepared = partial(prepare, **keywords)
    return Contender(op, f"cuflash {name}", EVERY_DTYPE, prepared, ours=True, keywords=keywords)


def _prepare_forward(inputs: Inputs, causal: bool, **keywords: Any) -> Callable[[], Any]:
    return partial(forward, *inputs, causal=causal, **keywords)


def _prepare_backward(inputs: Inputs, causal: bool, **keywords: Any) -> Callable[[], Any]:
    q, k, v, dout = inputs
    out, lse = forward(q, k, v, causal=causal, return_lse=True)
    return partial(backward, dout, q, k, v, out, lse, causal=causal, **keywords)


def find(arrays: NumpyArrays) -> tuple[list[Contender], dict[str, str]]:
    """The peers that take these arrays, a contender for each of their ops, and the reasons why others are missing."""
    found: list[Contender] = []
    missing: dict[str, str] = {}
    if isinstance(arrays, TorchArrays):
        found += _torch_backends()
        try:
            found += _flash_attention_4()
        except Exception as error:  # why: what its import raises depends on the compiler packages it uses
            missing["FlashAttention-4"] = str(error) or type(error).__name__
    elif isinstance(arrays, CupyArrays):
        missing["torch, FlashAttention-4"] = "torch with CUDA is not installed"
    return found + _whole_matrix(arrays), missing


def machine() -> dict[str, Any]:
    """What `info` tells of this machine, with the versions of the peers."""
    found = info.machine()
    with suppress(metadata.PackageNotFoundError):
        found["versions"]["FlashAttention-4"] = metadata.version("flash-attn-4")
    torch = sys.modules.get("torch")  # why not imported: where nothing has, no peer of it runs
    if torch is not None and (cudnn := torch.backends.cudnn.version()):
        found["versions"]["cuDNN"] = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
    return found


def _torch_backends() -> list[Contender]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attention(causal: bool, q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    # why: at each call torch warns about every backend that it was told to leave out.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch|cuflash\.bench")
    found = []
    for name, dtypes, backend in (
        ("torch flash", FLOAT16, SDPBackend.FLASH_ATTENTION),
        ("torch cuDNN", FLOAT16, SDPBackend.CUDNN_ATTENTION),
        ("torch efficient", ("float32",), SDPBackend.EFFICIENT_ATTENTION),
    ):
        found += _both_ops(name, dtypes, attention, partial(sdpa_kernel, backend))
    return found


def _flash_attention_4() -> list[Contender]:
    from flash_attn.cute import flash_attn_func

    def attention(causal: bool, q: Any, k: Any, v: Any) -> Any:
        result = flash_attn_func(q, k, v, causal=causal)
        return result[0] if isinstance(result, tuple) else result

    return _both_ops("FlashAttention-4", FLOAT16, attention)


def _both_ops(
    name: str,
    dtypes: tuple[str, ...],
    attention: Callable[[bool, Any, Any, Any], Any],
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Contender]:
    """Two contenders from a function on torch tensors: the function, and its backward alone.

    why autograd: every peer has it, and on an H200 it takes as long as a direct call of torch's backward functions.
    """
    from torch.autograd import grad

    def prepare(inputs: Inputs, causal: bool) -> Callable[[], Any]:
        return partial(attention, causal, *inputs)

    def prepare_backward(inputs: Inputs, causal: bool) -> Callable[[], Any]:
        *qkv, dout = inputs
        leaves = [x.detach().requires_grad_() for x in qkv]
        return partial(grad, attention(causal, *leaves), leaves, dout, retain_graph=True)

    return [
        Contender("forward", name, dtypes, prepare, scope),
        Contender("backward", name, dtypes, prepare_backward, scope),
    ]


def _whole_matrix(arrays: NumpyArrays) -> list[Contender]:
    """Attention in a few lines of an array library, with whole score matrices in memory."""
    xp: Any = arrays.cupy if isinstance(arrays, CupyArrays) else np

    def weights(q: Any, k: Any, causal: bool) -> Any:
        s = xp.matmul(q, k.swapaxes(2, 3))
        s *= q.shape[3] ** -0.5
        if causal:
            s[..., ~xp.tri(s.shape[2], s.shape[3], k=s.shape[3] - s.shape[2], dtype=bool)] = -xp.inf
        s -= s.max(axis=3, keepdims=True)
        xp.exp(s, out=s)
        s /= s.sum(axis=3, keepdims=True)
        return s

    def attention(causal: bool, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return (xp.matmul(weights(q, k, causal), v),)

    def gradients(causal: bool, q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        p = weights(q, k, causal)
        dv = xp.matmul(p.swapaxes(2, 3), dout)
        ds = xp.matmul(dout, v.swapaxes(2, 3))  # dp
        ds -= (p * ds).sum(axis=3, keepdims=True)
        ds *= p
        ds *= q.shape[3] ** -0.5
        return xp.matmul(ds, k), xp.matmul(ds.swapaxes(2, 3), q), dv

    def prepare(function: Callable[..., tuple[Any, ...]], inputs: Inputs, causal: bool) -> Callable[[], Any]:
        through_torch = isinstance(arrays, TorchArrays)
        heads_first = [(xp.from_dlpack(x) if through_torch else x).transpose(0, 2, 1, 3) for x in inputs]

        def call() -> tuple[Any, ...]:
            results = (x.transpose(0, 2, 1, 3) for x in function(causal, *heads_first))
            return tuple(arrays.torch.from_dlpack(x) if isinstance(arrays, TorchArrays) else x for x in results)

        return call

    name = "CuPy matmul" if arrays.on_gpu else "NumPy matmul"
    return [
        Contender("forward", name, ("float32",), partial(prepare, attention)),
        Contender("backward", name, ("float32",), partial(prepare, gradients)),
    ]
