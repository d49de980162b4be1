"""`python -m cuflash warmup`: its kernels, cache and messages. Needs NVRTC but no GPU."""

from __future__ import annotations

import errno
import io
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from variants import plan_of

import cuflash
from cuflash.__main__ import INTERRUPTED, main
from cuflash.errors import CompileError, UnsupportedError
from cuflash.planning import device as devices
from cuflash.planning.device import DEVICES
from cuflash.planning.variant import Variant
from cuflash.problem.operands import OPS
from cuflash.runtime import compiler, disk_cache
from cuflash.tools import warmup

try:
    compiler.nvrtc_version()
except UnsupportedError as error:
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("cache_dir")
LENGTHS = (5, 70, 600, 3000, 9000, 50_000)
SHAPES = ((1, 4, 4), (3, 24, 2), (100, 64, 8), (1, 12, 1))  # batch and heads
SMALL = ("--ops", "forward,lse", "--dtypes", "float16", "--head-dims", "32", "--device", "sm_80")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """Returns the variants that reach the compiler, which is a fast stand-in and accepts all."""
    variants: list[Variant] = []

    def compile_variant(variant: Variant) -> tuple[bytes, str]:
        variants.append(variant)
        return b"\x7fELF", ""

    monkeypatch.setattr(compiler, "compile_variant", compile_variant)
    return variants


def run(*arguments: str) -> int:
    return main(["warmup", *arguments])


def launched(*cases: tuple[Any, ...], **more: Any) -> set[Variant]:
    """Returns all kernels in plans of cases (op, dtype, head_dim, head_dim_v, arch), at other sizes than warmup's.

    Forward has also calls with few queries, which split keys.
    """
    variants: set[Variant] = set()
    for op, dtype, head_dim, head_dim_v, arch in cases:
        if op not in OPS or (op == "backward" and more.get("out_dtype")):  # not supported by `cuflash.plan`
            plan = plan_of(op, dtype, head_dim, head_dim_v, DEVICES[arch], **more)
            assert plan is not None
            variants |= {launch.variant for launch in plan.launches}
            continue
        for (batch, heads, heads_kv), length, causal in product(SHAPES, LENGTHS, (False, True)):
            few = product((1, 3), (0, 2)) if op == "forward" else ()
            for queries, splits in ((length, 0), *few):
                shapes = [(batch, queries, heads, head_dim), (batch, length, heads_kv, head_dim)]
                shapes += [(batch, length, heads_kv, head_dim_v)] if op != "lse" else []
                options = more | {"causal": causal} | ({"num_splits": splits} if splits else {})
                if op == "backward":
                    options.pop("out_dtype", None)  # None
                launches = cuflash.plan(*shapes, op=op, dtype=dtype, device=arch, **options).launches
                variants |= {launch.variant for launch in launches}
    return variants


