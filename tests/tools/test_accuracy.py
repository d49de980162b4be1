"""The report of errors, on NumPy arrays: exact results, limits, and the file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuflash.__main__ import main
from cuflash.testing import oracle
from cuflash.testing.arrays import NumpyArrays
from cuflash.testing.cases import Case
from cuflash.tools.bench import accuracy, check, peers
from cuflash.tools.bench.report import Errors, Setting

ARRAYS = NumpyArrays()
CASES = [Case("small", 1, 130, 130, 2, 2, 24, 24, "float32", causal) for causal in (False, True)]
SETTINGS = [Setting(case, size) for case in CASES for size in (1.0, 100.0)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "CHUNK", 3 * 50 * 130)  # heads in blocks of 50 rows


@pytest.mark.parametrize("case", CASES, ids=("full", "causal"))
def test_exact_results_equal_the_oracles(case: Case) -> None:
    q, k, v, dout = ARRAYS.inputs("backward", case)
    np.testing.assert_allclose(
        accuracy.out(ARRAYS, case, (q, k, v))["out"], oracle.attention64(case, q, k, v)[0], atol=1e-13
    )
    grads = accuracy.gradients(ARRAYS, case, (q, k, v, dout))
    for (name, got), expected in zip(grads.items(), oracle.gradients64(case, dout, q, k, v), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-12, err_msg=name)


def contenders(op: str, factor: float) -> list[peers.Contender]:
    """Returns a peer, and ours with its last output multiplied by this factor."""
    (peer,) = (x for x in peers.find(ARRAYS)[0] if x.op == op)
    ours = peers.ours(op, ARRAYS, ("flash2",))[0]

    def prepare(inputs: tuple[Any, ...], causal: bool) -> Callable[[], Any]:
        def call() -> Any:
            result = ours.prepare(inputs, causal)()
            last = result[-1] if isinstance(result, tuple) else result
            last *= factor
            return result

        return call

    return [replace(ours, prepare=prepare), peer]


@pytest.mark.parametrize("op", accuracy.OPS)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda x: f"{x.case.causal}-{x.size:g}")
@pytest.mark.parametrize(("factor", "is_bad"), [(1.0, False), (1.01, True), (np.nan, True)])
def test_an_error_above_the_peers_is_reported(op: str, setting: Setting, factor: float, is_bad: bool) -> None:
    rows = accuracy.measured(ARRAYS, op, setting, contenders(op, factor))
    assert [row.ours for row in rows] == [True, False]
    assert max(rows[1].rms.values()) < 1e-3
    assert accuracy.is_bad(rows, rows[0]) == is_bad


def test_a_contender_that_does_not_run_is_a_gap_and_ours_must_run() -> None:
    def fails(inputs: Any, causal: bool) -> Any:
        raise RuntimeError("no kernel\nand more")

    ours, peer = contenders("forward", 1.0)
    rows = accuracy.measured(ARRAYS, "forward", SETTINGS[0], [ours, replace(peer, prepare=fails)])
    assert (rows[1].note, rows[1].rms) == ("no kernel", {})
    assert not accuracy.is_bad(rows, rows[0])
    assert accuracy.ratio(rows, rows[0], max) == 0.0
    rows = accuracy.measured(ARRAYS, "forward", SETTINGS[0], [replace(ours, prepare=fails), peer])
    assert accuracy.is_bad(rows, rows[0])


def test_ratios_are_over_the_largest_or_smallest_error_of_the_problem() -> None:
    def row(contender: str, setting: Setting, *errors: float) -> Errors:
        return Errors("backward", setting, contender, contender == "ours", dict(zip(("dq", "dk"), errors, strict=True)))

    rows = [row("ours", SETTINGS[0], 2.0, 6.0), row("a", SETTINGS[0], 1.0, 4.0), row("b", SETTINGS[0], 4.0, 2.0),
            row("c", SETTINGS[1], 90.0, 90.0), row("d", SETTINGS[0], np.nan, np.inf)]  # fmt: skip
    assert accuracy.ratio(rows, rows[0], max) == 1.5
    assert accuracy.ratio(rows, rows[0], min) == 3.0


def test_each_printed_ratio_is_that_of_the_errors_printed_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The largest ratios and the largest errors are in different outputs, and one peer has no number."""

    def row(contender: str, setting: Setting, *errors: float) -> Errors:
        op = "backward" if len(errors) > 1 else "forward"
        return Errors(op, setting, contender, contender == "ours", dict(zip(check.OUTPUTS[op], errors, strict=True)))

    one, other = SETTINGS[:2]
    rows = [row("ours", one, 1.5304e-3, 7e-7, 4.4449e-7), row("a", one, 1.9149e-3, 4e-7, 9e-7),
            row("b", one, 1.1e-3, np.inf, 8.88e-7), row("ours", one, 4.914e-7), row("a", one, 4.906e-7),
            row("ours", other, np.nan), row("a", other, 0.5), row("ours", SETTINGS[2], 0.25)]  # fmt: skip
    accuracy._show({"versions": {}, "gpus": []}, rows, {})
    cells = [line.split() for line in capsys.readouterr().out.splitlines()]
    lines = [line[5:] for line in cells if line[:1] == ["float32"]]  # from the output on
    assert [line[0] for line in lines] == ["out", "out", "out", "dq", "dk", "dv"]
    for output, ours, *theirs, worst, best in lines:
        finite = [x for text in theirs if text != "–" and np.isfinite(x := float(text))]
        if not finite:
            assert (worst, best) == ("–", "–")
            continue
        expected = [float(ours) / statistic(finite) for statistic in (max, min)]
        np.testing.assert_allclose([float(worst), float(best)], expected, 1e-3, 0.006, err_msg=output)
    assert lines[3][-2:] == ["0.80", "1.39"]
    for statistic, column in ((max, -2), (min, -1)):
        largest = max(float(line[column]) for line in lines[3:])
        assert accuracy.ratio(rows, rows[0], statistic) == pytest.approx(largest, abs=0.006)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "find", lambda: (ARRAYS, "a test"))

    def settings(arrays: NumpyArrays, quick: bool) -> Iterator[Setting]:
        yield from SETTINGS

    monkeypatch.setattr(accuracy, "settings", settings)


