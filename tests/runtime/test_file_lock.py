"""Locks between processes: one at a time compiles a kernel, and a killed one releases its lock."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from workers import ROOT, run_python, run_threads

from cuflash.runtime import file_lock
from cuflash.runtime.file_lock import alone

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock of POSIX")

HOLDS = """
import sys, time
from pathlib import Path
from cuflash.runtime.file_lock import alone
with alone(Path(sys.argv[1]), 5):
    print("inside", flush=True)
    time.sleep(3600)
"""
COMPILES = """
import logging, sys
import cuflash
from cuflash.runtime.compiler import cubin
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
logging.getLogger("cuflash").setLevel(logging.DEBUG)
shape = (1, 128, 1, 64)
cubin(cuflash.plan(shape, shape, shape, dtype="float16", device="sm_80").launches[0].variant)
"""


def test_a_later_process_waits_and_the_file_is_removed(tmp_path: Path) -> None:
    path, inside, most = tmp_path / "lock", [0], [0]

    def work(index: int) -> None:
        with alone(path, 600):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.05)
            inside[0] -= 1

    with alone(path, 600):
        assert path.is_file()
    run_threads(work, 2)
    assert most == [1]
    assert not path.exists()


def test_a_killed_process_releases_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDS, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "inside\n"
        process.kill()
        process.wait(600)
    assert path.is_file()
    started = time.monotonic()
    with alone(path, 600):
        assert time.monotonic() - started < 600  # it did not wait in vain


def test_a_wait_ends_after_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(file_lock, "time", clock)
    with alone(tmp_path / "lock", 60):
        assert now == [100.0]
        with alone(tmp_path / "lock", 5):
            assert 105 <= now[0] < 105 + 2 * file_lock.PAUSE


def test_without_a_folder_there_is_no_wait(tmp_path: Path) -> None:
    with alone(tmp_path / "missing" / "lock", 60), alone(tmp_path / "missing" / "lock", 60):
        assert not list(tmp_path.iterdir())


def test_one_of_several_processes_compiles_a_kernel(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    messages: list[str] = []
    folder = {"CUFLASH_CACHE_DIR": str(tmp_path / "cache")}
    try:
        run_threads(lambda index: messages.append(run_python("-c", COMPILES, **folder)), 3)
    except AssertionError as error:
        if "need NVRTC" in str(error):
            pytest.skip("needs NVRTC")
        raise
    assert "".join(messages).count("compiled forward") == 1
    assert len(os.listdir(tmp_path / "cache")) == 1