def test_kernels_are_compiled_once_and_found_from_then_on(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = launched(*((op, "float16", 32, 32, "sm_80") for op in ("forward", "lse")))
    assert run(*SMALL) == 0
    out, err = capsys.readouterr()
    assert out.startswith("3 kernels for sm_80: 3 compiled in ")
    assert out.endswith(f" s; {cache_dir}\n")
    assert sorted(line.split()[:4] for line in err.splitlines()) == sorted(
        ["compiled", variant.name, "for", "sm_80"] for variant in expected
    )
    assert {compiler._file_name(variant) for variant in expected} == {path.name for path in cache_dir.iterdir()}

    monkeypatch.setattr(compiler, "compile_variant", None)
    assert run(*SMALL) == 0
    assert capsys.readouterr() == (f"3 kernels for sm_80: 3 were there; {cache_dir}\n", "")


def test_a_damaged_kernel_is_compiled_again_and_counted_as_compiled(
    cache_dir: Path, compiled: list[Variant], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*SMALL) == 0
    (path,) = cache_dir.glob("lse_*")
    path.write_bytes(path.read_bytes()[:-1])
    capsys.readouterr()
    assert run(*SMALL) == 0
    out, err = capsys.readouterr()
    assert "3 kernels for sm_80: 1 compiled in " in out
    assert " s, 2 were there; " in out
    assert [line.split()[1] for line in err.splitlines()] == [compiled[3].name]
    assert [variant.op for variant in compiled[3:]] == ["lse"]


def test_dtypes_head_dims_and_ops_are_all_combined(compiled: list[Variant]) -> None:
    # Hopper's kernels read neither keys of head dim 33 nor values of head dim 4.
    assert run("--dtypes", "bfloat16,float32", "--head-dims", "33,40,64x4,192x128", "--ops",
               "forward,lse,merge,append_kv", "--device", "sm_90") == 0  # fmt: skip
    dims = (33, 33), (40, 40), (64, 4), (192, 128)
    every = product(("forward", "lse", "merge", "append_kv"), ("bfloat16", "float32"), dims)
    assert set(compiled) == launched(*((op, dtype, *dims, "sm_90") for op, dtype, dims in every))
    # merge and append_kv have one kernel for all head dims; head dim 40 in bfloat16 has two of forward
    assert len(set(compiled)) == len(compiled) == 28


def test_softcap_adds_the_kernels_of_capped_scores_where_there_are_any(compiled: list[Variant]) -> None:
    cases = [(op, "float16", *dims, "sm_90") for op in ("forward", "lse") for dims in ((64, 64), (256, 256))]
    more = "--dtypes", "float16", "--device", "sm_90", "--algorithms", "flash2,flashd"
    more += "--head-dims", "64,256", "--ops", "forward,lse,backward"
    assert run(*more) == 0
    assert set(compiled) > launched(*cases)
    assert not any(variant.softcap for variant in compiled)
    compiled.clear()
    assert run(*more, "--softcap") == 0
    gradients = [("backward", "float16", dim, dim, "sm_90") for dim in (64, 256)]
    capped = launched(*cases, *gradients, softcap=5.0)
    assert set(compiled) == {variant for variant in capped if variant.softcap}  # the others were there
    assert len(compiled) == 18
    compiled.clear()
    assert run(*SMALL, "--softcap") == 0
    assert set(compiled) == launched(*((op, "float16", 32, 32, "sm_80") for op in ("forward", "lse")))


def test_algorithms_and_out_dtype_are_those_of_a_call(compiled: list[Variant]) -> None:
    assert run(*SMALL, "--algorithms", "flash2,flashd", "--out-dtype", "float32") == 0
    case = "float16", 32, 32, "sm_80"
    expected = launched(("lse", *case))
    for algorithm in ("flash2", "flashd"):
        expected |= launched(("forward", *case), algorithm=algorithm, out_dtype="float32")
    assert set(compiled) == expected
    assert len(compiled) == 4


@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_deterministic_adds_kernels_to_backward_alone(compiled: list[Variant], out_dtype: str | None) -> None:
    case, options = ("float16", 64, 64, "sm_80"), {"out_dtype": out_dtype}
    expected = launched(("forward", *case), **options)
    more = "--ops", "forward,backward", "--head-dims", "64", *(() if out_dtype is None else ("--out-dtype", out_dtype))
    for deterministic in (False, True):
        assert run(*SMALL, *more, *(("--deterministic",) if deterministic else ())) == 0
        expected |= launched(("backward", *case), deterministic=deterministic, **options)
        assert set(compiled) == expected
    assert len(compiled) == len(expected) == 7  # two of forward, one delta, and two kernels for each


def test_a_combination_without_a_kernel_is_one_line(
    compiled: list[Variant], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*SMALL, "--head-dims", "32,600,600x32", "--ops", "lse") == 0
    out, err = capsys.readouterr()
    skipped, summary = err.splitlines()
    assert skipped.startswith("left out: lse: head dims (600, 0) in float16 have no tile")
    assert summary.startswith("compiled lse_")
    assert out.startswith("1 kernel for sm_80: 1 compiled")
    assert len(compiled) == 1


def test_nothing_to_compile_at_all_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--head-dims", "600") == 1
    out, err = capsys.readouterr()
    assert out == "0 kernels for sm_80\n"
    assert len(err.splitlines()) == 2


def test_a_compile_error_is_printed_in_full_and_the_rest_goes_on(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile_variant(variant: Variant) -> tuple[bytes, str]:
        if variant.op == "forward":
            raise CompileError(f"{variant.name} does not compile\nline 2 of the log")
        return b"\x7fELF", ""

    monkeypatch.setattr(compiler, "compile_variant", compile_variant)
    assert run(*SMALL, "--jobs", "1") == 1
    out, err = capsys.readouterr()
    for refused in launched(("forward", "float16", 32, 32, "sm_80")):
        assert f"{refused.name} does not compile\nline 2 of the log\n" in err
    assert "3 kernels for sm_80: 1 compiled in " in out
    assert ", 2 failed; " in out
    assert [path.name.split("_")[0] for path in cache_dir.iterdir()] == ["lse"]


def test_an_architecture_unknown_to_nvrtc_is_one_failure(
    monkeypatch: pytest.MonkeyPatch, compiled: list[Variant], capsys: pytest.CaptureFixture[str]
) -> None:
    from cupy.cuda import nvrtc

    monkeypatch.setattr(nvrtc, "getSupportedArchs", lambda: [90])
    assert run(*SMALL) == 1
    out, err = capsys.readouterr()
    assert err.count("cannot compile for sm_80") == len(err.splitlines()) == 1
    assert "3 kernels for sm_80: 3 failed; " in out
    assert not compiled


def test_an_unwritable_folder_is_refused_before_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Variant], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("a folder cannot be made below a file", "utf-8")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(file / "cache"))
    assert run(*SMALL) == 1
    assert capsys.readouterr().err.startswith(f"cuflash: the kernel cache {file / 'cache'} cannot be used")
    assert not compiled


