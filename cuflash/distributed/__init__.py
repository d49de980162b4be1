"""Attention over a sequence that many GPUs share (context parallelism).

Example::

    from cuflash.distributed import Layout, attention, unshard

    layout = Layout(seqlen, torch.distributed.group.WORLD)    # or cu_seqlens of packed documents
    x, positions = layout.shard(x, dim=1), layout.positions()
    out = attention(q, k, v, layout=layout, causal=True)    # this rank's rows

`attention`, `unshard` and `region` are for PyTorch; `cuflash.distributed.jax.attention` runs within `jax.shard_map`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import ExchangeError
from .layout import Layout
from .work import plan

if TYPE_CHECKING:
    from .regions import region as region
    from .torch import attention as attention
    from .torch import unshard as unshard

__all__ = ["ExchangeError", "Layout", "attention", "plan", "region", "unshard"]


def __getattr__(name: str) -> Any:
    """Imports what needs PyTorch at its first use."""
    modules = {"attention": "torch", "region": "regions", "unshard": "torch"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{modules[name]}", __name__), name)


def __dir__() -> list[str]:
    """Returns all names, also those that need PyTorch."""
    return sorted({*globals(), *__all__})
