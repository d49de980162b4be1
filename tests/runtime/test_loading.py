"""Loading of kernels: side by side, again after an error, and others in place of one that must not run."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from variants import problem_of, variant_of
from workers import run_threads

from cuflash.errors import CompileError, UnsupportedError
from cuflash.planning.device import DEVICES
from cuflash.planning.planner import plan
from cuflash.planning.variant import Variant
from cuflash.runtime import compiler

try:
    compiler.nvrtc_version()
except UnsupportedError as error:
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)

MERGE = Variant("merge", "portable/merge.cu", "sm_80", "float16", "float16")
OTHER = replace(MERGE, dtype="bfloat16", out_dtype="bfloat16")


@pytest.fixture(autouse=True)
def _private_cache(cache_dir: Path) -> Path:
    return cache_dir


def test_a_kernel_without_room_for_its_cluster_gives_way_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = variant_of("backward", "float16", 256, 256, DEVICES["sm_90"])
    module = SimpleNamespace(load=lambda cubin: None, get_function=lambda name: SimpleNamespace(ptr=77))
    monkeypatch.setattr(compiler, "cubin", lambda variant: b"")
    monkeypatch.setattr(compiler, "current_device", lambda: 0)
    monkeypatch.setattr(compiler, "_modules", [])
    monkeypatch.setattr("cupy.cuda.Module", lambda: module)
    monkeypatch.setattr("cupy.cuda.driver.funcSetAttribute", lambda *_: None)
    monkeypatch.setattr(compiler, "has_room_for_cluster", lambda *arguments: arguments != (77, 2, 512, 231424))
    with pytest.raises(compiler.UnusableError, match="finds no 2 SMs of a cluster on this GPU"):
        compiler.load(clusters, 0)
    assert compiler.unusable() == {clusters}
    problem = problem_of("backward", "float16", 256, 256)
    others = [launch.variant for launch in plan(problem, DEVICES["sm_90"], (), compiler.unusable()).launches]
    assert clusters not in others
    compiler.load(others[-1], 0)


def test_different_kernels_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def load(variant: Variant, ordinal: int) -> Any:
        both.wait(timeout=600)  # fails the test unless both threads are inside
        return variant

    monkeypatch.setattr(compiler, "_load", load)
    run_threads(lambda index: compiler.load((MERGE, OTHER)[index], 0), 2)


def test_kernels_of_a_call_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    both, compiled = threading.Barrier(2), list[Variant]()

    def compile_variant(variant: Variant) -> tuple[bytes, str]:
        compiled.append(variant)
        both.wait(timeout=600)  # fails the test unless both threads are inside
        if variant == OTHER:
            raise CompileError("no")
        return b"cubin", ""

    monkeypatch.setattr(compiler, "compile_variant", compile_variant)
    compiler.compile_together([MERGE, OTHER, MERGE], 0)
    assert sorted(variant.dtype for variant in compiled) == ["bfloat16", "float16"]
    assert compiler.is_cached(MERGE)
    assert not compiler.is_cached(OTHER)
    compiler.compile_together([MERGE, OTHER], 0)  # one of them alone is missing, and `load` compiles it
    assert len(compiled) == 2


def test_kernels_are_compiled_one_by_one_while_python_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(compiler, "compile_variant", lambda variant: (b"cubin", ""))
    compiler.compile_together([MERGE, OTHER], 0)
    assert [compiler.is_cached(variant) for variant in (MERGE, OTHER)] == [True, False]


def test_a_failed_load_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(variant: Variant, ordinal: int) -> Any:
        raise CompileError("no")

    monkeypatch.setattr(compiler, "_load", fails)
    with pytest.raises(CompileError):
        compiler.load(MERGE, 0)
    monkeypatch.setattr(compiler, "_load", lambda variant, ordinal: "kernel")
    assert compiler.load(MERGE, 0) == "kernel"
