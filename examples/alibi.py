"""ALiBi with trained slopes: gradients of an array that a score_mod refers to.

`captured_grads` lists the arrays, and `backward` returns their gradients; in PyTorch, autograd finds them by itself.
The slopes are learned from outputs of attention with the right slopes. It runs with each installed array library, on a
GPU if there is one. It exits with 1 if the loss has not fallen to a hundredth, or if PyTorch's gradient differs.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from every_library import Library, libraries

import cuflash
from cuflash import mods

BATCH, SEQLEN, HEADS, HEAD_DIM = 2, 128, 4, 32
STEPS, RATE = 30, 0.008


def main() -> int:
    """Trains the slopes with each library."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((BATCH, SEQLEN, HEADS, HEAD_DIM)).astype("float32") for _ in range(3)]
    return max([trained(library, arrays) for library in libraries()])


def trained(library: Library, arrays: list[Any]) -> int:
    """Trains with one library; returns 1 on failure, else 0."""
    q, k, v = (library.of_numpy(x) for x in arrays)
    expected = library.of_numpy(np.array([0.5, 0.25, 0.125, 0.0625], "float32"))
    slopes = library.of_numpy(np.full(HEADS, 0.2, "float32"))
    target = cuflash.forward(q, k, v, causal=True, score_mod=mods.alibi(expected))
    losses: list[float] = []
    for _ in range(STEPS + 1):
        loss, gradient = loss_and_gradient(q, k, v, target, slopes)
        if not losses and library.name.startswith("PyTorch"):
            by_autograd = torch_gradient(q, k, v, target, slopes)
            if not np.allclose(library.to_numpy(gradient), library.to_numpy(by_autograd), rtol=1e-3, atol=1e-6):
                print(f"captured_grads gives {gradient}, autograd {by_autograd}")
                return 1
        losses.append(loss)
        slopes = slopes - RATE * gradient  # a new array of the same shape and dtype: no kernel is recompiled
    result = np.round(library.to_numpy(slopes), 3)
    print(f"{library.name}: loss {losses[0]:.1e}, then {losses[-1]:.1e}, slopes {result}")
    return int(not losses[-1] < losses[0] / 100)


def loss_and_gradient(q: Any, k: Any, v: Any, target: Any, slopes: Any) -> tuple[float, Any]:
    """Returns the loss (half the mean squared distance of an output from its target) and the slopes' gradient."""
    call: dict[str, Any] = {"causal": True, "score_mod": mods.alibi(slopes)}
    out, lse = cuflash.forward(q, k, v, return_lse=True, **call)
    count = BATCH * SEQLEN
    dout = (out - target) / count
    *_, (dslopes,) = cuflash.backward(dout, q, k, v, out, lse, captured_grads=(slopes,), **call)
    return float(((out - target) ** 2).sum()) / (2 * count), dslopes


def torch_gradient(q: Any, k: Any, v: Any, target: Any, slopes: Any) -> Any:
    """Returns the slopes' gradient by autograd: tensors that a score_mod refers to are inputs of the call."""
    from cuflash.frameworks.torch import attention

    slopes = slopes.clone().requires_grad_()
    out = attention(q, k, v, causal=True, score_mod=mods.alibi(slopes))
    (((out - target) ** 2).sum() / (2 * BATCH * SEQLEN)).backward()
    return slopes.grad


if __name__ == "__main__":
    sys.exit(main())
