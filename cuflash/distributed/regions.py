"""Regions of a program in which models of other libraries run attention over the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from ..errors import ProblemError, UnsupportedError
from ..locks import Lock
from .calls import layout_of, links_of
from .choice import SCHEMES, Scheme
from .layout import Layout
from .torch import attention, groups_of

_current: ContextVar[Region | None] = ContextVar("region", default=None)
_lock = Lock()
_regions: list[Region] = []  # of all threads
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
    """Returns the innermost region around a call in this thread, or around the backward that runs in it.

    Backward recomputes checkpointed layers in threads of its own. They take the region that is active, if all that are
    active are equal.
    """
    if (region := _current.get()) is not None or torch._C._current_graph_task_id() < 0:
        return region
    with _lock:
        distinct = [each for number, each in enumerate(_regions) if each not in _regions[:number]]
    if len(distinct) > 1:
        raise UnsupportedError(
            f"backward recomputes layers while {len(distinct)} regions are active in several threads; run one backward "
            "at a time, or without checkpointing"
        )
    return distinct[0] if distinct else None


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
    inner = Region(layout, group, scheme)
    with _lock:
        active, is_used = active + 1, True
        _regions.append(inner)
    token = _current.set(inner)
    try:
        yield
    finally:
        _current.reset(token)
        with _lock:
            active -= 1
            _regions.remove(inner)
