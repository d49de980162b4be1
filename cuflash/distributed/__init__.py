"""Attention over a sequence that many GPUs share (context parallelism).

Example::

    from cuflash.distributed import Layout, attention, unshard

    layout = Layout(seqlen, torch.distributed.group.WORLD)    # or cu_seqlens of packed documents
    x, positions = layout.shard(x, dim=1), layout.positions()
    out = attention(q, k, v, layout=layout, causal=True)    # this rank's rows

`attention` and `unshard` are for PyTorch; `cuflash.distributed.jax.attention` runs within `jax.shard_map`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ExchangeError
from .layout import Layout
from .work import plan

if TYPE_CHECKING:
    from .torch import attention as attention
    from .torch import unshard as unshard

__all__ = ["ExchangeError", "Layout", "attention", "plan", "unshard"]


def __getattr__(name: str) -> Any:
    """Imports what needs PyTorch at its first use."""
    if name in ("attention", "unshard"):
        from . import torch as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
