"""Keys put together from received and local rows, by one concatenation of consecutive rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .rectangles import Range
from .scheme import on_device

Pair = tuple[torch.Tensor, torch.Tensor]


class Run(NamedTuple):
    """Consecutive rows of a source: 0 for received rows, 1 for local ones."""

    source: int
    first: int
    size: int


class Assembly(NamedTuple):
    """Rows in an order, each from one of two sources.

    sizes: numbers of rows of the sources. inverse: where the rows of each source are in the order, if each occurs once.
    """

    runs: list[Run]
    sizes: tuple[int, int]
    inverse: list[torch.Tensor] | None

    @classmethod
    def of_ranges(
        cls, ranges: Sequence[Range], held: Sequence[tuple[Range, Run]], sizes: tuple[int, int], device: torch.device
    ) -> Assembly:
        """Puts ranges of the sequence one after the other. held: ascending ranges that are there, with their rows."""
        runs: list[Run] = []
        lasts = [last for (_, last), _ in held]
        for begin, end in ranges:
            for number in range(bisect_right(lasts, begin), len(held)):
                (first, last), (source, row, _) = held[number]
                if first >= end:
                    break
                a, b = max(begin, first), min(end, last)
                if a < b:
                    _append(runs, Run(source, row + a - first, b - a))
        inverse = [np.full(size, -1) for size in sizes]
        count = 0
        for source, row, size in runs:
            inverse[source][row : row + size] = np.arange(count, count + size)
            count += size
        occurs_once = count == sum(sizes) and all((each >= 0).all() for each in inverse)
        return cls(runs, sizes, [on_device(each, device) for each in inverse] if occurs_once else None)

    def take(self, received: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Returns the rows."""
        parts = [(received, local)[run.source].narrow(0, run.first, run.size) for run in self.runs]
        return torch.cat(parts or [local[:0]])

    def sum(self, rows: torch.Tensor) -> Pair:
        """Returns rows at their places in both sources: moved, or in float32 at least and added up."""
        if self.inverse is not None:  # one gather takes less time than many copies
            received, local = (rows.index_select(0, each) for each in self.inverse)
            return received, local
        wide = torch.promote_types(rows.dtype, torch.float32)
        received, local = (rows.new_zeros((size, *rows.shape[1:]), dtype=wide) for size in self.sizes)
        place = 0
        for source, first, size in self.runs:
            (received, local)[source].narrow(0, first, size).add_(rows.narrow(0, place, size))
            place += size
        return received, local


def _append(runs: list[Run], run: Run) -> None:
    """Appends a run, or makes the last one longer."""
    if runs and runs[-1].source == run.source and runs[-1].first + runs[-1].size == run.first:
        run = Run(run.source, runs[-1].first, runs.pop().size + run.size)
    runs.append(run)
