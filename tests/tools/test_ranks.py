"""`cuflash bench ranks`: computed shares beside measured ones, and the measurement over two processes of gloo."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from workers import ROOT, need_checkout, output_of

from cuflash.__main__ import main
from cuflash.distributed import Layout, plan
from cuflash.distributed.rectangles import Window
from cuflash.tools.bench import ranks
from cuflash.tools.bench.check import MAX_ERROR
from cuflash.tools.bench.ranks_model import (
    NAIVE,
    OF_HOSTS,
    Cluster,
    Part,
    gather_seconds,
    kernel_seconds,
    one_gpu_seconds,
    ring_seconds,
    shares,
    ulysses_seconds,
)
from cuflash.tools.bench.ranks_problems import Heads, Work

CLUSTER = Cluster()
CAUSAL = Work("causal", 16384, Heads(32, 8, 128))
WINDOW = CAUSAL._replace(name="window", kind="contiguous", window=4095)
PACKED = CAUSAL._replace(name="packed", kind="balanced", mean_document=4096)
BOTH = "forward", "backward"


@pytest.mark.parametrize(("rows", "heads", "ring", "ulysses"), [(16384, 16, 0.62, 0.82), (65536, 8, 0.86, 0.98)])
def test_shares_of_naive_code_are_those_measured(rows: int, heads: int, ring: float, ulysses: float) -> None:
    """Measured on four H200, forward: keys sent after each kernel, and parts added up by PyTorch's operations."""
    work = Work("causal", rows, Heads(heads, heads, 128))
    layout, alone = work.layout(4), one_gpu_seconds(CLUSTER, work, 4, "forward") / 4
    seconds = ring_seconds(CLUSTER, layout, work.mask, work.heads, "forward", CLUSTER.within, NAIVE)
    assert alone / seconds == pytest.approx(ring, abs=0.05)
    seconds = ulysses_seconds(CLUSTER, layout, work.mask, work.heads, "forward")
    assert alone / seconds == pytest.approx(ulysses, abs=0.05)


def test_kernels_have_the_recorded_rates() -> None:
    need_checkout("examples/results")
    rows = json.loads((ROOT / "examples/results/h200/paper.json").read_text("utf-8"))["rows"]
    names = "cuflash flash2", "cuflash backward"
    count = 0
    for row in rows:
        if row["contender"] in names and (row["head_dim"], row["dtype"]) == (128, "bfloat16"):
            mask = Window(None, 0) if row["causal"] else Window()
            parts = (Part(row["seqlen_q"], row["seqlen_k"]),) * row["batch"]
            seconds = kernel_seconds(CLUSTER, row["op"], Heads(row["heads_q"], row["heads_kv"], 128), mask, parts)
            limit = 0.05 if row["seqlen_q"] > 512 else 0.08
            assert row["flops"] / seconds * 1e-12 == pytest.approx(row["tflops"], rel=limit), row["name"]
            count += 1
    assert count == 24


@pytest.mark.parametrize("work", [CAUSAL, WINDOW, PACKED], ids=lambda work: work.name)
def test_bytes_over_slow_links_are_those_of_the_plan(work: Work) -> None:
    """Links so slow that kernels do not count. A rank sends its last keys while it computes others."""
    link = 1e5
    cluster, layout = CLUSTER._replace(within=link, alpha=0.0), work._replace(kind="zigzag").layout(4)
    seconds = {
        "ring": ring_seconds(cluster, layout, work.mask, work.heads, "forward", link),
        "ulysses": ulysses_seconds(cluster, layout, work.mask, work.heads, "forward"),
        "gather": gather_seconds(cluster, layout, work.mask, work.heads, "forward"),
    }
    for scheme, of_scheme in seconds.items():
        window = (-1 if work.window is None else work.window, 0)
        planned = plan(layout, *work.heads, scheme=scheme, causal=True, window_size=window)
        assert of_scheme * link == pytest.approx(max(rank.bytes_received for rank in planned.ranks), rel=1e-3), scheme


def test_one_rank_has_one_gpus_time() -> None:
    for work in (CAUSAL, WINDOW, PACKED):
        for share in shares(CLUSTER, work, 1, BOTH).values():
            assert share == (pytest.approx(sum(one_gpu_seconds(CLUSTER, work, 1, op) for op in BOTH)), 1.0)


