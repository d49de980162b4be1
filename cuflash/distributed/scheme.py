"""The call of a scheme: layout, rank, group and options."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from .layout import Layout
from .rectangles import Rectangle, Window, rectangles

# SMs that kernels leave to a transfer beside them: NCCL's thread blocks, one for each channel, share no SM with others.
SM_MARGIN = 16


class Call:
    """One call of distributed attention on this rank.

    options: keywords of `attention` that all parts of the call share. mods: those of score_mod, mask_mod, bias and
    sinks that the caller passed. rows: the numbers of rows of all ranks.
    """

    def __init__(
        self, layout: Layout, rank: int, group: Any, window: Window, options: dict[str, Any], mods: dict[str, Any]
    ) -> None:
        self.layout, self.rank, self.group, self.window = layout, rank, group, window
        self.options, self.mods = options, mods
        self.rows = [layout.num_rows(each) for each in range(layout.ranks)]

    @property
    def sm_margin(self) -> int:
        """SMs that kernels leave to a transfer beside them; 0 where the transfer holds none."""
        return SM_MARGIN if dist.get_backend(self.group) == dist.Backend.NCCL else 0

    @property
    def has_bias_rows(self) -> bool:
        """True if the bias differs from row to row."""
        bias = self.mods.get("bias")
        return bias is not None and bias.shape[-2] > 1

    @property
    def drops(self) -> bool:
        """True with dropout, whose weights depend on indices in the whole problem."""
        return "dropout_p" in self.options

    def rectangles(self, source: int) -> list[tuple[Rectangle, dict[str, Any]]]:
        """Returns the rectangles of this rank's rows and another rank's keys, each with keywords of its own."""
        parts = rectangles(self.layout, self.rank, source, self.window, merge=not self.drops)
        offsets = [{"index_offsets": part.index_offsets} if self.drops else {} for part in parts]
        return [(part, part.mask(self.window) | more) for part, more in zip(parts, offsets, strict=True)]

    @staticmethod
    def bounds_tensor(bounds: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Returns bounds of sequences as int32 on a device."""
        return _bounds_tensor(bounds, device)


@lru_cache(256)
def _bounds_tensor(bounds: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32).to(device)
