"""The benchmark on NumPy arrays: its report, and that wrong results of either op are detected and not timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuflash.__main__ import main
from cuflash.errors import ProblemError
from cuflash.testing import oracle
from cuflash.testing.arrays import NumpyArrays
from cuflash.testing.cases import Case
from cuflash.tools.bench import check, measure, peers, run, table
from cuflash.tools.bench.peers import Contender

ARRAYS = NumpyArrays()
OPS = ("forward", "backward")
CELLS = [Case("small", 3, 96, 96, 4, 4, 16, 16, "float32", causal) for causal in (False, True)]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 0)


def contenders(op: str) -> list[Contender]:
    """Returns ours and the peer that is always installed."""
    return peers.ours(op, ARRAYS, ("flash2", "flash1")) + [x for x in peers.find(ARRAYS)[0] if x.op == op]


def spoiled(op: str, output: int, where: Any, factor: float) -> Contender:
    """Returns ours with some rows of an output multiplied by a factor."""
    first = contenders(op)[0]

    def prepare(inputs: tuple[Any, ...], case: Case) -> Callable[[], Any]:
        call = first.prepare(inputs, case)

        def changed() -> Any:
            result = call()
            list(check.outputs(op, result).values())[output][where] *= factor
            return result

        return changed

    return replace(first, name="spoiled", prepare=prepare)


EVERY_OUTPUT = pytest.mark.parametrize(("op", "output"), [("forward", 0), *(("backward", n) for n in range(3))])


@pytest.mark.parametrize("cell", CELLS, ids=("full", "causal"))
@pytest.mark.parametrize("op", OPS)
def test_every_contender_is_right_and_timed(op: str, cell: Case) -> None:
    rows = run.run_case(ARRAYS, cell, contenders(op), rounds=3)
    assert len(rows) == {"forward": 3, "backward": 2}[op]
    for row in rows:
        assert not row.note
        assert not row.wrong
        assert row.error is not None
        assert row.error < 1e-5
        assert row.seconds is not None
        assert row.tflops == row.flops / row.seconds * 1e-12


def test_the_work_of_backward_is_five_products_of_the_visible_pairs() -> None:
    for cell, pairs in zip(CELLS, (96 * 96, 96 * 97 // 2), strict=True):
        flops = [run.Row(cell, contenders(op)[0]).flops for op in OPS]
        assert flops == [2 * 2 * 16 * pairs * 3 * 4, 5 * 2 * 16 * pairs * 3 * 4]


@pytest.mark.parametrize("chunk", [check.CHUNK, 1000])
@pytest.mark.parametrize("cell", CELLS, ids=("full", "causal"))
def test_samples_are_exact(cell: Case, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CHUNK", chunk)
    q, k, v, dout = ARRAYS.inputs("backward", cell)
    exact = {"out": oracle.attention64(cell, q, k, v)[0]}
    exact |= zip(("dq", "dk", "dv"), oracle.gradients64(cell, dout, q, k, v), strict=True)
    samples = check.sample(ARRAYS, "forward", cell, (q, k, v)) + check.sample(ARRAYS, "backward", cell, (q, k, v, dout))
    assert {(sample.output, sample.batch, sample.head) for sample in samples} == {
        (output, batch, head) for output in exact for batch, head in ((0, 0), (2, 3))
    }
    for output, batch, head, rows, values in samples:
        assert len(rows) > 3
        oracle.assert_units(output, values, exact[output][batch, rows, head], oracle.ULPS["float64"])


@EVERY_OUTPUT
@pytest.mark.parametrize("damage", [1.001, np.nan])
def test_a_wrong_row_is_detected_in_every_output(op: str, output: int, damage: float) -> None:
    contestants = [spoiled(op, output, np.s_[0, :, 0], damage), contenders(op)[-1]]
    rows = run.run_case(ARRAYS, CELLS[0], contestants, rounds=3)
    assert [row.wrong for row in rows] == [True, False]
    assert rows[0].seconds is None
    assert f"in sampled rows of {check.OUTPUTS[op][output]} is over" in rows[0].note
    assert run.Report({}, "numpy", "quick", {}, rows).failed


@EVERY_OUTPUT
def test_what_is_not_sampled_is_held_against_the_first(op: str, output: int) -> None:
    rows = run.run_case(ARRAYS, CELLS[1], [*contenders(op), spoiled(op, output, 1, 1.01)], rounds=3)
    assert [row.wrong for row in rows] == [False] * (len(rows) - 1) + [True]
    assert f"{check.OUTPUTS[op][output]} differs from {rows[0].contender.name}" in rows[-1].note


def test_a_peer_that_does_not_run_is_a_gap_and_one_of_ours_a_failure() -> None:
    def prepare(inputs: tuple[Any, ...], case: Case) -> Any:
        raise MemoryError("too large")

    peer = Contender("backward", "peer", ("float32",), prepare)
    rows = run.run_case(ARRAYS, CELLS[0], [*contenders("backward"), peer], rounds=3)
    assert (rows[-1].note, rows[-1].wrong, rows[-1].seconds) == ("too large", False, None)
    assert not run.Report({}, "numpy", "quick", {}, rows).failed
    assert run.Report({}, "numpy", "quick", {}, [run.Row(CELLS[0], replace(peer, must_run=True))]).failed


def test_ratios_are_within_an_op() -> None:
    rows = [
        run.Row(CELLS[0], contender, wall=measure.Seconds(seconds, 0.0))
        for op, times in (("forward", (2.0, 4.0)), ("backward", (10.0, 5.0)))
        for contender, seconds in zip((contenders(op)[0], contenders(op)[-1]), times, strict=True)
    ]
    assert [table.ratios(rows, row) for row in rows if row.contender.ours] == [
        {"NumPy matmul": 2.0},
        {"NumPy matmul": 0.5},
    ]


def test_a_file_that_cannot_be_written_any_more_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="cannot be written"):
        table.write(tmp_path / "none" / "such", {"rows": []})


def test_the_conditions_of_times_are_printed() -> None:
    ours = contenders("forward")[0]
    plain = run.Row(CELLS[0], ours, wall=measure.Seconds(3.0, 0.01), state={"sm_clock_mhz": 1500.0, "power_w": 690.0})
    captured = replace(plain, graph=measure.Seconds(2.0, 0.05), state={"sm_clock_mhz": 1700.0, "power_w": 300.0})
    assert table.conditions([plain, captured]) == (
        "quartiles of a time lie 3.0% apart in the median, 5.0% at most; calls without graphs take 1.50 times as long "
        "in the median, 1.50 at most; 1500 to 1700 MHz; 300 to 690 W"
    )
    assert not table.conditions([run.Row(CELLS[0], ours)])


@pytest.mark.parametrize("ops", [None, "forward", "backward"])
def test_the_command_measures_the_ops_asked_for(
    ops: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "find", lambda: (ARRAYS, "asked for"))
    options = [] if ops is None else ["--ops", ops]
    assert main(["bench", "quick", "--seqlens", "64", "--json", str(tmp_path / "found.json"), *options]) == 0
    expected = list(OPS) if ops is None else [ops]
    content = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert content["command"].startswith("cuflash bench quick --seqlens 64 --json ")
    rows = content["rows"]
    assert list(dict.fromkeys(row["op"] for row in rows)) == expected
    assert {row["causal"] for row in rows} == {True}
    assert {row["kernel"] for row in rows if row["ours"]} == {f"reference_{op}_flash2" for op in expected}
    assert all(row["seconds"] > 0 for row in rows)
    printed = capsys.readouterr().out
    for op in OPS:
        assert (f"\n{op}, float32, numpy arrays" in printed) == (op in expected)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--rounds", "2"], "'2': give a whole number from 3 on"), (["--rounds", "x"], "give a whole number from 3 on"),
    (["--json", "none/such.json"], "there is no folder"), (["--json", "."], "is a folder"),
    (["--json", "/proc/none.json"], "cannot be written: "), (["--json", "x" * 300], "cannot be written: "),
    (["--seqlens", "0"], "give whole numbers above 0"),
    (["--ops", "forward,sideways"], "'sideways': give some of forward, backward"),
])  # fmt: skip
def test_bad_options_are_refused_before_measuring(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "bench", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *arguments])
    assert message in capsys.readouterr().err