@pytest.mark.usefixtures("few")
def test_the_command_prints_and_writes_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    written, picture = tmp_path / "errors.json", tmp_path / "errors.png"
    assert main(["accuracy", "--json", str(written), "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "NumPy matmul" in printed
    assert "to the worst" in printed
    content = json.loads(written.read_text("utf-8"))
    assert len(content["rows"]) == len(SETTINGS) * len(accuracy.OPS) * 2
    assert {name for row in content["rows"] for name in row["rms"]} == {"out", "dq", "dk", "dv"}
    assert content["machine"]["versions"]["cuflash"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again.png"
    assert main(["accuracy", "--draw", str(written), "--picture", str(again)]) == 0
    assert again.read_bytes().startswith(b"\x89PNG")
    machine, rows = accuracy.read(written)
    assert (machine, [row.facts() for row in rows]) == (content["machine"], content["rows"])


def test_a_file_without_errors_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    other, picture = tmp_path / "other.json", str(tmp_path / "errors.png")
    other.write_text('{"rows": []}')
    with pytest.raises(SystemExit, match="2"):
        main(["accuracy", "--draw", str(other), "--picture", picture])
    assert "is no file that `cuflash accuracy --json` wrote" in capsys.readouterr().err
    for options in ([], ["--picture", picture, "--json", str(tmp_path / "errors.json")]):
        with pytest.raises(SystemExit, match="2"):
            main(["accuracy", "--draw", str(other), *options])
        assert "--draw measures nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("op", "dtype", "size", "peer", "allowed"),
    [("forward", "bfloat16", 1e4, "torch flash", 8.0), ("forward", "bfloat16", 1e4, "FlashAttention-4", 1.1),
     ("forward", "float32", 1e4, "torch efficient", 4.0), ("forward", "float16", 3.0, "torch flash", 1.3),
     ("backward", "float16", 3.0, "torch flash", 1.1), ("forward", "bfloat16", 1.0, "torch flash", 1.1),
     ("forward", "bfloat16", 10.0, "torch flash", 1.1), ("forward", "float32", 3.0, "torch efficient", 4.0)],
)  # fmt: skip
def test_more_is_allowed_only_where_the_largest_weight_is_not_exact(
    op: str, dtype: str, size: float, peer: str, allowed: float
) -> None:
    setting = Setting.one_sequence(64, 1, 64, dtype, True, size)
    for factor, is_bad in ((0.99, False), (1.01, True)):
        errors = ("ours", factor * allowed), (peer, 1.0)
        rows = [Errors(op, setting, name, name == "ours", {"out": error}) for name, error in errors]
        assert accuracy.is_bad(rows, rows[0]) is is_bad


@pytest.mark.usefixtures("few")
def test_an_unwritable_file_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accuracy, "measured", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit, match="2"):
        main(["accuracy", "--json", str(tmp_path / "none" / "errors.json")])
    assert "there is no folder" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["accuracy", "--picture", str(tmp_path / "errors.png")]) == 1
    assert "pictures need matplotlib" in capsys.readouterr().err


def test_the_problems_are_those_that_the_arrays_can_do() -> None:
    settings = list(accuracy.settings(ARRAYS, quick=False))
    assert {x.case.dtype for x in settings} == {"float32"}
    assert max(x.case.seqlen_k for x in settings) == 512
    assert {x.size for x in settings} == set(accuracy.SIZES)
