"""Activation checkpoints: plain, selective, under a mode that counts FLOPs; saved tensors are unpacked once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tensors import assert_equal
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cuflash.frameworks import flash_attn_3_interface as flash_attn_3
from cuflash.frameworks import flash_attn_4_interface as flash_attn_4
from cuflash.frameworks import flash_attn_interface as flash_attn
from cuflash.frameworks.torch import attention, flex_attention, ops, triangle_attention

ATTENTION, MATMUL = torch.ops.cuflash.attention.default, torch.ops.aten.mm.default
HEADS, ROWS, DIM = 2, 9, 16
DENSE, PACKED, HEADS_FIRST = (2, ROWS, HEADS, DIM), (ROWS, HEADS, DIM), (2, HEADS, ROWS, DIM)
BOUNDS = torch.tensor([0, 4, ROWS], dtype=torch.int32)
SEQUENCES: dict[str, Any] = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS, "max_seqlen_q": 5, "max_seqlen_k": 5}


def of_mods(q: Any, k: Any, v: Any, slopes: Any, sinks: Any, bias: Any) -> Any:
    return attention(q, k, v, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), sinks=sinks, bias=bias)


def of_flex(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    return flex_attention(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())


def of_layer(q: Any, k: Any, v: Any, weight: Any) -> Any:
    """Attention between products of matrices, which selective checkpoints save."""
    return attention(q @ weight, k, v, causal=True) @ weight


# The shapes of the inputs, all of which require grad, and a function of them.
Case = tuple[tuple[tuple[int, ...], ...], Callable[..., Any]]
PLAIN: dict[str, Case] = {
    "dense": ((DENSE,) * 3, functools.partial(attention, causal=True)),
    "lse": ((DENSE,) * 3, lambda *x: attention(*x, return_lse=True)[1]),
    "packed": ((PACKED,) * 3, functools.partial(attention, **SEQUENCES)),
    "layer": ((*(DENSE,) * 3, (DIM, DIM)), of_layer),
    "op": ((DENSE,) * 3, lambda *x: torch.ops.cuflash.attention(*x, None, True, -1, -1, None, 0.0, False)[0]),
    "flash-attn": ((DENSE,) * 3, functools.partial(flash_attn.flash_attn_func, causal=True)),
    "flash-attn, one tensor": (((2, ROWS, 3, HEADS, DIM),), flash_attn.flash_attn_qkvpacked_func),
    "flash-attn, packed": ((PACKED,) * 3, lambda *x: flash_attn.flash_attn_varlen_func(*x, BOUNDS, BOUNDS, 5, 5)),
    "flash-attn 3": ((DENSE,) * 3, flash_attn_3.flash_attn_func),
    "flash-attn 4": ((DENSE,) * 3, lambda *x: flash_attn_4.flash_attn_func(*x)[0]),
}
MODS: dict[str, Case] = {
    "mods": ((*(DENSE,) * 3, (HEADS,), (HEADS,), (HEADS, ROWS, ROWS)), of_mods),
    "packed mods": ((*(PACKED,) * 3, (HEADS,)), lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, **SEQUENCES)),
    "dropout": ((DENSE,) * 3, functools.partial(attention, dropout_p=0.3)),
    "flex": ((*(HEADS_FIRST,) * 3, (HEADS,)), of_flex),
    "triangle": ((*((1, 5, HEADS, 5, DIM),) * 3, (1, HEADS, 5, 5)), triangle_attention),
    "flash-attn, dropout": ((DENSE,) * 3, functools.partial(flash_attn.flash_attn_func, dropout_p=0.3)),
    "flash-attn, ALiBi": ((DENSE,) * 3, lambda *x: flash_attn.flash_attn_func(*x, alibi_slopes=torch.ones(HEADS))),
}
CASES = PLAIN | MODS


def inputs_of(case: str) -> tuple[list[Any], Callable[..., Any]]:
    """Returns random inputs that require grad, and the function."""
    shapes, function = CASES[case]
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes], function


def gradients(function: Callable[..., Any], inputs: list[Any]) -> Any:
    """Returns gradients of a loss; each time by the same seeds of dropout."""
    torch.manual_seed(3)
    return torch.autograd.grad(function(*inputs).square().sum(), inputs)


@contextlib.contextmanager
def unpacked_once() -> Iterator[list[Any]]:
    """Inside, a second read of a saved tensor raises, as it does in a checkpoint. Yields the saved tensors."""
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


def test_a_second_read_of_a_saved_tensor_is_noticed() -> None:
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
def test_a_selective_checkpoint_that_saves_attention_computes_it_once(
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
def test_flops_of_a_checkpoint_are_those_of_one_more_forward(case: str, is_reentrant: bool) -> None:
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
    # The last product of the layer is not computed again, as its backward needs its operands alone.
    spared = 2 * 2 * ROWS * HEADS * DIM * DIM if case == "layer" and not is_reentrant else 0
    assert (same, more) == (forward, total + forward - spared)
    assert (forward > 0) == (case in PLAIN)
