"""Gradients where only some inputs require them: in each integration they equal the gradients of all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tensors import assert_equal
from torch_calls import CASES, gradients, inputs_of


def choices(count: int) -> Iterator[tuple[int, ...]]:
    """Yields each choice of at least one input."""
    for size in range(1, count + 1):
        yield from itertools.combinations(range(count), size)


def gradients_of_some(function: Any, inputs: list[Any], chosen: tuple[int, ...]) -> Any:
    """Returns gradients where the chosen inputs alone require grad."""
    leaves = [x.detach().requires_grad_(number in chosen) for number, x in enumerate(inputs)]
    torch.manual_seed(3)
    return torch.autograd.grad(function(*leaves).square().sum(), [leaves[number] for number in chosen])


@pytest.mark.parametrize("case", CASES)
def test_any_choice_of_inputs_has_the_gradients_of_all(case: str) -> None:
    inputs, function = inputs_of(case)
    expected = gradients(function, inputs)
    for chosen in choices(len(inputs)):
        assert_equal(gradients_of_some(function, inputs, chosen), [expected[number] for number in chosen])


@pytest.mark.parametrize("case", CASES)
def test_one_input_of_a_compiled_call_has_its_gradient(case: str) -> None:
    inputs, function = inputs_of(case)
    expected = gradients(function, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: function(*x), backend="aot_eager")
    for number in range(len(inputs)):
        assert_equal(gradients_of_some(compiled, inputs, (number,)), [expected[number]])