@pytest.mark.filterwarnings("ignore:the kernel cache")
def test_a_folder_that_fills_up_on_the_way_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, compiled: list[Variant], capsys: pytest.CaptureFixture[str]
) -> None:
    def write(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_cache, "write", write)
    assert run(*SMALL) == 1
    out, err = capsys.readouterr()
    assert len(set(err.splitlines())) == 1
    assert err.startswith(f"no kernel was kept in {disk_cache.cache_dir()} any more: the warning says why")
    assert "3 kernels for sm_80: 3 failed; " in out


def test_a_folder_that_holds_all_need_not_be_written(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Variant], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*SMALL) == 0
    monkeypatch.setattr(warmup, "writable_dir", lambda: pytest.fail("written"))
    assert run(*SMALL) == 0
    assert "3 kernels for sm_80: 3 were there" in capsys.readouterr().out


def test_by_default_each_kind_of_gpu_here_is_served(
    monkeypatch: pytest.MonkeyPatch, compiled: list[Variant], capsys: pytest.CaptureFixture[str]
) -> None:
    def query(ordinal: int) -> Any:
        if ordinal == 1:
            raise UnsupportedError("GPU 1 (Tesla T4) is sm_75; the kernels need sm_80 or newer")
        return DEVICES["sm_80"] if ordinal == 3 else DEVICES["sm_90"]

    monkeypatch.setattr(devices, "count", lambda: 4)
    monkeypatch.setattr(devices, "query", query)
    assert run(*SMALL[:-2]) == 0
    assert set(compiled) == launched(
        *((op, "float16", 32, 32, arch) for op in ("forward", "lse") for arch in ("sm_80", "sm_90"))
    )
    assert len(compiled) == 11
    out, err = capsys.readouterr()
    assert out.startswith("11 kernels for sm_90, sm_80: 11 compiled")
    assert [line for line in err.splitlines() if "Tesla T4" in line] == [
        "left out: GPU 1 (Tesla T4) is sm_75; the kernels need sm_80 or newer"
    ]
    compiled.clear()
    assert run(*SMALL[:-2], "--device", "cuda:3") == 0
    assert "3 kernels for sm_80: 3 were there" in capsys.readouterr().out


