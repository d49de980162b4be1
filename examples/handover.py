"""Passes memory through three libraries without a copy: PyTorch tensors to cuflash, and the result to JAX.

It runs on a GPU if PyTorch and JAX both have one, else on the CPU. It exits with 1 if the result is wrong, or is a copy
on a GPU.
"""

from __future__ import annotations

import os
import sys

from packages import explain_missing

import cuflash

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX reserves most of the GPU's memory

with explain_missing():
    import jax
    import jax.numpy as jnp
    import torch


def main() -> int:
    """Runs attention on PyTorch tensors, and reads the result in JAX."""
    gpus = torch.cuda.is_available() and any(device.platform == "gpu" for device in jax.devices())
    device, dtype = ("cuda", torch.bfloat16) if gpus else ("cpu", torch.float32)
    print(f"Running on the {'GPU' if gpus else 'CPU'}.")
    q, k, v = (torch.randn(2, 256, 8, 64, device=device, dtype=dtype) for _ in range(3))

    out = cuflash.forward(q, k, v, causal=True)  # reads the tensors in place, on PyTorch's current stream
    handed = jax.dlpack.from_dlpack(out)
    shared = handed.unsafe_buffer_pointer() == out.data_ptr()
    print(f"PyTorch's {tuple(out.shape)} and JAX's {handed.shape} {'share their memory' if shared else 'are copies'}.")
    if gpus and not shared:  # on the CPU, JAX copies arrays that do not start at a multiple of 64 bytes
        return 1

    exact = jax.nn.dot_product_attention(*(jnp.asarray(x.float().cpu().numpy()) for x in (q, k, v)), is_causal=True)
    error = float(jnp.max(jnp.abs(handed.astype("float32") - jax.device_put(exact, next(iter(handed.devices()))))))
    print(f"error {error:.1e}")
    return int(not error < (3e-2 if gpus else 1e-5))


if __name__ == "__main__":
    sys.exit(main())
