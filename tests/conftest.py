"""Fixtures and hooks of all tests: hypothesis' profile, skips, and a kernel cache for each test."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Failed asserts of helper modules show the compared values, as in test files.
pytest.register_assert_rewrite("hopper", "libraries", "refusals", "tensors", "workers")

from drivers import FakeDriver
from integers import without_check_of_integers
from libraries import memory_of_nan
from order import slow_first
from plans import for_any_gpu
from variants import sampled

from cuflash import reference
from cuflash.arrays.cupy import CupyLibrary
from cuflash.arrays.torch import TorchLibrary
from cuflash.errors import UnsupportedError
from cuflash.planning import device
from cuflash.runtime import call, compiler, disk_cache

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX's processes leave memory to the others

# Deadlines and the health check of drawing speed fail on a busy machine.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("cuflash", derandomize=True, max_examples=60, **UNTIMED)
settings.load_profile("cuflash")

LEFT_OUT = pytest.StashKey[str]()  # the summary line of a run without a GPU
COLLECTED = pytest.StashKey[set[Path]]()  # test files with tests, or skipped with a reason


def no_gpu_reason() -> str | None:
    """Returns the reason why tests marked `gpu` cannot run here; None if they can."""
    if find_spec("cupy") is None:
        return "needs a GPU: CuPy is not installed"
    if device.count() == 0:
        return "needs a GPU: CuPy finds none"
    try:
        device.query(0)
    except UnsupportedError as error:
        return f"needs a GPU of sm_80 or newer: {error}"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds options: the number of drawn problems, and the seed of a sample of exhaustive tests."""
    parser.addoption("--sample", metavar="SEED", help="exhaustive tests run on one in 16 variants, by this seed")
    parser.addoption("--drawn", type=int, default=0, metavar="N", help="problems that each test of drawn ones runs on")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Numbers the problems of tests marked `drawn`, and finds the variants of those marked `exhaustive`."""
    if marker := metafunc.definition.get_closest_marker("drawn"):
        num_drawn: int = metafunc.config.getoption("drawn")
        metafunc.parametrize("seed", range(num_drawn or marker.args[0]))
    if marker := metafunc.definition.get_closest_marker("exhaustive"):
        chosen = metafunc.config.getoption("markexpr") or ""
        left_out = pytest.mark.skip(reason="minutes long: run with -m exhaustive")
        # Only on request, as planning all variants takes as long as many tests.
        is_requested = "exhaustive" in chosen and "not exhaustive" not in chosen
        variants = marker.args[0]() if is_requested else [pytest.param(None, marks=left_out)]
        metafunc.parametrize("variant", sampled(variants, metafunc.config.getoption("sample")))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, Any]:
    """Notes each test file that has tests or is skipped."""
    report = yield
    if isinstance(collector, pytest.Module) and (report.skipped or report.result):
        collector.config.stash.setdefault(COLLECTED, set()).add(collector.path)
    return report


@pytest.fixture(scope="session")
def collected_files(pytestconfig: pytest.Config) -> set[Path]:
    """Returns the test files that this run collected, among them those whose framework is missing."""
    return pytestconfig.stash[COLLECTED]


@pytest.hookimpl(trylast=True)  # last, to order the tests that -k and -m chose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that need a missing GPU, except in a list of all tests; with -n, slow tests begin first."""
    of_gpu = [item for item in items if item.get_closest_marker("gpu") and not config.getoption("collectonly")]
    if of_gpu and (reason := no_gpu_reason()) is not None:
        config.hook.pytest_deselected(items=of_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        _note_left_out(config, f"{len(of_gpu)} tests were left out: {reason}. They hold every kernel against float64")
    if worker := getattr(config, "workerinput", None):
        items[:] = slow_first(items, _seconds, worker["workercount"])


def _seconds(item: pytest.Item) -> float:
    marker = item.get_closest_marker("slow")
    return float(marker.args[0]) if marker else 0.0


def _note_left_out(config: pytest.Config, line: str) -> None:
    config.stash[LEFT_OUT] = line
    if hasattr(config, "workeroutput"):  # a worker process: the main process writes the summary
        config.workeroutput["left_out"] = line


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes over the deselected tests of a worker process, which are equal for all."""
    if line := getattr(node, "workeroutput", {}).get("left_out"):
        _note_left_out(node.config, line)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the tests that did not run, a line for each reason, and those that need a GPU."""
    skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", ())]
    reasons = Counter(where[2].removeprefix("Skipped: ") for where in skipped if isinstance(where, tuple))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
    if line := config.stash.get(LEFT_OUT, None):
        terminalreporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Gives each of several processes one thread for matrix products, in NumPy and in PyTorch.

    Otherwise each starts a thread a core: with 16 processes on 16 cores, 57 % of the suite ran in 900 s. With one
    thread each, 99 % ran in 390 s. The variables are set before the processes start, because libraries read them when
    they are loaded, and a plugin may load NumPy before this file.
    """
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")


def forget() -> None:
    """Empties the in-process caches of kernels, as in a new process."""
    for value in (*vars(compiler).values(), *vars(disk_cache).values()):
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns the folder, not created yet, of a kernel cache that is empty on disk and in memory."""
    folder = tmp_path / "kernel-cache"
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(folder))
    monkeypatch.setattr(compiler, "_kernels", {})
    monkeypatch.setattr(compiler, "_locks", {})
    monkeypatch.setattr(compiler, "_unusable", set())
    monkeypatch.setattr(disk_cache, "_in_process", {})
    forget()
    yield folder
    forget()


@pytest.fixture(name="device", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def torch_device(request: pytest.FixtureRequest) -> str:
    """Returns the device of PyTorch's tensors: the CPU, and a GPU where there is one."""
    return str(request.param)


@pytest.fixture(scope="module", params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> Any:
    """Returns the array library of a test."""
    return importlib.import_module(request.param)


@pytest.fixture(scope="session")
def cupy() -> Any:
    """Returns CuPy, for tests marked `gpu`."""
    return pytest.importorskip("cupy")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Returns a stand-in for the driver that encodes tensor maps."""
    return FakeDriver.install(monkeypatch)


@pytest.fixture(params=[False, True], ids=["", "any_gpu"])
def any_gpu(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Returns True in a run on the kernels for any GPU, also on Hopper; False in a run on the GPU's fastest kernels."""
    with for_any_gpu() if request.param else nullcontext():
        yield request.param


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test when anything is computed or launched."""

    def reached(*args: Any, **keywords: Any) -> None:
        pytest.fail("bad input was computed with")

    for name in reference.RUN:
        monkeypatch.setitem(reference.RUN, name, reached)
    monkeypatch.setattr(call.LoadedPlan, "launch", reached)


@pytest.fixture
def unchecked_integers() -> Iterator[None]:
    """Leaves integers of the host unchecked, as on a device, to compute with any."""
    with without_check_of_integers():
        yield


@pytest.fixture(scope="module")
def new_memory_holds_nan() -> Iterator[None]:
    """Fills new GPU memory, of outputs and workspaces, with NaN, so that missing writes show."""
    with memory_of_nan(CupyLibrary, TorchLibrary):
        yield
