"""`cuflash.backward`: exact gradients of attention, the weights recomputed from lse."""

from __future__ import annotations

from typing import Any

from . import device, host, reference
from .errors import ProblemError
from .interop import frameworks_of
from .mask import WindowSize
from .plan import plan
from .problem import Arguments


def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
) -> tuple[Any, Any, Any]:
    """Gradients (dq, dk, dv) of `sum(dout · out) + sum(dlse · lse)`, with nothing of size seqlen_q x seqlen_k kept.

    q, k, v and the mask and scale arguments are those of `forward`, out and lse its results (of any `algorithm`, or of
    `merge_states`); dout has the shape and dtype of out, dlse (optional) of lse. dq, dk, dv have the shapes and dtype
    of q, k, v. A query that sees no key has gradient 0. `deterministic=True` asks for bitwise repeatable results;
    NumPy's always are. Runs on arrays in host memory; GPU arrays raise UnsupportedError in this version.

    Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2.
    """
    arguments = Arguments(softmax_scale, causal, window_size, diagonal_offset, softcap)
    if not isinstance(deterministic, bool):
        raise ProblemError(f"deterministic={deterministic!r} is a {type(deterministic).__name__}; give True or False")
    given = {"dout": dout, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
    framework, on_gpu = frameworks_of(("q", "k", "v", *given), (q, k, v, *given.values()))
    problem = host.judge(framework, (q, k, v), arguments)
    lse_dtype = "float64" if problem.dtype == "float64" else "float32"
    for name, array in given.items():
        shape, dtype = (
            (problem.lse_shape, lse_dtype) if name in ("lse", "dlse") else (problem.out_shape, problem.out_dtype)
        )
        problem.check_operand(name, framework.spec(name, array), shape, dtype)
    if on_gpu:
        assert problem.ordinal is not None
        plan(problem, "backward", device.query(problem.ordinal))  # says what is not supported
    arrays = host.views(framework, dout, q, k, v, out)
    lse_shape = (problem.batch, problem.heads_q, problem.seqlen_q)
    lses = [None if x is None else framework.to_numpy(x).reshape(lse_shape) for x in (lse, dlse)]
    gradients = reference.backward(problem, *arrays, *lses)
    dq, dk, dv = (
        framework.from_numpy(gradient.reshape(framework.spec(name, like).shape), like=like)
        for name, gradient, like in zip("qkv", gradients, (q, k, v), strict=True)
    )
    return dq, dk, dv
