"""Regions of a program in which models of other libraries run attention over the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..errors import ProblemError
from ..locks import Lock
from .calls import layout_of, links_of
from .choice import SCHEMES, Scheme
from .layout import Layout
from .torch import attention, groups_of

# PyTorch's thread-local objects, which backward takes along to its threads: they recompute checkpointed layers.
_KEY = "cuflash.distributed.region"
_lock = Lock()
active = 0  # regions of all threads; a plain integer, on which graphs of torch.compile are guarded
is_used = False  # True from the first region on


class Region(NamedTuple):
    """The arguments of a region."""

    layout: Layout
    group: Any
    scheme: Scheme

    def attention(self, *tensors: torch.Tensor, **keywords: Any) -> Any:
        """Computes `cuflash.distributed.attention` of q, k and v with these arguments."""
        q, k, v = tensors
        return attention(q, k, v, layout=self.layout, group=self.group, scheme=self.scheme, **keywords)


def current() -> Region | None:
    """Returns the innermost region around a call in this thread, or around the backward that runs in it."""
    region: Region | None = torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None
    return region


@contextmanager
def region(layout: Layout, group: Any = None, scheme: Scheme = "auto") -> Iterator[None]:
    """Runs models with `attn_implementation="cuflash"` over a sequence whose rows the ranks of a group share.

    Within it, each layer calls `attention` of this module with the layout. Causal masks, sliding windows, softcap and
    sinks are those of the whole sequence, and packed documents those of the layout.

    Parameters
    ----------
    layout : Layout
        The rows of each rank. The caller passes its rows of all inputs, `layout.shard(ids, dim=1)`, and
        `layout.positions()` as position_ids.
    group : ProcessGroup or DeviceMesh, optional
        The ranks, as in `attention`; by default all processes.
    scheme : {"auto", "ring", "ulysses", "gather"}, default "auto"
        As in `attention`.

    Raises
    ------
    ProblemError
        For a layout of other ranks, an unknown scheme, or a group that is not initialised.

    Notes
    -----
    The region holds for the thread that enters it, and ends with the `with` block. Call backward within it if layers
    are checkpointed, as they are then computed again. Layers raise UnsupportedError in a region for dropout, mask
    tensors, padding, position biases and caches of earlier keys.

    Examples
    --------
    Every process of `torchrun` runs this::

        layout = Layout(cu_seqlens, torch.distributed.group.WORLD)
        positions = torch.from_numpy(layout.positions())[None]
        with region(layout):
            logits = model(layout.shard(ids, dim=1), position_ids=positions, use_cache=False).logits
    """
    global active, is_used
    if not isinstance(layout, Layout):
        raise ProblemError(f"layout is {type(layout).__name__}; give a cuflash.distributed.Layout")
    if scheme not in SCHEMES:
        raise ProblemError(f"scheme={scheme!r} is unknown; give one of {', '.join(map(repr, SCHEMES))}")
    layout_of(layout, links_of(groups_of(group), "region"))
    outer = current()
    with _lock:
        active, is_used = active + 1, True
    torch._C._stash_obj_in_tls(_KEY, Region(layout, group, scheme))
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_KEY, outer)
        with _lock:
            active -= 1
