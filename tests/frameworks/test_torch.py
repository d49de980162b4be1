"""PyTorch's ways of calling attention: autograd, torch.compile, torch.func, autocast, checkpoints, CUDA graphs."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
from workers import run_python

import cuflash
from cuflash import ProblemError, UnsupportedError

torch = pytest.importorskip("torch")
from tensors import (
    MASKS,
    Tensors,
    assert_equal,
    assert_gradients,
    assert_results,
    assert_vjp,
    gradients,
    loss,
    random_qkv,
    with_lse,
)

from cuflash.frameworks.torch import attention


@pytest.mark.parametrize("mask", MASKS)
def test_results_and_gradients_of_out_and_lse(mask: str, device: str) -> None:
    tensors, options = random_qkv(device), MASKS[mask]
    assert_results(tensors, *with_lse(*tensors, **options), **options)
    assert_gradients(gradients(with_lse, tensors, **options), tensors, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: Any, device: str) -> None:
    tensors = random_qkv(device, dtype, dim=64)
    out = attention(*tensors, causal=True)
    assert out.dtype == dtype
    assert_results(tensors, out, causal=True)
    assert_gradients(gradients(with_lse, tensors, causal=True), tensors, causal=True)


@pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # gradcheck warns of inputs that are not float64
def test_numerical_gradients(device: str) -> None:
    of_float32 = {"eps": 1e-2, "atol": 2e-3, "rtol": 2e-3, "nondet_tol": 1e-5}
    tolerances: dict[str, Any] = {} if device == "cpu" else of_float32
    function = functools.partial(with_lse, causal=True, softcap=3.0)
    assert torch.autograd.gradcheck(function, random_qkv(device, dim=4), **tolerances)


def test_each_of_out_and_lse_alone(device: str) -> None:
    tensors = random_qkv(device)
    out, lse = with_lse(*tensors)
    for pick, dout, dlse in ((0, out.cos(), None), (1, torch.zeros_like(out), lse.cos())):
        grads = torch.autograd.grad(with_lse(*tensors)[pick].sin().sum(), tensors, materialize_grads=True)
        assert_vjp(grads, tensors, dout, dlse)


@pytest.mark.parametrize("needed", range(3))
def test_gradients_of_some_inputs_only(needed: int, device: str) -> None:
    tensors = tuple(x.detach().requires_grad_(n == needed) for n, x in enumerate(random_qkv(device)))
    attention(*tensors).sum().backward()
    assert [x.grad is not None for x in tensors] == [n == needed for n in range(3)]


def test_without_gradients_nothing_is_saved(device: str) -> None:
    tensors = random_qkv(device)
    with torch.no_grad():
        assert attention(*tensors).grad_fn is None
    with torch.inference_mode():
        assert attention(*tensors).is_inference()
    assert attention(*(x.detach() for x in tensors)).grad_fn is None


@pytest.mark.parametrize("rank", [2, 3])
def test_without_batch_or_heads(rank: int, device: str) -> None:
    whole = random_qkv(device, heads=(1, 1))
    part = tuple(x.detach()[0, :, 0] if rank == 2 else x.detach()[0] for x in whole)
    part = tuple(x.requires_grad_() for x in part)
    out, lse = with_lse(*part)
    assert (out.shape, lse.shape) == (part[0].shape, part[0].shape[:-1] if rank == 2 else (1, 9))
    compiled = torch.compile(with_lse, fullgraph=True, backend="aot_eager")
    first = tuple(x[:1] for x in whole)
    assert_results(first, out.reshape(first[0].shape), lse.reshape(1, 1, 9))
    for function in (with_lse, compiled):
        grads = gradients(function, part)
        assert [x.shape for x in grads] == [x.shape for x in part]
        assert_gradients([x.reshape(y.shape) for x, y in zip(grads, first, strict=True)], first)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mask", MASKS)
def test_compiled_is_eager_at_every_length(mask: str, backend: str) -> None:
    torch._dynamo.reset()
    device = "cpu" if backend == "aot_eager" else "cuda"
    compiled = torch.compile(
        lambda *x: loss(*with_lse(*x, **MASKS[mask])), fullgraph=True, backend=backend, dynamic=True
    )
    tensors = random_qkv(device)
    for length in (9, 7, 5):
        cut = tuple(x[:, :length] for x in tensors)
        grads = torch.autograd.grad(compiled(*cut), tensors)
        assert_gradients([x[:, :length] for x in grads], cut, **MASKS[mask])
        assert not any(x[:, length:].any() for x in grads)


@pytest.mark.parametrize("grad", [False, True])
def test_the_ops_keep_the_rules_of_ops(grad: bool, device: str) -> None:
    tensors = random_qkv(device, grad=grad)
    options = (None, True, 4, -1, 1, 1.5, False)
    torch.library.opcheck(torch.ops.cuflash.attention, (*tensors, *options))
    operands = tuple(x.detach() for x in (*tensors, *with_lse(*tensors)))
    for dlse in (None, operands[4]):
        torch.library.opcheck(torch.ops.cuflash.attention_backward, (operands[3], *operands, dlse, *options))


def test_exported_with_any_length() -> None:
    class Layer(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, causal=True)

    tensors = random_qkv("cpu", grad=False)
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(Layer(), tensors, dynamic_shapes=[{}, {1: length}, {1: length}])
    q, k, v = tensors
    assert_equal(exported.module()(q, k[:, :10], v[:, :10]), attention(q, k[:, :10], v[:, :10], causal=True))


def test_checkpoints_compute_the_same_again(device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        tensors = random_qkv(device)
        loss(*checkpoint(with_lse, *tensors, use_reentrant=reentrant)).backward()
        assert_gradients([x.grad for x in tensors], tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_inputs_and_gradients_keep_the_inputs_dtype(dtype: Any, device: str) -> None:
    tensors = random_qkv(device, torch.float32, dim=64)
    with torch.autocast(device, dtype=dtype):
        out, lse = with_lse(*tensors)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    grads = torch.autograd.grad(loss(out, lse), tensors)
    assert {x.dtype for x in grads} == {torch.float32}
    cast = tuple(x.detach().to(dtype) for x in tensors)
    assert_results(cast, out, lse)
    assert_equal([x.to(dtype).float() for x in grads], grads)
    assert_gradients([x.to(dtype) for x in grads], cast)
    with torch.autocast(device, enabled=False):
        assert attention(*tensors).dtype == torch.float32


def test_unsupported_derivatives_and_dtypes_are_refused() -> None:
    q, k, v = random_qkv("cpu")
    (first,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"second derivative.*create_graph"):
        torch.autograd.grad(first.sum(), q)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(k.detach(), k.detach())
        with pytest.raises(UnsupportedError, match=r"k carries a tangent.*torch.autograd.grad"):
            attention(q, dual, v)
        attention(q.detach(), k.detach(), v.detach())
    with pytest.raises(UnsupportedError, match="tangent"):
        torch.func.jvp(lambda x: attention(x, k, v), (q.detach(),), (q.detach(),))
    compiled = torch.compile(lambda *x: attention(*x), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"q, k and v have dtypes torch.float64, torch.float32"):
        compiled(q, k.float(), v)


def test_invalid_inputs_are_refused_before_anything_runs() -> None:
    q, k, v = random_qkv("cpu")
    with pytest.raises(ProblemError, match=r"k has dtype float32, but q has float64"):
        attention(q, k.float(), v)
    with pytest.raises(ProblemError, match=r"heads_q must be a multiple of heads_kv"):
        attention(q[:, :, :3], k, v)
    with pytest.raises(ProblemError, match=r"window_size"):
        attention(q, k, v, window_size=(-2, 0))
    for name, value in (("softcap", True), ("softmax_scale", True), ("window_size", (False, 1)), ("causal", 1)):
        for call in (attention, torch.compile(attention, backend="eager")):
            torch._dynamo.reset()  # otherwise a function that raised while compiling runs eagerly from then on
            with pytest.raises(ProblemError, match=f"{name}.* bool|causal=1 is an int"):
                call(q, k, v, **{name: value})
    with pytest.raises(ProblemError, match=r"no gradient flows.*cuflash.frameworks.torch.attention"):
        cuflash.forward(q, k, v)


# Each time the compiler hashes the name of this module, another module is added, as by an import.
MORE_MODULES = """
import sys
from types import ModuleType

