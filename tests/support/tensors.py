"""PyTorch's attention in tests: tensors, and the tolerance rule for the results and gradients of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from libraries import problem_of, torch_of

from cuflash.frameworks.torch import attention
from cuflash.testing import gradients as of_gradients
from cuflash.testing import oracle
from cuflash.testing.cases import numpy_dtype
from cuflash.testing.sequences import VarlenArrays, check, check_gradients, upstream

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top_left": {"causal": True, "diagonal_offset": 0},
    "window": {"window_size": (3, 1), "diagonal_offset": 1},
    "capped": {"causal": True, "softcap": 2.0, "softmax_scale": 0.3},
}
Tensors = tuple[Any, ...]


def random_qkv(
    device: str, dtype: Any = None, *, heads: tuple[int, int] = (4, 2), lengths: tuple[int, int] = (9, 12),
    dim: int = 16, grad: bool = True,
) -> Tensors:  # fmt: skip
    """Returns random q, k and v."""
    generator = torch.Generator().manual_seed(7)
    dtype = dtype or (torch.float64 if device == "cpu" else torch.float32)
    shapes = [(2, length, heads, dim) for length, heads in zip(lengths, heads, strict=True)]
    tensors = (torch.randn(shape, generator=generator).to(device, dtype) for shape in (*shapes, shapes[1]))
    return tuple(x.requires_grad_(grad) for x in tensors)


def loss(out: Any, lse: Any) -> Any:
    """Returns a number that depends on out and lse."""
    return (out.double() ** 2).sum() + lse.double().sin().sum()


def gradients(function: Callable[..., tuple[Any, Any]], tensors: Tensors, **options: Any) -> Tensors:
    """Returns gradients of the loss of a function's result."""
    return torch.autograd.grad(loss(*function(*tensors, **options)), tensors)


def with_lse(*tensors: Any, **options: Any) -> tuple[Any, Any]:
    """Returns `(out, lse)` of `attention`."""
    return attention(*tensors, return_lse=True, **options)


def in_numpy(x: Any) -> Any:
    """Returns a tensor as a NumPy array of its dtype; None stays None."""
    if x is None:
        return None
    x = x.detach().cpu()
    return x.float().numpy().astype(numpy_dtype("bfloat16")) if x.dtype == torch.bfloat16 else x.numpy()


def assert_results(tensors: Tensors, out: Any, lse: Any = None, **options: Any) -> None:
    """Checks out, and lse if given, of q, k and v against float64 under the tolerance rule."""
    arrays = [in_numpy(x) for x in tensors]
    oracle.assert_attention(problem_of(*arrays, **options), arrays, in_numpy(out), in_numpy(lse))


def assert_vjp(result: Any, tensors: Tensors, dout: Any, dlse: Any = None, **options: Any) -> None:
    """Checks gradients of `(dout * out).sum() + (dlse * lse).sum()` against float64; None skips one."""
    q, k, v = (in_numpy(x) for x in tensors)
    inputs = of_gradients.BackwardArgs(in_numpy(dout), q, k, v, None, None, in_numpy(dlse))
    of_gradients.check(problem_of(q, k, v, **options), inputs, tuple(map(in_numpy, result)))


def assert_gradients(result: Any, tensors: Tensors, **options: Any) -> None:
    """Checks gradients of `loss` against float64, with the loss's gradients of out and lse as upstream gradients."""
    out, lse = with_lse(*(x.detach() for x in tensors), **options)
    assert_vjp(result, tensors, 2 * out, lse.double().cos().to(lse.dtype), **options)


def assert_equal(result: Any, expected: Any) -> None:
    """Checks that tensors, or tuples of them, are equal bit by bit (NaN equals itself)."""
    result, expected = ([x] if isinstance(x, torch.Tensor) else x for x in (result, expected))
    for x, y in zip(result, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(in_numpy(x), in_numpy(y))


def arguments_of(sequences: VarlenArrays, device: str = "cpu", *, grad: bool = False) -> dict[str, Any]:
    """Returns all arguments of `attention` for variable-length sequences; q, k and v require grad if `grad`."""
    arguments = sequences.arguments()
    arguments |= {name: torch_of(x, device) for name, x in arguments.items() if isinstance(x, np.ndarray)}
    return arguments | {name: arguments[name].requires_grad_(grad) for name in "qkv"}


def assert_sequences(sequences: VarlenArrays, out: Any, lse: Any) -> None:
    """Checks out and lse of variable-length sequences against float64."""
    check(sequences, in_numpy(out), in_numpy(lse))


def upstream_of(sequences: VarlenArrays, out: Any, lse: Any) -> tuple[Any, Any]:
    """Returns upstream gradients of out and lse, with NaN in rows of no sequence."""
    pairs = zip(upstream(sequences), (out, lse), strict=True)
    dout, dlse = (torch_of(x.reshape(like.shape), like.device) for x, like in pairs)
    return dout, dlse


def assert_vjp_sequences(sequences: VarlenArrays, out: Any, lse: Any, inputs: Any) -> None:
    """Checks the gradients of autograd, from upstream gradients of out and lse, against float64."""
    result = torch.autograd.grad((out, lse), inputs, upstream_of(sequences, out, lse))
    check_gradients(sequences, [in_numpy(x) for x in result])
