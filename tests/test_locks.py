"""Children by fork: no lock of another thread stays locked in them."""

from __future__ import annotations

import os
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from workers import run_python

from cuflash import locks
from cuflash.runtime import disk_cache, file_lock

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="fork of POSIX")

# A child that hangs is killed by SIGALRM. Its exit code is 7 if its checks passed.
START = """
import os, signal, sys, threading, time
from cuflash import locks

def child_holds(question):
    child = os.fork()
    if child == 0:
        signal.alarm(600)
        try:
            os._exit(7 if question() else 8)
        finally:
            os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

def begin(work):
    begun = threading.Event()
    threading.Thread(target=work, args=(begun,), daemon=True).start()
    assert begun.wait(600)
"""


def run(code: str, **variables: str) -> None:
    run_python("-W", "ignore", "-c", START + textwrap.dedent(code), **variables)


def test_a_lock_that_another_thread_has_is_free_in_the_child() -> None:
    run("""
        lock, ended = locks.Lock(), []

        def hold(begun):
            with lock:
                begun.set()
                time.sleep(0.3)
                ended.append(True)

        def free():
            with lock:
                return bool(ended)

        begin(hold)
        assert child_holds(free)
    """)


def test_a_lock_that_the_forking_thread_has_is_its_own_in_the_child() -> None:
    run("""
        lock = locks.Lock(reentrant=True)

        def fork():
            with lock, locks.uninterrupted:
                return True

        with lock:
            assert child_holds(fork)
        assert child_holds(fork)
    """)


def test_a_fork_in_a_section_waits_for_no_other_thread() -> None:
    run("""
        leave = threading.Event()

        def stay(begun):
            with locks.uninterrupted:
                begun.set()
                leave.wait()

        begin(stay)
        started = time.monotonic()
        with locks.uninterrupted:
            assert child_holds(lambda: True)
        assert time.monotonic() - started < locks.MOST_SECONDS  # it did not wait in vain
        leave.set()
        assert child_holds(lambda: child_holds(lambda: True))
    """)


def test_children_of_a_busy_program_work() -> None:
    run("""
        import numpy as np
        import cuflash
        from cuflash import mods

        x = np.ones((1, 3, 1, 2), np.float32)

        def attend():
            number = float(np.random.default_rng().random())
            return cuflash.forward(x, x, x, score_mod=lambda score, *_: mods.tanh(score) * number).shape == x.shape

        def work(begun):
            while True:
                attend()
                begun.set()

        for _ in range(3):
            begin(work)
        assert all(child_holds(attend) for _ in range(20))
    """)


def test_a_child_forked_while_a_thread_first_imports_cupy_has_it(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text(
        "import sys, time\nsys.modules['__main__'].importing.set()\ntime.sleep(0.5)\nwhole = True\n", "utf-8"
    )
    run(
        """
        from cuflash.arrays.library import cupy_module

        def load(begun):
            global importing
            importing = begun
            cupy_module()

        begin(load)
        assert child_holds(lambda: cupy_module().whole)
        """,
        PYTHONPATH=os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))),
    )


def test_a_child_forked_while_a_thread_compiles_compiles_too(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    run(
        """
        import cuflash
        from cuflash.runtime.compiler import cubin, nvrtc_version

        try:
            nvrtc_version()
        except cuflash.UnsupportedError:
            sys.exit()
        from cupy.cuda import nvrtc

        shape, ended, compile_program = (1, 128, 1, 64), [], nvrtc.compileProgram
        launches = cuflash.plan(shape, shape, shape, dtype="float16", device="sm_80", op="backward").launches

        def slow(*arguments):
            begun.set()
            time.sleep(0.3)
            compile_program(*arguments)
            ended.append(True)

        def compile(event):
            global begun
            begun, nvrtc.compileProgram = event, slow
            cubin(launches[0].variant)

        def both():
            return bool(ended) and all(cubin(launch.variant) for launch in launches[:2])

        begin(compile)
        assert child_holds(both)
        """,
        CUFLASH_CACHE_DIR=str(tmp_path),
    )


def test_a_fork_waits_for_a_thread_that_waits_for_another_process(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a clock that only the thread advances, by all of its limits in turn."""
    cache_dir.mkdir(mode=0o700)
    now, num_checks, inside, ended, forked = [0.0], [0], threading.Event(), threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def look(seconds: float) -> None:
        num_checks[0] += 1
        time.sleep(seconds)

    def compile_kernel() -> None:
        with locks.uninterrupted:
            inside.set()
            with disk_cache.compiling("kernel.cubin"):
                assert now[0] >= disk_cache.WAIT_SECONDS
                sleep(0.99 * disk_cache.WAIT_SECONDS)  # as long as the slowest kernel takes
                enough = num_checks[0] + 2  # the fork reads the clock once more before the section ends
                while num_checks[0] < enough and not forked.is_set():
                    time.sleep(locks.PAUSE)
            ended.set()

    def clock() -> float:
        return now[0]

    monkeypatch.setattr(locks, "time", SimpleNamespace(monotonic=clock, sleep=look))
    monkeypatch.setattr(file_lock, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    thread = threading.Thread(target=compile_kernel, daemon=True)
    with file_lock.alone(cache_dir / "kernel.cubin.lock.tmp", 1):  # as if held by another process
        thread.start()
        inside.wait()
        locks._before_fork()
        has_ended = ended.is_set()
        locks._after_fork_in_parent()
        forked.set()
        thread.join()
    assert has_ended
    assert now[0] < disk_cache.STALE_SECONDS  # else another process could remove the lock meanwhile
