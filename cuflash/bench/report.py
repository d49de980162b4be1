"""What was measured: speeds, a row for each contender on each cell, and errors."""

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


@dataclass(frozen=True, slots=True)
class Setting:
    """A problem of which errors are measured. size: the standard deviation of its scores."""

    case: Case
    size: float


@dataclass(slots=True)
class Errors:
    """What one contender was off by, by output: the root mean square, and the largest error, to those of the output."""

    op: str
    setting: Setting
    contender: str
    ours: bool
    rms: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    note: str = ""  # why there are none

    @property
    def worst(self) -> float:
        """The largest root mean square of all outputs."""
        return max(self.rms.values())

    def facts(self) -> dict[str, Any]:
        """All of it by name, as JSON files have it."""
        case = self.setting.case
        problem = {"dtype": case.dtype, "head_dim": case.head_dim, "causal": case.causal, "seqlen": case.seqlen_q,
                   "heads": case.heads_q, "scores": self.setting.size}  # fmt: skip
        rms, largest = ({name: float(f"{x:.4g}") for name, x in errors.items()} for errors in (self.rms, self.largest))
        own = {"contender": self.contender, "ours": self.ours, "rms": rms, "largest": largest}
        return {"op": self.op} | problem | own | {"note": self.note}
