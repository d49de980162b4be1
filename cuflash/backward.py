"""`cuflash.backward`: exact gradients of attention, the weights recomputed from lse."""

from __future__ import annotations

from typing import Any

from . import device, host, params, reference
from .interop import Exchanged, Framework, GpuFramework, cupy, frameworks_of
from .launch import Kernels, call_key, dense, densed, has_gaps, kept, log_plan
from .mask import WindowSize, check_flag
from .plan import plan
from .problem import Arguments, ArraySpec, Problem
from .tiles_sm90 import allows_tma

NAMES = ("q", "k", "v", "dout", "out", "lse", "dlse")


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
    `merge_states`); out may be float32 where q is not. dout has the shape of out and the dtype of q, dlse (optional)
    those of lse. dq, dk, dv have the shapes and dtype of q, k, v. A query that sees no key has gradient 0.

    `deterministic=True` asks for bitwise repeatable results; NumPy's always are. On a GPU dq is otherwise added up in
    no fixed order, in a float32 workspace of its size (head_dim rounded up to that of the kernel), and so are dk and dv
    of keys that several blocks share. Deterministic, Hopper's kernels add dq up in the order of the keys (over head dim
    128 nothing is added up, and all calls are deterministic); the others compute the scores twice instead and take
    about a third longer. Head dims up to 256 on a GPU; float16 needs |p (dout vᵀ - delta)| < 65504 there, as it is
    rounded to the inputs' dtype: scale a large loss down, or take bfloat16. Errors as in `forward`.

    Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2.
    """
    arguments = Arguments(softmax_scale, causal, window_size, diagonal_offset, softcap)
    deterministic = check_flag("deterministic", deterministic)
    arrays = (q, k, v, dout, out, lse) if dlse is None else (q, k, v, dout, out, lse, dlse)
    framework, on_gpu = frameworks_of(NAMES[: len(arrays)], arrays)
    if not on_gpu:
        return _on_host(framework, arrays, arguments)
    if isinstance(framework, GpuFramework):
        return _on_gpu(framework, arrays, arguments, deterministic)
    assert isinstance(framework, Exchanged)
    exchanged = tuple(map(framework.to_cupy, arrays))
    dq, dk, dv = map(framework.from_cupy, _on_gpu(cupy(), exchanged, arguments, deterministic))
    return dq, dk, dv


def _on_host(framework: Framework, arrays: tuple[Any, ...], arguments: Arguments) -> tuple[Any, Any, Any]:
    specs = {name: framework.spec(name, x) for name, x in zip(NAMES, arrays, strict=False)}
    problem = Problem.of_gradients(specs, arguments)
    q, k, v, dout, out = host.views(framework, *arrays[:5])
    lse_shape = (problem.batch, problem.heads_q, problem.seqlen_q)
    lses = [framework.to_numpy(x).reshape(lse_shape) for x in arrays[5:]]
    gradients = reference.backward(problem, dout, q, k, v, out, *lses)
    dq, dk, dv = (
        framework.from_numpy(gradient.reshape(specs[name].shape), like=like)
        for name, gradient, like in zip("qkv", gradients, arrays, strict=False)
    )
    return dq, dk, dv


class BackwardLauncher:
    """One problem on one GPU, with what a call repeats: kernels, packed parameters and the workspace's layout."""

    def __init__(
        self, problem: Problem, specs: dict[str, ArraySpec], copies: list[bool], deterministic: bool, aligned: bool
    ) -> None:
        self.copies = copies  # of the arrays of a call: which are copied once, to what `specs` are
        assert problem.ordinal is not None
        self.ordinal = problem.ordinal
        self.dtype, self.shapes = problem.dtype, [specs[name].shape for name in "qkv"]
        operands = [specs[name] for name in NAMES[:5]]
        operands += [ArraySpec.dense(shape, problem.dtype) for shape in self.shapes]  # dq, dk, dv
        strides = [spec.as_4d().strides for spec in operands]
        aligned &= allows_tma(operands[3].as_4d().shape, strides[3])
        self.plan = plan(problem, "backward", device.query(self.ordinal), deterministic, aligned)
        self.needs_alignment = self.plan.variant is not None and self.plan.variant.of_warpgroups
        self.workspace = (self.plan.workspace_bytes // 4,)  # floats
        parameters = params.backward_parameters(problem, self.plan, strides[3:])
        self._kernels = Kernels(self.plan, self.ordinal, parameters)
        log_plan("backward", self.plan)

    def run(self, pointers: tuple[int, ...], stream: int) -> None:
        """Launches with the pointers of q, k, v, dout, out, dq, dk, dv, lse, dlse (or 0) and the workspace."""
        self._kernels.launch(pointers, stream)


def _on_gpu(
    framework: GpuFramework, arrays: tuple[Any, ...], arguments: Arguments, deterministic: bool
) -> tuple[Any, Any, Any]:
    given = arrays

    def launcher(aligned: bool) -> BackwardLauncher:
        key = call_key(framework, ("backward", deterministic, aligned), given, arguments)
        return kept(key, lambda: _prepare(framework, given, arguments, deterministic, aligned))

    found = launcher(aligned=True)
    ordinal = found.ordinal
    with framework.device(ordinal):
        if True in found.copies:
            arrays = dense(framework, arrays, found.copies)
        q, k, v, dout, out, lse, *dlse = map(framework.pointer, arrays)
        if found.needs_alignment and (q | k | v | dout) & 15:
            found = launcher(aligned=False)
        empty, dtype = framework.empty, found.dtype
        dq, dk, dv = [empty(shape, dtype, ordinal) for shape in found.shapes]
        workspace = empty(found.workspace, "float32", ordinal)
        written = map(framework.pointer, (dq, dk, dv))
        pointers = (q, k, v, dout, out, *written, lse, dlse[0] if dlse else 0, framework.pointer(workspace))
        found.run(pointers, framework.stream(ordinal))
    return dq, dk, dv


def _prepare(
    framework: GpuFramework, arrays: tuple[Any, ...], arguments: Arguments, deterministic: bool, aligned: bool
) -> BackwardLauncher:
    given = {name: framework.spec(name, x) for name, x in zip(NAMES, arrays, strict=False)}
    # why: the kernels know no strides of lse and dlse.
    copied = {name: spec != densed(spec) if "lse" in name else has_gaps(spec) for name, spec in given.items()}
    specs = {name: densed(spec) if copied[name] else spec for name, spec in given.items()}
    problem = Problem.of_gradients(specs, arguments)
    return BackwardLauncher(problem, specs, list(copied.values()), deterministic, aligned)
