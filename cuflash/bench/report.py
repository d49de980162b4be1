"""What was measured: a row for each contender on each cell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .cases import Case
from .peers import Contender


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one cell. `seconds` is None if it did not run or was wrong; `note` then says why."""

    cell: Case
    contender: Contender
    seconds: float | None = None
    error: float | None = None
    note: str = ""
    wrong: bool = False

    @property
    def tflops(self) -> float | None:
        """TFLOP/s; pairs of query and key that a mask hides do not count as work."""
        return None if self.seconds is None else self.flops / self.seconds * 1e-12

    @property
    def flops(self) -> int:
        """Floating-point operations of one call."""
        return self.cell.problem(self.contender.op).flops


@dataclass(slots=True)
class Report:
    """All that was measured."""

    machine: dict[str, Any]
    arrays: str
    missing: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    host_seconds: dict[str, float] = field(default_factory=dict)
    startup: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether any contender's output is wrong, or one of ours did not run."""
        return any(row.wrong or (row.contender.ours and row.seconds is None) for row in self.rows)
