"""The call of a scheme: layout, rank, group and options; and mods whose indices are those of the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from .exchange import Link
from .layout import Layout
from .rectangles import Window

LAYOUTS = 8  # layouts and windows whose indices stay on the device: layers share them, and steps bring new ones
# SMs that kernels leave to a transfer beside them: NCCL's thread blocks, one for each channel, share no SM with others.
SM_MARGIN = 16


class Call:
    """One call of distributed attention on this rank.

    links: one for each axis of the mesh whose ranks the layout counts, the last fastest. options: keywords of
    `attention` that all parts of the call share. mods: those of score_mod, mask_mod, bias and sinks that the caller
    passed. leaf_names: those of bias and sinks whose gradients are computed without autograd.
    """

    def __init__(
        self,
        layout: Layout,
        links: Sequence[Link],
        window: Window,
        options: dict[str, Any],
        mods: dict[str, Any],
        leaf_names: Sequence[str] = (),
    ) -> None:
        self.layout, self.links, self.window, self.options, self.mods = layout, links, window, options, mods
        self.leaf_names = leaf_names
        self.link, self.rank = links[0], rank_of(links)

    @property
    def sm_margin(self) -> int:
        """SMs that kernels leave to a transfer beside them; 0 on the CPU."""
        return SM_MARGIN

    @property
    def has_bias_rows(self) -> bool:
        """True if the bias differs from row to row."""
        bias = self.mods.get("bias")
        return bias is not None and bias.shape[-2] > 1

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """The bias and the sinks whose gradients are computed without autograd."""
        return {name: self.mods[name] for name in self.leaf_names}

    @property
    def backward_options(self) -> dict[str, Any]:
        """Keywords of `backward` that all parts of the call share."""
        return {name: x for name, x in self.options.items() if name not in ("num_splits", "split_size")}


def rank_of(links: Sequence[Link]) -> int:
    """Returns this process's rank among those of all axes of a mesh, the last fastest."""
    rank = 0
    for link in links:
        rank = rank * link.ranks + link.rank
    return rank


def bounds_of(bounds: tuple[int, ...], device: torch.device, name: str) -> dict[str, Any]:
    """Returns the keywords of the packed sequences of queries ("q") or keys ("k") between these bounds."""
    longest = max((end - begin for begin, end in pairwise(bounds)), default=0)
    tensor = torch.tensor(bounds, dtype=torch.int32).to(device)
    return {f"cu_seqlens_{name}": tensor, f"max_seqlen_{name}": longest}


def with_offsets(mods: dict[str, Any], device: torch.device, head: int = 0, q: int = 0, k: int = 0) -> dict[str, Any]:
    """Returns mods whose functions are called with the indices of the whole problem, from those of a part.

    Offsets are arrays without axes, so that one kernel serves all of them.
    """
    if mods.keys().isdisjoint(("score_mod", "mask_mod")):
        return dict(mods)
    head_0, q_0, k_0 = (_number(offset, device) for offset in (head, q, k))
    mods = dict(mods)
    if (score_mod := mods.get("score_mod")) is not None:
        mods["score_mod"] = lambda score, b, h, i, j: score_mod(score, b, h + head_0, i + q_0, j + k_0)
    if (mask_mod := mods.get("mask_mod")) is not None:
        mods["mask_mod"] = lambda b, h, i, j: mask_mod(b, h + head_0, i + q_0, j + k_0)
    return mods


@lru_cache(256)
def _number(value: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32).to(device)
