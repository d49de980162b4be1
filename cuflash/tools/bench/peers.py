"""Contenders of the benchmark: our algorithms, and the other attention kernels on this machine."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import metadata
from typing import Any

import numpy as np

from ...errors import UnsupportedError
from ...ops.backward import backward
from ...ops.forward import forward
from ...testing.arrays import CupyArrays, Inputs, NumpyArrays, TorchArrays
from ...testing.cases import Case
from .. import info
from .measure import Run, reason
from .mods import ModCase, flex_functions

FLOAT16 = ("float16", "bfloat16")
EVERY_DTYPE = (*FLOAT16, "float32", "float64")
Prepare = Callable[[Inputs, Case], Callable[[], Any]]
Attention = Callable[[Any, Any, Any], Any]  # out of q, k, v


@dataclass(frozen=True, slots=True)
class Contender:
    """An attention function to time. `prepare(inputs, case)` returns a call, which returns out or (dq, dk, dv).

    Arrays are (batch, seqlen, heads, head_dim), and none is copied. For backward `prepare` runs the contender's
    forward. It raises UnsupportedError for features that the contender lacks. `keywords` are the arguments of our
    public call besides inputs, mask and scale.
    """

    op: str
    name: str
    dtypes: tuple[str, ...]
    prepare: Prepare
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    ours: bool = False
    keywords: dict[str, Any] = field(default_factory=dict)
    captures: bool = True  # True if its calls can be captured into a CUDA graph
    must_run: bool = False  # True if the benchmark fails where it does not run

    def run(self, input_sets: list[Inputs], case: Case) -> Run:
        """Prepares the calls that `measure` times, one for each input set."""
        with self.scope():
            return Run([self.prepare(inputs, case) for inputs in input_sets], self.scope)


def ours(op: str, arrays: NumpyArrays, algorithms: tuple[str, ...]) -> list[Contender]:
    """Returns `cuflash.forward` by each of these algorithms, or `cuflash.backward` plain and deterministic."""
    if op == "forward":
        return [_ours(op, algorithm, arrays, _prepare_forward, algorithm=algorithm) for algorithm in algorithms]
    # On NumPy arrays backward is always deterministic.
    names = ("backward", "deterministic") if arrays.on_gpu else ("backward",)
    return [_ours(op, name, arrays, _prepare_backward, deterministic=name == "deterministic") for name in names]


def _ours(op: str, name: str, arrays: NumpyArrays, prepare: Callable[..., Callable[[], Any]], **more: Any) -> Contender:
    def prepared(inputs: Inputs, case: Case) -> Callable[[], Any]:
        mod_kwargs = case.keywords(inputs[0], arrays.put) if isinstance(case, ModCase) else {}
        return prepare(inputs, case.arguments() | mod_kwargs, **more)

    # Whole score matrices soon exceed a GPU's memory, and lie in CuPy's memory pool, not PyTorch's.
    fits = more.get("algorithm") != "standard"
    kind = partial(Contender, ours=True, captures=fits, must_run=fits)
    return kind(op, f"cuflash {name}", EVERY_DTYPE, prepared, keywords=more)


def _prepare_forward(inputs: Inputs, keywords: dict[str, Any], **more: Any) -> Callable[[], Any]:
    q, k, v = inputs
    return partial(forward, q, k, v, **keywords, **more)


def _prepare_backward(inputs: Inputs, keywords: dict[str, Any], **more: Any) -> Callable[[], Any]:
    q, k, v, dout = inputs
    out, lse = forward(q, k, v, **keywords, return_lse=True)
    return partial(backward, dout, q, k, v, out, lse, **keywords, **more)


def find(arrays: NumpyArrays, *, flex: bool = False) -> tuple[list[Contender], dict[str, str]]:
    """Returns the peers that take these arrays, one contender an op, and the reasons why others are missing.

    flex: include PyTorch's flex_attention, which compiles for seconds on each problem.
    """
    contenders: list[Contender] = []
    missing: dict[str, str] = {}
    if isinstance(arrays, TorchArrays):
        contenders += _torch_backends()
        try:
            contenders += _flash_attention_4()
        except Exception as error:  # errors of its import depend on its compiler packages
            missing["FlashAttention-4"] = reason(error, whole=True)
        contenders += _flex_attention(arrays) if flex else []
    elif isinstance(arrays, CupyArrays):
        missing["torch, FlashAttention-4"] = "torch with CUDA is not installed"
    return contenders + _whole_matrix(arrays), missing


def machine(arrays: NumpyArrays) -> dict[str, Any]:
    """Returns the facts of `info`, with the versions of the peers and the limits of memory and tensor cores."""
    facts = info.machine()
    if bandwidth := arrays.bandwidth():
        facts["gpus"][0]["bytes_per_second"] = bandwidth
    if peak := arrays.tensor_flops():
        facts["gpus"][0]["flops_per_second"] = peak
    with suppress(metadata.PackageNotFoundError):
        facts["versions"]["FlashAttention-4"] = metadata.version("flash-attn-4")
    torch = sys.modules.get("torch")  # not imported here: no peer of it runs unless it is
    if torch is not None and (cudnn := torch.backends.cudnn.version()):
        facts["versions"]["cuDNN"] = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
    return facts


def _torch_backends() -> list[Contender]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attention(case: Case) -> Attention:
        _refuse(case, "functions", "windows", "softcap")
        # If the numbers of queries and keys differ, its causal mask is aligned top-left; one query sees all keys.
        if case.causal and case.seqlen_q not in (1, case.seqlen_k):
            raise UnsupportedError("its causal mask is aligned top-left")
        causal, grouped = case.causal and case.seqlen_q > 1, case.heads_q != case.heads_kv

        def call(q: Any, k: Any, v: Any) -> Any:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

        return call

    # torch warns at each call about every excluded backend.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch|cuflash\.bench")
    contenders = []
    for name, dtypes, backend in (
        ("torch flash", FLOAT16, SDPBackend.FLASH_ATTENTION),
        ("torch cuDNN", FLOAT16, SDPBackend.CUDNN_ATTENTION),
        ("torch efficient", ("float32",), SDPBackend.EFFICIENT_ATTENTION),
    ):
        contenders += _both_ops(name, dtypes, attention, partial(sdpa_kernel, backend))
    return contenders


def _flash_attention_4() -> list[Contender]:
    from flash_attn.cute import flash_attn_func

    def attention(case: Case) -> Attention:
        _refuse(case, "functions")
        more: dict[str, Any] = {"softcap": case.softcap} if case.softcap else {}
        if case.window_size != (-1, -1):
            more["window_size"] = tuple(None if x == -1 else x for x in case.window_size)

        def call(q: Any, k: Any, v: Any) -> Any:
            result = flash_attn_func(q, k, v, causal=case.causal, **more)
            return result[0] if isinstance(result, tuple) else result

        return call

    return _both_ops("FlashAttention-4", FLOAT16, attention)


def _flex_attention(arrays: TorchArrays) -> list[Contender]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    @lru_cache(maxsize=1)  # a problem compiles for seconds, and is prepared for each set of inputs
    def attention(case: Case) -> Attention:
        score_mod, mask_mod = flex_functions(case, arrays.put, arrays.torch)
        lengths = case.seqlen_q, case.seqlen_k
        mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, *lengths, device="cuda")
        arrays.torch.compiler.reset()  # without it, torch stops compiling after a few problems
        compiled = arrays.torch.compile(flex_attention, dynamic=False)
        more = {"score_mod": score_mod, "block_mask": mask, "enable_gqa": case.heads_q != case.heads_kv}

        def call(q: Any, k: Any, v: Any) -> Any:
            return compiled(*(x.transpose(1, 2) for x in (q, k, v)), **more).transpose(1, 2)

        return call

    return _both_ops("torch flex", EVERY_DTYPE, attention)


def _both_ops(
    name: str,
    dtypes: tuple[str, ...],
    attention: Callable[[Case], Attention],
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Contender]:
    """Returns two contenders from a function on torch tensors: the function, and its backward alone.

    Backward runs by autograd: every peer has it, and on an H200 it is as fast as calling torch's backward functions.
    """
    from torch.autograd import grad

    def prepare(inputs: Inputs, case: Case) -> Callable[[], Any]:
        return partial(attention(case), *inputs)

    def prepare_backward(inputs: Inputs, case: Case) -> Callable[[], Any]:
        *qkv, dout = inputs
        leaves = [x.detach().requires_grad_() for x in qkv]
        return partial(grad, attention(case)(*leaves), leaves, dout, retain_graph=True)

    return [
        Contender("forward", name, dtypes, prepare, scope),
        Contender("backward", name, dtypes, prepare_backward, scope),
    ]


def _refuse(case: Case, *lacks: str) -> None:
    """Raises UnsupportedError if a case needs a feature that a peer lacks."""
    needs = {
        "functions": isinstance(case, ModCase),
        "windows": case.window_size != (-1, -1),
        "softcap": case.softcap != 0,
        "grouped heads": case.heads_q != case.heads_kv,
    }
    if lacking := [name for name in lacks if needs[name]]:
        raise UnsupportedError(f"it has no {' and no '.join(lacking)}")


def _whole_matrix(arrays: NumpyArrays) -> list[Contender]:
    """Returns attention in a few lines of an array library, with whole score matrices in memory."""
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

    def prepare(function: Callable[..., tuple[Any, ...]], inputs: Inputs, case: Case) -> Callable[[], Any]:
        _refuse(case, "functions", "windows", "softcap", "grouped heads")
        through_torch = isinstance(arrays, TorchArrays)
        heads_first = [(xp.from_dlpack(x) if through_torch else x).transpose(0, 2, 1, 3) for x in inputs]

        def call() -> tuple[Any, ...]:
            results = (x.transpose(0, 2, 1, 3) for x in function(case.causal, *heads_first))
            return tuple(arrays.torch.from_dlpack(x) if isinstance(arrays, TorchArrays) else x for x in results)

        return call

    name = "CuPy matmul" if arrays.on_gpu else "NumPy matmul"
    return [
        Contender(op, name, ("float32",), partial(prepare, function), captures=False)
        for op, function in (("forward", attention), ("backward", gradients))
    ]
