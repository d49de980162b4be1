"""PyTorch's function transforms around attention: torch.func, and programs traced by make_fx."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tensors import assert_equal, assert_gradients, assert_vjp, in_numpy, loss, random_qkv, with_lse

from cuflash import UnsupportedError
from cuflash.frameworks.torch import attention
from cuflash.testing import oracle


def test_function_transforms(device: str) -> None:
    q, k, v = random_qkv(device, grad=False)
    stacked = torch.stack([q, 2 * q, -q])
    each = torch.stack([attention(x, k, v, causal=True) for x in stacked])
    assert_equal(torch.vmap(lambda x: attention(x, k, v, causal=True))(stacked), each)
    moved = torch.vmap(lambda x, y: attention(x, y, v, causal=True), in_dims=(2, None), out_dims=1)
    assert_equal(moved(stacked.movedim(0, 2), k).movedim(1, 0), each)


def test_gradients_by_function_transforms(device: str) -> None:
    q, k, v = (x.detach() for x in random_qkv(device))
    gradient = torch.func.grad(lambda x: loss(*with_lse(x, k, v)))
    of_each = torch.vmap(gradient)(torch.stack([q, -q]))
    for x, grad in ((q, gradient(q)), (q, of_each[0]), (-q, of_each[1])):
        assert_gradients((grad, None, None), (x, k, v))
    single = torch.vmap(torch.vmap(lambda *x: attention(*x), in_dims=1, out_dims=1))(q[:, :, :2], k, v)  # heads, batch
    assert_equal(single, attention(q[:, :, :2], k, v))


def test_mapped_over_nothing(device: str) -> None:
    q, k, v = random_qkv(device, grad=False)
    result = torch.vmap(lambda x: attention(x, k, v))(q.new_empty(0, *q.shape))
    assert result.shape == (0, *q.shape)


def test_tensors_that_outlive_a_transform_are_accepted(device: str) -> None:
    q, k, v = random_qkv(device, grad=False)
    leaked = []

    def value(k: Any) -> Any:
        leaked.append(2 * k)
        return leaked[0].sum()

    torch.func.grad(value)(k)
    for grad in (False, True):
        assert_equal(attention(q.requires_grad_(grad), leaked[0], v), attention(q, 2 * k, v))


def test_tensors_captured_by_a_transform_get_gradients(device: str) -> None:
    q, k, v = random_qkv(device)
    x = torch.ones((), dtype=q.dtype, device=device)

    def value(x: Any) -> Any:
        return (x * attention(q, k, v)).square().sum()

    slope, result = torch.func.grad_and_value(value)(x)
    out = attention(q, k, v)
    exact, near = (2 * y.square().sum() for y in (out.double(), out))
    for number in (slope, 2 * result):
        oracle.assert_close("slope", *map(in_numpy, (number, exact, near)), ulps=4)
    scaled = torch.vmap(lambda x: x * attention(q, k, v).sum())(torch.stack([x, 3 * x]))
    grads = torch.autograd.grad(scaled.sum(), (q, k, v))
    assert_vjp(grads, (q, k, v), torch.full_like(out, 4))


def test_gradients_of_cached_keys_under_a_transform_are_refused() -> None:
    """torch.func takes gradients of tensors that require them outside, though gradients are disabled inside."""
    q, pages = torch.randn(2, 4, 2, 8, requires_grad=True), torch.randn(3, 4, 2, 8)
    table, used = (torch.tensor(x, dtype=torch.int32) for x in ([[0], [1]], [4, 3]))

    def value(x: Any) -> Any:
        with torch.no_grad():
            out = attention(q, pages, pages, page_table=table, seqused_k=used)
        return (x * out).sum()

    _, result = torch.func.grad_and_value(value)(torch.ones(()))
    with pytest.raises(UnsupportedError, match="page_table was given, but cached keys have no gradients"):
        result.backward()


def test_programs_of_gradients_hold_the_ops(device: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = random_qkv(device, grad=False)

    def by_autograd(q: Any, k: Any, v: Any) -> Any:
        x = q.detach().requires_grad_()
        return torch.autograd.grad(loss(*with_lse(x, k, v, deterministic=True)), x)[0]

    by_transform = torch.func.grad(lambda q, k, v: loss(*with_lse(q, k, v, deterministic=True)))
    of_each = torch.vmap(by_transform, in_dims=(0, None, None))
    functional = torch.func.functionalize(lambda q, k, v: attention(q, k, v))
    for function, argument in ((by_autograd, q), (by_transform, q), (of_each, torch.stack([q, -q])), (functional, q)):
        program = make_fx(function)(argument, k, v)
        names = {str(node.target) for node in program.graph.nodes}
        assert "cuflash.attention.default" in names
        assert ("cuflash.attention_backward.default" in names) == (function is not functional)
        assert_equal(program(2 * argument, k, v), function(2 * argument, k, v))


def test_one_compiled_graph_holds_gradients_by_function_transforms(device: str) -> None:
    q, k, v = random_qkv(device, grad=False)

    def value(q: Any, k: Any, v: Any) -> Any:
        return loss(*with_lse(q, k, v, deterministic=True))

    of_all = torch.func.grad(value, (0, 1, 2))
    of_each = torch.vmap(torch.func.grad(value), in_dims=(0, None, None))
    together = torch.func.vjp  # of a function of q alone
    for function, argument in ((of_all, q), (of_each, torch.stack([q, -q])), (torch.func.grad_and_value(value), q)):
        compiled = torch.compile(lambda *x, function=function: function(*x), fullgraph=True, backend="aot_eager")
        for result, expected in zip(compiled(argument, k, v), function(argument, k, v), strict=True):
            assert_equal(result, expected)
    vjp = lambda q: together(lambda x: attention(x, k, v), q)[1](torch.ones_like(q))[0]  # noqa: E731
    assert_equal(torch.compile(vjp, fullgraph=True, backend="aot_eager")(q), vjp(q))