@pytest.mark.parametrize("work", [CAUSAL, WINDOW, PACKED], ids=lambda work: work.name)
def test_shares_lie_between_nothing_and_one(work: Work) -> None:
    for count in (2, 4, 8, 16, 64):
        for scheme, share in shares(CLUSTER, work, count, ("forward",)).items():
            assert 0 < share.share < 1, (count, scheme)


def test_a_causal_rank_has_more_work_with_more_ranks() -> None:
    seconds = [shares(CLUSTER, CAUSAL, count, BOTH)["ring"].seconds for count in (1, 2, 4, 8, 16, 64)]
    assert seconds == sorted(seconds)
    assert seconds[-1] == pytest.approx(4 * seconds[-2], rel=0.1)


def test_slower_links_and_smaller_hosts_take_longer() -> None:
    def of(**changes: Any) -> dict[str, float]:
        cluster = CLUSTER._replace(**changes)
        return {name: share.seconds for name, share in shares(cluster, CAUSAL, 16, BOTH).items()}

    plain = of()
    assert set(plain) == {"ring", "ulysses", OF_HOSTS}
    for changes in ({"between": 10e9}, {"alpha": 1e-3}):
        assert all(seconds > plain[name] for name, seconds in of(**changes).items()), changes
    assert of(within=20e9)["ulysses"] > plain["ulysses"]
    assert of(host=4)["ulysses"] > plain["ulysses"]
    assert of(host=16)["ring"] < plain["ring"]


def test_the_bytes_of_a_window_do_not_grow_with_ranks() -> None:
    some = [shares(CLUSTER, WINDOW, count, BOTH)["gather"].seconds for count in (16, 64, 256)]
    assert max(some) == pytest.approx(min(some), rel=1e-3)


def test_a_rank_with_more_work_than_others_counts() -> None:
    """All rows of one document on one of two ranks, by a layout that does not balance."""
    heads = Heads(4, 4, 128)
    bounds = [0, 8192, *range(8192 + 64, 16384 + 1, 64)]
    by_kind = [
        gather_seconds(CLUSTER, Layout(bounds, 2, kind), Window(None, 0), heads, "forward")
        for kind in ("contiguous", "zigzag")
    ]
    alone = kernel_seconds(CLUSTER, "forward", heads, Window(None, 0), (Part(8192, 8192),))
    assert by_kind[0] >= alone


def test_unequal_schemes_are_left_out() -> None:
    assert set(shares(CLUSTER, CAUSAL, 64, BOTH)) == {"ring", OF_HOSTS}
    assert set(shares(CLUSTER, CAUSAL._replace(heads=Heads(6, 6, 128)), 4, BOTH)) == {"ring", "gather"}
    assert set(shares(CLUSTER, PACKED, 64, BOTH)) == {"gather"}