import torch

from cuflash.frameworks.torch import attention


class Name(str):
    def __hash__(self):
        sys.modules[f"more {len(sys.modules)}"] = ModuleType("more")
        return super().__hash__()


sys.modules[Name("changing")] = ModuleType("changing")
x, bounds = torch.randn(8, 2, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
CALLS = {
    "mods": lambda x: attention(x[None], x[None], x[None], score_mod=lambda s, b, h, i, j: s - (i - j).abs()),
    "check": lambda x: attention(x, x, x, cu_seqlens_q=bounds, cu_seqlens_k=bounds, check=True),
}
call = CALLS[sys.argv[1]]
assert torch.equal(torch.compile(call, backend="eager")(x), call(x))
"""


@pytest.mark.parametrize("call", ["mods", "check"])
def test_modules_may_be_imported_while_a_call_is_compiled(call: str) -> None:
    run_python("-c", MORE_MODULES, call)


def test_any_strides_and_expanded_gradients(device: str) -> None:
    tensors = random_qkv(device)
    swapped = tuple(x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors)
    assert not swapped[0].is_contiguous()
    out = attention(*swapped)
    assert_vjp(torch.autograd.grad(out.sum(), swapped), tensors, torch.ones_like(out))


@pytest.mark.gpu
def test_cuda_graphs_replay_results_and_gradients() -> None:
    tensors = random_qkv("cuda", torch.bfloat16, dim=64)
    static = tuple(x.detach().clone().requires_grad_() for x in tensors)

    def step() -> Tensors:
        return gradients(with_lse, static, causal=True)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for scale in (1.0, -0.5):
        with torch.no_grad():
            for target, source in zip(static, tensors, strict=True):
                target.copy_(scale * source)
        graph.replay()
        assert_gradients(captured, static, causal=True)


FIRST = """
import torch, cuflash
from cuflash.frameworks.torch import attention
q, k, v, dout = (torch.randn(1, 130, 2, 64, device="cuda", dtype=torch.float16) for _ in range(4))
out, lse = cuflash.forward(q, k, v, return_lse=True)
wanted = cuflash.backward(dout, q, k, v, out, lse, deterministic=True)
leaves = [x.requires_grad_() for x in (q, k, v)]
found = torch.autograd.grad(attention(*leaves, deterministic=True), leaves, dout)
print(*(bool((x == y).all()) for x, y in zip(found, wanted)))
"""


@pytest.mark.gpu
def test_gradients_are_the_autograd_threads_first_work_on_the_gpu() -> None:
    assert run_python("-c", FIRST).split() == ["True"] * 3


@pytest.mark.gpu
def test_all_memory_comes_from_torchs_allocator(cupy: Any) -> None:
    tensors = random_qkv("cuda", torch.bfloat16, dim=64)
    gradients(with_lse, tensors)
    held = held_by_torch()  # first, as it collects arrays that earlier tests left
    pool = cupy.get_default_memory_pool().used_bytes()
    grads = gradients(with_lse, tensors)
    assert cupy.get_default_memory_pool().used_bytes() == pool
    assert held_by_torch() - held == sum(-(-2 * x.numel() // 512) * 512 for x in grads)


class Reading(torch.autograd.Function):
    """Reads the memory of tensors on the GPU, in the thread that runs backward."""

    @staticmethod
    def forward(ctx: Any, x: Any, readings: list[int]) -> Any:
        ctx.readings = readings
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        ctx.readings.append(torch.cuda.memory_allocated())
        return dout, None


def held_by_torch() -> int:
    """Returns the bytes of tensors on the GPU, without the reading's own, which are constant.

    Backward runs in a thread for each GPU, one node after the other. It frees a node's tensors only before it takes the
    next node. The reading is itself such a node, and runs after all earlier tensors are freed.
    """
    torch.cuda.synchronize()
    gc.collect()
    readings: list[int] = []
    Reading.apply(torch.zeros(1, device="cuda", requires_grad=True), readings).backward()
    (reading,) = readings
    return reading


@pytest.mark.gpu
def test_the_current_stream_is_used_and_other_gpus() -> None:
    tensors = random_qkv("cuda", torch.float16, dim=64, grad=False)
    expected, side = attention(*tensors), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        doubled = tuple(2 * x for x in tensors)
        late = attention(*(x / 2 for x in doubled))
    side.synchronize()
    assert_equal(late, expected)
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = tuple(x.detach().to("cuda:1").requires_grad_() for x in tensors)
    assert_gradients(gradients(with_lse, other), other)
