"""Tests in several processes: the number of threads of each for matrix products."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from workers import ROOT, output_of

VARIABLES = "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' /proc")
def test_each_process_begins_with_as_many_threads_as_it_may_have() -> None:
    """Runs another pytest with one process, where a plugin loads NumPy before any test file."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        variables = dict(each.split("=", 1) for each in Path("/proc/self/environ").read_text().split("\0") if each)
        assert {name: os.environ[name] for name in VARIABLES}.items() <= variables.items()
        return
    pytest.importorskip("xdist")
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "numpy", "-p", "no:cacheprovider", "-o", "addopts="]
    assert "1 passed" in output_of(*command, __file__, cwd=ROOT, env=environment, timeout=600)
