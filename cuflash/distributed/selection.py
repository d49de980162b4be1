"""Rows of a tensor by index, with gradients: a gather in both directions, or sums of consecutive rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import Function

from .scheme import on_device


class Selection(NamedTuple):
    """Rows along the first axis, in any order and any number of times.

    size: rows to select from. inverse: the inverse of a permutation, else None. runs: the first row and the number of
    rows of each run of consecutive rows; empty for a permutation.
    """

    index: torch.Tensor
    size: int
    inverse: torch.Tensor | None
    runs: list[tuple[int, int]]

    @classmethod
    def from_index(cls, index: NDArray[np.int64], size: int, device: torch.device) -> Selection:
        """Puts an index on a device. PyTorch's own gradient, a scatter, takes eight times as long as a gather."""
        if np.array_equal(np.sort(index), np.arange(size)):
            return cls(on_device(index, device), size, on_device(np.argsort(index), device), [])
        ends = [*(np.flatnonzero(np.diff(index) != 1) + 1).tolist(), len(index)] if len(index) else []
        starts = [0, *ends[:-1]]
        runs = [(int(index[start]), end - start) for start, end in zip(starts, ends, strict=False)]
        return cls(on_device(index, device), size, None, runs)

    @property
    def reversed(self) -> Selection:
        """The inverse of a permutation."""
        assert self.inverse is not None
        return self._replace(index=self.inverse, inverse=self.index)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the selected rows of x."""
        rows: torch.Tensor = _Take.apply(x, self)
        return rows

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows added up at their places, in float32 at least, and in the dtype of `rows`."""
        total: torch.Tensor = _Sum.apply(rows, self)
        return total


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, selection: Selection) -> torch.Tensor:
        ctx.selection = selection
        return x.index_select(0, selection.index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.selection.sum(grad), None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, selection: Selection) -> torch.Tensor:
        ctx.selection = selection
        if selection.inverse is not None:
            return rows.index_select(0, selection.inverse)
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros((selection.size, *rows.shape[1:]), dtype=wide)
        place = 0
        for first, count in selection.runs:
            total.narrow(0, first, count).add_(rows.narrow(0, place, count))
            place += count
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.selection.take(grad), None
