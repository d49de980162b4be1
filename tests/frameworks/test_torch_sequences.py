"""Variable-length sequences in PyTorch's ways of calling attention: autograd, torch.compile, torch.func, ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import numpy as np
from libraries import torch_of
from refusals import refused
from tensors import (
    arguments_of,
    assert_equal,
    assert_sequences,
    assert_vjp_sequences,
    in_numpy,
    upstream_of,
)
from torch._dynamo.testing import CompileCounterWithBackend

from cuflash import ProblemError, UnsupportedError
from cuflash.frameworks.torch import attention
from cuflash.testing.sequences import Sequences, check_gradients, drawn, varlen_arrays

PACKED = Sequences("packed", (5, 0, 1, 17), (9, 3, 0, 17), causal=True, dims=(16, 24), bounded=True)
USED = replace(PACKED, name="used", used_q=True, used_k=True, spare_q=(1, 4, 0, 2), spare_k=(0, 3, 2, 1))
RECTANGLE = Sequences("rectangle", (9, 2, 0), (4, 11, 3), "rectangle", "rectangle", True, True, softcap=2.0)
OVER_CACHE = Sequences("over_cache", (3, 1, 0), (20, 7, 5), "packed", "rectangle", used_k=True, window_size=(4, 1))
CACHE = Sequences("cache", (2,) * 3, (12, 30, 0), "rectangle", "cache", used_k=True, causal=True)
PAGED = Sequences("paged", (3, 1, 0, 20), (40, 17, 5, 64), "packed", "paged", used_k=True, causal=True)
WITH_GRADIENTS, CACHED = [PACKED, USED, RECTANGLE, OVER_CACHE], [CACHE, PAGED]


def each(cases: list[Sequences]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def called(inputs: Any, device: str, *, grad: bool = True, **more: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Returns out, lse and the leaves of a call."""
    arguments = arguments_of(inputs, device, grad=grad) | more
    leaves = tuple(arguments.pop(name) for name in "qkv")
    return *attention(*leaves, return_lse=True, **arguments), leaves


@each([*WITH_GRADIENTS, *CACHED])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_and_gradients(case: Sequences, dtype: str, device: str) -> None:
    inputs = varlen_arrays(replace(case, dtype=dtype))
    out, lse, leaves = called(inputs, device, grad=case.has_gradients)
    assert_sequences(inputs, out, lse)
    if case.has_gradients:
        assert_vjp_sequences(inputs, out, lse, leaves)


@pytest.mark.drawn(20)
def test_gradients_of_drawn_problems(seed: int, device: str) -> None:
    inputs = varlen_arrays(drawn(seed, gradients=True), seed)
    assert_vjp_sequences(inputs, *called(inputs, device))
    inputs = varlen_arrays(drawn(seed), seed)
    assert_sequences(inputs, *called(inputs, device, grad=False)[:2])


@each(WITH_GRADIENTS)
def test_numerical_gradients(case: Sequences) -> None:
    inputs = varlen_arrays(replace(case, dtype="float64", dims=(3, 2), heads=(2, 1))).filled(0.0)
    arguments = arguments_of(inputs, grad=True)
    leaves = tuple(arguments.pop(name) for name in "qkv")

    def used(*leaves: Any) -> tuple[Any, Any]:
        out, lse = attention(*leaves, return_lse=True, **arguments)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(used, leaves)


