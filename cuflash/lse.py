"""`cuflash.lse`: the log-sum-exp of attention scores, without v and with half the work of forward."""

from __future__ import annotations

from typing import Any

from . import host, reference
from .interop import Exchanged, GpuFramework, cupy, frameworks_of
from .launch import dense, launcher
from .mask import WindowSize
from .problem import Arguments


def lse(
    q: Any,
    k: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
) -> Any:
    """lse (batch, heads_q, seqlen_q) = log sum exp of the visible scores of each query: `forward`'s lse, without v.

    q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim) and all arguments as in `forward`.
    float32 (float64 for float64), natural logarithm, -inf for a query that sees no key. Errors as in `forward`.
    """
    arguments = Arguments(softmax_scale, causal, window_size, diagonal_offset, softcap)
    framework, on_gpu = frameworks_of("qk", (q, k))
    if not on_gpu:
        problem = host.judge(framework, (q, k), arguments)
        result = reference.lse(problem, *host.views(framework, q, k))
        return framework.from_numpy(result.reshape(problem.lse_shape), like=q)
    if isinstance(framework, GpuFramework):
        return _on_gpu(framework, (q, k), arguments)
    assert isinstance(framework, Exchanged)
    return framework.from_cupy(_on_gpu(cupy(), (framework.to_cupy(q), framework.to_cupy(k)), arguments))


def _on_gpu(framework: GpuFramework, arrays: tuple[Any, ...], arguments: Arguments) -> Any:
    found = launcher(framework, "lse", arrays, None, arguments)
    with framework.device(found.ordinal):
        if True in found.copies:
            arrays = dense(framework, arrays, found.copies)
        result = framework.empty(found.lse_shape, "float32", found.ordinal)
        q, k = map(framework.pointer, arrays)
        found.run((q, k, 0, 0, framework.pointer(result)), framework.stream(found.ordinal))
    return result
