"""Activation checkpoints: plain, selective, under a mode that counts FLOPs; saved tensors are read once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tensors import assert_equal
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch_calls import CASES, DIM, HEADS, PLAIN, ROWS, gradients, inputs_of

from cuflash.frameworks.torch import ops

ATTENTION, MATMUL = torch.ops.cuflash.attention.default, torch.ops.aten.mm.default


@contextlib.contextmanager
def unpacked_once() -> Iterator[list[Any]]:
    """Makes a second read of a saved tensor raise, as in a checkpoint. Yields the saved tensors."""
    packs: list[Any] = []
    unpacked: set[int] = set()

    def pack(tensor: Any) -> int:
        packs.append(tensor)
        return len(packs) - 1

    def unpack(number: int) -> Any:
        assert number not in unpacked, "a saved tensor is read twice"
        unpacked.add(number)
        return packs[number]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield packs


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", CASES)
def test_saved_tensors_are_unpacked_once(case: str, is_compiled: bool) -> None:
    inputs, function = inputs_of(case)
    expected = gradients(function, inputs)
    if is_compiled:
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager")
    with unpacked_once() as packs:
        assert_equal(gradients(function, inputs), expected)
    assert packs


def test_second_read_of_a_saved_tensor_raises() -> None:
    class Twice(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            return ctx.saved_tensors[0] * ctx.saved_tensors[0] * dout

    with unpacked_once(), pytest.raises(AssertionError, match="read twice"):
        Twice.apply(torch.ones((), requires_grad=True)).backward()


@pytest.mark.parametrize("saves", [MATMUL, ATTENTION], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_a_selective_checkpoint(case: str, saves: Any) -> None:
    inputs, function = inputs_of(case)
    expected = gradients(function, inputs)
    contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, [saves])
    under = functools.partial(checkpoint, function, use_reentrant=False, context_fn=contexts)
    assert_equal(gradients(under, inputs), expected)


@pytest.mark.parametrize(("saves", "count"), [(MATMUL, 2), (ATTENTION, 1)], ids=str)
def test_selective_checkpoints_that_save_attention_run_it_once(
    saves: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, function = inputs_of("layer")
    calls, forward = [], ops.forward
    monkeypatch.setattr(ops, "forward", lambda *x, **options: calls.append(1) or forward(*x, **options))
    contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, [saves])
    gradients(functools.partial(checkpoint, function, use_reentrant=False, context_fn=contexts), inputs)
    assert len(calls) == count


@pytest.mark.parametrize("case", ["dense", "packed", "layer", "op"])
def test_a_selective_checkpoint_in_a_compiled_graph(case: str) -> None:
    inputs, function = inputs_of(case)
    expected = gradients(function, inputs)
    contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, [ATTENTION])
    under = functools.partial(checkpoint, function, use_reentrant=False, context_fn=contexts)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: under(*x), backend="aot_eager", fullgraph=True)
    assert_equal(gradients(compiled, inputs), expected)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_checkpoints_count_the_flops_of_one_more_forward(case: str, is_reentrant: bool) -> None:
    inputs, function = inputs_of(case)
    expected = gradients(function, inputs)
    counts = []
    under = functools.partial(checkpoint, function, use_reentrant=is_reentrant)
    for call in (function, under):
        for x in inputs:
            x.grad = None
        torch.manual_seed(3)
        with FlopCounterMode(display=False) as counter:
            out = call(*inputs)
            forward = counter.get_total_flops()
            out.square().sum().backward()
        assert_equal([x.grad for x in inputs], expected)
        counts.append((forward, counter.get_total_flops()))
    (forward, total), (same, more) = counts
    # The layer's last product is not recomputed: its backward needs its operands alone.
    spared = 2 * 2 * ROWS * HEADS * DIM * DIM if case == "layer" and not is_reentrant else 0
    assert (same, more) == (forward, total + forward - spared)
    assert (forward > 0) == (case in PLAIN)


@pytest.mark.parametrize("counts_forward", [False, True])
@pytest.mark.parametrize("case", ["dense", "packed"])
def test_a_checkpoint_may_be_recomputed_under_another_mode(case: str, counts_forward: bool) -> None:
    inputs, function = inputs_of(case)
    expected = gradients(function, inputs)
    with FlopCounterMode(display=False) if counts_forward else contextlib.nullcontext():
        loss = checkpoint(function, *inputs, use_reentrant=False).square().sum()
    with contextlib.nullcontext() if counts_forward else FlopCounterMode(display=False):
        assert_equal(torch.autograd.grad(loss, inputs), expected)
