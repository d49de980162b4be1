"""The presets of the benchmark: their problems, exact samples, pictures and comparisons."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuflash.__main__ import main
from cuflash.testing import oracle
from cuflash.testing.arrays import CupyArrays, NumpyArrays, TorchArrays
from cuflash.testing.cases import Case
from cuflash.tools import arguments as options_of_tools
from cuflash.tools.bench import check, measure, mods, peers, presets, run, startup, table
from cuflash.tools.bench.mods import ModCase

ARRAYS = NumpyArrays()
DEFAULTS = Namespace(ops=None, dtype=None, head_dims=None, seqlens=None, causal=None)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 0)
    monkeypatch.setattr(run, "find", lambda: (ARRAYS, "asked for"))


class OnGpu(NumpyArrays):
    on_gpu = True


@pytest.mark.parametrize("arrays", [ARRAYS, OnGpu()], ids=["cpu", "gpu"])
@pytest.mark.parametrize("preset", presets.PRESETS)
def test_problems_have_names_of_their_own_and_are_legal(preset: str, arrays: NumpyArrays) -> None:
    problems = presets.PRESETS[preset].make(arrays, DEFAULTS)
    assert len({(x.op, x.case.name) for x in problems}) == len(problems)
    assert all(x.case.problem(x.op).flops > 0 for x in problems)
    for x in problems:
        assert x.case.dtype in ({"bfloat16", "float32"} if arrays.on_gpu else {"float32"})


def test_models_are_many_and_of_all_kinds() -> None:
    models = [x.case for x in presets.models(OnGpu(), DEFAULTS) if x.op == "forward"]
    assert len(models) >= 60
    assert {case.heads_q != case.heads_kv for case in models} == {True, False}
    assert any(case.head_dim != case.head_dim_v for case in models)
    assert any(case.softcap for case in models)
    assert {case.window_size for case in models} > {(-1, -1), (4095, 0), (64, 64)}
    assert {case.seqlen_q % 64 == 0 for case in models} == {True, False}


GROUPED = Case("grouped", 2, 60, 60, 6, 2, 16, 8, "float32", True)
CASES = [GROUPED, replace(GROUPED, softcap=2.0), replace(GROUPED, window_size=(40, 0)), replace(GROUPED, seqlen_q=20)]


@pytest.mark.parametrize("case", CASES, ids=["grouped", "softcap", "window", "later"])
def test_samples_of_groups_caps_and_windows_are_exact(case: Case) -> None:
    q, k, v, dout = ARRAYS.inputs("backward", case)
    exact = {"out": oracle.attention64(case, q, k, v)[0]}
    exact |= zip(("dq", "dk", "dv"), oracle.gradients64(case, dout, q, k, v), strict=True)
    samples = check.sample(ARRAYS, "forward", case, (q, k, v)) + check.sample(ARRAYS, "backward", case, (q, k, v, dout))
    slices = {(sample.output, sample.batch, sample.head) for sample in samples}
    assert slices == {(x, *place) for x in ("out", "dq") for place in ((0, 0), (1, 3))} | {
        (x, *place) for x in ("dk", "dv") for place in ((0, 0), (1, 1))
    }
    for output, batch, head, rows, values in samples:
        oracle.assert_units(output, values, exact[output][batch, rows, head], oracle.ULPS["float64"])


WITH_FUNCTIONS = [ModCase("own", 2, 128, 128, 4, 2, 16, 8, "float32", mods=name) for name in mods.FUNCTIONS]


@pytest.mark.parametrize("case", [*CASES, *WITH_FUNCTIONS], ids=str)
def test_samples_are_the_same_by_pytorch(case: Case) -> None:
    torch = pytest.importorskip("torch")

    class OnCpu(TorchArrays):
        def __init__(self) -> None:
            self.torch = self.xp = torch

        def put(self, array: Any) -> Any:
            return torch.from_numpy(array)

    for op in ("forward", "backward"):
        inputs = ARRAYS.inputs(op, case)
        by_torch = check.sample(OnCpu(), op, case, tuple(map(torch.from_numpy, inputs)))
        for one, other in zip(check.sample(ARRAYS, op, case, inputs), by_torch, strict=True):
            assert one[:3] == other[:3]
            np.testing.assert_array_equal(one.rows, other.rows)
            np.testing.assert_allclose(one.exact, other.exact, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", mods.FUNCTIONS)
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_functions_are_those_of_the_exact_results(op: str, name: str) -> None:
    case = ModCase("own", 2, 128, 128, 4, 2, 16, 16, "float32", mods=name)
    (row,) = run.run_case(ARRAYS, case, peers.ours(op, ARRAYS, ("flash2",))[:1], rounds=3)
    assert not row.wrong
    assert row.error is not None
    assert row.error < 1e-5
    assert 0 < mods.share(case) < 0.8
    assert row.flops == round(case.problem(op).flops * mods.share(case))


@pytest.mark.parametrize("case", [*CASES, ModCase("own", 2, 96, 96, 6, 2, 16, 8, "float32", mods="ALiBi")], ids=str)
def test_flex_attention_gets_the_same_functions(case: Case) -> None:
    class Torch:
        tanh = staticmethod(np.tanh)

    score_mod, mask_mod = mods.flex_functions(case, np.asarray, Torch)
    exact = check.Exact(ARRAYS, case)
    q, k = (x.astype("f8") for x in ARRAYS.inputs("forward", case)[:2])
    rows, keys = np.arange(case.seqlen_q), np.arange(case.seqlen_k)
    s = q[0, :, 0] @ k[0, :, 0].T * case.head_dim**-0.5
    s = s if score_mod is None else score_mod(s, 0, 0, rows[:, None], keys)
    s = np.where(np.broadcast_to(mask_mod(0, 0, rows[:, None], keys), s.shape), s, -np.inf)
    p = np.exp(s - s.max(1, keepdims=True))
    weights, _, part = exact.weights(0, q[0, :, 0], k[0, :, 0], rows)
    expected = (p / p.sum(1, keepdims=True))[:, part]
    np.testing.assert_allclose(expected, weights, atol=1e-12)
    np.testing.assert_allclose(expected.sum(1), 1.0)


def test_a_peer_names_features_that_it_lacks() -> None:
    contenders = [peers.ours("forward", ARRAYS, ("flash2",))[0], peers.find(ARRAYS)[0][0]]
    ours, peer = run.run_case(ARRAYS, replace(GROUPED, softcap=2.0), contenders, rounds=3)
    assert ours.wall is not None
    assert (peer.wall, peer.note) == (None, "it has no softcap and no grouped heads")


def test_times_in_graphs_are_of_those_that_can_be_captured() -> None:
    class Arrays(NumpyArrays):
        def captured(self, prepare: Callable[[], Callable[[], None]]) -> Callable[[], None]:
            work = prepare()
            work()
            return lambda: None

        def overwrite_l2(self) -> None:
            events.append("overwritten")

        def span(self, enqueue: Callable[[], Any]) -> Callable[[], float]:
            events.append("timed")
            return lambda: 3e-3

    def refused() -> measure.Run:
        raise RuntimeError("no capture\nof this")

    calls: list[int] = []
    events: list[str] = []
    prepared = {"good": lambda: measure.Run([partial(calls.append, 1)], peers.nullcontext), "bad": refused}
    about = {"good": measure.Seconds(1.3e-4, 0.0), "bad": measure.Seconds(9e-4, 0.0)}
    arrays: Any = Arrays()
    seconds, reasons = measure.seconds_in_graphs(arrays, prepared, about, rounds=3)
    assert seconds == {"good": (1.5e-3, 0.0)}  # two calls in a graph
    assert calls == [1, 1]
    assert reasons == {"bad": "no capture"}
    assert events
    assert events == ["overwritten", "timed"] * (len(events) // 2)


def test_of_a_turn_on_a_gpu_the_second_half_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    class Arrays(OnGpu):
        def span(self, enqueue: Callable[[], Any]) -> Callable[[], float]:
            before = taken[-1:]
            enqueue()
            seconds = 1e-3 if before == taken[-1:] else 2e-3  # more right after another contender
            return lambda: seconds

    monkeypatch.setattr(measure, "TURN_SECONDS", 4e-3)
    prepared = {name: partial(measure.Run, [partial(taken.append, name)], peers.nullcontext) for name in "ab"}
    by_name, reasons = measure.seconds_per_call(Arrays(), prepared, rounds=3)
    assert by_name == {name: (1e-3, 0.0) for name in "ab"}
    assert reasons == {}


def test_a_contender_that_cannot_be_called_twice_is_left_out() -> None:
    def broken(inputs: Any, case: Case) -> Callable[[], Any]:
        calls = iter((ours.prepare(inputs, case)(),))
        return lambda: next(calls)

    ours = peers.ours("forward", ARRAYS, ("flash2",))[0]
    peer = replace(ours, name="peer", ours=False, must_run=False, prepare=broken)
    for both in ((ours, peer), (peer, ours)):
        rows = {row.contender.name: row for row in run.run_case(ARRAYS, GROUPED, list(both), rounds=3)}
        assert rows[ours.name].wall is not None
        assert rows["peer"].wall is None
        assert rows["peer"].note == "StopIteration"


def test_ratios_are_of_times_of_one_kind() -> None:
    ours, peer = (run.Row(GROUPED, x, wall=measure.Seconds(20e-6, 0.0)) for x in peers.ours("backward", OnGpu(), ()))
    peer = replace(peer, contender=replace(peer.contender, ours=False))
    captured = replace(ours, graph=measure.Seconds(3e-6, 0.0))
    assert table.ratios([captured, peer], captured) == {peer.contender.name: 1.0}
    faster = replace(peer, graph=measure.Seconds(1.5e-6, 0.0))
    assert table.ratios([captured, faster], captured) == {peer.contender.name: 0.5}


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_gpu_calls_are_captured_and_their_memory_is_reported(library: str) -> None:
    pytest.importorskip(library)
    arrays = {"cupy": CupyArrays, "torch": TorchArrays}[library]()
    case = presets.square(1, 256, 2, 64, "float16", True)
    for op in ("forward", "backward"):
        rows = run.run_case(arrays, case, peers.ours(op, arrays, ("flash2",)), rounds=3)
        assert rows
        for row in rows:
            assert (row.note, row.wrong) == ("", False)
            assert row.graph is not None
            assert row.wall is not None
            assert 1e-6 < row.graph.median < 1e-2
            assert row.peak_bytes is not None
            assert row.peak_bytes >= 2 * 256 * 2 * 64


def test_a_decoding_step_counts_what_it_reads() -> None:
    case = Case("step", 2, 1, 100, 8, 2, 64, 64, "bfloat16", causal=True)
    row = run.Row(case, peers.ours("forward", ARRAYS, ("flash2",))[0])
    assert row.num_bytes == 2 * 2 * (2 * 8 * 64 + 2 * 100 * 2 * 64)


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_each_preset_is_measured_drawn_and_compared(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    real = presets.PRESETS[preset]
    small = real._replace(make=lambda *args: [x for x in real.make(*args) if x.case.seqlen_k <= 512][:4])
    monkeypatch.setitem(presets.PRESETS, preset, small)
    written = tmp_path / "found.json"
    more = ["--seqlens", "64"] if preset in presets.GRIDS else []
    arguments = ["bench", preset, "--rounds", "3", "--json", str(written), "--pictures", str(tmp_path), *more]
    assert main(arguments) == 0
    content = json.loads(written.read_text("utf-8"))
    assert content["preset"] == preset
    assert len({row["name"] for row in content["rows"]}) in (1, 2, 4)
    assert all(row["wall"]["median"] == row["seconds"] for row in content["rows"] if row["seconds"])
    printed = capsys.readouterr().out
    drawn = [Path(line.removeprefix("drawn: ")) for line in printed.splitlines() if line.startswith("drawn: ")]
    assert len(drawn) >= 2
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert main(["bench", "--compare", str(written), str(written)]) == 0
    assert "1.000" in capsys.readouterr().out
    # Figures were rendered above; test_pictures.py renders those of results from files.
    monkeypatch.setattr(figure.Figure, "savefig", lambda figure, path, **options: Path(path).touch())
    assert main(["bench", "--draw", str(written), "--pictures", str(tmp_path / "again")]) == 0
    assert {path.name for path in (tmp_path / "again").iterdir()} == {path.name for path in drawn}


def test_decode_takes_ops() -> None:
    for ops in (("forward",), ("lse", "forward")):
        options = Namespace(ops=ops, dtype=None)
        timed = presets.decode(NumpyArrays(), options)
        assert [x.op for x in timed] == [op for op in ops for _ in presets.DECODING]
    assert {x.op for x in presets.decode(NumpyArrays(), Namespace(ops=None, dtype=None))} == {"forward"}


def test_a_folder_for_pictures_is_created_or_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert options_of_tools.folder(str(tmp_path / "new" / "folder")).is_dir()
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--pictures", str(tmp_path / "file" / "folder")])
    assert "cannot be written to" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["models", "--seqlens", "1k"], "--seqlens goes with paper, memory, quick"),
    (["decode", "--only", "nothing"], "no problem of decode has 'nothing' in its name"),
    (["models", "--ops", "backward", "--only", "prefill"], "no problem of models of backward has 'prefill'"),
    (["decode", "--seqlens", "1k"], "--seqlens goes with paper, memory, quick"),
    (["memory", "--head-dims", "128"], "--head-dims goes with paper, quick"),
    (["--draw", __file__, "--json", "x.json"], "--draw goes with --pictures"),
    (["--draw", __file__], "--draw goes with --pictures FOLDER"),
])  # fmt: skip
def test_conflicting_options_and_empty_selections_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *arguments])
    assert message in capsys.readouterr().err


def test_measurements_of_ranks_are_compared_but_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = Path(__file__).resolve().parents[2] / "examples/results/h200/ranks.json"
    assert main(["bench", "--compare", str(written), str(written)]) == 0
    shown = capsys.readouterr().out
    assert "cuflash ring, zigzag" in shown
    assert "1.000 (" in shown
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--draw", str(written), "--pictures", str(tmp_path)])
    assert "measurements of ranks, which have no picture" in capsys.readouterr().err


def test_files_that_the_benchmark_did_not_write_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, empty = tmp_path / "other.json", tmp_path / "empty.json"
    other.write_text("[1, 2]", "utf-8")
    empty.write_text('{"machine": {"gpus": [], "versions": {}}, "rows": []}', "utf-8")
    for names, message in (
        ((other, empty), "other.json is no file that"),
        ((empty, empty), "no problem in common"),
        ((tmp_path / "none", empty), "there is no such file"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["bench", "--compare", *map(str, names)])
        assert message in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--draw", str(other), "--pictures", str(tmp_path)])
    assert "other.json is no file that" in capsys.readouterr().err
    assert main(["bench", "--draw", str(empty), "--pictures", str(tmp_path)]) == 0
    assert "nothing was timed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("facts", "expected"),
    [({"MemoryClockRate": 2_619_000, "GlobalMemoryBusWidth": 5120}, pytest.approx(3.352e12, rel=1e-3)), ({}, None)],
    ids=["H100", "not known"],
)
def test_the_bandwidth_is_that_of_the_memory_bus(facts: dict[str, int], expected: Any) -> None:
    arrays: Any = object.__new__(CupyArrays)
    arrays.cupy = Namespace(cuda=Namespace(Device=lambda ordinal: Namespace(attributes=facts)))
    assert arrays.bandwidth() == expected
    assert ARRAYS.bandwidth() is None


def test_first_calls_of_peers_are_timed_after_their_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    of_peers = peers.ours("forward", ARRAYS, ("flash2",)) + peers.ours("backward", ARRAYS, ())
    broken = replace(of_peers[0], name="broken", prepare=lambda inputs, case: 1 / 0)
    monkeypatch.setattr(peers, "find", lambda arrays: ([*of_peers, broken], {}))
    timings = startup.first_calls_of_peers(ARRAYS, ("forward", "backward"))
    assert {op: list(of_op) for op, of_op in timings.items()} == {
        "forward": ["cuflash flash2"],
        "backward": ["cuflash backward"],
    }
    assert all(seconds > 0 for of_op in timings.values() for seconds in of_op.values())
    assert startup.first_calls_of_peers(ARRAYS, ("forward",)).keys() == {"forward"}


def test_first_calls_are_reported_even_if_some_were_not_timed() -> None:
    ours = {"nvrtc": 0.01, "forward": {"d64": 1.5}}
    lines = table._startup({"cold": ours, "disk": ours, "failed": "no torch"})
    assert lines == {"NVRTC loaded": "10 ms", "forward d64, compiled": "1.50 s", "forward d64, from disk": "1500.0 ms",
                    "not measured": "no torch"}  # fmt: skip
    assert table._startup({"peers": {"forward": {"torch cuDNN": 0.5}}}) == {"forward d128, torch cuDNN": "0.50 s"}
