"""Index offsets in PyTorch and JAX: a call on slices is the part of one call on the whole, with gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuflash import ProblemError

ROWS, HEADS = 40, 4
OFFSETS = 13, 0, 2, 1
Q, K, V = np.random.default_rng(0).standard_normal((3, 2, ROWS, HEADS, 8)).astype(np.float32)
SLOPES = np.linspace(0.1, 0.5, HEADS, dtype=np.float32)
DROPOUT: dict[str, Any] = {"dropout_p": 0.3, "dropout_seed": 5}


def part(x: Any) -> Any:
    """Returns the rows from 13 on of the last two heads of the last sequence, or slopes of no other heads."""
    return x[1:, 13:, 2:]


def tilted(slopes: Any) -> dict[str, Any]:
    """Returns the arguments of a call whose functions and dropout depend on all indices."""
    return DROPOUT | {
        "score_mod": lambda score, b, h, i, j: score - slopes[h] * (i - j) * (b + 1),
        "mask_mod": lambda b, h, i, j: (2 * i + j + h + b) % 5 != 0,
    }


def test_pytorch() -> None:
    torch = pytest.importorskip("torch")
    from cuflash.frameworks.torch import attention

    def results(function: Any) -> list[Any]:
        leaves = [torch.tensor(x, requires_grad=True) for x in (Q, K, V, SLOPES)]
        out = function(*leaves)
        return [out, *torch.autograd.grad((out * torch.arange(out.numel()).reshape(out.shape).sin()).sum(), leaves)]

    whole = results(lambda q, k, v, slopes: part(attention(q, k, v, **tilted(slopes))))
    some = results(
        lambda q, k, v, slopes: attention(part(q), k[1:, :, 2:], v[1:, :, 2:], index_offsets=OFFSETS, **tilted(slopes))
    )
    for x, y in zip(some, whole, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_pytorchs_compiled_calls_without_mods_take_them() -> None:
    torch = pytest.importorskip("torch")
    from cuflash.frameworks.torch import attention

    def call(q: Any, offsets: Any) -> Any:
        return attention(q, q, q, index_offsets=offsets)

    q, compiled = torch.tensor(Q), torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, (3, 4)), attention(q, q, q))
    with pytest.raises(ProblemError, match=r"index_offsets=\(3, -4\) holds -4"):
        attention(q, q, q, index_offsets=(3, -4))


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    from cuflash.frameworks.jax import attention

    def results(function: Any) -> list[Any]:
        def loss(*leaves: Any) -> Any:
            out = function(*leaves)
            return (out * np.sin(np.arange(out.size)).reshape(out.shape)).sum()

        leaves = Q, K, V, SLOPES
        return [function(*leaves), *jax.jit(jax.grad(loss, range(4)))(*leaves)]

    whole = results(lambda q, k, v, slopes: part(attention(q, k, v, **tilted(slopes))))
    some = results(
        lambda q, k, v, slopes: attention(part(q), k[1:, :, 2:], v[1:, :, 2:], index_offsets=OFFSETS, **tilted(slopes))
    )
    for x, y in zip(some, whole, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    with pytest.raises(ProblemError, match=r"index_offsets=.* make it static"):
        jax.jit(lambda q, offset: attention(q, q, q, index_offsets=(offset, 0)))(Q, 3)


def test_attributes_of_jax_hold_them() -> None:
    pytest.importorskip("jax")
    from cuflash.frameworks.jax.call import static_of
    from cuflash.frameworks.jax.handlers import CallSpec
    from cuflash.ops.mods import ModArgs, resolve_mods
    from cuflash.problem.operands import FORWARD
    from cuflash.problem.options import Options

    options = Options(dropout_p=0.3, index_offsets=(3, 5, 7, 0))
    op = resolve_mods(FORWARD, ModArgs(mask_mod=tilted(SLOPES)["mask_mod"], dropout_p=0.3), (), options).op
    static = static_of(("q", "k", "v", "dropout_seed"), (Q, K, V, np.zeros(2, np.uint32)), options, op)
    spec = CallSpec(static, ((1,),), ("float32",))
    assert CallSpec.decode(spec.encode().tobytes()) == spec
    assert spec.static.options().index_offsets == (3, 5, 7, 0)