@pytest.mark.parametrize("arch", DEVICES)
def test_every_named_device_gets_code_that_runs_there(
    arch: str, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--ops", "merge", "--dtypes", "float16", "--head-dims", "64", "--device", arch) == 0
    assert capsys.readouterr().out.startswith(f"1 kernel for {arch}: 1 compiled")
    (path,) = cache_dir.glob("*.cubin")
    code = path.name.split(".")[-3].removeprefix("sm_")
    assert devices.code_runs(int(code), int(arch.removeprefix("sm_")))


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_without_a_gpu_a_device_has_to_be_named(
    num_gpus: int, monkeypatch: pytest.MonkeyPatch, compiled: list[Variant], capsys: pytest.CaptureFixture[str]
) -> None:
    def query(ordinal: int) -> Any:
        raise UnsupportedError("GPU 0 (Tesla T4) is sm_75; the kernels need sm_80 or newer")

    monkeypatch.setattr(devices, "count", lambda: num_gpus)
    monkeypatch.setattr(devices, "query", query)
    assert run(*SMALL[:-2]) == 1
    out, err = capsys.readouterr()
    assert "give --device, one of sm_80, " in err
    assert ("Tesla T4" in err) == bool(num_gpus)
    assert not out
    assert not compiled


@pytest.mark.parametrize("jobs", [1, 2])
def test_as_many_are_compiled_at_once_as_asked_for(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, lock, both = 0, 0, threading.Lock(), threading.Barrier(jobs)

    def compile_variant(variant: Variant) -> tuple[bytes, str]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait(timeout=600)  # fails the test unless that many are inside
        with lock:
            running -= 1
        return b"\x7fELF", ""

    monkeypatch.setattr(compiler, "compile_variant", compile_variant)
    assert run(*SMALL, "--dtypes", "float16,bfloat16", "--jobs", str(jobs)) == 0  # six kernels
    assert most == jobs


def test_an_interrupt_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    variants, cancelled, shutdown = [], threading.Event(), ThreadPoolExecutor.shutdown

    def compile_variant(variant: Variant) -> tuple[bytes, str]:
        variants.append(variant)
        if len(variants) == 1:
            raise KeyboardInterrupt
        cancelled.wait()
        return b"\x7fELF", ""

    def noted(pool: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        shutdown(pool, wait=False, cancel_futures=cancel_futures)
        cancelled.set()
        shutdown(pool, wait=wait)

    monkeypatch.setattr(compiler, "compile_variant", compile_variant)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", noted)
    assert run(*SMALL, "--head-dims", "32,64,96,128", "--jobs", "1") == INTERRUPTED  # of twelve kernels
    assert len(variants) <= 2  # the second had begun


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_and_a_log_does_not(
    monkeypatch: pytest.MonkeyPatch, compiled: list[Variant], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert run(*SMALL) == 0
    assert "\x1b[" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()
    assert "compiled" not in terminal.getvalue()
    assert capsys.readouterr().out.startswith("3 kernels for sm_80: 3 compiled")


BAD = {
    "dtype": (("--dtypes", "float16,float64"), "--dtypes: 'float64': give some of float16, bfloat16, float32"),
    "nothing": (("--ops", ""), "--ops: '': give some of forward, lse, backward, merge, append_kv"),
    "op": (("--ops", "forward,standard"), "--ops: 'standard': give some of forward, lse, backward, merge, append_kv"),
    "algorithm": (("--algorithms", "standard"), "--algorithms: 'standard': give some of flash1, flash2, flashd"),
    **{
        f"head_dims_{text}": (("--head-dims", text), f"--head-dims: {text!r}: give whole numbers above 0")
        for text in ("0", "64,", "64x", "x64", "64x0", "1x2x3", "-8", "d64", "64, 128")
    },
    "jobs": (("--jobs", "0"), "--jobs: '0': give a whole number above 0"),
    "jobs_text": (("--jobs", "all"), "--jobs: 'all': give a whole number above 0"),
    "masks": (("--masks", "causal"), "--masks"),
    "old": (("--device", "sm_75"), "device='sm_75' is too old: the kernels need sm_80 or newer; give a GPU such as "),
    "device": (("--device", "sm_99"), "device='sm_99' is not known; give a GPU such as cuda:0, or one of sm_80, "),
    "cpu": (("--device", "cpu"), "device='cpu' is not known; give a GPU such as cuda:0, or one of sm_80, "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_refused_by_name(
    name: str, compiled: list[Variant], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = BAD[name]
    options = [f"{arguments[0]}={arguments[1]}"]  # "-8" alone would be an option
    with pytest.raises(SystemExit) as caught:
        run(*SMALL, *options)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
    assert not compiled


def test_the_help_says_that_masks_are_no_matter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "all masks, scales" in text
    for option in ("dtypes", "head-dims", "ops", "algorithms", "softcap", "deterministic", "device", "jobs"):
        assert f"--{option}" in text
