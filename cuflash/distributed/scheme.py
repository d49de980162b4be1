"""The call of a scheme: layout, rank, group and options."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from .choice import INDEXED
from .exchange import Link
from .layout import Layout
from .lengths import with_length
from .rectangles import Rectangle, Window, rectangles
from .shapes import part_of_bias

LAYOUTS = 8  # layouts and windows whose indices stay on the device: layers share them, and steps bring new ones
Parts = list[tuple[Rectangle, dict[str, Any]]]


class Call:
    """One call of distributed attention on this rank.

    links: one for each axis of the mesh whose ranks the layout counts, the last fastest. options: keywords of
    `attention` that all parts of the call share. mods: those of score_mod, mask_mod, bias and sinks that the caller
    passed. leaf_names: those of bias and sinks whose gradients are computed without autograd. head: the first of this
    rank's query heads, where the ring has some of them.
    """

    def __init__(
        self,
        layout: Layout,
        links: Sequence[Link],
        window: Window,
        options: dict[str, Any],
        mods: dict[str, Any],
        leaf_names: Sequence[str] = (),
        head: int = 0,
    ) -> None:
        self.layout, self.links, self.window, self.options, self.mods = layout, links, window, options, mods
        self.leaf_names, self.head = leaf_names, head
        self.link, self.rank = links[0], rank_of(links)

    @property
    def bias_shape(self) -> Sequence[int] | None:
        """The shape of this rank's bias, None without one."""
        return self.mods["bias"].shape if "bias" in self.mods else None

    @property
    def has_indices(self) -> bool:
        """True with dropout, a function or a bias: weights depend on indices in the whole problem."""
        return not INDEXED.isdisjoint(self.mods.keys() | self.options.keys())

    def rectangles(self, source: int) -> Parts:
        """Returns the rectangles of this rank's rows and another rank's keys, each with keywords of its own."""
        return _rectangles(self.layout, self.rank, source, self.window, self.head if self.has_indices else None)

    def mods_of(self, rows: slice, keys: slice, seqlen: int, device: torch.device) -> dict[str, Any]:
        """Returns the mods of some local rows over some keys of the sequence, all of one document of this length."""
        mods = with_length(self.mods, _number(seqlen, device))
        if (bias := mods.get("bias")) is not None:
            mods["bias"] = part_of_bias(bias, rows, keys)
        return mods

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """The bias and the sinks whose gradients are computed without autograd."""
        return {name: self.mods[name] for name in self.leaf_names}

    @property
    def backward_options(self) -> dict[str, Any]:
        """Keywords of `backward` that all parts of the call share."""
        return {name: x for name, x in self.options.items() if name not in ("num_splits", "split_size")}


@lru_cache(1024)
def _rectangles(layout: Layout, rank: int, source: int, window: Window, head: int | None) -> Parts:
    """Returns `Call.rectangles`. head: the first query head of a call whose weights depend on indices."""
    parts = rectangles(layout, rank, source, window, merge=head is None)
    offsets = [{} if head is None else {"index_offsets": part.index_offsets(head)} for part in parts]
    return [(part, part.mask(window) | more) for part, more in zip(parts, offsets, strict=True)]


@lru_cache(256)
def _number(value: int, device: torch.device) -> torch.Tensor:
    return on_device(np.int32(value), device)


def on_device(array: Any, device: torch.device) -> torch.Tensor:
    """Returns a tensor for a cache: made in inference mode, too, autograd can save it later."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.asarray(array)).to(device)


def rank_of(links: Sequence[Link]) -> int:
    """Returns this process's rank among those of all axes of a mesh, the last fastest."""
    rank = 0
    for link in links:
        rank = rank * link.ranks + link.rank
    return rank


def bounds_of(bounds: tuple[int, ...], device: torch.device, name: str) -> dict[str, Any]:
    """Returns the keywords of the packed sequences of queries ("q") or keys ("k") between these bounds."""
    longest = max((end - begin for begin, end in pairwise(bounds)), default=0)
    tensor = on_device(np.array(bounds, np.int32), device)
    return {f"cu_seqlens_{name}": tensor, f"max_seqlen_{name}": longest}