@each([*WITH_GRADIENTS, *CACHED])
def test_compiled_is_eager(case: Sequences, device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for seed in range(2):
        inputs = varlen_arrays(replace(case, dtype="float32"), seed)
        arguments = arguments_of(inputs, device, grad=case.has_gradients)
        results = compiled(**arguments, return_lse=True)
        assert_equal([x.detach() for x in results], [x.detach() for x in attention(**arguments, return_lse=True)])
        if case.has_gradients:
            assert_vjp_sequences(inputs, *results, tuple(arguments[name] for name in "qkv"))


def test_one_graph_trains_a_layer_on_packed_rows_of_any_lengths(device: str) -> None:
    """Operands are views of one projection, and the lengths are inputs of the graph."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(32, n, generator=generator).to(device).requires_grad_() for n in (96, 32)]

    def layer(x: Any, bounds: Any, longest: int) -> Any:
        q, k, v = (x @ weights[0]).view(-1, 3, 2, 16).unbind(1)
        lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return attention(q, k, v, causal=True, window_size=(4, -1), **lengths).flatten(1) @ weights[1]

    counter = CompileCounterWithBackend("aot_eager")
    compiled, compilations = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True), set()
    for bounds in ([0, 5, 5, 17, 30], [0, 1, 12, 13, 20], [0, 3, 6, 25, 41]):
        x = torch.randn(bounds[-1], 32, generator=generator).to(device)
        varlen_args = torch.tensor(bounds, dtype=torch.int32, device=device), max(np.diff(bounds).tolist())
        results, expected = (
            [out, *torch.autograd.grad(out.square().sum(), weights)]
            for out in (f(x, *varlen_args) for f in (compiled, layer))
        )
        for got, plain in zip(results, expected, strict=True):
            torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-4 * float(plain.detach().abs().max()))
        compilations.add(counter.frame_count)
    assert len(compilations) == 1, "the first call compiles for all lengths"


@each(WITH_GRADIENTS)
def test_pulled_back_by_function_transforms(case: Sequences, device: str) -> None:
    inputs = varlen_arrays(replace(case, dtype="float32"))
    arguments = arguments_of(inputs, device)
    leaves = tuple(arguments.pop(name) for name in "qkv")
    (out, lse), pull = torch.func.vjp(lambda *x: attention(*x, return_lse=True, **arguments), *leaves)
    check_gradients(inputs, [in_numpy(x) for x in pull(upstream_of(inputs, out, lse))])


@each([*WITH_GRADIENTS, *CACHED])
def test_vmap_over_sequences_is_refused_and_beside_them_works(case: Sequences, device: str) -> None:
    arguments = arguments_of(varlen_arrays(case).filled(0.0), device)
    q = arguments.pop("q")
    with pytest.raises(UnsupportedError, match=r"(cu_seqlens_q|seqused_k).* under vmap.*further sequences"):
        torch.vmap(lambda x: attention(x, **arguments))(torch.stack([q, q]))
    gradient = torch.func.grad(lambda x: attention(x, **arguments).sum())
    with pytest.raises(UnsupportedError, match="under vmap"):
        torch.vmap(gradient)(torch.stack([q, q]))
    out = attention(q, **arguments)
    scale = torch.arange(1.0, 3.0, device=device).to(q.dtype)
    mapped = torch.vmap(lambda x: x * attention(q, **arguments))(scale)
    assert_equal(mapped, torch.stack([x * out for x in scale]))


@each(CACHED)
def test_cached_keys_refuse_gradients_in_backward(case: Sequences, device: str) -> None:
    arguments = arguments_of(varlen_arrays(case).filled(0.0), device, grad=True)
    words = "page_table" if case is PAGED else "cache_batch_idx"
    words += " was given, but cached keys have no gradients.*gather them"
    with torch.no_grad():
        expected = attention(**arguments)
    assert expected.grad_fn is None
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for function, more in ((attention, {}), (compiled, {}), (attention, {"score_mod": lambda score, *_: score * 2})):
        out = function(**arguments, **more)
        assert more or torch.equal(out, expected)
        with pytest.raises(UnsupportedError, match=words):
            out.sum().backward()
    assert all(arguments[each].grad is None for each in "qkv")
    name = "page_table" if case is PAGED else "cache_batch_idx"
    q = arguments.pop("q").detach()
    arguments |= {name: arguments[name].detach() for name in "kv"}
    with pytest.raises(UnsupportedError, match=name):
        torch.func.grad(lambda x: attention(x, **arguments).sum())(q)


@each([*WITH_GRADIENTS, *CACHED])
def test_keys_in_splits_and_repeatable_gradients(case: Sequences, device: str) -> None:
    inputs = varlen_arrays(replace(case, dtype="float32"))
    for more in ({"num_splits": 2}, {"split_size": 128}, {"num_splits": 1, "split_size": 256}):
        out, lse, leaves = called(inputs, device, grad=case.has_gradients, deterministic=True, **more)
        assert_sequences(inputs, out, lse)
        if case.has_gradients:
            assert_vjp_sequences(inputs, out, lse, leaves)


def test_dense_calls_take_splits_too(device: str) -> None:
    q, k, v = (torch.randn(2, n, 2, 16, device=device, requires_grad=True) for n in (5, 300, 300))
    expected = attention(q, k, v)
    (slope,) = torch.autograd.grad(expected.sum(), k)
    torch._dynamo.reset()
    for call in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        result = call(q, k, v, split_size=128, num_splits=2)
        assert torch.allclose(result, expected, atol=1e-5)
        assert torch.allclose(torch.autograd.grad(result.sum(), k)[0], slope, atol=1e-5)
    each_of = torch.vmap(lambda x: attention(x, k, v, num_splits=2))(torch.stack([q, -q]))
    assert torch.allclose(each_of[0], expected, atol=1e-5)


def test_checkpoints_and_autocast(device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    inputs = varlen_arrays(replace(PACKED, dtype="bfloat16"))
    arguments = arguments_of(inputs, device, grad=True)
    wide = {name: arguments[name].detach().float().requires_grad_() for name in "qkv"}
    leaves = tuple(arguments[name] for name in "qkv")
    assert_vjp_sequences(inputs, *checkpoint(attention, use_reentrant=False, return_lse=True, **arguments), leaves)
    with torch.autocast(device, torch.bfloat16):
        assert_sequences(inputs, *attention(**arguments | wide, return_lse=True))


def test_lengths_changed_after_the_call_raise_in_backward() -> None:
    arguments = arguments_of(varlen_arrays(PACKED), grad=True)
    out = attention(**arguments)
    arguments["cu_seqlens_q"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_invalid_arguments_are_refused_by_name() -> None:
    arguments = arguments_of(varlen_arrays(PACKED).filled(0.0))
    compiled = torch.compile(attention, backend="eager")
    for name, wrong, words in (
        ("cu_seqlens_q", [0, 5], "cu_seqlens_q is a list; give a torch tensor"),
        ("cu_seqlens_q", torch.zeros(5), "cu_seqlens_q has dtype float32; this problem needs int32"),
        ("cu_seqlens_k", torch.zeros(3, dtype=torch.int32), "cu_seqlens_k is for 2 sequences"),
        ("seqused_k", torch.zeros(4, dtype=torch.int32, device="meta"), "seqused_k is .* on meta, but q is .* on cpu"),
        ("max_seqlen_q", True, "max_seqlen_q=True is a bool"),
        ("num_splits", True, "num_splits=True is a bool"),
        ("num_splits", None, "num_splits=None is a NoneType"),
        ("split_size", 100, "split_size=100; give a positive multiple of 128"),
    ):
        with pytest.raises(ProblemError, match=words):
            attention(**arguments | {name: wrong})
    with pytest.raises(ProblemError, match="max_seqlen_k=3, but the call is not varlen"):
        attention(*(torch.zeros(1, 2, 2, 8) for _ in range(3)), max_seqlen_k=3)
    torch._dynamo.reset()
    with pytest.raises(ProblemError, match="max_seqlen_q=True is a bool"):
        compiled(**arguments | {"max_seqlen_q": True})


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_other_lengths() -> None:
    case = replace(PACKED, queries=(60, 4), keys=(60, 4), dims=(64, 64), bounded=False)
    arguments = arguments_of(varlen_arrays(case), "cuda")
    attention(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(**arguments)
    for bounds in ([2, 62, 66], [2, 10, 66]):
        for side in "qk":
            arguments[f"cu_seqlens_{side}"].copy_(torch_of(np.array(bounds, np.int32), "cuda"))
        graph.replay()
        assert_equal(captured, attention(**arguments))


def test_check_is_refused_where_a_call_is_traced() -> None:
    q, cu_seqlens = torch.randn(8, 2, 8), torch.tensor([0, 3, 8], dtype=torch.int32)

    def checked(q: Any) -> Any:
        return attention(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, check=True)

    text = "check=True reads cu_seqlens_q, cu_seqlens_k"
    torch._dynamo.reset()
    with refused(torch._dynamo.exc.Unsupported, text, "leave fullgraph=False"):
        torch.compile(checked, backend="eager", fullgraph=True)(q)
    with refused(UnsupportedError, text):
        torch.func.grad(lambda q: checked(q).sum())(q)
    with refused(UnsupportedError, text):
        torch.fx.experimental.proxy_tensor.make_fx(checked)(q)
    with refused(UnsupportedError, text):
        torch.export.export(Checked(checked), (q,), strict=False)
    assert checked(q).shape == q.shape


class Checked(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, q: Any) -> Any:
        return self.function(q)


CHECKED = {
    "plain": {},
    "bias": {"bias": torch.arange(64.0).view(8, 8)},
    "mask_mod": {"mask_mod": lambda b, h, i, j: i >= j},
    "dropout": {"dropout_p": 0.5, "dropout_seed": 3},
}


@pytest.mark.parametrize("mods", CHECKED)
def test_check_reads_between_the_graphs_of_compiled_code(mods: str) -> None:
    torch._dynamo.reset()
    right, wrong = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 8], [0, 9, 8]))

    def checked(q: Any, bounds: Any) -> Any:
        return attention(2 * q, q, q, cu_seqlens_q=bounds, cu_seqlens_k=bounds, check=True, **CHECKED[mods]) + 1

    compiled, tensors = torch.compile(checked, backend="aot_eager"), []
    q = torch.randn(8, 2, 8, requires_grad=True)
    for call in (compiled, checked):
        out = call(q, right)
        tensors.append((out, *torch.autograd.grad(out.sin().sum(), q)))
    assert_equal(*tensors)
    with refused(ProblemError, "cu_seqlens_q is [0, 9, 8]"):
        compiled(q, wrong)


@pytest.mark.parametrize("mods", CHECKED)
def test_a_call_without_lengths_has_nothing_to_check(mods: str) -> None:
    torch._dynamo.reset()
    q = torch.randn(3, 2, 8, 2, 8)

    def checked(q: Any) -> Any:
        return attention(q, q, q, check=True, **CHECKED[mods])

    def plain(q: Any) -> Any:
        return attention(q, q, q, **CHECKED[mods])

    def gradient(call: Any) -> Any:
        return torch.func.grad(lambda q: call(q).sin().sum())(q[0])

    is_plain = not CHECKED[mods]
    assert_equal(torch.compile(checked, backend="aot_eager", fullgraph=is_plain)(q[0]), plain(q[0]))
    assert_equal(gradient(checked), gradient(plain))
    with pytest.raises(UnsupportedError, match="tangent of forward-mode"):
        torch.func.jvp(checked, (q[0],), (q[0],))
    if is_plain:
        assert_equal(torch.vmap(checked)(q), torch.stack([*map(plain, q)]))
        assert_equal(torch.fx.experimental.proxy_tensor.make_fx(checked)(q[0])(q[1]), plain(q[1]))


def test_check_is_a_bool() -> None:
    q = torch.randn(1, 4, 2, 8)
    with refused(ProblemError, "check=1", "give True or False"):
        attention(q, q, q, check=1)  # type: ignore[arg-type]
