"""vmap over attention, in eager calls, compiled graphs and the ops: one call for all elements, equal to a loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from eager_torch import assert_close
from tensors import assert_equal
from warned import warnings_are_errors

from cuflash import ProblemError
from cuflash.frameworks.torch import attention, ops

SIZE = 3
SHAPES = {4: (2, 5, 4, 8), 3: (5, 4, 8), 2: (5, 8)}  # by rank
OPTIONS = (None, True, -1, -1, None, 0.0, False)
Axes = Sequence[int | None]


def with_lse(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, causal=True, return_lse=True)


def by_op(q: Any, k: Any, v: Any) -> Any:
    return torch.ops.cuflash.attention(q, k, v, *OPTIONS)


def by_backward_op(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any) -> Any:
    return torch.ops.cuflash.attention_backward(dout, q, k, v, out, lse, dlse, *OPTIONS)


def random(shapes: Sequence[tuple[int, ...]], axes: Axes, grad: bool = True) -> list[Any]:
    """Returns tensors of these shapes, with a mapped axis where one is named."""
    generator = torch.Generator().manual_seed(11)
    tensors = []
    for shape, axis in zip(shapes, axes, strict=True):
        whole = shape if axis is None else (*shape[:axis], SIZE, *shape[axis:])
        tensors.append(torch.randn(whole, generator=generator, dtype=torch.float64).requires_grad_(grad))
    return tensors


def in_a_loop(function: Callable[..., Any], axes: Axes, tensors: Sequence[Any]) -> list[Any]:
    pairs = list(zip(tensors, axes, strict=True))
    elements = [function(*(x if n is None else x.select(n, index) for x, n in pairs)) for index in range(SIZE)]
    return [torch.stack(each) for each in zip(*elements, strict=True)]


def gradients_of(results: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """Returns gradients of a loss of results."""
    return torch.autograd.grad(sum(x.sin().sum() for x in results), inputs)


def combinations(rank: int) -> list[Axes]:
    """Returns all axes of three operands, of which at least one is mapped."""
    in_dims = [None, *range(rank + 1)]
    return [axes for axes in itertools.product(in_dims, repeat=3) if set(axes) != {None}]


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    with warnings_are_errors():
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the names of the functions that the ops call."""
    names: list[str] = []
    for name in ("forward", "backward"):
        function = getattr(ops, name)
        counted = lambda *x, name=name, function=function, **options: names.append(name) or function(*x, **options)  # noqa: E731
        monkeypatch.setattr(ops, name, counted)
    return names


@pytest.mark.parametrize("function", [with_lse, by_op], ids=["attention", "op"])
@pytest.mark.parametrize("rank", SHAPES)
def test_any_axes_have_the_results_of_a_loop(rank: int, function: Callable[..., Any]) -> None:
    for axes in combinations(rank):
        inputs = random([SHAPES[rank]] * 3, axes)
        results, expected = torch.vmap(function, in_dims=axes)(*inputs), in_a_loop(with_lse, axes, inputs)
        assert_equal(results, expected)
        assert_close(gradients_of(results, inputs), gradients_of(expected, inputs))


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (4, None, 1), (2, 3, 0), (None, None, 0)], ids=str)
@pytest.mark.parametrize("function", [with_lse, by_op], ids=["attention", "op"])
def test_compiled_vmap_is_one_call(function: Callable[..., Any], axes: Axes, calls: list[str]) -> None:
    torch._dynamo.reset()
    inputs = random([SHAPES[4]] * 3, axes)
    compiled = torch.compile(lambda *x: torch.vmap(function, axes)(*x), fullgraph=True, backend="aot_eager")
    results, expected = compiled(*inputs), in_a_loop(with_lse, axes, inputs)
    assert_equal(results, expected)
    assert_close(gradients_of(results, inputs), gradients_of(expected, inputs))
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize("axes", [(0, None, None), (None, 1, 2), (0, 0, 0)], ids=str)
def test_gradients_inside_of_vmap_in_a_compiled_graph_are_one_call(axes: Axes, calls: list[str]) -> None:
    torch._dynamo.reset()
    inputs = random([SHAPES[4]] * 3, axes, grad=False)
    gradients = torch.func.grad(lambda *x: sum(y.sin().sum() for y in with_lse(*x)), argnums=(0, 1, 2))
    mapped = torch.vmap(gradients, in_dims=axes)
    compiled = torch.compile(lambda *x: mapped(*x), fullgraph=True, backend="aot_eager")
    results = compiled(*inputs)
    assert calls == ["forward", "backward"]
    assert_close(results, in_a_loop(gradients, axes, inputs))
    assert_close(mapped(*inputs), results)


def test_vmap_of_vmap_in_a_compiled_graph_is_one_call(calls: list[str]) -> None:
    torch._dynamo.reset()
    q, k, v = random([(SIZE, 2, *SHAPES[3])] * 3, (None,) * 3, grad=False)
    nested = torch.vmap(torch.vmap(with_lse, in_dims=(0, None, 0)), in_dims=(0, 0, 0))
    compiled = torch.compile(lambda *x: nested(*x), fullgraph=True, backend="aot_eager")
    results = compiled(q, k[:, 0], v)
    assert calls == ["forward"]
    whole = k[:, :1].expand(k.shape)
    flat = with_lse(*(x.flatten(0, 1) for x in (q, whole, v)))
    assert_equal(results, [x.unflatten(0, (SIZE, 2)) for x in flat])


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize("rank", SHAPES)
def test_any_axes_of_the_op_of_gradients(rank: int, has_dlse: bool) -> None:
    shape = SHAPES[rank]
    out, lse = with_lse(*random([shape] * 3, (None,) * 3, grad=False))
    shapes = [shape] * 4 + [tuple(out.shape)] + [tuple(lse.shape)] * 2
    for choice in itertools.product((False, True), repeat=6 + has_dlse):
        if not any(choice):
            continue
        axes: list[int | None] = [n % len(x) if choice[n] else None for n, x in enumerate(shapes[: len(choice)])]
        tensors = random(shapes[: len(axes)], axes, grad=False)
        if not has_dlse:
            axes, tensors = [*axes, None], [*tensors, None]
        results = torch.vmap(by_backward_op, in_dims=tuple(axes))(*tensors)
        assert_close(results, in_a_loop(by_backward_op, axes, tensors))


def test_vmap_over_ops_of_sequences_loops_and_warns() -> None:
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    axes = (0, None, 2)
    inputs = random([SHAPES[3]] * 3, axes)
    results = []

    def packed(q: Any, k: Any, v: Any) -> Any:
        return torch.ops.cuflash.attention(q, k, v, *OPTIONS, bounds, bounds)

    with pytest.warns(UserWarning, match="runs one call of cuflash for each element"):
        results = torch.vmap(packed, in_dims=axes)(*inputs)
    expected = in_a_loop(packed, axes, inputs)
    assert_equal(results, expected)
    assert_close(gradients_of(results, inputs), gradients_of(expected, inputs))


def test_different_ranks_are_refused() -> None:
    q, k, v = random([SHAPES[4], SHAPES[3], SHAPES[3]], (0, None, None))
    for function in (with_lse, by_op):
        with pytest.raises(ProblemError, match="q, k and v have ranks 4, 3 and 3 under vmap"):
            torch.vmap(function, in_dims=(0, None, None))(q, k, v)
