"""Results of measurements: speeds and errors, a row for each contender on each problem."""

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
    """One contender on one problem. wall is None if it did not run or was wrong; `note` then has the reason.

    wall: of consecutive calls. graph: of a CUDA graph of such calls, if there is one.
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
        """Seconds of one call: in a graph if that was timed, else wall time."""
        times = self.graph or self.wall
        return None if times is None else times.median

    def times_as_fast(self, other: Row) -> float | None:
        """Returns the speed over another row's on the same problem, by times of one kind; None if one lacks times."""
        ours, theirs = (self.graph, other.graph) if self.graph and other.graph else (self.wall, other.wall)
        return None if ours is None or theirs is None else theirs.median / ours.median

    @property
    def tflops(self) -> float | None:
        """TFLOP/s; masked (query, key) pairs do not count as work."""
        return None if self.seconds is None else self.flops / self.seconds * 1e-12

    @property
    def flops(self) -> int:
        """Floating-point operations of one call."""
        whole = self.case.problem(self.contender.op).flops
        return round(whole * share(self.case)) if isinstance(self.case, ModCase) else whole

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays that a call reads or writes, each counted once."""
        q, k, v, out = (prod(shape) for shape in (*self.case.shapes(), self.case.out_shape()))
        elements = q + k + v + out if self.contender.op == "forward" else 2 * (q + k + v + out)
        return DTYPES[self.case.dtype].itemsize * elements

    def facts(self) -> dict[str, Any]:
        """Returns the row by name, for JSON files."""
        columns = {"op": self.contender.op, **asdict(self.case)}
        columns |= {"contender": self.contender.name, "ours": self.contender.ours}
        names = "seconds", "tflops", "flops", "num_bytes", "peak_bytes", "error"
        columns |= {name: getattr(self, name) for name in names}
        for name, times in (("wall", self.wall), ("graph", self.graph)):
            columns[name] = None if times is None else times._asdict()
        return columns | self.state | {"wrong": self.wrong, "note": self.note}


@dataclass(slots=True)
class Report:
    """All results of a run of the benchmark."""

    machine: dict[str, Any]
    arrays: str
    preset: str
    missing: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    host_seconds: dict[str, float] = field(default_factory=dict)
    startup: dict[str, Any] = field(default_factory=dict)
    command: str = ""  # the command line

    @property
    def bytes_per_second(self) -> float | None:
        """Peak bandwidth of the GPU's memory, if known."""
        gpus = self.machine.get("gpus") or [{}]
        bandwidth: float | None = gpus[0].get("bytes_per_second")
        return bandwidth

    @property
    def failed(self) -> bool:
        """True if any contender's output is wrong, or one of ours did not run."""
        return any(row.wrong or (row.contender.must_run and row.wall is None) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Setting:
    """A problem for errors. size: the standard deviation of its scores."""

    case: Case
    size: float

    @classmethod
    def one_sequence(cls, seqlen: int, heads: int, head_dim: int, dtype: str, causal: bool, size: float) -> Setting:
        """Returns a setting of one sequence."""
        name = f"{dtype} d{head_dim} {'causal' if causal else 'full'} seqlen {seqlen} scores of {size:g}"
        return cls(Case(name, 1, seqlen, seqlen, heads, heads, head_dim, head_dim, dtype, causal), size)


@dataclass(slots=True)
class Errors:
    """Errors of one contender by output: root mean square and largest error, each over the output's."""

    op: str
    setting: Setting
    contender: str
    ours: bool
    rms: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    note: str = ""  # the reason if there are none

    @classmethod
    def of_facts(cls, facts: dict[str, Any]) -> Errors:
        """Builds errors from `facts`."""
        setting = Setting.one_sequence(
            *(facts[name] for name in ("seqlen", "heads", "head_dim", "dtype", "causal", "scores"))
        )
        return cls(facts["op"], setting, *(facts[name] for name in ("contender", "ours", "rms", "largest", "note")))

    @property
    def worst(self) -> float:
        """The largest root mean square of all outputs."""
        return max(self.rms.values())

    def facts(self) -> dict[str, Any]:
        """Returns the errors by name, for JSON files."""
        case = self.setting.case
        problem = {"dtype": case.dtype, "head_dim": case.head_dim, "causal": case.causal, "seqlen": case.seqlen_q,
                   "heads": case.heads_q, "scores": self.setting.size}  # fmt: skip
        rms, largest = ({name: float(f"{x:.4g}") for name, x in errors.items()} for errors in (self.rms, self.largest))
        columns = {"contender": self.contender, "ours": self.ours, "rms": rms, "largest": largest}
        return {"op": self.op} | problem | columns | {"note": self.note}
