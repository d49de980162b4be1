"""`cuflash.forward`: exact attention, the keys taken tile by tile."""

from __future__ import annotations

from typing import Any

from . import host, reference
from .errors import ProblemError, UnsupportedError
from .interop import Exchanged, GpuFramework, as_4d, cupy, cupy_module, frameworks_of
from .launch import Launcher, dense, launcher
from .mask import WindowSize
from .problem import Arguments

_WITH_OUT = ("q", "k", "v", "out")


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
    algorithm: str = "flash2",
    return_lse: bool = False,
    out: Any = None,
    out_dtype: str | None = None,
) -> Any:
    """Exact attention, `softmax(mask(cap(softmax_scale q kᵀ))) v`, with no seqlen_q x seqlen_k matrix in memory.

    q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v (batch, seqlen_k, heads_kv,
    head_dim_v): CuPy, PyTorch, JAX, NumPy or any DLPack arrays of one framework, device and dtype (float16, bfloat16,
    float32; float64 on the CPU), with any strides. (seqlen, heads, head_dim) and (seqlen, head_dim) are accepted too.
    float32 on a GPU is computed as three TF32 products; an infinite element that is seen gives NaN there.
    heads_q is a multiple of heads_kv; query head h uses kv head `h // (heads_q // heads_kv)`.

    softmax_scale: default 1/sqrt(head_dim). causal: key j is visible to query i iff `j <= i + diagonal_offset`.
    window_size: (left, right) keys besides the diagonal, -1 or None for open. diagonal_offset: default
    seqlen_k - seqlen_q (bottom-right aligned); 0 aligns top-left. softcap c > 0: scores become c·tanh(score / c).
    algorithm: "flash2" (default), "flash1", "flashd" or "standard" (materialises the scores; for comparison).
    out: array to write to, of its own memory. out_dtype: "float32" keeps the full precision of 16-bit inputs.

    Returns out (batch, seqlen_q, heads_q, head_dim_v) in the rank and framework of q; with return_lse also lse
    (batch, heads_q, seqlen_q), float32 (float64 for float64): the natural logarithm of the sum of exp of the visible
    scores. A query that sees no key has out 0 and lse -inf. Work runs on the caller's current stream.

    Raises ProblemError for arguments that fit no attention problem, UnsupportedError where this build or machine has no
    kernel, CompileError where NVRTC refuses one.

    Sources: FlashAttention (arXiv 2205.14135), FlashAttention-2 (arXiv 2307.08691), FLASH-D (arXiv 2505.14201).
    """
    arguments = Arguments(softmax_scale, causal, window_size, diagonal_offset, softcap, algorithm, out_dtype)
    arrays = (q, k, v)
    framework, on_gpu = frameworks_of("qkv", arrays) if out is None else frameworks_of(_WITH_OUT, (*arrays, out))
    if not on_gpu:
        result = host.forward(reference.forward, framework, arrays, out, arguments)
    elif isinstance(framework, GpuFramework):
        result = _on_gpu(framework, arrays, out, arguments, return_lse)
    else:
        assert isinstance(framework, Exchanged)
        if out is not None:
            raise ProblemError(f"out= is not offered for {framework.name} arrays; leave out=None")
        exchanged = tuple(framework.to_cupy(x) for x in arrays)
        result = tuple(framework.from_cupy(x) for x in _on_gpu(cupy(), exchanged, None, arguments, True))
    return result if return_lse else result[0]


def _on_gpu(
    framework: GpuFramework, arrays: tuple[Any, ...], out: Any, arguments: Arguments, return_lse: bool
) -> tuple[Any, Any]:
    found = launcher(framework, "forward", arrays, out, arguments)
    ordinal, pointer = found.ordinal, framework.pointer
    with framework.device(ordinal):
        if not found.plan.launches:
            return _standard(framework, found, arrays, out)
        if True in found.copies:
            arrays = dense(framework, arrays, found.copies)
        inputs = tuple(map(pointer, arrays))
        if out is None:
            target = framework.empty(found.out_shape, found.out_dtype, ordinal)
        else:
            found.check_separate(inputs, pointer(out))
            target = framework.empty(found.out_shape, found.out_dtype, ordinal) if found.copies[3] else out
        lse = framework.empty(found.lse_shape, "float32", ordinal) if return_lse else None
        pointers = (*inputs, pointer(target), 0 if lse is None else pointer(lse))
        found.run(pointers, framework.stream(ordinal))
        if out is not None and target is not out:
            framework.copy(target, out)
            target = out
    return target, lse


def _standard(framework: GpuFramework, found: Launcher, arrays: tuple[Any, ...], out: Any) -> tuple[Any, Any]:
    """algorithm="standard" on a GPU: whole matrices, through CuPy's matmul, on the caller's stream."""
    problem = found.problem
    with framework.cupy_stream(found.ordinal):
        q, k, v = (as_4d(framework.to_cupy(x)) for x in arrays)
        try:
            result, lse = reference.standard.forward(problem, q, k, v, cupy_module())
        except ImportError as error:
            raise UnsupportedError(
                "algorithm='standard' on a GPU multiplies through CuPy, which needs cuBLAS: pip install nvidia-cublas "
                "(nvidia-cublas-cu12 with CUDA 12), or take another algorithm"
            ) from error
        result = framework.from_cupy(result.reshape(problem.out_shape))
        lse = framework.from_cupy(lse.reshape(problem.lse_shape))
    if out is not None:
        framework.copy(result, out)
    return result if out is None else out, lse