def test_the_command_prints_and_writes_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "RANKS", (1, 4, 16))
    path = tmp_path / "ranks.json"
    command = ["bench", "ranks", "--seqlens", "4k", "--only", "causal", "--json", str(path), "--host", "4"]
    assert main([*command, "--rates", "400,300", "--links", "200,25", "--alpha", "20", "--heads", "16"]) == 0
    printed = capsys.readouterr().out
    assert "hosts of 4 GPUs" in printed
    assert "skew" in printed
    assert "congestion" in printed
    content = json.loads(path.read_text("utf-8"))
    expected = CLUSTER._replace(forward=400e12, backward=300e12, within=200e9, between=25e9, alpha=20e-6, host=4)
    assert content["cluster"] == expected._asdict()
    assert content["missing"] in printed
    work = Work("causal, 4k tokens, 16/16 heads", 4096, Heads(16, 16, 128))
    for row in content["rows"]:
        share = shares(expected, work, row["ranks"], ranks.OPS[row["op"]])[row["scheme"]]
        assert (row["problem"], row["seconds"], row["share"]) == (work.name, *share)
        assert f"{share.share:.2f}" in printed
    assert {(row["ranks"], row["scheme"]) for row in content["rows"]} == {
        *((count, scheme) for count in (1, 4) for scheme in ("ring", "ulysses", "gather")),
        *((16, scheme) for scheme in ("ring", "ulysses", OF_HOSTS)),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("ranks --quick", "--quick has no effect; add --measure"), ("ranks --dtype float16", "--dtype has no effect"),
     ("ranks --head-dims 64,128", "--head-dims has 2 numbers"), ("ranks --only none", "no problem of ranks has 'none'"),
     ("ranks --heads 6/4", "give heads such as 32/8"), ("ranks --links 300", "give 2 numbers above 0"),
     ("ranks --alpha 0", "give a number above 0"), ("quick --measure", "--measure goes with ranks; leave it out")],
)  # fmt: skip
def test_options_without_an_effect_are_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *arguments.split()])
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_measurement_needs_torchrun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.delenv("RANK", raising=False)
    for arguments, message in (
        ([], "torchrun --nproc-per-node=N"),
        (["--picture", "x.png"], "--picture has no effect"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["bench", "ranks", "--measure", *arguments])
        assert message in " ".join(capsys.readouterr().err.split())


def measured(path: Path, processes: int, *options: str, **variables: str) -> tuple[str, dict[str, Any]]:
    """Runs the measurement in processes of torchrun; returns what it prints and writes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "cuflash", "bench", "ranks", "--measure", "--json", str(path), *options]
    printed = output_of(*command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | variables, timeout=600)
    return printed, json.loads(path.read_text("utf-8"))


@pytest.mark.gpu
def test_gpus_of_this_host_measure_all_schemes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA")
    count = torch.cuda.device_count()
    _, content = measured(tmp_path / "measured.json", count, "--quick", "--seqlens", "1k")
    assert content["ranks"] == count
    ours = [row for row in content["rows"] if row["ours"]]
    assert {row["scheme"] for row in ours} == {"ring", "ulysses", "gather"}
    for row in ours:
        assert not row["note"], row
        assert row["error"] < 2 * MAX_ERROR["bfloat16"]
        assert row["bytes"] > 0
        assert 0 < row["computed"] <= 1


@pytest.mark.slow(20)
def test_two_processes_measure_and_check_all_schemes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    options = ["--seqlens", "40"]
    printed, content = measured(tmp_path / "measured.json", 2, *options, CUDA_VISIBLE_DEVICES="")
    assert printed.count("ring's shift") == 1, "one process prints"
    assert content["ranks"] == 2
    assert all(content["links"][name] > 0 for name in ("shift", "all_to_all", "alpha"))
    ours = [row for row in content["rows"] if row["ours"]]
    contenders = {(row["problem"].split(",")[0], row["scheme"], row["kind"], row["op"]) for row in ours}
    assert contenders == {
        (problem, scheme, kind, op)
        for problem, local in (("causal", "zigzag"), ("window", "contiguous"), ("packed", "balanced"))
        for scheme, kind in {*((x, "zigzag") for x in ("ring", "ulysses", "gather")), ("gather", local)}
        for op in ranks.OPS
    }
    assert {row["scheme"] for row in ours if row["auto"] and row["problem"].startswith("window")} == {"gather"}
    for row in ours:
        assert row["error"] < 1e-4, row
        assert row["share"] == pytest.approx(row["one_gpu_seconds"] / row["seconds"])
    assert [row["seconds"] for row in content["rows"] if not row["ours"]] == [None] * 4  # of PyTorch, on a GPU alone


def test_a_wrong_row_is_detected() -> None:
    torch = pytest.importorskip("torch")
    from cuflash.tools.bench.ranks_measure import ROWS_AT_ONCE, row_errors

    exact = torch.randn(1, ROWS_AT_ONCE + 3, 2, 16)
    result = exact.clone()
    assert row_errors([result], [exact]) == [0.0]
    result[0, -1, 1] *= 1.5
    assert row_errors([exact, result], [exact, exact]) == [0.0, pytest.approx(0.5, rel=1e-4)]
    result[0, 0, 0, 0] = torch.nan
    assert row_errors([result], [exact])[0] == float("inf")
    assert row_errors([exact[:, :0]], [exact[:, :0]]) == [0.0]
