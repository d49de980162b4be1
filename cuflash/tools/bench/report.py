"""The results of measurements: speeds, a row for each contender on each problem, and errors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from ...problem.dtypes import DTYPES
from ...testing.cases import Case
from .measure import Seconds
from .mods import ModCase, share
from .peers import Contender


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one problem. wall is None if it did not run or was wrong; `note` then says why.

    wall: of calls that follow each other. graph: of a CUDA graph of such calls, where there is one.
    """

    case: Case
    contender: Contender
    wall: Seconds | None = None
    graph: Seconds | None = None
    error: float | None = None
    note: str = ""
    wrong: bool = False
    peak_bytes: int | None = None  # allocated at a time during a call, the outputs among them
    state: dict[str, float] = field(default_factory=dict)  # clock and power right after the graphs were enqueued

    @property
    def seconds(self) -> float | None:
        """Seconds of one call: on the GPU, as far as that is known."""
        times = self.graph or self.wall
        return None if times is None else times.median

    def times_as_fast(self, other: Row) -> float | None:
        """The speed over that of another row on the same problem, by times of one kind; None if one was not timed."""
        ours, theirs = (self.graph, other.graph) if self.graph and other.graph else (self.wall, other.wall)
        return None if ours is None or theirs is None else theirs.median / ours.median

    @property
    def tflops(self) -> float | None:
        """TFLOP/s; pairs of query and key that a mask hides do not count as work."""
        return None if self.seconds is None else self.flops / self.seconds * 1e-12

    @property
    def flops(self) -> int:
        """Floating-point operations of one call."""
        whole = self.case.problem(self.contender.op).flops
        return round(whole * share(self.case)) if isinstance(self.case, ModCase) else whole

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays that a call reads or writes, each once."""
        q, k, v, out = (prod(shape) for shape in (*self.case.shapes(), self.case.out_shape()))
        elements = q + k + v + out if self.contender.op == "forward" else 2 * (q + k + v + out)
        return DTYPES[self.case.dtype].itemsize * elements

    def facts(self) -> dict[str, Any]:
        """All of it by name, as JSON files have it."""
        columns = {"op": self.contender.op, **asdict(self.case)}
        columns |= {"contender": self.contender.name, "ours": self.contender.ours}
        names = "seconds", "tflops", "flops", "num_bytes", "peak_bytes", "error"
        columns |= {name: getattr(self, name) for name in names}
        for name, times in (("wall", self.wall), ("graph", self.graph)):
            columns[name] = None if times is None else times._asdict()
        return columns | self.state | {"wrong": self.wrong, "note": self.note}


@dataclass(slots=True)
class Report:
    """All that was measured."""

    machine: dict[str, Any]
    arrays: str
    preset: str
    missing: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    host_seconds: dict[str, float] = field(default_factory=dict)
    startup: dict[str, Any] = field(default_factory=dict)
    command: str = ""  # what was typed

    @property
    def bytes_per_second(self) -> float | None:
        """The most that the GPU's memory gives, where it is known."""
        gpus = self.machine.get("gpus") or [{}]
        bandwidth: float | None = gpus[0].get("bytes_per_second")
        return bandwidth

    @property
    def failed(self) -> bool:
        """True if any contender's output is wrong, or one of ours did not run."""
        return any(row.wrong or (row.contender.must_run and row.wall is None) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Setting:
    """A problem of which errors are measured. size: the standard deviation of its scores."""

    case: Case
    size: float

    @classmethod
    def one_sequence(cls, seqlen: int, heads: int, head_dim: int, dtype: str, causal: bool, size: float) -> Setting:
        """One sequence."""
        name = f"{dtype} d{head_dim} {'causal' if causal else 'full'} seqlen {seqlen} scores of {size:g}"
        return cls(Case(name, 1, seqlen, seqlen, heads, heads, head_dim, head_dim, dtype, causal), size)


@dataclass(slots=True)
class Errors:
    """The errors of one contender by output: the root mean square, and the largest error, to those of the output."""

    op: str
    setting: Setting
    contender: str
    ours: bool
    rms: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    note: str = ""  # why there are none

    @classmethod
    def of_facts(cls, facts: dict[str, Any]) -> Errors:
        """Results of `facts`."""
        setting = Setting.one_sequence(
            *(facts[name] for name in ("seqlen", "heads", "head_dim", "dtype", "causal", "scores"))
        )
        return cls(facts["op"], setting, *(facts[name] for name in ("contender", "ours", "rms", "largest", "note")))

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
        columns = {"contender": self.contender, "ours": self.ours, "rms": rms, "largest": largest}
        return {"op": self.op} | problem | columns | {"note": self.note}
