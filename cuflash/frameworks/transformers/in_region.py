"""Layers and masks of transformers within `cuflash.distributed.region`, whose layout has the documents."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ...distributed import regions
from ...distributed.regions import Region
from ...errors import ProblemError, UnsupportedError
from ..torch.tensors import disabled
from .masks import Pattern

_layers: weakref.WeakSet[Any] = weakref.WeakSet()  # layers whose last forward ran in a region


def region_of(module: torch.nn.Module) -> Region | None:
    """Returns the region around a layer's call; raises for a layer that backward computes again outside of its own."""
    region = regions.current() if regions.active else None
    if region is not None:
        _layers.add(module)
    elif module in _layers:
        if torch._C._current_graph_task_id() != -1:
            raise UnsupportedError(
                f"{type(module).__name__} ran in a cuflash.distributed.region, and checkpointing computes it again "
                "outside of it: call backward() within the region"
            )
        _layers.discard(module)
    return region


def check_layer(attention_mask: Any, position_bias: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raises for arguments of a layer that hold for the rows of one rank alone."""
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ProblemError(
            "cu_seq_lens_q within a region: the region's layout has the documents; leave it out, and give "
            "Layout(cu_seqlens, group) to cuflash.distributed.region"
        )
    named = {"attention_mask": attention_mask is not None, "position_bias": position_bias is not None}
    for name in [name for name, is_refused in named.items() if is_refused]:
        raise UnsupportedError(
            f"{name} of a layer within cuflash.distributed.region: its keys are those of one rank; causal masks, "
            "windows and the documents of the layout need none"
        )
    if dropout:
        raise UnsupportedError(f"dropout={dropout} within cuflash.distributed.region, which has none; give 0.0")


def _check_mask(mask_function: Any, attention_mask: torch.Tensor | None) -> bool:
    """Returns True within a region; raises there for masks that hide more than its layers do."""
    if regions.current() is None:
        return False
    if attention_mask is not None and not attention_mask.all():
        raise UnsupportedError(
            "attention_mask hides tokens within cuflash.distributed.region; leave it out, and give padding as a "
            "document of its own: Layout(cu_seqlens, group)"
        )
    if mask_function is not None and Pattern.from_function(mask_function) is None:
        raise UnsupportedError(
            "within cuflash.distributed.region masks are causal, sliding windows and documents; this model has another "
            "one, such as chunks or parts that see later tokens"
        )
    return True


_uncompiled = disabled(_check_mask, "cuflash.distributed.region is read outside of graphs; leave fullgraph=False")


def needs_no_mask(mask_function: Any, attention_mask: torch.Tensor | None) -> bool:
    """Returns True within a region, whose layers need no mask; raises UnsupportedError for other masks."""
    return bool(regions.active) and bool(_uncompiled(mask_function, attention_mask))
